"""Files of a scheduler to and from a repository on the Hugging Face hub, or a server like it.

The server is ``HF_ENDPOINT``, the cache ``HF_HOME``, as for every program that uses the hub. A
token is handed to ``huggingface_hub`` and to nobody else: it is in no message and in no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)

from treegraft_core.errors import InputError, StageError

LONGEST = 160
LOG_IN = "give token=, or run hf auth login, with a token that may do this"
ANSWERS = {
    400: ("the hub refuses it", "mend what it says"),
    401: ("the hub does not take the token, or shows no such repository without one", LOG_IN),
    403: ("the token has no right to it", LOG_IN),
    404: ("no such folder here, and no such repository on the hub", "check the name, or " + LOG_IN),
    409: ("somebody else has changed the repository just now", "run it again"),
    413: ("too large for the hub", "upload a scheduler's own three files only"),
}
"""What an HTTP status says, and what to do."""


def download(
    repo_id: str,
    files: Sequence[str],
    most_bytes: int,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Path | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """Return a folder of the hub's cache that holds ``files``, all of one commit.

    Parameters
    ----------
    repo_id : str
        The repository.
    files : sequence of str
        Names in its top folder.
    most_bytes : int
        Of each; a larger one is refused before it is fetched.
    revision : str, optional
        A branch, a tag or a commit (default: ``main``).
    token : str or bool, optional
        Default: the one of ``hf auth login``; False sends none.
    cache_dir : path, optional
        Default: the hub's.
    local_files_only : bool
        Ask nobody: take what is in the cache.
    force_download : bool
        Fetch what is in the cache, too.

    Raises
    ------
    InputError
        If the name, the revision or the token is not right, or a file is missing or too large.
    StageError
        If the hub cannot be reached, does not work, or sends a part of a file.
    """
    server, commit, found = _server(), revision, list[Path]()
    with _one_line(repo_id, revision, token):
        for name in files:
            if not (local_files_only or constants.HF_HUB_OFFLINE):
                url = hf_hub_url(repo_id, name, revision=commit, endpoint=server)
                about = get_hf_file_metadata(url, token=token)
                if about.size is not None and about.size > most_bytes:
                    raise InputError(
                        f"scheduler={repo_id}: {name} has {about.size:,} bytes, more than the "
                        f"{most_bytes:,} of any scheduler; give another repository"
                    )
            path = hf_hub_download(
                repo_id,
                name,
                revision=commit,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                force_download=force_download,
                endpoint=server,
            )
            found.append(Path(path))
            commit = found[0].parent.name  # of the first, so that the others belong to it
    return found[0].parent


def upload(
    folder: Path,
    repo_id: str,
    files: Sequence[str],
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload a TreeGraft scheduler",
) -> str:
    """Upload ``files`` of a folder in one commit, into a repository that is made if need be.

    Parameters
    ----------
    folder : Path
        Holds them; what else it holds stays here.
    repo_id : str
        The repository.
    files : sequence of str
        Their names.
    private : bool, optional
        Of a new repository (default: as the organisation has it).
    token : str or bool, optional
        Default: the one of ``hf auth login``.
    revision : str, optional
        A branch that is there (default: ``main``).
    commit_message : str
        Its first line.

    Returns
    -------
    str
        The commit's URL.

    Raises
    ------
    InputError, StageError
        As for `download`.
    """
    api = HfApi(endpoint=_server(), token=token)
    with _one_line(repo_id, revision, token):
        repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
            allow_patterns=list(files),
        )
    return str(commit.commit_url)


def _server() -> str | None:
    # huggingface_hub reads it once, when it is imported.
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _one_line(repo_id: str, revision: str | None, token: str | bool | None) -> Iterator[None]:
    """Turn what the hub's client raises into one line that says what to do."""
    try:
        yield
    except (InputError, StageError):
        raise
    except HFValidationError as error:
        raise InputError(
            f"scheduler={repo_id}: no such folder, and not the name of a repository on the hub "
            f"({_line(error, token)}); give a folder, or a name such as you/your-scheduler"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(
            f"revision={revision}: the repository {repo_id} has no such branch, tag or commit; "
            "give one that it has"
        ) from error
    except LocalEntryNotFoundError as error:
        raise StageError(
            f"scheduler={repo_id}: not in the cache, and the hub is not asked or cannot be "
            "reached; run it again with the hub in reach"
        ) from error
    except EntryNotFoundError as error:
        raise InputError(
            f"scheduler={repo_id}: the repository is there but is no complete scheduler "
            f"({_line(error, token)}); give one that save_pretrained has written"
        ) from error
    except Exception as error:  # of the network, of files, of the client: they share no base class
        raise _answer(repo_id, error, token) from error


def _answer(repo_id: str, error: Exception, token: str | bool | None) -> Exception:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in ANSWERS:
        what, fix = ANSWERS[status]
        says = f": {_line(error, token)}" if status == 400 else ""
        return InputError(f"scheduler={repo_id}: {what} (HTTP {status}{says}); {fix}")
    why = f"HTTP {status}" if status else f"{type(error).__name__}: {_line(error, token)}"
    return StageError(
        f"scheduler={repo_id}: the hub cannot be reached or does not work ({why}); run it again"
    )


def _line(error: Exception, token: str | bool | None) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    for secret in (token, get_token()):
        if isinstance(secret, str) and secret:
            text = text.replace(secret, "***")
    return text[:LONGEST]

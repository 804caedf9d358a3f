"""The distilled scheduler as an artifact: a folder, a repository on the hub, or a literal.

A folder holds ``scheduler.safetensors`` (the numbers), ``scheduler.json`` (what they are and what
they were trained on) and, from `SchedulerArtifact.save_pretrained`, ``README.md`` (a model card).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from treegraft_core import hub
from treegraft_core.errors import InputError
from treegraft_core.files import atomic_path, write_text
from treegraft_core.literal import LITERAL_NAME, read_literal, write_literal
from treegraft_core.model_card import model_card
from treegraft_core.signals import SIGNALS, context_names
from treegraft_core.trained import Trained
from treegraft_core.tree import FloatArray

ARTIFACT_FORMAT = 2
FORMATS = (1, 2)
"""That are read. Format 1 has no checksum and does not say what the scheduler was trained on."""
TENSORS, HEADER, CARD = "scheduler.safetensors", "scheduler.json", "README.md"
MAX_DEPTH = 64
MAX_BYTES = 16 << 20
"""Of a scheduler file; the paper's literal has 80 kB. A larger one is something else."""
BAD_FILE = (
    OSError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    AttributeError,
)
"""What reading a damaged or hostile file may raise."""


@dataclass(frozen=True)
class SchedulerArtifact:
    """The classifier g_ψ: 17 → 64 → 32 → 1 with ReLU at D = 5 and six signals.

    margin = y_std · net((x − x_mean) / max(x_std, 1e-12)) + y_mean, in the unit of
    what it was distilled from (``metadata["margin_unit"]``; the paper's is tokens/s).

    Attributes
    ----------
    depth : int
        D.
    selected_signals : tuple of str
        The signals that follow the 6 + D context features in the input, in order.
    weights, biases : tuple of float64 arrays
        Layers, weight ``[out, in]``.
    x_mean, x_std : float64 array
        Input standardisation.
    y_mean, y_std : float
        Output standardisation, in the unit of the margin.
    metadata : dict
        Provenance; strings, numbers, lists and dicts only.
    trained : Trained
        Widths, drafters, costs and figures of the training, as far as they are known. Neither it
        nor ``metadata`` is in the paper's literal.

    Examples
    --------
    >>> artifact = SchedulerArtifact.from_pretrained("you/your-scheduler")  # doctest: +SKIP
    >>> decoder = TreeGraftDecoder(pair, DistilledScheduler(artifact), profile=profile)
    ... # doctest: +SKIP
    """

    depth: int
    selected_signals: tuple[str, ...]
    weights: tuple[FloatArray, ...]
    biases: tuple[FloatArray, ...]
    x_mean: FloatArray
    x_std: FloatArray
    y_mean: float
    y_std: float
    metadata: dict[str, Any] = field(default_factory=dict)
    trained: Trained = field(default_factory=Trained)

    def __post_init__(self) -> None:
        # One layout in memory, whatever they came from: margins are then the same to the last bit.
        for name in ("weights", "biases"):
            arrays = tuple(np.array(each, np.float64, order="C") for each in getattr(self, name))
            object.__setattr__(self, name, arrays)
        for name in ("x_mean", "x_std"):
            object.__setattr__(self, name, np.array(getattr(self, name), np.float64, order="C"))
        # Numbers from numpy would not come out as plain literals.
        object.__setattr__(self, "depth", int(self.depth))
        object.__setattr__(self, "y_mean", float(self.y_mean))
        object.__setattr__(self, "y_std", float(self.y_std))
        if not 1 <= self.depth <= MAX_DEPTH:
            raise InputError(f"scheduler: depth={self.depth}, must be from 1 to {MAX_DEPTH}")
        unknown = [name for name in self.selected_signals if name not in SIGNALS]
        if unknown:
            raise InputError(f"selected_signals={unknown[0]}: not one of {', '.join(SIGNALS)}")
        if len(set(self.selected_signals)) < len(self.selected_signals):
            twice = next(n for n in self.selected_signals if self.selected_signals.count(n) > 1)
            raise InputError(f"selected_signals={twice}: is there twice; name each signal once")
        n_inputs = len(context_names(self.depth)) + len(self.selected_signals)
        sizes = [n_inputs, *(len(b) for b in self.biases)]
        good = (
            self.x_mean.shape == self.x_std.shape == (n_inputs,)
            and len(self.weights) == len(self.biases) >= 1
            and all(b.ndim == 1 for b in self.biases)
            and sizes[-1] == 1
            and all(w.shape == (sizes[i + 1], sizes[i]) for i, w in enumerate(self.weights))
        )
        if not good:
            raise InputError(
                f"scheduler: layer shapes {[w.shape for w in self.weights]} do not take the "
                f"{n_inputs} inputs of depth {self.depth} and {len(self.selected_signals)} signals"
            )
        arrays = (*self.weights, *self.biases, self.x_mean, self.x_std)
        if not all(np.isfinite(a).all() for a in arrays) or not math.isfinite(
            self.y_mean + self.y_std
        ):
            raise InputError("scheduler: holds values that are not finite; distil it again")

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return (*context_names(self.depth), *self.selected_signals)

    @property
    def n_parameters(self) -> int:
        """Weights and biases, counted: 3,265 at D = 5 with six signals."""
        return sum(w.size for w in self.weights) + sum(b.size for b in self.biases)

    def margins(self, x: FloatArray) -> FloatArray:
        """Return the margins of inputs ``[n, inputs]``, shape ``[n]``."""
        h = (x - self.x_mean) / np.maximum(self.x_std, 1e-12)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            h = np.maximum(h @ weight.T + bias, 0.0)
        out: FloatArray = (h @ self.weights[-1].T + self.biases[-1])[:, 0]
        return self.y_std * out + self.y_mean

    def margin(self, x: FloatArray) -> float:
        """Return the margin of one input ``[inputs]``."""
        return float(self.margins(x[None])[0])

    def save(self, folder: Path | str) -> None:
        """Write ``scheduler.safetensors`` and ``scheduler.json`` into ``folder``."""
        folder = Path(folder)
        tensors = {"x_mean": self.x_mean, "x_std": self.x_std}
        tensors["y_mean"] = np.array([self.y_mean])
        tensors["y_std"] = np.array([self.y_std])
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            tensors[f"layers.{i}.weight"] = w
            tensors[f"layers.{i}.bias"] = b
        data = save({k: torch.from_numpy(v) for k, v in tensors.items()})
        header = {
            "format": ARTIFACT_FORMAT,
            "depth": self.depth,
            "selected_signals": list(self.selected_signals),
            "input_names": list(self.input_names),
            "parameters": self.n_parameters,
            "sha256": hashlib.sha256(data).hexdigest(),
            **self.trained.to_dict(),
            "metadata": self.metadata,
        }
        text = json.dumps(header, indent=2) + "\n"
        with atomic_path(folder / TENSORS) as temporary:
            temporary.write_bytes(data)
        write_text(folder / HEADER, text)

    def save_pretrained(
        self,
        folder: Path | str,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> str | None:
        """Write a folder with a model card, and upload it if asked to.

        Parameters
        ----------
        folder : path
            Made if it is not there. A model card that is there is written anew.
        push_to_hub : bool
            Upload it, too.
        repo_id : str, optional
            The repository, such as ``you/your-scheduler`` (default: the folder's name).
        **options
            Of :meth:`push_to_hub`.

        Returns
        -------
        str or None
            The commit's URL, if it was uploaded.
        """
        folder = Path(folder)
        name = repo_id or folder.resolve().name
        if options and not push_to_hub:
            raise InputError(
                f"{next(iter(options))}: is of an upload only; give push_to_hub=True with it"
            )
        self.save(folder)
        write_text(folder / CARD, model_card(self, name))
        return self.push_to_hub(name, **options) if push_to_hub else None

    # huggingface_hub's ModelHubMixin is not used. It would write the files one by one in place,
    # remove a config.json that it did not write, ask the hub for a config.json that is not there,
    # keep an old card, and set attributes on what it loads, which is frozen here. Its errors are of
    # many lines. What is used is what it is made of: create_repo, upload_folder, hf_hub_download.

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload a TreeGraft scheduler",
    ) -> str:
        """Upload the folder that :meth:`save_pretrained` writes; return the commit's URL.

        Parameters
        ----------
        repo_id : str
            Such as ``you/your-scheduler``; made if it is not there.
        private : bool, optional
            Of a new repository (default: as the organisation has it).
        token : str or bool, optional
            Default: the one of ``hf auth login``. It is neither shown nor saved.
        revision : str, optional
            A branch that is there (default: ``main``).
        commit_message : str
            Its first line.

        Raises
        ------
        InputError
            If the repository's name or the token is not right.
        StageError
            If the hub cannot be reached or does not work.
        """
        with TemporaryDirectory(prefix="treegraft-") as folder:
            self.save_pretrained(folder, repo_id=repo_id)
            files = (TENSORS, HEADER, CARD)
            return hub.upload(
                Path(folder), repo_id, files, private, token, revision, commit_message
            )

    @classmethod
    def from_pretrained(
        cls,
        folder_or_repo_id: Path | str,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: Path | str | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> SchedulerArtifact:
        """Load a scheduler from a folder, the paper's literal, or a repository on the hub.

        Nothing that is loaded is executed, and nothing is unpickled.

        Parameters
        ----------
        folder_or_repo_id : path or str
            A folder, a ``.py`` file, or such as ``you/your-scheduler``.
        revision : str, optional
            A branch, a tag or a commit of the repository.
        token, cache_dir, local_files_only, force_download
            Of the hub: see :func:`treegraft_core.hub.download`.

        Raises
        ------
        InputError
            If it is not there, damaged, or not a scheduler.
        StageError
            If the hub cannot be reached or does not work.
        """
        place = Path(folder_or_repo_id)
        if place.exists() or place.suffix == ".py":
            if revision is not None:
                raise InputError(
                    f"revision={revision}: {folder_or_repo_id} is not a repository on the hub, and "
                    "has no revisions; leave it out"
                )
            return load_scheduler(place)
        found = hub.download(
            str(folder_or_repo_id),
            (HEADER, TENSORS),
            MAX_BYTES,
            revision,
            token,
            cache_dir,
            local_files_only,
            force_download,
        )
        return load_scheduler(found)

    def literal(self) -> dict[str, Any]:
        """Return the paper runtime's ``SCHEDULER_ARTIFACTS`` as plain lists and numbers.

        It has depth and signals beside the numbers: `metadata` and `trained` have no place in it.
        """
        return {
            "metadata": {"depth": self.depth, "selected_signals": list(self.selected_signals)},
            "scheduler": {
                "layers": [
                    {"weight": w.tolist(), "bias": b.tolist()}
                    for w, b in zip(self.weights, self.biases, strict=True)
                ],
                "x_mean": self.x_mean.tolist(),
                "x_std": self.x_std.tolist(),
                "y_mean": self.y_mean,
                "y_std": self.y_std,
            },
        }

    def save_literal(self, path: Path | str) -> None:
        """Write the Python module that the paper's runtime loads: one literal, nothing else."""
        write_literal(path, self.literal())


def load_scheduler(path: Path | str) -> SchedulerArtifact:
    """Load a scheduler: a folder written by ``stage=export`` or a ``.py`` literal.

    Nothing in the file is executed.

    Raises
    ------
    InputError
        If the file is missing, damaged or not a scheduler.
    """
    path = Path(path)
    if path.suffix == ".py":
        return _load_literal(path)
    try:
        header = json.loads(_bytes(path / HEADER).decode("utf-8"))
        if header["format"] not in FORMATS:
            raise ValueError(f"format {header['format']}, this version reads {FORMATS[-1]}")
        data = _bytes(path / TENSORS)
        if header["format"] > 1 and header["sha256"] != hashlib.sha256(data).hexdigest():
            raise ValueError(f"{TENSORS} is not the file that {HEADER} was written with")
        t = {name: tensor.double().numpy() for name, tensor in load(data).items()}
        n_layers = sum(name.endswith(".weight") for name in t)
        artifact = SchedulerArtifact(
            depth=_count(header["depth"]),
            selected_signals=tuple(header["selected_signals"]),
            weights=tuple(t[f"layers.{i}.weight"] for i in range(n_layers)),
            biases=tuple(t[f"layers.{i}.bias"] for i in range(n_layers)),
            x_mean=t["x_mean"],
            x_std=t["x_std"],
            y_mean=float(t["y_mean"][0]),
            y_std=float(t["y_std"][0]),
            metadata=dict(header.get("metadata", {})),
            trained=Trained.from_dict(header if header["format"] > 1 else {}),
        )
        _check_inputs(artifact, header["input_names"])
        return artifact
    except InputError:
        raise
    except (*BAD_FILE, SafetensorError) as error:
        raise InputError(
            f"scheduler={path}: not a complete scheduler folder ({_reason(error)}); "
            "run stage=export"
        ) from error


def _check_inputs(artifact: SchedulerArtifact, names: Any) -> None:
    # The columns of the first layer are in this order, and nothing else says so.
    for i, ours in enumerate(artifact.input_names):
        theirs = names[i] if i < len(names) else "nothing"
        if theirs != ours:
            raise ValueError(
                f"input_names[{i}]={str(theirs)[:40]} where depth and selected_signals say "
                f"{ours}: signals in another order, or not those of this version"
            )
    if len(names) > len(artifact.input_names):
        raise ValueError(f"input_names has {len(names)}, not {len(artifact.input_names)}")


def _load_literal(path: Path) -> SchedulerArtifact:
    try:
        value = read_literal(_bytes(path).decode("utf-8"))
        layers = value["scheduler"]["layers"]
        return SchedulerArtifact(
            depth=_count(value["metadata"]["depth"]),
            selected_signals=tuple(value["metadata"]["selected_signals"]),
            weights=tuple(np.array(layer["weight"], np.float64) for layer in layers),
            biases=tuple(np.array(layer["bias"], np.float64) for layer in layers),
            x_mean=np.array(value["scheduler"]["x_mean"], np.float64),
            x_std=np.array(value["scheduler"]["x_std"], np.float64),
            y_mean=_number(value["scheduler"]["y_mean"]),
            y_std=_number(value["scheduler"]["y_std"]),
        )
    except InputError:
        raise
    except (*BAD_FILE, SyntaxError) as error:
        raise InputError(
            f"scheduler={path}: holds no literal {LITERAL_NAME} ({_reason(error)}); "
            "run stage=export"
        ) from error


def _number(value: float | Sequence[float]) -> float:
    return float(np.asarray(value, np.float64).reshape(()))


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"depth {str(value)[:40]} is not a whole number")
    return int(value)


def _bytes(path: Path) -> bytes:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_BYTES >> 20} MiB")
    return path.read_bytes()


def _reason(error: BaseException) -> str:
    # ast names the object that it met by its address.
    return str(error).split(": <ast.")[0][:160] or type(error).__name__

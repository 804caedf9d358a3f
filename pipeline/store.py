"""Where a dataset's files are: a local or shared folder, or any ``fsspec`` URL such as s3://.

A file appears under its name only when it is complete. Names are relative to the dataset, with
slashes; nothing outside it can be named.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import io
import json
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from pipeline.logs import event
from treegraft_core import InputError
from treegraft_core.errors import StageError
from treegraft_core.files import to_disk

CHUNK = 1 << 20
CONNECT_S, READ_S, ATTEMPTS = 5, 30, 3
"""Of a call to an S3 server: to connect, to answer, and how often its client tries."""
PATIENCE_S, PAUSE_S = 60.0, 8.0
"""How long a remote store is tried that does not answer, and the longest pause between."""
BEAT_S = 5.0
STALE_BEATS = 6
"""A lock object whose holder has not changed it for so many beats is a dead run's."""


class DatasetBusyError(InputError):
    """Another run holds the dataset."""


class NoFileError(OSError):
    """What is there under a file's name is a link, a folder, a pipe or a device."""


def no_file(path: Path) -> NoFileError:
    """Return the error for a name under which there is no regular file."""
    return NoFileError(errno.EINVAL, "not a regular file", str(path))


def is_regular(path: Path) -> bool:
    """Tell whether there is a regular file, not a link to one; False if it has just gone."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def check_name(name: str) -> str:
    """Return ``name``; raise `InputError` if it is not that of a file inside the dataset."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or "\\" in name:
        raise InputError(f"file={name!r}: not the name of a file inside the dataset")
    return name


def hidden(name: str) -> bool:
    """Tell whether a name is a temporary file's: readers see none of those."""
    return PurePosixPath(name).name.startswith(".")


def temporary_name(name: str, run: str = "") -> str:
    """Return a new hidden name beside ``name``, in which the run can be told."""
    path = PurePosixPath(name)
    return str(path.with_name(f".{path.name}.{run}-{uuid.uuid4().hex[:12]}.tmp"))


def owner() -> dict[str, Any]:
    """Return who this process is, for the message that another run prints."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "run": uuid.uuid4().hex}


class Store(Protocol):
    """The files of one dataset."""

    url: str

    def read(self, name: str) -> bytes:
        """Return a file's content; raise `FileNotFoundError` if it is not there."""

    def open(self, name: str) -> BinaryIO:
        """Open a file to read."""

    def put(self, temporary: str, data: bytes) -> None:
        """Write a temporary file; if it cannot be written whole, nothing is left of it."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file: complete, on the disk, and only then under its name."""

    def append(self, name: str, line: bytes, new: bool = False) -> None:
        """Add a line to a file that this process alone writes; it is on the disk on return.

        Only a ``new`` file is made; another has to be there.
        """

    def commit(self, temporary: str, name: str) -> None:
        """Give a complete temporary file its name."""

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""

    def names(self) -> list[str]:
        """Return the names of all files, sorted, temporary ones included."""

    def digest(self, name: str) -> tuple[int, str]:
        """Return a file's size in bytes and its SHA-256, hexadecimal."""

    @contextmanager
    def lock(self, key: str, shared: bool = False) -> Iterator[None]:
        """Hold the dataset's lock ``key``; raise `DatasetBusyError` if another run does."""
        yield

    def held(self, key: str) -> str | None:
        """Return who holds the lock ``key``, in words; None if nobody does."""

    def locks(self) -> list[str]:
        """Return the keys of all locks that somebody holds or has held alone."""


def open_store(url: str | Path) -> Store:
    """Return the store at a path or URL."""
    text = str(url)
    if text.startswith("file://"):
        return LocalStore(Path(text.removeprefix("file://")))
    return RemoteStore(text) if is_url(text) else LocalStore(Path(text))


def is_url(text: str) -> bool:
    """Tell whether a place is a URL, not a path."""
    return "://" in text


def below(url: str, name: str) -> str:
    """Return the place ``name`` below a path or URL."""
    return f"{url.rstrip('/')}/{name}" if is_url(url) else str(Path(url) / name)


def digest_of(handle: BinaryIO) -> tuple[int, str]:
    """Return size in bytes and SHA-256 of what is left to read."""
    found, size = hashlib.sha256(), 0
    while chunk := handle.read(CHUNK):
        found.update(chunk)
        size += len(chunk)
    return size, found.hexdigest()


class LocalStore:
    """A folder on a local or shared disk."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.url = str(folder)
        self.locked: dict[Path, int] = {}

    def path(self, name: str) -> Path:
        """Return a file's path; its folders must be real ones, not links out of the dataset."""
        path = self.folder / check_name(name)
        root = self.folder.resolve()
        if not path.parent.resolve().is_relative_to(root):
            raise InputError(f"file={name!r}: a link leads out of the dataset {self.folder}")
        return path

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        with self.open(name) as handle:
            return handle.read()

    def open(self, name: str) -> BinaryIO:
        """Open a file to read: a regular one, not a link, and without waiting for a pipe."""
        path = self.path(name)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise no_file(path) from error
            raise
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise no_file(path)
        return os.fdopen(handle, "rb")

    def put(self, temporary: str, data: bytes) -> None:
        """Write a temporary file."""
        path = self.path(temporary)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.write_bytes(data)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def write(self, name: str, data: bytes) -> None:
        """Write a file under a temporary name and rename it."""
        temporary = temporary_name(name)
        self.put(temporary, data)
        try:
            self.commit(temporary, name)
        except BaseException:
            self.remove(temporary)
            raise

    def append(self, name: str, line: bytes, new: bool = False) -> None:
        """Add a line; if it cannot be added whole, the file is as before."""
        self._check_locks()
        path = self.path(name)
        if new:
            path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if new else 0)
        with os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0) as handle:
            before = handle.seek(0, os.SEEK_END)
            try:
                written = handle.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                os.fsync(handle.fileno())
            except OSError as error:
                handle.truncate(before)
                raise OSError(error.errno, error.strerror, str(path)) from error
            except BaseException:
                handle.truncate(before)
                raise

    def commit(self, temporary: str, name: str) -> None:
        """Rename a file; its content is on the disk before, its name after."""
        old, new = self.path(temporary), self.path(name)
        to_disk(old)
        if new.is_dir() and not new.is_symlink():
            # Somebody's: it is in the way, but not ours to remove.
            os.replace(new, new.with_name(f"{new.name}.aside-{uuid.uuid4().hex[:8]}"))
        os.replace(old, new)
        to_disk(new.parent)

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        self.path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the names of all regular files; links are not followed, nor counted."""
        found = []
        for folder, _, files in os.walk(self.folder):
            place = Path(folder).relative_to(self.folder)
            for file in files:
                if is_regular(Path(folder) / file):
                    found.append(str(PurePosixPath(place) / file))
        return sorted(found)

    def digest(self, name: str) -> tuple[int, str]:
        """Return size and SHA-256."""
        with self.open(name) as handle:
            return digest_of(handle)

    def _lock_path(self, key: str) -> Path:
        # Beside the dataset, hidden: it stays where it is when the dataset is moved aside.
        return self.folder.parent / f".{self.folder.name}.{key}"

    @contextmanager
    def lock(self, key: str, shared: bool = False) -> Iterator[None]:
        """Hold a lock of the operating system: it ends with the process, however that ends."""
        path = self._lock_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy(self.url, _who(path)) from None
            if not shared:
                handle.truncate(0)
                handle.write(json.dumps(owner()))
                handle.flush()
            self.locked[path] = os.fstat(handle.fileno()).st_ino
            try:
                yield
            finally:
                del self.locked[path]

    def _check_locks(self) -> None:
        # A lock on a file that has been removed keeps nobody out.
        for path, number in self.locked.items():
            if not path.is_file() or path.stat().st_ino != number:
                raise DatasetBusyError(
                    f"trajectories={self.url}: its lock {path} has been removed while this run "
                    "collected; leave it where it is, the same command goes on"
                )

    def held(self, key: str) -> str | None:
        """Return who holds a lock or a shard's part of it; nothing is written or kept waiting."""
        first = self._lock_path(key)
        for path in (first, *sorted(first.parent.glob(f"{glob.escape(first.name)}-*"))):
            if path.is_file():
                with path.open("r", encoding="utf-8") as handle:
                    try:
                        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return _who(path)
        return None

    def locks(self) -> list[str]:
        """Return the keys of all locks."""
        prefix = f".{self.folder.name}."
        found = self.folder.parent.glob(f"{glob.escape(prefix)}*")
        return sorted(path.name.removeprefix(prefix) for path in found)


def _who(path: Path) -> str:
    try:
        return describe(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError):
        return "another run"


def describe(holder: Any) -> str:
    """Return who holds a lock, in words."""
    if not isinstance(holder, dict) or not {"pid", "host"} <= set(holder):
        return "another run"
    return f"process {holder['pid']} on {holder['host']}"


def busy(url: str, who: str) -> DatasetBusyError:
    """Return the error of a run that would be the second on a dataset."""
    return DatasetBusyError(
        f"trajectories={url}: {who} is collecting into it; wait for it "
        "(python -m pipeline.run stage=status shows it) or stop it, or give collect.wait=true"
    )


class StorageError(StageError, OSError):
    """A store that cannot be read or written now: one line that says why and what to do."""

    def __init__(self, url: str, reason: str):
        fix = "mend that, the same command goes on"
        super().__init__(f"trajectories={url}: cannot be read or written ({reason}); {fix}")

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def network(url: str) -> Iterator[None]:
    """Turn whatever a remote file system raises into a `StorageError`; a missing object stays."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, StageError, InputError):
        raise
    except Exception as error:  # every client has errors of its own
        lines = str(error).splitlines() or [""]
        raise StorageError(url, f"{type(error).__name__}: {lines[0][:200]}") from error


def client_options(url: str) -> dict[str, Any]:
    """Return options of a URL's file system; those of S3 keep a call from hanging.

    Where the server is, its region and the keys come from the environment (AWS_ENDPOINT_URL,
    AWS_ACCESS_KEY_ID and so on), as every S3 client reads them.
    """
    # Listings are not kept: other processes write here.
    options: dict[str, Any] = {"use_listings_cache": False}
    if url.partition("://")[0] in ("s3", "s3a"):
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_S,
            "read_timeout": READ_S,
            "retries": {"mode": "standard", "max_attempts": ATTEMPTS},
        }
    return options


class RemoteStore:
    """Objects below an ``fsspec`` URL. Credentials come from the environment, never from here.

    Raises
    ------
    InputError
        If the URL has credentials in it, or nothing that is installed can open it.
    """

    def __init__(self, url: str):
        import fsspec

        self.url = url.rstrip("/")
        if "@" in self.url.partition("://")[2].partition("/")[0]:
            raise InputError(
                "paths.trajectories: has a user or a key in its URL; give them in the environment, "
                "such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url, **client_options(self.url))
        except (ImportError, ValueError) as error:
            raise InputError(
                f"paths.trajectories={url}: no file system for it ({error}); for s3:// install "
                "treegraft[s3]"
            ) from error
        self.fs.retries = 1  # of s3fs: patience is this class's, and a client's tries multiply
        self.written: dict[str, bytes] = {}
        self.taken: str | None = None
        self.gone = False

    def place(self, name: str) -> str:
        """Return an object's full name."""
        return f"{self.root}/{check_name(name)}"

    def call(self, method: str, *places: Any, **options: Any) -> Any:
        """Call the file system; while it does not answer, again for `PATIENCE_S`.

        Once that was in vain, the next calls are tried once: a run ends without delay.
        """
        end, pause, told = time.monotonic() + PATIENCE_S, 0.5, False
        while True:
            try:
                with network(self.url):
                    found = getattr(self.fs, method)(*places, **options)
            except StorageError as error:
                lasting = isinstance(error.__cause__, PermissionError) or (
                    "Credentials" in type(error.__cause__).__name__
                )
                if lasting or self.gone or time.monotonic() > end:
                    self.gone = True
                    raise
                if not told:
                    print(f"waiting up to {PATIENCE_S:.0f} s: {error}", flush=True)
                    told = True
                time.sleep(pause)
                pause = min(2 * pause, PAUSE_S)
            else:
                self.gone = False
                return found

    def read(self, name: str) -> bytes:
        """Return an object's content."""
        data: bytes = self.call("cat_file", self.place(name))
        return data

    def open(self, name: str) -> BinaryIO:
        """Open an object to read; it is fetched whole, a unit's rows at the most."""
        return io.BytesIO(self.read(name))

    def put(self, temporary: str, data: bytes, mode: str = "overwrite") -> None:
        """Put a temporary object."""
        place = self.place(temporary)
        try:
            self.call("pipe_file", place, data, mode=mode)
        except FileNotFoundError as error:
            raise InputError(
                f"paths.trajectories={self.url}: no such bucket or folder; create it first"
            ) from error

    def write(self, name: str, data: bytes) -> None:
        """Put an object: it appears whole or not at all."""
        self.put(name, data)

    def append(self, name: str, line: bytes, new: bool = False) -> None:
        """Put the object with a line more.

        Raises
        ------
        DatasetBusyError
            If another run has taken this one's lock, because it looked dead to it.
        """
        if self.taken is not None:
            raise busy(self.url, self.taken)
        if name not in self.written:
            try:
                self.written[name] = self.read(name)
            except FileNotFoundError:
                self.written[name] = b""
        data = self.written[name] + line
        self.write(name, data)
        self.written[name] = data

    def commit(self, temporary: str, name: str) -> None:
        """Copy an object to its name on the server and remove the temporary one."""
        self.call("cp_file", self.place(temporary), self.place(name))
        self.remove(temporary)

    def remove(self, name: str) -> None:
        """Remove an object if it is there."""
        try:
            self.call("rm_file", self.place(name))
        except FileNotFoundError:
            return

    def names(self) -> list[str]:
        """Return all names."""
        return self._below("find")

    def _below(self, method: str) -> list[str]:
        try:
            self.fs.invalidate_cache()
            found = self.call(method, self.root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name)[len(self.root) + 1 :] for name in found)

    def digest(self, name: str) -> tuple[int, str]:
        """Return size and SHA-256."""
        return digest_of(self.open(name))

    @contextmanager
    def lock(self, key: str, shared: bool = False) -> Iterator[None]:
        """Hold a lock object that a thread keeps changing; one that stands still is a dead run's.

        Time is measured by this process's own monotonic clock alone. Each puts its object before
        it looks for those of others, so that of two that come at once one sees the other at least.
        """
        me = owner()
        alone = _lock_name(key)
        if shared:
            mine, others = f"{_shared_prefix(key)}{me['run']}.json", [alone]
        else:
            self._wait_until_free(alone)
            mine, others = alone, []
        with self._beating(mine, me):
            for name in others or self._shared(key):
                self._wait_until_free(name)
            yield

    @contextmanager
    def _beating(self, name: str, me: dict[str, Any]) -> Iterator[None]:
        try:
            self.put(name, _beat(me, 0), mode="create")
        except FileExistsError:
            event("lock_there", lock=name)  # perhaps this very one, put by an attempt that failed
        holder = self._holder(name)
        if holder.get("run") != me["run"]:
            raise busy(self.url, describe(holder))
        done = threading.Event()

        def beat() -> None:
            count = 0
            while self.taken is None and not done.wait(BEAT_S):
                count += 1
                try:
                    holder = self._holder(name)
                    if holder.get("run") != me["run"]:
                        self.taken = describe(holder)
                    else:
                        self.write(name, _beat(me, count))
                except Exception as error:  # any fault of the network: the next beat tries again
                    event("lock_not_renewed", "warning", reason=str(error))

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._release(name, me)

    def _release(self, name: str, me: dict[str, Any]) -> None:
        try:
            if self._holder(name).get("run") == me["run"]:
                self.remove(name)
        except StorageError as error:  # why the run ends anyway; the next one waits for the lock
            event("lock_not_removed", "warning", reason=str(error))

    def _holder(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self.read(name))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _wait_until_free(self, name: str) -> None:
        # A live holder changes its object every beat; a dead one never again.
        first = self._holder(name)
        if first:
            most = BEAT_S * STALE_BEATS
            print(f"{describe(first)} has a lock there; up to {most:.0f} s to see if it is alive")
        holder = self._moving(name, first, STALE_BEATS)
        if holder is not None:
            raise busy(self.url, describe(holder))
        if first:
            self.remove(name)

    def _moving(self, name: str, first: dict[str, Any], beats: int) -> dict[str, Any] | None:
        end = time.monotonic() + BEAT_S * beats
        now = first
        while now and time.monotonic() < end:
            time.sleep(BEAT_S / 5)
            now = self._holder(name)
            if now and now != first:
                return now
        return None

    def _shared(self, key: str) -> list[str]:
        return [name for name in self._below("ls") if name.startswith(_shared_prefix(key))]

    def held(self, key: str) -> str | None:
        """Return who holds a lock; whether an object's run is alive shows within two beats."""
        for name in (_lock_name(key), *self._shared(key)):
            holder = self._moving(name, self._holder(name), 2)
            if holder is not None:
                return describe(holder)
        return None

    def locks(self) -> list[str]:
        """Return the keys of all lock objects."""
        names = [n for n in self._below("ls") if n.startswith(".lock-") and n.endswith(".json")]
        return [n.removeprefix(".lock-").removesuffix(".json") for n in names]


def _lock_name(key: str) -> str:
    return f".lock-{key}.json"


def _shared_prefix(key: str) -> str:
    return f".lock-{key}.shared-"


def _beat(me: dict[str, Any], count: int) -> bytes:
    return json.dumps({**me, "beat": count}).encode()

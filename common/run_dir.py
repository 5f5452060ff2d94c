"""The run directory of one engine: private, locked while its owner lives; what a dead owner has left is removed."""

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from depthbatch.common.errors import ConfigError
from depthbatch.common.transport import SCHEDULER_ENDPOINT, endpoint


class RunDir:
    """A 0700 directory BASE/<pid>-<n> for the sockets and logs of one engine.

    Its owner holds a lock on it while it lives; a directory whose lock is free belonged to a process that is dead,
    and the next engine that starts removes it. ``base`` defaults to $XDG_RUNTIME_DIR/depthbatch or
    /tmp/depthbatch-<uid>.
    """

    _count = itertools.count()

    def __init__(self, base: str | Path | None = None) -> None:
        base = _safe_base(Path(base) if base is not None else _default_base())
        self.path = base / f"{os.getpid()}-{next(self._count)}"
        endpoint(self.path, SCHEDULER_ENDPOINT)  # too long: say so before anything starts
        gate = os.open(base / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)  # nobody cleans between our mkdir and our lock
            self.stale_removed = _remove_stale(base)
            self.path.mkdir(mode=0o700)
            self._lock: int | None = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(gate)

    def endpoint(self, name: str) -> str:
        return endpoint(self.path, name)

    def remove(self) -> None:
        """Deletes the directory; doing it twice is fine."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


class FixedRunDir:
    """A run directory at a place that the user names, made if it is not there, with mode 0700. It outlives its engines;
    what one leaves in it does not.

    Raises ConfigError when others could write into it, when it holds anything else, or while another engine lives in it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        endpoint(self.path, SCHEDULER_ENDPOINT)
        _safe_base(self.path)
        if not (self.path / ".lock").exists() and any(self.path.iterdir()):
            raise ConfigError(f"run directory {self.path} holds files of something else; give one that is empty")
        self._lock: int | None = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"run directory {self.path} is in use by another engine") from None
        self._empty()

    def remove(self) -> None:
        """Empties the directory; doing it twice is fine."""
        if self._lock is not None:
            self._empty()
            os.close(self._lock)
            self._lock = None

    def _empty(self) -> None:
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != ".lock":
                path.unlink(missing_ok=True)


def open_run_dir(path: str | None) -> RunDir | FixedRunDir:
    """The directory of an engine: a new one, or the one that the option names. Raises ConfigError."""
    return RunDir() if path is None else FixedRunDir(path)


def note_end(run_dir: str | Path, name: str) -> None:
    """This process, the program ``name``, ends because it was asked to: whoever starts it again need not count a fault."""
    with contextlib.suppress(OSError):  # the directory may be gone
        (Path(run_dir) / f"{name}.ended").write_text(str(os.getpid()))


def read_end(run_dir: str | Path, name: str) -> int:
    """Pid of the last process that has noted its end; 0 where none has."""
    try:
        return int((Path(run_dir) / f"{name}.ended").read_text())
    except (OSError, ValueError):
        return 0


def _default_base() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "depthbatch"
    return Path(tempfile.gettempdir()) / f"depthbatch-{os.getuid()}"


def _safe_base(base: Path) -> Path:
    """Creates the base directory; refuses one that others could put sockets into."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make run directory {base}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"run directory {base} is not a directory that only this user can write")
    return base


def _remove_stale(base: Path) -> int:
    """Removes the directories below ``base`` whose owner is dead; returns how many."""
    removed = 0
    for path in base.iterdir():
        if not path.is_dir():
            continue
        try:
            lock = os.open(path / ".lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
        finally:
            os.close(lock)
    return removed


def write_whole(path: Path, data: bytes) -> None:
    """A reader never sees half of it, whoever else writes it; only this user sees any of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_bytes(data)
    temporary.replace(path)

"""Locks between processes: one trains a run or puts another in its place, and one works at a job of a queue.

Both are an ``flock``, which the system gives back when its holder dies, whichever way. That of a run is on its
``config.yaml``, which is there from the run's first moment and is never written again: it leaves nothing behind and
stays with a folder that is renamed. A queue has a file for each of its locks; one that was not given back stays behind
and holds nothing.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from recbft.errors import UserError
from recbft.system.files import explained

try:
    import fcntl
except ModuleNotFoundError:
    raise UserError("recbft trains, and opens runs, on Linux and macOS alone; on Windows run it inside WSL") from None


@contextlib.contextmanager
def locked(config_file: Path, *, alone: bool = True) -> Iterator[None]:
    """Keep other processes from a run; whoever only reads it asks for no lock.

    Args:
        alone: as who changes it must be; who copies it may share it with others who do.

    Raises:
        UserError: another process has the lock, or has removed the run or put another in its place.
    """
    run = config_file.parent
    try:
        file = _opened(config_file)
    except FileNotFoundError:
        raise UserError(_gone(run)) from None
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run} is being trained by another process; wait until it has ended, or end it") from None
        except OSError as error:  # a file system without locks
            reason = (error.strerror or str(error)).lower()
            warnings.warn(f"{run} cannot be locked ({reason}); see that no other process trains it", stacklevel=3)
        if not _stands_there(file, config_file):
            raise UserError(_gone(run))
        yield


class Lock:
    """A queue's lock that this process holds."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file

    def release(self) -> None:
        """Give the lock back; once is enough."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def acquire(folder: Path, name: str) -> Lock | None:
    """Take the lock ``name`` of a queue; None where another holds it."""
    path = _file(folder, name)
    with explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            file = open(path, "ab")  # noqa: SIM115  the lock is held as long as this file is open
            if not _take(file, fcntl.LOCK_EX):
                file.close()
                return None
            if _stands_there(file, path):
                return Lock(path, file)
            file.close()  # its holder removed the file before it let go of the lock


def is_held(folder: Path, name: str) -> bool:
    """Whether a living process holds a lock."""
    try:
        with open(_file(folder, name), "rb") as file:
            return not _take(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def clear(folder: Path, name: str) -> None:
    """Remove the file of a lock that nobody holds, as a killed process leaves it."""
    if _file(folder, name).exists() and (lock := acquire(folder, name)) is not None:
        lock.release()


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def _take(file: BinaryIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: the run's own lock, which training takes, warns of it
        pass
    return True


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb+")  # NFS locks a file for one process alone only if it may write
    except OSError:  # it may only be read, or its file system
        return open(path, "rb")


def _stands_there(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _gone(run: Path) -> str:
    return f"{run} was removed or replaced by another process just now; see what stands there and start again"

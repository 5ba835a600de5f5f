"""Who is training which run: a lock file per run, held by the process that trains it.

A lock is an ``flock``, as that of a run (``runs.lock``): the system gives it back when its holder dies, whichever way.
The file of a lock that was not given back stays behind and holds nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from recbft.system.files import explained


class Lock:
    """A lock that this process holds."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file

    def release(self) -> None:
        """Give the lock back; once is enough."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def acquire(folder: Path, name: str) -> Lock | None:
    """Take the lock ``name``; None where another holds it."""
    path = _file(folder, name)
    with explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            file = open(path, "ab")  # noqa: SIM115  the lock is held as long as this file is open
            if not _take(file, fcntl.LOCK_EX):
                file.close()
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
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

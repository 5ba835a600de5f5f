"""One process at a time trains a run, or puts another in its place.

The lock is an ``flock`` on the run's ``config.yaml``, which is there from the run's first moment and is never written
again: it leaves nothing behind, stays with a folder that is renamed, and the system gives it back when its holder dies.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from recbft.errors import UserError

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

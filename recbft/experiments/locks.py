"""Who is training which run: a lock file per run, whose owner's death is noticed.

A lock names its owner by process id, host and the time at which that process began, so that neither a killed process
nor another one that got its number after a reboot holds anything. An owner on another host cannot be looked up: it
touches its lock every ``TOUCH_SECONDS``, and counts as dead when it has not for ``SILENT_SECONDS``.

Taking and giving back are done under one ``flock`` per folder, which the system itself releases when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from recbft.system.files import explained, read_json, write_json

TOUCH_SECONDS = 20.0
SILENT_SECONDS = 300.0
_MUTEX = "mutex"


class Owner(NamedTuple):
    """A process, told apart from others that have had its number."""

    pid: int
    host: str
    started: str


def acquire(folder: Path, name: str) -> bool:
    """Take the lock ``name`` for this process, unless a living one has it.

    Raises:
        UserError: the folder or a file in it may not be written.
        RunError: the disk is full.
    """
    with explained(_file(folder, name)), _mutex(folder):
        if holder(folder, name) not in (None, _me()):
            return False
        write_json(_file(folder, name), _me()._asdict(), durable=False)
        return True


def release(folder: Path, name: str, pid: int | None = None) -> None:
    """Give back what this process (or its dead child ``pid``) holds; another's lock stays."""
    if not _file(folder, name).exists():  # nor may this folder be writable
        return
    with _mutex(folder):
        owner = _read(_file(folder, name))
        if owner is not None and owner.pid == (os.getpid() if pid is None else pid) and owner.host == _me().host:
            _file(folder, name).unlink(missing_ok=True)


def touch(folder: Path, name: str) -> None:
    """Show other hosts that the owner lives."""
    with contextlib.suppress(OSError):
        os.utime(_file(folder, name))


def holder(folder: Path, name: str) -> Owner | None:
    """The living owner of a lock; None where nobody has it, or a process that is no more."""
    path = _file(folder, name)
    owner = _read(path)
    return owner if owner is not None and _is_alive(owner, path) else None


def started(pid: int) -> str | None:
    """When a process began, in words that no other process with this number shares; None if there is none."""
    try:
        # The command's name may hold spaces, brackets and half a letter: the fields are counted from the last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if fields[0] in "ZX" else f"{boot} {fields[19]}"
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except ProcessLookupError:
        return None
    return _started_by_ps(pid)


def _started_by_ps(pid: int) -> str | None:
    """In the same words whoever asks: ps takes the language and the time zone of the one who does."""
    asked = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)],
        env={**os.environ, "LC_ALL": "C", "TZ": "UTC0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return asked.stdout.strip() or None


def _is_alive(owner: Owner, path: Path) -> bool:
    if owner.host == socket.gethostname():
        return started(owner.pid) == owner.started
    mutex = path.with_name(_MUTEX)
    try:
        mutex.touch()  # the clock of the disk's server, whatever the clocks of the hosts say
        return mutex.stat().st_mtime - path.stat().st_mtime < SILENT_SECONDS
    except OSError:
        return False


def _me() -> Owner:
    return Owner(os.getpid(), socket.gethostname(), started(os.getpid()) or "")


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def _mutex(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _MUTEX, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

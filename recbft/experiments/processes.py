"""Processes that work for a command: how they are started, how their end is told, and which signals end all of them.

On Linux they are forked from a server that has imported what all of them need; it, or a worker, may be ended by the
system at any time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from recbft.errors import RunError, UserError

FORKS = sys.platform == "linux"
LOST = 255  # the exit code that multiprocessing makes up for a process whose fork server has died
# What every run imports sooner or later (PyTorch's optimisers do the second): seconds, which short runs would pay each.
_IMPORTED_ONCE = ("recbft.experiments.worker", "torch._dynamo", "scipy.stats")
_STARTS = 5  # attempts to start a process
_CONTEXT: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")


def prepare() -> None:
    """Begin to import what processes need, before one is wanted."""
    if FORKS:
        _CONTEXT.set_forkserver_preload(list(_IMPORTED_ONCE))
        _start_server()


def start(work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A process in which ``work(*arguments, say)`` runs, and the other end of ``say``.

    Raises:
        UserError: the folder of temporary files has too long a name.
        RunError: the fork server ends each time.
    """
    for attempt in range(_STARTS):
        time.sleep(0.2 * attempt)  # the system may take a moment to say that the server is dead
        said, say = multiprocessing.Pipe(duplex=False)
        process = _CONTEXT.Process(target=work, args=(*arguments, say), daemon=True)
        try:
            with say:
                if not FORKS:
                    with _deaf_to_ctrl_c():
                        process.start()
                else:
                    _start_server()
                    process.start()  # waits for the server's imports, which Ctrl-C may break off
            return process, said
        except (EOFError, ConnectionError):
            continue
    raise RunError("the process that starts the runs is ended by the system each time; the same command goes on")


def ended_by_system(code: int) -> str | None:
    """How the system ended a process, by its exit code; None where it ended by itself."""
    if code == LOST:
        return "ended with the process that had started it"
    return f"ended by signal {-code}" if code < 0 else None


class Word(NamedTuple):
    """What a process says before it ends."""

    failure: str | None = None  # why it failed, in one line
    warnings: tuple[str, ...] = ()  # of one that did its work, each place in the code once


def last_word(said: Connection) -> Word:
    """What a process said before it ended; an empty word if it said nothing."""
    try:
        word: Word = said.recv() if said.poll() else Word()
        return word
    except (EOFError, OSError):
        return Word()


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """One thread per process for libraries that ask the environment; a run's own number is set by its config."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end this command as Ctrl-C does: with its workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [sign for sign in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(sign) == signal.SIG_DFL]  # nohup
    for sign in heard:
        signal.signal(sign, signal.default_int_handler)
    try:
        yield
    finally:
        for sign in heard:
            signal.signal(sign, signal.SIG_DFL)


def _start_server() -> None:
    """The fork server, unless it runs."""
    try:
        with _deaf_to_ctrl_c():
            forkserver.ensure_running()
    except OSError as error:
        if error.errno is not None:
            raise
        # The only one without a number: a socket's address holds about 100 letters.
        raise UserError(
            f"{tempfile.gettempdir()} is too long a path for processes to meet in; set TMPDIR to a shorter one"
        ) from None


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started here never hear Ctrl-C, which a terminal sends to all: the command ends its workers itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

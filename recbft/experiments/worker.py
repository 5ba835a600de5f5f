"""What one process of a queue does: train its runs, until they are finished or its parent is gone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from itertools import starmap
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from recbft.errors import RunError, UserError, shortened
from recbft.experiments.plan import Job, status
from recbft.experiments.processes import Word
from recbft.runs import locks
from recbft.system.files import explained
from recbft.system.memory import keep_freed_memory
from recbft.training.bundle import refuse_other_data
from recbft.training.many_seeds import train_seeds
from recbft.training.one_run import resume, train

_CHANGED = "the file has changed since: put it back as it was, or give another --out"
_MOST = 20  # warnings that are passed on: nobody reads them before the end
ELSEWHERE = 75  # exit code of a worker that found its run taken


def work(jobs: Sequence[Job], queue: Path, hashes: Mapping[str, str], say: Connection) -> None:
    """The runs of one worker, in its own process, on data of the hashes that its command has found."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it was broken off while this worker was made
        return
    keep_freed_memory()
    taken: list[locks.Lock] = []
    log, logs = log_of(queue, jobs[0]), False
    try:
        for job in jobs:
            if (lock := locks.acquire(queue, job.path.name)) is None:
                sys.exit(ELSEWHERE)
            taken.append(lock)
        threading.Thread(target=_live_with_parent, daemon=True).start()
        with explained(log):
            _say_into(log)
        logs = True
        dataset = jobs[0].config.data.load()
        refuse_other_data(hashes, dataset, "this command began", _CHANGED)
        heard = _listen()  # the command has read the data itself, and has said what there is to say of them
        for job in jobs:
            status(job, dataset)  # the lock may have been another command's until now
        if len(jobs) > 1:
            train_seeds([job.config for job in jobs], [job.path for job in jobs], dataset=dataset)
        elif (jobs[0].path / "config.yaml").is_file():
            resume(jobs[0].path, dataset=dataset)
        else:
            train(jobs[0].config, jobs[0].path, dataset=dataset)
    except (UserError, RunError) as error:
        with contextlib.suppress(OSError):
            say.send(Word(failure=str(error)))  # where the log lies there may be no space for it
            if logs:
                print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        for lock in taken:
            lock.release()
    if heard:
        with contextlib.suppress(OSError):
            say.send(Word(warnings=tuple(starmap(_with_count, heard.values()))[:_MOST]))
    log.unlink(missing_ok=True)


def log_of(queue: Path, job: Job) -> Path:
    """What a worker said that failed."""
    return queue / f"{job.path.name}.log"


def _live_with_parent() -> None:
    """End with the command that started this worker, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _listen() -> dict[tuple[Any, ...], tuple[str, int]]:
    """What warnings say from here on, the first of each place in the code and how many it has given."""
    heard: dict[tuple[Any, ...], tuple[str, int]] = {}
    show = warnings.showwarning

    def hear(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        first, number = heard.get((category, filename, lineno), (shortened(" ".join(str(message).split())), 0))
        heard[category, filename, lineno] = first, number + 1
        show(message, category, filename, lineno, *more)

    warnings.showwarning = hear  # type: ignore[assignment]
    return heard


def _with_count(text: str, number: int) -> str:
    return text if number == 1 else f"{text} (the first of {number:,} such warnings)"


def _say_into(log: Path) -> None:
    """Send all that this process prints to a file, from C code too."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.close(file)

"""What one process of a queue does: train its runs, until they are finished or its parent is gone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from recbft.allocator import keep_freed_memory
from recbft.errors import RunError, UserError
from recbft.experiments import locks
from recbft.experiments.plan import Job, status
from recbft.files import explained
from recbft.training.many_seeds import train_seeds
from recbft.training.same_run import refuse_other_data
from recbft.training.session import resume, train

_CHANGED = "the file has changed since: put it back as it was, or give another --out"
ELSEWHERE = 75  # exit code of a worker that found its run taken


def work(jobs: Sequence[Job], queue: Path, content_hash: str, say: Connection) -> None:
    """The runs of one worker, in its own process, on data of the content that its command has found."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it was broken off while this worker was made
        return
    keep_freed_memory()
    names = [job.path.name for job in jobs]
    taken: list[str] = []
    log, logs = log_of(queue, jobs[0]), False
    try:
        for name in names:
            if locks.acquire(queue, name):
                taken.append(name)
        if taken != names:
            sys.exit(ELSEWHERE)
        threading.Thread(target=_live_with_parent, args=(queue, names), daemon=True).start()
        with explained(log):
            _say_into(log)
        logs = True
        for job in jobs:
            _remove_leftovers(job.path)
        dataset = jobs[0].config.data.load()
        refuse_other_data(content_hash, dataset, "this command began", _CHANGED)
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
            say.send(str(error))  # where the log lies there may be no space for it
            if logs:
                print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        for name in taken:
            locks.release(queue, name)
    log.unlink(missing_ok=True)


def log_of(queue: Path, job: Job) -> Path:
    """What a worker said that failed."""
    return queue / f"{job.path.name}.log"


def _live_with_parent(queue: Path, names: Sequence[str]) -> None:
    """Keep the locks fresh, and end with the command that started this worker, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while not wait([parent.sentinel], timeout=locks.TOUCH_SECONDS):
        for name in names:
            locks.touch(queue, name)
    os._exit(1)


def _say_into(log: Path) -> None:
    """Send all that this process prints to a file, from C code too."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.close(file)


def _remove_leftovers(path: Path) -> None:
    """Half-made folders of this run, which a killed process leaves beside it."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)

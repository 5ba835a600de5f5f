"""Train many runs at once, each in a process of its own, from a queue that is nothing but files.

    RUNS/NAME/           a run folder: missing, unfinished or finished
    QUEUE/NAME.lock      held by the process that trains it
    QUEUE/NAME.log       what a training that failed has printed

These files are the whole state, so the same command goes on after any interruption. A killed worker leaves the state
after its last epoch. A worker whose command was killed ends itself. Two commands on the same folders share the runs; a
command that finds a run of other settings there refuses to go on. A worker that the system ended is started again once,
and again for as long as the run gets further. Runs that differ in their seed alone can share a worker, which trains
them together (``training.many_seeds``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.experiments import processes
from recbft.experiments.plan import Job, status
from recbft.experiments.processes import LOST, ended_by_system, last_word, single_threaded, terminable
from recbft.experiments.worker import ELSEWHERE, log_of, work
from recbft.runs import locks
from recbft.runs.folder import Row, RunFolder

WORDLESS = "ended without a message"  # the reason of a worker that gave none
_TICK = 0.5  # seconds between two looks at what is going on
_PATIENCE = 20.0  # seconds that a worker gets to end


class Running(NamedTuple):
    """A run in training, seen from outside."""

    job: Job
    epoch: int  # completed
    epochs: int  # at most
    best: float | None  # of the validation metric
    seconds: float  # since this command has watched it
    left: float | None  # seconds to the last epoch at this pace; early stopping can only shorten it
    elsewhere: bool  # trained by another command


class Failure(NamedTuple):
    """A run that did not come to its end, and why."""

    job: Job
    reason: str


class Watcher(Protocol):
    """Listens to a queue."""

    def start(self, total: int, finished: int) -> None:
        """Of ``total`` runs so many are finished already."""

    def look(self, running: Sequence[Running], waiting: int) -> None:
        """About twice a second."""

    def finished(self, job: Job, seconds: float) -> None:
        """A run has come to its end, ``seconds`` after it was begun or taken up."""

    def failed(self, failure: Failure) -> None:
        """A run has ended badly; the others go on."""

    def note(self, message: str) -> None:
        """Something the user should read."""

    def stop(self) -> None:
        """No more is to come; called exactly once after ``start``."""


def train_all(
    jobs: Sequence[Job], dataset: Dataset, queue: Path, workers: int, watch: Watcher, batch_seeds: int = 1
) -> list[Failure]:
    """Train what is not finished in ``workers`` processes at a time; returns the runs that failed.

    Args:
        queue: folder for locks and logs; shared by all commands that share the runs.
        batch_seeds: most runs of an arm that one process trains together.

    Raises:
        UserError: another command has put another run in a job's place; the workers have ended.
        KeyboardInterrupt: at Ctrl-C or SIGTERM, after the workers have ended.
    """
    todo = [job for job in jobs if status(job, dataset) != "finished"]
    watch.start(len(jobs), len(jobs) - len(todo))
    try:
        with single_threaded(), terminable():
            failed = _Queue(_bundles(todo, batch_seeds), dataset, queue, workers, watch).work()
        if not failed:
            for job in jobs:  # what workers left that were killed
                log_of(queue, job).unlink(missing_ok=True)
        return failed
    finally:
        watch.stop()
        for job in jobs:
            locks.clear(queue, job.path.name)


Bundle = tuple[Job, ...]  # the runs of one worker


@dataclass
class _Worker:
    process: Any
    said: Connection
    jobs: Bundle
    began: float
    first_epochs: tuple[int, ...]  # of each run, completed when it began
    retries: int  # in a row, without any progress


class _Queue:
    """The state of ``train_all``."""

    def __init__(self, bundles: Sequence[Bundle], dataset: Dataset, folder: Path, workers: int, watch: Watcher) -> None:
        self.waiting, self.dataset = list(bundles), dataset
        self.running: dict[Any, _Worker] = {}  # by sentinel
        self.failed: list[Failure] = []
        self.folder, self.workers, self.watch = folder, workers, watch
        self.retries: dict[Path, int] = {}
        self.noted: set[str] = set()  # warnings that many runs have in common are passed on once
        self.seen_elsewhere: dict[Path, tuple[float, int]] = {}  # since when, at which epoch

    def work(self) -> list[Failure]:
        self.watch.look([], _count(self.waiting))
        try:
            if self.waiting:
                processes.prepare()
            while self.waiting or self.running:
                self._drop_finished()
                self._start_workers()
                for sentinel in wait(list(self.running), timeout=_TICK) if self.running else ():
                    self._reap(self.running.pop(sentinel))
                if not self.running and self.waiting:
                    time.sleep(_TICK)  # all that is left is in the hands of another command
                self.watch.look(self._look(), _count(self.waiting))
        finally:
            self._end_workers()
        return self.failed

    def _drop_finished(self) -> None:
        """Runs that another command has finished in the meantime; what it has begun must be the run asked for, too."""
        waiting = [job for bundle in self.waiting for job in bundle]
        for job in [job for job in waiting if status(job, self.dataset) == "finished"]:
            since, _ = self.seen_elsewhere.pop(job.path, (time.monotonic(), 0))
            self.watch.finished(job, time.monotonic() - since)
            self.waiting = _without(self.waiting, {job.path})

    def _start_workers(self) -> None:
        for bundle in list(self.waiting):
            if len(self.running) >= self.workers:
                return
            jobs = tuple(job for job in bundle if not self._is_locked(job))
            if not jobs:
                continue
            self.waiting = _without(self.waiting, {job.path for job in jobs})
            process, said = processes.start(work, jobs, self.folder, self.dataset.hashes)
            epochs, retries = _epochs(jobs), self.retries.get(jobs[0].path, 0)
            self.running[process.sentinel] = _Worker(process, said, jobs, time.monotonic(), epochs, retries)

    def _reap(self, worker: _Worker) -> None:
        worker.process.join()
        code = worker.process.exitcode
        if code == LOST:
            self._end_lost(worker)
        word = last_word(worker.said)
        left = tuple(job for job in worker.jobs if not RunFolder(job.path).is_finished)
        for job in worker.jobs:
            if job not in left:
                self.watch.finished(job, time.monotonic() - worker.began)
        for text in word.warnings:
            if text not in self.noted:
                self.noted.add(text)
                self.watch.note(f"{_names(worker.jobs)}: {text}")
        if not left:
            return
        if code == ELSEWHERE:
            self.waiting.append(left)
        elif (ended := ended_by_system(code)) and self._may_try_again(worker, left):
            self.watch.note(f"{_names(left)}: {ended}; going on with {'it' if len(left) == 1 else 'them'}")
            self.waiting.insert(0, left)
        else:
            reason = ended or word.failure or _last_line(log_of(self.folder, worker.jobs[0]))
            for job in left:
                self.failed.append(Failure(job, reason))
                self.watch.failed(self.failed[-1])

    def _end_lost(self, worker: _Worker) -> None:
        """End a worker whose fork server has died: it may be at work still, but nobody would hear of its end."""
        worker.process.close()  # it ends when this command lets go of it, as when the command itself had ended
        deadline = time.monotonic() + _PATIENCE
        while any(map(self._is_locked, worker.jobs)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _may_try_again(self, worker: _Worker, left: Bundle) -> bool:
        retries = 0 if _epochs(worker.jobs) > worker.first_epochs else worker.retries + 1
        self.retries[left[0].path] = retries
        return retries <= 1

    def _is_locked(self, job: Job) -> bool:
        return locks.is_held(self.folder, job.path.name)

    def _look(self) -> list[Running]:
        ours = [
            _running(job, worker.began, first, elsewhere=False)
            for worker in self.running.values()
            for job, first in zip(worker.jobs, worker.first_epochs, strict=True)
        ]
        theirs = []
        for job in (job for bundle in self.waiting for job in bundle):
            if self._is_locked(job):
                since, first = self.seen_elsewhere.setdefault(job.path, (time.monotonic(), len(_history(job))))
                theirs.append(_running(job, since, first, elsewhere=True))
        return ours + theirs

    def _end_workers(self) -> None:
        """The state after the last epoch is on disk: nothing but the epoch in progress is lost."""
        for worker in self.running.values():
            worker.process.terminate()
        for worker in self.running.values():
            worker.process.join(_PATIENCE)
            worker.process.kill()
            worker.process.join()
            log = log_of(self.folder, worker.jobs[0])
            if log.is_file() and not log.stat().st_size:
                log.unlink()


def _bundles(jobs: Sequence[Job], batch_seeds: int) -> list[Bundle]:
    """At most ``batch_seeds`` runs of one arm to a bundle, in the order of the first of each."""
    open_bundles: dict[str, list[Job]] = {}
    bundles: list[list[Job]] = []
    for job in jobs:
        bundle = open_bundles.get(job.arm.label)
        if bundle is None or len(bundle) >= batch_seeds:
            bundle = open_bundles[job.arm.label] = []
            bundles.append(bundle)
        bundle.append(job)
    return [tuple(bundle) for bundle in bundles]


def _without(bundles: Iterable[Bundle], paths: set[Path]) -> list[Bundle]:
    left = (tuple(job for job in bundle if job.path not in paths) for bundle in bundles)
    return [bundle for bundle in left if bundle]


def _count(bundles: Iterable[Bundle]) -> int:
    return sum(map(len, bundles))


def _epochs(jobs: Iterable[Job]) -> tuple[int, ...]:
    return tuple(len(_history(job)) for job in jobs)


def _names(jobs: Bundle) -> str:
    return jobs[0].name if len(jobs) == 1 else f"{jobs[0].name} and {len(jobs) - 1} more"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return WORDLESS
    said = [line.strip() for line in lines if line.strip()]
    return said[-1].removeprefix("error: ") if said else WORDLESS


def _history(job: Job) -> list[Row]:
    try:
        return RunFolder(job.path).read_history()
    except (UserError, OSError):
        return []


def _running(job: Job, since: float, first_epoch: int, *, elsewhere: bool) -> Running:
    rows, training, now = _history(job), job.config.training, time.monotonic()
    values = [float(value) for row in rows if isinstance(value := row.get(f"valid_{training.valid_metric}"), float)]
    done = len(rows) - first_epoch
    left = (now - since) / done * (training.epochs - len(rows)) if done > 0 else None
    return Running(job, len(rows), training.epochs, max(values, default=None), now - since, left, elsewhere)

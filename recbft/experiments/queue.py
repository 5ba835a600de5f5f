"""Train many runs at once, each in a process of its own, from a queue that is nothing but files.

    RUNS/NAME/           a run folder: missing, unfinished or finished
    QUEUE/NAME.lock      who is training it
    QUEUE/NAME.log       what was said by a training that failed

Nothing else has to be remembered, so whatever stops a process, the same command goes on: a killed worker leaves the
state after its last epoch, a worker whose parent was killed ends itself, and two commands on the same folders take
turns at the runs; one that finds a run of other settings there is refused. A worker that the system ended is started
again once, and again for as long as the run gets further.
Runs that differ in their seed alone can share a worker, which trains them together (``training.many_seeds``).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from recbft.allocator import keep_freed_memory
from recbft.datasets import Dataset
from recbft.errors import RunError, UserError
from recbft.experiments import locks
from recbft.experiments.plan import Job, status
from recbft.training.many_seeds import train_seeds
from recbft.training.run_folder import Row, RunFolder
from recbft.training.session import resume, train

# What every run imports sooner or later (PyTorch's optimisers do the second): seconds, which short runs would pay each.
_IMPORTED_ONCE = ("recbft.experiments.queue", "torch._dynamo", "scipy.stats")
_ELSEWHERE = 75  # exit code of a worker that found its run taken
_FORKS = sys.platform == "linux"
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
    jobs: Sequence[Job], dataset: Dataset, queue: Path, workers: int, watch: Watcher, together: int = 1
) -> list[Failure]:
    """Train what is not finished in ``workers`` processes at a time; returns the runs that failed.

    Args:
        dataset: the data of all jobs.
        queue: folder for locks and logs; shared by all commands that share the runs.
        together: most runs of an arm that one process trains together.

    Raises:
        UserError: another command has put another run in a job's place; the workers have ended.
        KeyboardInterrupt: at Ctrl-C or SIGTERM, after the workers have ended.
    """
    todo = [job for job in jobs if status(job, dataset) != "finished"]
    watch.start(len(jobs), len(jobs) - len(todo))
    try:
        with _environment(), _terminable():
            return _Queue(_bundles(todo, together), dataset, queue, workers, watch).work()
    finally:
        watch.stop()


Bundle = tuple[Job, ...]  # the runs of one worker


@dataclass
class _Worker:
    process: Any
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
        self.seen_elsewhere: dict[Path, tuple[float, int]] = {}  # since when, at which epoch
        self.processes: Any = multiprocessing.get_context("forkserver" if _FORKS else "spawn")

    def work(self) -> list[Failure]:
        self.watch.look([], _count(self.waiting))
        try:
            if _FORKS and self.waiting:
                self.processes.set_forkserver_preload(list(_IMPORTED_ONCE))
                with _deaf_to_ctrl_c():
                    forkserver.ensure_running()
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
            jobs = tuple(job for job in bundle if locks.holder(self.folder, job.path.name) is None)
            if not jobs:
                continue
            self.waiting = _without(self.waiting, {job.path for job in jobs})
            process = self.processes.Process(target=_work, args=(jobs, self.folder), daemon=True)
            # The fork server is deaf already, and starting in it waits for its imports, which Ctrl-C may break off.
            with contextlib.nullcontext() if _FORKS else _deaf_to_ctrl_c():
                process.start()
            epochs, retries = _epochs(jobs), self.retries.get(jobs[0].path, 0)
            self.running[process.sentinel] = _Worker(process, jobs, time.monotonic(), epochs, retries)

    def _reap(self, worker: _Worker) -> None:
        worker.process.join()
        code = worker.process.exitcode
        self._release(worker)
        left = tuple(job for job in worker.jobs if not RunFolder(job.path).is_finished)
        for job in worker.jobs:
            if job not in left:
                self.watch.finished(job, time.monotonic() - worker.began)
        if not left:
            return
        if code == _ELSEWHERE:
            self.waiting.append(left)
        elif code < 0 and self._may_try_again(worker, left):
            self.watch.note(
                f"{_names(left)}: ended by signal {-code}; going on with {'it' if len(left) == 1 else 'them'}"
            )
            self.waiting.insert(0, left)
        else:
            reason = f"ended by signal {-code}" if code < 0 else _last_line(_log(self.folder, worker.jobs[0]))
            for job in left:
                self.failed.append(Failure(job, reason))
                self.watch.failed(self.failed[-1])

    def _may_try_again(self, worker: _Worker, left: Bundle) -> bool:
        retries = 0 if _epochs(worker.jobs) > worker.first_epochs else worker.retries + 1
        self.retries[left[0].path] = retries
        return retries <= 1

    def _release(self, worker: _Worker) -> None:
        for job in worker.jobs:
            locks.release(self.folder, job.path.name, worker.process.pid)

    def _look(self) -> list[Running]:
        ours = [
            _running(job, worker.began, first, elsewhere=False)
            for worker in self.running.values()
            for job, first in zip(worker.jobs, worker.first_epochs, strict=True)
        ]
        theirs = []
        for job in (job for bundle in self.waiting for job in bundle):
            if locks.holder(self.folder, job.path.name) is not None:
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
            self._release(worker)
            log = _log(self.folder, worker.jobs[0])
            if log.is_file() and not log.stat().st_size:
                log.unlink()


def _bundles(jobs: Sequence[Job], together: int) -> list[Bundle]:
    """At most ``together`` runs of one arm to a bundle, in the order of the first of each."""
    open_bundles: dict[str, list[Job]] = {}
    bundles: list[list[Job]] = []
    for job in jobs:
        bundle = open_bundles.get(job.arm.label)
        if bundle is None or len(bundle) >= together:
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


def _work(jobs: Bundle, queue: Path) -> None:
    """The runs of one worker, in its own process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keep_freed_memory()
    names = [job.path.name for job in jobs]
    taken = [name for name in names if locks.acquire(queue, name)]
    log = _log(queue, jobs[0])
    try:
        if taken != names:
            sys.exit(_ELSEWHERE)
        threading.Thread(target=_live_with_parent, args=(queue, names), daemon=True).start()
        _say_into(log)
        for job in jobs:
            _remove_leftovers(job.path)
        dataset = jobs[0].config.data.load()
        for job in jobs:
            status(job, dataset)  # the lock may have been another command's until now
        if len(jobs) > 1:
            train_seeds([job.config for job in jobs], [job.path for job in jobs], dataset=dataset)
        elif (jobs[0].path / "config.yaml").is_file():
            resume(jobs[0].path, dataset=dataset)
        else:
            train(jobs[0].config, jobs[0].path, dataset=dataset)
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        for name in taken:
            locks.release(queue, name)
    log.unlink(missing_ok=True)


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


def _log(queue: Path, job: Job) -> Path:
    return queue / f"{job.path.name}.log"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "ended without a word"
    said = [line.strip() for line in lines if line.strip()]
    return said[-1].removeprefix("error: ") if said else "ended without a word"


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


@contextlib.contextmanager
def _environment() -> Iterator[None]:
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


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end this command as Ctrl-C does: with its workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

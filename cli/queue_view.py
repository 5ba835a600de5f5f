"""Many trainings as they are seen from a terminal: one live table, or plain lines where nothing can move."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from recbft_cli.progress import duration

if TYPE_CHECKING:
    from rich.console import Group

    from recbft.experiments.plan import Job
    from recbft.experiments.queue import Failure, Running


LONG_SILENCE = 300.0  # seconds after which a log is told where trainings of hours stand


def view_for(stream: TextIO | None = None) -> Any:
    """A listener to a queue (``recbft.experiments.queue.Watcher``) that suits ``stream`` (stderr)."""
    stream = sys.stderr if stream is None else stream
    return LiveTable(stream) if stream.isatty() else RunLines(stream)


class RunLines:
    """One line per finished run, and in long ones a line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total, self._done = 0, 0
        self._spoke = 0.0

    def start(self, total: int, finished: int) -> None:
        self._total, self._done = total, finished
        self._spoke = time.monotonic()
        if finished:
            self.note(f"{finished} of {total} runs are finished already")

    def look(self, running: Sequence[Running], waiting: int) -> None:
        if time.monotonic() - self._spoke >= LONG_SILENCE:
            epochs = ", ".join(f"{run.job.name} {run.epoch}/{run.epochs}" for run in running)
            self.note(f"{self._standing(running, waiting)}{epochs and f': epoch {epochs}'}")

    def finished(self, job: Job, seconds: float) -> None:
        self._done += 1
        self.note(f"[{self._done}/{self._total}] {_result(job)}, {seconds:.1f} s")

    def failed(self, failure: Failure) -> None:
        self.note(f"failed: {failure.job.name}: {failure.reason}")

    def note(self, message: str) -> None:
        print(message, file=self._stream, flush=True)
        self._spoke = time.monotonic()

    def stop(self) -> None:
        pass

    def _standing(self, running: Sequence[Running], waiting: int) -> str:
        """How far the whole is."""
        left = _left_for_us(running, waiting)
        return f"{self._done} of {self._total} runs finished, {len(running)} in training, {left} waiting"


class LiveTable(RunLines):
    """A row per run in training, and how far the whole is; what has ended scrolls by above."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        super().__init__(stream)
        self._console = Console(file=stream, highlight=False)
        self._live: Any = None
        self._seconds: list[float] = []

    def start(self, total: int, finished: int) -> None:
        from rich.live import Live

        super().start(total, finished)
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._live.start()

    def look(self, running: Sequence[Running], waiting: int) -> None:
        if self._live is not None:
            self._live.update(self._table(running, waiting), refresh=True)

    def finished(self, job: Job, seconds: float) -> None:
        self._seconds.append(seconds)
        super().finished(job, seconds)

    def note(self, message: str) -> None:
        self._console.print(message, markup=False)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, running: Sequence[Running], waiting: int) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for name in ("run", "epoch", "best valid", "time", "at most left"):
            table.add_column(name, justify="left" if name == "run" else "right")
        for run in running:
            metric = "" if run.best is None else f"{run.job.config.training.valid_metric} {run.best:.4f}"
            table.add_row(
                Text(run.job.name + (" (another command)" if run.elsewhere else "")),
                f"{run.epoch}/{run.epochs}",
                metric,
                duration(run.seconds),
                "" if run.left is None else duration(run.left),
            )
        return Group(table, Text(self._standing(running, waiting) + self._left(running, waiting)))

    def _left(self, running: Sequence[Running], waiting: int) -> str:
        """About how long the rest takes, from the runs that this command has finished."""
        if not self._seconds or not running:
            return ""
        mean = sum(self._seconds) / len(self._seconds)
        return f"; about {duration(mean * (_left_for_us(running, waiting) / len(running) + 0.5))} left"


def _left_for_us(running: Sequence[Running], waiting: int) -> int:
    """Runs that wait; those that another command trains are in training."""
    return waiting - sum(run.elsewhere for run in running)


def _result(job: Job) -> str:
    from recbft.evaluation.protocol import headline_setting
    from recbft.experiments.lists import counted
    from recbft.runs.folder import RunFolder

    metrics, training = RunFolder(job.path).metrics, job.config.training
    setting = headline_setting(metrics["filter_seen"])
    value = metrics["validation"][setting][training.valid_metric]
    return (
        f"{job.name}: {counted(metrics['epochs'], 'epoch')}, best {metrics['best_epoch']}, "
        f"valid {training.valid_metric.upper()} {value:.4f}"
    )

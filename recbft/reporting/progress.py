"""Training as it is watched: in a terminal a bar or a table, in a notebook one line, in a log a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from recbft.errors import UserError, visible
from recbft.training.progress import Progress, Silent, duration, valid_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import Progress as Bar

    from recbft.experiments.plan import Job
    from recbft.experiments.queue import Failure, Running

OFTEN = 0.2  # seconds between two looks of a line that is written over
SILENCE = 60.0  # seconds after which whoever waits is told where long work stands
LONG_SILENCE = 300.0  # and a log, where many trainings of hours stand


def listener(
    progress: Progress | bool | None, metric: str, stream: TextIO | None = None, *, opening: str | None = None
) -> Progress:
    """Who is told how training goes: nobody, the caller's own, or whoever reads ``stream``.

    Args:
        progress: a listener; True for ``stream``, False for nobody; None for ``stream`` where a person is likely to see
            it, in a notebook or a terminal.
        metric: the validation metric to show, such as "ndcg@10".
        stream: stderr unless given.
        opening: said when training begins.
    """
    stream = sys.stderr if stream is None else stream
    moves = _in_notebook()
    if progress is None:
        progress = moves or stream.isatty()
    if not isinstance(progress, bool):
        if not hasattr(progress, "epoch"):
            raise UserError(f"progress is {progress!r}; give True, False, or an object with recbft.training's Progress")
        return progress
    if not progress:
        return Silent()
    bar = stream.isatty() and not moves
    return MovingBar(stream, metric, opening) if bar else Lines(stream, metric, opening, moves=moves)


class Lines:
    """One line per epoch, and in a long one a line now and then; in a notebook each is written over the one before."""

    def __init__(self, stream: TextIO, metric: str, opening: str | None = None, *, moves: bool = False) -> None:
        self._stream, self._metric, self._opening, self._moves = stream, metric, opening, moves
        self._total = 0
        self._done = 0  # epochs since start, so that a resumed run's estimate counts only its own
        self._epoch = 0  # in progress
        self._since = self._spoke = 0.0
        self._valid, self._width = "", 0

    def start(self, total_epochs: int, first_epoch: int) -> None:
        self._total, self._done, self._epoch = total_epochs, 0, first_epoch
        self._since = self._spoke = time.monotonic()
        if self._opening:
            self.note(self._opening)
        if first_epoch > 1:
            self.note(f"continuing at epoch {first_epoch}")

    def batch(self, done: int, total: int, loss: float, tokens: int) -> None:
        if time.monotonic() - self._spoke >= (OFTEN if self._moves else SILENCE):
            said = f"epoch {self._epoch}/{self._total}  loss {loss:.4f}{self._valid}"
            self._print(f"{said}  step {done:,} of {total:,}")

    def epoch(self, row: Mapping[str, object]) -> None:
        self._done += 1
        self._epoch = int(str(row["epoch"])) + 1
        self._valid = valid_text(row, self._metric) or self._valid
        left = self._total - self._epoch + 1
        per_epoch = (time.monotonic() - self._since) / self._done
        self._print(f"{_epoch_text(row, self._total, self._metric)}  at most {duration(left * per_epoch)} left")

    def note(self, message: str) -> None:
        self._print(message)
        self.stop()

    def stop(self) -> None:
        """Leave the line that is written over as it is."""
        if self._width:
            print(file=self._stream, flush=True)
            self._width = 0

    def _print(self, line: str) -> None:
        line = visible(line)
        if self._moves:
            print(f"\r{line:<{self._width}}", end="", file=self._stream, flush=True)
            self._width = len(line)
        else:
            print(line, file=self._stream, flush=True)
        self._spoke = time.monotonic()


def _in_notebook() -> bool:
    """Whether this is the kernel of a notebook, found without importing IPython."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class MovingBar:
    """A bar over the epochs with loss, validation metric, tokens per second and remaining time."""

    def __init__(self, stream: TextIO, metric: str, opening: str | None = None) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._metric, self._opening = metric, opening
        self._bar: Bar | None = None
        self._task: Any = None
        self._epoch = 0
        self._total = 0
        self._valid = ""
        self._epoch_start = 0.0

    def start(self, total_epochs: int, first_epoch: int) -> None:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        if self._opening:
            self.note(self._opening)
        self._epoch, self._total = first_epoch - 1, total_epochs
        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("at most"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            speed_estimate_period=120,
        )
        self._task = self._bar.add_task(
            "", total=total_epochs, completed=first_epoch - 1, epoch=first_epoch, epochs=total_epochs, status=""
        )
        self._epoch_start = time.monotonic()
        self._bar.start()

    def batch(self, done: int, total: int, loss: float, tokens: int) -> None:
        speed = tokens / max(time.monotonic() - self._epoch_start, 1e-9)
        status = f"loss {loss:.4f}{self._valid}  {speed:,.0f} tokens/s"
        self._update(completed=self._epoch + done / total, status=status)

    def epoch(self, row: Mapping[str, object]) -> None:
        self._epoch = int(str(row["epoch"]))
        self._valid = valid_text(row, self._metric) or self._valid
        self._update(completed=self._epoch, epoch=min(self._epoch + 1, self._total))
        self._epoch_start = time.monotonic()

    def note(self, message: str) -> None:
        self._console.print(visible(message), markup=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _update(self, **fields: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, **fields)


def _epoch_text(row: Mapping[str, object], total: int, metric: str) -> str:
    text = f"epoch {row['epoch']}/{total}  loss {row['loss']:.4f}{valid_text(row, metric)}"
    speed = row.get("tokens_per_second")
    return f"{text}  {speed:,.0f} tokens/s" if isinstance(speed, (int, float)) else text


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
        print(visible(message), file=self._stream, flush=True)
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
        self._console.print(visible(message), markup=False)

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
                Text(visible(run.job.name) + (" (another command)" if run.elsewhere else "")),
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
    from recbft.evaluation.metrics import headline_setting
    from recbft.experiments.lists import counted
    from recbft.runs.folder import RunFolder

    metrics, training = RunFolder(job.path).metrics, job.config.training
    setting = headline_setting(metrics["filter_seen"])
    value = metrics["validation"][setting][training.valid_metric]
    return (
        f"{job.name}: {counted(metrics['epochs'], 'epoch')}, best {metrics['best_epoch']}, "
        f"valid {training.valid_metric.upper()} {value:.4f}"
    )

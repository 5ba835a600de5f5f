"""What the training loop tells whoever is watching: nobody by default, and TensorBoard beside whoever else listens."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from recbft.errors import UserError

if TYPE_CHECKING:
    from recbft.training.run_config import TrainingConfig


class Progress(Protocol):
    """Listens to one training run."""

    def start(self, total_epochs: int, first_epoch: int) -> None:
        """Epochs are numbered from 1; ``first_epoch`` is above 1 when a run is resumed."""

    def batch(self, done: int, total: int, loss: float, tokens: int) -> None:
        """``done`` of ``total`` steps of this epoch are over; ``tokens`` real tokens so far in this epoch."""

    def epoch(self, row: Mapping[str, object]) -> None:
        """An epoch is over; ``row`` is its line of history.csv (epoch, loss, tokens_per_second, valid_METRIC)."""

    def note(self, message: str) -> None:
        """Something the user should read: a data set that stands in, why training stopped early."""

    def stop(self) -> None:
        """The run is over or broken off; called exactly once after ``start``."""


class Silent:
    """Listens and says nothing."""

    def start(self, total_epochs: int, first_epoch: int) -> None: ...

    def batch(self, done: int, total: int, loss: float, tokens: int) -> None: ...

    def epoch(self, row: Mapping[str, object]) -> None: ...

    def note(self, message: str) -> None: ...

    def stop(self) -> None: ...


class TensorBoard:
    """Writes each number of an epoch's row as a scalar, and passes everything on to another listener."""

    def __init__(self, folder: Path, listener: Progress) -> None:
        self._folder, self._listener = folder, listener
        self.batch, self.note = listener.batch, listener.note
        self._writer: Any = None

    def start(self, total_epochs: int, first_epoch: int) -> None:
        """Open the event file; a resumed run hides what was written after the epoch it resumes from."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=first_epoch)
        self._listener.start(total_epochs, first_epoch)

    def epoch(self, row: Mapping[str, object]) -> None:
        """Write the row."""
        for name, value in row.items():
            if name != "epoch" and isinstance(value, (int, float)):
                self._writer.add_scalar(name.replace("valid_", "validation/"), value, int(str(row["epoch"])))
        self._writer.flush()
        self._listener.epoch(row)

    def stop(self) -> None:
        """Close the event file."""
        self._writer.close()
        self._listener.stop()


def check_tensorboard(config: TrainingConfig) -> None:
    """Refuse before any work is done where TensorBoard is asked for and is not installed."""
    if config.tensorboard and find_spec("tensorboard") is None:
        raise UserError("tensorboard: true needs a package: pip install tensorboard, or leave the setting out")


def valid_text(row: Mapping[str, object], metric: str) -> str:
    """The validation metric; nothing in an epoch without validation."""
    value = row.get(f"valid_{metric}")
    return f"  valid {metric} {value:.4f}" if isinstance(value, float) else ""


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3725)
    '1:02:05'
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"

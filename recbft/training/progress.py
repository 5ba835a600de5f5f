"""What the training loop tells whoever is watching: nobody by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


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

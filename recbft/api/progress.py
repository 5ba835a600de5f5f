"""How far a fit is, in one line that is written over: in a notebook and in a terminal; elsewhere a line per epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from recbft.errors import UserError
from recbft.training.progress import Progress, duration, valid_text

OFTEN = 0.2  # seconds between two looks of a line that is written over


def listener(progress: Progress | bool | None, metric: str) -> Progress | None:
    """Who is told how training goes: nobody, the caller's own, or a line of text on stderr.

    Args:
        progress: a listener; True for the line, False for nobody; None for the line where a person is likely to see it,
            in a notebook or a terminal.
        metric: the validation metric to show.
    """
    if progress is None:
        progress = _in_notebook() or sys.stderr.isatty()
    if isinstance(progress, bool):
        return EpochLine(sys.stderr, metric, moves=_in_notebook() or sys.stderr.isatty()) if progress else None
    if not hasattr(progress, "epoch"):
        raise UserError(f"progress is {progress!r}; give True, False, or an object with recbft.training's Progress")
    return progress


class EpochLine:
    """The epoch, its loss and validation metric, and how long the rest takes at most."""

    def __init__(self, stream: TextIO, metric: str, *, moves: bool) -> None:
        self._stream, self._metric, self._moves = stream, metric, moves
        self._epoch = self._total = self._done = 0
        self._since = self._spoke = 0.0
        self._valid, self._width = "", 0

    def start(self, total_epochs: int, first_epoch: int) -> None:
        self._total, self._epoch, self._since = total_epochs, first_epoch, time.monotonic()

    def batch(self, done: int, total: int, loss: float, tokens: int) -> None:
        if self._moves and time.monotonic() - self._spoke >= OFTEN:
            self._say(f"epoch {self._epoch}/{self._total}  step {done}/{total}  loss {loss:.4f}{self._valid}")

    def epoch(self, row: Mapping[str, object]) -> None:
        self._done += 1
        self._valid = valid_text(row, self._metric) or self._valid
        left = (time.monotonic() - self._since) / self._done * (self._total - self._epoch)
        told = f"epoch {self._epoch}/{self._total}  loss {row['loss']:.4f}{self._valid}"
        self._say(f"{told}  at most {duration(left)} left")
        self._epoch += 1

    def note(self, message: str) -> None:
        self._say(message)
        self._end()

    def stop(self) -> None:
        self._end()

    def _say(self, line: str) -> None:
        self._stream.write(f"\r{line:<{self._width}}" if self._moves else f"{line}\n")
        self._stream.flush()
        self._width, self._spoke = len(line), time.monotonic()

    def _end(self) -> None:
        """Leave the line as it is, and begin another."""
        if self._moves and self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0


def _in_notebook() -> bool:
    """Whether this is the kernel of a notebook, found without importing IPython."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None

"""What a Python program is told where a fit cannot begin or go on, and what it is not left to hold."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recbft.datasets import Dataset
from recbft.errors import RunError, RunInterruptedError, UserError
from recbft.runs.folder import RunFolder


@contextmanager
def python_errors(path: Path, dataset: Dataset | None) -> Iterator[None]:
    """Say after an interruption how a program goes on; what has failed lets go of its model."""
    handled = sys.exc_info()[1]
    try:
        yield
    except (UserError, RunError) as error:
        _let_go(error, handled)
        if not isinstance(error, RunInterruptedError):
            raise
        raise RunInterruptedError(f"{error} (in Python: {_resuming(path, dataset)})") from None


def free_folder(path: Path, dataset: Dataset | None) -> Path:
    """The folder of a new run; UserError, with how a program goes on, where a run stands there."""
    try:
        RunFolder.refuse_taken(path)
    except UserError as error:
        run = RunFolder(path)
        if not run.is_run:
            raise
        way = f"Recommender.load({str(path)!r})" if run.is_finished else _resuming(path, dataset)
        raise UserError(f"{error} (in Python: {way})") from None
    return path


def _resuming(path: Path, dataset: Dataset | None) -> str:
    return f"Recommender.resume({str(path)!r}{'' if dataset is None else ', dataset'})"


def _let_go(error: BaseException | None, handled: BaseException | None) -> None:
    """Empty the frames behind an error: a notebook keeps the last one, and with it all that was on the device.

    Args:
        handled: what the caller was handling already, which is not ours.
    """
    while error is not None and error is not handled:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

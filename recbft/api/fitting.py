"""A fit in Python: the folder of its run, temporary unless asked for, and what a program is told that cannot go on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recbft.datasets import Dataset
from recbft.errors import RunError, RunInterruptedError, UserError
from recbft.runs.folder import RunFolder


class FittedFolder(NamedTuple):
    """The run's folder and, for a temporary one, what removes it."""

    path: Path
    remove: Callable[[], None] | None

    def go_with(self, run: Any) -> None:
        """Let a temporary folder live as long as this object and its copies in this process."""
        if self.remove is not None:
            kept = _Kept()
            vars(run)["kept"] = kept
            weakref.finalize(kept, self.remove)


@contextmanager
def fitted_folder(out: str | Path | None) -> Iterator[FittedFolder]:
    """The folder of a new run; a temporary one that failed goes at once, after an interruption if it is empty."""
    if out is not None:
        yield FittedFolder(Path(out), None)
        return
    place = tempfile.mkdtemp(prefix="recbft-")
    remove = partial(_remove, place, os.getpid())
    try:
        yield FittedFolder(Path(place) / "run", remove)
    except RunInterruptedError:
        with suppress(OSError):  # it holds something
            Path(place).rmdir()
        raise
    except BaseException:
        remove()
        raise


def _remove(place: str, owner: int) -> None:
    """Remove a folder in the process that made it: one forked from it ends earlier, and holds copies of its objects."""
    if os.getpid() == owner:
        shutil.rmtree(place, ignore_errors=True)


class _Kept:
    """Held by a run in a temporary folder and by its copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


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

"""The run behind a recommender: what is held of it once it is read, and its folder while it is fitted.

A folder is temporary unless asked for, and an error says how a program goes on.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from recbft.datasets import Dataset
from recbft.datasets.events import check_unit, in_unit
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import RunError, RunInterruptedError, UserError, permission_denied
from recbft.evaluation.probability import Calibration
from recbft.runs import checkpoint
from recbft.runs.folder import RunFolder
from recbft.serving.caps import Labels
from recbft.serving.served import Served
from recbft.system.files import user_path
from recbft.training.bundle import load_trained
from recbft.training.run_config import RunConfig


class TrainedRun(NamedTuple):
    """The run that a recommender answers by, and what is held of it."""

    run: RunFolder
    config: RunConfig
    served: Served  # the model, as it answers requests
    vocabulary: Vocabulary
    counts: Tensor  # (V + 1,) events of each item in training, index 0 padding
    weights: str | None  # the SHA-256 of their file
    protocol: dict[str, Any]  # the folder may go before this object does
    calibrations: dict[bool, Calibration | None]  # by filter_seen
    labels: Labels  # by which lists can be capped

    @classmethod
    def read(cls, path: Path) -> TrainedRun:
        """The run in a folder, with its best weights."""
        # One folder, wherever the program goes, and a link to the next run.
        run = RunFolder(RunFolder.open(path).path.resolve())
        # Before they are read: those that a training puts there meanwhile are not taken for them.
        weights = checkpoint.best_digest(run.checkpoint)
        run, config, vocabulary, counts, labels, model = load_trained(run.path)
        calibrations = {filter_seen: run.calibration(filter_seen=filter_seen) for filter_seen in (False, True)}
        return cls(run, config, Served(model), vocabulary, counts, weights, run.protocol, calibrations, Labels(labels))

    @property
    def model(self) -> Any:
        """A module that is a ``SequenceModel``."""
        return self.served.model

    @property
    def time_unit(self) -> str | None:
        """The unit of the training data's times; None where it had none, or whole numbers."""
        unit: str | None = self.protocol.get("preparation", {}).get("time_unit")
        return unit

    def check_in_place(self) -> None:
        """UserError where the folder has gone, or holds other weights than were read from it."""
        if checkpoint.best_digest(RunFolder.open(self.run.path).checkpoint) != self.weights:
            raise UserError(
                f"{self.run.path} holds other weights than those that were loaded from it; load it again to have "
                "these, or put the run back"
            )

    def aligned(self, dataset: Dataset) -> Dataset:
        """``Recommender.aligned``; see there."""
        if dataset.parts is not None or self.config.data.splitting().split != "given":
            dataset = self.config.data.split_as_asked(dataset)  # else other data, which have no split of their own
        if dataset.content_hash == self.protocol["content_hash"] and dataset.splitting != self.config.data.splitting():
            raise UserError(
                f"data set {dataset.name!r} is split as {dataset.splitting.chosen()}, and {self.run.path} was trained "
                f"with {self.protocol['split']}: targets of the one are training events of the other; give the data "
                "without a split of their own"
            )
        try:
            made = dataset.numbered_as(self.vocabulary)
        except UserError as error:
            raise UserError(
                f"{self.run.path} is a model of data set {self.protocol['dataset']!r}: {error}; leave their events "
                "out, or give the data it was trained on"
            ) from None
        if made is not dataset:
            warnings.warn(
                f"data set {dataset.name!r} has its items in another order than what the model was trained on, or "
                f"fewer: they are found by their raw ids, and ranked among all {len(self.vocabulary):,} of the model",
                stacklevel=4,
            )
        unit, own = made.preparation.get("time_unit"), self.time_unit
        if not getattr(self.model, "reads_times", False) or made.times is None:
            return made
        if unit is None and own is not None:
            check_unit(made.times, own, f"data set {dataset.name!r}", stacklevel=4)
            return replace(made, preparation={**made.preparation, "time_unit": own})  # which is not asked again
        if unit in (None, own):
            return made
        times = None if own is None else in_unit(made.times, unit, own)
        if times is None:
            known = own or "whole numbers of a unit that it does not say"
            raise UserError(
                f"the times of data set {dataset.name!r} are in {unit}, but the model reads times and its training "
                f"data had {known}; give the times in that unit"
            )
        return replace(made, times=times, preparation={**made.preparation, "time_unit": own})


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
        yield FittedFolder(user_path(out), None)
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
    except PermissionError as error:
        raise UserError(permission_denied(error)) from None
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
        if run.is_finished:
            way = f"load it with Recommender.load({str(path)!r})"
            RunFolder.refuse_taken(path, remedy=way)
        raise UserError(f"{error} (in Python: {_resuming(path, dataset)})") from None
    return path


def _resuming(path: Path, dataset: Dataset | None) -> str:
    return f"Recommender.resume({str(path)!r}{'' if dataset is None else ', dataset'})"


def _let_go(error: BaseException | None, handled: BaseException | None) -> None:
    """Empty the frames behind an error: a notebook keeps the last one, and with it all that was on the device.

    Those of what the caller was ``handled``-ing already are not ours.
    """
    while error is not None and error is not handled:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

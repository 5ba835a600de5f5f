"""A data set as a trained model reads it: its items have the indices that they have in the model."""

from __future__ import annotations

import warnings
from dataclasses import replace

from torch import nn

from recbft.datasets import Dataset
from recbft.datasets.events import check_unit, in_unit
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError
from recbft.runs.folder import RunFolder


def aligned(dataset: Dataset, model: nn.Module, vocabulary: Vocabulary, run: RunFolder, own: str | None) -> Dataset:
    """``Recommender.aligned``; see there.

    Args:
        vocabulary: the model's.
        run: it was trained in.
        own: the unit of the training data's times; None where it had none, or whole numbers.
    """
    try:
        made = dataset.numbered_as(vocabulary)
    except UserError as error:
        raise UserError(
            f"{run.path} is a model of data set {run.protocol['dataset']!r}: {error}; leave their events out, "
            "or give the data it was trained on"
        ) from None
    if made is not dataset:
        warnings.warn(
            f"data set {dataset.name!r} has its items in another order than what the model was trained on, or "
            f"fewer: they are found by their raw ids, and ranked among all {len(vocabulary):,} of the model",
            stacklevel=4,
        )
    unit = made.preparation.get("time_unit")
    if not getattr(model, "reads_times", False) or made.times is None:
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

"""What a model knows of the users that a part of a data set asks about: whose target is held out, and from what.

Validation is asked from the training prefix, test from the training prefix and the validation item.

Shapes: N users, D state width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recbft.datasets.batches import HISTORIES_PER_BATCH, Batch
from recbft.datasets.dataset import Dataset, View, leave_one_out
from recbft.errors import UserError
from recbft.models.contract import SequenceModel, read_histories
from recbft.system.torch_state import set_aside

IntArray = NDArray[np.int64]
Part = Literal["validation", "test"]
TOKENS_PER_GPU_BATCH = 200_000  # at most


def view_of(dataset: Dataset, part: str, users: IntArray | None = None) -> View:
    """What is ranked from what in a part, for all users or for some rows of them.

    Raises:
        UserError: the part is unknown or there is no user.
    """
    if part not in ("validation", "test"):
        raise UserError(f"unknown part {part!r}; choose validation or test")
    split = leave_one_out(dataset)
    view = split.validation if part == "validation" else split.test
    if users is not None:
        view = view.rows(users)
    if len(view.target) == 0:
        raise UserError(f"data set {dataset.name!r} has no user to evaluate; users need at least 3 events")
    return view


def some_users(num_users: int, num_items: int, *, scores: int, at_least: int) -> IntArray:
    """Row numbers in order: of everyone, or of as many as ``scores`` users by items allow, the same each time.

    Args:
        at_least: or of so many users where that is more.
    """
    return np.sort(np.random.default_rng(0).permutation(num_users)[: max(at_least, scores // num_items)])


@contextmanager
def evaluation_mode(model: SequenceModel) -> Iterator[None]:
    """Switch dropout and the like off, and afterwards back to what each part of the model had.

    The caller's default device and autocast are set aside, too.
    """
    # A model that serves has none in training: nothing of it is written, whichever threads ask.
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    try:
        for module in training:
            module.training = False
        with set_aside():
            yield
    finally:
        for module in training:
            module.training = True


def histories_at_once(model: SequenceModel, device: torch.device, lengths: IntArray) -> int:
    """How many histories evaluation reads at once: on a GPU, which waits for the launches of each batch, many.

    Attention by coordinate writes its weights out, which then bound them.

    Args:
        lengths: events of each history, (N,), in the order in which they are read.
    """
    if device.type == "cpu":
        return HISTORIES_PER_BATCH
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if any(getattr(module, "by_coordinate", False) for module in modules):
        return HISTORIES_PER_BATCH
    tokens = np.minimum(lengths, model.max_length)
    pieces = max(1, -(-int(tokens.sum()) // TOKENS_PER_GPU_BATCH))
    while (at_once := -(-len(tokens) // pieces)) > HISTORIES_PER_BATCH:
        if np.add.reduceat(tokens, np.arange(0, len(tokens), at_once)).max() <= TOKENS_PER_GPU_BATCH:
            return at_once
        pieces += -(-pieces // 10)  # where they are not spread evenly
    return HISTORIES_PER_BATCH


def batches_of_view(
    model: SequenceModel, dataset: Dataset, view: View, histories_per_batch: int = HISTORIES_PER_BATCH
) -> Iterator[Batch]:
    """What the model reads of the users of a view, in batches."""
    return read_histories(
        model,
        dataset.items,
        view.start,
        view.stop,
        times=dataset.times,
        source=f"data set {dataset.name!r}",
        histories_per_batch=histories_per_batch,
    )


def states_of_view(
    model: SequenceModel, dataset: Dataset, view: View, device: torch.device
) -> tuple[torch.Tensor, NDArray[np.floating] | None]:
    """States, (N, D), and precisions, (N,) or None where there are none, of the users of a view."""
    states, precisions = [], []  # on the device, which nobody waits for until all is under way
    at_once = histories_at_once(model, device, view.stop - view.start)
    for batch in batches_of_view(model, dataset, view, at_once):
        state, precision = model.user_states(batch.to(device))
        states.append(state)
        if precision is not None:
            precisions.append(precision.float())
    return torch.cat(states), torch.cat(precisions).cpu().numpy() if precisions else None


def events_of(items: IntArray, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
    """The events of each history side by side, and their offsets."""
    offsets = np.concatenate([[0], np.cumsum(stop - start)])
    event = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], stop - start)
    return items[event], offsets

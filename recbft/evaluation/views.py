"""What a model knows of the users that a part of a data set asks about: whose target is held out, and from what.

What that is says the split of the data set. Of several targets of a user the first is the user's next event.

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
from recbft.datasets.dataset import Dataset
from recbft.datasets.split import View
from recbft.errors import UserError
from recbft.models.contract import ComparedContent, SequenceModel, read_histories
from recbft.system.torch_state import set_aside

IntArray = NDArray[np.int64]
Part = Literal["validation", "test"]
TOKENS_PER_GPU_BATCH = 200_000  # at most


def view_of(dataset: Dataset, part: str, users: IntArray | None = None, *, next_events: bool = False) -> View:
    """What is ranked from what in a part, for all users or for some rows of them.

    Args:
        users: row numbers; all unless given.
        next_events: of several targets of a user the first alone, before rows are counted.

    Raises:
        UserError: the part is unknown or there is no user.
    """
    if part not in ("validation", "test"):
        raise UserError(f"unknown part {part!r}; choose validation or test")
    view = dataset.split.validation if part == "validation" else dataset.split.test
    if next_events:
        view = view.next_events()
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
        view.items,
        view.start,
        view.stop,
        times=view.times,
        reliability=view.reliability,
        source=f"data set {dataset.name!r}",
        histories_per_batch=histories_per_batch,
    )


def states_of_view(
    model: SequenceModel, dataset: Dataset, view: View, device: torch.device
) -> tuple[torch.Tensor, NDArray[np.floating] | None]:
    """States, (N, D), and precisions, (N,) or None where there are none, of a view's rows, each history read once."""
    number, view = view.history, view.histories()
    states, precisions = [], []  # on the device, which nobody waits for until all is under way
    at_once = histories_at_once(model, device, view.stop - view.start)
    for batch in batches_of_view(model, dataset, view, at_once):
        state, precision = model.user_states(batch.to(device))
        states.append(state)
        if precision is not None:
            precisions.append(precision.float())
    made, known = torch.cat(states), torch.cat(precisions).cpu().numpy() if precisions else None
    if number is None:
        return made, known
    return made[torch.from_numpy(number).to(made.device)], None if known is None else known[number]


def compared_of_view(model: SequenceModel, dataset: Dataset, view: View) -> ComparedContent | None:
    """``SequenceModel.compared`` of a view's rows."""
    number, view = view.history, view.histories()
    found = model.compared(batches_of_view(model, dataset, view))
    return found if found is None or number is None else found.of(number)


def seen_of(view: View) -> tuple[IntArray, IntArray]:
    """What is masked for each row, side by side, and offsets: the history's items but for all targets ranked from it.

    So the targets of a history are ranked in one list.
    """
    items, offsets = events_of(view.items, view.start, view.stop)
    whole = view if view.whole is None else view.whole
    if whole.history is None or not len(items):  # of the one target itself ranking takes care
        return items, offsets
    here = (whole.stop >= view.stop.min()) & (whole.stop <= view.stop.max())  # a history is known by where it stops
    stop, target = whole.stop[here], whole.target[here]
    width = int(max(items.max(), target.max())) + 1
    row = np.repeat(np.arange(len(view.target)), np.diff(offsets))
    stays = ~np.isin(view.stop[row] * width + items, stop * width + target)
    size = np.bincount(row[stays], minlength=len(view.target))
    return items[stays], np.concatenate([[0], np.cumsum(size)])


def events_of(items: IntArray, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
    """The events of each history side by side, and their offsets."""
    offsets = np.concatenate([[0], np.cumsum(stop - start)])
    event = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], stop - start)
    return items[event], offsets

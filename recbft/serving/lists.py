"""Lists for histories of raw ids, of users seen in training or not, with the precision and probability behind each.

Shapes: S histories, k items per list.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.config.fields import is_whole
from recbft.datasets.vocabulary import Vocabulary, shown_id
from recbft.errors import UserError
from recbft.evaluation.probability import Calibration
from recbft.evaluation.top_k import top_k
from recbft.evaluation.views import evaluation_mode
from recbft.models.contract import SequenceModel, read_histories
from recbft.serving.given_histories import Encoded, Histories, Users, encode, is_listed

HISTORIES_AT_ONCE = 4096
ROWS_AT_ONCE = 2**20  # of lists: fewer histories at once where k is large


class Choice(NamedTuple):
    """Which items a list may hold, by index, each once and in order."""

    among: NDArray[np.int64] | None  # these alone; None for all
    barred: NDArray[np.int64] | None  # and none of these


ALL = Choice(None, None)


def recommend(
    model: SequenceModel,
    vocabulary: Vocabulary,
    histories: Histories,
    k: int,
    *,
    filter_seen: bool = True,
    exclude: Iterable[Any] | None = None,
    candidates: Iterable[Any] | None = None,
    memory_mb: float = 256.0,
    calibration: Calibration | None = None,
    time_unit: str | None = None,
) -> pd.DataFrame:
    """``Recommender.recommend``; see there.

    A model that reads event times takes a data frame whose third column ``timestamp`` holds dates, or whole numbers in
    the unit of the training data: ``time_unit``, which is None where that data held whole numbers too. What is finer
    in a date is cut off. ``calibration`` makes the probabilities, NaN without it.

    Raises:
        ColdStartError: no history holds an item that the model knows.
        UserError: no history, a blank user, a k below 1, no candidate that the model knows, no times for a model that
            reads them, times that ``Dataset.from_frame`` would refuse too, or a model that was trained with the
            target's time, which nobody knows here.
    """
    check_asked(model, k)
    check_filter_seen(filter_seen)
    encoded = encode(histories, vocabulary, reads_times=reads_times(model), time_unit=time_unit)
    choice = _choice(vocabulary, exclude, candidates)
    blocks = list(blocks_of_lists(model, vocabulary, encoded, k, filter_seen, choice, calibration, memory_mb))
    attrs = summed([block.attrs for block in blocks])
    for block in blocks:  # pandas would compare them
        block.attrs = {}
    table = blocks[0] if len(blocks) == 1 else pd.concat(blocks, ignore_index=True)
    table.attrs = attrs
    return table


def recommend_in_blocks(
    model: SequenceModel,
    vocabulary: Vocabulary,
    histories: Histories,
    k: int,
    *,
    filter_seen: bool = True,
    exclude: Iterable[Any] | None = None,
    candidates: Iterable[Any] | None = None,
    memory_mb: float = 256.0,
    calibration: Calibration | None = None,
    time_unit: str | None = None,
) -> Iterator[pd.DataFrame]:
    """``Recommender.recommend_in_blocks``; see there. It takes what ``recommend`` does, and raises that at once."""
    check_asked(model, k)
    check_filter_seen(filter_seen)
    encoded = encode(histories, vocabulary, reads_times=reads_times(model), time_unit=time_unit)
    choice = _choice(vocabulary, exclude, candidates)
    return blocks_of_lists(model, vocabulary, encoded, k, filter_seen, choice, calibration, memory_mb)


def summed(attrs: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """What the ``attrs`` of blocks say of all of them."""
    total: dict[Any, Any] = {"unknown_events": 0, "skipped_users": Users(), "short_lists": 0}
    for one in attrs:
        total["unknown_events"] += one["unknown_events"]
        total["skipped_users"] += one["skipped_users"]
        total["short_lists"] += one["short_lists"]
        total["shortest_list"] = min(one["shortest_list"], total.get("shortest_list", one["shortest_list"]))
    return total


def check_asked(model: SequenceModel, k: Any) -> None:
    """Refuse a k that is no positive whole number, and a model that cannot recommend.

    Raises:
        UserError: as ``recommend``.
    """
    if not is_whole(k):
        raise UserError(f"k is {k!r}; give a whole number, the length of the lists")
    if k < 1:
        raise UserError(f"k is {k}; ask for at least 1 item")
    if model.shows_target_time:
        raise UserError(
            "this model was trained with show_target_time: true, but the time of the next event is not known when "
            "recommending; train with show_target_time: false"
        )


def check_filter_seen(filter_seen: Any) -> None:
    """Refuse what is neither True nor False: the text "false" of a request would count as True.

    Raises:
        UserError: naming the value.
    """
    if not isinstance(filter_seen, (bool, np.bool_)):
        shown = " ".join(repr(filter_seen).split())[:60]
        raise UserError(f"filter_seen is {shown}; give True (lists leave out what the user has) or False")


def reads_times(model: SequenceModel) -> bool:
    """Whether the model needs the time of every event."""
    return model.reads_times


def blocks_of_lists(
    model: SequenceModel,
    vocabulary: Vocabulary,
    encoded: Encoded,
    k: int,
    filter_seen: bool = True,
    choice: Choice = ALL,
    calibration: Calibration | None = None,
    memory_mb: float = 256.0,
) -> Iterator[pd.DataFrame]:
    """The lists of ``encoded.users``, in their order, of as many at once as memory bears; at least one block."""
    most = max(1, min(k, len(vocabulary) if choice.among is None else len(choice.among)))
    step = min(HISTORIES_AT_ONCE, max(1, ROWS_AT_ONCE // most))
    skipped: dict[Any, Any] = {"unknown_events": encoded.unknown_events, "skipped_users": encoded.skipped_users}
    for first in range(0, len(encoded.users), step):
        own = slice(first, first + step)
        with torch.inference_mode(), evaluation_mode(model):  # not where the caller works with the block
            block, lengths = _lists(model, vocabulary, encoded, own, most, filter_seen, choice, calibration, memory_mb)
        short: dict[Any, Any] = {"short_lists": int((lengths < k).sum()), "shortest_list": int(lengths.min())}
        block.attrs = {**skipped, **short}
        skipped = {"unknown_events": 0, "skipped_users": Users()}
        yield block


def _lists(
    model: SequenceModel,
    vocabulary: Vocabulary,
    encoded: Encoded,
    own: slice,
    k: int,
    filter_seen: bool,
    choice: Choice,
    calibration: Calibration | None,
    memory_mb: float,
) -> tuple[pd.DataFrame, NDArray[np.int64]]:
    """The lists of some histories, and how long each is."""
    users = encoded.users.iloc[own]
    offsets = encoded.offsets[own.start : own.start + len(users) + 1]
    table = model.item_table()
    states, precisions = states_of(model, encoded, own, table.weight.device)
    best = top_k(
        states,
        table,
        k,
        exclude_items=encoded.items[offsets[0] : offsets[-1]] if filter_seen else None,
        exclude_offsets=offsets - offsets[0] if filter_seen else None,
        among=choice.among,
        barred=choice.barred,
        calibration=calibration,
        memory_mb=memory_mb,
        user_ids=users.to_numpy(dtype=object),
    )
    filled = best.items > 0
    items = vocabulary.decode(best.items[filled])
    lists: pd.DataFrame = pd.DataFrame(
        {
            # Columns have the types of all their ids, whichever of them are in this block.
            "user": pd.Series(users.array.take(np.repeat(np.arange(len(users)), best.lengths)), dtype=users.dtype),
            "item": pd.Series(items, dtype=vocabulary.dtype),
            "score": best.scores[filled],
            "rank": np.broadcast_to(np.arange(1, k + 1), filled.shape)[filled],
            "precision": np.repeat(precisions.double().cpu().numpy(), best.lengths),
            "probability": best.probabilities[filled],
        }
    )
    return lists, best.lengths


def states_of(model: SequenceModel, encoded: Encoded, own: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """State and precision of some histories, (S, D) and (S,), NaN where the model keeps no precision."""
    offsets = encoded.offsets[own.start : own.stop + 1]
    states, precisions = [], []
    for batch in read_histories(
        model, encoded.items, offsets[:-1], offsets[1:], times=encoded.times, source="the list of histories"
    ):
        state, precision = model.user_states(batch.to(device))
        states.append(state)
        precisions.append(torch.full_like(state[:, 0], float("nan")) if precision is None else precision)
    return torch.cat(states), torch.cat(precisions)


def _choice(vocabulary: Vocabulary, exclude: Iterable[Any] | None, candidates: Iterable[Any] | None) -> Choice:
    among = barred = None
    if candidates is not None:
        ids = _ids("candidates", candidates)
        known = vocabulary.encode(ids)
        if not known.any():
            such = f" (such as {shown_id(next(iter(ids)))})" if len(ids) else ""
            raise UserError(
                f"none of the {len(ids):,} candidates is in the model's vocabulary{such}; give some that are"
            )
        among = np.unique(known[known > 0])
    if exclude is not None:
        ids = _ids("exclude", exclude)
        out = vocabulary.encode(ids)
        if len(ids) and not out.any():
            warnings.warn(
                f"none of the {len(ids):,} excluded items is in the model's vocabulary (such as "
                f"{shown_id(next(iter(ids)))}, while the model knows {vocabulary.example!r}), so that none is left out "
                "of the lists",
                stacklevel=4,
            )
        barred = np.unique(out[out > 0])
    return Choice(among, barred)


def _ids(name: str, given: Any) -> Any:
    """The ids as ``Vocabulary.encode`` takes them."""
    if hasattr(given, "columns"):  # of which a loop would give the names
        raise UserError(f"{name} is a table ({type(given).__name__}); give its column of item ids")
    if not is_listed(given):
        raise UserError(f"{name} is {given!r}; give a list of item ids")
    return given if isinstance(given, (np.ndarray, pd.Series, pd.Index)) and given.ndim == 1 else list(given)

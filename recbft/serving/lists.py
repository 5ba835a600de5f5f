"""What a model has for histories of raw ids, of users seen in training or not: lists, and the vectors behind them.

A list has the precision and probability behind each item. The products of the vectors are the scores: for an index of
neighbours, or as features elsewhere.

    score(user, item) = x_user . y_item        x = state,       y = weight                           (a)
                                               x = (state, 1),  y = (weight, bias)   with item biases (b)

Shapes: S histories, V items, k items per list, D width of (a), or one more in (b).
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
from recbft.serving.histories import Encoded, Histories, Users, as_list, encode

HISTORIES_AT_ONCE = 4096
ROWS_AT_ONCE = 2**20  # of lists: fewer histories at once where k is large


class Asked(NamedTuple):
    """What lists are to be like."""

    k: int  # items per list
    filter_seen: bool = True
    among: NDArray[np.int64] | None = None  # the only items to choose from, by index, each once and in order
    barred: NDArray[np.int64] | None = None  # items that no list may hold
    calibration: Calibration | None = None  # makes the probabilities, NaN without it
    memory_mb: float = 256.0


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
    """``Recommender.recommend_in_blocks``; see there. What is wrong is raised at once, and not with the first block.

    A model that reads event times takes a data frame whose third column ``timestamp`` holds dates, or whole numbers in
    the unit of the training data: ``time_unit``, which is None where that data held whole numbers too. What is finer
    in a date is cut off.

    Raises:
        ColdStartError: no history holds an item that the model knows.
        UserError: no history, a blank user, a k below 1, no candidate that the model knows, no times for a model that
            reads them, times that ``Dataset.from_frame`` would refuse too, or a model that was trained with the
            target's time, which nobody knows here.
    """
    check_asked(model, k)
    check_filter_seen(filter_seen)
    encoded = encode(histories, vocabulary, reads_times=model.reads_times, time_unit=time_unit)
    among, barred = _candidates(vocabulary, candidates), _excluded(vocabulary, exclude)
    return blocks_of_lists(
        model, vocabulary, encoded, Asked(k, bool(filter_seen), among, barred, calibration, memory_mb)
    )


def joined(blocks: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The rows of all blocks in one table."""
    blocks = list(blocks)
    attrs = summed([block.attrs for block in blocks])
    for block in blocks:  # pandas would compare them
        block.attrs = {}
    table = blocks[0] if len(blocks) == 1 else pd.concat(blocks, ignore_index=True)
    table.attrs = attrs
    return table


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
    """UserError for a k that is no positive whole number, and for a model that cannot recommend."""
    if not (is_whole(k) and k >= 1):
        raise UserError(f"k is {k!r}; give a whole number of at least 1, the length of the lists")
    if model.shows_target_time:
        raise UserError(
            "this model was trained with show_target_time: true, but the time of the next event is not known when "
            "recommending; train with show_target_time: false"
        )


def check_filter_seen(filter_seen: Any) -> None:
    """UserError for what is neither True nor False: the text "false" of a request would count as True."""
    if not isinstance(filter_seen, (bool, np.bool_)):
        shown = " ".join(repr(filter_seen).split())[:60]
        raise UserError(f"filter_seen is {shown}; give True (lists leave out what the user has) or False")


def blocks_of_lists(
    model: SequenceModel, vocabulary: Vocabulary, encoded: Encoded, asked: Asked
) -> Iterator[pd.DataFrame]:
    """The lists of ``encoded.users``, in their order, of as many at once as memory bears; at least one block."""
    most = max(1, min(asked.k, len(vocabulary) if asked.among is None else len(asked.among)))
    step = min(HISTORIES_AT_ONCE, max(1, ROWS_AT_ONCE // most))
    skipped: dict[Any, Any] = {"unknown_events": encoded.unknown_events, "skipped_users": encoded.skipped_users}
    for first in range(0, len(encoded.users), step):
        own = slice(first, first + step)
        with torch.inference_mode(), evaluation_mode(model):  # not where the caller works with the block
            block, lengths = _lists(model, vocabulary, encoded, own, asked._replace(k=most))
        short: dict[Any, Any] = {"short_lists": int((lengths < asked.k).sum()), "shortest_list": int(lengths.min())}
        block.attrs = {**skipped, **short}
        skipped = {"unknown_events": 0, "skipped_users": Users()}
        yield block


def _lists(
    model: SequenceModel, vocabulary: Vocabulary, encoded: Encoded, own: slice, asked: Asked
) -> tuple[pd.DataFrame, NDArray[np.int64]]:
    """The lists of some histories, and how long each is."""
    users = encoded.users.iloc[own]
    offsets = encoded.offsets[own.start : own.start + len(users) + 1]
    table = model.item_table()
    states, precisions = states_of(model, encoded, own, table.weight.device)
    best = top_k(
        states,
        table,
        asked.k,
        exclude_items=encoded.items[offsets[0] : offsets[-1]] if asked.filter_seen else None,
        exclude_offsets=offsets - offsets[0] if asked.filter_seen else None,
        among=asked.among,
        barred=asked.barred,
        calibration=asked.calibration,
        memory_mb=asked.memory_mb,
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
            "rank": np.broadcast_to(np.arange(1, asked.k + 1), filled.shape)[filled],
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


def _candidates(vocabulary: Vocabulary, candidates: Iterable[Any] | None) -> NDArray[np.int64] | None:
    """The indices of the only items that lists may hold; UserError where the model knows none of them."""
    if candidates is None:
        return None
    ids = _ids("candidates", candidates)
    index = vocabulary.encode(ids)
    if not index.any():
        such = f" (such as {shown_id(next(iter(ids)))})" if len(ids) else ""
        raise UserError(f"none of the {len(ids):,} candidates is in the model's vocabulary{such}; give some that are")
    return np.unique(index[index > 0])


def _excluded(vocabulary: Vocabulary, exclude: Iterable[Any] | None) -> NDArray[np.int64] | None:
    """The indices of the items that no list may hold, with a warning where the model knows none of them."""
    if exclude is None:
        return None
    ids = _ids("exclude", exclude)
    index = vocabulary.encode(ids)
    if len(ids) and not index.any():
        warnings.warn(
            f"none of the {len(ids):,} excluded items is in the model's vocabulary (such as "
            f"{shown_id(next(iter(ids)))}, while the model knows {vocabulary.example!r}), so that none is left out "
            "of the lists",
            stacklevel=4,
        )
    return np.unique(index[index > 0])


def _ids(name: str, ids: Any) -> Any:
    """The ids as ``Vocabulary.encode`` takes them."""
    is_column = isinstance(ids, (np.ndarray, pd.Series, pd.Index)) and ids.ndim == 1
    return ids if is_column else as_list(ids, f"{name} is", "a list of item ids", ordered=False)


class UserVectors(NamedTuple):
    """What a model knows of users after their last event."""

    users: pd.Series[Any]  # (S,) raw ids, of histories with a known item
    vectors: NDArray[np.floating]  # (S, D)
    precision: NDArray[np.floating]  # (S,) posterior precision, NaN where the model keeps none
    unknown_events: int  # events of items that the model does not know
    skipped_users: list[Any]  # without a known item


class ItemVectors(NamedTuple):
    """The items of the vocabulary."""

    items: NDArray[Any]  # (V,) raw ids
    vectors: NDArray[np.floating]  # (V, D)


def user_vectors(
    model: SequenceModel,
    vocabulary: Vocabulary,
    histories: Histories,
    *,
    time_unit: str | None = None,
) -> UserVectors:
    """``Recommender.user_vectors``; see there."""
    check_asked(model, 1)
    encoded = encode(histories, vocabulary, reads_times=model.reads_times, time_unit=time_unit)
    table, blocks = model.item_table(), []
    with torch.inference_mode(), evaluation_mode(model):
        for first in range(0, len(encoded.users), HISTORIES_AT_ONCE):
            own = slice(first, min(first + HISTORIES_AT_ONCE, len(encoded.users)))
            state, precision = states_of(model, encoded, own, table.weight.device)
            if table.bias is not None:  # (b)
                state = torch.cat([state, torch.ones_like(state[:, :1])], dim=1)
            blocks.append((state.cpu().numpy(), precision.cpu().numpy()))
    vectors, precisions = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return UserVectors(encoded.users, vectors, precisions, encoded.unknown_events, list(encoded.skipped_users))


@torch.inference_mode()
def item_vectors(model: SequenceModel, vocabulary: Vocabulary) -> ItemVectors:
    """``Recommender.item_vectors``; see there."""
    weight, bias = model.item_table()
    vectors = weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)
    return ItemVectors(vocabulary.ids.copy(), vectors[1:].cpu().numpy().copy())

"""The k best items for histories of raw ids, of users seen in training or not, as tables or as plain lists.

Each list has the precision and probabilities behind it. With a fallback, users of whom the model knows nothing, or has
nothing left to show, get what is popular.

Shapes: S histories, V items, k items per list, D state width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.config.fields import is_whole
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError, shown
from recbft.evaluation.probability import Calibration
from recbft.evaluation.top_k import TopK, top_k
from recbft.evaluation.views import evaluation_mode
from recbft.models.contract import ItemTable, SequenceModel, UserStates, read_histories
from recbft.serving.caps import Caps, Labels
from recbft.serving.filters import Choice, Filters, IntArray, Pairs
from recbft.serving.histories import Encoded, Histories, Users, column_of, encode
from recbft.serving.served import Served
from recbft.system.torch_state import threads_for

HISTORIES_AT_ONCE = 4096
ROWS_AT_ONCE = 2**20  # of lists: fewer histories at once where k is large
Fallback = Literal["popular"]


class Asked(NamedTuple):
    """What lists are to be like."""

    k: int  # items per list
    filter_seen: bool = True
    filters: Filters = Filters()  # by history
    popular: Tensor | None = None  # (V + 1,) what ranks the items for those without a list; None leaves them without
    calibration: Calibration | None = None  # makes the probabilities, NaN without it
    memory_mb: float = 256.0
    caps: Caps | None = None


class Lists(NamedTuple):
    """The lists of some histories, best first; a list that is shorter than k ends in padding."""

    items: IntArray  # (S, k) item index, 0 is padding
    scores: NDArray[np.floating]  # (S, k) NaN at padding, and in a list of popular items
    probabilities: NDArray[np.float64]  # (S, k) NaN there too, and without a calibration
    lengths: IntArray  # (S,)
    precision: NDArray[np.floating]  # (S,) NaN where the model keeps none
    fallback: NDArray[np.bool_]  # (S,) whether a list holds popular items


class Recommended(NamedTuple):
    """One user's list, best first, in plain Python values."""

    items: list[Any]  # raw ids
    scores: list[float] | None  # None of popular items
    probabilities: list[float] | None  # None of a run without calibration, and of popular items
    precision: float | None  # None where the model keeps none, and of popular items
    fallback: bool  # whether these are popular items, in the place of a list


def recommend_in_blocks(
    model: SequenceModel,
    vocabulary: Vocabulary,
    histories: Histories,
    k: int,
    *,
    filter_seen: bool = True,
    exclude: Choice | None = None,
    candidates: Choice | None = None,
    cap: Mapping[str, int] | None = None,
    fallback: Fallback | None = None,
    popular: Tensor | None = None,
    labels: Labels | None = None,
    memory_mb: float = 256.0,
    calibration: Calibration | None = None,
    time_unit: str | None = None,
) -> Iterator[pd.DataFrame]:
    """``Recommender.recommend_in_blocks``; see there. What is wrong is raised at once, and not with the first block.

    A model that reads event times takes a data frame whose third column ``timestamp`` holds dates, or whole numbers in
    the unit of the training data: ``time_unit``, which is None where that data held whole numbers too. What is finer
    in a date is cut off. ``popular`` ranks items for the fallback, (V + 1,), such as their counts in training, and
    ``labels`` are what caps are of.

    Raises:
        ColdStartError: no history holds an item that the model knows, and there is no fallback.
        UserError: no history, a blank user, a k below 1, no candidate that the model knows, no times for a model that
            reads them, times that ``Dataset.from_frame`` would refuse too, or a model that was trained with the
            target's time, which nobody knows here.
    """
    check_asked(model, k)
    check_filter_seen(filter_seen)
    shown = _check_fallback(fallback, popular)
    encoded = encode(
        histories, vocabulary, model, time_unit=time_unit,
        keep_empty=model.same_for_all or fallback is not None,
    )  # fmt: skip
    filters = Filters.of(vocabulary, encoded.users, exclude, candidates)
    asked = Asked(k, bool(filter_seen), filters, shown, calibration, memory_mb, Caps.of(labels, cap))
    return blocks_of_lists(model, vocabulary, encoded, asked)


def recommend_lists(
    model: SequenceModel,
    vocabulary: Vocabulary,
    histories: Histories,
    k: int,
    *,
    filter_seen: bool = True,
    exclude: Choice | None = None,
    candidates: Choice | None = None,
    cap: Mapping[str, int] | None = None,
    fallback: Fallback | None = None,
    popular: Tensor | None = None,
    labels: Labels | None = None,
    memory_mb: float = 256.0,
    calibration: Calibration | None = None,
    time_unit: str | None = None,
) -> list[Recommended]:
    """``Recommender.recommend_lists``; see there."""
    check_asked(model, k)
    check_filter_seen(filter_seen)
    shown = _check_fallback(fallback, popular)
    encoded = encode(histories, vocabulary, model, time_unit=time_unit, keep_empty=True)
    filters = Filters.of(vocabulary, encoded.users, exclude, candidates)
    asked = Asked(k, bool(filter_seen), filters, shown, calibration, memory_mb, Caps.of(labels, cap))
    answers: list[Recommended] = []
    for rows in _portions(encoded, asked, len(vocabulary)):
        found = lists_of(model, encoded, rows, asked)
        items = vocabulary.ids[found.items - 1]  # padding too, which is cut off
        parts = zip(items.tolist(), found.scores.tolist(), found.probabilities.tolist(), found.lengths.tolist(),
                    found.precision.tolist(), found.fallback.tolist(), strict=True)  # fmt: skip
        for own, scores, chances, length, precision, is_fallback in parts:
            known = length and not is_fallback
            answers.append(
                Recommended(
                    own[:length],
                    None if is_fallback else scores[:length],
                    chances[:length] if known and calibration is not None else None,
                    precision if known and precision == precision else None,
                    is_fallback,
                )
            )
    return answers


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
        if "fallback_lists" in one:
            total["fallback_lists"] = total.get("fallback_lists", 0) + one["fallback_lists"]
        total["shortest_list"] = min(one["shortest_list"], total.get("shortest_list", one["shortest_list"]))
    return total


def check_k(k: Any) -> None:
    """UserError for a k that is no positive whole number."""
    if not (is_whole(k) and k >= 1):
        raise UserError(f"k is {k!r}; give a whole number of at least 1, the length of the lists")


def check_asked(model: SequenceModel, k: Any) -> None:
    """UserError for a k that is no positive whole number, and for a model that cannot recommend."""
    check_k(k)
    if model.shows_target_time:
        raise UserError(
            "this model was trained with show_target_time: true, but the time of the next event is not known when "
            "recommending; train with show_target_time: false"
        )


def check_filter_seen(filter_seen: Any) -> None:
    """UserError for what is neither True nor False: the text "false" of a request would count as True."""
    if not isinstance(filter_seen, (bool, np.bool_)):
        raise UserError(f"filter_seen is {shown(filter_seen)}; give True (lists leave out what the user has) or False")


def _check_fallback(fallback: Any, popular: Tensor | None) -> Tensor | None:
    """What ranks the items of a fallback, where there is to be one."""
    if fallback is None:
        return None
    if fallback != "popular":
        raise UserError(f"fallback is {fallback!r}; give 'popular', or leave it out")
    assert popular is not None
    return popular


def blocks_of_lists(
    model: SequenceModel, vocabulary: Vocabulary, encoded: Encoded, asked: Asked
) -> Iterator[pd.DataFrame]:
    """The lists of ``encoded.users``, in their order, of as many at once as memory bears; at least one block."""
    users = column_of(encoded.users)
    skipped: dict[Any, Any] = {"unknown_events": encoded.unknown_events, "skipped_users": encoded.skipped_users}
    for rows in _portions(encoded, asked, len(vocabulary)):
        found = lists_of(model, encoded, rows, asked)
        block = _frame(found, users.iloc[rows[0] : rows[-1] + 1], vocabulary)
        lengths = found.lengths
        if asked.popular is not None:
            block["fallback"] = np.repeat(found.fallback, lengths)
        short: dict[Any, Any] = {"short_lists": int((lengths < asked.k).sum()), "shortest_list": int(lengths.min())}
        if asked.popular is not None:
            short["fallback_lists"] = int(found.fallback.sum())
        block.attrs = {**skipped, **short}
        skipped = {"unknown_events": 0, "skipped_users": Users()}
        yield block


def _portions(encoded: Encoded, asked: Asked, num_items: int) -> Iterator[IntArray]:
    """The rows of all histories, as many at once as memory bears."""
    step = min(HISTORIES_AT_ONCE, max(1, ROWS_AT_ONCE // _longest(asked, num_items)))
    for first in range(0, len(encoded.users), step):
        yield np.arange(first, min(first + step, len(encoded.users)))


def _longest(asked: Asked, num_items: int) -> int:
    """How long a list may be."""
    among = asked.filters.among
    return max(1, min(asked.k, num_items if among is None else len(among)))


def _frame(found: Lists, users: pd.Series[Any], vocabulary: Vocabulary) -> pd.DataFrame:
    filled = found.items > 0
    lists: pd.DataFrame = pd.DataFrame(
        {
            # Columns have the types of all their ids, whichever of them are in this block.
            "user": pd.Series(users.array.take(np.repeat(np.arange(len(users)), found.lengths)), dtype=users.dtype),
            "item": pd.Series(vocabulary.decode(found.items[filled]), dtype=vocabulary.dtype),
            "score": found.scores[filled],
            "rank": np.broadcast_to(np.arange(1, filled.shape[1] + 1), filled.shape)[filled],
            "precision": np.repeat(found.precision.astype(np.float64), found.lengths),
            "probability": found.probabilities[filled],
        }
    )
    return lists


def lists_of(model: SequenceModel, encoded: Encoded, rows: IntArray, asked: Asked) -> Lists:
    """The lists of some histories, neighbours in their order."""
    with torch.inference_mode(), evaluation_mode(model):  # not where the caller works with the lists
        table = model.item_table()
        k = _longest(asked, len(table.weight) - 1)
        asked = asked._replace(k=k)
        known = rows if model.same_for_all else rows[encoded.offsets[rows + 1] > encoded.offsets[rows]]
        with threads_for(work_of(model, encoded, known, table)):
            found = _of_model(model, table, encoded, known, asked) if len(known) else None
            if found is not None and len(known) == len(rows) and (asked.popular is None or found.lengths.all()):
                return found
            return _with_popular(found, known, encoded, rows, asked)


def _of_model(model: SequenceModel, table: ItemTable, encoded: Encoded, rows: IntArray, asked: Asked) -> Lists:
    states, precision = states_of(model, encoded, rows, table.weight.device)
    filters, seen, users = asked.filters, Pairs(encoded.items, encoded.offsets), encoded.users
    if len(rows) < len(users):
        filters, seen, users = filters.rows(rows), seen.rows(rows), [users[row] for row in rows]
    left_out = seen.beside(filters.excluded) if asked.filter_seen else filters.excluded
    best = _best(states, table, left_out, filters, asked, calibration=asked.calibration, user_ids=users)
    nobody = np.zeros(len(rows), bool)
    return Lists(best.items, best.scores, best.probabilities, best.lengths, precision.cpu().numpy(), nobody)


def _with_popular(found: Lists | None, known: IntArray, encoded: Encoded, rows: IntArray, asked: Asked) -> Lists:
    """The lists of all rows, those that the model leaves empty filled with what is popular, if that is asked for."""
    size, k = len(rows), asked.k
    lists = Lists(
        np.zeros((size, k), np.int64),
        np.full((size, k), np.nan, np.float32 if found is None else found.scores.dtype),
        np.full((size, k), np.nan),
        np.zeros(size, np.int64),
        np.full(size, np.nan, np.float32 if found is None else found.precision.dtype),
        np.zeros(size, bool),
    )
    if found is not None:
        for whole, part in zip(lists, found, strict=True):
            whole[known - rows[0]] = part
    empty = rows[lists.lengths == 0]
    if asked.popular is None or not len(empty):
        return lists
    # What the user has seen is shown again where nothing else is left.
    counts, filters = asked.popular.double()[:, None], asked.filters.rows(empty)
    states = counts.new_ones(len(empty), 1)
    popular = _best(states, ItemTable(counts, None), filters.excluded, filters, asked)
    here = empty - rows[0]
    lists.items[here], lists.lengths[here], lists.fallback[here] = popular.items, popular.lengths, True
    lists.precision[here] = np.nan
    return lists


def _best(
    states: Tensor, table: ItemTable, left_out: Pairs | None, filters: Filters, asked: Asked, **more: Any
) -> TopK:
    """The best items of each state, without those of ``left_out`` and by the filters of the same histories."""
    if asked.caps is not None:
        users = more.pop("user_ids", None)

        def some(rows: IntArray, k: int) -> TopK:
            own = {} if users is None else {"user_ids": [users[row] for row in rows]}
            without = None if left_out is None else left_out.rows(rows)
            uncapped = asked._replace(k=k, caps=None)
            return _best(states[rows], table, without, filters.rows(rows), uncapped, **more, **own)

        num_items = len(table.weight) - 1
        return asked.caps.lists(some, len(states), asked.k, _longest(asked._replace(k=num_items), num_items))
    only = filters.only
    return top_k(
        states,
        table,
        asked.k,
        exclude_items=None if left_out is None else left_out.items,
        exclude_offsets=None if left_out is None else left_out.offsets,
        only_items=None if only is None else only.items,
        only_offsets=None if only is None else only.offsets,
        among=filters.among,
        barred=filters.barred,
        memory_mb=asked.memory_mb,
        **more,
    )


def states_of(model: SequenceModel, encoded: Encoded, rows: IntArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """State and precision of some histories, (S, D) and (S,), NaN where the model keeps no precision."""
    items, start, stop, times = encoded.items, encoded.offsets[rows], encoded.offsets[rows + 1], encoded.times
    reliability = encoded.reliability
    if model.same_for_all:  # an empty history too
        items, start, stop, times = np.ones(1, np.int64), np.zeros_like(rows), np.ones_like(rows), None
        reliability = None
    found: list[UserStates] = []
    if len(rows) == 1 and isinstance(model, Served):
        own = slice(start[0], stop[0])
        found = model.states_of_one(items[own], None if times is None else times[own])
    if not found:
        known: dict[str, Any] = {"times": times, "reliability": reliability}
        batches = read_histories(model, items, start, stop, **known, source="the list of histories")
        found = [model.user_states(batch.to(device)) for batch in batches]
    states = [one.state for one in found]
    precisions = [x.state.new_full((len(x.state),), np.nan) if x.precision is None else x.precision for x in found]
    return torch.cat(states), torch.cat(precisions)


def work_of(model: SequenceModel, encoded: Encoded, rows: IntArray, table: ItemTable) -> int:
    """Multiplications behind the lists of some histories, roughly: of two layers, and of the scores."""
    tokens = np.minimum(encoded.offsets[rows + 1] - encoded.offsets[rows], model.max_length).sum()
    return int(tokens) * 32 * table.weight.shape[1] ** 2 + len(rows) * table.weight.numel()

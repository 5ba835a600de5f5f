"""Lists for histories of raw ids, of users seen in training or not, with the precision behind each; and why an item.

Shapes: S histories, k items per list, I items explained.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from numpy.typing import NDArray

from recbft.config import is_whole
from recbft.datasets.events import check_columns, in_unit, read_times, refuse_finer, steps_back
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import ColdStartError, UserError
from recbft.evaluation import explain as explanations
from recbft.evaluation.evaluate import evaluation_mode
from recbft.evaluation.top_k import top_k
from recbft.models.contract import SequenceModel, read_histories

Histories = Mapping[Any, Sequence[Any]] | Iterable[Sequence[Any]] | pd.Series | pd.DataFrame
HISTORIES_AT_ONCE = 4096
EXPLAINED = 3


class _Encoded(NamedTuple):
    users: pd.Series[Any]  # (S,) those with an item the model knows
    items: NDArray[np.int64]  # known items side by side
    offsets: NDArray[np.int64]  # (S + 1,)
    times: NDArray[np.int64] | None  # of the items, for models that read times
    unknown_events: int
    skipped_users: list[Any]


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
    time_unit: str | None = None,
) -> pd.DataFrame:
    """``Recommender.recommend``; see there.

    A model that reads event times takes a data frame whose third column ``timestamp`` holds dates, or whole numbers in
    the unit of the training data: ``time_unit``, which is None where that data held whole numbers too. What is finer
    in a date is cut off.

    Raises:
        ColdStartError: no history holds an item that the model knows.
        UserError: no history, a blank user, fewer than k items left for a user, no candidate that the model knows, no
            times for a model that reads them, times that ``Dataset.from_frame`` would refuse too, or a model that was
            trained with the target's time, which nobody knows here.
    """
    _check_length(k)
    _refuse_target_time(model)
    histories = _as_frame(histories)
    encoded = _encode(histories, vocabulary, _times(histories, time_unit) if _reads_times(model) else None)
    _warn_if_out_of_order(histories)
    barred = _barred(vocabulary, exclude, candidates)
    parts = []
    with torch.inference_mode(), evaluation_mode(model):
        for first in range(0, len(encoded.users), HISTORIES_AT_ONCE):
            parts.append(_lists(model, vocabulary, encoded, first, k, filter_seen, memory_mb, barred))
    table = pd.concat(parts, ignore_index=True)
    table.attrs = {"unknown_events": encoded.unknown_events, "skipped_users": encoded.skipped_users}
    return table


def explain(
    model: SequenceModel,
    vocabulary: Vocabulary,
    history: Sequence[Any] | pd.DataFrame,
    item: Any = None,
    k: int | None = None,
    *,
    memory_mb: float = 256.0,
    time_unit: str | None = None,
) -> pd.DataFrame:
    """``Recommender.explain``; see there.

    Raises:
        UserError: as ``recommend``; more than one history, an unknown item, or an item and a k.
    """
    if item is not None and k is not None:
        raise UserError(f"k is {k}, which has no effect where an item is named; give one of them")
    if k is not None:
        _check_length(k)
    _refuse_target_time(model)
    histories, raw = _one(_as_frame(history))
    encoded = _encode(histories, vocabulary, _times(histories, time_unit) if _reads_times(model) else None)
    _warn_if_out_of_order(histories)
    places = np.flatnonzero(vocabulary.encode(raw) > 0)  # of the known events
    items = [item]
    if item is None:
        left = len(vocabulary) - len(np.unique(encoded.items))
        if left < (k or 1):
            asked = "" if k is None else f"k is {k}, but "
            raise UserError(
                f"{asked}only {left} of {len(vocabulary)} items are not in the history; name an item to explain"
                + (", or lower k" if left else "")
            )
        with torch.inference_mode(), evaluation_mode(model):
            best = _lists(model, vocabulary, encoded, 0, min(EXPLAINED, left) if k is None else k, True, memory_mb)
        items = best["item"].tolist()
    wanted = vocabulary.encode(items)
    if (wanted == 0).any():
        raise UserError(f"item {item!r} is not in the model's vocabulary; name an item of the training data")
    found = explanations.explain(model, encoded.items, wanted, times=encoded.times)
    n, weight = len(found.events), found.weight
    table: pd.DataFrame = pd.DataFrame(
        {
            "item": np.repeat(vocabulary.decode(wanted), n),
            "score": np.repeat(found.score, n),
            "position": np.tile(places[found.events] + 1, len(items)),
            "event": np.tile(vocabulary.decode(encoded.items[found.events]), len(items)),
            "weight": np.tile(np.full(n, np.nan) if weight is None else weight, len(items)),
            "change": found.change.reshape(-1),
        }
    )
    order = np.lexsort((-table["weight"].to_numpy(), np.repeat(np.arange(len(items)), n)))
    table = table.iloc[order].reset_index(drop=True)
    table.attrs = {
        "precision": found.precision,
        "own_weight": found.own_weight,
        "unknown_events": encoded.unknown_events,
    }
    return table


def _check_length(k: Any) -> None:
    if not is_whole(k):
        raise UserError(f"k is {k!r}; give a whole number, the length of the lists")


def _as_frame(histories: Any) -> Any:
    """A table of another library (polars, pyarrow) as a data frame; what is no table is returned as it is."""
    if isinstance(histories, (pd.DataFrame, pd.Series)) or not hasattr(histories, "__arrow_c_stream__"):
        return histories
    try:
        return pa.RecordBatchReader.from_stream(histories).read_all().to_pandas()
    except pa.ArrowInvalid:  # a column, which is a sequence
        return histories


def _one(history: Iterable[Any] | pd.DataFrame) -> tuple[Histories, list[Any]]:
    """One history as ``_encode`` takes them, and its raw items."""
    if not isinstance(history, pd.DataFrame):
        if isinstance(history, (str, bytes, Mapping, set, frozenset)) or not isinstance(history, Iterable):
            raise UserError(f"the history is {history!r}; give one list of item ids, oldest first")
        raw = list(history)
        return [raw], raw
    check_columns([str(column) for column in history.columns], ["user_id", "item_id"], "the history")
    if history["user_id"].nunique() > 1:
        raise UserError(f"the data frame holds {history['user_id'].nunique()} users; give the events of one")
    return history, history["item_id"].tolist()


def _refuse_target_time(model: SequenceModel) -> None:
    if getattr(model, "shows_target_time", False):
        raise UserError(
            "this model was trained with show_target_time: true, but the time of the next event is not known when "
            "recommending; train with show_target_time: false"
        )


def _lists(
    model: SequenceModel,
    vocabulary: Vocabulary,
    encoded: _Encoded,
    first: int,
    k: int,
    filter_seen: bool,
    memory_mb: float,
    barred: NDArray[np.int64] | None = None,
) -> pd.DataFrame:
    """The lists of up to ``HISTORIES_AT_ONCE`` histories from number ``first`` on."""
    users = encoded.users.iloc[first : first + HISTORIES_AT_ONCE]
    offsets = encoded.offsets[first : first + len(users) + 1]
    states, precisions, table = [], [], model.item_table()
    for batch in read_histories(
        model, encoded.items, offsets[:-1], offsets[1:], times=encoded.times, source="the list of histories"
    ):
        state, precision = model.user_states(batch.to(table.weight.device))
        states.append(state)
        precisions.append(torch.full_like(state[:, 0], float("nan")) if precision is None else precision)
    best = top_k(
        torch.cat(states),
        table,
        k,
        exclude_items=encoded.items[offsets[0] : offsets[-1]] if filter_seen else None,
        exclude_offsets=offsets - offsets[0] if filter_seen else None,
        barred=barred,
        memory_mb=memory_mb,
        user_ids=users.to_numpy(dtype=object),
    )
    lists: pd.DataFrame = pd.DataFrame(
        {
            "user": users.array.repeat(k),
            "item": vocabulary.decode(best.items.reshape(-1)),
            "score": best.scores.reshape(-1),
            "rank": np.tile(np.arange(1, k + 1), len(users)),
            "precision": np.repeat(torch.cat(precisions).double().cpu().numpy(), k),
        }
    )
    return lists


def _barred(
    vocabulary: Vocabulary, exclude: Iterable[Any] | None, candidates: Iterable[Any] | None
) -> NDArray[np.int64] | None:
    """Indices of the items that no list may hold; None where all may be."""
    if exclude is None and candidates is None:
        return None
    barred = np.zeros(len(vocabulary) + 1, dtype=bool)
    if candidates is not None:
        ids = _ids("candidates", candidates)
        known = vocabulary.encode(ids)
        if not known.any():
            such = f" (such as {ids[0]!r})" if ids else ""
            raise UserError(
                f"none of the {len(ids):,} candidates is in the model's vocabulary{such}; give some that are"
            )
        barred[:] = True
        barred[known] = False
    if exclude is not None:
        barred[vocabulary.encode(_ids("exclude", exclude))] = True
    return np.flatnonzero(barred[1:]) + 1


def _ids(name: str, given: Iterable[Any]) -> list[Any]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise UserError(f"{name} is {given!r}; give a list of item ids")
    return list(given)


def _encode(histories: Histories, vocabulary: Vocabulary, times: NDArray[np.int64] | None) -> _Encoded:
    """Raw histories as item indices, unknown items left out and counted; ``times`` of all events, in their order."""
    users, lengths, raw = _flatten(histories)
    if not users:
        raise UserError("there is no history to recommend for; give at least one user with items")
    if not raw:
        raise ColdStartError("the histories hold no item; give at least one of them its item ids, oldest first")
    items = vocabulary.encode(raw)
    owner = np.repeat(np.arange(len(users)), lengths)
    known = items > 0
    kept = np.bincount(owner[known], minlength=len(users))
    if not kept.any():
        raise ColdStartError(
            f"none of the {len(raw):,} items in the histories is in the model's vocabulary "
            f"(such as {raw[0]!r}); check that the ids are those of the training data"
        )
    return _Encoded(
        users=_column([user for user, count in zip(users, kept, strict=True) if count]),
        items=items[known],
        offsets=np.concatenate([[0], np.cumsum(kept[kept > 0])]).astype(np.int64),
        times=None if times is None else times[known],
        unknown_events=int((~known).sum()),
        skipped_users=[user for user, count in zip(users, kept, strict=True) if not count],
    )


def _flatten(histories: Histories) -> tuple[list[Any], list[int], list[Any]]:
    """Users, the length of each history, and all items side by side."""
    if isinstance(histories, pd.DataFrame):
        check_columns([str(column) for column in histories.columns], ["user_id", "item_id"], "the histories")
        if (blank := histories["user_id"].isna().to_numpy()).any():
            raise UserError(
                f"row {int(blank.argmax()) + 1} of the histories has a blank user_id; fill it in or leave it out"
            )
        grouped = histories.reset_index(drop=True).groupby("user_id", sort=False, observed=True)["item_id"]
        histories = {user: items.tolist() for user, items in grouped}
    if isinstance(histories, pd.Series):  # of lists, by user
        if (twice := histories.index.duplicated()).any():
            raise UserError(
                f"user {histories.index[twice][0]!r} occurs twice in the histories; give each user one list"
            )
        users, sequences = histories.index.tolist(), histories.tolist()
    elif isinstance(histories, Mapping):
        users, sequences = list(histories), list(histories.values())
    elif isinstance(histories, Iterable) and not isinstance(histories, (str, bytes)):
        sequences = list(histories)
        users = list(range(len(sequences)))
    else:
        raise UserError(
            f"the histories are {histories!r}; give lists of item ids by user (a mapping), a list of such lists, or a "
            "data frame with columns user_id and item_id"
        )
    for number, (user, items) in enumerate(zip(users, sequences, strict=True), start=1):
        if user is None or user is pd.NA or user != user:
            raise UserError(f"user {number} of the histories is blank ({user!r}); fill the id in or leave the user out")
        if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
            raise UserError(f"the history of user {user!r} is {items!r}; give a list of item ids, such as [{items!r}]")
        if isinstance(items, (set, frozenset, Mapping)):
            raise UserError(f"the history of user {user!r} is a {type(items).__name__}; give a list, oldest item first")
    lists = [list(items) for items in sequences]
    return users, [len(items) for items in lists], [item for items in lists for item in items]


def _column(users: list[Any]) -> pd.Series[Any]:
    """The users as they were given: whole numbers beside others do not become floats."""
    mixed = pd.api.types.infer_dtype(users, skipna=False).startswith("mixed")
    column: pd.Series[Any] = pd.Series(users, dtype=object if mixed else None)
    return column


def _reads_times(model: SequenceModel) -> bool:
    return bool(getattr(model, "reads_times", False))


def _times(histories: Histories, unit: str | None) -> NDArray[np.int64] | None:
    """The times of all events in the order of ``_flatten``, in ``unit``; None without a column of them."""
    frame = _with_times(histories)
    if frame is None:
        return None
    check_columns([str(name) for name in frame.columns], ["user_id", "timestamp"], "the histories")
    column = frame["timestamp"]
    if (blank := column.isna().to_numpy()).any():
        raise UserError(
            f"row {int(blank.argmax()) + 1} of the histories has a blank timestamp; fill it in or leave it out"
        )
    array = _as_array(column)
    if array is None:
        raise UserError(
            f"column 'timestamp' of the histories has type {column.dtype}; give dates, or whole numbers in the unit of "
            "the training data"
        )
    times, own = read_times(array, "timestamp", "the histories")
    if own is not None:
        times = _converted(times, own, unit)
    elif unit is not None:
        refuse_finer(times, unit, "the histories")
    return times[np.argsort(_numbers(frame["user_id"]), kind="stable")]


def _converted(times: NDArray[np.int64], own: str, unit: str | None) -> NDArray[np.int64]:
    """The ticks of dates in the unit of the training data."""
    if unit is None:
        raise UserError(
            "column 'timestamp' of the histories holds dates, and the training data held whole numbers of a unit "
            "that it does not say; give whole numbers in that unit"
        )
    converted = in_unit(times, own, unit, cut=True)
    if converted is None:
        raise UserError(
            f"column 'timestamp' of the histories holds dates up to {times.max()} {own} after 1970, which do not fit "
            f"in 64 bits in {unit}, the unit of the training data; give dates that do"
        )
    return converted


def _warn_if_out_of_order(histories: Histories) -> None:
    """The row order is taken as it is: say so where the times contradict it, read or not."""
    frame = _with_times(histories)
    if frame is None or frame["timestamp"].ndim > 1:
        return
    array = _as_array(frame["timestamp"])
    backwards = 0 if array is None else steps_back(_numbers(frame["user_id"]), array)
    if backwards:
        warnings.warn(
            f"the histories: rows are taken in the frame's order, but column 'timestamp' goes backwards within a user "
            f"{backwards:,} times; sort the frame by it",
            stacklevel=4,
        )


def _with_times(histories: Histories) -> pd.DataFrame | None:
    """The histories, if they are a frame with a column of times."""
    timed = isinstance(histories, pd.DataFrame) and {"timestamp", "user_id"} <= set(histories.columns)
    return histories if timed else None  # type: ignore[return-value]


def _as_array(column: pd.Series[Any]) -> Any:
    """A column as an arrow array with categories decoded; None where arrow has no type for it."""
    try:
        array = pa.Array.from_pandas(column)
        return array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return None


def _numbers(users: pd.Series[Any]) -> NDArray[np.int64]:
    """The number of each row's user, in the order in which ``_flatten`` has them."""
    users = users.reset_index(drop=True)
    return users.groupby(users, sort=False, observed=True, dropna=False).ngroup().to_numpy(dtype=np.int64)

"""From events to histories: row filter, order, de-duplication, minimum counts.

The steps, in this order: keep the rows that satisfy ``where``; gather each user's rows in row order (or, where times
are given, by a stable sort on time: ties keep their row order); drop repeated (user, item) pairs; drop users and items
with too few events until none is left (the thresholds hold together in what is left); leave out each user's last
events. Users with fewer than 3 events cannot be split: they are dropped and counted, or with ``min_history`` 2 those of
two events train, and are never evaluated. Events that say their own part are gathered part by part, and no number of
events is needed of a user.

Users are numbered by first appearance among the kept rows, those that only train after all others; items by first
appearance in the finished histories.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.config.fields import is_whole
from recbft.datasets.columns import is_text
from recbft.datasets.events import Events, unit_of_all
from recbft.datasets.parts import warn_of_later_training
from recbft.datasets.row_filter import Condition, conditions_of, satisfying
from recbft.datasets.row_order import warn_if_newest_first
from recbft.errors import UserError

MIN_HISTORY = 3  # one event each to train, validate and test


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to the events before they become histories.

    Args:
        k_core: every user and every item keeps at least this many events (iterative); 0 is off.
        min_user_events, min_item_events: as ``k_core``, for one side; the larger of the two counts.
        deduplicate: of a user's events with one item keep the ``"first"`` or the ``"last"``; None keeps all.
        where: a row filter, such as ``"rating >= 4 and time < 2024-01-01"`` or ``"event in (buy, cart)"``; see
            ``recbft.datasets.row_filter``.
        drop_last_events: leave out so many of each user's last events, after everything else: the same users one event
            earlier, on which to see whether a result holds.
        min_history: the fewest events of a user: 3, one each to train, validate and test, or 2, with which users of
            two events train on both and are not evaluated.
    """

    k_core: int = 0
    min_user_events: int = 0
    min_item_events: int = 0
    deduplicate: str | None = None
    where: str | None = None
    drop_last_events: int = 0
    min_history: int = MIN_HISTORY

    def __post_init__(self) -> None:
        for name in ("k_core", "min_user_events", "min_item_events", "drop_last_events"):
            value = getattr(self, name)
            if not (is_whole(value) and value >= 0):
                raise UserError(f"{name} is {value!r}; give a whole number >= 0 (0 is off)")
            object.__setattr__(self, name, int(value))  # numpy's cannot be written down
        if not (is_whole(self.min_history) and 2 <= self.min_history <= MIN_HISTORY):
            raise UserError(
                f"min_history is {self.min_history!r}; give 3, or 2 to train on users of two events too "
                "(min_user_events leaves out users of fewer events than a larger number)"
            )
        object.__setattr__(self, "min_history", int(self.min_history))
        if self.deduplicate not in (None, "first", "last"):
            raise UserError(f"deduplicate is {self.deduplicate!r}; choose 'first', 'last' or None")
        self.conditions()

    def conditions(self) -> list[Condition]:
        """The row filter's."""
        return [] if self.where is None else conditions_of(self.where)

    def columns(self) -> list[str]:
        """The columns the row filter reads."""
        return list(dict.fromkeys(condition.column for condition in self.conditions()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        return asdict(self)


class Prepared(NamedTuple):
    """Histories, their ids and how they came about; what ``Dataset`` is made of."""

    items: NDArray[np.int64]  # (E,)    item index 1..V, users one after the other
    offsets: NDArray[np.int64]  # (U+1,)  user u owns items[offsets[u]:offsets[u+1]]
    times: NDArray[np.int64] | None  # (E,)
    weights: NDArray[np.float64] | None  # (E,)
    reliability: NDArray[np.float64] | None  # (E,)
    parts: NDArray[np.int8] | None  # (E,)
    user_ids: NDArray[Any]  # (U,)    raw ids: int64, or object holding str
    item_ids: NDArray[Any]  # (V,)
    preparation: dict[str, Any]  # what was done and how many were dropped; JSON-able


def prepare(events: Events, preparation: Preparation) -> Prepared:
    """Turn events into histories."""
    kept = np.flatnonzero(kept_rows(events, preparation))
    users, user_names = _codes(events.user, kept)
    items, item_names = _codes(events.item, kept)
    times = None if events.time is None else events.time[kept]
    parts = None if events.part is None else events.part[kept]
    # both sorts are stable: ties keep the row order
    keys: list[Any] = [each for each in (times, parts, users) if each is not None]
    order = np.argsort(users, kind="stable") if len(keys) == 1 else np.lexsort(keys)
    users, items = users[order], items[order]
    least, tested_from = preparation.min_history, MIN_HISTORY  # events of a user
    if parts is not None:
        least = tested_from = 1
        if preparation.drop_last_events:
            raise UserError(
                "drop_last_events does not go with a split of the data's own, whose test would go first; leave it out"
            )
    if times is not None and parts is None:
        warn_if_newest_first(events.source, users, times[order], order, stacklevel=4)
    elif times is not None and parts is not None:
        warn_of_later_training(events.source, users, parts[order], times[order], stacklevel=4)
    fresh = _not_duplicated(users, items, preparation.deduplicate)
    alive, short, below = _hold_minimums(users, items, fresh, preparation, least)
    if not _has_a_test(users, alive, tested_from):
        raise UserError(
            f"{events.source}: no user has {tested_from} event{'s' * (tested_from > 1)} after filtering "
            f"({len(events):,} events of {len(events.user.unique()):,} users read; {len(kept):,} of "
            f"{len(user_names):,} users after the row "
            f"filter, {fresh.sum():,} after de-duplication); {_advice(events)}"
        )
    alive, last, too_short = _drop_last(users, alive, preparation)
    if not _has_a_test(users, alive, tested_from):
        raise UserError(
            f"{events.source}: no user has {MIN_HISTORY} events left without the last {preparation.drop_last_events}; "
            "lower drop_last_events"
        )
    users, items, order = users[alive], items[alive], order[alive]
    lengths = np.bincount(users, minlength=len(user_names))
    only_trains = lengths < tested_from
    if only_trains[users].any():
        last_ones = np.argsort(only_trains[users], kind="stable")
        users, items, order = users[last_ones], items[last_ones], order[last_ones]
    present = np.flatnonzero(lengths)
    present = present[np.argsort(only_trains[present], kind="stable")]
    item_codes, first_items = pd.factorize(items)
    user_ids, item_ids = _raw(user_names, present), _raw(item_names, np.asarray(first_items))
    record = {
        "source": events.source,
        "filters": preparation.to_dict(),
        "time_unit": events.time_unit or (None if events.time is None else unit_of_all(events.time)),
        "before": {
            "users": len(events.user.unique()),
            "items": len(events.item.unique()),
            "events": len(events),
        },
        "after": {"users": len(user_ids), "items": len(item_ids), "events": len(items)},
        "dropped": {
            "events_filtered_out": len(events) - len(kept),
            "events_repeated": int(len(fresh) - fresh.sum()),
            "users_below_minimum": below,
            f"users_under_{least}_events": short + too_short,
            **({"last_events": last} if preparation.drop_last_events else {}),
        },
    }
    source_rows = kept[order]
    weights = None if events.weight is None else events.weight[source_rows]
    if weights is not None:
        record["weights"] = {"sum": float(weights.sum()), "events_of_weight_0": int((weights == 0).sum())}
    return Prepared(
        items=item_codes.astype(np.int64) + 1,
        offsets=np.concatenate([[0], np.cumsum(lengths[present])]).astype(np.int64),
        times=None if times is None else times[order],
        weights=weights,
        reliability=None if events.reliability is None else events.reliability[source_rows],
        parts=None if parts is None else parts[order],
        user_ids=user_ids,
        item_ids=item_ids,
        preparation=record,
    )


def kept_rows(events: Events, preparation: Preparation) -> NDArray[np.bool_]:
    """Which events the row filter keeps; all where there is none."""
    return satisfying(dict(events.extra), preparation.conditions(), len(events), events.source)


def _codes(ids: Any, kept: NDArray[np.int64]) -> tuple[NDArray[np.int64], Any]:
    """Number ids by first appearance."""
    encoded = (ids if len(kept) == len(ids) else ids.take(pa.array(kept))).dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary


def _raw(names: Any, chosen: NDArray[np.int64]) -> NDArray[Any]:
    values = names.take(pa.array(chosen)).to_numpy(zero_copy_only=False)
    return np.array(values, dtype=object if is_text(names.type) else np.int64)  # a copy: arrow's memory is read-only


def _not_duplicated(users: NDArray[np.int64], items: NDArray[np.int64], keep: str | None) -> NDArray[np.bool_]:
    if keep is None or len(users) == 0:
        return np.ones(len(users), dtype=bool)
    pairs = pd.Series(users * (int(items.max()) + 1) + items)
    return ~np.asarray(pairs.duplicated(keep="first" if keep == "first" else "last"), dtype=bool)


def _hold_minimums(
    users: NDArray[np.int64],
    items: NDArray[np.int64],
    alive: NDArray[np.bool_],
    preparation: Preparation,
    least: int,
) -> tuple[NDArray[np.bool_], int, int]:
    """Drop users and items below their minimum until none is left.

    Returns:
        The events that stay, the number of users dropped for having fewer than ``least`` events though they met
        the asked-for minimum, and the number of users dropped for not meeting it.
    """
    if len(users) == 0:
        return alive, 0, 0
    min_user = max(preparation.k_core, preparation.min_user_events)
    min_item = max(preparation.k_core, preparation.min_item_events)
    num_users, num_items = int(users.max()) + 1, int(items.max()) + 1
    short = 0
    while True:
        per_user = np.bincount(users[alive], minlength=num_users)
        per_item = np.bincount(items[alive], minlength=num_items)
        short += int(((per_user > 0) & (per_user < least) & (per_user >= min_user)).sum())
        stay = alive & (per_user >= max(min_user, least))[users] & (per_item >= min_item)[items]
        if stay.sum() == alive.sum():
            gone = num_users - int((per_user > 0).sum())
            if min_user == 0:  # whose events went all at once have missed no minimum that was asked for
                short = gone
            return alive, short, gone - short
        alive = stay


def _advice(events: Events) -> str:
    """What to do where no user has enough events: a cell may hold a whole history."""
    first = pc.drop_null(events.item.slice(0, 100)) if is_text(events.item.type) else []
    if len(first) and pc.all(pc.match_substring_regex(first, r"[^\s,;|]+[\s,;|]+[^\s,;|]")).as_py():
        return (
            f"items such as {first[0].as_py()[:60]!r} look like lists: write one event per row, or a .txt file with "
            "lines such as 'user item1 item2'"
        )
    return "check the user column, or loosen the filters and minimum counts"


def _has_a_test(users: NDArray[np.int64], alive: NDArray[np.bool_], least: int) -> bool:
    return bool((np.bincount(users[alive]) >= least).any())


def _drop_last(
    users: NDArray[np.int64], alive: NDArray[np.bool_], preparation: Preparation
) -> tuple[NDArray[np.bool_], int, int]:
    """Leave out the last events of each user, and who has too few then; users stand one after the other.

    Returns:
        The events that stay, how many were the last ones of their user, and how many users are gone.
    """
    number = preparation.drop_last_events
    if number == 0:
        return alive, 0, 0
    per_user = np.bincount(users[alive])
    from_end = np.repeat(np.cumsum(per_user), per_user) - np.arange(alive.sum())  # 1 of a user's last event
    is_last, stays = from_end <= number, per_user - number >= preparation.min_history
    left = alive.copy()
    left[alive] = ~is_last & stays[users[alive]]
    return left, int(is_last.sum()), int(((per_user > 0) & ~stays).sum())

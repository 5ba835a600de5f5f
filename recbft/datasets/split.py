"""Which events of a data set train, which are targets of validation and of test, and from what each is ranked.

leave_one_out   a user's last event tests, the one before validates, the rest train; a user of two events, where such
                are kept (``Preparation.min_history``), trains on both, and these users come last

    history of user u     e_1 ... e_{n-2}   e_{n-1}       e_n
                          training          validation    test          n = offsets[u+1] - offsets[u] >= 3

                Training events of some users are later than the test targets of others: what nobody could know yet is
                learned from.
global_time     two points in time, the same for all users: what is before the first trains, what is before the second
                validates, the rest tests

    history of user u     times < t_1       t_1 <= times < t_2       t_2 <= times
                          training          validation               test

                all          a user's targets are the items of a part, each once, ranked from what is before the point
                             at which the part begins: in one list. Without an event before it there is no list.
                first        the first of these alone
                successive   every event of a part is a target, ranked from all of the user's events before it

                Targets with nothing to be ranked from are left out, and counted.

given           the data say it of each event, in a column or by the files or tables that it stands in. As global_time,
                with the parts in the place of the times: validation is ranked from a user's training events, the test
                from those and the events of validation.

In any of these a share of the items may be held out, as if they were new: each item whose number

    h_i = SHA-256(seed, raw id of i) / 2^256 < share                                                    (1)

so that the draw depends on nothing else. Their events are targets of validation and test, and nowhere else: not in
training, and in no history that a target is ranked from. A user whose history has nothing else is left out, and
counted.

An item is **new** if it has no training event, a user likewise. Without held-out items nothing is copied and no prefix
is written out: a view is bounds and a target per row.

Shapes: U users, N targets, V items, E events.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recbft.config.fields import check_choice, check_range, is_whole
from recbft.datasets.events import TICKS_PER_SECOND, read_times, shown_time, unit_of_our_time
from recbft.datasets.samples import ranges
from recbft.errors import UserError

IntArray = NDArray[np.int64]
Point = int | float | str
FloatArray = NDArray[np.float64]
SPLITS = ("leave_one_out", "global_time", "given")
_GIVE = (
    "give a share of the events in time such as 0.8, a date such as '2018-01-31' or '2018-01-31 12:30:00' (UTC), or a "
    "whole number of the data's own unit of time"
)
_TARGETS = {
    "all": ("each user's events", ", each item once, ranked from what is before that point"),
    "first": ("each user's first event", ", ranked from what is before that point"),
    "successive": ("each user's events", ", each ranked from all of the user's before it"),
}
LEAVE_ONE_OUT = "leave-one-out: the last event tests, the one before validates, the rest train"


class Histories(Protocol):
    """What is split: a data set."""

    @property
    def name(self) -> str: ...
    @property
    def items(self) -> IntArray: ...
    @property
    def offsets(self) -> IntArray: ...
    @property
    def times(self) -> IntArray | None: ...
    @property
    def weights(self) -> FloatArray | None: ...
    @property
    def reliability(self) -> FloatArray | None: ...
    @property
    def parts(self) -> NDArray[np.int8] | None: ...
    @property
    def item_ids(self) -> NDArray[Any]: ...
    @property
    def preparation(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """How a data set is split.

    Args:
        split: see above; data with a split of their own have ``given``, and no other.
        split_at: where training ends in ``global_time``: a share of all events in time, in (0, 1), a date such as
            ``"2018-01-01"``, or a whole number of the data's own unit of time.
        test_at: where the test begins, likewise; if left out, so that half of the events after ``split_at`` are in
            validation.
        split_targets: "all", "first" or "successive", see above.
        hold_out_items: share of the items that have no training event, in [0, 1).
        hold_out_seed: what these are drawn by, (1).
    """

    split: Literal["leave_one_out", "global_time", "given"] = "leave_one_out"
    split_at: Point | None = None
    test_at: Point | None = None
    split_targets: Literal["all", "first", "successive"] = "all"
    hold_out_items: float = 0.0
    hold_out_seed: int = 0

    def __post_init__(self) -> None:
        check_choice("split", self.split, SPLITS)
        check_choice("split_targets", self.split_targets, ("all", "first", "successive"))
        check_range("hold_out_items", self.hold_out_items, at_least=0, below=1)
        check_range("hold_out_seed", self.hold_out_seed, at_least=0)
        if self.split == "global_time":
            if self.split_at is None:
                raise UserError(
                    "split is 'global_time', and split_at is missing: where training ends, a share of the events such "
                    "as 0.8 or a date such as '2018-01-01'"
                )
            for name in ("split_at", "test_at"):
                value = getattr(self, name)
                if isinstance(value, float):
                    check_range(name, value, above=0, below=1)
                elif not (value is None or is_whole(value) or isinstance(value, str)):
                    raise UserError(f"{name} is {value!r}; {_GIVE}")
        for name, without in (("split_at", ("leave_one_out", "given")), ("test_at", ("leave_one_out", "given")),
                              ("split_targets", ("leave_one_out",))):  # fmt: skip
            if self.split in without and getattr(self, name) != getattr(Splitting, name):
                others = "global_time or given" if name == "split_targets" else "global_time"
                raise UserError(f"{name} has no effect with split {self.split}; set split={others}, or leave it out")
        if self.hold_out_seed and not self.hold_out_items:
            raise UserError("hold_out_seed has no effect without hold_out_items; leave it out, or set hold_out_items")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Splitting:
        """That of a mapping which may hold more; what is missing or None is as usual."""
        return cls(**{key: settings[key] for key in SETTINGS if settings.get(key) is not None})

    @property
    def is_plain(self) -> bool:
        """Whether this is leave-one-out of all items."""
        return self == Splitting()

    def chosen(self) -> dict[str, Any]:
        """The settings that are not as usual."""
        usual = asdict(Splitting())
        return {key: value for key, value in asdict(self).items() if value != usual[key]}


SETTINGS = tuple(field.name for field in fields(Splitting))


class View(NamedTuple):
    """A prediction task per row: from ``items[start:stop]`` predict ``target``; rows of one user lie side by side.

    At ``stop`` stands the target, or the first of those that share a history: its time is that of the next event.
    """

    items: IntArray  # the events that bounds are places of
    times: IntArray | None  # of these
    start: IntArray  # (N,)
    stop: IntArray  # (N,) stop > start
    target: IntArray  # (N,) item index
    user: IntArray  # (N,) row of the data set's users
    event: IntArray  # (N,) where the target stands in the data set
    reliability: FloatArray | None = None  # of ``items``
    whole: View | None = None  # that these are some rows of, whose histories may have more targets there

    def rows(self, which: IntArray | slice) -> View:
        """Some of the tasks."""
        names = ("start", "stop", "target", "user", "event")
        whole = self if self.whole is None else self.whole
        return self._replace(whole=whole, **{name: getattr(self, name)[which] for name in names})

    @property
    def first_rows(self) -> IntArray:
        """The first row of each user, whose target is the user's next event."""
        return np.flatnonzero(np.append(True, self.user[1:] != self.user[:-1])[: self.user.size])

    @property
    def owner(self) -> IntArray | None:
        """Each row's number among the users of the view, (N,); None where each has one row."""
        is_next = self.user[1:] == self.user[:-1]
        return np.append(0, np.cumsum(~is_next)) if is_next.any() else None

    @property
    def history(self) -> IntArray | None:
        """The number of each row's history, (N,), where rows of a user share one; None where none do."""
        is_next = (self.user[1:] == self.user[:-1]) & (self.stop[1:] == self.stop[:-1])
        return np.append(0, np.cumsum(~is_next)) if is_next.any() else None

    def next_events(self) -> View:
        """The first task of each user, and of each history the only one; this view where each has one."""
        first = self if self.owner is None else self.rows(self.first_rows)
        return first if first.whole is None else first._replace(whole=None)

    def histories(self) -> View:
        """The first task of each history; this view where none is shared."""
        number = self.history
        return self if number is None else self.rows(np.flatnonzero(np.diff(number, prepend=-1)))


class Split(NamedTuple):
    """What trains, bounds of the S users with a training event, and the two prediction tasks, users in data order."""

    items: IntArray  # the events that bounds are places of
    times: IntArray | None
    training_start: IntArray  # (S,)
    training_stop: IntArray  # (S,) > training_start
    training_length: IntArray  # (U,) training events of each user
    validation: View
    test: View
    text: str = LEAVE_ONE_OUT  # what a protocol says of it
    weights: FloatArray | None = None  # of ``items``
    reliability: FloatArray | None = None  # of ``items``
    counts: Mapping[str, Any] | None = None  # what is new or left out, by part; None for plain leave-one-out

    def training_counts(self, num_items: int) -> IntArray:
        """Training events per item, (V+1,)."""
        return np.bincount(self.items[self._trains()], minlength=num_items + 1)

    def training_weights(self, num_items: int) -> FloatArray:
        """The sum of their weights per item, (V+1,)."""
        assert self.weights is not None
        trains = self._trains()
        return np.bincount(self.items[trains], self.weights[trains], minlength=num_items + 1).astype(np.float64)

    @property
    def training_reliability(self) -> FloatArray | None:
        """That of the training events."""
        return None if self.reliability is None else self.reliability[self._trains()]

    def _trains(self) -> NDArray[np.bool_]:
        """Which of ``items`` are training events."""
        bound = np.zeros(self.items.size + 1, np.int8)
        bound[self.training_start] += 1
        bound[self.training_stop] -= 1
        return np.cumsum(bound, dtype=np.int8)[:-1] > 0


def make_split(data: Histories, how: Splitting) -> Split:
    """Split every history of a data set.

    Raises:
        UserError: the data has no times to split by, or has a split of its own and another is asked for, or the other
            way round; or a part would be empty.
    """
    if (data.parts is None) == (how.split == "given"):
        has, advice = (
            ("no split of its own", "name split_column, or files as validation and test")
            if data.parts is None
            else ("a split of its own", "leave split out, or read the data without it")
        )
        raise UserError(f"split is {how.split!r}, but data set {data.name!r} has {has}; {advice}")
    if how.split == "global_time":
        made, left_out = _global_time(data, how)
    elif how.split == "given":
        made, left_out = _given(data, how)
    else:
        made, left_out = leave_one_out(data), {}
    text = made.text
    if how.is_plain:
        return made
    if how.hold_out_items:
        is_held_out = held_out(data.item_ids, how.hold_out_items, how.hold_out_seed)
        made, more = _without(made, is_held_out)
        left_out = {part: [a + b for a, b in zip(left_out.get(part, [0, 0]), more[part], strict=True)] for part in more}
        number = int(is_held_out.sum())
        text += (
            f"; {number:,} items held out ({how.hold_out_items:g} of all, seed {how.hold_out_seed}): they are targets, "
            "and in no history"
        )
    made = made._replace(text=text)
    for name, size in (("training", made.training_start.size), ("validation", made.validation.target.size),
                       ("test", made.test.target.size)):  # fmt: skip
        if not size:
            whose = "event" if name == "training" else "target of a user with an event before it"
            change = "give events of it" if how.split == "given" else "choose other points in time"
            raise UserError(
                f"the split of data set {data.name!r} leaves no {whose} in {name} ({text}); {change}, or hold out "
                "fewer items"
            )
    return made._replace(counts=_counted(made, len(data.item_ids), left_out))


def leave_one_out(data: Histories) -> Split:
    """Split every history of a data set by leaving one out, whatever split it has been given.

    >>> import pandas as pd
    >>> from recbft.datasets import Dataset
    >>> dataset = Dataset.from_frame(pd.DataFrame({"user_id": [1, 1, 1, 1], "item_id": list("abcd")}))
    >>> split = leave_one_out(dataset)
    >>> split.training_stop.tolist(), split.validation.target.tolist(), split.test.target.tolist()
    ([2], [3], [4])
    """
    items, times, offsets = data.items, data.times, data.offsets
    lengths = np.diff(offsets)
    T = int((lengths >= 3).sum())  # they come first
    users = np.arange(T)
    start, stop = offsets[:T], offsets[1 : T + 1]
    length = lengths - np.where(np.arange(lengths.size) < T, 2, 0)
    return Split(
        items=items,
        times=times,
        training_start=offsets[:-1],
        training_stop=offsets[:-1] + length,
        training_length=length,
        validation=View(items, times, start, stop - 2, items[stop - 2], users, stop - 2, data.reliability),
        test=View(items, times, start, stop - 1, items[stop - 1], users, stop - 1, data.reliability),
        weights=data.weights,
        reliability=data.reliability,
    )


def held_out(item_ids: NDArray[Any], share: float, seed: int) -> NDArray[np.bool_]:
    """Equation (1) for raw ids, (V,)."""
    below = math.floor(share * 2**64)
    drawn = (hashlib.sha256(f"{seed}\0{one}".encode()).digest()[:8] for one in item_ids.tolist())
    return np.fromiter((int.from_bytes(each, "big") < below for each in drawn), np.bool_, item_ids.size)


def _global_time(data: Histories, how: Splitting) -> tuple[Split, dict[str, list[int]]]:
    """The split by time, and how many users and targets of each part have no event before it."""
    if data.times is None:
        raise UserError(
            f"split is 'global_time', but data set {data.name!r} has no real times; give data with a time column, "
            "which data.time names, or split by leave_one_out"
        )
    times, start = data.times, data.offsets[:-1]
    assert how.split_at is not None
    first = _tick("split_at", how.split_at, data)
    second = _half_of_the_rest(times, first) if how.test_at is None else _tick("test_at", how.test_at, data)
    unit = data.preparation.get("time_unit")
    points = [shown_time(point, unit) for point in (first, second)]
    if second <= first:
        raise UserError(
            f"validation has no time: training ends at {points[0]} and the test begins at {points[1]}; set "
            "test_at to a later point than split_at"
        )
    validated, tested = (start + np.add.reduceat(times < point, start, dtype=np.int64) for point in (first, second))
    targets, ranked = _TARGETS[how.split_targets]
    text = (
        f"global time: events before {points[0]} train; {targets} from then on and before {points[1]} validate, "
        f"{targets} from then on test{ranked}"
    )
    return _three_parts(data, validated, tested, how, text)


def _given(data: Histories, how: Splitting) -> tuple[Split, dict[str, list[int]]]:
    """The split that the data have, and how many users and targets of each part have no event before it."""
    parts, start = data.parts, data.offsets[:-1]
    assert parts is not None
    validated, tested = (start + np.add.reduceat(parts < part, start, dtype=np.int64) for part in (1, 2))
    targets, ranked = _TARGETS[how.split_targets]
    text = f"given with the data: of each part but training {targets} are targets{ranked.replace('point', 'part')}"
    return _three_parts(data, validated, tested, how, text)


def _three_parts(
    data: Histories, validated: IntArray, tested: IntArray, how: Splitting, text: str
) -> tuple[Split, dict[str, list[int]]]:
    """The split of histories of which validation begins at ``validated`` and the test at ``tested``, (U,) each."""
    start = data.offsets[:-1]
    trains = validated > start
    validation, without_validation = _view(data, start, validated, tested, how)
    test, without_test = _view(data, start, tested, data.offsets[1:], how)
    return Split(
        items=data.items,
        times=data.times,
        training_start=start[trains],
        training_stop=validated[trains],
        training_length=validated - start,
        validation=validation,
        test=test,
        text=text,
        weights=data.weights,
        reliability=data.reliability,
    ), {"validation": without_validation, "test": without_test}


def _view(data: Histories, start: IntArray, begin: IntArray, end: IntArray, how: Splitting) -> tuple[View, list[int]]:
    """Targets ``items[begin:end]`` of each user from what is before; users and targets with nothing before them."""
    last = np.minimum(end, begin + 1) if how.split_targets == "first" else end
    event, owner = ranges(begin, last), np.repeat(np.arange(start.size), last - begin)
    if how.split_targets == "successive":
        stop = event
    else:
        _, once = np.unique(owner * (len(data.item_ids) + 1) + data.items[event], return_index=True)
        once.sort()
        event, owner = event[once], owner[once]
        stop = begin[owner]
    known = stop > start[owner]
    lost = [np.unique(owner).size - np.unique(owner[known]).size, int((~known).sum())]
    event, owner, stop = event[known], owner[known], stop[known]
    own = (start[owner], stop, data.items[event], owner, event)
    return View(data.items, data.times, *own, data.reliability), lost


def _half_of_the_rest(times: IntArray, first: int) -> int:
    """The time of the event in the middle of those from ``first`` on; their last one where they have one time."""
    rest = np.sort(times[times >= first])
    middle = int(rest[rest.size // 2]) if rest.size else first
    later = rest[rest > first]
    return middle if middle > first or not later.size else int(later[0])


def _tick(name: str, point: Point, data: Histories) -> int:
    """A point in time in the data's own unit."""
    times = data.times
    assert times is not None
    if isinstance(point, float):
        return int(np.partition(times, place := math.floor(point * times.size))[place])
    if not isinstance(point, str):
        return int(point)
    unit = data.preparation.get("time_unit") or unit_of_our_time(int(times.max()))
    if unit is None:
        raise UserError(
            f"{name} is {point!r}, but the times of data set {data.name!r} are no dates (up to {int(times.max())}); "
            "give a share of the events such as 0.8, or a whole number of their unit"
        )
    try:
        (ticks,), finer = read_times(pa.array([point]), name, name)
    except UserError:
        finer = None
    if finer is None:
        raise UserError(f"{name} is {point!r}; {_GIVE}")
    # The first tick that is not before it.
    return -(-int(ticks) * TICKS_PER_SECOND[unit] // TICKS_PER_SECOND[finer])


def _without(split: Split, is_held_out: NDArray[np.bool_]) -> tuple[Split, dict[str, list[int]]]:
    """The split with items held out of every history; users and targets of each part whose history this empties."""
    kept = np.append(True, ~is_held_out)
    start, stop = split.training_start, split.training_stop
    event = ranges(start, stop)
    stays = kept[split.items[event]]
    users = split.training_length.size
    owner = np.repeat(np.flatnonzero(split.training_length), stop - start)[stays]
    length = np.bincount(owner, minlength=users).astype(np.int64)
    offsets = np.append(0, np.cumsum(length))
    trains = length > 0
    validation, without_validation = _known_alone(split.validation, kept)
    test, without_test = _known_alone(split.test, kept)
    made = Split(
        items=split.items[event[stays]],
        times=None if split.times is None else split.times[event[stays]],
        training_start=offsets[:-1][trains],
        training_stop=offsets[1:][trains],
        training_length=length,
        validation=validation,
        test=test,
        weights=None if split.weights is None else split.weights[event[stays]],
        reliability=None if split.reliability is None else split.reliability[event[stays]],
    )
    return made, {"validation": without_validation, "test": without_test}


def _known_alone(view: View, kept: NDArray[np.bool_]) -> tuple[View, list[int]]:
    """The view whose histories are written out without the items that are not kept, the next event after each."""
    each, row = view.histories(), view.history
    start, stop = each.start, each.stop
    event = ranges(start, stop + 1)
    last = np.cumsum(stop + 1 - start) - 1
    event[last] = each.event
    stays = kept[view.items[event]]
    stays[last] = True
    size = np.add.reduceat(stays, last - (stop - start), dtype=np.int64) if last.size else last
    end = np.cumsum(size)
    row = np.arange(last.size) if row is None else row
    known = (size > 1)[row]
    lost = [np.unique(view.user).size - np.unique(view.user[known]).size, int((~known).sum())]
    made = View(
        items=view.items[event[stays]],
        times=None if view.times is None else view.times[event[stays]],
        reliability=None if view.reliability is None else view.reliability[event[stays]],
        start=(end - size)[row],
        stop=(end - 1)[row],
        target=view.target,
        user=view.user,
        event=view.event,
    )
    return made.rows(np.flatnonzero(known)), lost


def counts_lines(counts: Mapping[str, Any]) -> list[str]:
    """``Split.counts`` in words, a line for each part."""
    trained = counts["training"]
    lines = [f"training: {trained['events']:,} events of {trained['users']:,} users and {trained['items']:,} items"]
    for part in ("validation", "test"):
        c = counts[part]
        left = (
            f"; {c['targets_left_out']:,} targets with nothing before them are left out, and {c['users_left_out']:,} "
            "users with all of theirs"
            if c["targets_left_out"]
            else ""
        )
        lines.append(
            f"{part}: {c['targets']:,} targets of {c['users']:,} users ({c['new_users']:,} new), "
            f"{c['targets_of_new_items']:,} of them of {c['new_items']:,} new items{left}"
        )
    return lines


def _counted(split: Split, num_items: int, left_out: Mapping[str, list[int]]) -> dict[str, Any]:
    """What the parts hold, how much of it is new, and what is left out since nothing is before it."""
    is_new = split.training_counts(num_items) == 0
    made: dict[str, Any] = {
        "training": {
            "users": int(split.training_start.size),
            "events": int((split.training_stop - split.training_start).sum()),
            "items": int((~is_new[1:]).sum()),
        }
    }
    for part, view in (("validation", split.validation), ("test", split.test)):
        new = is_new[view.target]
        users, targets = left_out.get(part, [0, 0])
        made[part] = {
            "users": int(view.first_rows.size),
            "new_users": int((split.training_length[view.user[view.first_rows]] == 0).sum()),
            "targets": int(view.target.size),
            "new_items": int(np.unique(view.target[new]).size),
            "targets_of_new_items": int(new.sum()),
            "users_left_out": users,
            "targets_left_out": targets,
        }
    return made

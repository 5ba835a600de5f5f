"""A split of the data's own: each event says whether it trains, validates or tests.

It stands in a column of the events, or in which of several tables they are. A user's events of an earlier part come
before those of a later one, whatever their times: what validates is ranked from what trains, what tests from both.

Shapes: E events, users one after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.datasets.columns import is_text, refuse_first
from recbft.errors import UserError

PARTS = ("train", "valid", "test")  # by number
PART_COLUMN = "\0part"  # of a table that is put together from one for each part; no file has such a name
_WORDS = {"train": 0, "training": 0, "valid": 1, "validation": 1, "val": 1, "test": 2, "testing": 2}


def read_parts(column: Any, name: str, source: str) -> NDArray[np.int8]:
    """The number of each event's part, (E,), from an arrow column of words in any letters.

    Raises:
        UserError: a value is none of them; the message names the first row.

    >>> read_parts(pa.array(["train", "Test", "valid"]), "part", "events").tolist()
    [0, 2, 1]
    """
    allowed = f"but {name!r} says the part of each event: write {', '.join(PARTS[:-1])} or {PARTS[-1]}"
    if not is_text(column.type):
        raise UserError(f"{source}: column {name!r} has type {column.type}, {allowed}")
    words = pc.ascii_lower(pc.utf8_trim_whitespace(column.cast(pa.large_string())))
    place = pc.index_in(words, value_set=pa.array(list(_WORDS), pa.large_string()))
    refuse_first(pc.is_null(place), column, name, source, allowed)
    parts: NDArray[np.int8] = np.array(list(_WORDS.values()), np.int8)[place.to_numpy(zero_copy_only=False)]
    return parts


def with_parts(table: Any, sizes: Sequence[int]) -> Any:
    """A table whose rows come from one for each part, of so many rows, with the column that says so."""
    words = pa.array(np.repeat(np.array(PARTS, dtype=object), sizes), pa.large_string())
    return table.append_column(PART_COLUMN, words)


def warn_of_later_training(
    source: str, users: NDArray[np.int64], parts: NDArray[np.int8], times: NDArray[np.int64], *, stacklevel: int
) -> None:
    """Warn of events that are later than one of the same user in a later part: they tell of what is to be predicted.

    Args:
        users, parts, times: of events in the order of users and then parts, (E,) each.
        stacklevel: 1 for the function that calls this one.
    """
    late = np.zeros(len(users), dtype=bool)
    for part in range(1, len(PARTS)):
        first = np.full(int(users.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        of_later = parts >= part
        np.minimum.at(first, users[of_later], times[of_later])
        late |= ~of_later & (times > first[users])
    if late.any():
        whose = len(np.unique(users[late]))
        warnings.warn(
            f"{source}: {int(late.sum()):,} events of {whose:,} users are later than an event of the same user in a "
            "later part: what is learned or read there was not known at the time of the target; check the split",
            stacklevel=stacklevel + 1,
        )

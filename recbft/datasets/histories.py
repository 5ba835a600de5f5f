"""Histories to recommend for: raw ids, any length, nothing dropped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recbft.datasets.events import Events
from recbft.datasets.readers import read_table


def read_histories(
    path: str | Path,
    *,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    separator: str | None = None,
    columns: Sequence[str] | None = None,
) -> dict[Any, list[Any]]:
    """Each user's items, oldest first; users in order of first appearance, ids as the file has them.

    Args:
        path: any form that ``readers`` knows.
        user, item: the columns with raw ids; default ``user_id`` and ``item_id``.
        time: the column that orders a user's events (a stable sort); without it the row order is the order.
        separator, columns: for delimited files, see ``readers.read_table``.

    Raises:
        UserError: the file is missing or damaged, or a column is missing or holds what it may not.
    """
    user, item = user or "user_id", item or "item_id"
    wanted = [user, item, *([time] if time is not None else [])]
    table = read_table(path, wanted, separator=separator, columns=columns)
    events = Events.from_table(table, source=str(path), user=user, item=item, time=time)
    return group_by_user(events)


def group_by_user(events: Events) -> dict[Any, list[Any]]:
    """The events of each user, oldest first."""
    encoded = events.user.dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    # both sorts are stable: ties keep the row order
    order = np.argsort(codes, kind="stable") if events.time is None else np.lexsort((events.time, codes))
    items = events.item.to_pylist()
    ends = np.cumsum(np.bincount(codes, minlength=len(encoded.dictionary)))
    parts = np.split(order, ends[:-1])
    return {
        name: [items[row] for row in rows] for name, rows in zip(encoded.dictionary.to_pylist(), parts, strict=True)
    }

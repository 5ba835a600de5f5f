"""Read the histories to recommend for from a file: raw ids, any length, nothing dropped unless asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from recbft.datasets.loading import read_events
from recbft.datasets.preparing.prepare import Preparation, satisfying


def read_histories(
    path: str | Path,
    *,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    separator: str | None = None,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    deduplicate: Literal["first", "last"] | None = None,
) -> pd.DataFrame:
    """The events of each user, oldest first, as ``Recommender.recommend`` takes them.

    Args:
        path: any form that ``readers`` knows.
        user, item: the columns with raw ids; default ``user_id`` and ``item_id``.
        time: the column that orders a user's events (a stable sort); without it the row order is the order.
        separator, columns: for delimited files, see ``readers.read_table``.
        where, deduplicate: as in ``Preparation``.

    Returns:
        Columns user_id, item_id and, where ``time`` is given, timestamp (int64, or dates where the file holds dates);
        ids as the file has them. ``attrs`` counts the events left out: ``filtered_out`` by ``where``, ``repeated`` by
        ``deduplicate``.

    Raises:
        UserError: the file is missing or damaged, or a column is missing or holds what it may not.
    """
    user, item = user or "user_id", item or "item_id"
    chosen = Preparation(where=where, deduplicate=deduplicate)
    events = read_events(
        Path(path), user=user, item=item, time=time, separator=separator, columns=columns, extra=chosen.columns()
    )
    frame: pd.DataFrame = pd.DataFrame({"user_id": events.user.to_pandas(), "item_id": events.item.to_pandas()})
    rows = np.flatnonzero(satisfying(events, chosen))
    if events.time is not None:
        times = events.time if events.time_unit is None else events.time.astype(f"datetime64[{events.time_unit}]")
        frame = frame.assign(timestamp=times)
        rows = rows[np.argsort(events.time[rows], kind="stable")]  # ties keep the row order
    if events.time is not None or where is not None:
        frame = frame.iloc[rows].reset_index(drop=True)
    if deduplicate is not None:
        frame = frame.drop_duplicates(["user_id", "item_id"], keep=deduplicate, ignore_index=True)
    frame.attrs = {"filtered_out": len(events) - len(rows), "repeated": len(rows) - len(frame)}
    return frame

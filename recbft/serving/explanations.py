"""Why an item: which events of a history speak for it.

Shapes: I items explained, n events that the model reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from recbft.datasets.columns import check_columns
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError
from recbft.evaluation import event_weights
from recbft.models.contract import SequenceModel
from recbft.serving.histories import Histories, as_frame, as_list, encode
from recbft.serving.lists import Asked, blocks_of_lists, check_asked

EXPLAINED = 3


def explanation_table(
    model: SequenceModel,
    vocabulary: Vocabulary,
    history: Sequence[Any] | pd.DataFrame,
    item: Any = None,
    k: int | None = None,
    *,
    memory_mb: float = 256.0,
    time_unit: str | None = None,
) -> pd.DataFrame:
    """``Recommender.explain``; see there."""
    if item is not None and k is not None:
        raise UserError(f"k is {k}, which has no effect where an item is named; give one of them")
    check_asked(model, 1 if k is None else k)
    histories, raw = _one(as_frame(history))
    encoded = encode(histories, vocabulary, reads_times=model.reads_times, time_unit=time_unit)
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
        asked_for = Asked(min(EXPLAINED, left) if k is None else k, memory_mb=memory_mb)
        (best,) = blocks_of_lists(model, vocabulary, encoded, asked_for)
        items = best["item"].tolist()
    wanted = vocabulary.encode(items)
    if (wanted == 0).any():
        raise UserError(f"item {item!r} is not in the model's vocabulary; name an item of the training data")
    found = event_weights.explain(model, encoded.items, wanted, times=encoded.times)
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


def _one(history: Any) -> tuple[Histories, list[Any]]:
    """One history as ``encode`` takes them, and its raw items."""
    if not isinstance(history, pd.DataFrame):
        raw = as_list(history, "the history is")
        return [raw], raw
    check_columns([str(column) for column in history.columns], ["user_id", "item_id"], "the history")
    if (num_users := history["user_id"].nunique()) > 1:
        raise UserError(f"the data frame holds {num_users} users; give the events of one")
    return history, history["item_id"].tolist()

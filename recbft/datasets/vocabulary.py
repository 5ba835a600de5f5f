"""The item vocabulary: raw ids and the indices 1..V that models use; 0 is padding and whatever is unknown.

Two ids are equal when their canonical texts (``str(id)``) are: the integer 7 equals the text ``7`` and not ``007``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from recbft.errors import UserError


class Vocabulary:
    """Raw ids of items 1..V.

    Args:
        ids: (V,), int64, or object holding str; index i has raw id ``ids[i - 1]``.
    """

    def __init__(self, ids: NDArray[Any]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def encode(self, raw_ids: Iterable[Any]) -> NDArray[np.int64]:
        """Item indices of raw ids (a list, array or column), 0 where an id is unknown or blank."""
        if hasattr(raw_ids, "dtype"):
            values = np.asarray(raw_ids)
            if values.dtype.kind == "i" and self.ids.dtype != object:
                return np.asarray(self._numbers.get_indexer(pd.Index(values)), dtype=np.int64) + 1
            raw_ids = values.tolist()
        texts = pd.Index([canonical_text(value) for value in raw_ids], dtype=object)
        return np.asarray(self._texts.get_indexer(texts), dtype=np.int64) + 1

    def decode(self, indices: ArrayLike) -> NDArray[Any]:
        """Raw ids of item indices 1..V, in the indices' shape."""
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and (wanted.min() < 1 or wanted.max() > len(self.ids)):
            wrong = wanted[(wanted < 1) | (wanted > len(self.ids))].flat[0]
            raise UserError(f"item index {wrong} is not in the vocabulary; indices are 1 to {len(self.ids)}")
        return np.asarray(self.ids[wanted - 1])

    @cached_property
    def _texts(self) -> pd.Index[Any]:
        return _ready(pd.Index([str(value) for value in self.ids.tolist()], dtype=object))

    @cached_property
    def _numbers(self) -> pd.Index[Any]:
        return _ready(pd.Index(self.ids))


def _ready(index: pd.Index[Any]) -> pd.Index[Any]:
    """An index whose hash table is there: threads that ask pandas for it at once may find it half full."""
    index.get_indexer(index[:1])
    return index


def canonical_text(value: Any) -> str | None:
    """The text of one raw id: whole floats as integers, None for a blank."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bytes, list, tuple, set, dict, np.ndarray)):
        raise UserError(f"an item id is {value!r}; give ids that are whole numbers or text, one per event")
    if value is None or value is pd.NA or value != value:
        return None
    whole = isinstance(value, (float, np.floating)) and float(value).is_integer()
    return str(int(value)) if whole else str(value)

"""The item vocabulary: raw ids and the indices 1..V that models use; 0 is padding and whatever is unknown.

Two ids are equal when their canonical texts (``str(id)``) are: the integer 7 equals the text ``7`` and not ``007``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray
from pandas.api.extensions import ExtensionArray
from pandas.api.types import infer_dtype, is_numeric_dtype, is_string_dtype

from recbft.datasets.columns import whole_numbers_of
from recbft.datasets.events import largest_exact
from recbft.errors import UserError, shown


class Vocabulary:
    """Raw ids of items 1..V.

    Args:
        ids: (V,), int64, or object holding str; index i has raw id ``ids[i - 1]``.
    """

    def __init__(self, ids: NDArray[Any]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def example(self) -> int | str:
        """A raw id, for messages."""
        first: int | str = self.ids[:1].tolist()[0]
        return first

    def encode(self, raw_ids: Iterable[Any]) -> NDArray[np.int64]:
        """Item indices of raw ids (a list, array or column), 0 where an id is unknown or blank.

        Raises:
            UserError: an id is neither number nor text, or a float so large that it may have been another number.
        """
        column = _as_array(raw_ids)
        are_integers = isinstance(column, np.ndarray) and column.dtype.kind == "i"
        if are_integers and self.ids.dtype != object:
            return np.asarray(self._numbers.get_indexer(pd.Index(column)), dtype=np.int64) + 1
        if not _of_one_kind(column):
            return self._encode(column)
        codes, distinct = pd.factorize(column)  # instead of a text for each of millions of events
        found = self._encode(np.asarray(distinct, dtype=getattr(distinct.dtype, "numpy_dtype", None)))
        return np.asarray(np.append(found, 0)[codes], dtype=np.int64)  # a blank has code -1

    def _encode(self, raw_ids: Iterable[Any]) -> NDArray[np.int64]:
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
    def dtype(self) -> Any:
        """Of a column that holds raw ids, whichever of them."""
        return pd.Series(self.ids[:1]).dtype

    @cached_property
    def _texts(self) -> pd.Index[Any]:
        return _ready(pd.Index([str(value) for value in self.ids.tolist()], dtype=object))

    @cached_property
    def _numbers(self) -> pd.Index[Any]:
        return _ready(pd.Index(self.ids))


def _as_array(ids: Any) -> Any:
    """Ids as a column in which pandas finds the distinct ones, where they can be one; else as they are."""
    if isinstance(ids, list) and ids and set(map(type, ids)) <= {int, np.int64}:
        numbers = np.array(ids)
        return numbers if numbers.dtype.kind == "i" else ids  # beyond 64 bits: floats or objects
    if hasattr(ids, "dtype") and not isinstance(ids, (np.ndarray, pd.Series, pd.Index, ExtensionArray)):
        array = np.asarray(ids)  # of another library, in whose columns whole numbers beside a blank would be floats
        return array if array.dtype.kind in "iu" or (array.dtype.kind == "f" and not np.isnan(array).any()) else ids
    return ids


def _of_one_kind(ids: Any) -> bool:
    """Whether ids are a column of numbers or of texts, in which pandas finds the distinct ones as we would."""
    if not isinstance(ids, (np.ndarray, pd.Series, pd.Index, ExtensionArray)) or ids.ndim != 1:
        return False
    dtype = ids.dtype
    if isinstance(dtype, np.dtype):
        # beside others pandas takes 1, 1.0 and True for one
        return dtype.kind in "iuf" or (dtype.kind == "O" and infer_dtype(ids, skipna=True) == "string")
    return isinstance(dtype, pd.CategoricalDtype) or is_string_dtype(dtype) or is_numeric_dtype(dtype)


def _ready(index: pd.Index[Any]) -> pd.Index[Any]:
    """An index whose hash table is there: threads that ask pandas for it at once may find it half full."""
    index.get_indexer(index[:1])
    return index


def joined_ids(ids: NDArray[Any], more: NDArray[Any]) -> NDArray[Any]:
    """Ids and those that follow them, as whole numbers where all are the canonical texts of some."""
    if ids.dtype != object and more.dtype == object:
        more = whole_numbers_of(pa.array(more, pa.large_string())).to_numpy(zero_copy_only=False)
    if ids.dtype == more.dtype:
        return np.concatenate([ids, more])
    return np.array([str(raw) for raw in (*ids.tolist(), *more.tolist())], dtype=object)


def shown_id(raw: Any) -> str:
    """A raw id as a message shows it: numpy's whole numbers as any others.

    >>> shown_id(np.int64(7)), shown_id("7")
    ('7', "'7'")
    """
    return repr(raw.item() if isinstance(raw, np.generic) else raw)


def canonical_text(value: Any, name: str = "an item id") -> str | None:
    """The text of one raw id: whole floats as integers, None for a blank; a message calls it by ``name``."""
    if isinstance(value, str):
        return str(value)
    value = value.as_py() if hasattr(value, "as_py") else value  # of arrow
    if hasattr(value, "__len__") and not isinstance(value, str):
        raise UserError(f"{name} is {shown(value)}; give ids that are whole numbers or text, one per event")
    if value is None or value is pd.NA or value != value:
        return None
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        bits = getattr(value, "itemsize", 8) * 8
        if abs(value) > largest_exact(bits):
            said = f"but whole numbers so large are not exact as float{bits}; give integers"
            raise UserError(f"{name} is {float(value)!r}, {said}")
        return str(int(value))
    return str(value)

"""Caps: how many items of a list may share a value of a feature, such as three of a category.

A list is filled from the best item on. An item that would be one too many of any of its values is passed over, and the
next best takes its place; an item without a value is never passed over.

Shapes: S histories, V items, k items per list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.config.fields import is_whole
from recbft.datasets.columns import is_list
from recbft.datasets.features import ItemFeatures
from recbft.errors import UserError, did_you_mean, shown
from recbft.evaluation.top_k import TopK

IntArray = NDArray[np.int64]
LOOKED_AT = 4  # times as many items as asked for are looked at first, and so many times as many again where needed


class Values(NamedTuple):
    """The values of each item in one column, numbered: of item i ``of[offsets[i] : offsets[i + 1]]``."""

    of: IntArray
    offsets: IntArray  # (V + 2,) item 0 is padding


class Labels:
    """The categories and sets of all items, of which a run keeps those that its data had.

    Args:
        table: pyarrow, a row per item in index order; texts, or lists of texts; null is missing.
    """

    def __init__(self, table: Any) -> None:
        self.table = table
        self._values: dict[str, Values] = {}

    @property
    def names(self) -> list[str]:
        """The columns."""
        names: list[str] = self.table.column_names
        return names

    def values(self, name: str) -> Values:
        """Those of a column."""
        if name not in self._values:
            column = self.table.column(name).combine_chunks()
            if is_list(column.type):
                lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
                column = pc.list_flatten(column)
            else:
                lengths = column.is_valid().to_numpy(zero_copy_only=False)
            codes = column.drop_null().dictionary_encode().indices.to_numpy(zero_copy_only=False)
            offsets = np.concatenate([[0, 0], np.cumsum(lengths, dtype=np.int64)])
            self._values[name] = Values(codes.astype(np.int64), offsets)
        return self._values[name]

    def beside(self, new: ItemFeatures) -> Labels:
        """With further items, whose values are missing where they lack a column."""
        columns = {}
        for name in self.names:
            own = self.table.column(name)
            has = name in new.table.column_names
            more = new.table.column(name).cast(own.type) if has else pa.nulls(len(new), own.type)
            columns[name] = pa.chunked_array([*own.chunks, *(more.chunks if has else [more])], own.type)
        return Labels(pa.table(columns))


class Caps(NamedTuple):
    """Columns, and how many items of a list may share a value of each."""

    columns: tuple[Values, ...]
    most: tuple[int, ...]

    @classmethod
    def of(cls, labels: Labels | None, cap: Mapping[str, int] | None) -> Caps | None:
        """The caps of a request; None where there are none.

        Raises:
            UserError: a column that the run does not have, or a number that is no whole number of at least 1.
        """
        if cap is None:
            return None
        if not isinstance(cap, Mapping):
            raise UserError(f"cap is {shown(cap)}; give a mapping from features to numbers, such as {{'category': 3}}")
        known = [] if labels is None else labels.names
        for name, most in cap.items():
            if not known:
                raise UserError(
                    f"cap names {name!r}, but this run keeps no categories of items; train it with item features "
                    "(Dataset.from_frame(events, items=...), or --items in a shell)"
                )
            if name not in known:
                raise UserError(f"cap names {name!r}; {did_you_mean(str(name), known, listed_as='this run has')}")
            if not (is_whole(most) and most >= 1):
                raise UserError(f"cap of {name!r} is {shown(most)}; give a whole number of at least 1")
        if labels is None or not cap:
            return None
        return cls(tuple(labels.values(name) for name in cap), tuple(int(most) for most in cap.values()))

    def keep(self, items: IntArray, k: int) -> list[int]:
        """The places of the first k items, best first, that the caps allow."""
        kept: list[int] = []
        counts: list[Counter[int]] = [Counter() for _ in self.columns]
        for place, item in enumerate(items.tolist()):
            own = [one.of[one.offsets[item] : one.offsets[item + 1]].tolist() for one in self.columns]
            columns = list(zip(own, counts, self.most, strict=True))
            if any(count[value] >= most for values, count, most in columns for value in values):
                continue
            for values, count, _ in columns:
                count.update(values)
            kept.append(place)
            if len(kept) == k:
                break
        return kept

    def lists(self, best: Callable[[IntArray, int], TopK], size: int, k: int, num_items: int) -> TopK:
        """The k best of each history that the caps allow.

        Args:
            best: the lists without caps, of some histories and of a length.
            size: S.
            num_items: that a list can hold at most.
        """
        rows, length = np.arange(size), min(num_items, max(LOOKED_AT * k, 50))
        made: TopK | None = None
        while True:
            found = best(rows, length)
            if made is None:
                made = TopK(
                    np.zeros((size, k), np.int64),
                    np.full((size, k), np.nan, found.scores.dtype),
                    np.zeros(size, np.int64),
                    np.full((size, k), np.nan),
                )
            again = []
            for place, (row, there) in enumerate(zip(rows.tolist(), found.lengths.tolist(), strict=True)):
                kept = self.keep(found.items[place, :there], k)
                if len(kept) < k and there == length < num_items:
                    again.append(row)
                    continue
                made.lengths[row] = len(kept)
                for whole, part in ((made.items, found.items), (made.scores, found.scores),
                                    (made.probabilities, found.probabilities)):  # fmt: skip
                    whole[row, : len(kept)] = part[place, kept]
            if not again:
                return made
            rows, length = np.array(again), min(num_items, LOOKED_AT * length)

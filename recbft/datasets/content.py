"""Item features as vectors whose inner products are cosines, by a transform that knows training items alone.

    category   one-hot times idf; rare levels are one level
    set        multi-hot times idf
    words      tf-idf
    number     its quantile q as a point on half a circle, w (cos pi q, sin pi q), w the idf of one level in ten
    vector     centred and scaled by dimension, then of length w, that of the longest block of terms

    idf = 1 + ln((1 + n) / (1 + n_t))            n fitted items have the column, n_t of them the term    (1)
    tf  = 1 + ln(count)                                                                                 (2)
    x   = sum_t tf_t idf_t s_t / sqrt(F)         s_t random signs of term or dimension t                 (3)

A block of more than ``width`` columns is projected on that many random directions (3), which keep a cosine up to an
error of about 1 / sqrt(F). A truncated SVD loses the rare terms, which tell most. On Amazon Beauty (validation, HR@10
of the cosine with a user's last five items) unreduced tf-idf has .076, three columns of 128 dimensions by (3) .067, of
256 .072, and an SVD of all to 128, 256 and 512 dimensions (10,000 users) .034, .048 and .061.

Whole rows have length 1: their inner product is the cosine. A block of an item that lacks the column is all zero, as no
value is.

The transform is fitted on items with a training event. A term that none of those has is ignored, and counted. Saved as
numbers (safetensors) and words (JSON), it reads items that were never seen before.

Source of (3): Achlioptas, Database-friendly random projections (2003).
Shapes: N items, V items of a data set, F width of a block or of all, C columns of a block before the projection.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from scipy import sparse

from recbft.config.fields import check_range, from_dict, to_dict
from recbft.datasets.columns import flat
from recbft.datasets.features import ItemFeatures, Kind, vectors
from recbft.errors import UserError
from recbft.system.files import read_json, user_path, write_atomic, write_json

ARRAYS_FILE, WORDS_FILE = "items.safetensors", "items.json"
_WORD = re.compile(r"\w+")
_QUANTILES = 1000
_NUMBER_LENGTH = 1 + math.log(10)


@dataclass(frozen=True, kw_only=True)
class ContentConfig:
    """How features become vectors."""

    width: int = 128  # of a column's block at most
    min_items: int = 2  # fitted items that have a term; a rarer level of a category is one with the other rare ones
    max_terms: int = 50_000  # of a column; the most frequent are kept

    def __post_init__(self) -> None:
        check_range("width", self.width, at_least=2)
        for name in ("min_items", "max_terms"):
            check_range(name, getattr(self, name), at_least=1)


class Content(NamedTuple):
    """The items' vectors, those of a data set by their indices; row 0 is padding, all zero."""

    values: NDArray[np.float32]  # (V+1, F) rows of length 1, or zero where nothing is known
    known: NDArray[np.bool_]  # (V+1,) whether the item has any content
    blocks: dict[str, slice]  # column -> its part of F
    ignored: dict[str, int]  # column -> values that no fitted item has, counted with repetition


class Block(NamedTuple):
    """The fitted transform of one column."""

    kind: Kind
    terms: list[str]  # of categories, sets and words, a column each; the last column has all terms from there on
    arrays: dict[str, NDArray[np.float32]]  # idf (C,); quantiles (Q,); mean, scale (C,), length (1,)

    @property
    def num_columns(self) -> int:
        """C."""
        return 2 if self.kind == "number" else len(self.arrays["scale" if self.kind == "vector" else "idf"])


class ItemContent:
    """A fitted transform from features to vectors.

    Args:
        blocks: column -> its transform.
        config: what it was fitted with.
        separators: at which texts of sets are cut, where a table has texts.
        id_column: which held the item ids.
    """

    def __init__(
        self, blocks: dict[str, Block], config: ContentConfig, separators: dict[str, str], id_column: str | None
    ) -> None:
        self.blocks, self.config, self.separators, self.id_column = blocks, config, separators, id_column

    @classmethod
    def fit(
        cls, features: ItemFeatures, counts: NDArray[np.int64], config: ContentConfig = ContentConfig()
    ) -> ItemContent:
        """Fit on the items that have an event in training.

        Args:
            features: of a data set.
            counts: training events per item, (V+1,), as ``Dataset.training_counts``.
        """
        assert len(counts) == len(features) + 1, "features are those of the data set's items"
        fitted = pa.array(np.flatnonzero(counts[1:] > 0))
        blocks: dict[str, Block] = {}
        longest = 0.0
        for name, kind in features.kinds.items():
            values = flat(features.table, name).take(fitted)
            block = _FIT[kind](values, kind, config) if values.null_count < len(values) else None
            if block is not None:
                blocks[name] = block
                if block.terms:
                    longest = max(longest, math.sqrt(_weighted_terms(block, values)[0].power(2).sum() / len(values)))
        if not blocks:
            raise UserError(
                f"{features.source}: no column tells the {len(fitted):,} items with a training event apart; give other "
                "features or kinds"
            )
        for block in blocks.values():
            if block.kind == "vector":
                block.arrays["length"] = np.array([longest or 1], np.float32)
        separators = {name: mark for name, mark in features.separators.items() if name in blocks}
        return cls(blocks, config, separators, features.id_column)

    @property
    def width(self) -> int:
        """F."""
        return sum(self._widths.values())

    @property
    def _widths(self) -> dict[str, int]:
        return {name: min(block.num_columns, self.config.width) for name, block in self.blocks.items()}

    def matrix(self, features: ItemFeatures) -> Content:
        """The vectors of items, in the order of the features' rows, after the row of padding.

        Columns the transform does not know are left aside; one that is not there is missing.
        """
        values = np.zeros((len(features) + 1, self.width), np.float32)
        blocks, ignored, start = {}, {}, 0
        if lacking := [name for name in self.blocks if name not in features.kinds]:
            warnings.warn(
                f"{features.source}: no column {', '.join(map(repr, lacking))}, which the model was trained with; all "
                "its values count as missing",
                stacklevel=2,
            )
        for name, block in self.blocks.items():
            blocks[name] = slice(start, start + self._widths[name])
            start = blocks[name].stop
            if name in features.kinds:
                if features.kinds[name] != block.kind:
                    raise UserError(
                        f"{features.source}: column {name!r} is read as {features.kinds[name]}, and was fitted as "
                        f"{block.kind}; give it that kind"
                    )
                column = flat(features.table, name)
                values[1:, blocks[name]], ignored[name] = _encode(
                    block, column, self.config.width, features.source, name
                )
        return Content(
            _unit_rows(values), np.asarray(values.any(axis=1)), blocks, {k: n for k, n in ignored.items() if n}
        )

    def read(self, given: Any, *, item: str | None = None) -> ItemFeatures:
        """Features of items that may be new, with the columns and kinds of this transform.

        Args:
            given: a frame, a file or several, or features.
            item: the column with the item ids, if it is neither that of the fitted features nor ``item_id``.
        """
        return ItemFeatures.of(given, item=item or self.id_column, kinds=self.kinds, just=True)

    @property
    def kinds(self) -> dict[str, str]:
        """Column -> kind, as it is asked for."""
        marks = {name: f":{mark}" for name, mark in self.separators.items()}
        return {name: block.kind + marks.get(name, "") for name, block in self.blocks.items()}

    def save(self, folder: str | Path) -> None:
        """Write ``items.safetensors`` and ``items.json`` into a folder."""
        arrays = {
            f"{number}.{key}": np.ascontiguousarray(array)
            for number, block in enumerate(self.blocks.values())
            for key, array in block.arrays.items()
        }
        words = {
            "config": to_dict(self.config),
            "id_column": self.id_column,
            "columns": [
                {"name": name, "kind": block.kind, "separator": self.separators.get(name), "terms": block.terms}
                for name, block in self.blocks.items()
            ],
        }
        write_atomic(user_path(folder) / ARRAYS_FILE, save(arrays))
        write_json(user_path(folder) / WORDS_FILE, words)

    @classmethod
    def load(cls, folder: str | Path) -> ItemContent:
        """What ``save`` wrote.

        Raises:
            UserError: a file is missing or damaged.
        """
        folder = user_path(folder)
        try:
            words, arrays = read_json(folder / WORDS_FILE), load_file(folder / ARRAYS_FILE)
            blocks = {}
            for number, column in enumerate(words["columns"]):
                own = {key.partition(".")[2]: array for key, array in arrays.items() if key.startswith(f"{number}.")}
                blocks[column["name"]] = Block(column["kind"], column["terms"], own)
                assert blocks[column["name"]].num_columns > 0 and len(column["terms"]) >= len(own.get("idf", ()))
            separators = {c["name"]: c["separator"] for c in words["columns"] if c["separator"] is not None}
            return cls(blocks, from_dict(ContentConfig, words["config"]), separators, words.get("id_column"))
        except (OSError, ValueError, KeyError, TypeError, AssertionError, SafetensorError) as error:
            raise UserError(
                f"{folder}: the transform of item features ({WORDS_FILE}, {ARRAYS_FILE}) cannot be read: {error}; "
                "restore the files, or train again into a new folder"
            ) from None


# Terms: categories, members of sets, words


def _terms(column: Any, kind: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Row and text of every term of a column, in order."""
    if kind == "category":
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        return rows, column.drop_null().to_numpy(zero_copy_only=False)
    if kind == "set":
        rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
        return rows, pc.list_flatten(column).to_numpy(zero_copy_only=False)
    found = [[] if text is None else _WORD.findall(text.lower()) for text in column.to_pylist()]
    rows = np.repeat(np.arange(len(found)), [len(words) for words in found])
    return rows, np.array([word for words in found for word in words], dtype=object)


def _fit_terms(column: Any, kind: Kind, config: ContentConfig) -> Block | None:
    rows, texts = _terms(column, kind)
    pairs = pd.DataFrame({"row": rows, "term": texts}).drop_duplicates()
    number = pairs["term"].value_counts()
    number = number.sort_index().sort_values(ascending=False, kind="stable")
    num_kept = min(int((number >= config.min_items).sum()), config.max_terms)
    having = number.to_numpy(dtype=np.float64)
    if kind == "category":  # the rare ones share a column
        num_columns = num_kept + (num_kept < len(number))
        having = np.append(having[:num_kept], having[num_kept:].sum())[:num_columns]
    else:
        number, having = number.iloc[:num_kept], having[:num_kept]
    if len(having) < (2 if kind == "category" else 1):
        return None
    known = len(column) - column.null_count
    idf = 1 + np.log((1 + known) / (1 + having))  # (1)
    return Block(kind, [str(term) for term in number.index], {"idf": idf.astype(np.float32)})


def _weighted_terms(block: Block, column: Any) -> tuple[Any, int]:
    """(N, C) sparse, and how many terms are none of the block's."""
    rows, texts = _terms(column, block.kind)
    columns = pd.Index(block.terms).get_indexer(pd.Index(texts, dtype=object))
    unknown = int((columns < 0).sum())
    idf = block.arrays["idf"]
    rows, columns = rows[columns >= 0], np.minimum(columns[columns >= 0], len(idf) - 1)
    counts = sparse.coo_matrix((np.ones(len(rows)), (rows, columns)), (len(column), len(idf))).tocsr()
    counts.data = (1 + np.log(counts.data)) * idf[counts.indices]  # (2)
    return counts, unknown


# Numbers and vectors


def _fit_number(column: Any, kind: Kind, config: ContentConfig) -> Block | None:
    known = column.drop_null().to_numpy(zero_copy_only=False)
    at = np.linspace(0, 1, min(_QUANTILES, len(known)))
    quantiles = np.quantile(known, at).astype(np.float32)
    return None if quantiles[0] == quantiles[-1] else Block(kind, [], {"quantiles": quantiles})


def _on_half_circle(block: Block, column: Any) -> NDArray[np.float64]:
    """(N, 2) the quantile's point; between the two ends of a run of equal quantiles stands its middle."""
    known = column.is_valid().to_numpy(zero_copy_only=False)
    x = np.nan_to_num(column.to_numpy(zero_copy_only=False)).astype(np.float32).astype(np.float64)
    quantiles, at = block.arrays["quantiles"].astype(np.float64), np.linspace(0, 1, len(block.arrays["quantiles"]))
    low, high = np.interp(x, quantiles, at), -np.interp(-x, -quantiles[::-1], -at[::-1])
    angle = np.pi * (low + high) / 2
    return np.where(known[:, None], _NUMBER_LENGTH * np.stack([np.cos(angle), np.sin(angle)], axis=1), 0)


def _fit_vector(column: Any, kind: Kind, config: ContentConfig) -> Block | None:
    known = vectors(column.drop_null()).astype(np.float64)
    mean, deviation = known.mean(axis=0), known.std(axis=0)
    varies = deviation > 1e-6 * max(1e-30, np.abs(known).max())
    scale = np.where(varies, 1 / np.where(varies, deviation, 1), 0)
    if not varies.any():
        return None
    return Block(kind, [], {"mean": mean.astype(np.float32), "scale": scale.astype(np.float32)})


def _standardised(block: Block, column: Any, source: str, name: str) -> NDArray[np.float64]:
    """(N, C)."""
    known, mean = column.is_valid().to_numpy(zero_copy_only=False), block.arrays["mean"]
    rows = vectors(column.drop_null())
    if len(rows) and rows.shape[1] != len(mean):
        raise UserError(
            f"{source}: vectors {name!r} hold {rows.shape[1]} numbers, and those it was fitted on {len(mean)}; "
            "make them by the same model"
        )
    standard = np.zeros((len(column), len(mean)))
    if len(rows):
        standard[known] = (rows.astype(np.float64) - mean) * block.arrays["scale"]
    return standard


# All kinds


def _encode(block: Block, column: Any, width: int, source: str, name: str) -> tuple[NDArray[np.float32], int]:
    """(N, F), and how many terms are none of the block's."""
    wide: Any
    unknown, length = 0, None
    if block.kind == "number":
        wide = _on_half_circle(block, column)
    elif block.kind == "vector":
        wide, length = _standardised(block, column, source, name), block.arrays["length"]
    else:
        wide, unknown = _weighted_terms(block, column)
    if block.num_columns > width:
        terms = block.terms[: block.num_columns] or [str(number) for number in range(block.num_columns)]
        wide = wide @ _signs([f"{name}\0{term}" for term in terms], width)
    rows = np.asarray(wide.toarray() if sparse.issparse(wide) else wide, dtype=np.float32)
    return rows if length is None else _unit_rows(rows) * length, unknown


def _signs(terms: Sequence[str], width: int) -> NDArray[np.float32]:
    """(C, F) a random vector of signs for each term, by its text alone: the same everywhere and always."""
    digests = b"".join(hashlib.shake_128(term.encode()).digest(-(-width // 8)) for term in terms)
    bits = np.unpackbits(np.frombuffer(digests, np.uint8).reshape(len(terms), -1), axis=1, count=width)
    return np.asarray((2 * bits.astype(np.float32) - 1) / math.sqrt(width), dtype=np.float32)  # (3)


def _unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1; what is zero stays so."""
    length = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1), dtype=np.float32)


_FIT = {
    "category": _fit_terms,
    "set": _fit_terms,
    "words": _fit_terms,
    "number": _fit_number,
    "vector": _fit_vector,
}

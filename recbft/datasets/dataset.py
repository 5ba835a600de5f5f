"""A data set: jagged integer histories, their item vocabulary, hashes that say which data it was, and its split.

    history of user u     items[offsets[u] : offsets[u+1]]     oldest first, item indices 1..V, 0 is padding
    raw id of item i      item_ids[i - 1]                      int64 where the source column was integer, else text

Two ids are equal when their canonical texts (``str(id)``) are: the integer 7 equals the text ``7`` and not ``007``. So
a CSV and a Parquet file of the same events give the same hashes, and a data set answers to ids of either type.

It is split by leaving one out, by offset arithmetic: a user's last event tests, the one before validates, the rest
train.

    history of user u     e_1 ... e_{n-2}   e_{n-1}       e_n
                          training          validation    test          n = offsets[u+1] - offsets[u] >= 3

Validation ranks from the training events, test from training and validation events. Nothing is copied and no prefix is
written out: a view is two bounds and a target per user.

Shapes: U users, V items, E events.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from recbft.datasets.columns import SPREADSHEET_NUMBER, check_columns, flat, from_pandas, stands_for_nothing
from recbft.datasets.events import USUAL_TIME, Events, time_columns, warn_if_rows_go_back
from recbft.datasets.loading import METADATA_KEY, SYNTHETIC, Counts, find_events, place_of
from recbft.datasets.prepare import MIN_HISTORY, Preparation, prepare
from recbft.datasets.synth import SyntheticConfig, synthetic_events
from recbft.datasets.vocabulary import Vocabulary, shown_id
from recbft.errors import UserError
from recbft.system.files import write_parquet

DEFAULT_PREPARATION = Preparation()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """Histories of at least 3 events; users are numbered by first appearance in the source, items in the histories.

    User u's history, oldest first, is ``items[offsets[u] : offsets[u + 1]]``, item indices 1..V. The arrays belong to
    the data set: do not write to them.
    """

    name: str
    items: NDArray[np.int64]  # (E,)
    offsets: NDArray[np.int64]  # (U+1,)
    times: NDArray[np.int64] | None  # (E,) None where the data has no real times
    user_ids: NDArray[Any]  # (U,) int64, or object holding str
    item_ids: NDArray[Any]  # (V,) int64, or object holding str
    preparation: dict[str, Any] = field(default_factory=dict)  # source, filters, counts before and after; JSON-able
    # user, item, time: the columns of the frame or file it was made of, None for those that a card or a canonical file
    # has; empty where it is one of these as it stands
    columns: dict[str, str | None] = field(default_factory=dict)
    # what ``load`` would find it by from any folder, as keys of a configuration; empty where it was not loaded
    place: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.offsets[0] == 0 and self.offsets[-1] == len(self.items), "offsets span the events"
        assert len(self.offsets) == len(self.user_ids) + 1 and np.diff(self.offsets).min() >= MIN_HISTORY
        assert self.items.min() >= 1 and self.items.max() <= len(self.item_ids), "item indices are 1..V"
        assert self.times is None or len(self.times) == len(self.items)

    def __repr__(self) -> str:
        counts = f"{self.num_users:,} users, {self.num_items:,} items, {self.num_events:,} events"
        return f"<Dataset {self.name!r}: {counts}, {'no' if self.times is None else 'with'} times>"

    @classmethod
    def from_events(cls, events: Events, *, name: str, preparation: Preparation = DEFAULT_PREPARATION) -> Dataset:
        """Prepare events and keep the result."""
        made = prepare(events, preparation)
        _warn_of_lost_ids(made.user_ids, np.diff(made.offsets), f"{events.source}: user")
        _warn_of_lost_ids(made.item_ids, np.bincount(made.items)[1:], f"{events.source}: item")
        return cls(name=name, **made._asdict())

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        name: str = "frame",
        user: str = "user_id",
        item: str = "item_id",
        time: str | None = None,
        preparation: Preparation = DEFAULT_PREPARATION,
    ) -> Dataset:
        """Make a data set of a table with one row per event.

        Args:
            frame: a pandas data frame, a pyarrow table, or any table that speaks arrow (polars, duckdb).
            user, item: the columns with raw ids.
            time: the column that orders a user's events (whole numbers or dates, as text too; ties keep the row order).
                Without it the row order is the order, and the data set has no times; a warning says so where a column
                that is called ``timestamp``, ``created_at`` or the like contradicts that order.
            preparation: filters and minimum counts, a ``recbft.datasets.Preparation``.

        Raises:
            UserError: a column is missing or holds what it may not, or no user is left with 3 events.

        >>> frame = pd.DataFrame({"user_id": ["ann"] * 3, "item_id": ["tea", "milk", "tea"]})
        >>> dataset = Dataset.from_frame(frame)
        >>> dataset.items.tolist(), dataset.decode([2]).tolist()
        ([1, 2, 1], ['milk'])
        """
        user, item, time = str(user), str(item), None if time is None else str(time)  # pandas numbers columns too
        wanted = [user, item, *([time] if time is not None else []), *preparation.columns()]
        table = _as_table(frame, wanted, name)
        events = Events.from_table(table, source=name, user=user, item=item, time=time, extra=preparation.columns())
        if time is None:
            warn_if_rows_go_back(events, _likely_times(frame, table, wanted), "the frame's", stacklevel=2)
        made = cls.from_events(events, name=name, preparation=preparation)
        return replace(made, columns={"user": user, "item": item, "time": time})

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        data_root: str | Path | None = None,
        user: str | None = None,
        item: str | None = None,
        time: str | None = None,
        separator: str | None = None,
        columns: Sequence[str] | None = None,
        preparation: Preparation = DEFAULT_PREPARATION,
    ) -> Dataset:
        """Load a data set by name, from a file, or ``"synthetic"``.

        Args:
            name_or_path: a name of ``recbft data list``, a file (its ending names the format, see
                ``recbft.datasets.formats``), a folder holding one ``.inter`` file, either of these in
                ``data_root`` by its name (a file's without its ending), or ``"synthetic"`` for the seeded generator.
            data_root: the folder to look in for a name; default the environment variable ``RECBFT_DATA_ROOT``.
            user, item, time: columns of the file; default those of the card, or ``user_id``, ``item_id`` and no time.
            separator, columns: for delimited files without a header; see ``recbft.datasets.read_table``.
            preparation: filters and minimum counts; a card's own apply where none is asked for.

        Raises:
            UserError: unknown name, missing or damaged file, bad data.
        """
        how = {"user": user, "item": item, "time": time, "separator": separator, "columns": columns}
        asked = {key: value for key, value in how.items() if value is not None}
        if str(name_or_path) == SYNTHETIC:
            if asked or preparation != DEFAULT_PREPARATION:
                raise UserError("the synthetic data set has no file: columns and filters do not apply; leave them out")
            return cls.from_events(synthetic_events(SyntheticConfig()), name=SYNTHETIC)
        found = find_events(name_or_path, data_root, asked, preparation)
        made = cls.from_events(found.events, name=found.name, preparation=found.preparation)
        if found.check is not None:
            counts = Counts(users=made.num_users, items=made.num_items, events=made.num_events)
            found.check(counts, made.content_hash)
        record = {**made.preparation, **found.record} if found.as_saved is None else found.as_saved
        form = {key: asked[key] for key in ("separator", "columns") if key in asked}
        place = place_of(name_or_path, data_root) | form
        return replace(made, preparation=record, columns=found.columns, place=place)

    def save(self, path: str | Path) -> None:
        """Write the canonical Parquet file (user_id, item_id, timestamp if there are times), which ``load`` reads."""
        path = Path(path)
        if path.suffix.lower() not in (".parquet", ".pq"):
            raise UserError(f"{path}: the canonical file is Parquet; let its name end in .parquet")
        users = self.user_ids[np.repeat(np.arange(self.num_users), self.lengths)]
        table = {"user_id": pa.array(users), "item_id": pa.array(self.item_ids[self.items - 1])}
        if self.times is not None:
            table[USUAL_TIME] = pa.array(self.times)
        record: dict[str, Any] = {"name": self.name, "preparation": self.preparation}
        record |= {"has_times": self.times is not None, "events": self.num_events}
        write_parquet(path, pa.table(table).replace_schema_metadata({METADATA_KEY: json.dumps(record)}))

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """V, padding not counted."""
        return len(self.item_ids)

    @property
    def num_events(self) -> int:
        """E, events of all three parts of the split."""
        return len(self.items)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Events per user, (U,)."""
        return np.diff(self.offsets)

    @cached_property
    def training_counts(self) -> NDArray[np.int64]:
        """Events per item over the training events (all but each user's last two), (V+1,); index 0 holds 0."""
        held_out = np.concatenate([self.offsets[1:] - 1, self.offsets[1:] - 2])
        everywhere = np.bincount(self.items, minlength=self.num_items + 1)
        return everywhere - np.bincount(self.items[held_out], minlength=self.num_items + 1)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of ids, items, offsets and times.

        Equal for equal histories of equal ids in the same user order, whatever the file format, the type of the ids or
        the interleaving of users in the source; the name and the preparation do not enter.
        """
        times = np.empty(0, dtype=np.int64) if self.times is None else self.times
        return _sha256(
            "recbft content 1", "times" if self.times is not None else "no times",
            *_text_parts(self.user_ids), *_text_parts(self.item_ids), self.items, self.offsets, times,
        )  # fmt: skip

    @cached_property
    def target_hash(self) -> str:
        """SHA-256 of each user's raw id and raw test target, in user order: equal hashes mean the same test."""
        targets = self.item_ids[self.items[self.offsets[1:] - 1] - 1]
        return _sha256("recbft targets 1", *_text_parts(self.user_ids), *_text_parts(targets))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The items' raw ids and indices."""
        return Vocabulary(self.item_ids)

    def encode(self, raw_ids: Iterable[Any]) -> NDArray[np.int64]:
        """Item indices of raw ids (a list, array or column), 0 where an id is unknown or blank."""
        return self.vocabulary.encode(raw_ids)

    def numbered_as(self, vocabulary: Vocabulary) -> Dataset:
        """The same histories with the items' indices of another vocabulary, or this data set where it has these."""
        index = vocabulary.encode(self.item_ids)
        if unknown := int((index == 0).sum()):
            raise UserError(
                f"{unknown:,} of the {self.num_items:,} items of data set {self.name!r} are unknown there, such as "
                f"{shown_id(self.item_ids[index == 0][0])}"
            )
        if np.array_equal(index, np.arange(1, len(vocabulary) + 1)):
            return self
        return replace(self, items=index[self.items - 1], item_ids=vocabulary.ids)

    def decode(self, indices: ArrayLike) -> NDArray[Any]:
        """Raw ids of item indices 1..V, in the indices' shape."""
        return self.vocabulary.decode(indices)


def _as_table(frame: Any, wanted: Sequence[str], name: str) -> Any:
    """The wanted columns as a pyarrow table; a column arrow cannot hold is refused by name."""
    if isinstance(frame, pd.DataFrame):
        frame = frame.set_axis([str(column) for column in frame.columns], axis=1)
        check_columns(list(frame.columns), wanted, name)
        return pa.table({column: from_pandas(frame[column], column, name) for column in dict.fromkeys(wanted)})
    if isinstance(frame, pa.Table):
        return frame
    if hasattr(frame, "__arrow_c_stream__") and hasattr(
        frame, "columns"
    ):  # a single column, which is no table, has none
        return pa.RecordBatchReader.from_stream(frame).read_all()
    raise UserError(f"a {type(frame).__name__} is not a table; give a pandas data frame or a pyarrow table")


def _likely_times(frame: Any, table: Any, wanted: Sequence[str]) -> dict[str, Any]:
    """The columns of a frame, apart from the wanted ones, that by their names hold times, where they can be read."""
    is_pandas, found = isinstance(frame, pd.DataFrame), {}
    for name in time_columns([str(column) for column in frame.columns] if is_pandas else table.column_names):
        with contextlib.suppress(UserError):  # a column that nobody named may hold anything
            if name not in wanted:
                found[name] = flat(_as_table(frame, [name], "") if is_pandas else table, name)
    return found


def _warn_of_lost_ids(ids: NDArray[Any], counts: NDArray[np.int64], source: str) -> None:
    """Warn of ids in the place of lost ones: all events whose own is lost are then those of one user, or one item."""
    if ids.dtype != object:
        return
    texts = pa.array(ids, pa.large_string())
    said = "is a word for a missing id, but counts as any other id; if the id is missing there, leave its rows out"
    rounded = "looks like a number that a spreadsheet has rounded, several ids to one; export ids as text"
    for mask, warning in (
        (stands_for_nothing(texts), said),
        (pc.match_substring_regex(texts, SPREADSHEET_NUMBER), rounded),
    ):
        found = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
        if len(found):
            most = found[counts[found].argmax()]
            more = f"; {len(found) - 1:,} more like it" if len(found) > 1 else ""
            warnings.warn(f"{source} id {ids[most]!r} ({counts[most]:,} events{more}) {warning}", stacklevel=4)


def _text_parts(ids: NDArray[Any]) -> tuple[NDArray[np.int64], bytes]:
    """Lengths and bytes of the canonical texts."""
    texts = pa.array(ids).cast(pa.large_string())
    lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths, b"".join(pc.cast(texts, pa.large_binary()).to_pylist())


def _sha256(*parts: str | bytes | NDArray[np.int64]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.astype("<i8").tobytes() if isinstance(part, np.ndarray) else part
        content = content.encode() if isinstance(content, str) else content
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


class View(NamedTuple):
    """One prediction task per user: from ``items[start:stop]`` predict ``target``."""

    start: NDArray[np.int64]  # (U,)
    stop: NDArray[np.int64]  # (U,) stop > start
    target: NDArray[np.int64]  # (U,) item index

    def rows(self, which: NDArray[np.int64] | slice) -> View:
        """The tasks of some users, by row."""
        return View(self.start[which], self.stop[which], self.target[which])


class Split(NamedTuple):
    """Training bounds and the two prediction tasks, users in the data set's order."""

    training_start: NDArray[np.int64]  # (U,)
    training_stop: NDArray[np.int64]  # (U,)
    validation: View
    test: View


def leave_one_out(dataset: Dataset) -> Split:
    """Split every history of a data set.

    >>> import pandas as pd
    >>> dataset = Dataset.from_frame(pd.DataFrame({"user_id": [1, 1, 1, 1], "item_id": list("abcd")}))
    >>> split = leave_one_out(dataset)
    >>> split.training_stop.tolist(), split.validation.target.tolist(), split.test.target.tolist()
    ([2], [3], [4])
    """
    start, stop = dataset.offsets[:-1], dataset.offsets[1:]
    return Split(
        training_start=start,
        training_stop=stop - 2,
        validation=View(start=start, stop=stop - 2, target=dataset.items[stop - 2]),
        test=View(start=start, stop=stop - 1, target=dataset.items[stop - 1]),
    )

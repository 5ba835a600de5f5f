"""A data set: jagged integer histories, their item vocabulary, hashes that say which data it was, and its split.

    history of user u     items[offsets[u] : offsets[u+1]]     oldest first, item indices 1..V, 0 is padding
    raw id of item i      item_ids[i - 1]                      int64 where the source column was integer, else text

Two ids are equal when their canonical texts (``str(id)``) are: the integer 7 equals the text ``7`` and not ``007``. So
a CSV and a Parquet file of the same events give the same hashes, and a data set answers to ids of either type.

How it is split into training, validation and test is a part of it, see ``recbft.datasets.split``: whoever asks for
training events, their counts or targets asks ``Dataset.split``.

Shapes: U users, T of them tested, V items, E events.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from recbft.datasets.columns import (
    SPREADSHEET_NUMBER,
    WHOLE_FLOAT,
    as_table,
    flat,
    joined_tables,
    stands_for_nothing,
)
from recbft.datasets.content import ContentConfig, ItemContent
from recbft.datasets.events import Events
from recbft.datasets.features import ItemFeatures
from recbft.datasets.hashing import sha256_of, text_parts
from recbft.datasets.loading import (
    AUTO,
    CANONICAL,
    EXTRA_ROLES,
    METADATA_KEY,
    SYNTHETIC,
    Counts,
    atomic_items,
    by_role,
    by_session,
    find_events,
    place_of,
    root_folder,
)
from recbft.datasets.parts import PART_COLUMN, PARTS, with_parts
from recbft.datasets.prepare import MIN_HISTORY, Preparation, prepare
from recbft.datasets.row_order import time_columns, warn_if_rows_are_unordered
from recbft.datasets.split import Split, Splitting, make_split
from recbft.datasets.synth import SyntheticConfig, synthetic_events
from recbft.datasets.vocabulary import Vocabulary, joined_ids, shown_id
from recbft.errors import UserError
from recbft.system.files import user_path, write_parquet

DEFAULT_PREPARATION = Preparation()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """Histories; users are numbered by first appearance in the source, items in the histories.

    Those of at least 3 events are tested; others, where they were asked for, come after them and only train. Where the
    events say themselves what they are for (``parts``), a user's are in the order of these, and any number is enough.

    User u's history, oldest first, is ``items[offsets[u] : offsets[u + 1]]``, item indices 1..V. The arrays belong to
    the data set: do not write to them.
    """

    name: str
    items: NDArray[np.int64]  # (E,)
    offsets: NDArray[np.int64]  # (U+1,)
    times: NDArray[np.int64] | None  # (E,) None where the data has no real times
    user_ids: NDArray[Any]  # (U,) int64, or object holding str
    item_ids: NDArray[Any]  # (V,) int64, or object holding str
    weights: NDArray[np.float64] | None = None  # (E,) how much each event counts as something to learn
    reliability: NDArray[np.float64] | None = None  # (E,) how far each can be trusted, NaN where nobody knows
    parts: NDArray[np.int8] | None = None  # (E,) a place in ``PARTS``, of data with a split of their own
    preparation: dict[str, Any] = field(default_factory=dict)  # source, filters, counts before and after; JSON-able
    # user, item, time, and session, weight, reliability and split_column where there is one: the columns of the frame
    # or file it was made of, None for those that a card or a canonical file has; empty where it is one of these as it
    # stands
    columns: dict[str, str | None] = field(default_factory=dict)
    features: ItemFeatures | None = None  # of all V items, in the order of their indices
    # what ``load`` would find it by from any folder, as keys of a configuration; empty where it was not loaded
    place: dict[str, Any] = field(default_factory=dict)
    splitting: Splitting = Splitting()  # noqa: RUF009  a frozen value

    def __post_init__(self) -> None:
        assert self.offsets[0] == 0 and self.offsets[-1] == len(self.items), "offsets span the events"
        assert len(self.offsets) == len(self.user_ids) + 1 and self.lengths.min() >= 1
        are_first = (np.diff((self.lengths >= MIN_HISTORY).astype(int)) <= 0).all()
        assert are_first or self.parts is not None, "who is tested comes first"
        assert self.items.min() >= 1 and self.items.max() <= len(self.item_ids), "item indices are 1..V"
        assert self.times is None or len(self.times) == len(self.items)
        assert self.features is None or len(self.features) == len(self.item_ids)

    def __repr__(self) -> str:
        counts = f"{self.num_users:,} users, {self.num_items:,} items, {self.num_events:,} events"
        return f"<Dataset {self.name!r}: {counts}, {'no' if self.times is None else 'with'} times>"

    @classmethod
    def from_events(cls, events: Events, *, name: str, preparation: Preparation = DEFAULT_PREPARATION) -> Dataset:
        """Prepare events and keep the result."""
        made = prepare(events, preparation)
        _warn_of_lost_ids(made.user_ids, np.diff(made.offsets), f"{events.source}: user")
        _warn_of_lost_ids(made.item_ids, np.bincount(made.items)[1:], f"{events.source}: item")
        split = Splitting() if made.parts is None else Splitting(split="given")
        return cls(name=name, **made._asdict(), splitting=split)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        name: str = "frame",
        user: str | None = None,
        item: str = "item_id",
        time: str | None = None,
        session: str | None = None,
        weight: str | None = None,
        reliability: str | None = None,
        split_column: str | None = None,
        preparation: Preparation = DEFAULT_PREPARATION,
        items: Any = None,
        item_kinds: Mapping[str, str] | None = None,
    ) -> Dataset:
        """Make a data set of a table with one row per event.

        Args:
            frame: a pandas data frame, a pyarrow table, or any table that speaks arrow (polars, duckdb).
            user, item: the columns with raw ids; ``user_id`` unless given.
            time: the column that orders a user's events (whole numbers or dates, as text too; ties keep the row order).
                Without it the row order is the order, and the data set has no times; a warning says so where a column
                that is called ``timestamp``, ``created_at`` or the like contradicts that order.
            session: the column of sessions, each a history: instead of a user, or beside ``user``, whose sessions are
                then users of their own, USER/SESSION.
            weight: the column with a number >= 0 for each event, which multiplies its loss as a target and is what it
                counts where precision starts; an event of weight 0 is read in histories, and teaches nothing.
            reliability: the column with a number for each event that says how far it can be trusted, or how much it
                says, such as a rating; in any unit, and it may be missing. A model asked to reads it:
                ``reads_reliability`` of its backbone.
            split_column: the column that says ``train``, ``valid`` or ``test`` of each event, in place of a split that
                is made; see ``recbft.datasets.split``.
            preparation: filters and minimum counts, a ``recbft.datasets.Preparation``.
            items: what is known of the items: a frame with one row per item, a file, or ``ItemFeatures``. Its column of
                ids is called as the events' or ``item_id``. Items without events become part of the vocabulary.
            item_kinds: its columns' kinds, where they are not to be guessed; see ``recbft.datasets.features``.

        Raises:
            UserError: a column is missing or holds what it may not, or no user is left with 3 events.

        >>> frame = pd.DataFrame({"user_id": ["ann"] * 3, "item_id": ["tea", "milk", "tea"]})
        >>> dataset = Dataset.from_frame(frame)
        >>> dataset.items.tolist(), dataset.decode([2]).tolist()
        ([1, 2, 1], ['milk'])
        """
        events, columns = _events_of([frame], name, by_role(locals()), preparation)
        made = replace(cls.from_events(events, name=name, preparation=preparation), columns=columns)
        return made if items is None else made.with_features(ItemFeatures.of(items, item=item, kinds=item_kinds))

    @classmethod
    def from_frames(
        cls,
        train: Any,
        validation: Any,
        test: Any,
        *,
        name: str = "frame",
        user: str | None = None,
        item: str = "item_id",
        time: str | None = None,
        session: str | None = None,
        weight: str | None = None,
        reliability: str | None = None,
        preparation: Preparation = DEFAULT_PREPARATION,
        items: Any = None,
        item_kinds: Mapping[str, str] | None = None,
    ) -> Dataset:
        """Make a data set of three tables: what trains, what validates and what tests.

        Arguments and errors are those of ``from_frame``. A user's events of validation are ranked from those that
        train, events of the test from both; users need not occur in all three.

        >>> train = pd.DataFrame({"user_id": [1, 1, 2], "item_id": list("abc")})
        >>> later = [pd.DataFrame({"user_id": [1], "item_id": [item]}) for item in "ca"]
        >>> Dataset.from_frames(train, *later).split.test.target.tolist()
        [1]
        """
        events, columns = _events_of([train, validation, test], name, by_role(locals()), preparation)
        made = replace(cls.from_events(events, name=name, preparation=preparation), columns=columns)
        return made if items is None else made.with_features(ItemFeatures.of(items, item=item, kinds=item_kinds))

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        data_root: str | Path | None = None,
        user: str | None = None,
        item: str | None = None,
        time: str | None = None,
        session: str | None = None,
        weight: str | None = None,
        reliability: str | None = None,
        split_column: str | None = None,
        validation: str | Path | None = None,
        test: str | Path | None = None,
        separator: str | None = None,
        columns: Sequence[str] | None = None,
        preparation: Preparation = DEFAULT_PREPARATION,
        items: Any = None,
        item_kinds: Mapping[str, str] | None = None,
    ) -> Dataset:
        """Load a data set by name, from a file, or ``"synthetic"``.

        Args:
            name_or_path: a name of ``recbft data list``, a file (its ending names the format, see
                ``recbft.datasets.formats``), a folder holding one ``.inter`` file, either of these in
                ``data_root`` by its name (a file's without its ending), or ``"synthetic"`` for the seeded generator.
            data_root: the folder to look in for a name; default the environment variable ``RECBFT_DATA_ROOT``.
            user, item, time: columns of the file; default those of the card, or ``user_id``, ``item_id`` and no time.
            session, weight, reliability, split_column: as in ``from_frame``.
            validation, test: the files of the events that validate and that test, where ``name_or_path`` holds those
                that train; read as that is.
            separator, columns: for delimited files without a header; see ``recbft.datasets.read_table``.
            preparation: filters and minimum counts; a card's own apply where none is asked for.
            items, item_kinds: as in ``from_frame``; several files are a table and ``.npy`` files with a vector for each
                of its rows, and ``"auto"`` is the ``.item`` file beside a RecBole ``.inter`` file.

        Raises:
            UserError: unknown name, missing or damaged file, bad data.
        """
        how = by_role(locals()) | {"separator": separator, "columns": columns}
        asked = {key: value for key, value in how.items() if value is not None}
        others = [file for file in (validation, test) if file is not None]
        check_parts_named(split_column, validation, test)
        if str(name_or_path) == SYNTHETIC:
            if asked or others or preparation != DEFAULT_PREPARATION:
                raise UserError("the synthetic data set has no file: columns and filters do not apply; leave them out")
            made = cls.from_events(synthetic_events(SyntheticConfig()), name=SYNTHETIC)
            return made if items is None else made.with_features(ItemFeatures.of(items, kinds=item_kinds))
        found = find_events(name_or_path, data_root, asked, preparation, others)
        made = cls.from_events(found.events, name=found.name, preparation=found.preparation)
        if found.check is not None:
            counts = Counts(users=made.num_users, items=made.num_items, events=made.num_events)
            found.check(counts, made.content_hash)
        record = {**made.preparation, **found.record} if found.as_saved is None else found.as_saved
        form: dict[str, Any] = {key: asked[key] for key in ("separator", "columns") if key in asked}
        named = {"validation": validation, "test": test}
        form |= {key: place_of(file, data_root)["dataset"] for key, file in named.items() if file is not None}
        place = place_of(name_or_path, data_root) | form
        made = replace(made, preparation=record, columns=found.columns, place=place)
        if items is None:
            return made
        files = atomic_items(found.path) if items in (AUTO, [AUTO], (AUTO,)) else items
        features = ItemFeatures.of(files, item=found.item, kinds=item_kinds, data_root=root_folder(data_root))
        return made.with_features(features if files is items else replace(features, files=(AUTO,)))

    def with_features(self, features: ItemFeatures) -> Dataset:
        """With what is known of its items; items that have no event here follow the others in the features' order.

        Raises:
            UserError: no item of the events is among them.
        """
        rows = Vocabulary(features.ids).encode(self.item_ids)
        if not rows.any():
            raise UserError(
                f"{features.source}: none of its {len(features):,} item ids, such as {shown_id(features.ids[0])}, is "
                f"an item of {self.name!r}, such as {shown_id(self.item_ids[0])}; check the column of ids"
            )
        new = np.delete(features.ids, rows[rows > 0] - 1)
        ids = joined_ids(self.item_ids, new)
        known = features.aligned(ids).telling()
        record = {
            "source": Path(features.source).name,
            "kinds": dict(known.kinds),
            "items_without_events": len(new),
            "items_without_features": int((~known.covered[: self.num_items]).sum()),
        }
        preparation = {**self.preparation, "features": record}
        return replace(self, item_ids=ids, features=known, preparation=preparation)

    def save(self, path: str | Path) -> None:
        """Write the canonical Parquet file (user_id, item_id, and timestamp, weight, reliability, part where there
        are), which ``load`` reads.

        It holds the events alone: features stay in their own file.
        """
        path = user_path(path)
        if path.suffix.lower() not in (".parquet", ".pq"):
            raise UserError(f"{path}: the canonical file is Parquet; let its name end in .parquet")
        users = self.user_ids[np.repeat(np.arange(self.num_users), self.lengths)]
        table = {"user_id": pa.array(users), "item_id": pa.array(self.item_ids[self.items - 1])}
        parts = None if self.parts is None else np.array(PARTS, dtype=object)[self.parts]
        more = {"time": self.times, "weight": self.weights, "reliability": self.reliability, "split_column": parts}
        table |= {CANONICAL[role]: pa.array(each) for role, each in more.items() if each is not None}
        of_events = {key: value for key, value in self.preparation.items() if key != "features"}
        record: dict[str, Any] = {"name": self.name, "preparation": of_events}
        record |= {"has_times": self.times is not None, "events": self.num_events}
        record |= {"roles": [role for role, each in more.items() if each is not None]}
        write_parquet(path, pa.table(table).replace_schema_metadata({METADATA_KEY: json.dumps(record)}))

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.user_ids)

    @cached_property
    def num_tested(self) -> int:
        """T, the users with a target to test; of leave-one-out they are the first of all."""
        return int(self.split.test.first_rows.size)

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

    def with_split(self, **settings: Any) -> Dataset:
        """The same data, split as ``Splitting`` has it with these settings.

        Raises:
            UserError: a setting is wrong; ``split`` has the errors that depend on the data.

        >>> frame = pd.DataFrame({"user_id": [1, 1, 1, 2, 2, 2], "item_id": list("abcabc"), "t": [1, 2, 5, 1, 3, 4]})
        >>> dataset = Dataset.from_frame(frame, time="t").with_split(split="global_time", split_at=3, test_at=4)
        >>> dataset.split.test.user.tolist(), dataset.split.test.target.tolist()
        ([0, 1], [3, 3])
        """
        return replace(self, splitting=Splitting(**settings))

    @cached_property
    def split(self) -> Split:
        """Training, validation and test, as ``splitting`` says."""
        return make_split(self, self.splitting)

    @cached_property
    def training_counts(self) -> NDArray[np.int64]:
        """Events per item over the training events of the split, (V+1,)."""
        return self.split.training_counts(self.num_items)

    @cached_property
    def training_weights(self) -> NDArray[np.int64] | NDArray[np.float64]:
        """The sum of the weights of these events, (V+1,): their counts where events have no weights."""
        return self.training_counts if self.weights is None else self.split.training_weights(self.num_items)

    @cached_property
    def _contents(self) -> dict[ContentConfig, ItemContent]:
        return {}

    def content(self, config: ContentConfig | None) -> ItemContent | None:
        """How its item features become vectors, fitted on training once for all that ask; None without either."""
        if config is None or self.features is None:
            return None
        if config not in self._contents:
            self._contents[config] = ItemContent.fit(self.features, self.training_counts, config)
        return self._contents[config]

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of ids, items, offsets and times, and of weights, reliability and parts where there are some.

        Equal for equal histories of equal ids in the same user order, whatever the file format, the type of the ids or
        the interleaving of users in the source; the name and the preparation do not enter.
        """
        times = np.empty(0, dtype=np.int64) if self.times is None else self.times
        weights: Sequence[Any] = () if self.weights is None else ("weights", self.weights)
        known: Sequence[Any] = () if self.reliability is None else ("reliability", self.reliability)
        parts: Sequence[Any] = () if self.parts is None else ("parts", self.parts)
        return sha256_of(
            "recbft content 1", "times" if self.times is not None else "no times",
            *text_parts(self.user_ids), *text_parts(self.item_ids), self.items, self.offsets, times, *weights,
            *known, *parts,
        )  # fmt: skip

    @cached_property
    def target_hash(self) -> str:
        """SHA-256 of the raw ids of each test target and its user, in order: equal hashes mean the same test."""
        test = self.split.test
        targets = self.item_ids[test.target - 1]
        return sha256_of("recbft targets 1", *text_parts(self.user_ids[test.user]), *text_parts(targets))

    @property
    def hashes(self) -> dict[str, str]:
        """``content_hash``, and ``features_hash`` where there are features: equal ones train the same models."""
        of_features = {} if self.features is None else {"features_hash": self.features.hash}
        return {"content_hash": self.content_hash, **of_features}

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
        features = None if self.features is None else self.features.aligned(vocabulary.ids)
        return replace(self, items=index[self.items - 1], item_ids=vocabulary.ids, features=features)

    def decode(self, indices: ArrayLike) -> NDArray[Any]:
        """Raw ids of item indices 1..V, in the indices' shape."""
        return self.vocabulary.decode(indices)


def check_parts_named(split_column: str | None, validation: Any, test: Any) -> None:
    """Refuse half a split of the data's own, and two at once."""
    given = {"validation": validation, "test": test}
    if (validation is None) != (test is None):
        missing = next(name for name, file in given.items() if file is None)
        raise UserError(f"{missing} is missing: a split in files of its own has one that validates and one that tests")
    if validation is not None and split_column is not None:
        raise UserError(f"split_column is {split_column!r}, and validation and test name files; give one of the two")


def _events_of(
    frames: Sequence[Any], name: str, named: Mapping[str, Any], preparation: Preparation
) -> tuple[Events, dict[str, str | None]]:
    """The events of one table, or of one for each part, and what ``Dataset.columns`` says of them."""
    # pandas numbers columns too
    named = {role: None if column is None else str(column) for role, column in named.items()}
    roles = by_session(named)
    roles["user"] = roles["user"] or "user_id"
    wanted = [column for column in roles.values() if column is not None] + preparation.columns()
    frame = frames[0]
    table = as_table(frame, wanted, name)
    if len(frames) > 1:
        labels = [f"{name} ({part})" for part in PARTS]
        tables = [as_table(each, wanted, label) for each, label in zip(frames, labels, strict=True)]
        frame = table = with_parts(joined_tables(tables, wanted, labels), [len(each) for each in tables])
        roles["split_column"] = PART_COLUMN
    events = Events.from_table(table, source=name, **roles, extra=preparation.columns())
    likely = partial(_likely_times, frame, table, wanted)
    warn_if_rows_are_unordered(events, str(named["item"]), named["time"], likely, "the frame's", stacklevel=3)
    columns = {"user": roles["user"] if named["session"] is None else named["user"]}
    columns |= {role: named[role] for role in ("item", "time")}
    return events, columns | {role: named[role] for role in EXTRA_ROLES if named[role] is not None}


def _likely_times(frame: Any, table: Any, wanted: Sequence[str]) -> dict[str, Any]:
    """The columns of a frame, apart from the wanted ones, that by their names hold times, where they can be read."""
    is_pandas, found = isinstance(frame, pd.DataFrame), {}
    for name in time_columns([str(column) for column in frame.columns] if is_pandas else table.column_names):
        with contextlib.suppress(UserError):  # a column that nobody named may hold anything
            if name not in wanted:
                found[name] = flat(as_table(frame, [name], "") if is_pandas else table, name)
    return found


def _warn_of_lost_ids(ids: NDArray[Any], counts: NDArray[np.int64], source: str) -> None:
    """Warn of ids in the place of lost ones: all events whose own is lost are then those of one user, or one item."""
    if ids.dtype != object:
        return
    texts = pa.array(ids, pa.large_string())
    said = "is a word for a missing id, but counts as any other id; if the id is missing there, leave its rows out"
    rounded = "looks like a number that a spreadsheet has rounded, several ids to one; export ids as text"
    floats = pc.match_substring_regex(texts, WHOLE_FLOAT)
    decimal = "is text, and not the same id as the number without .0; write whole numbers, as programs ask for them"
    for mask, warning in (
        (stands_for_nothing(texts), said),
        (pc.match_substring_regex(texts, SPREADSHEET_NUMBER), rounded),
        (pc.and_(floats, pc.all(floats)), decimal),
    ):
        found = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
        if len(found):
            most = found[counts[found].argmax()]
            more = f"; {len(found) - 1:,} more like it" if len(found) > 1 else ""
            warnings.warn(f"{source} id {ids[most]!r} ({counts[most]:,} events{more}) {warning}", stacklevel=4)

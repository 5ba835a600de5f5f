"""Data sets by name: their cards, where their files may lie, and the events in them.

A card says what is known of a public data set. It is a YAML file in ``data/`` (installed as the package
``recbft_cards``). Nothing is downloaded: a card says what to fetch and how to prepare it. The first file of its list
that exists under the data root is read; counts and content hash are checked against the card afterwards.

The canonical file holds one row per event in the data set's order: user_id, item_id, timestamp where the data has
real times, weight, reliability and part where it has those; its name and preparation travel in the Parquet metadata, so
that a loaded file equals the data set saved. Libraries that keep the metadata may write other rows under it: a file of
another number of rows is any other file.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import yaml

from recbft.datasets.columns import flat
from recbft.datasets.events import USUAL_TIME, Events
from recbft.datasets.formats import (
    EVENT_ENDINGS,
    atomic_file,
    column_names,
    column_types,
    ending,
    is_pattern,
    is_there,
    read_tables,
    reading,
    source_files,
)
from recbft.datasets.parts import PART_COLUMN, PARTS, with_parts
from recbft.datasets.prepare import Preparation
from recbft.datasets.row_order import time_columns, warn_if_rows_are_unordered
from recbft.errors import UserError, did_you_mean
from recbft.system.files import user_path

METADATA_KEY = b"recbft"
DATA_ROOT_VARIABLE = "RECBFT_DATA_ROOT"
SYNTHETIC = "synthetic"
# columns of a canonical file
CANONICAL = {"time": USUAL_TIME, "weight": "weight", "reliability": "reliability", "split_column": "part"}
EXTRA_ROLES = ("session", "weight", "reliability", "split_column")  # of columns that a file may have besides
ROLES = ("user", "item", "time", *EXTRA_ROLES)  # that a column of events may have
AUTO = "auto"  # in place of a file of item features: the one beside the events
RECBOLE = "recbole:"  # begins the path of a file inside an installed RecBole


@dataclass(frozen=True, kw_only=True)
class CardFile:
    """One place and form in which a data set may be found."""

    path: str = ""  # under the data root, or ``recbole:`` and a path inside an installed RecBole
    user: str = "user_id"
    item: str = "item_id"
    time: str | None = None  # the column with real times; None where the row order is all there is
    session: str | None = None  # a column whose values cut a user's events into histories of their own
    weight: str | None = None  # the column with each event's weight
    reliability: str | None = None  # the column with each event's reliability
    split_column: str | None = None  # the column that says train, valid or test
    separator: str | None = None
    columns: Sequence[str] | None = None  # names, for a file without a header
    preparation: Preparation = field(default_factory=Preparation)
    content_hash: str | None = None  # of the prepared data set, where it is known


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Users, items and events of a prepared data set."""

    users: int
    items: int
    events: int

    def __str__(self) -> str:
        return f"{self.users:,} users, {self.items:,} items, {self.events:,} events"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of one data set."""

    name: str
    title: str
    source: str
    licence: str
    how_to_get: str
    note: str = ""
    expected: Counts
    files: tuple[CardFile, ...]


def card_names() -> list[str]:
    """The names that have a card, sorted."""
    return sorted(_cards())


def is_known(name: str) -> bool:
    """Whether a name stands for a data set wherever it is said."""
    return name == SYNTHETIC or name in _cards()


def card(name: str) -> Card:
    """The card of a data set; for a name without one, a ``UserError`` lists those that exist."""
    if name not in _cards():
        raise _unknown(name)
    return _cards()[name]


def _unknown(name: str) -> UserError:
    """The error for a name that is neither a card nor a file."""
    nearest = did_you_mean(name, [*card_names(), SYNTHETIC], listed_as="data sets")
    return UserError(f"unknown data set {name!r}; {nearest}, or give a file")


def root_folder(data_root: str | Path | None) -> Path | None:
    """The folder data sets lie in: the argument, else the environment variable, else None."""
    chosen = data_root or os.environ.get(DATA_ROOT_VARIABLE) or None
    if chosen is None:
        return None
    folder = user_path(chosen)
    if not folder.is_dir():
        said_by = "the data root" if data_root else f"the data root (from {DATA_ROOT_VARIABLE})"
        raise UserError(f"{folder}: {said_by} is not a folder; create it or name another")
    return folder


def find(known: Card, data_root: str | Path | None) -> tuple[Path, CardFile]:
    """The first of a card's files that exists."""
    folder = root_folder(data_root)
    if found := _first_file(known, folder):
        return found
    looked_for = ", ".join(file.path for file in known.files if not file.path.startswith(RECBOLE))
    place = f"under {folder}" if folder else f"but no data root is set (--data-root or {DATA_ROOT_VARIABLE})"
    advice = " ".join(known.how_to_get.split())
    raise UserError(f"data set {known.name!r} not found; looked for {looked_for} {place}; {advice}")


def is_available(known: Card, data_root: str | Path | None = None) -> bool:
    """Whether one of a card's files is there to be read."""
    return _first_file(known, root_folder(data_root)) is not None


def default_dataset(data_root: str | Path | None = None) -> tuple[str, str | None]:
    """The data set to use when none is named, and a sentence for the user where it is the second choice."""
    if is_available(card("ml-100k"), data_root):
        return "ml-100k", None
    notice = (
        "ml-100k is not at hand (RecBole, which carries it, is not installed): "
        "using the seeded generator's 'synthetic' data set instead"
    )
    return SYNTHETIC, notice


class FoundEvents(NamedTuple):
    """Events as they were found, and what a data set of them is."""

    path: Path
    item: str  # the column of item ids
    events: Events
    name: str
    preparation: Preparation  # what is still to be done to them
    columns: dict[str, str | None]  # as in ``Dataset``
    record: dict[str, Any]  # what the record of the preparation says besides
    as_saved: dict[str, Any] | None  # the whole record of a canonical file that is taken as it stands
    check: Callable[[Counts, str], None] | None  # warns where counts and content hash are not those of the card


def find_events(
    name_or_path: str | Path,
    data_root: str | Path | None,
    asked: Mapping[str, Any],
    preparation: Preparation,
    others: Sequence[str | Path] = (),
) -> FoundEvents:
    """The events of a file that ``Dataset.load`` makes a data set of.

    Args:
        asked: those of its arguments that say how to read a file and are given.
        others: the files of the events that validate and that test, where the first holds those that train.
    """
    path, file, known = _locate(name_or_path, data_root)
    rest = [_locate(other, data_root)[0] for other in others]
    chosen = replace(file, **by_session(asked))
    stored = _stored_record(path)
    earlier = None if stored is None else stored["preparation"]
    if stored is not None:
        kept = {role: name if role in stored["roles"] else None for role, name in CANONICAL.items()}
        own: dict[str, Any] = {role: name for role, name in kept.items() if role not in asked}
        chosen = replace(chosen, **own)
    was = None if earlier is None else Preparation(**earlier.get("filters", {}))
    if preparation == was:
        preparation = Preparation()  # what the file was prepared with: its columns may be gone
    untouched = not asked and not others and preparation == Preparation()
    if preparation != Preparation():
        chosen = replace(chosen, preparation=preparation)
    elif was is not None:
        chosen = replace(chosen, preparation=Preparation(min_history=was.min_history))
    events = read_events(path, chosen, rest)
    if known is None and stored is None:
        named = {"user": chosen.user, "item": chosen.item, "time": chosen.time}
    else:  # untouched, the card or the canonical file alone stands for these data
        named = {} if untouched else {key: asked.get(key) for key in ("user", "item", "time")}
    if "session" in asked:
        named |= {"user": asked.get("user")}
    named |= {key: asked[key] for key in EXTRA_ROLES if key in asked}
    record: dict[str, Any] = {"source": path.name, "time": chosen.time}
    if earlier is not None:
        unit = earlier.get("time_unit") if chosen.time == USUAL_TIME else None
        record |= {"time_unit": unit, "earlier": earlier}
    name = known.name if known is not None else _name_of(path) if stored is None else stored["name"]
    as_saved = None if named else earlier
    check = partial(_warn_if_other, path, file, known) if known is not None and untouched else None
    return FoundEvents(path, chosen.item, events, name, chosen.preparation, named, record, as_saved, check)


def by_role(given: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that arguments or fields name, by their roles; None for a role that none has."""
    return {role: given.get(role) for role in ROLES}


def by_session(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that are asked for, a session in the place of the user where no user is."""
    session = asked.get("session")
    return (
        {**asked, "user": session, "session": None} if session is not None and asked.get("user") is None else {**asked}
    )


def source_files_of(name_or_path: str | Path, data_root: str | Path | None) -> list[Path]:
    """The files that are read for a name; none for the generator's."""
    return [] if str(name_or_path) == SYNTHETIC else source_files(_locate(name_or_path, data_root)[0])


def place_of(name_or_path: str | Path, data_root: str | Path | None) -> dict[str, str]:
    """What finds a data set again from any folder, as keys of a configuration: a file by its whole path.

    A name, of a card or a file in the data root, stays one, with that folder.
    """
    name, folder = str(name_or_path), root_folder(data_root)
    if not is_known(name):
        file = os.path.abspath(_locate(name_or_path, data_root)[0])
        if folder is None or is_there(user_path(name)):
            return {"dataset": file}
    return {"dataset": name} | ({} if folder is None else {"data_root": os.path.abspath(folder)})


def _locate(name_or_path: str | Path, data_root: str | Path | None) -> tuple[Path, CardFile, Card | None]:
    """A file, how to read it, and the card it belongs to."""
    name = str(name_or_path)
    if name in card_names():
        return *find(card(name), data_root), card(name)
    path = user_path(name)
    looks_like_a_file = isinstance(name_or_path, Path) or is_pattern(path) or path.suffix != "" or len(path.parts) > 1
    if not looks_like_a_file and not path.exists():
        folder = root_folder(data_root)
        places = [] if folder is None else [folder / name, *(folder / f"{name}{end}" for end in EVENT_ENDINGS)]
        found = next((place for place in places if place.exists()), None)
        if found is None:
            raise _unknown(name)
        path = found
    path = atomic_file(path)
    return path, CardFile(path=str(path)), None


def _name_of(path: Path) -> str:
    """What data of a file are called: as the file without its endings, or as the folder of several."""
    if path.is_file():
        return path.name.partition(".")[0]
    folder = next((place for place in (path, *path.parents) if not is_pattern(place)), path)
    return folder.resolve().name or "events"


def atomic_items(events: Path) -> Path:
    """The RecBole ``.item`` file beside an ``.inter`` file."""
    name = events.name.partition(".inter")[0]
    places = [events.with_name(f"{name}.item{end}") for end in ("", ".gz")] if ".inter" in events.name else []
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UserError(f"items are 'auto', but there is no .item file beside {events}; name the file of item features")
    return found


def read_events(path: Path, how: CardFile, others: Sequence[Path] = ()) -> Events:
    """The events of a file in its order, with a warning where no time is named and a likely one contradicts it.

    Ids of a text file are integers where the whole column is written as such. ``others`` are the files of what
    validates and what tests, whose events follow those of the first.
    """
    separator, columns, extra = how.separator, how.columns, how.preparation.columns()
    roles = by_role(vars(how))
    named = [*(name for name in roles.values() if name is not None), *extra]
    if others:
        assert len(others) == len(PARTS) - 1
        roles["split_column"] = PART_COLUMN

    def read(wanted: Sequence[str]) -> Any:
        form: dict[str, Any] = {"ids": (how.user, how.item), "separator": separator, "columns": columns}
        table, sizes = read_tables([path, *others], wanted, **form)
        return with_parts(table, sizes) if others else table

    if ending(path) == ".item":
        raise UserError(f"{path}: holds features of items; name a file of events, and give this one as items beside it")
    for name, kind in column_types(path).items():
        if others and kind == "token_seq":
            raise UserError(
                f"{path}: column {name!r} holds whole histories, but a split in files of its own has one event per "
                "row, each once; give such files"
            )
        if name in named and kind.endswith("_seq"):
            raise UserError(
                f"{path}: column {name!r} is of type {kind}, a list in each row, but a row holds one event; name the "
                "column of single ids, such as item_id"
            )

    def with_likely() -> tuple[Any, list[str]]:
        """What is named and the columns that look like times, in one table; None and none where they are damaged."""
        names = column_names(path, separator) if columns is None else columns
        found = [name for name in time_columns(names) if name not in named]
        with suppress(ValueError):  # a column that nobody named may hold anything
            if found:
                return read([*named, *found]), found
        return None, []

    table, found = with_likely() if how.time is None else (None, None)
    if table is None:
        table = read(named)

    def likely() -> dict[str, Any]:
        whole, names = with_likely() if found is None else (table, found)
        return {name: flat(whole, name) for name in names}

    source = ", ".join(map(str, [path, *others]))
    events = Events.from_table(table, source=source, **roles, extra=extra)
    warn_if_rows_are_unordered(events, how.item, how.time, likely, "file", stacklevel=2)
    return events


def _warn_if_other(path: Path, file: CardFile, known: Card, counts: Counts, content_hash: str) -> None:
    """Warn where a data set with a card is not what the card says."""
    if counts != known.expected:
        warnings.warn(
            f"{path}: the card of {known.name} expects {known.expected}, but the file gives {counts}; "
            "results will not be comparable with published ones",
            stacklevel=3,
        )
    elif file.content_hash not in (None, content_hash):
        warnings.warn(
            f"{path}: counts agree with the card of {known.name}, but the content hash begins "
            f"{content_hash[:12]}, not {str(file.content_hash)[:12]}: events, order or times differ",
            stacklevel=3,
        )


def _stored_record(path: Path) -> dict[str, Any] | None:
    """Name and preparation of a canonical file; None for any other file, with a warning where it was changed since."""
    if path.suffix.lower() not in (".parquet", ".pq") or not path.is_file():
        return None
    with reading(path):
        file = pq.read_metadata(path)
    if METADATA_KEY not in (file.metadata or {}):
        return None
    record: dict[str, Any] = json.loads(file.metadata[METADATA_KEY])
    record.setdefault("roles", ["time"] if record["has_times"] else [])
    if record["events"] == file.num_rows:
        return record
    times = f"; name its time column, {USUAL_TIME!r}, to have its times" if record["has_times"] else ""
    warnings.warn(
        f"{path}: recbft wrote {record['events']:,} events and it has {file.num_rows:,}: it was changed since, and is "
        f"read as any other file, by the filters that are asked for{times}",
        stacklevel=2,
    )
    return None


def _first_file(known: Card, folder: Path | None) -> tuple[Path, CardFile] | None:
    for file in known.files:
        in_recbole = file.path.startswith(RECBOLE)
        place = _recbole_folder() if in_recbole else folder
        if place is not None and (place / file.path.removeprefix(RECBOLE)).is_file():
            return place / file.path.removeprefix(RECBOLE), file
    return None


def _recbole_folder() -> Path | None:
    """Where RecBole is installed, found without importing it."""
    try:
        spec = importlib.util.find_spec("recbole")
    except ValueError:  # a module put into sys.modules by hand has no spec
        return None
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None


@lru_cache(maxsize=1)
def _cards() -> dict[str, Card]:
    files = [file for file in _card_folder().iterdir() if file.name.endswith(".yaml")]
    cards = [_read_card(file) for file in sorted(files, key=lambda file: str(file.name))]
    return {known.name: known for known in cards}


def _card_folder() -> Any:
    """The installed cards, else those of the source tree."""
    if importlib.util.find_spec("recbft_cards") is not None:
        return importlib.resources.files("recbft_cards")
    return Path(__file__).resolve().parents[2] / "data"


def _read_card(file: Any) -> Card:
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    files = [
        CardFile(**{**entry, "preparation": Preparation(**entry.get("preparation", {}))})
        for entry in values.pop("files")
    ]
    return Card(**{**values, "expected": Counts(**values["expected"])}, files=tuple(files))

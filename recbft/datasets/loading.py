"""Find a data set by name or file, read its events, and say what its card expects of it.

The canonical file holds one row per event in the data set's order: user_id, item_id, and timestamp where the data has
real times; its name and preparation travel in the Parquet metadata, so that a loaded file equals the data set saved.
Libraries that keep the metadata may write other rows under it: a file of another number of rows is any other file.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recbft.datasets import cards
from recbft.datasets.cards import Card, CardFile, Counts
from recbft.datasets.events import USUAL_TIME, Events, flat
from recbft.datasets.preparing.prepare import Preparation
from recbft.datasets.preparing.row_order import time_columns, warn_if_rows_go_back
from recbft.datasets.reading.formats import FORMATS, atomic_file, column_names, read_table
from recbft.datasets.synth import SyntheticConfig, synthetic_events
from recbft.errors import UserError

METADATA_KEY = b"recbft"


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A file, how to read it, and the card it belongs to."""

    path: Path
    file: CardFile
    card: Card | None = None


class FoundEvents(NamedTuple):
    """Events as they were found, and what a data set of them is."""

    events: Events
    name: str
    preparation: Preparation  # what is still to be done to them
    columns: dict[str, str | None]  # as in ``Dataset``
    source: dict[str, Any]  # what the record of the preparation says of the file
    earlier: dict[str, Any] | None = None  # the record of a canonical file, which was prepared when it was written
    expected: _Found | None = None  # whose card says what a data set of these events is like

    def record(self, prepared: dict[str, Any]) -> dict[str, Any]:
        """How the data set came to be, from the record of the preparation that was left to do."""
        made = {**prepared, **self.source}
        if self.earlier is None:
            return made
        if self.columns:
            return {**made, "earlier": self.earlier}
        return self.earlier

    def check(self, counts: Counts, content_hash: Callable[[], str]) -> None:
        """Warn where a data set with a card is not what the card says."""
        if self.expected is not None:
            _compare(self.expected, counts, content_hash)


def find_events(
    name_or_path: str | Path,
    *,
    data_root: str | Path | None,
    user: str | None,
    item: str | None,
    time: str | None,
    separator: str | None,
    columns: Sequence[str] | None,
    preparation: Preparation,
) -> FoundEvents:
    """The events that ``Dataset.load`` makes a data set of; the arguments are explained there."""
    asked: dict[str, Any] = {"user": user, "item": item, "time": time, "separator": separator, "columns": columns}
    asked = {key: value for key, value in asked.items() if value is not None}
    if str(name_or_path) == cards.SYNTHETIC:
        if asked or preparation != Preparation():
            raise UserError("the synthetic data set has no file: columns and filters do not apply; leave them out")
        return FoundEvents(synthetic_events(SyntheticConfig()), cards.SYNTHETIC, Preparation(), {}, {})
    found = _locate(name_or_path, data_root)
    chosen = replace(found.file, **asked)
    stored = _stored_record(found.path)
    if stored is not None and "time" not in asked:
        chosen = replace(chosen, time=USUAL_TIME if stored["has_times"] else None)
    if stored is not None and preparation == _filters_of(stored):
        preparation = Preparation()  # what the file was prepared with: its columns may be gone
    if preparation != Preparation():
        chosen = replace(chosen, preparation=preparation)
    events = read_events(
        found.path,
        user=chosen.user,
        item=chosen.item,
        time=chosen.time,
        separator=chosen.separator,
        columns=chosen.columns,
        extra=chosen.preparation.columns(),
    )
    untouched = not asked and preparation == Preparation()
    source: dict[str, Any] = {"source": found.path.name, "time": chosen.time}
    named: dict[str, str | None] = {}
    if found.card is None and stored is None:
        named = {"user": chosen.user, "item": chosen.item, "time": chosen.time}
    elif not untouched:  # the card or the canonical file alone stands for other data
        named = {key: asked.get(key) for key in ("user", "item", "time")}
    earlier = None if stored is None else stored["preparation"]
    if earlier is not None:
        source["time_unit"] = earlier.get("time_unit") if chosen.time == USUAL_TIME else None
    return FoundEvents(
        events,
        _name(found, stored),
        chosen.preparation,
        named,
        source,
        earlier,
        found if found.card is not None and untouched else None,
    )


def _filters_of(stored: dict[str, Any]) -> Preparation | None:
    """What a canonical file was prepared with; None where it does not say so in words that this version knows."""
    filters = stored["preparation"].get("filters")
    with suppress(UserError):
        return Preparation.from_dict(filters) if isinstance(filters, dict) else None
    return None


def source_file_of(name_or_path: str | Path, data_root: str | Path | None) -> Path | None:
    """The file that is read for a name; None if nothing is read.

    Raises:
        UserError: as for the data set itself, where there is none.
    """
    return None if str(name_or_path) == cards.SYNTHETIC else _locate(name_or_path, data_root).path


def _locate(name_or_path: str | Path, data_root: str | Path | None) -> _Found:
    name = str(name_or_path)
    if name in cards.card_names():
        path, file = cards.find(cards.card(name), data_root)
        return _Found(path=path, file=file, card=cards.card(name))
    path = Path(os.path.expanduser(name))
    looks_like_a_file = isinstance(name_or_path, Path) or path.suffix != "" or len(path.parts) > 1
    folder = None if looks_like_a_file or path.exists() else cards.root_folder(data_root)
    if folder is not None:
        for place in [folder / name, *(folder / f"{name}{ending}" for ending in FORMATS)]:
            if place.exists():
                path = place
                break
    if not path.exists() and not looks_like_a_file:
        raise UserError(cards.unknown_dataset(name))
    path = atomic_file(path)
    return _Found(path=path, file=CardFile(path=str(path)))


def _name(found: _Found, stored: dict[str, Any] | None) -> str:
    if found.card is not None:
        return found.card.name
    return str(stored["name"]) if stored is not None else found.path.name.partition(".")[0]


def read_events(
    path: Path,
    *,
    user: str,
    item: str,
    time: str | None,
    separator: str | None,
    columns: Sequence[str] | None,
    extra: Sequence[str] = (),
) -> Events:
    """The events of a file in its order, with a warning where no time is named and a likely one contradicts it."""
    named = [user, item, *([time] if time is not None else []), *extra]
    table, likely = None, []
    if time is None:
        names = column_names(path, separator) if columns is None else columns
        likely = [name for name in time_columns(names) if name not in named]
    if likely:
        with suppress(UserError):  # a column that nobody named may be damaged
            table = read_table(path, [*named, *likely], separator=separator, columns=columns)
    times = {} if table is None else {name: flat(table, name) for name in likely}
    if table is None:
        table = read_table(path, named, separator=separator, columns=columns)
    events = Events.from_table(table, source=str(path), user=user, item=item, time=time, extra=extra)
    warn_if_rows_go_back(events, times, "file", stacklevel=2)
    return events


def _compare(found: _Found, counts: Counts, content_hash: Callable[[], str]) -> None:
    card = found.card
    assert card is not None
    if counts != card.expected:
        warnings.warn(
            f"{found.path}: the card of {card.name} expects {card.expected}, but the file gives {counts}; "
            "results will not be comparable with published ones",
            stacklevel=4,
        )
    elif found.file.content_hash is not None and content_hash() != found.file.content_hash:
        warnings.warn(
            f"{found.path}: counts agree with the card of {card.name}, but the content hash begins "
            f"{content_hash()[:12]}, not {found.file.content_hash[:12]}: events, order or times differ",
            stacklevel=4,
        )


def _stored_record(path: Path) -> dict[str, Any] | None:
    """Name and preparation of a canonical file; None for any other file, with a warning where it was changed since."""
    if path.suffix.lower() not in (".parquet", ".pq") or not path.is_file():
        return None
    try:
        file = pq.read_metadata(path)
        metadata = file.metadata or {}
    except (pa.ArrowInvalid, OSError, UnicodeError):
        return None  # the reader says what is wrong
    if METADATA_KEY not in metadata:
        return None
    try:
        record = json.loads(metadata[METADATA_KEY])
        found = {"name": record["name"], "has_times": record["has_times"], "preparation": dict(record["preparation"])}
        events = record.get("events", file.num_rows)
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path}: recbft's record of how it was prepared, in the Parquet metadata, is damaged; fetch or write the "
            "file again"
        ) from None
    if events != file.num_rows:
        times = f"; name its time column, {USUAL_TIME!r}, to have its times" if found["has_times"] else ""
        warnings.warn(
            f"{path}: recbft wrote {events:,} events and it has {file.num_rows:,}: it was changed since, and is read "
            f"as any other file, by the filters that are asked for{times}",
            stacklevel=2,
        )
        return None
    return found

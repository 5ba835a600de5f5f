"""Data set cards: what is known of a public data set, where a user gets it, and where its file may lie.

A card is a YAML file in ``data/`` (installed as the package ``recbft_cards``). Nothing is downloaded: a card says what
to fetch and how to prepare it. The first file of a card's list that exists under the data root is read; counts and
content hash are checked against the card afterwards.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from recbft.datasets.prepare import Preparation
from recbft.errors import UserError, did_you_mean

DATA_ROOT_VARIABLE = "RECBFT_DATA_ROOT"
SYNTHETIC = "synthetic"
RECBOLE = "recbole:"  # begins the path of a file inside an installed RecBole


@dataclass(frozen=True, kw_only=True)
class CardFile:
    """One place and form in which a data set may be found."""

    path: str = ""  # under the data root, or ``recbole:`` and a path inside an installed RecBole
    user: str = "user_id"
    item: str = "item_id"
    time: str | None = None  # the column with real times; None where the row order is all there is
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


def dataset_names() -> list[str]:
    """All names ``Dataset.load`` knows."""
    return sorted([*_cards(), SYNTHETIC])


def card(name: str) -> Card:
    """The card of a data set.

    Raises:
        UserError: no card has that name; the message lists those that exist.
    """
    if name not in _cards():
        raise unknown_dataset(name)
    return _cards()[name]


def unknown_dataset(name: str) -> UserError:
    """The error for a name that is neither a card nor a file."""
    nearest = did_you_mean(name, dataset_names(), listed_as="data sets")
    return UserError(f"unknown data set {name!r}; {nearest}, or give a file")


def root_folder(data_root: str | Path | None) -> Path | None:
    """The folder data sets lie in: the argument, else the environment variable, else None."""
    chosen = data_root or os.environ.get(DATA_ROOT_VARIABLE) or None
    if chosen is None:
        return None
    folder = Path(os.path.expanduser(chosen))
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

"""How a number was made, kept beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from recbft.datasets.dataset import Dataset
from recbft.system import recbft_version
from recbft.system.files import plain

SPLIT = "leave-one-out: the last event tests, the one before validates, the rest train"
RANKING = "full: the target among all items of the vocabulary"
TIES = "against the target: rank = 1 + number of greater scores + number of other equal scores"
SETTINGS = {"unfiltered": "all items", "filtered": "seen masked"}


def protocol(
    dataset: Dataset,
    *,
    part: str,
    filter_seen: bool,
    max_length: int,
    seed: int,
    config: Mapping[str, Any],
    target_time: str = "no times are read",
    begun_from: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that a reader needs to make a number again, ready for JSON.

    Args:
        part: "validation" or "test".
        filter_seen: whether the headline masks what the user has seen.
        max_length: events of a history that the model reads.
        config: the run's configuration as a plain mapping.
        target_time: whether the model is shown the time of the target.
        begun_from: the older run whose weights training began from, by ``run``, ``weights``, ``content_hash``,
            ``kept`` and ``known_items``; None, and no entry, where it began from scratch.
    """
    return {
        "dataset": dataset.name,
        "users": dataset.num_users,
        "items": dataset.num_items,
        "events": dataset.num_events,
        "content_hash": dataset.content_hash,
        "target_hash": dataset.target_hash,
        "preparation": dict(dataset.preparation),
        "split": SPLIT,
        "part": part,
        "ranking": RANKING,
        "ties": TIES,
        "filter_seen": filter_seen,
        "max_length": max_length,
        "target_time": target_time,
        "seed": seed,
        "recbft_version": recbft_version(),
        "config": dict(config),
        **({} if begun_from is None else {"begun_from": dict(begun_from)}),
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a configuration, whatever the order of its keys.

    What is None is left out: a later version with one more option, not set, has the same hash.
    """
    text = json.dumps(_set(config), sort_keys=True, separators=(",", ":"), default=plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _set(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _set(value) if isinstance(value, Mapping) else value for key, value in config.items() if value is not None
    }


def headline_setting(filter_seen: bool) -> str:
    """The key of ``SETTINGS`` that ``filter_seen`` stands for: what comes first of the two that are always recorded."""
    return "filtered" if filter_seen else "unfiltered"


def protocol_lines(protocol: Mapping[str, Any]) -> list[str]:
    """The protocol as two lines of text, and a third where training began from older weights."""
    p = protocol
    headline = SETTINGS[headline_setting(p["filter_seen"])]
    model = " ".join(str(p["config"][key]) for key in ("model", "arm") if p["config"].get(key))
    return [
        f"data: {p['dataset']}, {p['users']:,} users, {p['items']:,} items, {p['events']:,} events, "
        f"content {p['content_hash'][:12]}, targets {p['target_hash'][:12]}",
        f"protocol: {p['part']} target of leave-one-out among all items, ties against it, headline {headline} "
        f"(filter_seen {str(p['filter_seen']).lower()}), max length {p['max_length']}, seed {p['seed']}, "
        f"recbft {p['recbft_version']}, {model + ', ' if model else ''}config {config_hash(p['config'])[:12]}",
        *([f"begun from {begun_from(p)}"] if p.get("begun_from") else []),
    ]


def begun_from(protocol: Mapping[str, Any]) -> str:
    """The older run of a protocol that has one, in words."""
    older = protocol["begun_from"]
    return (
        f"{older['kept']:g} of the weights of {older['run']} ({older['weights'][:12]}, trained on content "
        f"{older['content_hash'][:12]}), which knew {older['known_items']:,} of the {protocol['items']:,} items"
    )

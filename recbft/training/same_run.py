"""Whether what stands in a folder is what is asked for: the same settings, on data with the same content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbft.datasets.dataset import Dataset
from recbft.errors import UserError
from recbft.evaluation.protocol import config_hash


def refuse_other_settings(there: Mapping[str, Any], now: Mapping[str, Any], what: str, remedy: str) -> None:
    """Refuse to go on with other settings than those begun with, wherever the data were read from.

    Equal content says all about the data that matters, and the path may differ between machines:
    ``refuse_other_data``.

    Args:
        there: the config begun with.
        now: the config asked for.
        what: what was begun and the verb, such as "DIR holds a run with".
        remedy: what to do.

    Raises:
        UserError: they differ; it names the first setting that does, with both values.
    """
    before, after = {**there, "data": None}, {**now, "data": None}
    if config_hash(before) != config_hash(after):
        raise UserError(f"{what} {first_difference(before, after)}; {remedy}")


def refuse_other_data(content_hash: str, dataset: Dataset, what: str, remedy: str) -> None:
    """Refuse to go on with data of another content.

    Args:
        content_hash: of the data begun with.
        dataset: the data as loaded.
        what: what was begun, such as "DIR holds a run".
        remedy: what to do.

    Raises:
        UserError: the contents differ.
    """
    if content_hash != dataset.content_hash:
        raise UserError(
            f"{what} on data with content {content_hash[:12]}, and {dataset.name!r} as loaded has "
            f"{dataset.content_hash[:12]}; {remedy}"
        )


def first_difference(there: Any, now: Any, key: str = "") -> str:
    """The first key in which two configs differ, with both values."""
    if isinstance(there, Mapping) and isinstance(now, Mapping):
        for name in [*now, *(name for name in there if name not in now)]:
            if config_hash({"": there.get(name)}) != config_hash({"": now.get(name)}):
                return first_difference(there.get(name), now.get(name), f"{key}.{name}" if key else str(name))
    return f"{key} {there!r}, and {now!r} is asked for"

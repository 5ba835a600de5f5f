"""Whether what stands in a folder is what is asked for: the same settings, on data with the same content.

A commit may bring a key that older runs do not have. Within a version of recbft its default does what was done before,
so a run without the key is the run with the default; another version may have changed what a default means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbft.config.fields import by_setting, to_dict, verbatim
from recbft.datasets.dataset import Dataset
from recbft.errors import UserError
from recbft.evaluation.protocol import config_hash
from recbft.runs.folder import RunFolder
from recbft.system import recbft_version
from recbft.training.run_config import load_run_config


def refuse_other_settings(there: Mapping[str, Any], now: Mapping[str, Any], what: str, remedy: str) -> None:
    """Refuse to go on with other settings than those begun with, wherever the data were read from.

    Equal content says all about the data that matters, and the path may differ between machines:
    ``refuse_other_data``.

    Args:
        there: the config begun with; keys that it lacks have their defaults.
        now: the config asked for.
        what: what was begun and the verb, such as "DIR holds a run with".
        remedy: what to do.

    Raises:
        UserError: they differ; it names the first setting that does, with both values.
    """
    before, after = {**there, "data": None}, {**now, "data": None}
    if config_hash(before) == config_hash(after):
        return
    before = {**with_defaults(there), "data": None}
    if config_hash(before) != config_hash(after):
        raise UserError(f"{what} {first_difference(before, after)}; {remedy}")


def refuse_changed_config(run: RunFolder, now: Mapping[str, Any], saved: str | None) -> str | None:
    """Refuse to go on with a run whose ``config.yaml`` is not what it was begun with.

    Args:
        now: what it says, as it reads today.
        saved: the hash of the config that the checkpoint keeps; None where there is none yet.

    Returns:
        What is to be said where the run was begun before there were all the settings of today.

    Raises:
        UserError: it was changed, or another version may mean other things by the defaults of newer settings.
    """
    if saved == config_hash(now):
        return None
    begun, version = run.protocol.get("config", {}), run.protocol.get("recbft_version")
    is_whole = saved in (None, config_hash(begun))
    if not is_whole or config_hash(now) not in (config_hash(begun), config_hash(with_defaults(begun))):
        since = "the run was begun" if saved is None else f"{run.checkpoint} was saved"
        raise UserError(f"{run.config_file} was changed since {since}; put it back, or train a new run with it")
    had = by_setting(begun)
    newer = {key: value for key, value in by_setting(now).items() if key not in had and value is not None}
    if not newer:
        return None
    listed = ", ".join(f"{key} ({value})" for key, value in newer.items())
    if version != recbft_version():
        raise UserError(
            f"{run.path} was begun by recbft {version}, and {recbft_version()} has settings that came later: {listed}; "
            "go on with that version, or train a new run"
        )
    return (
        f"{run.path} was begun at a commit ({run.environment_file.name} names it) that did not have all settings of "
        f"today; it goes on with the defaults of these: {listed}"
    )


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


def with_defaults(there: Mapping[str, Any]) -> dict[str, Any]:
    """A config as it reads today; as it stands where it has keys that have gone since."""
    try:
        return to_dict(load_run_config(**verbatim(there)))
    except UserError:
        return dict(there)


def first_difference(there: Any, now: Any, key: str = "") -> str:
    """The first key in which two configs differ, with both values."""
    if isinstance(there, Mapping) and isinstance(now, Mapping):
        for name in [*now, *(name for name in there if name not in now)]:
            if config_hash({"": there.get(name)}) != config_hash({"": now.get(name)}):
                return first_difference(there.get(name), now.get(name), f"{key}.{name}" if key else str(name))
    return f"{key} {there!r}, and {now!r} is asked for"

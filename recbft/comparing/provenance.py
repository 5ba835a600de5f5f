"""The header of every result: when, on what, with which versions and on which data. No host names, users or paths.

Equal seeds give equal digits on one kind of machine alone, so ``notes_on_machines`` tells where pairs had several.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recbft.comparing.comparison import Comparison
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.experiments.lists import seeds_text
from recbft.runs.environment import environment
from recbft.runs.folder import RunFolder

# Options whose values are places on one machine, and the word that a recorded command has instead.
_PLACES = {"--data-root": "DIR", "--out": "OUT", "--json": "FILE", "--csv": "FILE", "--config": "FILE"}
_FILES = ("-d", "--dataset", "--weights")  # a name, or a file of which the name is kept
_NAMED = ("--external", "--set")  # NAME=FILE or KEY=VALUE


def recorded(program: str, arguments: Sequence[str]) -> str:
    """A command as it is written beside results: without the places it had on this machine.

    >>> recorded("recbft compare", ["-d", "ml-1m", "--out=/home/ann/x", "--data-root", "/data"])
    'recbft compare -d ml-1m --out OUT --data-root DIR'
    """
    words: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if words and words[-1] in (*_PLACES, *_FILES, *_NAMED):
            words.append(_without_place(words[-1], argument))
        elif equals and option in (*_PLACES, *_FILES, *_NAMED):
            words += [option, _without_place(option, value)]
        elif argument.startswith("-d") and len(argument) > 2:
            words += ["-d", _without_place("-d", argument[2:])]
        else:
            words.append(Path(argument).name if os.path.isabs(argument) else argument)
    return f"{program} {shlex.join(words)}".rstrip()


def _without_place(option: str, value: str) -> str:
    """The value of an option as another machine would be given it."""
    if option in _PLACES:
        return _PLACES[option]
    if option in _FILES:
        return Path(value).name
    key, equals, file = value.partition("=")
    return f"{key}{equals}{Path(file).name}" if os.path.isabs(file) else value


def header(command: str, dataset: Dataset | None = None, *, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Command, date, machine, versions, load and data; call ``close`` on it when the work is done."""
    made: dict[str, Any] = {
        "command": command,
        **environment(device),
        "load_average_before": os.getloadavg()[0],
    }
    if dataset is not None:
        made["data"] = {
            "name": dataset.name,
            "users": dataset.num_users,
            "items": dataset.num_items,
            "events": dataset.num_events,
            "content_hash": dataset.content_hash,
            "target_hash": dataset.target_hash,
        }
    return made


def of_runs(runs: Sequence[Path]) -> dict[str, Any]:
    """The entries of a header that say where and with what runs were made, which may be another machine than this.

    An entry in which runs differ names all values.
    """
    made = [RunFolder.open(run).environment for run in runs]
    values = {name: [each[name] for each in made] for name in environment()}
    return {
        name: found[0] if len(set(map(str, found))) == 1 else " or ".join(sorted(set(map(str, found))))
        for name, found in values.items()
    }


def close(header: dict[str, Any], runs: Sequence[Path] = ()) -> dict[str, Any]:
    """Add the load after the work, and where these runs were made: a study may go on on another machine."""
    return header | {"load_average_after": os.getloadavg()[0]} | (of_runs(runs) if runs else {})


def lines(header: Mapping[str, Any]) -> list[str]:
    """The header as text."""
    h = header
    device = h["cpu"] if h["device"] == "cpu" else f"{h['device']}, {h['cpu']}"
    where = (
        f"{h['date']}, {device} ({h['machine']}, {h['system']}), {h['cores']} cores, {h['memory_gib']} GiB, "
        f"{h['threads']} thread{'' if h['threads'] == 1 else 's'} per process"
    )
    if "load_average_before" in h:
        where += f", load average {h['load_average_before']:.1f} before"
    if "load_average_after" in h:
        where += f", {h['load_average_after']:.1f} after"
    text = [
        f"`{h['command']}`",
        where,
        f"recbft {h['recbft']} (commit {h['commit']}), Python {h['python']}, torch {h['torch']}, numpy {h['numpy']}",
    ]
    if "data" in h:
        data = h["data"]
        text.append(
            f"{data['name']}: {data['users']:,} users, {data['items']:,} items, {data['events']:,} events, "
            f"content {data['content_hash'][:12]}, targets {data['target_hash'][:12]}"
        )
    return text


def notes_on_machines(comparison: Comparison) -> list[str]:
    """What a reader must know of pairs made on different machines, and of runs that do not say where they were made."""
    kinds: dict[str, dict[int, str]] = {}  # arm -> seed -> processor or GPU
    notes = []
    for name, arm in comparison.arms.items():
        runs = {seed: RunFolder(run) for seed, run in zip(arm.seeds, arm.runs, strict=True) if run is not None}
        found = {seed: _kind(run) for seed, run in runs.items()}
        kinds[name] = {seed: kind for seed, kind in found.items() if kind is not None}
        if silent := [seed for seed, kind in found.items() if kind is None]:
            file = runs[silent[0]].environment_file.name
            notes.append(
                f"arm {name}, {_seeds(silent)}: trained on a machine that is not known, since {file} is missing, "
                "damaged or of another version"
            )
    mixed = [seed for seed in comparison.seeds if len({each[seed] for each in kinds.values() if seed in each}) > 1]
    if mixed:
        notes.append(_on_pairs(mixed, kinds))
    return notes


def _on_pairs(seeds: list[int], kinds: Mapping[str, Mapping[int, str]]) -> str:
    made = {name: " or ".join(sorted({each[seed] for seed in seeds if seed in each})) for name, each in kinds.items()}
    return (
        f"{_seeds(seeds)}: arms were trained on different machines "
        f"({', '.join(f'{name} {on}' for name, on in made.items() if on)}); such a pair has initial weights and data "
        "order in common and not the digits, and the machines are part of its difference"
    )


def _seeds(seeds: list[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {seeds_text(seeds)}"


def _kind(run: RunFolder) -> str | None:
    """What computed a run; None where it does not say."""
    try:
        made: dict[str, Any] = run.environment
        return str(made["cpu"] if made["device"] == "cpu" else made["device"])
    except (UserError, KeyError):
        return None

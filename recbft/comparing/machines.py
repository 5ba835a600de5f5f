"""On what kind of machine the runs of a comparison were made: equal seeds give equal digits on one kind alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbft.comparing.comparison import Comparison
from recbft.errors import UserError
from recbft.experiments.lists import seeds_text
from recbft.runs.folder import RunFolder


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

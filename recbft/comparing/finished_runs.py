"""Finished runs as a comparison reads them: their ranks and their protocol, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from recbft.errors import UserError
from recbft.evaluation.metrics import metrics_from_ranks
from recbft.experiments.arms import leaves
from recbft.runs.checkpoint import best_digest
from recbft.runs.folder import RunFolder

COLUMNS = {
    "user": "user",
    "history_length": "history_length",
    "target": "target",
    "target_count": "target_count",
    "unfiltered": "rank_unfiltered",
    "filtered": "rank_filtered",
}
_PROTOCOL = ("content_hash", "target_hash", "users", "items", "split", "part", "ranking", "ties", "filter_seen",
             "recbft_version", "seed", "config")  # fmt: skip
# The numbers in metrics.json besides those of the test, and how deep they lie.
_DEPTHS = {"epochs": 1, "training_seconds": 1, "validation": 3, "exposure": 3}


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run."""

    path: Path
    seed: int
    protocol: dict[str, Any]
    metrics: dict[str, Any]
    per_user: pd.DataFrame
    history: list[dict[str, Any]]

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration."""
        found: dict[str, Any] = self.protocol["config"]
        return found

    @property
    def trained_by(self) -> str | None:
        """Whose trainer made it, "recbole"; None for our own."""
        return self.metrics.get("trained_by")

    @property
    def is_trained(self) -> bool:
        """False of a model that learns nothing, whose seeds are all alike; what RecBole trained does not say epochs."""
        return self.metrics.get("epochs") != 0


def read_run(path: str | Path) -> Run:
    """Read a run folder and check that its parts belong together.

    Raises:
        UserError: the run is not finished, a file is missing or damaged, or the ranks are not those of the metrics.
    """
    run = RunFolder.open(path)
    metrics, protocol = run.metrics, run.protocol
    if missing := [name for name in _PROTOCOL if protocol.get(name) is None]:
        raise UserError(
            f"{run.protocol_file} lacks {', '.join(missing)}; it was written by another version: train again"
        )
    _check_protocol(run.protocol_file, protocol)
    _check_metrics(run.metrics_file, metrics)
    per_user = read_per_user(run)
    if len(per_user) != protocol["users"]:
        raise UserError(
            f"{run.per_user_file} has {len(per_user):,} users and its protocol {protocol['users']:,}; "
            "restore the file, or train again"
        )
    _check_numbers(run.per_user_file, per_user)
    for setting in ("unfiltered", "filtered"):
        figures = _mapping(_mapping(metrics.get("test")).get(setting))
        cutoffs = [int(k) for name in figures if (k := name.partition("@")[2]).isdecimal()]
        for name, found in metrics_from_ranks(per_user[COLUMNS[setting]].to_numpy(np.int64), cutoffs).items():
            said = figures.get(name)
            # What is not a number is not near any.
            if not (isinstance(said, (int, float)) and abs(found - said) <= 1e-9):
                raise UserError(
                    f"{run.per_user_file} gives {name.upper()} {found:.6f} ({setting}) and {run.metrics_file.name} "
                    f"says {said}; they are not of one run: restore them, or train again"
                )
    return Run(run.path, protocol["seed"], protocol, metrics, per_user, list(run.read_history()))


def check_same(runs: Sequence[Run]) -> None:
    """Refuse runs whose numbers cannot be compared.

    Raises:
        UserError: naming the field in which two runs differ, and both values.
    """
    first = runs[0]
    for run in runs[1:]:
        for field in _PROTOCOL[:-2]:
            here, there = first.protocol[field], run.protocol[field]
            if here != there:
                raise UserError(
                    f"the runs differ in {field}: {_short(here)} in {first.path}, {_short(there)} in {run.path}; "
                    "compare runs with the same data, split, vocabulary, ranking and version"
                )
        for column in ("user", "target"):
            if not np.array_equal(_column(first, column), _column(run, column)):
                raise UserError(
                    f"{run.path / 'per_user.parquet'} lists other values of {column!r} than {first.path}; "
                    "restore the file, or train again"
                )


def by_seed(name: str, runs: Sequence[Run]) -> dict[int, Run]:
    """The runs of an arm by seed.

    Raises:
        UserError: two of them have one seed.
    """
    found: dict[int, Run] = {}
    for run in runs:
        if run.seed in found:
            raise UserError(
                f"arm {name} has two runs of seed {run.seed}: {found[run.seed].path} and {run.path}; give one of them"
            )
        found[run.seed] = run
    return found


def read_per_user(run: RunFolder) -> pd.DataFrame:
    """The ranks of a run's users.

    Raises:
        UserError: the file is missing or damaged, or of another version.
    """
    path = run.per_user_file
    try:
        with open(path, "rb") as file:  # the path itself need not be UTF-8
            table = pd.read_parquet(file)
    except FileNotFoundError:
        raise UserError(f"{path} is missing, which holds every user's rank; restore it, or train again") from None
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())}); restore it, or train again") from None
    if missing := [column for column in COLUMNS.values() if column not in table]:
        raise UserError(f"{path} lacks {', '.join(missing)}: it is of another version of recbft; train again")
    return table


def weights_of(path: Path) -> str | None:
    """SHA-256 of a run's best weights; None where they are not there, as in a copy without its checkpoint."""
    try:
        return best_digest(RunFolder(path).checkpoint)
    except UserError:
        return None


def _check_protocol(path: Path, protocol: Mapping[str, Any]) -> None:
    """Refuse entries that are not what they should be, as a hand may have made them, or not of one run."""
    for name, kind in {"users": int, "seed": int, "config": dict}.items():
        if not isinstance(protocol[name], kind):
            raise UserError(f"{path} is damaged ({name} is {protocol[name]!r}); restore it, or train again")
    seed, own = protocol["seed"], protocol["config"].get("seed")
    if own not in (None, seed):
        raise UserError(f"{path} says seed {seed}, and its config seed {own}; restore it, or train again")


def _check_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Refuse what is no number where one is written; those of the test are held to the ranks."""
    for name, value in leaves(metrics).items():
        first, *deeper = name.split(".")
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        is_absent = value is None and not deeper
        if first in _DEPTHS and not is_absent and not (is_number and len(deeper) + 1 == _DEPTHS[first]):
            raise UserError(f"{path} is damaged ({name} is {repr(value)[:60]}); restore it, or train again")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _check_numbers(path: Path, per_user: pd.DataFrame) -> None:
    """Refuse what would be cast to other numbers in silence: missing values and fractions."""
    for name, lowest in (("history_length", 1), ("target_count", 0), ("unfiltered", 1), ("filtered", 1)):
        values = per_user[COLUMNS[name]]
        if values.dtype.kind not in "iu" or values.isna().any() or (values < lowest).any():
            raise UserError(
                f"{path} has values of {values.name!r} that are not whole numbers from {lowest}; "
                "restore it, or train again"
            )


def _column(run: Run, column: str) -> NDArray[Any]:
    return run.per_user[column].to_numpy().astype(str)  # ids are equal by text, whatever file they came from


def _short(value: object) -> str:
    """A value for a message; of a hash the part that is printed elsewhere too."""
    text = str(value)
    return text[:12] if len(text) == 64 and " " not in text else text

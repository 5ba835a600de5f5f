"""Finished runs as a comparison reads them: their ranks and their protocol, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from recbft.errors import UserError
from recbft.evaluation.metrics import metrics_from_ranks
from recbft.evaluation.protocol import SETTINGS
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
# What must be equal for numbers to be comparable.
_SAME = (
    "content_hash", "target_hash", "users", "items", "split", "part", "ranking", "ties", "filter_seen", "recbft_version"
)  # fmt: skip


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
    """Read a run folder and check that its ranks belong to its metrics.

    Raises:
        UserError: the run is not finished, a file is missing or damaged, or the ranks are not those of the metrics.
    """
    run = RunFolder.open(path)
    metrics, protocol, per_user = run.metrics, run.protocol, read_per_user(run)
    for setting in SETTINGS:
        figures = metrics["test"][setting]
        cutoffs = [int(k) for name in figures if (k := name.partition("@")[2]).isdecimal()]
        for name, found in metrics_from_ranks(per_user[COLUMNS[setting]].to_numpy(np.int64), cutoffs).items():
            if abs(found - figures[name]) > 1e-9:
                raise UserError(
                    f"{run.per_user_file} gives {name.upper()} {found:.6f} ({setting}) and {run.metrics_file.name} "
                    f"says {figures[name]}; they are not of one run: restore them, or train again"
                )
    return Run(run.path, protocol["seed"], protocol, metrics, per_user, list(run.read_history()))


def check_same(runs: Sequence[Run]) -> None:
    """Refuse runs whose numbers cannot be compared.

    Raises:
        UserError: naming the field in which two runs differ, and both values.
    """
    first = runs[0]
    for run in runs[1:]:
        for field in _SAME:
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
        UserError: the file is missing or damaged.
    """
    path = run.per_user_file
    if not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path} is missing, which holds every user's rank; restore it, or train again")
    try:
        with open(path, "rb") as file:  # the path itself need not be UTF-8
            return pd.read_parquet(file)
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())}); restore it, or train again") from None


def weights_of(path: Path) -> str | None:
    """SHA-256 of a run's best weights; None where they are not there, as in a copy without its checkpoint."""
    try:
        return best_digest(RunFolder(path).checkpoint)
    except UserError:
        return None


def _column(run: Run, column: str) -> NDArray[Any]:
    return run.per_user[column].to_numpy().astype(str)  # ids are equal by text, whatever file they came from


def _short(value: object) -> str:
    """A value for a message; of a hash the part that is printed elsewhere too."""
    text = str(value)
    return text[:12] if len(text) == 64 and " " not in text else text

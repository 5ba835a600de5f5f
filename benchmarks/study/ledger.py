"""A study that outlives a machine: the figures of finished runs in one small file.

    python -m benchmarks.study.ledger add OUT|RUN ... --file docs/reports/runs.csv

A line is a run: what it was trained on and with, its seed, the commit, the processor, the day, and its metrics of the
test. Lines are added and never changed. ``benchmarks.study.tables`` and ``overview`` compare the arms. Ranks of single
users are not kept here: what needs them (strata, tests over users) is made from the folders of the runs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.command import finish, parser
from benchmarks.study.choose import finished_runs
from recbft.comparing.finished_runs import Run, arm_name, beyond_mixer, own_settings, read_run
from recbft.errors import UserError
from recbft.runs.folder import RunFolder
from recbft.system.files import write_atomic

METRICS = {
    f"{metric} {items}": (setting, metric)
    for setting, items in (("unfiltered", "all items"), ("filtered", "seen masked"))
    for metric in ("hr@10", "ndcg@10", "mrr")
}
ORDER = ["published", "matched", "bft"]
KEY = ["dataset", "targets", "content", "model", "arm", "settings", "seed"]
SAME = {
    "targets": "other targets",
    "content": "other events",
    "recbft": "several versions of recbft",
}  # of one comparison
COLUMNS = [
    *KEY,
    "recbft",
    "commit",
    "torch",
    "processor",
    "date",
    "epochs",
    "best_epoch",
    "validation ndcg@10",
    *METRICS,
]


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    return add(options.runs, Path(options.file))


def add(places: Sequence[str], file: Path) -> int:
    """Write the runs of these folders into the file; what it has already stays."""
    found = [line(read_run(path)) for place in places for path in _runs_of(Path(place))]
    kept = opened(file)
    known = {_key(row): row for row in kept.to_dict("records")}
    new = []
    for row in found:
        there = known.get(_key(row))
        if there is None:
            new.append(row)
            known[_key(row)] = row
        elif any(not abs(there[name] - row[name]) <= 1e-9 for name in METRICS):
            raise UserError(
                f"{file} has seed {row['seed']} of {row['arm']} on {row['dataset']} with other figures (made on "
                f"{there['processor']}, {there['date']}); a seed counts once: take another, or delete that line first"
            )
    table = extended(kept, new, file)
    print(f"{file}: {len(new)} runs added, {len(found) - len(new)} were there, {len(table)} in all")
    return 0


def line(run: Run) -> dict[str, Any]:
    """What the file keeps of a run."""
    environment = RunFolder.open(run.path).environment
    if missing := [name for name in ("cpu", "date") if name not in environment]:
        raise UserError(
            f"{run.path}/environment.json lacks {' and '.join(missing)}, as runs of earlier versions do; add them by "
            'hand if you know them ("cpu": the processor\'s model, "date": the day it was made)'
        )
    metrics = run.metrics
    figures = {name: round(metrics["test"][setting][metric], 12) for name, (setting, metric) in METRICS.items()}
    figures["validation ndcg@10"] = round(metrics["validation"]["unfiltered"]["ndcg@10"], 12)
    if wrong := [name for name, value in figures.items() if not math.isfinite(value)]:
        raise UserError(f"{run.path}/metrics.json has {wrong[0]} = {figures[wrong[0]]}; restore it, or train again")
    return {
        "dataset": run.protocol["dataset"],
        "targets": run.protocol["target_hash"][:12],
        "content": run.protocol["content_hash"][:12],
        "model": run.config["model"],
        "arm": run.config["arm"],
        "settings": json.dumps(own_settings([run]), sort_keys=True),
        "seed": run.seed,
        "recbft": environment["recbft"],
        "commit": environment.get("commit") or "",  # none of an installed package
        "torch": environment["torch"],
        "processor": environment["cpu"],
        "date": environment["date"],
        "epochs": metrics["epochs"],
        "best_epoch": metrics["best_epoch"],
        **figures,
    }


def read(file: Path, columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """The lines of a file that ``add`` wrote, or a command with more columns."""
    try:
        table = pd.read_csv(file, dtype={"targets": str, "content": str, "commit": str, "recbft": str}).fillna(
            {"commit": ""}
        )
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; the command of its runs writes it") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} cannot be read ({' '.join(str(error).split())}); name a file that this study wrote"
        ) from None
    if list(table.columns) != list(columns):
        raise UserError(f"{file} has other columns than are written there; name another file")
    return table


def opened(file: Path | None, columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """The lines of a file that is gone on with; none where it is not there yet."""
    return pd.DataFrame(columns=columns) if file is None or not file.exists() else read(file, columns)


def extended(lines: pd.DataFrame, new: Sequence[Mapping[str, Any]], file: Path | None) -> pd.DataFrame:
    """The lines with new ones in their places, also in the file."""
    table = pd.DataFrame([*lines.to_dict("records"), *new], columns=lines.columns).sort_values(KEY, kind="stable")
    if file is not None:
        write_atomic(file, table.to_csv(index=False, lineterminator="\n").encode())
    return table


def check_alike(lines: pd.DataFrame, what: str) -> None:
    """Refuse lines that ``recbft compare`` would not compare either."""
    for column, said in SAME.items():
        if (found := lines[column].unique()).size > 1:
            raise UserError(f"the ledger has {what} with {said} ({', '.join(found)}); keep one of them")


def arms_of(table: pd.DataFrame, told: Sequence[str] = ()) -> tuple[str, dict[str, pd.DataFrame]]:
    """The settings that all arms share, and the lines of each arm by name and seed.

    ``told`` are settings that names tell even where all arms share them. A setting as the mixer has it by itself is not
    among them.
    """
    groups = sorted(table.groupby(["arm", "settings"]), key=_place)
    settings = []
    for (arm, text), lines in groups:
        own = json.loads(text)
        settings.append(beyond_mixer(own, {"model": lines["model"].iloc[0], "arm": arm, "mixer": own.get("mixer")}))
    common = {key: value for key, value in settings[0].items() if all(own.get(key) == value for own in settings)}
    named = {}
    for ((arm, _), lines), own in zip(groups, settings, strict=True):
        name = arm_name(arm, {key: value for key, value in own.items() if key in told or key not in common})
        named[name] = lines.set_index("seed")
    return ", ".join(f"{key}={value}" for key, value in common.items()), named


def _place(group: tuple[Any, pd.DataFrame]) -> tuple[int, int]:
    """Plain layers first, and of an arm the plainest."""
    (arm, settings), _ = group
    return [*ORDER, arm].index(arm), len(json.loads(settings))


def _runs_of(place: Path) -> list[Path]:
    return finished_runs(place) if (place / "runs").is_dir() else [place]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser("study.ledger", "Runs in one small file.")
    actions = options.add_subparsers(dest="action", required=True)
    adding = actions.add_parser("add", help="write finished runs into the file")
    adding.add_argument("runs", nargs="+", metavar="OUT|RUN", help="folders of recbft compare, or of single runs")
    adding.add_argument("--file", required=True, metavar="CSV")
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)

"""``recbft tune``: search several settings at once with Optuna, by validation."""

from __future__ import annotations

import shlex
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recbft_cli.options import Arm, Config, DataRoot, DatasetName, Jobs, Model, Settings, refuse_set
from recbft_cli.terminal import say

if TYPE_CHECKING:
    from recbft.experiments.plan import ArmSpec
    from recbft.training.run_config import RunConfig

EXAMPLES = """Example: recbft tune -d ml-100k --space training.learning_rate=log:1e-4..1e-2 --trials 20 --out DIR"""


class Objective(str, Enum):
    """What a trial is ranked by."""

    best = "best"
    tail = "tail"


def tune(
    space: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUES", help="a,b,c or low..high or log:low..high; repeat for more settings."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the study and its runs.")],
    model: Model = None,
    dataset: DatasetName = None,
    arm: Arm = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-2 or 0,1,5; a trial's value is the mean over them.")] = "0-2",
    trials: Annotated[int, typer.Option(min=1, help="In all, those of earlier commands included.")] = 20,
    objective: Annotated[
        Objective,
        typer.Option(help="best: the best validation; tail: that, and a fifth of what the last 5 epochs gained."),
    ] = Objective.best,
    prune: Annotated[bool, typer.Option("--prune", help="Give up trials below the median after some seeds.")] = False,
    jobs: Jobs = None,
    settings: Settings = None,
    config: Config = None,
    data_root: DataRoot = None,
) -> None:
    """Search settings for the best validation metric; the test is not looked at."""
    refuse_set(settings or (), ["--seeds"])

    from recbft.experiments.lists import parse_seeds
    from recbft.experiments.missing_runs import usual_workers
    from recbft.experiments.search_space import parse_space
    from recbft.experiments.tuning import load_optuna, search
    from recbft.reporting.progress import view_for
    from recbft.system.files import write_json
    from recbft.training.run_config import load_run_config

    load_optuna()
    named: dict[str, Any] = {"model": model, "dataset": dataset, "data_root": data_root}
    base = load_run_config(config, settings or (), arm=arm, **named)

    def configure(spec: ArmSpec, seed: int) -> RunConfig:
        return spec.config(settings or (), file=config, seed=seed, **named)

    result = search(
        parse_space(space),
        base.arm,
        parse_seeds(seeds),
        out,
        configure,
        trials=trials,
        workers=usual_workers() if jobs is None else jobs,
        prune=prune,
        watch=view_for(),
        objective=objective.value,
    )
    result = {"metric": base.training.valid_metric, "objective": objective.value, "seeds": seeds, **result}
    write_json(out / "tune.json", result)
    say(_text(result))
    say(f"written to {out}: tune.json, study.db, runs/")


def _text(result: dict[str, Any]) -> str:
    from recbft.experiments.lists import counted
    from recbft.reporting.tables import table

    best, tail = result["trials"][0]["settings"], result["objective"] == "tail"
    rows = [
        [
            *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in trial["settings"].values()),
            trial["validation"],
            *([trial["value"]] if tail else []),
        ]
        for trial in result["trials"][:10]
    ]
    options = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in best.items())
    names = [*best, f"valid {result['metric']}", *(["with its tail"] if tail else [])]
    return (
        f"{table(names, rows)}\n\n"
        f"{counted(len(result['trials']), 'trial')}, {result['pruned']} pruned, {result['failed']} failed. "
        f"Best by validation{' with its tail' if tail else ''}: {options}\n"
        "The test was not looked at: compare with these settings on seeds that the search has not used."
    )

"""``recbft sweep``: one setting over several values, paired by seed with the default."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recbft.errors import UserError
from recbft_cli.compare import print_commands, recorded_command
from recbft_cli.options import (
    Arm,
    BatchSeeds,
    Config,
    DataRoot,
    DatasetName,
    DryRun,
    Jobs,
    Model,
    Settings,
    refuse_set,
)
from recbft_cli.terminal import say

if TYPE_CHECKING:
    from recbft.experiments.plan import ArmSpec
    from recbft.training.run_config import RunConfig

EXAMPLES = (
    "Example: recbft sweep -m sasrec -d amazon-instruments --vary core.lam_max=10,20,50,100 --seeds 0-4 --out DIR"
)


def sweep(
    context: typer.Context,
    vary: Annotated[list[str], typer.Option(metavar="KEY=VALUE,VALUE,...", help="The setting and its values.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for runs and results.")],
    model: Model = None,
    dataset: DatasetName = None,
    arm: Arm = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-4 or 0,1,5-7.")] = "0-4",
    jobs: Jobs = None,
    batch_seeds: BatchSeeds = 1,
    settings: Settings = None,
    config: Config = None,
    data_root: DataRoot = None,
    dry_run: DryRun = False,
) -> None:
    """Train one setting's values over seeds; validation chooses, the test is shown beside it."""
    if len(vary) > 1:
        raise UserError("--vary is given twice; vary one setting at a time, or search several with `recbft tune`")
    refuse_set(settings or (), ["--seeds"])

    from recbft.api.train_and_compare import train_and_compare
    from recbft.experiments.lists import parse_seeds
    from recbft.experiments.missing_runs import prepare, usual_workers
    from recbft.experiments.sweep import plan_sweep, sweep_results
    from recbft.reporting.comparison_tables import sweep_document
    from recbft.reporting.progress import view_for
    from recbft.system.files import write_atomic, write_json
    from recbft.training.run_config import load_run_config

    wanted = parse_seeds(seeds)
    if len(wanted) < 2:
        raise UserError(f"--seeds {seeds!r} names one seed; paired differences need at least 2, such as 0-4")
    named: dict[str, Any] = {"model": model, "dataset": dataset, "data_root": data_root}
    arm = load_run_config(config, settings or (), arm=arm, **named).arm

    def configure(spec: ArmSpec, seed: int) -> RunConfig:
        return spec.config(settings or (), file=config, seed=seed, **named)

    planned = plan_sweep(vary[0], arm, lambda spec: configure(spec, wanted[0]))
    runs, data = prepare(planned.arms, wanted, out, configure, batch_seeds=batch_seeds)
    if dry_run:
        print_commands(runs)
        return
    comparison, made, _ = train_and_compare(
        runs,
        data,
        out,
        command=recorded_command(context),
        workers=usual_workers() if jobs is None else jobs,
        watch=view_for(),
        batch_seeds=batch_seeds,
        baseline=planned.arms[0].label,
    )
    result = {
        "made": made, "seeds": wanted, "protocol": comparison.protocol, "notes": [], **sweep_results(planned, runs),
    }  # fmt: skip
    write_json(out / "sweep.json", result)
    write_atomic(out / "sweep.md", sweep_document(result, markdown=True).encode())
    say(sweep_document(result, markdown=False), nl=False)
    say(f"\nwritten to {out}: sweep.md, sweep.json, comparison.md, comparison.json, commands.txt, runs/")

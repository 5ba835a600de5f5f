"""``recbft compare``: train arms over seeds and compare them, compare runs that exist, or pool comparisons."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recbft.errors import UserError
from recbft_cli.options import (
    BatchSeeds,
    Config,
    DataRoot,
    DatasetName,
    DryRun,
    Jobs,
    Settings,
    refuse_given,
    refuse_set,
)
from recbft_cli.terminal import say

if TYPE_CHECKING:
    from recbft.experiments.plan import ArmSpec
    from recbft.training.run_config import RunConfig

ARMS, SEEDS, METRICS = "matched,matched+recency,bft", "0-9", "hr@10,ndcg@10,mrr"
_LONGEST_NAME = 200  # bytes; file systems take 255, with an ending
# Parameters that say what to train, and how to compare.
TRAINING = (
    "models", "dataset", "arms", "seeds", "jobs", "settings", "batch_seeds", "config", "dry_run", "data_root",
)  # fmt: skip
TESTING = ("metrics", "baseline", "external", "skip_broken")
EXAMPLES = """Examples:

recbft compare -d amazon-instruments --arms matched,matched+recency,bft --seeds 0-19 --out comparisons/instruments

recbft compare -m sasrec,bert4rec,hstu -d amazon-instruments --out comparisons/all

recbft compare runs/sasrec-*-seed* --out comparisons/mine --external other=ranks.csv

recbft compare comparisons/instruments comparisons/beauty --pool --out comparisons/both
"""


def compare(
    context: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN_DIR", help="Finished runs, in place of training; with --pool comparisons."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for runs and results; --pool alone can do without.")
    ] = None,
    models: Annotated[
        str | None,
        typer.Option("-m", "--model", help="One of `recbft models`, or several, a folder each; sasrec if left out."),
    ] = None,
    dataset: DatasetName = None,
    arms: Annotated[
        str | None,
        typer.Option(help=f"NAME of `recbft models`, NAME+recency, NAME\\[key=value,...]; {ARMS} if left out."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help=f"Such as 0-9 or 0,1,5-7; {SEEDS} if left out.")] = None,
    jobs: Jobs = None,
    batch_seeds: BatchSeeds = 1,
    settings: Settings = None,
    config: Config = None,
    data_root: DataRoot = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="ARM", help="What others are compared with; if left out matched, or else the first arm."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help=f"What is tested; with the arms, the family of Holm's adjustment. {METRICS} if left out."),
    ] = None,
    external: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Ranks of another system: columns user, rank (rank_filtered, seed)."),
    ] = None,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave out run folders that are broken.")] = False,
    pool: Annotated[bool, typer.Option("--pool", help="Pool comparisons made on different data sets.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Compare arms, paired by seed and by user: is one better, and could it be chance?"""
    if runs:
        refuse_given(context, TRAINING, "with run folders, which are compared as they are; leave it out")
    if pool:
        refuse_given(context, TESTING, "with --pool; give it to each comparison that is pooled")
        _pool(runs or [], out)
        return
    if out is None:
        raise UserError("--out is missing; name the folder that gets the results")
    refuse_set(settings or (), ("--arms", "--seeds"))

    from recbft.experiments.lists import parse_metrics

    how: dict[str, Any] = {"baseline": baseline, "external": _external(external or ())}
    tested = parse_metrics(METRICS if metrics is None else metrics)
    command = recorded_command(context, runs or ())
    if runs:
        _compare_runs(runs, out, command, tested, skip_broken=skip_broken, **how)
        return

    from recbft.api.train_and_compare import plan_comparison, train_and_compare
    from recbft.experiments.missing_runs import usual_workers
    from recbft.reporting.progress import view_for

    def configure(arm: ArmSpec, seed: int, *, model: str | None) -> RunConfig:
        return arm.config(settings or (), file=config, seed=seed, model=model, dataset=dataset, data_root=data_root)

    # An empty text, such as of a variable that the shell does not know, asks for nothing and not for the usual.
    arms, seeds = ARMS if arms is None else arms, SEEDS if seeds is None else seeds
    # All are planned, and what is wrong with one is said, before the first is trained.
    plans = [
        (its, *plan_comparison(arms, seeds, its, partial(configure, model=model), batch_seeds=batch_seeds, **how))
        for model, its in _one_by_one(models, out, how["external"])
    ]
    for its, planned, data in plans:
        if dry_run:
            print_commands(planned)
            continue
        concluded = train_and_compare(
            planned,
            data,
            its,
            command=command,
            workers=usual_workers() if jobs is None else jobs,
            watch=view_for(),
            batch_seeds=batch_seeds,
            metrics=tested,
            skip_broken=skip_broken,
            **how,
        )
        say(f"{concluded.text}\nwritten to {its}: comparison.md, comparison.json, commands.txt, runs/")


def _one_by_one(models: str | None, out: Path, external: Collection[str]) -> list[tuple[str | None, Path]]:
    """Each model and its folder; several get a folder each within --out."""
    from recbft.experiments.lists import split_list

    names = split_list(models) if models is not None else []
    if len(names) < 2:
        return [(models, out)]
    if len(set(names)) < len(names):
        raise UserError(f"--model {models!r} names a model twice; name each once")
    if external:
        raise UserError("--external belongs to one comparison, but --model names several; compare them one at a time")
    return [(name, out / name) for name in names]


def recorded_command(context: typer.Context, places: Sequence[Path] = ()) -> str:
    """The command line as it is kept beside results, without the folders it had on this machine."""
    from recbft.comparing.provenance import recorded

    given = [str(argument) for argument in context.obj or ()][1:]
    takes_value = {name for one in context.command.params if not getattr(one, "is_flag", True) for name in one.opts}
    # The shell ends a folder's name with a slash; an option's value, such as an arm's name, may be a folder's name too.
    kept = [
        argument
        for before, argument in zip(["", *given], given, strict=False)
        if before in takes_value or Path(argument) not in places
    ]
    for n, argument in enumerate(kept[1:], start=1):
        if kept[n - 1] == "--external":
            kept[n] = f"{argument.partition('=')[0]}=FILE"
    return recorded(f"recbft {context.info_name}", [*kept, *(["RUN_DIR..."] if places else [])])


def print_commands(jobs: Sequence[Any]) -> None:
    """The commands of the runs that are not finished."""
    from recbft.runs.folder import RunFolder

    for job in jobs:
        if not RunFolder(job.path).is_finished:
            say(job.command)


def _compare_runs(
    runs: Sequence[Path],
    out: Path,
    command: str,
    metrics: Sequence[str],
    *,
    baseline: str | None,
    external: dict[str, Path],
    skip_broken: bool,
) -> None:
    from recbft.api.train_and_compare import conclude
    from recbft.comparing import provenance
    from recbft.comparing.comparison import COMPARISON_FILE, comparison_of

    for path in runs:
        if (path / COMPARISON_FILE).is_file():
            raise UserError(f"{path} is a comparison, not a run; give its runs ({path}/runs/*), or pool with --pool")
    comparison = comparison_of(runs, baseline=baseline, external=external, skip_broken=skip_broken)
    made = {"command": command, **provenance.of_runs(comparison.run_folders), "data": _data(comparison.protocol)}
    text = conclude(comparison, out, made=made, external=external, metrics=metrics)
    say(f"{text}\nwritten to {out}: comparison.md, comparison.json")


def _data(protocol: dict[str, Any]) -> dict[str, Any]:
    names = ("users", "items", "events", "content_hash", "target_hash")
    return {"name": protocol["dataset"], **{name: protocol[name] for name in names}}


def _pool(folders: Sequence[Path], out: Path | None) -> None:
    from recbft.comparing.comparison import read_results
    from recbft.comparing.results import pool
    from recbft.reporting.comparison_tables import pooled_document
    from recbft.system.files import make_folder, write_atomic, write_json

    pooled = pool([read_results(folder) for folder in folders])
    say(pooled_document(pooled, markdown=False), nl=False)
    if out is not None:
        make_folder(out)
        write_json(out / "pooled.json", pooled)
        write_atomic(out / "pooled.md", pooled_document(pooled, markdown=True).encode())
        say(f"\nwritten to {out}: pooled.md, pooled.json")


def _external(texts: Sequence[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        name = name.strip()
        if not (name and equals and file):
            raise UserError(f"--external {text!r} is not NAME=FILE; write for example recbole=ranks.csv")
        # Tables have it in a line, and its ranks are kept in a file of that name.
        if not name.isprintable() or "/" in name or len(name.encode()) > _LONGEST_NAME:
            raise UserError(
                f"--external names an arm {name!r}; give it a name of at most {_LONGEST_NAME} bytes that can be "
                "printed in one line, without a slash"
            )
        if name in files:
            raise UserError(
                f"--external names {name!r} twice; name each arm once, with all its seeds in one file (a column seed)"
            )
        files[name] = Path(file)
    return files

"""``recbft train``: train a model, or continue a run; ``recbft models``: what can be trained, with every setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recbft.errors import UserError
from recbft.reporting.progress import listener
from recbft.system.torchrun import this_process
from recbft_cli.options import (
    Columns,
    DataRoot,
    Item,
    ItemKinds,
    Items,
    Model,
    Reliability,
    Separator,
    Session,
    SplitColumn,
    TestFile,
    Time,
    User,
    ValidationFile,
    Weight,
    of_data,
    refuse_given,
)
from recbft_cli.terminal import say

if TYPE_CHECKING:
    from recbft.runs.folder import RunFolder
    from recbft.training.run_config import RunConfig

OF_ANY_RUN = ("resume", "dataset", "data_root", "quiet")  # parameters that do not say what a new one is
EXAMPLES = """Examples:

recbft train -m sasrec -d amazon-beauty --arm bft --data-root DIR --set epochs=50

recbft train -d ratings.csv --user who --item what --time when

recbft train -d train.csv --validation valid.csv --test test.csv --time when

recbft train --config configs/quickstart.yaml

recbft train --resume runs/sasrec-bft-ml-100k-seed0

recbft train --warm-start runs/sasrec-bft-ml-100k-seed0 -d grown.csv --name grown
"""
EXAMPLE_OF_MODELS = "Example: recbft models sasrec --arm bft --mixer rfa"


def train(
    context: typer.Context,
    model: Model = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--dataset",
            help="A name of `recbft data list`, or a file; ml-100k if left out, with --resume the run's.",
        ),
    ] = None,
    arm: Annotated[
        str | None, typer.Option(help="published, matched, matched+recency or bft (the default): `recbft models`.")
    ] = None,
    mixer: Annotated[str | None, typer.Option(help="What moves information along a history: `recbft models`.")] = None,
    update: Annotated[
        str | None, typer.Option(help="Update rule of arm bft: kalman (the default), residual, gate or fixed.")
    ] = None,
    user: User = None,
    item: Item = None,
    time: Time = None,
    session: Session = None,
    weight: Weight = None,
    reliability: Reliability = None,
    split_column: SplitColumn = None,
    validation: ValidationFile = None,
    test: TestFile = None,
    separator: Separator = None,
    columns: Columns = None,
    seed: Annotated[
        int | None, typer.Option(help="Decides initial weights, data order and dropout; 0 if left out.")
    ] = None,
    data_root: DataRoot = None,
    items: Items = None,
    item_kinds: ItemKinds = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder that gets the run's folder; runs if left out.")
    ] = None,
    name: Annotated[
        str | None,
        # Named in full: of typer 0.27 a metavar that spells the parameter would be the option's name.
        typer.Option(
            "--name",
            metavar="NAME",
            help="The run's folder in --out; if left out MODEL-ARM\\[-MIXER]-DATASET-seedSEED.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting that `recbft models NAME` lists; repeat for more."),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="YAML with settings, RecBole's too; repeat, later ones win. Options and --set win over all.",
        ),
    ] = None,
    warm_start: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Begin from this run's weights, found by item ids, with its settings unless --config gives others.",
        ),
    ] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Use deterministic algorithms only.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run folder that exists.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress, only the result.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run exactly.")] = None,
) -> None:
    """Train a model and evaluate it; everything about the run goes to a folder of its own.

    With torchrun several processes train one run.
    """
    if resume is not None:
        new = [one.name for one in context.command.params if one.name is not None and one.name not in OF_ANY_RUN]
        refuse_given(context, new, f"with --resume, which continues {resume} as it was; leave it out")

    run = _resume(resume, dataset, data_root, quiet) if resume is not None else None
    if run is None:
        from recbft.runs.folder import RunFolder
        from recbft.training.bundle import own_config
        from recbft.training.run_config import load_run_config

        data = of_data(locals())
        if warm_start is not None and not config:
            older = RunFolder.open(warm_start)
            own_config(older)  # whole: what is missing would be the usual value here
            config = [older.config_file]
        run_config = load_run_config(
            config,
            settings or (),
            model=model,
            dataset=dataset,
            arm=arm,
            mixer=mixer,
            update=update,
            seed=seed,
            data_root=data_root,
            deterministic=deterministic or None,
            warm_start=None if warm_start is None else str(warm_start),
            **{f"data.{key}": value for key, value in data.items()},
        )
        run = _train(run_config, Path("runs") if out is None else out, name, overwrite, quiet)
    if this_process().leads:
        print_results(run)


def _train(config: RunConfig, out: Path, name: str | None, overwrite: bool, quiet: bool) -> RunFolder:
    """Train into the folder that ``out`` holds for this run."""
    from recbft.datasets.statistics import remarks
    from recbft.training.one_run import run_name, train

    check_name(name)
    config = replace(config, data=config.data.resolved())
    dataset = config.data.load()
    if not quiet:
        for remark in remarks(dataset):
            say(remark, err=True)
        if config.data.reliability is not None and not config.reads_reliability:
            say("reliability is not read: add --set reads_reliability=input, or =precision in arm bft", err=True)
    path = out / (name or run_name(config, dataset.name))
    progress = listener(not quiet, config.training.valid_metric, opening=f"training into {path}")
    return train(config, path, dataset=dataset, progress=progress, overwrite=overwrite)


def check_name(name: str | None) -> None:
    """Refuse a --name that is not the name of one folder."""
    if name is not None and (name in ("", "..") or Path(name).name != name):
        raise UserError(f"--name is {name!r}; give the name of one folder, and with --out the folder that it lies in")


def _resume(path: Path, dataset: str | None, data_root: str | None, quiet: bool) -> RunFolder:
    from recbft.runs.folder import RunFolder
    from recbft.training.bundle import own_config
    from recbft.training.one_run import resume

    metric = own_config(RunFolder.open(path)).training.valid_metric
    return resume(path, data_root=data_root, dataset=dataset, progress=listener(not quiet, metric))


def print_results(run: RunFolder) -> None:
    """Print the test metrics of a finished run in both settings, with the protocol and the folder."""
    from recbft.comparing.finished_runs import read_per_user
    from recbft.reporting.run_tables import format_exposure, format_metrics

    parts = [format_metrics(run.metrics["test"], run.protocol)]
    if exposure := run.metrics.get("exposure"):
        targets = read_per_user(run)["target_count"]
        parts.append(format_exposure(exposure, float(targets.mean()), run.protocol))
    say("\n".join([*parts, f"run folder: {run.path}"]))


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show every setting of this model, with its default.")
    ] = None,
    arm: Annotated[str | None, typer.Option(help="Show the settings of this arm.")] = None,
    mixer: Annotated[str | None, typer.Option(help="Show the settings with this mixer.")] = None,
) -> None:
    """List models, arms and mixers, or the settings of one model as a YAML file for --config."""
    from recbft.mixers import MIXERS
    from recbft.models import MODELS
    from recbft.reporting.tables import table
    from recbft.training.run_config import load_run_config

    if name is not None:
        config = load_run_config(model=name, arm=arm, mixer=mixer)
        if config.core is not None and MIXERS[str(config.mixer)].precision == "none":
            # The default, kalman, is refused there; a file that is printed for --config is one that trains.
            config = load_run_config(None, ["core.update=residual"], model=name, arm=arm, mixer=mixer)
        typer.echo(config.to_yaml(), nl=False)
        return
    for option, value in (("--arm", arm), ("--mixer", mixer)):
        if value is not None:
            raise UserError(f"{option} needs a model; write for example: recbft models sasrec {option} {value}")
    rows = []
    for model, spec in MODELS.items():
        rows.append([model, "", spec.summary])
        rows += [["", key, spec.arm_summaries.get(key, "")] for key in spec.arms]
    say(table(["model", "arm", "what it is"], rows))
    mixers = [
        [mixer, ", ".join(model for model, spec in MODELS.items() if mixer in spec.mixers), spec.summary]
        for mixer, spec in MIXERS.items()
    ]
    say("\n" + table(["mixer", "in", "what it is"], mixers))

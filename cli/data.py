"""``recbft data``: which data sets there are, what they look like, and the files recbft reads fastest."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recbft.errors import UserError
from recbft_cli.options import (
    Columns,
    DataRoot,
    Deduplicate,
    DropLastEvents,
    Item,
    ItemKinds,
    Items,
    KCore,
    MinHistory,
    MinItemEvents,
    MinUserEvents,
    Reliability,
    Separator,
    Session,
    SplitColumn,
    TestFile,
    Time,
    User,
    ValidationFile,
    Weight,
    Where,
    of_data,
)
from recbft_cli.terminal import say

if TYPE_CHECKING:
    from recbft.datasets.dataset import Dataset
    from recbft.datasets.features import ItemFeatures

app = typer.Typer(
    help="List, show, prepare and generate data sets.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)

# The config beside an exported data set, ready for either of the two.
_READY = """\
# {title}
# Written by `recbft data prepare --to recbole`. Ready for either of
#   recbft train --config {file}
#   python -c "import recbft.recbole; from recbole.quick_start import run_recbole; \\
#     run_recbole(config_file_list=['{file}'])"
model: SASRecBFT                # BERT4RecBFT, HSTUBFT, HSTU, or any sequential model of RecBole
dataset: {name}
data_path: {folder}
# {time}
USER_ID_FIELD: user_id
ITEM_ID_FIELD: item_id
TIME_FIELD: timestamp
load_col:
  inter: [user_id, item_id, timestamp]
normalize_all: False
MAX_ITEM_LIST_LENGTH: 50
loss_type: CE
train_neg_sample_args: ~        # CE takes no sampled negatives; RecBole's default would draw some
eval_args:                      # leave-one-out, full ranking; RecBole needs all four
  split: {{LS: valid_and_test}}
  order: TO
  group_by: user
  mode: full
repeatable: True
metrics: [Hit, NDCG, MRR]
topk: [5, 10, 20]
valid_metric: NDCG@10
metric_decimal_place: 6
"""


class Target(str, Enum):
    """What a prepared data set is written for."""

    parquet = "parquet"
    recbole = "recbole"


@app.command("list", epilog="Example: recbft data list --data-root DIR")
def list_datasets(data_root: DataRoot = None) -> None:
    """List the data sets that recbft knows by name."""
    from recbft.datasets import loading
    from recbft.reporting.tables import table

    rows: list[list[object]] = []
    for name in loading.card_names():
        card = loading.card(name)
        found = "yes" if loading.is_available(card, data_root) else "no"
        rows.append([name, found, card.expected.users, card.expected.items, card.expected.events, card.title])
    rows.append([loading.SYNTHETIC, "yes", None, None, None, "generated from a seed"])
    say(table(["name", "found", "users", "items", "events", "title"], rows))
    if any(row[1] == "no" for row in rows):
        say("\nrecbft data show NAME says where to get one that is not found.")


@app.command("show", epilog="Example: recbft data show amazon-beauty --data-root DIR")
def show(
    source: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help="A name of `recbft data list`, or a file.")],
    data_root: DataRoot = None,
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
    k_core: KCore = None,
    min_user_events: MinUserEvents = None,
    min_item_events: MinItemEvents = None,
    deduplicate: Deduplicate = None,
    where: Where = None,
    drop_last_events: DropLastEvents = None,
    min_history: MinHistory = None,
    items: Items = None,
    item_kinds: ItemKinds = None,
) -> None:
    """Print counts, history lengths, density and ties of a data set, and what is known of its items."""
    from recbft.datasets import loading

    if source in loading.card_names():
        card = loading.card(source)
        say(f"{card.title}\nsource   {card.source}\nlicence  {card.licence}\n")
    _print_statistics(_load(locals()))


@app.command(
    "prepare", epilog="Example: recbft data prepare ratings.csv --time timestamp --k-core 5 --out ratings.parquet"
)
def prepare(
    source: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help="A name of `recbft data list`, or a file.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="The file, or with --to recbole the folder, to write.")],
    to: Annotated[
        Target, typer.Option(help="Canonical Parquet, or RecBole's atomic file with a config.")
    ] = Target.parquet,
    data_root: DataRoot = None,
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
    k_core: KCore = None,
    min_user_events: MinUserEvents = None,
    min_item_events: MinItemEvents = None,
    deduplicate: Deduplicate = None,
    where: Where = None,
    drop_last_events: DropLastEvents = None,
    min_history: MinHistory = None,
) -> None:
    """Filter and order events once, and write them as one canonical Parquet file, or for RecBole."""
    from recbft.datasets.loading import source_files_of
    from recbft.system.files import refuse_input

    others = [file for file in (validation, test) if file is not None]
    source_files = [file for name in (source, *others) for file in source_files_of(name, data_root)]
    for file in source_files:
        refuse_input(out, file)
    dataset = _load(locals())
    if to is Target.recbole:
        config = _export(dataset, out, source_files)
        _print_statistics(dataset)
        say(f"\nwritten to {out}; train on it with: recbft train --config {config}")
        return
    dataset.save(out)
    _print_statistics(dataset)
    say(f"\nwritten to {out}; train on it with: recbft train -d {out}")


@app.command("look", epilog="Example: recbft data look events.csv")
def look_at(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file, a folder of parts or a pattern.")],
) -> None:
    """Guess what a file of events holds: print its columns, ten rows and the command that trains on it."""
    from recbft.datasets.look import look

    found = look(file)
    roles = {name: getattr(found.config, name) for name in ("user", "item", "time", "session")}
    roles["user"] = roles["user"] or (None if roles["session"] else "user_id")
    roles["item"] = roles["item"] or "item_id"
    say(f"{file}: {found.form}\n")
    say(found.sample.to_string(index=False, max_colwidth=30) + "\n")
    for role, name in roles.items():
        if name is not None:
            say(f"{role:<8} {name}")
    if roles["time"] is None:
        say("time     none: rows are taken in the order of the file")
    if found.dataset is not None:
        say("")
        _print_statistics(found.dataset)
    for note in found.notes:
        say(f"\nnote: {note}")
    if found.problem is not None:
        raise UserError(f"{found.problem} (what was guessed: {found.command()})")
    say(f"\ntrain on it with: {found.command()}")


@app.command("synth", epilog="Example: recbft data synth --out synthetic --seed 1")
def synth(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal data; 0 if left out.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Such as num_users=500; repeat for more.")
    ] = None,
) -> None:
    """Generate a data set in which some items and users are unreliable, and write down which."""
    from recbft.config.fields import from_dict
    from recbft.config.yaml_text import parse_setting
    from recbft.datasets.synth import SyntheticConfig, generate, save_synthetic
    from recbft.system.files import make_folder

    config = from_dict(
        SyntheticConfig, dict(map(parse_setting, settings or ())) | ({} if seed is None else {"seed": seed})
    )
    synthetic = generate(config)
    make_folder(out)
    files = save_synthetic(synthetic, out / "synthetic.parquet")
    say("written: " + ", ".join(map(str, files)))


def _export(dataset: Dataset, folder: Path, sources: list[Path]) -> Path:
    """Write the atomic file, unless it is the source, and, beside its folder, the config that names it."""
    from recbft.datasets.atomic import numbers_of, save_atomic
    from recbft.system.files import refuse_input, write_atomic

    if dataset.parts is not None:
        raise UserError("a split of the data's own cannot be written for RecBole; take --to parquet")
    name = _recbole_name(dataset.name)
    for source in sources:
        refuse_input(folder / name / f"{name}.inter", source)
    save_atomic(dataset, folder, name)
    config = folder.resolve() / f"{name}.yaml"
    title = f"{dataset.name}: {dataset.num_users:,} users, {dataset.num_items:,} items, {dataset.num_events:,} events"
    text = _ready_to_run(title, config, name, has_times=dataset.times is not None)
    for number in numbers_of(dataset):
        text += f"{number}: {number}".ljust(32) + "# for recbft train\n"
    write_atomic(config, text.encode())
    return config


def _recbole_name(name: str) -> str:
    """The name for an exported data set: under the name ml-100k RecBole reads its own copy, wherever the file lies."""
    return "ml-100k-sorted" if name == "ml-100k" else re.sub(r"[^\w.-]+", "-", name).lstrip(".") or "data"


def _ready_to_run(title: str, file: Path, name: str, *, has_times: bool) -> str:
    """The text of a config for the data set ``name`` in the folder of ``file``."""
    time = "Real times; each user's rows are sorted by them, since RecBole rounds them to single precision."
    if not has_times:
        time = "The data have no real times: timestamp is the number of the event in its history."
    title = title if title.isprintable() else ascii(title)  # a file may call its data by several lines, the next a key
    return _READY.format(title=title, file=file, name=json.dumps(name), folder=json.dumps(str(file.parent)), time=time)


def _load(options: dict[str, Any]) -> Dataset:
    """The data set that a command's options name."""
    from recbft.config.fields import Verbatim, from_dict
    from recbft.datasets.config import DataConfig

    place = {"dataset": Verbatim(options["source"]), "data_root": options["data_root"]}
    return from_dict(DataConfig, of_data(options) | place).load()


def _print_statistics(dataset: Dataset) -> None:
    from recbft.datasets.statistics import describe, split_remarks

    figures = describe(dataset)
    lengths = "  ".join(f"{name} {value:g}" for name, value in figures.length_quantiles.items())
    tested = "" if figures.num_tested == figures.num_users else f", {figures.num_tested:,} of them tested"
    rows = [
        ["name", figures.name],
        ["users", f"{figures.num_users:,}{tested}"],
        ["items", f"{figures.num_items:,}"],
        ["events", f"{figures.num_events:,}"],
        ["history length", f"mean {figures.mean_length:.2f}  {lengths}"],
        ["density", f"{figures.density:.4%}"],
        [
            "first and last time",
            "no times" if figures.first_time is None else f"{figures.first_time}  {figures.last_time}",
        ],
        ["neighbours with equal times", _share(figures.tied_neighbours)],
        ["users whose last two are tied", _share(figures.tied_last_two)],
        ["test items unseen in training", _share(figures.unseen_targets)],
        ["repeated events", _share(figures.repeated_events)],
        *([name, said] for name in ("weights", "reliability") if (said := getattr(figures, name)) is not None),
        ["content hash", figures.content_hash],
        ["target hash", figures.target_hash],
    ]
    width = max(len(row[0]) for row in rows)
    say("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    for line in split_remarks(dataset):
        say(line)
    dropped = dataset.preparation.get("dropped", {})
    for name, number in dropped.items():
        if number:
            say(f"dropped: {name.replace('_', ' ')}: {number:,}")
    if dataset.features is not None:
        say(f"\n{_features(dataset, dataset.features)}")


def _features(dataset: Dataset, features: ItemFeatures) -> str:
    from recbft.reporting.tables import table

    record = dataset.preparation["features"]
    rows = [
        [
            found.name,
            found.kind,
            f"{found.num_known / len(features):.1%}",
            found.num_distinct,
            shorten(found.example or "", 60),
        ]
        for found in features.describe()
    ]
    return "\n".join(
        [
            table(["item feature", "kind", "items covered", "distinct values", "example"], rows),
            f"items without any event: {record['items_without_events']:,} (they are part of the catalogue)",
            f"items of the events without features: {record['items_without_features']:,}",
            f"features hash {features.hash}",
        ]
    )


def _share(value: float | None) -> str:
    return "no times" if value is None else f"{value:.2%}"

"""Options that several commands have, and what of them has no effect together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from recbft.errors import UserError

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
OtherData = Annotated[
    str | None, typer.Option("-d", "--dataset", help="Other data with the same items; that of the run if left out.")
]
Model = Annotated[str | None, typer.Option("-m", "--model", help="One of `recbft models`; sasrec if left out.")]
Arm = Annotated[str | None, typer.Option(help="published, matched, matched+recency or bft (the default).")]
DatasetName = Annotated[
    str | None, typer.Option("-d", "--dataset", help="A name of `recbft data list`, or a file; ml-100k if left out.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of every run; repeat for more.")
]
Config = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="YAML with settings of every run; repeat, later ones win.")
]
Jobs = Annotated[
    int | None,
    typer.Option("-j", "--jobs", metavar="N", help="Runs trained at a time; if left out the cores, at most 4."),
]
BatchSeeds = Annotated[
    int, typer.Option("--batch-seeds", metavar="N", help="Train up to N seeds of an arm together in one process.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the command of each run that is missing, and do nothing.")
]

# How to read a file of events.
DataRoot = Annotated[
    str | None, typer.Option("--data-root", metavar="DIR", help="Folder with data sets.", envvar="RECBFT_DATA_ROOT")
]
User = Annotated[str | None, typer.Option("--user", metavar="COLUMN", help="Column with user ids, if not user_id.")]
Item = Annotated[str | None, typer.Option("--item", metavar="COLUMN", help="Column with item ids, if not item_id.")]
Time = Annotated[
    str | None, typer.Option("--time", metavar="COLUMN", help="Column to order by; otherwise the row order counts.")
]
Session = Annotated[
    str | None,
    typer.Option("--session", metavar="COLUMN", help="Each session is a history; with --user, each of a user's."),
]
Weight = Annotated[
    str | None,
    typer.Option(
        "--weight",
        metavar="COLUMN",
        help="Number >= 0 per event, which multiplies its loss and its count in precision; 0 teaches nothing.",
    ),
]
Reliability = Annotated[
    str | None,
    typer.Option(
        "--reliability",
        metavar="COLUMN",
        help="Number per event, or none: how far to trust it, as read by reads_reliability precision or input.",
    ),
]
SplitColumn = Annotated[
    str | None,
    typer.Option("--split-column", metavar="COLUMN", help="Says train, valid or test of each event: your own split."),
]
ValidationFile = Annotated[
    str | None,
    typer.Option("--validation", metavar="FILE", help="Events that validate, where -d has those that train."),
]
TestFile = Annotated[str | None, typer.Option("--test", metavar="FILE", help="Events that test, beside --validation.")]
Separator = Annotated[
    str | None,
    typer.Option(
        "--separator", metavar="TEXT", help="Between the fields of a text file: '::', tab, ... ; seen if left out."
    ),
]
Columns = Annotated[
    str | None, typer.Option("--columns", metavar="A,B,...", help="All column names of a text file without a header.")
]
KCore = Annotated[int | None, typer.Option("--k-core", help="Keep users and items with at least this many events.")]
MinUserEvents = Annotated[int | None, typer.Option("--min-user-events", help="As --k-core, for users only.")]
MinItemEvents = Annotated[int | None, typer.Option("--min-item-events", help="As --k-core, for items only.")]
Deduplicate = Annotated[
    str | None, typer.Option("--deduplicate", metavar="first|last", help="Of repeated user-item pairs keep one.")
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="FILTER",
        help="Keep rows such as 'rating >= 4 and event in (buy, cart) and time >= 2024-01-01'.",
    ),
]
DropLastEvents = Annotated[
    int | None, typer.Option("--drop-last-events", help="Leave out each user's last events, so many, after all else.")
]

MinHistory = Annotated[
    int | None,
    typer.Option("--min-history", help="Fewest events of a user: 3, or 2 to train on users too short to be tested."),
]

# What is known of items.
Items = Annotated[
    list[str] | None,
    typer.Option(
        "--items",
        metavar="FILE",
        help="Item features: a table, or auto for the .item file beside the events; repeat for .npy files of its rows.",
    ),
]
NewItems = Annotated[
    list[Path] | None,
    typer.Option(
        "--items",
        metavar="FILE",
        help="Features of new items, in the columns of those in training: the model lists them too. Repeat for "
        ".npy files of its rows.",
    ),
]
ItemKinds = Annotated[
    list[str] | None,
    typer.Option(
        "--item-kind",
        metavar="COLUMN=KIND",
        help="category, set, set:SEPARATOR, number, words, vector, id or skip; guessed if left out. Repeat for more.",
    ),
]


def of_other_data(context: typer.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """How to read the data that ``-d`` names, as ``of_data``; the run knows how its own were read."""
    how = of_data(options)
    if options["dataset"] is None:
        refuse_given(context, how, "without -d, which names other data than the run's; leave it out")
    return how


def of_data(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's options that were given and say how data are read, by their names in ``DataConfig``.

    What a shell can only pass as text is taken apart.
    """
    from recbft.config.fields import Verbatim, field_types
    from recbft.datasets.config import READ_BY, DataConfig

    names = [name for name in field_types(DataConfig) if name not in ("dataset", "data_root")]
    given = {name: options[name] for name in names if options.get(name) not in (None, [])}
    given |= {name: Verbatim(given[name]) for name in READ_BY if name in given}  # "none", "~"
    if "columns" in given:
        given["columns"] = [column.strip() for column in given["columns"].split(",")]
    return given


def refuse_given(context: typer.Context, parameters: Iterable[str], why: str) -> None:
    """Refuse the first of these that the command line names; what the environment sets is meant for any command."""
    options = {parameter.name: max(parameter.opts, key=len) for parameter in context.command.params}
    for name in parameters:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"{options[name]} has no effect {why}")


def refuse_set(settings: Sequence[str], options: Iterable[str]) -> None:
    """Refuse a ``--set`` of what these options decide for each run, such as ``--seeds`` the key ``seed``."""
    for option in options:
        key = option.removeprefix("--").removesuffix("s")
        if any(text.partition("=")[0].strip() == key for text in settings):
            raise UserError(f"--set {key} has no effect, since {option} decides it for each run; give {option}")

"""Options that say how to read a file of events."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from recbft_cli.refused_options import refuse_given

DataRoot = Annotated[
    str | None, typer.Option("--data-root", metavar="DIR", help="Folder with data sets.", envvar="RECBFT_DATA_ROOT")
]
User = Annotated[str | None, typer.Option("--user", metavar="COLUMN", help="Column with user ids, if not user_id.")]
Item = Annotated[str | None, typer.Option("--item", metavar="COLUMN", help="Column with item ids, if not item_id.")]
Time = Annotated[
    str | None, typer.Option("--time", metavar="COLUMN", help="Column to order by; otherwise the row order counts.")
]
Separator = Annotated[
    str | None, typer.Option("--separator", metavar="TEXT", help="Between the fields of a text file, such as '::'.")
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
    str | None, typer.Option("--where", metavar="FILTER", help="Keep rows such as 'rating>=4 and year>2000'.")
]
DropLastEvents = Annotated[
    int | None, typer.Option("--drop-last-events", help="Leave out each user's last events, so many, after all else.")
]


def of_other_data(context: typer.Context, dataset: str | None, **options: Any) -> dict[str, Any]:
    """How to read the data that ``-d`` names; the run knows how its own were read."""
    if dataset is None:
        refuse_given(context, options, "without -d, which names other data than the run's; leave it out")
    return from_shell(**options)


def from_shell(**options: Any) -> dict[str, Any]:
    """The options that were given, those a shell can only pass as text taken apart."""
    from recbft.config.fields import Verbatim

    given = {name: value for name, value in options.items() if value is not None}
    given |= {name: Verbatim(given[name]) for name in ("user", "item", "time") if name in given}  # called "none" or so
    if "columns" in given:
        given["columns"] = [column.strip() for column in given["columns"].split(",")]
    if "separator" in given:
        given["separator"] = given["separator"].replace("\\t", "\t")
    return given

"""``recbft recommend``: the next items for histories of raw ids, of known users or new ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recbft.errors import UserError
from recbft_cli.columns import Columns, Item, Separator, Time, User, from_shell

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = "Example: recbft recommend runs/sasrec-bft-ml-100k-seed0 --histories histories.csv -k 20 --out recs.parquet"


def recommend(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    histories: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Events of the users, in any form that recbft reads; no minimum length."),
    ],
    k: Annotated[int, typer.Option("-k", help="Items per user.")] = 10,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .parquet or .csv file; printed if left out.")
    ] = None,
    keep_seen: Annotated[bool, typer.Option("--keep-seen", help="Allow items of the history in the list.")] = False,
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Items that no list may hold: their ids, one a line.")
    ] = None,
    candidates: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The only items that lists may hold: their ids, one a line.")
    ] = None,
    user: User = None,
    item: Item = None,
    time: Time = None,
    separator: Separator = None,
    columns: Columns = None,
) -> None:
    """Recommend items for each history; columns user, item, score, rank, and the precision behind the list."""
    if out is not None and out.suffix.lower() not in (".parquet", ".csv"):
        raise UserError(f"{out}: the ending {out.suffix!r} is not known; let the name end in .parquet or .csv")

    from recbft.api import Recommender
    from recbft.datasets.histories import read_histories
    from recbft.datasets.readers import atomic_file
    from recbft.files import refuse_input

    if out is not None:
        refuse_input(out, atomic_file(histories))
    recommender = Recommender.load(run)
    how = from_shell(user=user, item=item, time=time, separator=separator, columns=columns)
    lists = recommender.recommend(
        read_histories(histories, **how),
        k,
        filter_seen=not keep_seen,
        exclude=_ids(exclude),
        candidates=_ids(candidates),
    )
    _write(lists, out)
    if unknown := lists.attrs["unknown_events"]:
        typer.echo(f"skipped events with items that the model does not know: {unknown:,}", err=True)
    if users := lists.attrs["skipped_users"]:
        typer.echo(f"skipped users without a known item: {len(users):,}, such as {users[0]}", err=True)


def _ids(file: Path | None) -> list[str] | None:
    """The lines of a file that are not blank, as they stand."""
    if file is None:
        return None
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}; give a text file of item ids, one a line") from None
    return [line.rstrip("\r") for line in lines if line.strip()]


def _write(lists: pd.DataFrame, out: Path | None) -> None:
    from recbft.files import write_atomic, write_parquet

    if out is None:  # ids are data: UTF-8 whatever the terminal's encoding, as in a file
        sys.stdout.flush()
        lists.to_csv(sys.stdout.buffer, index=False)
    elif out.suffix.lower() == ".csv":
        write_atomic(out, lists.to_csv(index=False).encode())
    else:
        write_parquet(out, lists)
    if out is not None:
        typer.echo(f"{len(lists):,} recommendations written to {out}")

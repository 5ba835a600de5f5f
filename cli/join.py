"""``recbft join``: two finished runs as one, their scores weighed by the item's training count."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from recbft.reporting.progress import listener
from recbft_cli.options import DataRoot
from recbft_cli.train import check_name, print_results

EXAMPLES = """Example:

recbft join runs/sasrec-bft-mine-seed0 runs/content-cosine-published-mine-seed0
"""


class By(Enum):
    """What weights depend on."""

    count = "count"
    none = "none"


def join(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Another, of the same data.")],
    by: Annotated[By, typer.Option(help="Weights by the item's training count, or one pair for all items.")] = By.count,
    for_rare: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="List items with fewer than 5 training events more, at the cost of up to this share of NDCG@10 on "
            "validation, as in 0.01.",
        ),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("-d", "--dataset", help="Where their data are now, if elsewhere.")
    ] = None,
    data_root: DataRoot = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder that gets the new run's folder; runs if left out.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="That folder; if left out join-by_count-DATASET-seedSEED."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run folder that exists.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress, only the result.")] = False,
) -> None:
    """Join two finished runs into one, which then is evaluated, compared and served like any other.

    The score of an item is the sum of both scores, with weights fitted on validation.
    """
    check_name(name)

    from recbft.reporting.run_tables import format_join
    from recbft.training.join import join, usual_name

    place = Path("runs") if out is None else out
    path = place / (name or usual_name(first, second, by.value))
    progress = listener(not quiet, "")
    how = {"by": by.value, "for_rare": for_rare, "dataset": dataset, "data_root": data_root}
    run = join(first, second, path, progress=progress, overwrite=overwrite, **how)
    typer.echo(format_join(run.protocol["joined"]) + "\n")
    print_results(run)

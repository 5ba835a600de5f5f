"""``recbft export``: a run's user encoder and item vectors in files that need no recbft."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from recbft_cli.options import DataRoot, Run

EXAMPLES = "Example: recbft export runs/sasrec-bft-mine-seed0 --format onnx --index faiss --out exported"


class Format(str, Enum):
    """Of the encoder's file."""

    onnx = "onnx"
    torch = "torch"


class Index(str, Enum):
    """Which library reads the index."""

    faiss = "faiss"


def export(
    run: Run,
    format: Annotated[
        Format, typer.Option("--format", help="onnx for ONNX Runtime and others, torch for torch.export.load.")
    ] = Format.onnx,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder to make; if left out the run's name with -onnx or -torch."),
    ] = None,
    index: Annotated[
        Index | None, typer.Option("--index", help="Write an index of the items by inner product, too.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Write the user encoder, the item vectors and their ids, checked against `recbft recommend` before they stand."""
    from recbft.api import Recommender

    recommender = Recommender.load(run, data_root=data_root)
    assert recommender.run is not None
    place = Path(f"{recommender.run.path.name}-{format.value}") if out is None else out
    library: Any = None if index is None else index.value
    said = recommender.export(place, format=format.value, index=library)
    for part in ("encoder", "items", "item_ids", "index"):
        if part in said:
            typer.echo(place / said[part]["file"])
    typer.echo(place / "export.json")
    checked = said["checked"]
    typer.echo(
        f"{checked['histories']:,} histories ({checked['from']}): the {checked['k']} best items are those of "
        f"recommend, scores within {checked['largest_relative_difference']:.0e}"
    )
    if "index" in said:
        made = said["index"]
        why = f" ({made['why']})" if "why" in made else ""
        typer.echo(f"index {made['kind']}{why}: exact for {made['share_exact']:.1%} of them")

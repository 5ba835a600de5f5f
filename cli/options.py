"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
OtherData = Annotated[
    str | None, typer.Option("-d", "--dataset", help="Other data with the same items; that of the run if left out.")
]
Model = Annotated[str | None, typer.Option("-m", "--model", help="One of `recbft models`; sasrec if left out.")]
Arm = Annotated[str | None, typer.Option(help="published, matched or bft (the default).")]
DatasetName = Annotated[
    str | None, typer.Option("-d", "--dataset", help="A name of `recbft data list`, or a file; ml-100k if left out.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of every run; repeat for more.")
]
Config = Annotated[list[Path] | None, typer.Option(metavar="FILE", help="YAML with settings of every run.")]
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

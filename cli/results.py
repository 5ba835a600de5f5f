"""The result of a run as a command prints it: numbers, their protocol, and where everything lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from recbft.training.run_folder import RunFolder


def print_results(run: RunFolder) -> None:
    """Print the test metrics of a finished run in both settings, with the protocol and the folder."""
    import pandas as pd

    from recbft.evaluation.exposure import format_exposure
    from recbft.evaluation.protocol import format_metrics

    typer.echo(format_metrics(run.metrics["test"], run.protocol))
    if exposure := run.metrics.get("exposure"):
        targets = pd.read_parquet(run.per_user_file, columns=["target_count"])["target_count"]
        typer.echo(format_exposure(exposure, float(targets.mean()), run.protocol))
    typer.echo(f"run folder: {run.path}")

"""The result of a run as a command prints it: numbers, their protocol, and where everything lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from recbft.runs.folder import RunFolder


def print_results(run: RunFolder) -> None:
    """Print the test metrics of a finished run in both settings, with the protocol and the folder."""
    from recbft.comparing.finished_runs import COLUMNS, read_per_user
    from recbft.reporting.run_tables import format_exposure, format_metrics

    parts = [format_metrics(run.metrics["test"], run.protocol)]
    if exposure := run.metrics.get("exposure"):
        targets = read_per_user(run)[COLUMNS["target_count"]]
        parts.append(format_exposure(exposure, float(targets.mean()), run.protocol))
    typer.echo("\n".join([*parts, f"run folder: {run.path}"]))

"""``recbft report``: the tables of a comparison, its plots, and one page that holds all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recbft.errors import UserError
from recbft_cli.options import DataRoot

EXAMPLES = """Examples:

recbft report comparisons/instruments

recbft report comparisons/instruments --out paper --format latex,csv
"""


def report(
    source: Annotated[Path, typer.Argument(metavar="COMPARISON_DIR", help="The folder that `recbft compare` wrote.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the files; COMPARISON_DIR/report if left out.")
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", metavar="A,B,...", help="Of html (with plots), md, latex, csv, svg (each plot).")
    ] = "html,md,latex,csv",
    data_root: DataRoot = None,
) -> None:
    """Print what a comparison found, and write tables, plots and one self-contained HTML page."""
    from recbft.comparing.comparison import load_comparison
    from recbft.experiments.lists import each_once
    from recbft.reporting import plots
    from recbft.reporting.report import WITH_PLOTS, check_formats, make_report, write_report
    from recbft.reporting.tables import left_before, text

    wanted = each_once(formats)
    check_formats(wanted)
    draw = any(form in WITH_PLOTS for form in wanted)
    if draw:
        try:
            plots.check_available()
        except UserError as error:
            typer.echo(f"warning: {error}; what needs none is written without them", err=True)
            draw = False
    made = make_report(load_comparison(source), data_root=data_root, draw=draw)
    # Written first: whoever reads only the beginning of what follows (`| head`) still gets the files.
    written = write_report(made, source / "report" if out is None else out, wanted)
    for answer in made.answer:
        typer.echo(answer)
    for section in made.sections:
        tables = section.tables if section.name not in ("training", "protocol") else ()
        words = section.words if section.name != "commands" else ()
        if tables or words:
            typer.echo(f"\n{section.title.upper()}")
        for table in tables:
            typer.echo(f"\n{text(table)}")
        for line in words:
            typer.echo(f"\n{line}")
    typer.echo()
    for path in written:
        typer.echo(f"written: {path}")
    for line in left_before(path for path in written if path.suffix in (".csv", ".svg")):
        typer.echo(line, err=True)

"""What finished runs show: ``recbft report``, tables, plots and one page of a comparison, and ``recbft stratify``.

Strata say where a metric comes from: item frequency, user activity, both, first-time items, recency.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recbft.errors import UserError
from recbft_cli.options import DataRoot
from recbft_cli.terminal import say

if TYPE_CHECKING:
    from recbft.reporting.stratum_tables import Subject

EXAMPLES = """Examples:

recbft report comparisons/instruments

recbft report comparisons/instruments --out paper --format latex,csv
"""
EXAMPLES_BY_STRATA = """Examples:

recbft stratify runs/sasrec-bft-ml-100k-seed0

recbft stratify comparisons/instruments --by item-frequency,user-activity --quantiles 4 --out strata
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
            say(f"warning: {error}; what needs none is written without them", err=True)
            draw = False
    made = make_report(load_comparison(source), data_root=data_root, draw=draw)
    # Written first: whoever reads only the beginning of what follows (`| head`) still gets the files.
    written = write_report(made, source / "report" if out is None else out, wanted)
    for answer in made.answer:
        say(answer)
    for section in made.sections:
        tables = section.tables if section.name not in ("training", "protocol") else ()
        words = section.words if section.name != "commands" else ()
        if tables or words:
            say(f"\n{section.title.upper()}")
        for table in tables:
            say(f"\n{text(table)}")
        for line in words:
            say(f"\n{line}")
    say()
    for path in written:
        say(f"written: {path}")
    for line in left_before(path for path in written if path.suffix in (".csv", ".svg")):
        say(line, err=True)


class Setting(str, Enum):
    """Which items the target is ranked among."""

    unfiltered = "unfiltered"
    filtered = "filtered"


class Equal(str, Enum):
    """What strata of item frequency hold equal numbers of."""

    items = "items"
    targets = "targets"
    counts = "counts"


def stratify(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_COMPARISON", help="A run's folder or a comparison's.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Compare a single run with this one, over users.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Of item-frequency, user-activity, grid (both), first-time, recency; all if left out.",
        ),
    ] = None,
    quantiles: Annotated[int, typer.Option(help="Strata per axis.")] = 5,
    equal: Annotated[
        Equal,
        typer.Option(
            help="What strata of item frequency hold equal numbers of: items, targets, or different counts of targets "
            "(the paper's)."
        ),
    ] = Equal.items,
    edges: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Their largest counts instead, rising, of all but the last stratum."),
    ] = None,
    setting: Annotated[
        Setting | None, typer.Option(help="Rank among all items, or unseen ones only; as the runs have it if left out.")
    ] = None,
    metric: Annotated[str, typer.Option(metavar="A,B,...", help="Such as ndcg@10,hr@10,mrr.")] = "ndcg@10,hr@10",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the tables here as Markdown, LaTeX and CSV, too.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Split the users into strata, and print each arm's metrics there, with tests against the baseline."""
    from recbft.reporting.stratum_tables import available, stratified
    from recbft.reporting.tables import left_before, text, write_tables

    subject = _subject(source, baseline, data_root)
    found, left_out = available(subject)
    made = stratified(
        subject,
        by=_words(by, "--by") if by is not None else found,
        metrics=_words(metric, "--metric"),
        quantiles=quantiles,
        equal=equal.value,
        edges=None if edges is None else _edges(edges),
        setting=subject.setting if setting is None else setting.value,
    )
    for one in made:
        say(text(one.table) + "\n")
    if by is None:
        for line in left_out:
            say(line, err=True)
    if out is not None:
        written = write_tables([one.table for one in made], out, ("md", "latex", "csv"))
        for path in written:
            say(f"written: {path}")
        for line in left_before(written, "strata-*.csv"):
            say(line, err=True)


def _subject(source: Path, baseline: Path | None, data_root: str | None) -> Subject:
    """What lies in the folder: a run has a config, everything else must be a comparison."""
    from recbft.reporting.stratum_tables import subject_of_comparison, subject_of_runs

    if not source.is_dir():
        raise UserError(f"there is no folder {source}; give a run's folder or a comparison's")
    if (source / "config.yaml").is_file():
        return subject_of_runs(source, baseline=baseline, data_root=data_root)
    if baseline is not None:
        raise UserError("--baseline has no effect on a comparison, which has its own; leave it out")
    from recbft.comparing.comparison import load_comparison

    return subject_of_comparison(load_comparison(source), data_root=data_root)


def _edges(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--edges is {text!r}; give rising training counts, such as 187,396,642,1029")
    return [int(word) for word in words]


def _words(text: str, option: str) -> list[str]:
    from recbft.experiments.lists import each_once

    words = each_once(text)
    if not words:
        raise UserError(f"{option} is empty; leave it out, or give one or more names")
    return words

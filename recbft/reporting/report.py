"""The whole report of a comparison: put together once, written in any of its forms.

html    report.html        one self-contained page
md      report.md          answer, tables, protocol, commands
latex   latex/tables.tex   every table
csv     csv/TABLE.csv      every table with all digits
svg     svg/PLOT.svg       every plot as a file of its own
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recbft.comparing.comparison import COMPARISON_FILE, Comparison
from recbft.comparing.provenance import notes_on_machines
from recbft.comparing.results import results_of
from recbft.errors import UserError, did_you_mean
from recbft.experiments.lists import listed
from recbft.reporting import plots, sections
from recbft.reporting.exposure_section import exposure_section
from recbft.reporting.findings import findings, headline_findings
from recbft.reporting.page import page
from recbft.reporting.probe_sections import load_probes, mechanism_section, uncertainty_section
from recbft.reporting.sections import Section
from recbft.reporting.tables import Table, markdown, write_tables
from recbft.reporting.text_tables import markdown_words
from recbft.reporting.verdict import SENTENCES, answers
from recbft.system import recbft_version
from recbft.system.files import make_folder, read_json, write_atomic

FORMATS = ("html", "md", "latex", "csv", "svg")
WITH_PLOTS = ("html", "svg")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Title, a sentence for each arm, and what stands behind them."""

    title: str
    answer: Sequence[str]
    sections: Sequence[Section]

    @property
    def tables(self) -> list[Table]:
        """Every table, in the order of the page."""
        return [table for section in self.sections for table in (*section.tables, *section.folded)]


def make_report(comparison: Comparison, *, data_root: str | None = None, draw: bool = True) -> Report:
    """Compute everything that a comparison's report says.

    Args:
        data_root: where the data set lies, which edges of item frequency and recency need.
        draw: make plots, which need matplotlib.
    """
    if draw:
        plots.check_available()
    results = _results(comparison)
    dataset = comparison.protocol["dataset"]
    found = findings(comparison, results)
    probes, unusable = load_probes(comparison)
    others = [name for name in comparison.arms if name != comparison.baseline]
    compared = listed(others) if len(others) <= SENTENCES else f"{len(others)} arms"
    return Report(
        title=f"{compared} against {comparison.baseline}{_of_model(comparison)} on {dataset}",
        answer=[line for each in found.values() for line in answers(headline_findings(comparison, each), dataset)],
        sections=[
            sections.metrics_section(comparison, results, draw=draw),
            sections.strata_section(comparison, data_root=data_root, draw=draw),
            mechanism_section(probes, draw=draw),
            uncertainty_section(probes, draw=draw),
            exposure_section(comparison, results),
            sections.training_section(comparison, draw=draw),
            sections.protocol_section(comparison, results),
            sections.commands_section(comparison, results),
            # Run folders may have come from elsewhere since the comparison was made.
            sections.notes_section(list(dict.fromkeys([*results["notes"], *notes_on_machines(comparison), *unusable]))),
        ],
    )


def check_formats(formats: Sequence[str]) -> None:
    """UserError where one is unknown."""
    if not formats:
        raise UserError(f"no format is given; choose of {', '.join(FORMATS)}")
    for form in formats:
        if form not in FORMATS:
            raise UserError(f"unknown format {form!r}; {did_you_mean(form, FORMATS)}")


def write_report(report: Report, out: str | Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write a report into a folder; what was written."""
    out = make_folder(out)
    generator = f"recbft {recbft_version()}"
    written = []
    for form in formats:
        if form == "html":
            text = page(report.title, report.answer, report.sections, generator=generator)
            written.append(_write(out / "report.html", text))
        elif form == "md":
            written.append(_write(out / "report.md", document(report)))
        elif form == "svg":
            folder = make_folder(out / form)
            drawn = [plot for section in report.sections for plot in section.plots]
            written += [_write(folder / f"{plot.name}.svg", plots.standalone(plot.svg)) for plot in drawn]
        else:
            written += write_tables(report.tables, make_folder(out / form), (form,))
    return written


def document(report: Report) -> str:
    """The report as Markdown, without plots."""
    parts = [f"# {markdown_words(report.title)}\n", *(f"{markdown_words(line)}\n" for line in report.answer)]
    for section in report.sections:
        parts.append(f"## {section.title}\n")
        parts += [f"{markdown_words(line)}\n" for line in section.words]
        parts += [markdown(table) for table in (*section.tables, *section.folded)]
        parts += [f"    {command}\n" for command in section.commands]
        if section.items:
            items = (markdown_words(f"- {key}: {value}") for key, value in section.items.items())
            parts.append("\n".join(items) + "\n")
    return "\n".join(parts)


def _results(comparison: Comparison) -> dict[str, Any]:
    """What ``recbft compare`` wrote, if the comparison was read from its folder; else computed now."""
    if comparison.path is None:
        return results_of(comparison)
    saved: dict[str, Any] = read_json(comparison.path / COMPARISON_FILE)
    return saved


def _of_model(comparison: Comparison) -> str:
    """ ", sasrec," where all arms are of one model."""
    model = comparison.protocol.get("config", {}).get("model")
    return f", {model}," if model else ""


def _write(path: Path, text: str) -> Path:
    write_atomic(path, text.encode(), durable=False)
    return path

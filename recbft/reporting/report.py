"""The whole report of a comparison: put together once, written in any of its forms.

html    report.html        one self-contained page
md      report.md          answers, tables, protocol, commands
latex   latex/tables.tex   every table
csv     csv/TABLE.csv      every table with all digits
svg     svg/PLOT.svg       every plot as a file of its own
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recbft.comparing.comparison import Comparison, read_results
from recbft.comparing.provenance import notes_on_machines
from recbft.comparing.results import results_of
from recbft.errors import UserError, did_you_mean
from recbft.experiments.lists import listed
from recbft.reporting import plots, sections
from recbft.reporting.comparison_tables import findings, headline_findings
from recbft.reporting.page import Section, page
from recbft.reporting.probe_sections import load_probes, mechanism_section, new_items_section, uncertainty_section
from recbft.reporting.tables import Table, markdown, markdown_words, write_tables
from recbft.reporting.verdict import SENTENCES, Answer, answers, terms
from recbft.system import recbft_version
from recbft.system.files import make_folder, write_atomic

FORMATS = ("html", "md", "latex", "csv", "svg")
WITH_PLOTS = ("html", "svg")


NO_PLOTS = (
    "This page has no plots, because matplotlib is missing. Install it with pip install matplotlib and call "
    "recbft report again."
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Title, an answer for each arm, what its words mean, and what stands behind it."""

    title: str
    answer: Sequence[Answer]
    sections: Sequence[Section]
    terms: Mapping[str, str] = field(default_factory=dict)
    notice: str = ""  # what the report lacks

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
    # What ``recbft compare`` wrote, if the comparison was read from its folder.
    results = results_of(comparison) if comparison.path is None else read_results(comparison.path)
    dataset = comparison.protocol["dataset"]
    first = {name: headline_findings(comparison, each) for name, each in findings(results).items()}
    chosen = [one for each in first.values() for one, _ in each]
    probes, unusable = load_probes(comparison)
    new = new_items_section(probes, draw=draw)
    others = [name for name in comparison.arms if name != comparison.baseline]
    compared = listed(others) if len(others) <= SENTENCES else f"{len(others)} arms"
    model = comparison.protocol.get("config", {}).get("model")  # where all arms are of one
    # Run folders may have come from elsewhere since the comparison was made.
    notes = list(dict.fromkeys([*results["notes"], *notes_on_machines(comparison), *unusable]))
    return Report(
        title=f"{compared} against {comparison.baseline} on {dataset}{f' ({model})' if model else ''}",
        answer=[
            line
            for baseline, each in first.items()
            for line in answers(each, dataset, results["arms"], _equal_arms(comparison, baseline))
        ],
        terms={**terms(chosen, max(map(len, first.values()), default=0)), **sections.summaries(comparison)},
        sections=[
            Section(name="notes", title="Before you rely on this", words=notes or ["Nothing unusual was found."]),
            sections.metrics_section(comparison, results, draw=draw),
            sections.strata_section(comparison, data_root=data_root, draw=draw),
            *([] if new is None else [new]),
            mechanism_section(probes, draw=draw),
            uncertainty_section(probes, draw=draw),
            sections.exposure_section(comparison, results),
            sections.training_section(comparison, results, draw=draw),
            sections.protocol_section(comparison, results),
            sections.commands_section(comparison, results),
        ],
        notice="" if draw else NO_PLOTS,
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
            text = page(
                report.title, report.answer, report.terms, report.sections, generator=generator, notice=report.notice
            )
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
    parts = [f"# {markdown_words(report.title)}\n"]
    for one in report.answer:
        said = (f"**{one.sentence}**", f"What to do: {one.advice}", f"Evidence: {one.evidence}")
        parts += [f"{markdown_words(line)}\n" for line in said]
    parts.append("\n".join(markdown_words(f"- {word}: {says}") for word, says in report.terms.items()) + "\n")
    for section in report.sections:
        parts.append(f"## {section.title}\n")
        parts += [f"{markdown_words(line)}\n" for line in section.words]
        parts += [markdown(table) for table in (*section.tables, *section.folded)]
        parts += [f"    {command}\n" for command in section.commands]
        if section.items:
            items = (markdown_words(f"- {key}: {value}") for key, value in section.items.items())
            parts.append("\n".join(items) + "\n")
    return "\n".join(parts)


def _equal_arms(comparison: Comparison, baseline: str) -> set[str]:
    """The arms with the ranks of the baseline, for every user and seed in every setting they share."""
    theirs = comparison.arms[baseline].ranks
    return {
        name for name, arm in comparison.arms.items()
        if all(np.array_equal(arm.ranks[setting], theirs[setting]) for setting in comparison.settings(name, baseline))
    }  # fmt: skip


def _write(path: Path, text: str) -> Path:
    write_atomic(path, text.encode(), durable=False)
    return path

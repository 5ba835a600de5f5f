"""One table, five forms: terminal, Markdown, LaTeX (booktabs), CSV, HTML.

Cells hold values, not texts; a column's kind says how they are written. CSV alone keeps all digits, with a pair as
two columns. Nothing is left blank: what does not exist is a dash.
"""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Literal

from recbft.experiments.lists import counted
from recbft.reporting.document import interval_text, p_text, percent, spread_text, unsigned_zero
from recbft.reporting.text_tables import markdown_words, text_table
from recbft.system.files import make_folder, write_atomic

Cell = str | int | float | tuple[float, float | None] | None
Kind = Literal[
    "text", "count", "number", "value", "signed", "percent", "share", "short", "p", "spread", "range", "interval"
]
NONE = "-"
WIDTH = 110  # of a caption in a terminal
LONG = 24  # letters of a row's name, beyond which a page may break it
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A heading and what stands below it."""

    heading: str
    kind: Kind = "text"
    detail: bool = False  # left out in a terminal, where a line is short

    @property
    def is_text(self) -> bool:
        """Whether cells stand to the left."""
        return self.kind == "text"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns.

    Args:
        name: of its files, such as "strata-item-frequency".
        title: a few words.
        caption: what a reader must know to use the numbers: setting, tie rule, test, family.
    """

    name: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), f"a row of {self.name} has other columns"

    def texts(self) -> list[list[str]]:
        """Every cell as it is written."""
        return [[written(cell, c.kind) for cell, c in zip(row, self.columns, strict=True)] for row in self.rows]


def written(cell: Cell, kind: Kind) -> str:
    """A cell as text.

    >>> written(0.0123, "signed"), written(-0.05, "percent"), written((-0.1, 0.2), "interval"), written(2e-5, "p")
    ('+0.0123', '-5.0 %', '-0.1000 to +0.2000', '< 0.001')
    """
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return cell
    assert not isinstance(cell, float) or math.isfinite(cell), "no number is printed that is none"
    return _WRITTEN[kind](cell)


def text(table: Table) -> str:
    """For a terminal: columns aligned by spaces, the caption below."""
    shown = [n for n, column in enumerate(table.columns) if not column.detail]
    columns = [table.columns[n] for n in shown]
    rows = [[row[n] for n in shown] for row in table.texts()]
    aligned = text_table([c.heading for c in columns], rows, [c.is_text for c in columns])
    return "\n".join([table.title, "", aligned, "", textwrap.fill(table.caption, WIDTH)])


def markdown(table: Table) -> str:
    """A Markdown section."""
    rule = ["---" if c.is_text else "---:" for c in table.columns]
    lines = [[_markdown_cell(c.heading) for c in table.columns], rule]
    lines += [[_markdown_cell(cell) for cell in row] for row in table.texts()]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"### {markdown_words(table.title)}\n\n{body}\n\n{markdown_words(table.caption)}\n"


def latex(table: Table) -> str:
    """A table environment for the booktabs package."""
    align = "".join("l" if c.is_text else "r" for c in table.columns)
    # The end of a row takes a bracket or a star that comes next for its own.
    shield = {"[": "{}", "*": "{}"}
    lines = [shield.get(row[0][:1], "") + " & ".join(map(_latex, row)) + r" \\" for row in table.texts()]
    head = " & ".join(_latex(c.heading) for c in table.columns) + r" \\"
    return "\n".join(
        [
            r"\begin{table}", r"\centering", rf"\caption{{{_latex(table.title)}. {_latex(table.caption)}}}",
            rf"\label{{tab:{table.name}}}", rf"\begin{{tabular}}{{{align}}}", r"\toprule", head, r"\midrule", *lines,
            r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
        ]
    )  # fmt: skip


def comma_separated(table: Table) -> str:
    """CSV with all digits; a pair (interval, mean and deviation) takes two columns, what does not exist is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_spread((c.heading, c) for c in table.columns))
    for row in table.rows:
        writer.writerow(_spread(zip(row, table.columns, strict=True)))
    return out.getvalue()


def html(table: Table) -> str:
    """A figure whose table scrolls inside its own box."""
    head = "".join(f"<th{_class(c)} scope=col>{escape(c.heading)}</th>" for c in table.columns)
    rows = []
    for row in table.texts():
        cells = [f"<td{_class(c)}>{escape(cell)}</td>" for cell, c in zip(row, table.columns, strict=True)]
        cells[0] = f"<th{' class=long' if len(row[0]) > LONG else ''} scope=row>{escape(row[0])}</th>"
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<figure class="table" id="table-{escape(table.name)}"><h3>{escape(table.title)}</h3>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(rows)}</tbody></table></div>"
        f"<figcaption>{escape(table.caption)}</figcaption></figure>"
    )


def write_tables(tables: Sequence[Table], out: str | Path, formats: Iterable[str]) -> list[Path]:
    """Write tables into a folder: one file of Markdown, one of LaTeX, a CSV for each; what was written."""
    out = make_folder(out)
    files: dict[Path, str] = {}
    for form in formats:
        if form == "md":
            files[out / "tables.md"] = "\n".join(map(markdown, tables))
        elif form == "latex":
            files[out / "tables.tex"] = "% needs \\usepackage{booktabs}\n\n" + "\n".join(map(latex, tables))
        elif form == "csv":
            files |= {out / f"{table.name}.csv": comma_separated(table) for table in tables}
    for path, content in files.items():
        write_atomic(path, content.encode(), durable=False)
    return list(files)


def left_before(written: Iterable[Path], pattern: str = "*") -> list[str]:
    """A line for each folder of these files that has others of the same ending, which an earlier call wrote.

    Args:
        pattern: of the names that such a call gives.
    """
    ours, lines = set(written), []
    for folder, suffix in sorted({(path.parent, path.suffix) for path in ours}):
        if others := sorted({path for path in folder.glob(pattern) if path.suffix == suffix} - ours):
            files = counted(len(others), f"{suffix[1:].upper()} file")
            lines.append(
                f"note: {folder} has {files} that this call did not write, maybe out of date, such as {others[0].name}"
            )
    return lines


def distinct(tables: Iterable[Table]) -> list[Table]:
    """The tables, a number behind a name that an earlier one has, on a file system that knows no capitals too."""
    made: list[Table] = []
    for table in tables:
        taken = {other.name.casefold() for other in made}
        names = (table.name, *(f"{table.name}-{n}" for n in range(2, len(made) + 2)))
        made.append(replace(table, name=next(name for name in names if name.casefold() not in taken)))
    return made


def slug(name: str) -> str:
    """A name in letters that files and labels take, cut to a length that a file system takes.

    >>> slug("bft[core.lam_max=10]")
    'bft-core.lam_max-10'
    """
    return re.sub(r"[^\w.]+", "-", name).strip("-.")[:60].strip("-.")


def _between(cell: Cell, spec: str) -> str:
    assert isinstance(cell, tuple)
    return interval_text(cell, spec)


_WRITTEN: dict[Kind, Callable[..., str]] = {
    "text": str,
    "count": lambda cell: f"{cell:,}",
    "number": lambda cell: f"{cell:,.1f}",
    "value": lambda cell: f"{cell:.4f}",
    "signed": lambda cell: unsigned_zero(f"{cell:+.4f}"),
    "percent": percent,
    "share": lambda cell: f"{100 * cell:.1f} %",
    "short": lambda cell: f"{cell:.3g}",
    "p": p_text,
    "spread": lambda cell: spread_text(*cell),
    "range": lambda cell: _between(cell, ".4f"),
    "interval": lambda cell: _between(cell, "+.4f"),
}


_PAIRS: dict[Kind, tuple[str, str]] = {"spread": ("mean", "sd"), "range": ("low", "high"), "interval": ("low", "high")}


def _spread(cells: Iterable[tuple[Cell, Column]]) -> list[object]:
    spread: list[object] = []
    for cell, column in cells:
        if column.kind not in _PAIRS:
            spread.append("" if cell is None else cell)
        elif isinstance(cell, str):  # the heading
            spread += [f"{cell} {part}" for part in _PAIRS[column.kind]]
        else:
            spread += ["" if part is None else part for part in cell] if isinstance(cell, tuple) else ["", ""]
    return spread


def _class(column: Column) -> str:
    return "" if column.is_text else " class=n"


def _markdown_cell(cell: str) -> str:
    return markdown_words(" ".join(cell.split())).replace("|", r"\|")


def _latex(words: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in words)

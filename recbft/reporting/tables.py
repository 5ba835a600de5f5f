"""One table in five forms: terminal, Markdown, LaTeX (booktabs), CSV and HTML.

Cells hold values, not text; the kind of a column says how they are written. Only CSV keeps all digits; there a pair
(interval, or mean and deviation) takes two columns. Outside CSV a missing value is a dash, and a metric has four digits
after the point, or as many as show two digits of the smallest difference that the table's tests found (``digits_for``).
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
from typing import Any, Literal

from recbft.experiments.lists import counted
from recbft.system.files import make_folder, write_atomic

Cell = str | int | float | tuple[float, float | None] | None
Kind = Literal[
    "text", "count", "number", "value", "signed", "percent", "share", "short", "change", "effect", "p", "spread",
    "range", "interval",
]  # fmt: skip
NONE = "-"
LEVEL = 0.05  # of a test that finds a difference
WIDTH = 110  # of a caption in a terminal
LONG = 24  # letters of a row's name, beyond which a page may break it
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A heading, how its cells are written, and the narrowest place that shows it."""

    heading: str
    kind: Kind = "text"
    narrowest: Literal["phone", "terminal", "page"] = "phone"

    @property
    def is_text(self) -> bool:
        """Whether cells stand to the left."""
        return self.kind == "text"


# Of a test: how much, and whether it is found.
DIFFERENCE = (
    Column("difference", "signed", "terminal"),
    Column("relative", "percent"),
    Column("95 % interval", "interval", "terminal"),
    Column("p", "p", "terminal"),
    Column("p Holm", "p"),
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns.

    Args:
        name: of its files, such as "strata-item-frequency".
        title: a few words.
        caption: what a reader must know to use the numbers: setting, tie rule, test, family.
        digits: after the point, of metrics, their differences and intervals.
    """

    name: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    digits: int = 4

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), f"a row of {self.name} has other columns"

    def texts(self) -> list[list[str]]:
        """Every cell as it is written."""
        return [
            [written(cell, c.kind, self.digits) for cell, c in zip(row, self.columns, strict=True)] for row in self.rows
        ]

    def without(self, heading: str) -> Table:
        """The same table without one column."""
        kept = [n for n, column in enumerate(self.columns) if column.heading != heading]
        rows = [[row[n] for n in kept] for row in self.rows]
        return replace(self, columns=[self.columns[n] for n in kept], rows=rows)


def written(cell: Cell, kind: Kind, digits: int = 4) -> str:
    """A cell as text.

    >>> written(0.0123, "signed"), written(-0.05, "percent"), written((-0.1, 0.2), "interval"), written(2e-5, "p")
    ('+0.0123', '-5.0 %', '-0.1000 to +0.2000', '< 0.001')
    """
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return cell
    assert not isinstance(cell, float) or math.isfinite(cell), "no number is printed that is none"
    return _WRITTEN[kind](cell, digits)


def digits_for(found: Iterable[tuple[float, float]]) -> int:
    """The ``digits`` of a table with these differences, each with the p of its test before any adjustment.

    >>> digits_for([(0.0123, 0.01), (-0.00004, 0.02), (1e-9, 0.5)])
    6
    """
    sizes = [abs(difference) for difference, p in found if p < LEVEL]
    return max([4, *(1 - math.floor(math.log10(size)) for size in sizes if size)])


def text(table: Table) -> str:
    """For a terminal: columns aligned by spaces, the caption below."""
    shown = [n for n, column in enumerate(table.columns) if column.narrowest != "page"]
    columns = [table.columns[n] for n in shown]
    rows = [[row[n] for n in shown] for row in table.texts()]
    aligned = text_table([c.heading for c in columns], rows, [c.is_text for c in columns])
    caption = [textwrap.fill(table.caption, WIDTH)] if table.caption else []
    return "\n\n".join([*([table.title] if table.title else []), aligned, *caption])


def markdown(table: Table) -> str:
    """A Markdown section."""
    body = markdown_table([c.heading for c in table.columns], table.texts(), [c.is_text for c in table.columns])
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
    """CSV with all digits; a missing value is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_spread((c.heading, c) for c in table.columns))
    for row in table.rows:
        writer.writerow(_spread(zip(row, table.columns, strict=True)))
    return out.getvalue()


def html(table: Table) -> str:
    """A figure whose table scrolls inside its own box; a phone shows its main columns, and all when asked."""
    head = "".join(f"<th{_class(c)} scope=col>{escape(c.heading)}</th>" for c in table.columns)
    rows = []
    for row in table.texts():
        cells = [f"<td{_class(c)}>{escape(cell)}</td>" for cell, c in zip(row, table.columns, strict=True)]
        name = re.sub(r"(?<=[+,._\[])", "<wbr>", escape(row[0]))
        cells[0] = f"<th{' class=long' if len(row[0]) > LONG else ''} scope=row>{name}</th>"
        rows.append(f"<tr>{''.join(cells)}</tr>")
    own, more = escape(table.name), ""
    if any(c.narrowest != "phone" for c in table.columns):
        label = f"show all {len(table.columns)} columns"
        more = f'<input type=checkbox class=more id="all-{own}"><label for="all-{own}">{label}</label>'
    return (
        f'<figure class="table" id="table-{own}"><h3>{escape(table.title)}</h3>{more}'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(rows)}</tbody></table></div>"
        f"<figcaption>{html_words(table.caption)}</figcaption></figure>"
    )


def html_words(words: str) -> str:
    """Escaped, with a number and what belongs to it on one line."""
    said = escape(words).replace(" %", "&nbsp;%").replace("p = ", "p&nbsp;=&nbsp;")
    return said.replace("p &lt; ", "p&nbsp;&lt;&nbsp;")


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
    """A note for each folder that holds other files of the same ending, which an earlier call wrote.

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
    """The tables; a name that an earlier one has, in capitals or not, gets a number."""
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


def text_table(head: Sequence[str], rows: Sequence[Sequence[object]], to_the_left: Sequence[bool] | None = None) -> str:
    """Columns aligned by spaces: the first to the left, the others to the right, unless told for each.

    >>> print(text_table(["setting", "hr@10"], [["all items", 0.1083], ["seen left out", None]]))
    setting         hr@10
    all items      0.1083
    seen left out       -
    """
    lines = [list(head), *([_plain(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = [n == 0 for n in range(len(head))] if to_the_left is None else to_the_left
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if on_left else f"{cell:>{width}}"
            for cell, width, on_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """``text_table`` with every column that holds no number to the left."""
    numbers = [any(isinstance(row[n], (int, float)) for row in rows) for n in range(len(head))]
    return text_table(head, rows, [not number for number in numbers])


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], to_the_left: Sequence[bool] | None = None
) -> str:
    """A Markdown table, all columns to the left unless told for each; a bar within a cell is escaped."""
    rule = ["---" if left else "---:" for left in to_the_left or [True] * len(head)]
    cells = [[markdown_words(" ".join(cell.split())).replace("|", r"\|") for cell in row] for row in [head, *rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [cells[0], rule, *cells[1:]])


def markdown_words(words: str) -> str:
    """Words in which nothing but what is set as code is an HTML tag, which Markdown would hand on as one.

    >>> markdown_words("p < 0.001 of <b>other</b>, by `recbft report <b>`")
    'p < 0.001 of &lt;b>other&lt;/b>, by `recbft report <b>`'
    """
    return re.sub(r"(`[^`\n]+`)|<(?=[A-Za-z/!?])", lambda found: found[1] or "&lt;", words)


def unsigned_zero(number: str) -> str:
    """A written number, without its sign if all of its digits are 0.

    >>> unsigned_zero("-0.0000"), unsigned_zero("-0.0001")
    ('0.0000', '-0.0001')
    """
    return number if number.strip("+-0.") else number.lstrip("+-")


def percent(share: float) -> str:
    """A share with its sign and one digit after the point, or up to three where fewer would be 0.

    >>> percent(0.0171), percent(0.00042), percent(0.0)
    ('+1.7 %', '+0.04 %', '0.0 %')
    """
    digits = next((digits for digits in (1, 2, 3) if round(100 * share, digits)), 1)
    return f"{unsigned_zero(f'{100 * share:+.{digits}f}')} %"


def p_text(p: float) -> str:
    """A p-value to three digits, or as many as show on which side of 0.05 it lies.

    >>> p_text(0.0333), p_text(0.00001), p_text(0.0497), p_text(0.0503)
    ('0.033', '< 0.001', '0.0497', '0.050')
    """
    if p < 0.001:
        return "< 0.001"
    digits = next((digits for digits in range(3, 9) if (round(p, digits) < 0.05) == (p < 0.05)), 9)
    return f"{p:.{digits}f}"


def p_equals(p: float) -> str:
    """A p-value with its sign, to stand after the letter.

    >>> p_equals(0.0333), p_equals(0.00001)
    ('= 0.033', '< 0.001')
    """
    return p_text(p) if p < 0.001 else f"= {p_text(p)}"


def short(value: float | None) -> str:
    """Three digits that matter, or so; a dash for none.

    >>> short(123.456), short(1.5), short(0.123456), short(0.000123), short(None)
    ('123.5', '1.50', '0.123', '0.00012', '-')
    """
    if value is None or value != value:
        return NONE
    size = abs(value)
    digits = 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}" if size >= 0.1 or size == 0 else f"{value:.2g}"


def signed(value: float | None) -> str:
    """Three digits after the point and a sign; a dash for none."""
    return NONE if value is None or value != value else f"{value:+.3f}"


def _between(cell: tuple[float, float], spec: str) -> str:
    """An interval; an end that rounds to zero keeps its sign, which says on which side of zero the interval ends."""
    return " to ".join(format(end, spec) if end else unsigned_zero(format(end, spec)) for end in cell)


_WRITTEN: dict[Kind, Callable[[Any, int], str]] = {
    "text": lambda cell, _: str(cell),
    "count": lambda cell, _: f"{cell:,}",
    "number": lambda cell, _: f"{cell:,.1f}",
    "value": lambda cell, digits: f"{cell:.{digits}f}",
    "signed": lambda cell, digits: unsigned_zero(f"{cell:+.{digits}f}"),
    "percent": lambda cell, _: percent(cell),
    "share": lambda cell, _: f"{100 * cell:.1f} %",
    "short": lambda cell, _: short(cell),
    "change": lambda cell, _: signed(cell),
    "effect": lambda cell, _: f"{cell:+.2f}",
    "p": lambda cell, _: p_text(cell),
    "spread": lambda cell, digits: " ± ".join(f"{part:.{digits}f}" for part in cell if part is not None),
    "range": lambda cell, digits: _between(cell, f".{digits}f"),
    "interval": lambda cell, digits: _between(cell, f"+.{digits}f"),
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
    classes = [*([] if column.is_text else ["n"]), *([] if column.narrowest == "phone" else ["w"])]
    return f' class="{" ".join(classes)}"' if classes else ""


def _plain(value: object) -> str:
    """A value of ``text_table``."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _latex(words: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in words)

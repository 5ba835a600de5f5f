"""A table of cells, as plain text and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

Row = Sequence[str]


def text_table(head: Row, rows: Sequence[Row], to_the_left: Sequence[bool] | None = None) -> str:
    """Columns aligned by spaces: the first to the left, the others to the right, unless told for each."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = [n == 0 for n in range(len(head))] if to_the_left is None else to_the_left
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if on_left else f"{cell:>{width}}"
            for cell, width, on_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    )


def markdown_table(head: Row, rows: Sequence[Row]) -> str:
    """A Markdown table; a bar within a cell is escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [head, *rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [cells[0], ["---"] * len(head), *cells[1:]])


def markdown_words(words: str) -> str:
    """Words in which nothing but what is set as code is an HTML tag, which Markdown would hand on as one.

    >>> markdown_words("p < 0.001 of <b>other</b>, by `recbft report <b>`")
    'p < 0.001 of &lt;b>other&lt;/b>, by `recbft report <b>`'
    """
    return re.sub(r"(`[^`\n]+`)|<(?=[A-Za-z/!?])", lambda found: found[1] or "&lt;", words)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Text columns to the left, numbers to the right; None is a dash.

    >>> print(table(["setting", "hr@10"], [["all items", 0.1083], ["seen left out", 0.11]]))
    setting         hr@10
    all items      0.1083
    seen left out  0.1100
    """
    left = [not any(isinstance(row[n], (int, float)) for row in rows) for n in range(len(header))]
    return text_table(header, [[_text(value) for value in row] for row in rows], left)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)

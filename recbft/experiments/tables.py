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

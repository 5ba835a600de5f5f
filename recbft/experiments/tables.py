"""A table of cells, as plain text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def text_table(head: Row, rows: Sequence[Row]) -> str:
    """Columns aligned by spaces: the first to the left, the others to the right."""
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    )


def markdown_table(head: Row, rows: Sequence[Row]) -> str:
    """A Markdown table; a bar within a cell is escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [head, *rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [cells[0], ["---"] * len(head), *cells[1:]])

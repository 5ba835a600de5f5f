"""Plain tables: columns aligned by spaces, readable in a terminal, a log and a mail."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Text columns to the left, numbers to the right; None is a dash.

    >>> print(table(["setting", "hr@10"], [["all items", 0.1083], ["seen left out", 0.11]]))
    setting         hr@10
    all items      0.1083
    seen left out  0.1100
    """
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [any(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(f"{cell:>{w}}" if r else f"{cell:<{w}}" for cell, w, r in zip(line, widths, right, strict=True))
        for line in [list(header), *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)

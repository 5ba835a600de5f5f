"""Plain tables: columns aligned by spaces, readable in a terminal, a log and a mail."""

from __future__ import annotations

from collections.abc import Sequence

from recbft.experiments.tables import text_table


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

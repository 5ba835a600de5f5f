"""A published figure beside ours, and whether the two agree to the digits given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from recbft.reporting.tables import text_table


class Figure(NamedTuple):
    """One number of a paper, as it is printed there, and ours.

    ``corrected`` is what the paper's own specification gives, to as many digits as are written, where the number
    printed is not that; ours must then be the corrected one, and the table says so.

    >>> Figure("steady gain", "0.618", 0.61803).agrees
    True
    >>> Figure("margin", "-.16", -0.15499).agrees
    False
    """

    name: str
    published: str
    ours: float
    corrected: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether ours, rounded to as many decimals, is the published (or corrected) number."""
        expected = self.published if self.corrected is None else self.corrected
        decimals = _decimals(expected)
        return abs(round(self.ours, decimals) - float(expected)) < 10.0 ** -(decimals + 2)


def figure_table(figures: Sequence[Figure]) -> str:
    """Published figures beside ours, with two decimals more than the paper gives."""
    rows = []
    for one in figures:
        remark = "" if one.agrees else "differs"
        if one.agrees and one.corrected is not None:
            remark = f"not the published one: its specification gives {one.corrected}"
        rows.append([one.name, one.published, f"{one.ours:.{_decimals(one.published) + 3}f}", remark])
    return text_table(["", "published", "ours", ""], rows)


def _decimals(number: str) -> int:
    return len(number.partition(".")[2])

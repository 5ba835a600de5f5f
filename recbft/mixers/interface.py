"""What every mixer returns: an innovation and, where it has one, how precise it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from recbft.core import pick, projected_precision


class Observation(NamedTuple):
    """One layer's evidence about every position."""

    innovation: Tensor  # (B, T, D)
    precision: Tensor | None  # (B, T, D), >= 0; None where the mixer has no estimate

    def each(self, change: Callable[[Tensor], Tensor]) -> Observation:
        """Both parts changed alike, precision where there is one."""
        return Observation(change(self.innovation), None if self.precision is None else change(self.precision))

    def at(self, only: Tensor | None) -> Observation:
        """The evidence about some tokens alone, counted through the rows, (N, D); all of it where ``only`` is None."""
        return self.each(lambda part: pick(part, only))


def projected(observation: Observation, out: nn.Linear | None, *, cap: float) -> Observation:
    """An observation through a mixer's output map, if it has one: precision through the squared weights.

    Args:
        cap: largest precision.
    """
    innovation, precision = observation
    if out is None:
        return observation
    found = None if precision is None else projected_precision(precision, out.weight, cap=cap)
    return Observation(out(innovation), found)

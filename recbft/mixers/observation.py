"""What every mixer returns: an innovation and, where it has one, how precise it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from recbft.core import Readers, projected_precision


class Observation(NamedTuple):
    """One layer's evidence about every position."""

    innovation: Tensor  # (B, T, D)
    precision: Tensor | None  # (B, T, D), >= 0; None where the mixer has no estimate

    def at(self, only: Tensor | None) -> Observation:
        """The evidence about some tokens alone, counted through the rows, (N, D); all of it where ``only`` is None."""
        return self if only is None else self._each(lambda x: x.flatten(0, 1)[only])

    def of_readers(self, readers: Readers) -> Observation:
        """The same from what readers observed, (B, R, D) -> (N, D)."""
        return self._each(readers.wanted)

    def _each(self, share: Callable[[Tensor], Tensor]) -> Observation:
        return Observation(share(self.innovation), None if self.precision is None else share(self.precision))


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

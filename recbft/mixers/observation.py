"""What every mixer returns: an innovation and, where it has one, how precise it is."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Observation(NamedTuple):
    """One layer's evidence about every position."""

    innovation: Tensor  # (B, T, D)
    precision: Tensor | None  # (B, T, D), >= 0; None where the mixer has no estimate

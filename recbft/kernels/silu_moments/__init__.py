"""SiLU moments: the paths there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from recbft.kernels import dispatch
from recbft.kernels.dispatch import Path
from recbft.kernels.silu_moments import cpu, reference

PATHS = {
    "cpu": Path(lambda: cpu.silu_moments, "cpu"),
    "reference": Path(lambda: reference.silu_moments),
}


def choose(impl: str, q: Tensor) -> Callable[..., Any]:
    """The path for a call."""
    return dispatch.choose(impl, PATHS, q)

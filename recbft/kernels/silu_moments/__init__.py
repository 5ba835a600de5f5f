"""SiLU moments: which path serves a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from recbft.kernels.silu_moments import cpu, reference

PATHS: dict[str, Callable[..., Any]] = {"reference": reference.silu_moments, "cpu": cpu.silu_moments}


def choose(impl: str, q: Tensor) -> Callable[..., Any]:
    """The path for a call; ``auto`` takes the fast one where it serves, a forced one must serve."""
    reason = cpu.decline(q)
    if impl == "auto":
        return PATHS["reference" if reason else "cpu"]
    if impl not in PATHS:
        raise ValueError(f"unknown impl {impl!r}; choose one of auto, {', '.join(sorted(PATHS))}")
    if impl == "cpu" and reason:
        raise ValueError(reason)
    return PATHS[impl]

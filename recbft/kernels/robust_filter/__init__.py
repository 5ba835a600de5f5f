"""Robust filter attention: which path serves a call, and why another declined (logged once per reason)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from logging import getLogger
from typing import Any

from torch import Tensor

from recbft.kernels.robust_filter import cpu, isotropic, reference
from recbft.kernels.robust_filter.dynamics import Clock, Dynamics, Variant, read_clock, turns
from recbft.kernels.robust_filter.isotropic import as_complex, decayed_weights, real

PATHS: dict[str, Callable[..., Any]] = {
    "reference": reference.robust_filter,
    "isotropic": isotropic.robust_filter,
    "cpu": cpu.robust_filter,
}

__all__ = [
    "PATHS",
    "Clock",
    "Dynamics",
    "Variant",
    "as_complex",
    "choose",
    "decayed_weights",
    "read_clock",
    "real",
    "turns",
]


def choose(impl: str, q: Tensor) -> Callable[..., Any]:
    """The path for a call; ``auto`` takes the fastest that serves it, a forced one must serve."""
    if impl == "auto":
        reason = cpu.decline(q)
        if reason:
            _log_once(reason)
        return PATHS["isotropic" if reason else "cpu"]
    if impl not in PATHS:
        raise ValueError(f"unknown impl {impl!r}; choose one of auto, {', '.join(sorted(PATHS))}")
    if impl == "cpu" and (reason := cpu.decline(q)):
        raise ValueError(reason)
    return PATHS[impl]


@lru_cache
def _log_once(reason: str) -> None:
    getLogger("recbft").info(reason)

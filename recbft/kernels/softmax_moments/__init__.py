"""Softmax moments: which path serves a call, and why another declined (logged once per reason)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from logging import getLogger
from typing import Any

from torch import Tensor

from recbft.kernels.softmax_moments import cpu, reference

PATHS: dict[str, Callable[..., Any]] = {"reference": reference.softmax_moments, "cpu": cpu.softmax_moments}


def choose(impl: str, q: Tensor, *, dropout: float) -> Callable[..., Any]:
    """The path for a call; ``auto`` takes the fast one where it serves, a forced one must serve."""
    if impl == "auto":
        return PATHS["reference" if _declined(q, dropout) else "cpu"]
    if impl not in PATHS:
        raise ValueError(f"unknown impl {impl!r}; choose one of auto, {', '.join(sorted(PATHS))}")
    if impl == "cpu" and (reason := cpu.decline(q, dropout=dropout)):
        raise ValueError(reason)
    return PATHS[impl]


def choose_mean(q: Tensor) -> Callable[..., Any]:
    """The path for the mean alone, with or without dropout."""
    return reference.softmax_mean if _declined(q, 0.0) else cpu.softmax_mean


def _declined(q: Tensor, dropout: float) -> bool:
    reason = cpu.decline(q, dropout=dropout)
    if reason:
        _log_once(reason)
    return reason is not None


@lru_cache
def _log_once(reason: str) -> None:
    getLogger("recbft").info(reason)

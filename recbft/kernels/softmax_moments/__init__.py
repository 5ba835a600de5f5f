"""Softmax moments: the paths there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from recbft.kernels import dispatch
from recbft.kernels.dispatch import Path
from recbft.kernels.softmax_moments import cpu, reference

PATHS = {
    "cpu": Path(lambda: cpu.softmax_moments, "cpu", cpu.decline),
    "reference": Path(lambda: reference.softmax_moments),
}
MEAN_PATHS = {
    "cpu": Path(lambda: cpu.softmax_mean, "cpu"),
    "reference": Path(lambda: reference.softmax_mean),
}


def choose(impl: str, q: Tensor, *, dropout: float) -> Callable[..., Any]:
    """The path for the moments."""
    return dispatch.choose(impl, PATHS, q, dropout=dropout)


def choose_mean(q: Tensor) -> Callable[..., Any]:
    """The path for the mean alone, with or without dropout."""
    return dispatch.choose("auto", MEAN_PATHS, q)

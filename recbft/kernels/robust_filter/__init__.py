"""Robust filter attention: past tokens as noisy sightings of one state. Equations (9.6) to (9.12)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recbft.autograd.eager import eagerly
from recbft.core.belief import SequenceContext
from recbft.kernels.dispatch import Path, choose, late, late_decline
from recbft.kernels.robust_filter import c, reference
from recbft.kernels.robust_filter.dynamics import Clock, Dynamics, Variant, read_clock, turns
from recbft.kernels.robust_filter.reference import decayed_weights

PATHS = {
    "triton": Path(late("robust_filter", "robust_filter"), "cuda", late_decline("robust_filter"), opened=True),
    "c": Path(lambda: c.robust_filter, "cpu", c.decline, opened=True),
    "isotropic": Path(lambda: reference.isotropic, opened=True),
    "reference": Path(lambda: reference.robust_filter_ref),
}

__all__ = ["PATHS", "Clock", "Dynamics", "Variant", "decayed_weights", "filtered", "read_clock", "turns"]


@eagerly
def filtered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    dynamics: Dynamics,
    clock: Clock,
    variant: Variant,
    *,
    dropout: float = 0.0,
    impl: str = "auto",
    **call: Any,
) -> tuple[Tensor, Tensor]:
    """The state and its evidence by the path for the call; arguments as those of ``robust_filter_ref``."""
    path = choose(impl, PATHS, q, dropout=dropout, by_position=clock.by_position)
    value, evidence = path(q, k, v, context, dynamics, clock, variant, dropout=dropout, **call)
    return value, evidence

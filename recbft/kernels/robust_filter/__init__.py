"""Robust filter attention: past tokens as noisy sightings of one state. Equations (9.6) to (9.12)."""

from __future__ import annotations

from torch import Tensor

from recbft.autograd.boundaries import eagerly
from recbft.core.belief import SequenceContext
from recbft.kernels.dispatch import Path, choose, late, late_decline
from recbft.kernels.robust_filter import c, reference
from recbft.kernels.robust_filter.dynamics import Clock, Dynamics, Setting, Variant, read_clock, turns
from recbft.kernels.robust_filter.reference import decayed_weights

PATHS = {
    "triton": Path(late("robust_filter", "robust_filter"), "cuda", late_decline("robust_filter"), opened=True),
    "c": Path(lambda: c.robust_filter, "cpu", c.decline, opened=True),
    "isotropic": Path(lambda: reference.isotropic, opened=True),
    "reference": Path(lambda: reference.robust_filter_ref),
}

__all__ = ["PATHS", "Clock", "Dynamics", "Setting", "Variant", "decayed_weights", "filtered", "read_clock", "turns"]


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
    key_bias: Tensor | None = None,
    dropout: float = 0.0,
    with_evidence: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The state and its evidence at every position.

    Args:
        q, k, v: (B, H, T, K) complex.
        context: which token may read which.
        dynamics: scalars (H,); for the reference also (H, K), every coordinate its own, but for dof and temperature.
        clock: when each token asks and is read.
        key_bias: b of (9.11), (B, T).
        dropout: probability of dropping a weight of (9.11).
        impl: ``auto`` takes the fastest path that serves the call; the names of ``PATHS`` force one.

    Returns:
        The estimate (B, H, T, K), complex, and the evidence: (B, H, T), or (B, H, T, K) for scalars (H, K); zeros where
        nothing may be read. None for the evidence that is not asked for.
    """
    setting = Setting(context, dynamics, clock, variant)
    path = choose(impl, PATHS, q, dropout=dropout, by_position=clock.by_position)
    value, evidence = path(q, k, v, setting, key_bias=key_bias, dropout=dropout, with_evidence=with_evidence)
    return value, evidence

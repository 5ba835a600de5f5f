"""Associative memories as filters: the Bayesian layer (9.15 to 9.18), delta and additive rules (9.19 to 9.21)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recbft.kernels.dispatch import Path, choose, late, late_decline
from recbft.kernels.memory import chunked, reference
from recbft.kernels.memory.reference import MemoryEvent, MemoryTrace, check_positive

FILTER = {
    "triton": Path(late("memory", "filter_memory"), "cuda", late_decline("memory"), opened=True),
    "chunked": Path(lambda: chunked.filter_memory, decline=chunked.decline, opened=True),
    "reference": Path(lambda: reference.filter_memory_ref),
}
UNFILTERED = {
    "chunked": Path(lambda: chunked.unfiltered_memory, decline=chunked.decline, opened=True),
    "reference": Path(lambda: reference.unfiltered_memory_ref),
}


def filter_memory(
    events: MemoryEvent,
    prior_variance: Tensor,
    first: Tensor | None,
    *,
    chunk: int | None = None,
    impl: str = "auto",
) -> MemoryTrace:
    """The Bayesian layer; arguments as those of ``reference.filter_memory_ref``.

    A covariance that rounding has made negative is warned about.
    """
    path = choose(impl, FILTER, events.value, key_width=events.key.shape[-1], transition=events.transition)
    trace: MemoryTrace = path(events, prior_variance, first, chunk=chunk)
    check_positive(trace.readout_variance, trace.gain, events.observation_noise)
    return trace


def unfiltered_memory(
    q: Tensor, k: Tensor, v: Tensor, *, transition: Tensor | None, impl: str = "auto", **how: Any
) -> tuple[Tensor, Tensor]:
    """A memory without a covariance; arguments as those of ``reference.unfiltered_memory_ref``."""
    path = choose(impl, UNFILTERED, v, key_width=k.shape[-1], transition=transition)
    readout, mean = path(q, k, v, transition=transition, **how)
    return readout, mean

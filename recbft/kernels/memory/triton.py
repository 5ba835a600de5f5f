"""The Bayesian layer on a GPU: a launch in each direction, the belief kept on the chip from chunk to chunk.

For the backward pass the beliefs at the entries of chunks are stored, and the factors of their covariances; the rest of
a chunk is made again.

Shapes: B rows, H heads, T tokens, N = B H, n chunks of C tokens, K key width, M value width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable, transformed
from recbft.kernels.dispatch import interpreted
from recbft.kernels.memory.chunked import chunk_length, decay_refusal
from recbft.kernels.memory.positivity import report_loss
from recbft.kernels.memory.trace import MemoryTrace
from recbft.kernels.memory.triton_sweeps import backwards, forwards

CHUNK = 16  # the factor takes as many steps whatever the length, and shorter chunks leave registers to the belief
MAX_WIDTH = 64  # what a belief and its gradient may take of the chip
MAX_LOG_DECAY = 24.0  # within a chunk: e^-48 times a gradient is still a float32, and so is e^48 times a noise


def decline(v: Tensor, *, key_width: int, transition: Tensor | None) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    if v.dtype != torch.float32:
        return f"needs float32, got {v.dtype}"
    if max(key_width, v.shape[-1]) > MAX_WIDTH:
        return f"serves widths up to {MAX_WIDTH}, got keys of {key_width} and values of {v.shape[-1]}"
    if transition is not None and transition.is_complex():
        return "does not turn pairs of rows (a complex transition)"
    return None if transition is None else decay_refusal(transition, MAX_LOG_DECAY)


def filter_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    transition: Tensor | None,
    process_noise: Tensor,
    observation_noise: Tensor,
    prior_variance: Tensor,
    first: Tensor | None,
    chunk: int | None = None,
) -> MemoryTrace:
    """The same as the reference; ``chunk`` is the longest chunk."""
    longest = CHUNK if chunk is None else min(chunk, CHUNK)
    step = chunk_length(k.shape[2], longest, transition, MAX_LOG_DECAY)
    inputs = (q, k, v, transition, process_noise, observation_noise, prior_variance)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    *trace, raised, least = applied(_Filter, *inputs, first, step, learns or transformed())
    if not transformed() and bool(raised.any()):
        report_loss(int(raised.sum()), observation_noise.numel(), least.min().item() - 1)
    return MemoryTrace(*trace)


class _Filter(torch.autograd.Function):
    """The trace, then by program how many pivots were raised, and the least pivot in units of its noise."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transition: Tensor | None,
        process_noise: Tensor,
        observation_noise: Tensor,
        prior_variance: Tensor,
        first: Tensor | None,
        step: int,
        kept: bool,
    ) -> tuple[Tensor, ...]:
        given = (q, k, v, transition, process_noise, observation_noise, prior_variance, first)
        inputs = [None if x is None else x.contiguous() for x in given]
        (B, H, T, K), M, n = k.shape, v.shape[-1], -(-k.shape[2] // step)
        settings = _settings(k, v, transition, step)
        C = settings["C"]
        states = [v.new_empty(shape if kept else 0) for shape in ((B, H, n, K, M), (B, H, n, K, K), (B, H, n, C, C))]
        readout, spread, gain, mean, covariance = (
            v.new_empty(B, H, *shape) for shape in ((T, M), (T,), (T,), (K, M), (K, K))
        )
        raised, least = v.new_zeros(B, H, dtype=torch.int32), v.new_empty(B, H)
        outputs = (readout, spread, gain, mean, covariance)
        if B * H:
            forwards[(B * H,)](*inputs, *outputs, *states, raised, least, **settings, KEPT=kept)
        ctx.save_for_backward(*inputs, *states)
        ctx.step = step
        ctx.mark_non_differentiable(raised, least)
        return *outputs, raised, least

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        q, k, v, transition, process_noise, observation_noise, prior_variance, _ = saved[:8]
        g_readout, g_spread, g_gain, g_mean, g_covariance = (g.contiguous() for g in gradients[:5])
        inputs = (q, k, v, transition, process_noise, observation_noise, prior_variance)
        found = [None if x is None else torch.empty_like(x) for x in inputs]
        if len(q) and q.shape[1]:
            settings = _settings(k, v, transition, ctx.step)
            backwards[(q.shape[0] * q.shape[1],)](
                *saved, g_readout, g_spread, g_gain, g_mean, g_covariance, *found, **settings
            )
        return *found, None, None, None


def _settings(k: Tensor, v: Tensor, transition: Tensor | None, step: int) -> dict[str, Any]:
    """What both kernels are told, by name."""
    _, H, T, K = k.shape
    M = v.shape[-1]
    widths = [max(16, triton.next_power_of_2(size)) for size in (step, K, M)]
    return {
        "H": H,
        "T": T,
        "K": K,
        "M": M,
        "step": step,
        "n": -(-T // step),
        "DECAYS": transition is not None,
        "PER_ROW": transition is not None and transition.shape[-1] > 1,
        "PRECISION": "ieee" if interpreted() else "tf32x3",
        **dict(zip(("C", "WK", "WM"), widths, strict=True)),
        "num_warps": 4 if max(widths) <= 32 else 8,
        "num_stages": 1,  # a chunk waits for the one before it: nothing to load ahead
    }

"""Memories chunk by chunk, and exact: linear time, and memory for one chunk and the states between chunks.

Chunks are as equal as they can be; the last is filled with tokens that change nothing (key, query and noise 0). Inside
a chunk the Bayesian layer is one factorisation (``chunk``). Memories without a covariance (delta and additive rules)
are simpler. With keys and queries at the chunk's entry (``transport``: k_j <- e^{c_j} k_j), b_j = e^{-c_j} k_j for
writing and w_j what is written,

    reset (9.19)     w_i = eta_i * (v_i - M' k_i - sum_{j < i} (k_i' b_j) w_j)                              (a)
    additive (9.21)  w_i = omega_i * v_i
    y_t = M' q_t + sum_{j <= t} (q_t' b_j) w_j       exit  M <- e^{c_C} (M + sum_j b_j w_j')                (b)

The sum of (a) is a forward substitution, which an eta per column does not make longer. Its backward goes from the last
token to the first; with z the gradient of w, g that of v and h that of eta,

    t_i = z_i - sum_{l > i} (k_l' b_i) g_l       g_i = eta_i * t_i       h_i = t_i * w_i / eta_i            (c)

Shapes: B rows, H heads, T tokens, N = B H, n chunks of C tokens, K key width, M value width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, behind_transforms, once_differentiable, transformed, untransformed
from recbft.kernels.memory.chunk import ChunkMasks, FilterChunk
from recbft.kernels.memory.reference import MemoryEvent, MemoryTrace, Rule
from recbft.kernels.memory.transport import restarted_sum, transport, turn_back

CHUNK = 32
LEAST_CHUNK = 4
KEPT_BYTES = 2**28  # of a call that would save more, every chunk is made again in the backward
MAX_LOG_DECAY = {torch.float32: 80.0, torch.float64: 600.0}  # within a chunk, so that e^c and e^-c are finite


def decline(v: Tensor, *, key_width: int, transition: Tensor | None) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    return None if transition is None else decay_refusal(transition, MAX_LOG_DECAY[v.dtype])


def decay_refusal(transition: Tensor, max_log_decay: float) -> str | None:
    """Why the shortest chunk is too long for a transition, or None where it is not."""
    rate = _decay_rate(transition)
    if rate * LEAST_CHUNK <= max_log_decay:
        return None
    return (
        f"a transition of {math.exp(-rate):.3g} leaves less than e^-{max_log_decay:g} of a memory within {LEAST_CHUNK} "
        "tokens"
    )


def chunk_length(T: int, longest: int, transition: Tensor | None, max_log_decay: float) -> int:
    """C: no more than ``longest`` nor than the decay allows, and such that chunks are nearly equal."""
    if transition is not None and (rate := _decay_rate(transition)) > 0:
        longest = min(longest, int(max_log_decay / rate))
    num_chunks = -(-T // max(1, longest))
    return -(-T // num_chunks)


def filter_memory(
    events: MemoryEvent, prior_variance: Tensor, first: Tensor | None, *, chunk: int | None = None
) -> MemoryTrace:
    """The same as the reference."""
    q, k, v, transition, process_noise, observation_noise = events
    B, H, T, _ = k.shape
    C = chunk_length(T, CHUNK if chunk is None else chunk, transition, MAX_LOG_DECAY[v.dtype])
    starts = None if first is None else cut_scalar(first[:, None].expand(B, H, T), C, fill=False)
    a = None if transition is None else cut(transition, C, fill=1.0)
    ell2, r2 = cut_scalar(process_noise, C, fill=0.0), cut_scalar(observation_noise, C, fill=1.0)
    moved = transport(cut(q, C), cut(k, C), a, ell2, prior_variance.reshape(-1), starts)
    inputs = (moved.query, moved.key, moved.noisy_key, cut(v, C), r2, moved.log_decay, moved.noise, moved.skew)
    chunks = list(zip(*([None] * r2.shape[1] if part is None else part.unbind(1) for part in inputs), strict=True))
    masks = history_masks(starts, C, like=r2)
    kept = B * H * T * (3 * k.shape[-1] + v.shape[-1] + 2 * C) * v.element_size() <= KEPT_BYTES
    mended = transformed() or not _waits(v)
    readings, P, M, failed = _sweep(chunks, masks, kept, mended)
    if not mended and bool(torch.stack(failed).any()):
        readings, P, M, _ = _sweep(chunks, masks, kept, True)
    readout, spread, gain = (torch.stack(part, dim=1) for part in zip(*readings, strict=True))
    if moved.turn is not None:
        M, P = turn_back(M, P, moved.turn)
    return MemoryTrace(
        join(readout, B, H, T),
        join(spread + moved.read_noise, B, H, T),
        join(gain, B, H, T),
        M.unflatten(0, (B, H)),
        P.unflatten(0, (B, H)),
    )


def unfiltered_memory(
    q: Tensor, k: Tensor, v: Tensor, *, transition: Tensor | None, share: Tensor, rule: Rule, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same as the reference."""
    B, H, T, K = k.shape
    C = chunk_length(T, CHUNK, transition, MAX_LOG_DECAY[v.dtype])
    starts = None if first is None else cut_scalar(first[:, None].expand(B, H, T), C, fill=False)
    q, k, v, share = (cut(x, C) for x in (q, k, v, share))
    write, out = k, None
    if transition is not None:
        c = restarted_sum(cut(transition, C, fill=1.0).log(), starts)  # (N, n, C, K or 1)
        out = c.exp()
        # Not k / e^c, whose gradient has e^-2c.
        q, k, write = q * out, k * out, k * (-c).exp()
    ends = [None] * k.shape[1] if out is None else out[:, :, -1, :, None].unbind(1)
    state = k.new_zeros(len(k), K, v.shape[-1])
    readouts = []
    per_chunk = (x.unbind(1) for x in (q, k, write, v, share))
    for qs, ks, bs, vs, shares, end, masks in zip(*per_chunk, ends, history_masks(starts, C, like=v), strict=True):
        entry = 1.0 if masks.entry is None else masks.entry
        if rule == "reset":
            overlap = torch.bmm(ks, bs.mT) * masks.same
            written = applied(_Substitute, overlap, shares, vs - torch.bmm(ks, state) * entry)
        else:
            written = shares * vs
        readouts.append(torch.bmm(qs, state) * entry + torch.bmm(torch.bmm(qs, bs.mT) * masks.same, written))
        if masks.last is not None:
            state, written = state * masks.stays, written * masks.last
        # Brought to the exit before they are summed: e^-c alone may be large.
        state = state + torch.bmm(bs.mT, written) if end is None else state * end + torch.bmm((bs * end.mT).mT, written)
    return join(torch.stack(readouts, dim=1), B, H, T), state.unflatten(0, (B, H))


def _sweep(
    chunks: list[tuple[Any, ...]], masks: list[ChunkMasks], kept: bool, mended: bool
) -> tuple[list[list[Tensor]], Tensor, Tensor, list[Tensor]]:
    """Readings of all chunks, the covariance and mean at the end, and where a factor was not found."""
    P = M = None
    readings, failed = [], []
    for parts, of_chunk in zip(chunks, masks, strict=True):
        *reading, P, M, info = applied(FilterChunk, P, M, *parts, *of_chunk, kept, mended)
        readings.append(reading)
        failed.append(info)
    assert P is not None and M is not None
    return readings, P, M, failed


def _waits(x: Tensor) -> bool:
    """Whether to look at a number is to wait for all that was asked of the device before."""
    return x.device.type != "cpu"


def history_masks(first: Tensor | None, C: int, *, like: Tensor) -> list[ChunkMasks]:
    """Masks of every chunk, from (N, n, C) marks of where a history begins, or None where all begin at column 0."""
    causal = torch.ones(C, C, dtype=like.dtype, device=like.device).tril()
    if first is None:
        return [ChunkMasks(causal[None])] * like.shape[1]
    history = first.cumsum(dim=2)  # within the chunk, 0 for the one at its entry
    same = (history[..., :, None] == history[..., None, :]) * causal
    last = history[..., -1:]
    entry, ends, stays = (x[..., None].to(like.dtype) for x in (history == 0, history == last, last == 0))
    return [ChunkMasks(*parts) for parts in zip(*(x.unbind(1) for x in (same, entry, ends, stays)), strict=True)]


def cut(x: Tensor, C: int, *, fill: float = 0.0) -> Tensor:  # (B, H, T, K) -> (B H, n, C, K)
    """A sequence in chunks."""
    B, H, T, K = x.shape
    n = -(-T // C)
    if n * C > T:
        x = torch.cat((x, x.new_full((), fill).expand(B, H, n * C - T, K)), dim=2)
    return x.reshape(B * H, n, C, K)


def join(x: Tensor, B: int, H: int, T: int) -> Tensor:  # (B H, n, C, ...) -> (B, H, T, ...)
    """Chunks as the sequence they were cut from."""
    joined: Tensor = x.flatten(1, 2).unflatten(0, (B, H))
    return joined[:, :, :T]


def cut_scalar(x: Tensor, C: int, *, fill: float) -> Tensor:  # (B, H, T) -> (B H, n, C)
    """The same of one number per token."""
    return cut(x[..., None], C, fill=fill)[..., 0]


@untransformed
def _decay_rate(transition: Tensor) -> float:
    """The largest -log |a|; infinite where a transition is not positive."""
    if transition.numel() == 0:
        return 0.0
    a = behind_transforms(transition).detach()
    least = (a.abs() if a.is_complex() else a).min().item()
    return -math.log(least) if least > 0 else math.inf


class _Substitute(torch.autograd.Function):
    """w of (a) from k_i' b_j (N, C, C), of which the part below the diagonal counts, eta and v_i - M' k_i (N, C, M)."""

    @staticmethod
    def forward(ctx: Any, overlap: Tensor, share: Tensor, innovation: Tensor) -> Tensor:
        left = innovation.clone()  # of which what was written before is taken off
        written = torch.empty_like(left)
        for i in range(left.shape[1]):
            if i:
                left[:, i : i + 1].baddbmm_(overlap[:, i : i + 1, :i], written[:, :i], alpha=-1)
            torch.mul(share[:, i], left[:, i], out=written[:, i])
        ctx.save_for_backward(overlap, share, left, written)
        return written

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, z: Tensor) -> Any:
        overlap, share, left, written = ctx.saved_tensors
        t, g = z.clone(), torch.empty_like(z)
        for i in reversed(range(z.shape[1])):
            if i + 1 < z.shape[1]:
                t[:, i : i + 1].baddbmm_(overlap[:, i + 1 :, i : i + 1].mT, g[:, i + 1 :], alpha=-1)
            torch.mul(share[:, i], t[:, i], out=g[:, i])
        g_overlap = torch.bmm(g, written.mT).tril_(-1).neg_()
        return g_overlap, (t * left).sum_to_size(share.shape), g

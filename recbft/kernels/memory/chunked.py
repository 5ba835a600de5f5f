"""The Bayesian layer chunk by chunk: linear time, and memory for one chunk and the beliefs between chunks.

Chunks are as equal as they can be; the last is filled with tokens that change nothing (key, query and noise 0).

Shapes: B rows, H heads, T tokens, N = B H, n chunks of C tokens, K key width, M value width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, behind_transforms, transformed, untransformed
from recbft.kernels.memory.chunk import ChunkMasks, FilterChunk
from recbft.kernels.memory.trace import MemoryTrace
from recbft.kernels.memory.transport import transport, turn_back

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

"""SiLU moments on a GPU, in tiles of readers (tokens that read) by keys.

One kernel of ``triton_passes`` goes over keys for each tile of readers; backward, one does so again and one goes over
readers for each tile of keys. Every number is written once, by one program that adds in a fixed order, so two runs are
equal bit for bit. Of shape (T, T) there is the bias alone, and its gradient for each head until the heads that share it
are added up.

Sums are float32, and all moments but e are kept so. N divides sums, not weights, whose squares would be lost in
float16; for the same reason products take float16 as float32.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from recbft.autograd.boundaries import exact_products
from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import SequenceContext, SiluMoments
from recbft.core.silu import total_bias
from recbft.kernels import dispatch, readable
from recbft.kernels.silu_moments import product_dtype
from recbft.kernels.silu_moments.triton_passes import forward_pass, keys_pass, readers_pass

OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def silu_moments(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, **biases: Tensor | None
) -> SiluMoments:
    """The same as the reference; e in the type of v, the other moments in float32."""
    bias = total_bias(q, context, **biases)
    history = (context.segment.contiguous(), context.position.contiguous())
    return SiluMoments(
        *applied(_SiluMoments, readable(q), readable(k), readable(v), bias, *history, context.causal, length)
    )


def silu_mean(*call: Any, **more: Any) -> Tensor:
    """The mean alone; the other moments cost a kernel next to nothing."""
    return silu_moments(*call, **more).mean


class _SiluMoments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        segment: Tensor,
        position: Tensor,
        causal: bool,
        length: int,
    ) -> tuple[Tensor, ...]:
        grid, told = _launch(q, k, v, causal, length)
        mean = torch.empty_like(v)
        square_mean, square_second = (torch.empty_like(v, dtype=torch.float32) for _ in range(2))
        weight_sum, square_sum = (torch.empty(v.shape[:3], dtype=torch.float32, device=v.device) for _ in range(2))
        found = (mean, weight_sum, square_sum, square_mean, square_second)
        if v.numel():
            strides = (*_strides(q, k, v), *_bias_strides(bias, q), *_strides(mean))
            forward_pass[grid](q, k, v, bias, segment, position, *found, *strides, **told)
        ctx.save_for_backward(q, k, v, bias, segment, position)
        ctx.launch = grid, told
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        q, k, v, bias, segment, position = ctx.saved_tensors
        grid, told = ctx.launch
        of_all = any(grad is not None for grad in grads[1:])  # else what they would add is left out
        wide, narrow = v.shape, v.shape[:3]
        g, g1, g2, h1, h2 = (
            _gradient(grad, shape, v) if of_all or place == 0 else None
            for place, (grad, shape) in enumerate(zip(grads, (wide, narrow, narrow, wide, wide), strict=True))
        )
        given = (q, k, v, bias, segment, position, g, g1, g2, h1, h2)
        strides = (*_strides(q, k, v, g, h1, h2), *_bias_strides(bias, q))
        d_q, d_k, d_v, d_pairs = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
        if bias is not None and ctx.needs_input_grad[3]:  # zero where nothing is read
            d_pairs = torch.zeros(*q.shape[:3], q.shape[2], dtype=torch.float32, device=v.device)
        if v.numel():
            readers_pass[grid](*given, d_q, d_pairs, *strides, *_strides(d_q), ALL=of_all, **told)
            keys_pass[grid](*given, d_k, d_v, *strides, *_strides(d_k, d_v), ALL=of_all, **told)
        d_bias = None if d_pairs is None else d_pairs.sum_to_size(bias.shape).to(bias.dtype)
        return d_q, d_k, d_v, d_bias, None, None, None, None


class Tiles(NamedTuple):
    """Tokens that a program holds, those that it meets at a time, and its warps."""

    own: int
    other: int
    warps: int


# By the bytes of a token's operand in a head: the largest that (almost) fit the registers.
TILES = {64: Tiles(64, 32, 4), 128: Tiles(32, 32, 4), 256: Tiles(32, 32, 8), 512: Tiles(16, 16, 8)}
# Products of float32 to its own precision hold more.
TILES_OF_EXACT = {64: Tiles(64, 16, 4), 128: Tiles(64, 16, 4), 256: Tiles(16, 16, 2), 512: Tiles(16, 16, 4)}
# What differs on Hopper, by the type of products and whether they are exact: 64 tokens and four warps read operands
# from shared memory there, and leave a token's row to one warp, whose sums need no barrier.
TILES_ON_HOPPER = {
    (torch.bfloat16, False): {128: Tiles(64, 64, 4)},
    (torch.float32, False): {128: Tiles(64, 32, 4), 256: Tiles(64, 32, 4)},
    (torch.float32, True): {64: Tiles(64, 32, 4), 128: Tiles(64, 32, 4)},
}


def _launch(q: Tensor, k: Tensor, v: Tensor, causal: bool, length: int) -> tuple[tuple[int], dict[str, Any]]:
    """How many programs all kernels are launched with, and what they are told by name."""
    B, H, T, K = q.shape
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    exact, kind = dtype == torch.float32 and exact_products(), product_dtype(dtype)
    width = max(16, 1 << (K - 1).bit_length())
    row_bytes = max(64, width * kind.itemsize)
    there = TILES_ON_HOPPER[kind, exact] if dispatch.on_hopper(q) else {}
    tiles = there.get(row_bytes) or (TILES_OF_EXACT if exact else TILES)[row_bytes]
    told = {
        "H": H,
        "T": T,
        "scale": 1 / math.sqrt(K),
        "share": 1 / length,
        "CAUSAL": causal,
        "K": K,
        "W": width,
        "OWN": tiles.own,
        "OTHER": tiles.other,
        "OPERAND": OPERANDS[kind],
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": tiles.warps,
        "num_stages": 1,
    }
    return (B * H * -(-T // tiles.own),), told


def _gradient(grad: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    """A gradient that kernels can read: of vectors with any strides between tokens, of scalars without gaps."""
    if grad is None:
        return torch.zeros(shape, dtype=torch.float32, device=like.device)
    return readable(grad) if len(shape) == 4 else grad.contiguous()


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Of rows, heads and tokens, for each tensor in turn."""
    return tuple(s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()[:3]))


def _bias_strides(bias: Tensor | None, q: Tensor) -> tuple[int, ...]:
    """Of rows, heads, readers and keys; 0 along what it is the same for."""
    if bias is None:
        return (0, 0, 0, 0)
    return bias.expand(*q.shape[:3], q.shape[2]).stride()

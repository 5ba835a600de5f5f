"""Dropout whose random bits are drawn 64 at a time: PyTorch's own draws them element by element on the CPU.

    keep_i = [bits_i >= p 2^16]        y_i = x_i keep_i / (1 - p')                              (a)

with 16 random bits per element and p' the share of 2^16 that is dropped: p to within 2^-17. The scale uses p', so the
mean is exact. The bits come from PyTorch's default generator, which a checkpoint keeps, unless another is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.autograd.boundaries import eagerly
from recbft.autograd.transforms import once_differentiable
from recbft.kernels import c_library
from recbft.kernels.dispatch import Path, choose

LEVELS = 2**16


@eagerly
def dropout(x: Tensor, p: float) -> Tensor:
    """Equation (a); on other devices, and under torch.func, PyTorch's own."""
    if p <= 0:
        return x
    y: Tensor = choose("auto", PATHS, x)(x, p)
    return y


def scaled_mask(like: Tensor, p: float) -> Tensor:
    """keep / (1 - p'), in the shape and type of ``like``."""
    return mask_of(random_bits(like.shape), p, like.dtype)


def random_bits(shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """16 bits per element as int16, on the generator's device; equal sizes take equal bits, whatever their shape."""
    count, device = math.prod(shape), None if generator is None else generator.device
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device).random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count].view(*shape)


def mask_of(bits: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """keep / (1 - p') of (a), in the shape of ``bits``."""
    least, scale = _kept(p)
    if dtype in (torch.float32, torch.float64):  # the same numbers in a third of the time: these hold 16 bits exactly
        keep = bits.to(dtype).sub_(least - 1).clamp_(0, 1)
    else:
        keep = (bits >= least).to(dtype)
    return keep.mul_(scale)


def _kept(p: float) -> tuple[int, float]:
    """The least bits, as an int16, of what is kept, and 1 / (1 - p')."""
    dropped = min(LEVELS - 1, round(p * LEVELS))
    return dropped - LEVELS // 2, LEVELS / (LEVELS - dropped)


def _by_bits(x: Tensor, bits: Tensor, p: float) -> Tensor:
    """Equation (a) in C (``kernel.c``): the same numbers in one pass over memory."""
    least, scale = _kept(p)
    x = x.contiguous()
    y = torch.empty_like(x)
    c_library.library().dropout(c_int64(x.numel()), c_int32(least), c_float(scale), *c_library.pointers(bits, x, y))
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask = scaled_mask(x, p)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class _DropoutInC(torch.autograd.Function):
    """The same, which keeps the bits, half as large as the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        bits = random_bits(x.shape)
        ctx.save_for_backward(bits)
        ctx.p = p
        return _by_bits(x, bits, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _by_bits(grad, ctx.saved_tensors[0], ctx.p), None


def _decline(x: Tensor) -> str | None:
    return c_library.missing() if x.dtype == torch.float32 else f"serves float32, got {x.dtype}"


PATHS = {
    "c": Path(lambda: _DropoutInC.apply, "cpu", _decline, takes_halves=True),
    "torch": Path(lambda: _Dropout.apply, "cpu", takes_halves=True),
    "reference": Path(lambda: F.dropout, takes_halves=True),
}


class Dropout(nn.Module):
    """Dropout of the module's inputs while it is in training mode."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x, any shape."""
        return dropout(x, self.p) if self.training else x

    def extra_repr(self) -> str:
        """The probability, as PyTorch's own shows it."""
        return f"p={self.p}"

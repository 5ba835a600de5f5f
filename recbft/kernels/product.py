"""Products of layers and scorers by the fastest library at hand, linear maps with weights for every seed, and updates.

    y = x W' + b        dx = g W        dW = g' x        db = sum_n g_n                                      (a)
    y_n = W x_n + k_n v_n        dW = g' x        dv_n = k_n g_n        dk_n = g_n . v_n                     (b)

On CPU tensors in single precision that library is oneDNN on AMD processors, where MKL keeps to AVX2 and is half as
fast, and MKL on Intel's, where the scores of a catalogue take oneDNN twice as long. oneDNN keeps a program for each of
the last 1,024 shapes that it has met, which takes half a millisecond and half a megabyte to make: who multiplies by
ever other numbers of rows fills them up to ``common_size``.

``linear`` is (a) of several seeds, with gradients. On a CPU each seed's products are taken by themselves. Of dW and its
transpose the one with fewer rows is made, which takes less time. The norms of several seeds are in ``layer_norm``.

``updated_product`` is (b), which moves the product of constant x from there in the product's own memory. Of so many
rows with more inputs than outputs oneDNN takes half of MKL's time on Intel's processors as well.

Shapes: S seeds, N rows or tokens of each, I inputs, O outputs.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.boundaries import eagerly
from recbft.autograd.transforms import once_differentiable
from recbft.kernels import dispatch

_FEW = 16  # rows, whose product waits for the weight's memory: for one row oneDNN takes up to 2.5 times as long


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, room: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` without gradients; x (N, I), weight (O, I), of any strides.

    ``room``, (N, O), may be written over and be what is returned: one that is still in the cache is filled sooner.
    """
    if _ONEDNN is not None and len(x) > _FEW and _is_single_on_cpu(x):
        y: Tensor = _ONEDNN(x, weight, bias, "none", [], "")
        return y
    return torch.mm(x, weight.T, out=room) if bias is None else torch.addmm(bias, x, weight.T, out=room)


def add_product(to: Tensor, x: Tensor, weight: Tensor) -> None:
    """``to += x @ weight.T`` without gradients; shapes as in ``product``."""
    if _ONEDNN is not None and _is_single_on_cpu(x):
        to += product(x, weight)
    else:
        to.addmm_(x, weight.T)


def common_size(size: int, like: Tensor) -> int:
    """Of the few numbers of rows that products should have, the next: by an eighth more at most, or 15."""
    if _ONEDNN is None or size <= _FEW or not _is_single_on_cpu(like):
        return size
    unit = max(_FEW, (1 << (size.bit_length() - 1)) // 8)
    return -(-size // unit) * unit


def _is_single_on_cpu(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def fastest_layout(weight: Tensor) -> Tensor:
    """The same weight (O, I), stored as a product of few inputs reads it fastest: for MKL by inputs."""
    if _ONEDNN is None and _is_single_on_cpu(weight):
        return weight.T.contiguous().T
    return weight


@lru_cache
def _find_onednn() -> Any:
    """PyTorch's entry to oneDNN's linear map; None in builds without it."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        found = torch.ops.mkldnn._linear_pointwise.default
        one = torch.ones(1, 1)
        return found if float(found(one, one, None, "none", [], "")) == 1.0 else None
    except (AttributeError, RuntimeError):
        return None


def _mkl_is_faster() -> bool:
    """On Intel's processors; not measured anew in each process, so that runs repeat to the last bit."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        processor = platform.processor()
    return "GenuineIntel" in processor


_ONEDNN = None if _mkl_is_faster() else _find_onednn()


@eagerly
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, impl: str = "auto") -> Tensor:
    """``x[s] @ weight[s].T + bias[s]`` for every seed s.

    Args:
        x: (S, N, I).
        weight, bias: (S, O, I), and (S, O) or None.
        impl: ``auto`` takes ``torch`` on a CPU and ``reference`` elsewhere; either can be forced.

    Returns:
        (S, N, O).
    """
    y: Tensor = dispatch.choose(impl, LINEAR, x)(x, weight, bias)
    return y


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The plain form of ``linear``, one batched product."""
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias[:, None], x, weight.mT)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        biases = [None] * len(x) if bias is None else list(bias)
        return torch.stack([product(*one) for one in zip(x, weight, biases, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        d_x = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = torch.stack([product(g, w.T) for g, w in zip(grad, weight, strict=True)])
        d_weight = torch.stack([_outer(g, points) for g, points in zip(grad, x, strict=True)])
        if ctx.needs_input_grad[2]:
            d_bias = grad.sum(dim=1)
        return d_x, d_weight, d_bias


def _outer(g: Tensor, x: Tensor) -> Tensor:
    """dW of one seed, (O, I)."""
    return product(g.T, x.T) if g.shape[1] <= x.shape[1] else product(x.T, g.T).T


LINEAR = {"torch": dispatch.Path(lambda: _Linear.apply, "cpu"), "reference": dispatch.Path(lambda: linear_ref)}


@eagerly
def updated_product(
    x: Tensor, weight: Tensor, own: Tensor, gain: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """Equation (b): ``x @ weight.T + gain[:, None] * own``.

    Args:
        x: (N, I), which has no gradient.
        weight: (O, I).
        own: v, (N, O).
        gain: k, (N,); None for ones.
        impl: ``auto`` takes ``torch`` on a CPU and ``reference`` elsewhere; either can be forced.

    Returns:
        (N, O).
    """
    y: Tensor = dispatch.choose(impl, UPDATED, x)(x, weight, own, gain)
    return y


def updated_product_ref(x: Tensor, weight: Tensor, own: Tensor, gain: Tensor | None) -> Tensor:
    """The plain form of ``updated_product``."""
    return F.linear(x, weight) + (own if gain is None else gain[:, None] * own)


class _UpdatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, own: Tensor, gain: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, own, *([] if gain is None else [gain]))
        onednn = _find_onednn() if _is_single_on_cpu(x) else None
        y: Tensor = x @ weight.T if onednn is None else onednn(x, weight, None, "none", [], "")
        return y.add_(own) if gain is None else y.addcmul_(gain[:, None], own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, own, *gain = ctx.saved_tensors
        _, wants_weight, wants_own, wants_gain = ctx.needs_input_grad
        d_weight = _outer(grad, x) if wants_weight else None
        d_gain = torch.bmm(grad[:, None], own[:, :, None])[:, 0, 0] if wants_gain else None
        d_own = (gain[0][:, None] * grad if gain else grad) if wants_own else None
        return None, d_weight, d_own, d_gain


UPDATED = {
    "torch": dispatch.Path(lambda: _UpdatedProduct.apply, "cpu"),
    "reference": dispatch.Path(lambda: updated_product_ref, takes_halves=True),
}

"""The product of a layer or a scorer, without gradients, by the fastest library at hand.

On CPU tensors in single precision that is oneDNN on AMD processors, where MKL keeps to AVX2 and is half as fast, and
MKL on Intel's, where the scores of a catalogue take oneDNN twice as long. oneDNN keeps a program for each of the last
1,024 shapes that it has met, which takes half a millisecond and half a megabyte to make: who multiplies by ever other
numbers of rows fills them up to ``common_size``.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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

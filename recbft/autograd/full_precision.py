"""Autocast stops here: what is estimated is estimated in float32.

Products with learned weights bear a short mantissa. Residual variances, precisions and running means do not: they are
differences of nearly equal numbers, or sums of many small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)

Function = TypeVar("Function", bound=Callable[..., Any])


def in_full_precision(function: Function) -> Function:
    """The function with autocast off while it runs, and half-precision arguments in float32; else as it is."""

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        device = autocast_device()
        if device is None:
            return function(*arguments, **named)
        with torch.autocast(device, enabled=False):
            return function(*(_widened(x) for x in arguments), **{name: _widened(x) for name, x in named.items()})

    return run  # type: ignore[return-value]


def autocast_device() -> str | None:
    """The kind of device for which autocast is on now, or None."""
    return next((device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)), None)


def exact_products() -> bool:
    """Whether PyTorch has a GPU multiply float32 to its own precision, and not as TF32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it tells of no precision of all backends once one has its own, by ``fp32_precision``
        return str(torch.backends.cuda.matmul.fp32_precision) != "tf32"


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in HALVES else x

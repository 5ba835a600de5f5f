"""Where what PyTorch does to a whole model stops: autocast before estimates, graphs of its compiler before kernels.

Products with learned weights bear a short mantissa. Residual variances, precisions and running means do not: they are
differences of nearly equal numbers, or sums of many small ones. So they are estimated in float32.

PyTorch's compiler traces with tensors that have no memory. What hands addresses to C or Triton, decides by the numbers,
or keeps what it found of a batch cannot be traced so, and has nothing to gain: it is the fast path already. Functions
written by hand stay out of the graphs of ``torch.compile`` and run between them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)

Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


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


def eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, of which ``torch.compile`` sees nothing.

    This is ``torch.compiler.disable``, asked for where something is compiled and not before: its import takes seconds.
    """

    @wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            from recbft.autograd.graph_break import call

            result: R = call(function, *arguments, **named)
            return result
        return function(*arguments, **named)

    # A limit of recompilations is kept per code object, which else all that is marked would share.
    run.__code__ = run.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return run

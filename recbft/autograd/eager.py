"""Functions written by hand stay out of the graphs of ``torch.compile`` and run between them.

PyTorch's compiler traces with tensors that have no memory. What hands addresses to C or Triton, decides by the numbers,
or keeps what it found of a batch cannot be traced so, and has nothing to gain: it is the fast path already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


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

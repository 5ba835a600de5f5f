"""Where graphs end (``boundaries``); imported by what is being compiled, since the import takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    """``function(*arguments, **named)``, in which nothing is compiled."""
    return function(*arguments, **named)

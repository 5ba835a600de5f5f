"""Associative memories as filters: the paths there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from recbft.kernels import dispatch
from recbft.kernels.dispatch import Path, late, late_decline
from recbft.kernels.memory import chunked, reference, unfiltered
from recbft.kernels.memory.reference import Rule
from recbft.kernels.memory.trace import MemoryEvent, MemoryReading, MemoryState, MemoryTrace, UnfilteredTrace

# Each mechanism's paths, by name.
FILTER = {
    "triton": Path(late("memory", "filter_memory"), "cuda", late_decline("memory"), opened=True),
    "chunked": Path(lambda: chunked.filter_memory, decline=chunked.decline, opened=True),
    "reference": Path(lambda: reference.filter_memory),
}
UNFILTERED = {
    "chunked": Path(lambda: unfiltered.unfiltered_memory, decline=chunked.decline, opened=True),
    "reference": Path(lambda: reference.unfiltered_memory),
}

__all__ = [
    "FILTER",
    "UNFILTERED",
    "MemoryEvent",
    "MemoryReading",
    "MemoryState",
    "MemoryTrace",
    "Rule",
    "UnfilteredTrace",
    "choose",
]


def choose(
    impl: str, paths: Mapping[str, Path], v: Tensor, *, key_width: int, transition: Tensor | None
) -> Callable[..., Any]:
    """The path for a call."""
    return dispatch.choose(impl, paths, v, key_width=key_width, transition=transition)

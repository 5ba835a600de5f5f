"""Associative memories as filters: which path serves a call, and why another declined (logged once per reason)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from logging import getLogger
from typing import TypeVar

from torch import Tensor

from recbft.kernels.memory import chunked, reference, unfiltered
from recbft.kernels.memory.reference import Rule
from recbft.kernels.memory.trace import MemoryEvent, MemoryReading, MemoryState, MemoryTrace, UnfilteredTrace

Path = TypeVar("Path", bound=Callable[..., object])

# Each mechanism's paths, by name.
FILTER: dict[str, Callable[..., MemoryTrace]] = {
    "reference": reference.filter_memory,
    "chunked": chunked.filter_memory,
}
UNFILTERED: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "reference": reference.unfiltered_memory,
    "chunked": unfiltered.unfiltered_memory,
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


def choose(paths: Mapping[str, Path], impl: str, transition: Tensor | None) -> Path:
    """The path for a call; ``auto`` takes the fast one where it serves, a forced one must serve."""
    if impl not in ("auto", *paths):
        raise ValueError(f"unknown impl {impl!r}; choose one of auto, {', '.join(sorted(paths))}")
    reason = None if impl == "reference" else chunked.decline(transition)
    if reason is None:
        return paths["chunked" if impl == "auto" else impl]
    if impl == "chunked":
        raise ValueError(reason)
    _log_once(reason)
    return paths["reference"]


@lru_cache
def _log_once(reason: str) -> None:
    getLogger("recbft").info(reason)

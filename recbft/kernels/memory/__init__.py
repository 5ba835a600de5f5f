"""Associative memories as filters: the paths there are."""

from __future__ import annotations

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
]

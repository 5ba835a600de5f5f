"""How long some work takes on a device, and how much memory: the clock of ``benchmarks.gpu_suite``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CLOCKS_AHEAD = 50_000_000  # that the GPU waits before a series, some 28 ms: all of it is asked for by then
SERIES = 10  # runs of one


class Clock:
    """Times and memory on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def seconds(self, work: Callable[[], Any], *, at_least: float = 0.2) -> float:
        """Median seconds of some work, after two warm-up rounds."""
        found: list[float] = []
        for _ in range(2):
            work()
        self._wait()
        began = time.perf_counter()
        while len(found) < 5 or (time.perf_counter() - began < at_least and len(found) < 200):
            start = time.perf_counter()
            work()
            self._wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def busy_seconds(self, work: Callable[[], Any]) -> float | None:
        """Median seconds that a GPU is at some work which is asked for ahead of it, so that no launch is waited for."""
        if self.device != "cuda":
            return None
        found: list[float] = []
        for _ in range(5):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(CLOCKS_AHEAD)
            began.record()
            for _ in range(SERIES):
                work()
            ended.record()
            self._wait()
            found.append(began.elapsed_time(ended) / 1e3 / SERIES)
        return statistics.median(found)

    def peak_mb(self, work: Callable[[], Any]) -> float | None:
        """MB that some work adds to what is allocated, at its peak; None without a GPU."""
        if self.device != "cuda":
            return None
        self._wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        self._wait()
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

"""How long some work takes on a device, and how much memory: the clock of ``benchmarks.gpu_suite``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

CLOCKS_AHEAD = 50_000_000  # that the GPU waits before a series, some 28 ms: all of it is asked for by then
SERIES = 10  # runs of one
AT_LEAST = 0.2  # seconds that a median is of, in 5 to 200 runs


class Clock:
    """Times and memory on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median seconds of some work, after two warm-up rounds."""
        found: list[float] = []
        for _ in range(2):
            work()
        self._wait()
        began = time.perf_counter()
        while len(found) < 5 or (time.perf_counter() - began < AT_LEAST and len(found) < 200):
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

    def kernels(self, work: Callable[[], Any]) -> tuple[float, int] | None:
        """Seconds that a GPU is at any kernel of some work, copies included, and their number, by the profiler.

        None where it sees none. It slows the work, and what the process does later.
        """
        if self.device != "cuda":
            return None
        self._wait()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work()
            self._wait()
        # Of what stands there for the device, ranges that the program has named are no work.
        events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in events
            if not getattr(event, "is_user_annotation", False)
        ]
        return (covered(spans) / 1e6, len(spans)) if spans else None

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


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line is covered by spans that may overlap, as those of several streams do."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total

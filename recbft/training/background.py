"""Work in another thread while this one keeps a GPU busy: the next batch, and the state of the epoch before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made by another thread while the caller works on the one before it.

    What making one raises is raised where it would be given. Given up early, it waits for the one being made.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as maker:
        coming = maker.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = maker.submit(next, items, end)
            yield item  # type: ignore[misc]


class Background:
    """One piece of work at a time, by a thread; what a piece raises there is raised at the next call.

    Args:
        in_thread: whether there is a thread; a piece is done at once where there is none.
    """

    def __init__(self, *, in_thread: bool = True) -> None:
        self.in_thread = in_thread
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="background")  # its thread begins with the first piece
        self._under_way: Future[None] | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Begin a piece of work, once that before it is done."""
        self.wait()
        if self.in_thread:
            self._under_way = self._worker.submit(work)
        else:
            work()

    def wait(self) -> None:
        """Until nothing is under way; an interrupt leaves under way what is. The thread ends with the object."""
        if self._under_way is not None:
            wait([self._under_way])
            done, self._under_way = self._under_way, None
            done.result()

"""Work for the epoch before in another thread while a GPU is given that of the next."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Behind:
    """One piece of work at a time, by a thread; what a piece raises there is raised at the next call.

    Args:
        in_thread: whether there is a thread; a piece is done at once where there is none.
    """

    def __init__(self, *, in_thread: bool = True) -> None:
        self.in_thread = in_thread
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="behind")  # whose thread begins with the first piece
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

"""Work for the epoch before in another thread while a GPU is given that of the next."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Behind:
    """A thread that does one piece of work at a time; what a piece raises is raised at the next call."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._under_way: Future[None] | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Begin a piece of work, once that before it is done."""
        self.wait()
        self._under_way = self._worker.submit(work)

    def wait(self) -> None:
        """Until nothing is under way; an interrupt leaves under way what is. The thread ends with the object."""
        if self._under_way is not None:
            wait([self._under_way])
            done, self._under_way = self._under_way, None
            done.result()

"""Work for the next step in another thread while a GPU is given that of this one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def made_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made by another thread while the caller works on the one before it.

    What making one raises is raised where it would be given. Given up early, it waits for the one being made.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as maker:
        coming = maker.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = maker.submit(next, items, end)
            yield item  # type: ignore[misc]

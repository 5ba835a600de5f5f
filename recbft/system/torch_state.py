"""What a process or a caller has set up in PyTorch, where it would decide what we make or whether we ever end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from logging import getLogger

import torch

FEW_PRODUCTS = 50_000_000  # multiplications, which take one core some 5 ms

_here = {"worked": False, "inherited": False}  # this process has; the one that it was forked from had by then


@contextmanager
def set_aside() -> Iterator[None]:
    """Go on without the caller's default device and autocast, in this thread; both are back afterwards.

    What is made here lies on the CPU until it is sent elsewhere, and ``training.autocast`` says what is rounded. The
    default dtype is the whole process's and stays.
    """
    with ExitStack() as held:
        if torch.empty(0).device.type != "cpu":  # PyTorch 2.6 tells of no `with torch.device`
            held.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                held.enter_context(torch.autocast(kind, enabled=False))
        yield


def one_thread_if_forked() -> None:
    """Before a model works: take one thread in a process that was forked from one in which PyTorch has worked.

    Such a process lacks its parent's OpenMP threads and would wait for them for ever. A server that loads a model once
    and forks its workers (``gunicorn --preload``) makes them. Where each worker loads the model itself, each may have
    more threads.
    """
    _here["worked"] = True
    if _here["inherited"] and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        getLogger("recbft").info(
            "this process was forked from one that had worked with a model, whose OpenMP threads it lacks: it goes on "
            "with one thread; fork before a model is loaded for more"
        )


@contextmanager
def threads_for(products: int) -> Iterator[None]:
    """Work on one thread where there is so little to do (multiplications) that waiting for others takes longer.

    Where other programs are at work too, a call of 5 ms took 100 ms of processor time on two threads, which spin.
    """
    threads = torch.get_num_threads()  # this thread's own: others have what they have
    if threads == 1 or products > FEW_PRODUCTS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _after_fork() -> None:
    _here["inherited"] = _here["worked"]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

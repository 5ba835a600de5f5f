"""What a caller works within: modes of PyTorch that would decide where and in what our tensors are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


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

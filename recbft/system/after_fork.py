"""Processes forked from one in which PyTorch has worked: they lack its OpenMP threads, and would wait for them.

A server that loads a model once and forks its workers (``gunicorn --preload``) makes such processes. They answer with
one thread, which is what a worker per core wants; where each loads the model itself, each may have more.
"""

from __future__ import annotations

import os
from logging import getLogger

import torch

_here = {"worked": False, "inherited": False}  # this process has; the one that it was forked from had by then


def one_thread_if_forked() -> None:
    """Before a model works: go on with one thread where a team of them would wait for the parent's for ever."""
    _here["worked"] = True
    if _here["inherited"] and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        getLogger("recbft").info(
            "this process was forked from one that had worked with a model, whose OpenMP threads it lacks: it goes on "
            "with one thread; fork before a model is loaded for more"
        )


def _after_fork() -> None:
    _here["inherited"] = _here["worked"]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

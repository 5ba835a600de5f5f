"""What torchrun tells each of the processes that it begins: how many there are, and which of them this is."""

from __future__ import annotations

import os
from typing import NamedTuple

from recbft.errors import UserError


class Process(NamedTuple):
    """One of the processes of a run."""

    rank: int = 0
    size: int = 1  # processes in all
    local_rank: int = 0
    local_size: int = 1  # processes on this machine

    @classmethod
    def of(cls, size: int) -> Process:
        """The first of several processes on one machine."""
        return cls(size=size, local_size=size)

    @property
    def leads(self) -> bool:
        """Whether the run's folder and what the user reads are this one's."""
        return self.rank == 0

    def command(self, command: str) -> str:
        """A command as these processes are begun with it."""
        if self.size == 1:
            return command
        machines = "--standalone" if self.local_size == self.size else f"--nnodes {self.size // self.local_size} ..."
        return f"torchrun {machines} --nproc-per-node {self.local_size} --no-python {command}"


def this_process() -> Process:
    """Which of them this one is, by its environment; alone where torchrun has not begun it."""
    size = _number("WORLD_SIZE", 1)
    if size <= 1:
        return Process()
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(
                f"WORLD_SIZE is {size}, but {name} is not set; begin the processes with torchrun, or unset WORLD_SIZE"
            )
    rank = _number("RANK", 0)
    if rank >= size:
        raise UserError(f"RANK is {rank}, but WORLD_SIZE is {size}; begin the processes with torchrun")
    local_size = max(1, _number("LOCAL_WORLD_SIZE", size))
    return Process(rank, size, _number("LOCAL_RANK", rank % local_size), local_size)


def refuse_several(what: str) -> None:
    """Refuse work, ``what``, that makes processes of its own, or that one process does."""
    size = this_process().size
    if size > 1:
        raise UserError(f"WORLD_SIZE is {size}: {what}; begin it without torchrun")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default

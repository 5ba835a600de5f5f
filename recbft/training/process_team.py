"""One run trained by several processes, as torchrun begins them: each learns from its share of every batch.

All of them read the same batches, of which process r takes every n-th row. PyTorch's DistributedDataParallel averages
gradients over the n processes, so each loss is weighted by the targets behind it, and the step is that of the batch:

    gradient = sum_r (N_r / N) gradient_r          N_r of the batch's N targets are in share r                    (a)

Where targets have weights, N and N_r are the sums of these.

Dropout and negatives are drawn by each process for its share (``in_batch`` negatives from its share's targets): the
numbers are those of another draw than one process would make, and without draws the same but for rounding. What is no
mean over targets is of shares: the penalties of mixers and experts by the same weights, and running means, in all
processes, those of the first one's.

Users are evaluated in n parts. The run's folder belongs to the first process: what it finds or refuses there, the
others hear from it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recbft.datasets.batches import HISTORIES_PER_BATCH, Batch
from recbft.errors import OneProcessError, RunError, UserError
from recbft.models.contract import TrainableModel
from recbft.system.memory import is_shortage
from recbft.system.torchrun import Process, this_process
from recbft.training.process_settings import seed_everything
from recbft.training.run_config import TrainingConfig

T = TypeVar("T")
_Outcome = tuple[Any, Exception | None]  # what was made, or why it was not


class Team:
    """The processes of a run, seen from one of them; ``ALONE`` does everything itself."""

    def __init__(self, here: Process) -> None:
        self.process = here

    @property
    def leads(self) -> bool:
        return self.process.leads

    @property
    def several(self) -> bool:
        return self.process.size > 1

    def first_does(self, work: Callable[[], T]) -> T:
        """What the first process makes of it, which the others wait for and get too; so an error that it has."""
        if not self.several:
            return work()
        own: _Outcome = _outcome(work) if self.leads else (None, None)
        said = [self._told(own)]
        dist.broadcast_object_list(said, src=0)
        made: T = _result(own if self.leads else said[0])
        return made

    def each_does(self, count: int, work: Callable[[slice], T]) -> list[T]:
        """What the processes make of their parts of ``count`` users, in order; a part may be empty.

        An error of one is raised in every process.
        """
        if not self.several:
            return [work(slice(0, count))]
        # Cut between the batches that one process would read.
        here, blocks = self.process, -(-count // HISTORIES_PER_BATCH)
        start, stop = (min(count, blocks * r // here.size * HISTORIES_PER_BATCH) for r in (here.rank, here.rank + 1))
        own = slice(start, stop)
        return self._gathered(_outcome(lambda: work(own)))

    def gathered(self, own: T) -> list[T]:
        """The same from every process, in order."""
        return self._gathered((own, None)) if self.several else [own]

    def wait(self) -> None:
        """Until all processes have come here."""
        self.gathered(None)

    def draw_apart(self, seed: int, device: torch.device) -> None:
        """Let the processes draw different random numbers from here on; the first one those of a process alone."""
        if not self.leads:
            drawn = np.random.SeedSequence([seed, self.process.rank]).generate_state(1)
            seed_everything(int(drawn[0]), device)

    def align(self, model: nn.Module) -> None:
        """Give the model the buffers that the first process has."""
        buffers = list(model.buffers())
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            alike = [buffer for buffer in buffers if buffer.dtype == dtype]
            joined = torch.cat([buffer.flatten() for buffer in alike])
            dist.broadcast(joined, src=0)
            if not self.leads:
                for buffer, values in zip(alike, joined.split([buffer.numel() for buffer in alike]), strict=True):
                    buffer.copy_(values.view_as(buffer))

    def _gathered(self, own: _Outcome) -> list[Any]:
        outcomes: list[Any] = [None] * self.process.size
        dist.all_gather_object(outcomes, self._told(own))
        if _is_unforeseen(own[1]):
            _result(own)
        return [_result(outcome) for outcome in outcomes]

    def _told(self, own: _Outcome) -> _Outcome:
        """The outcome as others hear it, of whom none is to wait for a process that has failed."""
        error = own[1]
        if not _is_unforeseen(error):
            return own
        said = " ".join(str(error).split())
        return None, RunError(f"process {self.process.rank} failed: {type(error).__name__}: {said}")


ALONE = Team(Process())


def join_team(config: TrainingConfig) -> Team:
    """The processes that torchrun has begun, met; ``ALONE`` without it.

    They meet once, for all runs of a program: a second meeting would find what the first one left behind.

    Raises:
        UserError: a setting that several processes cannot have, or the program has made a group of others.
        RunError: they did not find each other.
    """
    here = this_process()
    if here.size == 1:
        return ALONE
    if config.cuda_graphs:
        raise UserError("training.cuda_graphs is for runs of one process; leave it out, or begin without torchrun")
    if not dist.is_initialized():  # by a program of the user's
        try:
            _meet()
        except RuntimeError as error:
            raise OneProcessError(f"process {here.rank} of {here.size} did not find the others: {error}") from None
        atexit.register(_part)
    if (dist.get_rank(), dist.get_world_size()) != (here.rank, here.size):
        raise UserError(
            f"the program's process group has this as process {dist.get_rank()} of {dist.get_world_size()}, but RANK "
            f"is {here.rank} and WORLD_SIZE is {here.size}; make the group that torchrun says, or leave it to recbft"
        )
    return Team(here)


def _meet() -> None:
    # Its functions keep the group there is when it is imported, which PyTorch's optimisers do, beyond ``_part``.
    import torch.distributed.nn.functional  # noqa: F401

    # Builds of PyTorch without processes have neither.
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    # After a restart by torchrun (--max-restarts) the store still holds the addresses of those who have ended.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"recbft {attempt}", store)
    dist.init_process_group(_backend(), store=own, rank=rank, world_size=size)


def _backend() -> str:
    """What carries tensors; builds for small boards have CUDA without NCCL, where gloo goes by way of the host."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _part() -> None:
    """End the group and, as nothing else holds it, its threads, while Python is there.

    A thread lets go of the last tensor that it has sent when it comes to it; where the interpreter is being taken down
    by then, PyTorch ends it in a way that aborts the process. What a failed run leaves, its traceback and the model in
    it, may refer to itself and so hold the group until it is collected.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


@contextlib.contextmanager
def departure_explained(team: Team, way_on: Callable[[], str] | None = None) -> Iterator[None]:
    """Say in one line that another process of the run is gone, which said itself why.

    Args:
        way_on: what is said of how to go on.

    Raises:
        OneProcessError: in place of what PyTorch raises where processes cannot hear each other.
    """
    try:
        yield
    except RuntimeError as error:
        unheard = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        if team.several and unheard and not is_shortage(error):
            then = "" if way_on is None else f"; {way_on()}"
            raise OneProcessError(
                f"process {team.process.rank} does not hear from another one, which has ended{then}"
            ) from error
        raise


def share_of(batch: Batch, rank: int, size: int) -> tuple[Batch, float]:
    """Every ``size``-th row from ``rank`` on, and its share of the targets; where it has none, a row without weight."""
    assert batch.target is not None
    learned = (batch.target > 0).sum(1)  # (B,)
    rows = torch.arange(len(learned))[rank::size]
    own = int(learned[rows].sum())
    if own == 0:
        rows = learned.argmax()[None]
    share = batch.of_rows(rows)
    if own == 0:
        return share, 0.0
    return share, share.learned_weight / max(batch.learned_weight, torch.finfo(torch.float64).tiny)


class SharedLoss:
    """The loss of a batch, whose gradient (a) all processes work out together.

    Args:
        team: several processes.
    """

    def __init__(self, model: TrainableModel, team: Team) -> None:
        self.team, self.model, self.device = team, model, next(model.parameters()).device
        # Some parameters move no loss, such as the last layer's process noise.
        self.loss = nn.parallel.DistributedDataParallel(
            _Loss(model),
            device_ids=None if self.device.type == "cpu" else [self.device],
            find_unused_parameters=True,
        )

    def of_share(self, batch: Batch) -> Tensor:
        """n N_r / N times the loss of this process's rows of a batch, which is on the CPU."""
        here = self.team.process
        share, weight = share_of(batch, here.rank, here.size)
        loss: Tensor = self.loss(share.to(self.device), here.size * weight)
        return loss

    def of_batch(self, own: Tensor) -> Tensor:
        """The loss of the batch, from what ``of_share`` gave every process; its running means are aligned."""
        total = own.detach() / self.team.process.size
        dist.all_reduce(total)
        self.team.align(self.model)  # after the step, for controllers that read them
        return total


class _Loss(nn.Module):
    """A module whose forward is a model's loss, as DistributedDataParallel wants it, with the parameters alone."""

    def __init__(self, model: TrainableModel) -> None:
        super().__init__()
        self.loss, self.own = model.loss, nn.ParameterList(model.parameters())
        # DistributedDataParallel complains where it looks for parameters that are not used and finds none.
        self.unused = nn.Parameter(next(model.parameters()).detach().new_zeros(()))

    def forward(self, batch: Batch, weight: float) -> Tensor:
        return weight * self.loss(batch)


def _outcome(work: Callable[[], Any]) -> _Outcome:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _is_unforeseen(error: Exception | None) -> bool:
    return error is not None and not isinstance(error, (UserError, RunError))


def _result(outcome: _Outcome) -> Any:
    made, error = outcome
    if error is not None:
        raise error
    return made

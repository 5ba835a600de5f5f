"""One run trained by several processes, as torchrun begins them: each learns from its share of every batch.

All of them read the same batches, of which process r takes every n-th row. PyTorch's DistributedDataParallel averages
gradients over the n processes, so each loss is weighted by the targets behind it, and the step is that of the batch:

    gradient = sum_r (N_r / N) gradient_r          N_r of the batch's N targets are in share r                    (1)

Dropout and negatives are drawn by each process for its share: the numbers are those of another draw than one process
would make, and without draws the same but for rounding. Running means are those of the first process's shares.

Users are evaluated in n parts. The run's folder belongs to the first process: what it finds or refuses there, the
others hear from it.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recbft.datasets.batches import HISTORIES_PER_BATCH, Batch
from recbft.errors import RunError, UserError
from recbft.models.contract import TrainableModel
from recbft.torchrun import Process, this_process
from recbft.training.config import TrainingConfig

T = TypeVar("T")


class Team:
    """The processes of a run, seen from one of them; ``ALONE`` does everything itself."""

    def __init__(self, here: Process) -> None:
        self.process = here

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.process.leads

    @property
    def several(self) -> bool:
        """Whether there is another process."""
        return self.process.size > 1

    def first_does(self, work: Callable[[], T]) -> T:
        """What the first process makes of it, which the others wait for and get too.

        Raises:
            UserError, RunError: it failed so, in every process.
        """
        if not self.several:
            return work()
        said: list[Any] = [_outcome(work) if self.leads else None]
        dist.broadcast_object_list(said, src=0)
        made: T = _result(said[0])
        return made

    def each_does(self, count: int, work: Callable[[slice], T]) -> list[T]:
        """What the processes make of their parts of ``count`` users, in order; a part may be empty.

        Raises:
            UserError, RunError: one of them failed so; it is raised in every process.
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

    def draw_apart(self, seed: int) -> None:
        """Let the processes draw different random numbers from here on; the first one those of a process alone."""
        if not self.leads:
            drawn = np.random.SeedSequence([seed, self.process.rank]).generate_state(1)
            torch.manual_seed(int(drawn[0]))

    def align(self, model: nn.Module) -> None:
        """Give the model the buffers that the first process has: what is evaluated and kept is the same everywhere."""
        if self.several:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def _gathered(self, own: tuple[Any, Exception | None]) -> list[Any]:
        outcomes: list[Any] = [None] * self.process.size
        dist.all_gather_object(outcomes, own)
        return [_result(outcome) for outcome in outcomes]


ALONE = Team(Process())


def team(config: TrainingConfig) -> Team:
    """The processes that torchrun has begun, met; ``ALONE`` without it.

    They meet once, for all runs of a program: a second meeting would find what the first one left behind.

    Raises:
        UserError: a setting that several processes cannot have.
        RunError: they did not find each other.
    """
    here = this_process()
    if here.size == 1:
        return ALONE
    if config.cuda_graphs:
        raise UserError("training.cuda_graphs is for runs of one process; leave it out, or begin without torchrun")
    if not dist.is_initialized():  # by a program of the user's
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        except RuntimeError as error:
            raise RunError(f"process {here.rank} of {here.size} did not find the others: {error}") from None
        atexit.register(dist.destroy_process_group)
    return Team(here)


@contextlib.contextmanager
def departure_explained(together: Team) -> Iterator[None]:
    """Say in one line that another process of the run is gone, which said itself why.

    Raises:
        RunError: in place of what PyTorch raises where processes cannot hear each other.
    """
    try:
        yield
    except RuntimeError as error:
        if together.several and (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
            raise RunError(
                f"process {together.process.rank} does not hear from another one, which has ended"
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
    return batch.of_rows(rows), own / int(learned.sum())


class SharedLoss:
    """The loss of a batch, whose gradient (1) all processes work out together.

    Args:
        team: several processes.
    """

    def __init__(self, model: TrainableModel, team: Team) -> None:
        self.team, self.device = team, next(model.parameters()).device
        # Some parameters move no loss, such as the last layer's process noise.
        self.loss = nn.parallel.DistributedDataParallel(
            _Loss(model), device_ids=None if self.device.type == "cpu" else [self.device], find_unused_parameters=True
        )

    def of_share(self, batch: Batch) -> Tensor:
        """n N_r / N times the loss of this process's rows of a batch, which is on the CPU."""
        here = self.team.process
        share, weight = share_of(batch, here.rank, here.size)
        loss: Tensor = self.loss(share.to(self.device), here.size * weight)
        return loss

    def of_batch(self, own: Tensor) -> Tensor:
        """The loss of the batch, from what ``of_share`` gave every process."""
        total = own.detach() / self.team.process.size
        dist.all_reduce(total)
        return total


class _Loss(nn.Module):
    """A model whose forward is its loss, as DistributedDataParallel wants it."""

    def __init__(self, model: TrainableModel) -> None:
        super().__init__()
        self.model = model
        # DistributedDataParallel complains where it looks for parameters that are not used and finds none.
        self.unused = nn.Parameter(next(model.parameters()).detach().new_zeros(()))

    def forward(self, batch: Batch, weight: float) -> Tensor:
        return weight * self.model.loss(batch)


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What was made, or why it was not, for others to hear."""
    try:
        return work(), None
    except (UserError, RunError) as error:
        return None, error


def _result(outcome: tuple[Any, Exception | None]) -> Any:
    made, error = outcome
    if error is not None:
        raise error
    return made

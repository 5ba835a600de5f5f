"""Training steps from CUDA graphs: a GPU is given a step in one call, in place of the launches of its kernels.

A graph does again what was recorded once, with the memory and the numbers of that time. So batches are padded to a few
shapes, each of which has a graph of its own. Rows and histories that are added are padding as any; a position that is
added has a state of zeros, whose loss is log V and moves no weight:

    loss = (P mean - (P - N) log V) / N        mean over P positions, of which N are real                     (a)

Where positions have weights, those that are added have weight 0, and (a) is not needed.

The first batch of a shape is trained on without one, so that what is made at first use (compiled kernels, room that
libraries work in) is there when the second is recorded. The warm-up ramp is a number that a graph would repeat: until
it is 1 the training loop takes its steps without.

The loss of a step is read when the next one has been given to the GPU, which then waits neither for the loop nor for
the batch that it packs. A step whose loss is not finite has changed the weights by then, as the graph does anyway.

Shapes: R rows, T tokens, S histories, P positions with a target, V items.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recbft.datasets.batches import Batch
from recbft.errors import RunError, UserError
from recbft.kernels.cross_entropy import full_cross_entropy
from recbft.mixers.interface import take_penalties
from recbft.models.backbone import Backbone
from recbft.models.losses import shares_of, with_bias
from recbft.system.memory import is_shortage
from recbft.training.optimiser import clip_gradients
from recbft.training.process_settings import autocast
from recbft.training.run_config import TrainingConfig

STEPS_PER_DOUBLING = 8  # sizes that are told apart: a batch is padded by at most an eighth


class Shape(NamedTuple):
    """What batches of one graph have in common."""

    rows: int
    width: int
    histories: int
    positions: int
    times: bool
    next_times: bool
    reliability: bool
    weights: bool = False


class Padded(NamedTuple):
    """A batch of some shape; the tensors are on one device."""

    batch: Batch  # its targets are left out: ``wanted`` says them
    learned: Tensor  # (P,) flat index of each position that has a target, 0 where one was added
    wanted: Tensor  # (P,) item index less 1, -1 where one was added
    weight: Tensor | None = None  # (P,) of each, 0 where one was added


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # what the graph reads a batch from
    loss: Tensor  # what it leaves


class _Coming(NamedTuple):
    """A loss on its way to the host, which is read as that of a tensor is."""

    value: Tensor  # on the CPU
    arrived: torch.cuda.Event

    def tolist(self) -> list[float]:
        """Wait for the loss."""
        self.arrived.synchronize()
        return [self.value.item()]


class GraphedSteps:
    """The training steps of a model on a GPU, whose config has been found to allow it (``RunConfig``).

    What a graph was recorded of stays where it is: the weights, what the optimiser remembers, what layers keep.

    Raises:
        UserError: the device has no graphs, or the model cannot be recorded.
    """

    ahead = 1  # steps that may begin before the loss of one is read

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainingConfig) -> None:
        self.device = next(model.parameters()).device
        check_recordable(model, self.device)
        assert isinstance(model, Backbone)
        self.model, self.optimizer, self.config = model, optimizer, config
        self.stream = torch.cuda.Stream(self.device)
        self.pool = torch.cuda.graph_pool_handle()  # shared: a step leaves nothing there that another reads
        self.recorded: dict[Shape, _Recorded | None] = {}  # None where a shape was met once

    def begin(self, batch: Batch) -> _Coming:
        """The whole of a step, not waited for: the loss of a batch, which is on the CPU, before it."""
        shape, numbers = pad(batch, self.model.max_length)
        # Always the same stream: what gradients are added up by belongs to the one that it was first used on.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            loss = self._take(shape, numbers.pin_memory())
            # Copied: the next step of this shape leaves its own there.
            value = torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=self.device.type == "cuda")
            coming = _Coming(value.copy_(loss, non_blocking=True), self.stream.record_event())
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return coming

    def end(self) -> None:
        """Nothing is left to do."""

    def _take(self, shape: Shape, numbers: Tensor) -> Tensor:
        if shape not in self.recorded:
            self.recorded[shape] = None
            return self._work(cut(numbers.to(self.device, non_blocking=True), shape))
        found = self.recorded[shape]
        if found is None:
            found = self.recorded[shape] = self._record(shape, numbers.to(self.device))
        else:
            found.inputs.copy_(numbers, non_blocking=True)
        found.graph.replay()
        return found.loss

    def _record(self, shape: Shape, inputs: Tensor) -> _Recorded:
        """Recording does none of the work."""
        graph = torch.cuda.CUDAGraph()
        first: BaseException | None = None
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                try:
                    loss = self._work(cut(inputs, shape))
                except BaseException as error:
                    first = error  # to end a recording that it broke fails too, and says no more than that
                    raise
        except RuntimeError as error:
            first = first or error
            if is_shortage(first) or not isinstance(first, RuntimeError):
                raise first from None
            why = str(first).strip().splitlines()[0]
            raise RunError(
                f"a step of this model cannot be a CUDA graph ({why}); leave out training.cuda_graphs"
            ) from None
        return _Recorded(graph, inputs, loss)

    def _work(self, padded: Padded) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.config.autocast, self.device):
            loss = padded_loss(self.model, padded)
        loss.backward()
        clip_gradients(self.model, self.optimizer, self.config.clip_norm)
        self.optimizer.step()
        return loss.detach()


def check_recordable(model: nn.Module, device: torch.device) -> None:
    """Refuse a device without CUDA graphs, and models whose loss is not known here."""
    if device.type != "cuda":
        raise UserError(f"training.cuda_graphs is true, and the run is on {device.type}, which has none; leave it out")
    if not isinstance(model, Backbone):
        raise UserError(f"training.cuda_graphs does not work with models of kind {type(model).__name__}; leave it out")


def padded_loss(model: Backbone, padded: Padded) -> Tensor:
    """``model.loss`` of a padded batch, equation (a)."""
    batch, learned, wanted, weights = padded
    mean = model.encode(batch).mean.flatten(0, 1)  # (R T, D)
    real = (wanted >= 0).to(mean.dtype)
    weight, bias = model.item_table()
    states, weight = with_bias(mean.index_select(0, learned), weight[1:], None if bias is None else bias[1:])
    states, target = states * real[:, None], wanted.clamp(min=0)
    if weights is not None:
        loss = full_cross_entropy(states, weight, target, shares=shares_of(weights).to(model.ramp.dtype))
    else:
        P, N = wanted.numel(), real.sum()
        loss = full_cross_entropy(states, weight, target)
        loss = (loss * P - (P - N) * math.log(len(weight))) / N
    penalties = take_penalties(model)
    return loss if penalties is None else loss + penalties


def pad(batch: Batch, width: int) -> tuple[Shape, Tensor]:
    """The shape that a batch on the CPU is padded to, and all its numbers end to end, for ``cut``."""
    assert batch.target is not None
    rows = _rounded(len(batch.items))
    target = _grid(batch.target, rows, width, 0).flatten()
    learned = target.nonzero().squeeze(1)
    shape = Shape(
        rows=rows,
        width=width,
        histories=_rounded(batch.last.numel()),
        positions=_rounded(learned.numel()),
        times=batch.time is not None,
        next_times=batch.next_time is not None,
        reliability=batch.reliability is not None,
        weights=batch.weight is not None,
    )
    own = batch.items.shape[1]
    last = batch.last // own * width + batch.last % own
    grids = ((batch.items, 0), (batch.segment, -1), (batch.position, 0), (batch.time, 0), (batch.next_time, 0))
    parts = [_grid(grid, rows, width, empty).flatten() for grid, empty in grids if grid is not None]
    if batch.reliability is not None:  # their bits
        parts.append(_grid(batch.reliability, rows, width, math.nan).flatten().view(torch.int64))
    parts += [_longer(last, shape.histories, 0), _longer(learned, shape.positions, 0)]
    parts.append(_longer(target[learned] - 1, shape.positions, -1))
    if batch.weight is not None:  # their bits
        weight = _grid(batch.weight, rows, width, 0).flatten()[learned]
        parts.append(_longer(weight, shape.positions, 0).view(torch.int64))
    return shape, torch.cat(parts)


def cut(numbers: Tensor, shape: Shape) -> Padded:
    """The batch whose numbers stand end to end, as views of them."""
    R, T = shape.rows, shape.width
    grids = 3 + shape.times + shape.next_times + shape.reliability
    sizes = [*[R * T] * grids, shape.histories, shape.positions, shape.positions, shape.positions * shape.weights]
    *found, last, learned, wanted, weight = numbers.split(sizes)
    given = iter(grid.view(R, T) for grid in found)
    batch = Batch(
        items=next(given),
        segment=next(given),
        position=next(given),
        time=next(given) if shape.times else None,
        target=None,
        last=last,
        next_time=next(given) if shape.next_times else None,
        reliability=next(given).view(torch.float64) if shape.reliability else None,
    )
    return Padded(batch, learned, wanted, weight.view(torch.float64) if shape.weights else None)


def _rounded(size: int) -> int:
    """The next size that is told apart."""
    unit = max(1, (1 << (max(1, size).bit_length() - 1)) // STEPS_PER_DOUBLING)
    return -(-size // unit) * unit


def _grid(values: Tensor, rows: int, width: int, empty: float) -> Tensor:
    made = values.new_full((rows, width), empty)
    made[: values.shape[0], : values.shape[1]] = values
    return made


def _longer(values: Tensor, size: int, empty: int) -> Tensor:
    return torch.cat([values, values.new_full((size - values.numel(),), empty)])

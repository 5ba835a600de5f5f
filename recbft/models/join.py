"""Two models as one: the sum of their scores, with weights that depend on how often an item occurs in training.

    score(i) = a_b s_1(i) + d_b s_2(i) + l_b,   b the bin of c_i, the training events of item i              (1)
    state = (state_1, state_2)      weight_i = (a_b weight_1i, d_b weight_2i)                                (2)

Nothing is trained here: the models are finished, ``evaluation.join_weights`` fits a and d, ``evaluation.rare_items``
the level l of items with few events, which is 0 unless asked for.

Shapes: S histories, V items, G bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recbft.datasets.batches import Batch, pack_histories
from recbft.errors import UserError
from recbft.models.contract import ItemTable, SequenceModel, UserStates

BINS = {"none": 0, "1-4": 1, "5-9": 5, "10-19": 10, "20-49": 20, "50 and more": 50}  # name -> least training count
RARE = 5  # items with fewer training events are rare
ALL = "all items"
PARTS = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class JoinConfig:
    """What is joined; `recbft join` writes it."""

    by_count: bool = True  # weights for each bin of the training count, or for all items together
    # The models, each by the sections of its run's configuration that say what it is.
    first: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in PARTS:
            if not isinstance(getattr(self, name), Mapping):
                raise UserError(f"{name} is {getattr(self, name)!r}; it is written by `recbft join RUN RUN`")


class Join(nn.Module, SequenceModel):
    """Two models that score the same items.

    It reads as much of a history as either of them, and hands on the precision of the first that has one.

    Args:
        training_counts: events per item, (V + 1,).
        by_count: weights by bin, or one pair for all.
    """

    bins: Tensor
    weights: Tensor
    levels: Tensor

    def __init__(self, first: SequenceModel, second: SequenceModel, training_counts: Tensor, *, by_count: bool) -> None:
        super().__init__()
        assert isinstance(first, nn.Module) and isinstance(second, nn.Module)
        self.first, self.second = first, second
        parts = self.parts
        self.max_length = max(part.max_length - (part.append is not None) for part in parts)
        self.reads_times = any(part.reads_times for part in parts)
        self.reads_reliability = any(part.reads_reliability for part in parts)
        self.shows_target_time = any(part.shows_target_time for part in parts)
        self.core = next((part.core for part in parts if part.core is not None), None)
        least = torch.tensor(list(BINS.values())[1:] if by_count else [], dtype=torch.int64)
        self.register_buffer("bins", torch.bucketize(training_counts.long(), least, right=True))  # (V + 1,)
        self.register_buffer("weights", torch.ones(len(least) + 1, 2))  # (G, 2) a and d of (1)
        self.register_buffer("levels", torch.zeros(len(least) + 1))  # (G,) l of (1)

    @property
    def parts(self) -> tuple[SequenceModel, SequenceModel]:
        """Both models."""
        return self.first, self.second

    @property
    def names_of_bins(self) -> tuple[str, ...]:
        """What the rows of the weights are for."""
        return (ALL,) if len(self.weights) == 1 else tuple(BINS)

    def user_states(self, batch: Batch) -> UserStates:
        """The state of (2)."""
        own = [part.user_states(self._as_read_by(part, batch)) for part in self.parts]
        precision = next((states.precision for states in own if states.precision is not None), None)
        return UserStates(torch.cat([states.state for states in own], dim=1), precision)

    def item_table(self) -> ItemTable:
        """The item side of (2), and the biases alike."""
        tables = [part.item_table() for part in self.parts]
        shares = self.weights[self.bins].unbind(1)
        weight = torch.cat([w[:, None] * table.weight for w, table in zip(shares, tables, strict=True)], dim=1)
        biases = [w * table.bias for w, table in zip(shares, tables, strict=True) if table.bias is not None]
        if self.levels.any():
            biases.append(self.levels[self.bins])
        return ItemTable(weight, sum(biases[1:], biases[0]) if biases else None)

    def of_grown(self, first: SequenceModel, second: SequenceModel, num_new: int) -> Join:
        """The join of two models that know so many items more, which count as items without a training event."""
        none = self.bins.new_zeros(num_new + 1)
        grown = Join(first, second, none, by_count=len(self.weights) > 1)
        grown.bins, grown.weights, grown.levels = torch.cat([self.bins, none[1:]]), self.weights, self.levels
        return grown.eval()

    def _as_read_by(self, part: SequenceModel, batch: Batch) -> Batch:
        """The batch as a model reads it by itself: with its own length, and what it appends."""
        if part.append is None and batch.items.shape[1] <= part.max_length:
            return batch
        stop = batch.last.cpu() + 1
        length = batch.position.flatten().cpu()[batch.last.cpu()] + 1
        start = stop - length.clamp(max=part.max_length - (part.append is not None))
        where = start.numpy(), stop.numpy()
        more = {"times": batch.time, "reliability": batch.reliability}
        known: dict[str, Any] = {name: None if grid is None else _flat(grid) for name, grid in more.items()}
        cut = pack_histories(_flat(batch.items), *where, **known, append=part.append)
        if batch.next_time is not None and part.append is None:
            cut = cut._replace(next_time=pack_histories(_flat(batch.next_time), *where).items)
        return cut.to(batch.items.device)


def not_from_scratch(*_arguments: Any, **_named: Any) -> nn.Module:
    """Say how a join is made: there is nothing to train."""
    raise UserError("model 'join' is made of two finished runs; make it with `recbft join RUN RUN`")


def _flat(grid: Tensor) -> NDArray[Any]:
    return grid.flatten().cpu().numpy()

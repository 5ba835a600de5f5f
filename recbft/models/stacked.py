"""Models that differ in their seed alone, trained as one: every parameter stacked along a seed dimension.

    theta = (theta_1, .., theta_S)        h = (rows of seed 1, .., rows of seed S)        one forward for all

The layers are those of ``Backbone``. What works token by token never learns that there are several seeds. What has
parameters is exchanged for a part that keeps S of them (``models.seed_parts``); a single number that a layer learns is
repeated for the rows of its seed. Each seed draws its own dropout, in the order and for the tokens of its own batch, so
that it trains as it would alone.

The models themselves stay whole: their tensors become views of the stacked ones, so that each is evaluated and saved
as a model that trains alone.

Shapes: S seeds, R rows of all, T tokens, D model width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from recbft.datasets.side_by_side import SideBySide
from recbft.errors import UserError
from recbft.kernels.cross_entropy import full_cross_entropies
from recbft.kernels.dropout import Dropout
from recbft.mixers import SoftmaxAttention
from recbft.mixers.interface import Group
from recbft.mixers.value_unit import ValueUnit
from recbft.models.backbone import Backbone
from recbft.models.block import Block
from recbft.models.losses import LOSSES, seen_items, shares_of, with_bias
from recbft.models.precision_channel import LayerPrecision
from recbft.models.precision_read_out import PrecisionReadOut
from recbft.models.seed_parts import (
    SeedDropout,
    SeedEmbedding,
    SeedLinear,
    SeedNorm,
    SeedPrecision,
    SeedReadOut,
    SeedRows,
    SeedUnit,
)

# Single numbers that a layer reads as an attribute and multiplies with what every token has, (R, T).
_PER_ROW = ("decay_logit", "range")


class Stacked:
    """S models as one.

    Args:
        models: built from the same config, with as many steps behind them; from here on their parameters and running
            means are views of the stacked ones.
        generators: where each seed draws its dropout from.
    """

    def __init__(self, models: Sequence[Backbone], generators: Sequence[torch.Generator]) -> None:
        _check(models[0])
        self.models, self.seeds = list(models), SeedRows(generators)
        named = [dict(model.named_parameters()) for model in models]
        self.parameters = {name: nn.Parameter(torch.stack([own[name].detach() for own in named])) for name in named[0]}
        self.body = copy.deepcopy(models[0])
        self._per_row: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._exchange(self.body, "")
        for seed, own in enumerate(named):
            for name, parameter in own.items():
                parameter.data = self.parameters[name].data[seed]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The stacked parameters by the names they have in each model."""
        yield from self.parameters.items()

    def optimiser_groups(self) -> dict[str, Group]:
        """As ``Backbone``."""
        return self.models[0].optimiser_groups()

    def set_ramp(self, ramp: float) -> None:
        """As ``Backbone``, for all seeds."""
        for model in (self.body, *self.models):
            model.set_ramp(ramp)

    def refresh(self) -> None:
        """As ``Backbone``, for all seeds."""
        for model in self.models:
            model.refresh()
        for part in self.body.modules():
            if isinstance(part, SeedPrecision):
                part.refresh()

    def losses(self, side: SideBySide) -> Tensor:
        """The mean loss of every seed over its own positions, (S,); the batches are on the CPU."""
        assert side.batch.target is not None
        target = side.batch.target.flatten()  # while it is on the CPU: reading from a device waits for it
        counts = (target.view(side.num_seeds, -1) > 0).sum(dim=1).tolist()
        learn = target.nonzero().squeeze(1)
        embeddings = self.parameters["item_embedding.weight"]
        device = embeddings.device
        # All that is copied there goes first, while there is little to wait for.
        at, wanted, batch = learn.to(device), (target[learn] - 1).to(device), side.batch.to(device)
        shares = None
        if side.batch.weight is not None:
            each = side.batch.weight.flatten()[learn].split(counts)
            shares = torch.cat([shares_of(own) for own in each]).to(device, embeddings.dtype)
        self.seeds.begin(side, device)
        for module, name, parameter in self._per_row:
            setattr(module, name, self.seeds.repeat(parameter)[:, None])  # (S,) -> (R, 1)
        states = self.body.encode(batch).mean.flatten(0, 1).index_select(0, at)  # (R T, D) -> (N, D)
        table = embeddings[:, 1 : self.body.num_items + 1]
        bias = self.parameters.get("item_bias")
        states, table = with_bias(states, table, None if bias is None else bias[:, 1:])
        seen = None
        if self.body.item_loss.spec.leaves_out_seen:
            causal = not self.body.both_ways
            seen = seen_items(batch, at, wanted, num_items=self.body.num_items, causal=causal)
        return full_cross_entropies(states, table, wanted, counts, left_out=seen, shares=shares)

    def _exchange(self, module: nn.Module, path: str) -> None:
        """Put parts that keep S parameters in the place of those that keep one."""
        # ``named_children`` would leave out the second name of a part that has two.
        for name, part in module._modules.items():
            if part is not None:
                module._modules[name] = self._counterpart(part, f"{path}{name}.")
        for name, own in list(module._parameters.items()):
            if own is None or (path + name) == "item_bias":
                continue
            if name not in _PER_ROW:
                raise _refused(f"parameter {path}{name}")
            delattr(module, name)
            self._per_row.append((module, name, self.parameters[path + name]))

    def _counterpart(self, part: nn.Module, path: str) -> nn.Module:
        found = {name[len(path) :]: p for name, p in self.parameters.items() if name.startswith(path)}
        if isinstance(part, nn.Linear):
            return SeedLinear(self.seeds, found["weight"], found.get("bias"))
        if isinstance(part, nn.LayerNorm):
            return SeedNorm(self.seeds, found["weight"], found["bias"], part.eps)
        if isinstance(part, nn.Embedding):
            return SeedEmbedding(self.seeds, found["weight"])
        if isinstance(part, Dropout):
            return SeedDropout(self.seeds, part.p)
        if isinstance(part, LayerPrecision):
            each = [model.get_submodule(path[:-1]) for model in self.models]
            return SeedPrecision(self.seeds, part, each, found)  # type: ignore[arg-type]
        if isinstance(part, ValueUnit):
            units = [model.get_submodule(path[:-1]) for model in self.models]
            return SeedUnit(self.seeds, units)  # type: ignore[arg-type]
        if isinstance(part, PrecisionReadOut):
            outs = [model.precision_read_out for model in self.models]
            return SeedReadOut(self.seeds, outs, found["strength"])  # type: ignore[arg-type]
        self._exchange(part, path)
        return part


def _check(model: nn.Module) -> None:
    """Refuse what is known not to be stackable; parameters of parts that are not known are refused as they come."""
    if not isinstance(model, Backbone):
        raise _refused(f"models of kind {type(model).__name__}")
    if model.item_belief is not None:
        raise _refused("item features")
    if model.reads_reliability:
        raise _refused("backbone.reads_reliability")
    if LOSSES[model.config.loss].num_negatives:
        raise _refused(f"loss {model.config.loss!r}, which draws negatives")
    if LOSSES[model.config.loss].has_exponent:
        raise _refused(f"loss {model.config.loss!r}, whose exponent each learns for itself")
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.moe is not None:
            raise _refused("experts")
        mixer = block.mixer
        if not isinstance(mixer, SoftmaxAttention):
            raise _refused(f"mixer {type(mixer).__name__}")
        if mixer.dropout > 0:
            raise _refused("dropout of attention weights")
        if mixer.out is not None and block.precision is not None:
            raise _refused("output_projection under a precision channel")


def _refused(what: str) -> UserError:
    return UserError(f"several seeds cannot be trained together with {what}; train the seeds one by one")

"""What every layer did in one pass, taken by hooks; tracing changes no score.

The hooks are put on copies of the model's modules, with its own weights in them: another thread may ask the model
meanwhile. Every layer is run for all tokens, where a model only asked for states leaves out what no state needs.

    gain      as the layer's update rule gave it                                                             (3.1)
    J         the diagonal of the feed-forward network's Jacobian at the token, ``core.ffn_jacobian``        (4.2)
    share     |a_tj| / sum_i |a_ti|, the share of the attention of t that j gets; a_tj where weights are
              positive and sum to one                                                                          (a)
    n_t       (sum_j a_tj)^2 / sum_j a_tj^2, Kish's effective sample size                                      (b)

Weights of softmax attention are positive and sum to one, so (b) is 1 / sum a^2; of weights of both signs (HSTU) it can
be below 1.

Source: Kish, Survey Sampling (1965), section 8.2; Precision Tracked Transformer (arXiv 2605.18832), equations 1 to 4.
Shapes: B rows, T tokens, D model width, H heads, G = H, or D where weights are per dimension.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recbft.core import Belief, SequenceContext, process_noise
from recbft.datasets.batches import Batch
from recbft.datasets.dataset import Dataset
from recbft.evaluation.views import batches_of_view, evaluation_mode
from recbft.models.backbone import Backbone
from recbft.models.block import Block
from recbft.models.contract import SequenceModel, UserStates

SATURATED = 0.2  # of a layer's observation precisions: more at the cap are told of
FEW = 256  # histories that say it


class _Call(NamedTuple):
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    output: Any


class LayerTrace:
    """One layer's pass over a batch; what the layer does not have is None. Each part is made when it is asked for."""

    def __init__(self, block: Block, calls: dict[str, _Call]) -> None:
        self.block, self._calls = block, calls

    @property
    def context(self) -> SequenceContext:
        """Which token may read which."""
        context: SequenceContext = self._calls["mixer"].arguments[2]
        return context

    @property
    def incoming(self) -> Tensor | None:
        """(B, T, D) lam, the precision that attention and update work with."""
        precision: Tensor | None = self._calls["mixer"].arguments[1]
        return precision

    @property
    def observation(self) -> Tensor | None:
        """(B, T, D) r, the precision of the innovation."""
        precision: Tensor | None = self._calls["mixer"].output.precision
        return precision

    @property
    def outgoing(self) -> Tensor | None:
        """(B, T, D) lam'', the precision that the layer hands on."""
        precision: Tensor = self._calls["block"].output.precision
        return None if self.block.precision is None else precision

    @property
    def gain(self) -> Tensor | None:
        """(B, T, D), equation (3.1)."""
        gain: Tensor | None = None if self.block.precision is None else self._calls["update"].output.gain
        return gain

    @cached_property
    def jacobian(self) -> Tensor | None:
        """(B, T, D), equation (4.2); None where precision is not predicted through the feed-forward network."""
        if self.block.precision is None or self.block.precision.mode == "off":
            return None
        assert self.block.network is not None
        return self.block.network.jacobian(self._calls["norm_ffn"].output, self.context)

    @cached_property
    def jacobian_used(self) -> Tensor | None:
        """What stood for (4.2) in this pass, (B, T, D) or (D,) for all tokens."""
        if self.jacobian is None or self.block.precision is None:
            return None
        assert self.block.network is not None
        x = self._calls["norm_ffn"].output
        return self.block.network.predict(x, self.context, self.block.precision).jacobian

    @property
    def noise(self) -> Tensor | None:
        """(D,) Q, the variance that the layer adds to every token."""
        if self.block.precision is None or self.block.precision.noise_logits is None:
            return None
        return process_noise(self.block.precision.noise_logits, self.block.precision.core.q_max)

    @property
    def recency_decay(self) -> float | None:
        """rho, the factor by which a key's weight falls with every position of lag."""
        rho = self.block.mixer.recency_decay
        return None if rho is None else float(rho)

    @cached_property
    def weights(self) -> Tensor | None:
        """(B, G, T, T), row t over the keys j; None for a mixer without attention weights."""
        call = self._calls["mixer"]
        return self.block.mixer.attention(*call.arguments, **call.named)

    @cached_property
    def shares(self) -> Tensor | None:
        """(B, G, T, T), equation (a)."""
        if self.weights is None:
            return None
        size = self.weights.abs()
        total = size.sum(dim=-1, keepdim=True)
        return torch.where(total > 0, size / total, 0.0)

    @cached_property
    def effective_sample_size(self) -> Tensor | None:
        """(B, G, T), equation (b); 0 where nothing is read."""
        if self.weights is None:
            return None
        squares = self.weights.square().sum(dim=-1)
        return torch.where(squares > 0, self.weights.sum(dim=-1).square() / squares, 0.0)


def at_cap(precision: Tensor, cap: float) -> Tensor:
    """True where a precision stands at lam_max, but for rounding."""
    return precision >= cap * (1 - 1e-6)


def saturated_layers(model: SequenceModel, dataset: Dataset) -> list[int]:
    """The layers of which more than ``SATURATED`` of the observation precisions stand at the cap, from 1.

    Looked at are the first histories that validation is ranked from, a batch of them.
    """
    if model.core is None or model.core.update != "kalman" or dataset.split.validation.target.size == 0:
        return []
    with torch.inference_mode(), evaluation_mode(model):
        batch = next(iter(batches_of_view(model, dataset, dataset.split.validation, FEW)))
        _, layers = trace(model, batch.to(model.item_table().weight.device))
        real = batch.segment >= 0
        found = [layer.observation for layer in layers]
        shares = [0.0 if r is None else float(at_cap(r.cpu()[real], model.core.lam_max).double().mean()) for r in found]
    return [number for number, share in enumerate(shares, start=1) if share > SATURATED]


def trace(model: SequenceModel, batch: Batch) -> tuple[UserStates, list[LayerTrace]]:
    """The states of a batch and what each layer did on the way; no layer for a model without any.

    The model is used as it is: switch it to evaluation mode first.
    """
    model = _in_modules_of_its_own(model)
    blocks = blocks_of(model)
    calls: list[dict[str, _Call]] = [{} for _ in blocks]
    with ExitStack() as hooks:
        for block, seen in zip(blocks, calls, strict=True):
            hooks.callback(_watch(block, "block", seen).remove)
            parts = {"mixer": block.mixer, "update": block.update, "norm_ffn": block.norm_ffn}
            for name, part in parts.items():
                if part is not None:
                    hooks.callback(_watch(part, name, seen).remove)
        states = _states(model, batch)
    return states, [LayerTrace(block, seen) for block, seen in zip(blocks, calls, strict=True)]


def blocks_of(model: SequenceModel) -> list[Block]:
    """The layers of a model, none of one that has no layers."""
    return [block for block in model.blocks if isinstance(block, Block)] if isinstance(model, Backbone) else []


def _in_modules_of_its_own(model: SequenceModel) -> SequenceModel:
    """A model of the same parameters and buffers whose modules nobody else holds."""
    shared = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _states(model: SequenceModel, batch: Batch) -> UserStates:
    """The states of a batch, every layer run for all tokens."""
    if not isinstance(model, Backbone):
        return model.user_states(batch)
    mean, precision = (part.flatten(0, 1)[batch.last] for part in model.encode(batch))
    return model.states_of(Belief(mean, precision), batch)


def _watch(module: nn.Module, name: str, seen: dict[str, _Call]) -> Any:
    """Keep a module's next call under a name; returns the hook's handle."""

    def keep(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        seen[name] = _Call(arguments, named, output)

    return module.register_forward_hook(keep, with_kwargs=True)

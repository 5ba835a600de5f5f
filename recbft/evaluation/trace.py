"""What every layer did in one pass, taken by hooks; tracing changes no score.

The hooks are put on copies of the model's modules, with its own weights in them: another thread may ask the model
meanwhile. Every layer is run for all tokens, where a model only asked for states leaves out what no state needs.

    gain      as the layer's update rule gave it                                                               (1)
    J         the diagonal of the feed-forward network's Jacobian at the token, ``core.ffn_jacobian``          (2)
    share     |a_tj| / sum_i |a_ti|, the share of the attention of t that j gets; a_tj where weights are
              positive and sum to one                                                                          (3)
    n_t       (sum_j a_tj)^2 / sum_j a_tj^2, Kish's effective sample size                                      (4)

Weights of softmax attention are positive and sum to one, so (4) is 1 / sum a^2; of weights of both signs (HSTU) it can
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

from recbft.core import Belief, ffn_jacobian, process_noise
from recbft.datasets.batches import Batch
from recbft.models.backbone import Backbone
from recbft.models.block import Block
from recbft.models.contract import SequenceModel, UserStates


class _Call(NamedTuple):
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    output: Any


def attention_in(mixer: nn.Module) -> nn.Module:
    """The attention that a mixer is built around, the last of several; a mixer of one piece itself."""
    inner: nn.Module | None = getattr(mixer, "reader", None) or getattr(mixer, "smoother", None)
    rounds = getattr(mixer, "rounds", None)
    return rounds[-1] if rounds is not None else inner or mixer


class LayerTrace:
    """One layer's pass over a batch; what the layer does not have is None. Each part is made when it is asked for."""

    def __init__(self, block: Block, calls: dict[str, _Call]) -> None:
        self.block, self._calls = block, calls

    @property
    def tracks_precision(self) -> bool:
        """Whether the layer carries a precision."""
        return self.block.precision is not None

    @property
    def num_heads(self) -> int:
        """H, of a mixer that attends."""
        return int(attention_in(self.block.mixer).n_heads)  # type: ignore[arg-type]

    @property
    def mixes_heads(self) -> bool:
        """Whether an output map follows the heads, so that no coordinate of the innovation is one head's own."""
        mixer = self.block.mixer
        return any(getattr(one, "out", None) is not None for one in (mixer, attention_in(mixer)))

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
        return precision if self.tracks_precision else None

    @property
    def gain(self) -> Tensor | None:
        """(B, T, D), equation (1)."""
        gain: Tensor | None = self._calls["update"].output.gain if self.tracks_precision else None
        return gain

    @cached_property
    def jacobian(self) -> Tensor | None:
        """(B, T, D), equation (2); None where precision is not predicted through the feed-forward network."""
        if self.block.precision is None or self.block.precision.mode == "off":
            return None
        if self.block.moe is not None:
            x, valid = self._calls["moe"].arguments
            found: Tensor = self.block.moe(x, valid, with_jacobian=True).jacobian
            return found
        return ffn_jacobian(self._calls["inner"].output, self.block.inner.weight, self.block.outer.weight)

    @cached_property
    def jacobian_used(self) -> Tensor | None:
        """What stood for (2) in this pass, (B, T, D) or (D,) for all tokens."""
        if self.jacobian is None or self.block.precision is None:
            return None
        context = self._calls["mixer"].arguments[2]
        if self.block.moe is not None:
            return self.block.precision.take(self.jacobian, context)
        a = self._calls["inner"].output
        return self.block.precision.activate(a, self.block.inner.weight, self.block.outer.weight, context)[1]

    @property
    def noise(self) -> Tensor | None:
        """(D,) Q, the variance that the layer adds to every token."""
        if self.block.precision is None or self.block.precision.noise_logits is None:
            return None
        return process_noise(self.block.precision.noise_logits, self.block.precision.core.q_max)

    @property
    def recency_decay(self) -> float | None:
        """rho, the factor by which a key's weight falls with every position of lag."""
        logit = getattr(attention_in(self.block.mixer), "decay_logit", None)
        return None if logit is None else float(torch.sigmoid(logit))

    @cached_property
    def weights(self) -> Tensor | None:
        """(B, G, T, T), row t over the keys j; None for a mixer without attention weights."""
        attention = getattr(self.block.mixer, "attention", None)
        if attention is None:
            return None
        call = self._calls["mixer"]
        weights: Tensor = attention(*call.arguments, **call.named)
        return weights

    @cached_property
    def shares(self) -> Tensor | None:
        """(B, G, T, T), equation (3)."""
        if self.weights is None:
            return None
        size = self.weights.abs()
        total = size.sum(dim=-1, keepdim=True)
        return torch.where(total > 0, size / total, 0.0)

    @cached_property
    def effective_sample_size(self) -> Tensor | None:
        """(B, G, T), equation (4); 0 where nothing is read."""
        if self.weights is None:
            return None
        squares = self.weights.square().sum(dim=-1)
        return torch.where(squares > 0, self.weights.sum(dim=-1).square() / squares, 0.0)


def at_cap(precision: Tensor, cap: float) -> Tensor:
    """True where a precision stands at lam_max, but for rounding."""
    return precision >= cap * (1 - 1e-6)


def trace(model: SequenceModel, batch: Batch) -> tuple[UserStates, list[LayerTrace]]:
    """The states of a batch and what each layer did on the way; no layer for a model without any.

    The model is used as it is: switch it to evaluation mode first.
    """
    model = _in_modules_of_its_own(model)
    blocks = [block for block in getattr(model, "blocks", ()) if isinstance(block, Block)]
    calls: list[dict[str, _Call]] = [{} for _ in blocks]
    with ExitStack() as hooks:
        for block, seen in zip(blocks, calls, strict=True):
            hooks.callback(_watch(block, "block", seen).remove)
            for name in ("mixer", "update", "inner", "moe"):
                part = getattr(block, name, None)
                if part is not None:
                    hooks.callback(_watch(part, name, seen).remove)
        states = _states(model, batch)
    return states, [LayerTrace(block, seen) for block, seen in zip(blocks, calls, strict=True)]


def _in_modules_of_its_own(model: SequenceModel) -> SequenceModel:
    """A model of the same parameters and buffers whose modules nobody else holds."""
    shared = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _states(model: SequenceModel, batch: Batch) -> UserStates:
    """The states of a batch, every layer run for all tokens."""
    if not isinstance(model, Backbone):
        return model.user_states(batch)
    mean, precision = (part.flatten(0, 1)[batch.last] for part in model.encode(batch))
    return model.states_of(Belief(mean, precision))


def _watch(module: nn.Module, name: str, seen: dict[str, _Call]) -> Any:
    """Keep a module's next call under a name; returns the hook's handle."""

    def keep(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        seen[name] = _Call(arguments, named, output)

    return module.register_forward_hook(keep, with_kwargs=True)

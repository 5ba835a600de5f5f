"""Averages of weights: exponential over steps, or plain over the epochs that gained enough.

    ema    w' = d w' + (1 - d) w  after every step, d = min(decay, (1 + n) / (10 + n)), n steps before it      (10.6)
    swa    w' = mean of w after the epochs e > start E with  v_e - v_{e-1} >= gain |v_{e-1}|,  L_e <= zone    (10.7)

v is a validation value that should rise, or -L, read after each validated epoch; L is the validation loss, any of which
will do without a zone. Parameters are averaged; buffers (running means, counters) are taken as they are. (10.6) begins
with the weights after the first step. Its average is validated and kept. (10.7) is offered once, after the last epoch,
and kept if it is better than the best epoch.

Source: Izmailov et al. (2018); Fuzzy-Gated Training for Transformers, section 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recbft.config.fields import check_range
from recbft.errors import UserError
from recbft.evaluation.metrics import METRIC
from recbft.training.controllers.hooks import VALIDATION_LOSS, Moment


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Equation (10.6)."""

    decay: float = 0.999

    def __post_init__(self) -> None:
        check_range("decay", self.decay, at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class SwaConfig:
    """Equation (10.7)."""

    start: float = 0.5  # share of the epochs after which averaging may begin
    gain: float = 0.002  # least relative gain of an epoch over the validation before it
    # what should rise, a validation metric by its column of history.csv; or valid_cross_entropy, which should fall
    value: str = "valid_ndcg@10"
    zone: float | None = None  # the largest valid_cross_entropy of an epoch that is averaged; None means any

    def __post_init__(self) -> None:
        check_range("start", self.start, at_least=0, below=1)
        check_range("gain", self.gain, at_least=0)
        check_range("zone", self.zone, above=0)
        if not re.fullmatch(rf"valid_({METRIC})|{VALIDATION_LOSS}", self.value):
            raise UserError(
                f"value is {self.value!r}; give valid_hr@K, valid_ndcg@K, valid_mrr@K, valid_mrr or {VALIDATION_LOSS}, "
                "such as 'valid_ndcg@10'"
            )


class Ema:
    """Equation (10.6)."""

    def __init__(self, config: EmaConfig) -> None:
        self.config, self.steps = config, 0
        self.mean: dict[str, Tensor] = {}

    def after_step(self, moment: Moment, loss: float) -> None:
        decay = min(self.config.decay, (1 + self.steps) / (10 + self.steps))
        take_in(self.mean, moment.model, 1 - decay)
        self.steps += 1

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """The model with the mean in place of its parameters; before the first step as it is."""
        return replaced(model, self.mean)

    def state_dict(self) -> dict[str, Any]:
        """The mean and how many steps are in it."""
        return {"steps": self.steps, "mean": dict(self.mean)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.mean = {name: tensor.clone() for name, tensor in state["mean"].items()}


class SelectiveSwa:
    """Equation (10.7)."""

    def __init__(self, config: SwaConfig) -> None:
        self.config, self.epochs = config, 0
        self.needs_validation_loss = config.zone is not None or config.value == VALIDATION_LOSS
        self.previous: float | None = None
        self.mean: dict[str, Tensor] = {}

    def on_epoch_end(self, moment: Moment, row: Mapping[str, Any]) -> None:
        """Take the epoch's weights in if it gained enough."""
        value = row.get(self.config.value)
        if value is None:  # the epoch was not validated
            return
        value = -value if self.config.value == VALIDATION_LOSS else value
        previous, self.previous = self.previous, value
        late = moment.epoch > self.config.start * moment.total_epochs
        useful = self.config.zone is None or row[VALIDATION_LOSS] <= self.config.zone
        if not (late and useful) or previous is None or value - previous < self.config.gain * abs(previous):
            return
        self.epochs += 1
        take_in(self.mean, moment.model, 1 / self.epochs)

    def final_weights(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """The model with the mean in place of its parameters; None where fewer than two epochs are in it."""
        return replaced(model, self.mean) if self.epochs > 1 else None

    def state_dict(self) -> dict[str, Any]:
        """The mean, the epochs in it, and the value that the next epoch is held against."""
        return {"epochs": self.epochs, "previous": self.previous, "mean": dict(self.mean)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs, self.previous = state["epochs"], state["previous"]
        self.mean = {name: tensor.clone() for name, tensor in state["mean"].items()}


@torch.no_grad()
def take_in(mean: dict[str, Tensor], model: nn.Module, share: float) -> None:
    """Move a mean towards the model's parameters by a share; what it lacks it takes as it is.

    A mean that was loaded lies on the CPU, and goes to where the parameters are.
    """
    for name, parameter in model.named_parameters():
        if name in mean:
            mean[name] = mean[name].to(parameter.device).lerp_(parameter, share)
        else:
            mean[name] = parameter.detach().clone()


@contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values for some parameters of a model inside the context; its own are back after it, to the bit."""
    parameters = dict(model.named_parameters())
    own = {name: parameters[name].detach().clone() for name in weights}
    try:
        _put(parameters, weights)
        yield
    finally:
        _put(parameters, own)


@torch.no_grad()
def _put(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, value in weights.items():
        parameters[name].copy_(value)

"""What the training loop offers to controllers, and the controllers of a run as one.

A controller is any object with some of these methods; what it leaves out is not asked for:

    on_epoch_start(moment)          before an epoch
    on_batch(batch) -> batch        before a batch is learned from
    lr_factor(moment) -> float      once per step; the learning rate is the optimiser's own times all factors
    after_step(moment, loss)        after an optimiser step
    on_epoch_end(moment, row)       after an epoch; ``row`` is its line of history.csv, with what was validated
    evaluation_weights(model)       a context in which the model has the weights to validate and to keep
    final_weights(model)            the same once, after the last epoch; None where there is nothing to offer
    state_dict(), load_state_dict() plain values and tensors; equal states go on equally

Controllers exist in training alone: they hook into no module, and what they leave behind is in the model's parameters
and buffers. A model that is evaluated, saved or asked for recommendations knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recbft.datasets.batches import Batch

CROSS_ENTROPY = "cross_entropy"  # among the validation metrics, wherever a controller wants it
VALIDATION_LOSS = f"valid_{CROSS_ENTROPY}"  # the same in an epoch's ``row``


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where training stands."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    epoch: int  # epochs completed
    step: int  # optimiser steps taken
    total_epochs: int
    total_steps: int  # of all epochs

    @property
    def progress(self) -> float:
        """Share of the steps taken, in [0, 1]."""
        return min(1.0, self.step / max(1, self.total_steps))


class Controllers:
    """The controllers of a run, by name, in the order in which they are asked."""

    def __init__(self, controllers: Mapping[str, Any]) -> None:
        self.controllers = dict(controllers)

    @property
    def needs_validation_loss(self) -> bool:
        """Whether ``row`` must have ``VALIDATION_LOSS`` at every validation."""
        return any(getattr(one, "needs_validation_loss", False) for one in self.controllers.values())

    def on_epoch_start(self, moment: Moment) -> None:
        for act in self._having("on_epoch_start"):
            act(moment)

    def on_batch(self, batch: Batch) -> Batch:
        """The batch as the last of them leaves it."""
        for act in self._having("on_batch"):
            batch = act(batch)
        return batch

    def before_step(self, moment: Moment) -> None:
        """Set the learning rates: each group's own times all factors."""
        factors = [act(moment) for act in self._having("lr_factor")]
        if not factors:
            return
        for group in moment.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"])
            for factor in factors:
                group["lr"] *= factor

    def after_step(self, moment: Moment, loss: float) -> None:
        for act in self._having("after_step"):
            act(moment, loss)

    def on_epoch_end(self, moment: Moment, row: Mapping[str, Any]) -> None:
        for act in self._having("on_epoch_end"):
            act(moment, row)

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """The first that offers weights gives them; without one the model's own."""
        offers = (act(model) for act in self._having("evaluation_weights"))
        return next(offers, nullcontext())

    def final_weights(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """Weights to validate once more after the last epoch, or None."""
        offers = (act(model) for act in self._having("final_weights"))
        return next((offer for offer in offers if offer is not None), None)

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name."""
        return {name: getattr(one, "state_dict", dict)() for name, one in self.controllers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same controllers."""
        for name, own in state.items():
            if own:
                self.controllers[name].load_state_dict(own)

    def _having(self, method: str) -> list[Any]:
        return [act for one in self.controllers.values() if (act := getattr(one, method, None)) is not None]

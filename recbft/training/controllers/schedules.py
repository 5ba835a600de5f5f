"""Schedules of the learning rate, of label smoothing and of dropout.

    lr        from 0 to 1 in ``warmup`` of the steps, 1 up to ``flat`` of them, then
              f + (1 - f) (1 + cos(pi u)) / 2,  u from 0 to 1                                               (10.3)
    smoothing e_T + (e_0 - e_T) max(0, 1 - progress / until)                                                 (10.4)
    dropout   p_T + (p_0 - p_T) max(0, 1 - progress / until)     where p_0 >= p_T; else left alone           (10.5)
    chaos     x_{t+1} = r x_t (1 - x_t),   a_t = amplitude exp(-decay t),   factor = 1 - a_t + a_t x_t       (10.1)

(10.3) to (10.5) are functions of where training stands and have no state of their own. (10.1) is the logistic map,
a deterministic, decaying shake of the learning rate. t = 1 in the first step; the factor lies in [1 - amplitude, 1].

Source: Fuzzy-Gated Training for Transformers, sections 4 and 10.4 and listing 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from recbft.config.fields import check_range
from recbft.errors import UserError
from recbft.kernels.dropout import Dropout
from recbft.training.controllers.hooks import Moment


@dataclass(frozen=True, kw_only=True)
class LrFloorConfig:
    """Equation (10.3)."""

    warmup: float = 0.0  # share of the steps in which the rate rises from 0; 0 begins with the full rate
    flat: float = 0.4  # share of the steps, warm-up included, before the rate falls
    floor: float = 0.1  # of the full rate, kept at the end

    def __post_init__(self) -> None:
        check_range("flat", self.flat, at_least=0, below=1)
        check_range("warmup", self.warmup, at_least=0, at_most=self.flat)
        check_range("floor", self.floor, at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class LabelSmoothingConfig:
    """Equation (10.4)."""

    start: float = 0.015  # e_0
    floor: float = 0.01  # e_T
    until: float = 0.6  # share of the steps after which the floor is reached

    def __post_init__(self) -> None:
        check_range("start", self.start, at_least=0, below=1)
        check_range("floor", self.floor, at_least=0, at_most=self.start)
        check_range("until", self.until, above=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class DropoutGlideConfig:
    """Equation (10.5)."""

    floor: float = 0.08  # p_T
    until: float = 0.6  # share of the steps after which the floor is reached

    def __post_init__(self) -> None:
        check_range("floor", self.floor, at_least=0, below=1)
        check_range("until", self.until, above=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """Equation (10.1)."""

    r: float = 3.9
    start: float = 0.721  # x_0
    amplitude: float = 0.25
    decay: float = 5e-4  # per step

    def __post_init__(self) -> None:
        check_range("r", self.r, above=3.57, at_most=4)  # below it the map is periodic
        check_range("start", self.start, above=0, below=1)
        check_range("amplitude", self.amplitude, at_least=0, at_most=1)
        check_range("decay", self.decay, at_least=0)


class LrFloor:
    """Equation (10.3)."""

    def __init__(self, config: LrFloorConfig) -> None:
        self.config = config

    def lr_factor(self, moment: Moment) -> float:
        """In (0, 1], and from ``floor`` once warmed up."""
        if self.config.warmup and moment.progress < self.config.warmup:
            return min(1.0, (moment.progress + 1 / moment.total_steps) / self.config.warmup)
        u = max(0.0, moment.progress - self.config.flat) / (1 - self.config.flat)
        return self.config.floor + (1 - self.config.floor) * (1 + math.cos(math.pi * u)) / 2


class LabelSmoothing:
    """Equation (10.4), put into ``model.item_loss.label_smoothing`` at the start of an epoch."""

    def __init__(self, config: LabelSmoothingConfig, model: nn.Module) -> None:
        loss = getattr(getattr(model, "item_loss", None), "name", None)
        if loss != "ce":
            raise UserError(
                f"controllers.label_smoothing has no effect with loss {loss!r}; leave it out, or take loss 'ce'"
            )
        self.config = config

    def on_epoch_start(self, moment: Moment) -> None:
        """Set it for an epoch."""
        loss: Any = moment.model.item_loss
        loss.label_smoothing = _falling(self.config.start, self.config.floor, self.config.until, moment)


class DropoutGlide:
    """Equation (10.5) for every dropout of the model, those inside mixers included; p_0 is the rate it was built with.

    A rate below the floor is left alone.
    """

    def __init__(self, config: DropoutGlideConfig, model: nn.Module) -> None:
        self.config = config
        self.built = {name: getattr(holder, key) for name, holder, key in _dropouts(model)}
        if max(self.built.values(), default=0.0) <= config.floor:
            raise UserError(
                f"controllers.dropout_glide has no effect, since no dropout of the model is above its floor "
                f"{config.floor:g}; leave it out, lower the floor, or raise dropout"
            )

    def on_epoch_start(self, moment: Moment) -> None:
        """Set the rates for an epoch."""
        for name, holder, key in _dropouts(moment.model):
            if self.built[name] >= self.config.floor:
                setattr(holder, key, _falling(self.built[name], self.config.floor, self.config.until, moment))


class ChaosSchedule:
    """Equation (10.1), one step of the map per optimiser step."""

    def __init__(self, config: ChaosConfig) -> None:
        self.config, self.x, self.steps = config, config.start, 0

    def lr_factor(self, moment: Moment) -> float:
        """The next factor."""
        self.x = self.config.r * self.x * (1 - self.x)
        self.steps += 1
        a = self.config.amplitude * math.exp(-self.config.decay * self.steps)
        return 1 - a + a * self.x

    def state_dict(self) -> dict[str, Any]:
        """x and t."""
        return {"x": self.x, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.x, self.steps = state["x"], state["steps"]


def _falling(start: float, floor: float, until: float, moment: Moment) -> float:
    """Equations (10.4) and (10.5)."""
    return floor + (start - floor) * max(0.0, 1 - moment.progress / until)


def _dropouts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Each rate: the name of what holds it, that module, and its attribute there."""
    for name, module in model.named_modules():
        if isinstance(module, (Dropout, nn.Dropout)):
            yield name, module, "p"
        elif isinstance(vars(module).get("dropout"), float):  # of a mixer's weights
            yield name, module, "dropout"

"""Training-time controllers: small classes that steer training and are gone when it is over."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from recbft.training.controllers.averaging import Ema, EmaConfig, SelectiveSwa, SwaConfig
from recbft.training.controllers.context_game import ContextGame, ContextGameConfig
from recbft.training.controllers.guardian import Guardian, GuardianConfig, validation_cross_entropy
from recbft.training.controllers.hooks import CROSS_ENTROPY, VALIDATION_LOSS, Controllers, Moment
from recbft.training.controllers.schedules import (
    ChaosConfig,
    ChaosSchedule,
    DropoutGlide,
    DropoutGlideConfig,
    LabelSmoothing,
    LabelSmoothingConfig,
    LrFloor,
    LrFloorConfig,
)

__all__ = [
    "CROSS_ENTROPY",
    "VALIDATION_LOSS",
    "Controllers",
    "ControllersConfig",
    "Moment",
    "make_controllers",
    "validation_cross_entropy",
]


@dataclass(frozen=True, kw_only=True)
class ControllersConfig:
    """Which controllers a run has (the ``controllers`` section of a config).

    None leaves one out, and an empty mapping takes its defaults: ``--set "controllers.ema={}"``.
    """

    guardian: GuardianConfig | None = None
    chaos: ChaosConfig | None = None
    context_game: ContextGameConfig | None = None
    lr_floor: LrFloorConfig | None = None
    label_smoothing: LabelSmoothingConfig | None = None
    dropout_glide: DropoutGlideConfig | None = None
    ema: EmaConfig | None = None
    swa: SwaConfig | None = None

    @property
    def named(self) -> list[str]:
        """Names of those that the run has."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


def make_controllers(config: ControllersConfig, model: nn.Module, *, seed: int) -> Controllers:
    """The controllers of a run over an untrained model."""
    c = config
    made: dict[str, Any] = {
        "chaos": c.chaos and ChaosSchedule(c.chaos),
        "context_game": c.context_game and ContextGame(c.context_game, model, seed=seed),
        "lr_floor": c.lr_floor and LrFloor(c.lr_floor),
        "label_smoothing": c.label_smoothing and LabelSmoothing(c.label_smoothing, model),
        "dropout_glide": c.dropout_glide and DropoutGlide(c.dropout_glide, model),
        "ema": c.ema and Ema(c.ema),
        "swa": c.swa and SelectiveSwa(c.swa),
        # Last: at an epoch's end it moves the model, which the others are to see as it was validated.
        "guardian": c.guardian and Guardian(c.guardian, model, seed=seed),
    }
    return Controllers({name: one for name, one in made.items() if one is not None})

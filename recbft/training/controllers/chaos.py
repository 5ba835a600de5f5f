"""A bounded, decaying, deterministic shake of the learning rate, from the logistic map.

    x_{t+1} = r x_t (1 - x_t),   a_t = amplitude exp(-decay t),   factor = 1 - a_t + a_t x_t                   (1)

with t = 1 in the first step; so the factor lies in [1 - amplitude, 1].

Source: Fuzzy-Gated Training for Transformers, section 10.4 and listing 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recbft.config.fields import check_range
from recbft.training.controllers.hooks import Moment


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """Equation (1)."""

    r: float = 3.9
    start: float = 0.721  # x_0
    amplitude: float = 0.25
    decay: float = 5e-4  # per step

    def __post_init__(self) -> None:
        check_range("r", self.r, above=3.57, at_most=4)  # below it the map is periodic
        check_range("start", self.start, above=0, below=1)
        check_range("amplitude", self.amplitude, at_least=0, at_most=1)
        check_range("decay", self.decay, at_least=0)


class ChaosSchedule:
    """Equation (1), one step of the map per optimiser step."""

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
        """Go on from there."""
        self.x, self.steps = state["x"], state["steps"]

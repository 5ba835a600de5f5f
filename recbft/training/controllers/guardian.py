"""A small policy that sharpens attention while validation rewards it.

    state   (change of the mean temperature, saturated share, membership entropy, validation loss L)            (a)
    action  a ~ N(mean(state), diag(std^2)):   tau += 0.03 b a_0,   drift += 0.01 b a_1,   pressure += 0.01 b a_2   (b)
    reward  r = -L_e + l1 max(0, L_{e-1} - L_e) + l2 sigmoid(g (L_zone - L_e))                                  (c)
    loss    -r log pi(a | state), one step of Adam: REINFORCE                                                   (d)
    L       = mean over users of  -score(user, y) + log sum_i exp score(user, i),  y the validation item        (e)

Once per validated epoch the last action is rewarded by (c) and the next is taken; actions are cut at +-3, b decays from
epoch to epoch, and every quantity of (b) keeps its bounds. The policy reads and moves ``mixers.regime.RegimeAttention``
alone, between epochs: the temperature is a weight of the model, the two penalties act in its training loss.

Source: Fuzzy-Gated Training for Transformers, section 3 and listing 7; Williams (1992).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recbft.config.fields import check_range
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.evaluation.views import evaluation_mode, view_of
from recbft.mixers.regime import RegimeAttention
from recbft.models.contract import SequenceModel, read_histories
from recbft.training.controllers.hooks import VALIDATION_LOSS, Moment

LARGEST_ACTION = 3.0
TEMPERATURE_STEP, PENALTY_STEP = 0.03, 0.01
LARGEST_DRIFT, LARGEST_PRESSURE = 1.0, 0.6
HIDDEN = 64
BLOCK_SCORES = 4_000_000  # at a time, of (e)


@dataclass(frozen=True, kw_only=True)
class GuardianConfig:
    """Reward (c) and policy (d)."""

    learning_rate: float = 1e-3  # of the policy
    gain_weight: float = 0.6  # l1
    zone_weight: float = 1.2  # l2
    zone_sharpness: float = 8.0  # g
    zone: float | None = None  # L_zone; None means the first validation loss
    decay: float = 0.98  # of b, per action

    def __post_init__(self) -> None:
        check_range("learning_rate", self.learning_rate, above=0)
        for name in ("gain_weight", "zone_weight", "zone_sharpness"):
            check_range(name, getattr(self, name), at_least=0)
        check_range("decay", self.decay, above=0, at_most=1)


class Guardian:
    """Equations (a) to (d).

    Args:
        seed: of its weights and actions; the default generator is left alone.
    """

    needs_validation_loss = True

    def __init__(self, config: GuardianConfig, model: nn.Module, *, seed: int = 0) -> None:
        self.config, self.guarded = config, regime_mixers(model)
        if not self.guarded:
            raise UserError("the guardian moves the temperature of mixer 'regime', which this model does not have")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.policy = GaussianPolicy(4, 3)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.learning_rate)
        self.generator = torch.Generator().manual_seed(seed)
        self.strength = 1.0  # b
        self.zone, self.last_loss = config.zone, math.nan
        self.last_temperature = mean_temperature(self.guarded)
        self.taken: tuple[Tensor, Tensor] | None = None  # state and action that the next reward is for

    def on_epoch_end(self, moment: Moment, row: Mapping[str, Any]) -> None:
        """Reward the last action, take the next."""
        loss = row.get(VALIDATION_LOSS)
        if loss is None:
            return
        self.zone = loss if self.zone is None else self.zone
        if self.taken is not None:
            self._learn(reward(loss, self.last_loss, self.zone, self.config))
        state = self._state(loss)
        with torch.no_grad():
            mean, deviation = self.policy(state)
            drawn = mean + deviation * torch.randn(mean.shape, generator=self.generator)
        self.taken, self.last_loss = (state, drawn), loss
        act(self.guarded, drawn.clamp(-LARGEST_ACTION, LARGEST_ACTION) * self.strength)
        self.strength *= self.config.decay

    def state_dict(self) -> dict[str, Any]:
        """Policy, optimiser, generator and what the next reward needs."""
        return {
            "policy": dict(self.policy.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "strength": self.strength,
            "zone": self.zone,
            "last_loss": None if math.isnan(self.last_loss) else self.last_loss,
            "last_temperature": self.last_temperature,
            "taken": self.taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.strength, self.zone, self.taken = state["strength"], state["zone"], state["taken"]
        self.last_loss = math.nan if state["last_loss"] is None else state["last_loss"]
        self.last_temperature = state["last_temperature"]

    def _state(self, loss: float) -> Tensor:
        """Equation (a); the temperature's change is that of the epoch."""
        seen = [mixer.diagnosis() for mixer in self.guarded]
        saturated, entropy = (
            sum(part) / len(seen) for part in ((d.saturated for d in seen), (d.entropy for d in seen))
        )
        temperature = mean_temperature(self.guarded)
        change, self.last_temperature = abs(temperature - self.last_temperature), temperature
        return torch.tensor([change, saturated, entropy, loss])

    def _learn(self, reward: float) -> None:
        """Equation (d)."""
        assert self.taken is not None
        state, action = self.taken
        self.optimizer.zero_grad()
        (-reward * self.policy.log_probability(state, action)).backward()
        self.optimizer.step()


class GaussianPolicy(nn.Module):
    """Two hidden layers to the mean of a Gaussian whose deviations do not depend on the state."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(num_inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.mean = nn.Linear(HIDDEN, num_actions)
        self.log_deviation = nn.Parameter(torch.zeros(num_actions))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the actions in a state."""
        return self.mean(self.body(state)), self.log_deviation.exp()

    def log_probability(self, state: Tensor, action: Tensor) -> Tensor:
        """Log density of an action, a scalar."""
        mean, deviation = self(state)
        squares = ((action - mean) / deviation).square()
        return torch.sum(-0.5 * (squares + math.log(2 * math.pi)) - self.log_deviation)


def reward(loss: float, last_loss: float, zone: float, config: GuardianConfig) -> float:
    """Equation (c)."""
    near = 1 / (1 + math.exp(min(700.0, -config.zone_sharpness * (zone - loss))))
    return -loss + config.gain_weight * max(0.0, last_loss - loss) + config.zone_weight * near


@torch.no_grad()
def act(guarded: Sequence[RegimeAttention], action: Tensor) -> None:
    """Equation (b) with b inside the action, within the bounds of each quantity."""
    warmer, drift, pressure = action.tolist()
    for mixer in guarded:
        mixer.move_temperature(TEMPERATURE_STEP * warmer)
        mixer.temperature_before.copy_(mixer.temperature)
        mixer.drift.add_(PENALTY_STEP * drift).clamp_(0, LARGEST_DRIFT)
        mixer.pressure.add_(PENALTY_STEP * pressure).clamp_(0, LARGEST_PRESSURE)


def validation_cross_entropy(model: SequenceModel, dataset: Dataset, *, most_users: int = 4096) -> float:
    """Equation (e) over the users of the data set, or over so many of them at equal distances."""
    view = view_of(dataset, "validation", next_events=True)
    num_users = len(view.target)
    chosen = np.unique(np.linspace(0, num_users - 1, min(num_users, most_users)).astype(np.int64))
    view = view.rows(chosen)
    total, first = 0.0, 0
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        weight, bias = table.weight[1:], None if table.bias is None else table.bias[1:]
        rows = max(1, BLOCK_SCORES // weight.shape[0])
        how: dict[str, Any] = {"times": view.times, "reliability": view.reliability}
        for batch in read_histories(
            model, view.items, view.start, view.stop, **how, source=f"data set {dataset.name!r}"
        ):
            states = model.user_states(batch.to(weight.device)).state
            target = torch.from_numpy(view.target[first : first + len(states)] - 1).to(weight.device)
            for part, wanted in zip(states.split(rows), target.split(rows), strict=True):
                total += float(F.cross_entropy(F.linear(part, weight, bias), wanted, reduction="sum"))
            first += len(states)
    return total / len(chosen)


def regime_mixers(model: nn.Module) -> list[RegimeAttention]:
    return [module for module in model.modules() if isinstance(module, RegimeAttention)]


def mean_temperature(guarded: Sequence[RegimeAttention]) -> float:
    return sum(mixer.temperature.item() for mixer in guarded) / len(guarded)

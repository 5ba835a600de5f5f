"""A population game over history lengths: which lengths to train on follows from what they earn.

    q(c) proportional to q(c) exp(eta u(c))                            once per epoch                        (10.2)
    u(c) = -loss(c) - l_s max(0, sat(c) - s_0) + l_h H(c) / log R      means over the steps that played c       (a)

Each step draws c from q and cuts the histories of its batch to their last c events; where no target would be left (of
masked items there may be few), the batch stays whole and c is not played. A length that no step played earns the mean
of the others, which leaves its share to them. sat and H are the saturated share and the entropy of the regime mixers'
memberships, 0 without one.

Source: Fuzzy-Gated Training for Transformers, section 4.1.
Shapes: B rows, T tokens, S histories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recbft.config.fields import check_range
from recbft.datasets.batches import Batch
from recbft.errors import UserError
from recbft.training.controllers.guardian import regime_mixers
from recbft.training.controllers.hooks import Moment


@dataclass(frozen=True, kw_only=True)
class ContextGameConfig:
    """Equations (10.2) and (a)."""

    lengths: tuple[int, ...]  # c, two or more
    eta: float = 0.5  # how fast shares follow what lengths earn
    saturation_weight: float = 0.1  # l_s
    saturation_free: float = 0.5  # s_0
    entropy_weight: float = 0.1  # l_h

    def __post_init__(self) -> None:
        for length in self.lengths:
            check_range("lengths", length, at_least=1)
        if len(set(self.lengths)) < max(2, len(self.lengths)):
            raise UserError(f"lengths is {list(self.lengths)}; give two different lengths or more, such as [20, 50]")
        check_range("eta", self.eta, above=0)
        for name in ("saturation_weight", "saturation_free", "entropy_weight"):
            check_range(name, getattr(self, name), at_least=0)


class ContextGame:
    """Equations (10.2) and (a).

    Args:
        model: whose regime mixers are asked for (a).
        seed: of its draws; the default generator is left alone.
    """

    def __init__(self, config: ContextGameConfig, model: nn.Module, *, seed: int = 0) -> None:
        longest = getattr(model, "max_length", math.inf)
        if min(config.lengths) >= longest:
            raise UserError(
                f"controllers.context_game.lengths is {list(config.lengths)}, but the model reads {longest} events at "
                "most, so that none would cut a history; give a shorter one"
            )
        self.config, self.mixers = config, regime_mixers(model)
        for key in () if self.mixers else ("saturation_weight", "saturation_free", "entropy_weight"):
            if getattr(config, key) != getattr(ContextGameConfig, key):
                raise UserError(
                    f"controllers.context_game.{key} has no effect without mixer 'regime', whose memberships it looks "
                    "at; leave it out"
                )
        self.generator = torch.Generator().manual_seed(seed)
        self.log_share = torch.zeros(len(config.lengths), dtype=torch.float64)
        self.earned = torch.zeros_like(self.log_share)
        self.played = torch.zeros_like(self.log_share)
        self.chosen: int | None = None  # the length that the batch in progress plays

    @property
    def shares(self) -> dict[int, float]:
        """q by length."""
        return dict(zip(self.config.lengths, torch.softmax(self.log_share, dim=0).tolist(), strict=True))

    def on_batch(self, batch: Batch) -> Batch:
        """The batch with its histories cut to a length drawn from q."""
        share = torch.softmax(self.log_share, dim=0)
        self.chosen = int(torch.multinomial(share, 1, generator=self.generator))
        shorter = cut(batch, self.config.lengths[self.chosen])
        if shorter.target is not None and not bool(shorter.target.any()):
            self.chosen = None
            return batch
        return shorter

    def after_step(self, moment: Moment, loss: float) -> None:
        """What the step earned, (a)."""
        if self.chosen is None:
            return
        c, utility = self.config, -loss
        for mixer in self.mixers:
            seen = mixer.diagnosis()
            held = c.saturation_weight * max(0.0, seen.saturated - c.saturation_free)
            spread = c.entropy_weight * seen.entropy / math.log(mixer.config.regimes)
            utility += (spread - held) / len(self.mixers)
        self.earned[self.chosen] += utility
        self.played[self.chosen] += 1

    def on_epoch_end(self, moment: Moment, row: Mapping[str, Any]) -> None:
        """Equation (10.2)."""
        played = self.played > 0
        if bool(played.any()):
            utility = self.earned / self.played.clamp(min=1)
            utility = torch.where(played, utility, utility[played].mean())
            self.log_share = torch.log_softmax(self.log_share + self.config.eta * utility, dim=0)
        self.earned.zero_()
        self.played.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Shares, what was earned since they were set, and the generator."""
        return {
            "log_share": self.log_share.clone(),
            "earned": self.earned.clone(),
            "played": self.played.clone(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.log_share, self.earned, self.played = (state[name].clone() for name in ("log_share", "earned", "played"))
        self.generator.set_state(state["generator"])


def cut(batch: Batch, length: int) -> Batch:
    """The last ``length`` tokens of each history; what stood before them becomes padding, positions count from 0.

    Where the batch knows the items before what is read, those that are cut join them.
    """
    S = batch.last.numel()
    ends = batch.position.flatten()[batch.last]  # (S,) the last position of each history
    dropped = (ends + 1 - length).clamp(min=0)[batch.segment.clamp(min=0, max=max(0, S - 1))]  # (B, T)
    kept = (batch.segment >= 0) & (batch.position >= dropped)
    if bool((kept == (batch.segment >= 0)).all()):
        return batch

    def keep(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(kept, values, 0)

    if batch.earlier is not None and batch.num_earlier is not None:
        gone = (batch.segment >= 0) & ~kept
        history = torch.arange(S, device=gone.device).repeat_interleave(batch.num_earlier)
        order = torch.cat([history, batch.segment[gone]]).argsort(stable=True)
        batch = batch._replace(
            earlier=torch.cat([batch.earlier, batch.items[gone]])[order],
            num_earlier=batch.num_earlier + batch.segment[gone].bincount(minlength=S),
        )
    return batch._replace(
        items=torch.where(kept, batch.items, 0),
        segment=torch.where(kept, batch.segment, -1),
        position=torch.where(kept, batch.position - dropped, 0),
        time=keep(batch.time),
        target=keep(batch.target),
        next_time=keep(batch.next_time),
        weight=keep(batch.weight),
        reliability=None if batch.reliability is None else batch.reliability.masked_fill(~kept, float("nan")),
    )

"""What a mixer gives and takes: the interface of what moves information along T in a layer.

Shapes: B rows, T tokens, D model width, H heads, K head width, N tokens that are wanted.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from recbft.core import Estimator, SequenceContext, pick, projected_precision, ramped
from recbft.errors import UserError

Group = Literal["backbone", "precision", "dynamics"]  # of the optimiser
Kriging = Literal["scalar", "per_dimension"]
DECAY, DECAY_KEPT = (
    "decay_logit",
    "decay_kept",
)  # of mixers with a recency decay: the parameter, and what keeps it whole


class Observation(NamedTuple):
    """One layer's evidence about every position."""

    innovation: Tensor  # (B, T, D)
    precision: Tensor | None  # (B, T, D), >= 0; None where the mixer has no estimate

    def each(self, change: Callable[[Tensor], Tensor]) -> Observation:
        """Both parts changed alike, precision where there is one."""
        return Observation(change(self.innovation), None if self.precision is None else change(self.precision))

    def at(self, only: Tensor | None) -> Observation:
        """The evidence about some tokens alone, counted through the rows, (N, D); all of it where ``only`` is None."""
        return self.each(lambda part: pick(part, only))


@dataclass(frozen=True, kw_only=True)
class Estimation:
    """How a layer with a precision channel estimates the precision of what it observes: ``CoreConfig`` says more."""

    lam_max: float
    estimator: Estimator | None = None  # None for a mixer without an estimator
    prior_dof: float = 1.0
    prior_variance: float | None = None
    running: bool = False  # values in units of their own spread, of ``mixers.value_unit``
    kriging: Kriging = "scalar"
    centre: Literal["root", "innovation"] = "root"  # m of the sandwich estimator


@dataclass(frozen=True, kw_only=True)
class MixerOptions:
    """A mixer's own settings (the ``mixing`` section of a config): none, unless a class derived from this has some."""

    only_with_precision: ClassVar[tuple[str, ...]] = ()  # settings that have an effect under a precision channel alone

    @property
    def reads_times(self) -> bool:
        """Whether the mixer needs the time of every event."""
        return False


class TrainedPart(nn.Module):
    """A part of a model that says how its parameters are trained.

    ``groups`` names the optimiser group of a parameter or submodule of this part; the others are in the group of what
    holds the part. ``penalty`` holds what a pass in training adds to the loss.
    """

    groups: Mapping[str, Group] = {}
    penalty: PenaltySlot | None = None


class Mixer(TrainedPart, abc.ABC):
    """What moves information along T; its constructor takes D and H, which divides D.

    A mixer defines ``forward``, and changes what else is said here where it differs. ``gives_precision`` says whether
    its observations have a precision, which the Kalman update needs. ``takes_only`` says that ``forward`` accepts
    ``only``: tokens, counted through the rows, whose observation, (N, D), is all that is wanted, as of each history's
    last in evaluation. ``n_heads`` and ``by_coordinate`` (a weight per coordinate, not per head) give the shape of
    ``attention``; ``mixes_heads`` says that an output map follows the heads. ``complex_maps`` names linear maps whose
    outputs are complex, two rows each. Of what constructors are told, ``output_projection`` asks for the output map,
    ``gives_precision`` for a precision, and ``lam_max`` is the largest one.
    """

    gives_precision: bool = False
    takes_only: bool = False
    complex_maps: tuple[str, ...] = ()
    n_heads: int = 1
    by_coordinate: bool = False
    mixes_heads: bool = False

    @abc.abstractmethod
    def forward(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Observation:
        """Observe every position.

        Args:
            x: normalised input, (B, T, D).
            precision: incoming precision, (B, T, D), or None for equal trust in every key.
            context: which token may read which, and when.
            ramp: w, the warm-up of the precision and recency biases, in [0, 1].
            source: what keys and values are read from, (B, T, D); ``x`` unless given.
        """

    def attention(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Tensor | None:
        """The weights behind ``forward``, before dropout: (B, H, T, T), or (B, D, T, T) by coordinate; None if none."""
        return None

    @property
    def recency_decay(self) -> Tensor | None:
        """rho of (2.2), the factor by which a key's weight falls with every position of lag."""
        return None


class PenaltySlot:
    """Holds one scalar from a part's last pass in training until the loss takes it.

    Copies and pickles of a slot are empty: the scalar belongs to one pass and its gradient.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def leave(self, value: Tensor) -> None:
        """Put a scalar here, in place of one that nobody took."""
        self.value = value

    def take(self) -> Tensor | None:
        """The scalar, once."""
        value, self.value = self.value, None
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return PenaltySlot, ()


def take_penalties(model: nn.Module) -> Tensor | None:
    """The sum of what the parts of a model have left in their slots, or None where there is nothing."""
    slots = [part.penalty for part in model.modules() if isinstance(part, TrainedPart) and part.penalty is not None]
    left = [value for value in (slot.take() for slot in slots) if value is not None]
    return sum(left[1:], left[0]) if left else None


def optimiser_groups(model: nn.Module) -> dict[str, Group]:
    """The group of every parameter by its name: the one that the innermost part around it says."""
    said = {
        f"{path}.{name}".lstrip("."): group
        for path, part in model.named_modules()
        if isinstance(part, TrainedPart)
        for name, group in part.groups.items()
    }
    found: dict[str, Group] = {}
    for name, _ in model.named_parameters():
        path = name.split(".")
        around = (said.get(".".join(path[:end])) for end in range(len(path), 0, -1))
        found[name] = next((group for group in around if group is not None), "backbone")
    return found


def refuse_idle(config: Any, names: Collection[str], why: str) -> None:
    """Refuse settings of a config that were changed and would have no effect."""
    for field in fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            raise UserError(f"{field.name} has no effect {why}")


def log_decay(logit: Tensor | None, ramp: float, kept: Tensor | None) -> Tensor | None:
    """The recency term of (2.2) for a lag of 1, w log rho; ``kept`` holds w at 1 where rho was learned before."""
    return None if logit is None else ramped(F.logsigmoid(logit), ramp if kept is None else 1.0)


def projected(observation: Observation, out: nn.Linear | None, *, cap: float) -> Observation:
    """An observation through a mixer's output map, if it has one: precision through the squared weights, (2.13)."""
    innovation, precision = observation
    if out is None:
        return observation
    found = None if precision is None else projected_precision(precision, out.weight, cap=cap)
    return Observation(out(innovation), found)


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """(B, T, H K) -> (B, H, T, K)."""
    heads: Tensor = x.unflatten(-1, (n_heads, -1))
    return heads.transpose(1, 2)


def joined(heads: Tensor) -> Tensor:
    """(B, H, T, K) -> (B, T, H K)."""
    return heads.transpose(1, 2).flatten(2)

"""The linear stochastic dynamics that robust filter attention supposes, and the clock that it reads them by.

    dx = A x dt + G dw,   A = -mu + i w                                  a decaying rotation per coordinate      (a)
    E(dt) = exp(-mu dt)   turn(t) = exp(-i w t)                          decay and rotation of what was seen   (9.6)
    V(dt) = s2 (1 - E^2) + eta2 E^2 + gamma2        mu > 0               variance of query minus carried key   (9.7)
    V(dt) = s2 dt + eta2 + gamma2                   mu = 0                                                     (9.7)

s2 is what the process noise adds up to. Where mu > 0 that is its steady state; where mu = 0 there is none, and s2 is
the variance added per unit of time. (9.7) for mu > 0 with s2 = rate / (2 mu) tends to (9.7) for mu = 0 with s2 = rate.

Time is the position in the history, or real elapsed time in units of ``time_unit``. A negative elapsed time is refused.

Source: Robust Filter Attention (paper), equation 9 and appendices A.2, A.3 and C.6.
Shapes: B rows, H heads, T tokens, K complex coordinates per head.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from recbft.core.belief import SequenceContext
from recbft.core.observation_precision import epsilon_of
from recbft.errors import UserError

Kernel = Literal["student", "gaussian"]


class Dynamics(NamedTuple):
    """What each head supposes; the reference also takes (H, K), every coordinate its own."""

    frequency: Tensor  # (H, K)  w, radians per unit of time
    decay: Tensor  # (H,)  mu, >= 0
    process: Tensor  # (H,)  s2 of (9.7), >= 0
    key_noise: Tensor  # (H,)  eta2, >= 0
    query_noise: Tensor  # (H,)  gamma2, >= 0
    dof: Tensor  # (H,)  nu, > 0
    temperature: Tensor  # (H,)  tau_s, an inverse temperature


class Variant(NamedTuple):
    """Which parts of the mechanism are switched on."""

    kernel: Kernel = "student"
    multiplicative: bool = True  # the precision weighs the squared residual
    rotate_values: bool = True  # values are carried as queries and keys are
    horizon: float = 0.0  # units of time ahead of the query that the estimate is for


class Clock(NamedTuple):
    """When each token asks and is read; one row stands for all where all rows count columns."""

    query: Tensor  # (B or 1, T)  float64
    key: Tensor  # (B or 1, T)  float64
    lag: Tensor  # (B or 1, T, T)  query less key
    in_columns: bool = False  # the lag is the distance of two columns
    by_position: bool = True  # the lag is the distance of two positions
    unit: float | Tensor = 1.0  # of the data's time


class Setting(NamedTuple):
    """What a filter is told beside queries, keys and values."""

    context: SequenceContext
    dynamics: Dynamics
    clock: Clock
    variant: Variant


def read_clock(
    context: SequenceContext, *, use_time: bool = False, time_unit: float | Tensor = 1.0, dtype: torch.dtype
) -> Clock:
    """The clock of a batch.

    Args:
        context: positions, and times where ``use_time``.
        use_time: read real times, not positions.
        time_unit: how much of the data's time makes one unit of the clock, > 0.
        dtype: of the lags.

    Raises:
        UserError: there are no times, or a token that may be read lies in the reader's future by its time.
    """
    if use_time:
        return _read_times(context, time_unit, dtype)
    if not in_columns(context):
        lag = context.position[:, :, None] - context.position[:, None, :]
        position = context.position.double()
        return Clock(position, position, lag.to(dtype))
    column = torch.arange(context.position.shape[1], device=context.position.device)[None]
    return Clock(column.double(), column.double(), (column[:, :, None] - column[:, None, :]).to(dtype), in_columns=True)


def in_columns(context: SequenceContext) -> bool:
    """Whether every history lies token after token, so that a lag in positions is one in columns."""
    offset = context.position - torch.arange(context.position.shape[1], device=context.position.device)
    moved = (offset != offset.gather(1, context.first)) & context.valid
    return not bool(moved.any())


def _read_times(context: SequenceContext, time_unit: float | Tensor, dtype: torch.dtype) -> Clock:
    if context.time is None:
        raise UserError(
            "time: true needs the time of every event, and the data has none; give a time column or set time: false"
        )
    asked = context.time if context.query_time is None else context.query_time
    lag = asked[:, :, None] - context.time[:, None, :]
    earlier = context.position[:, None, :] <= context.position[:, :, None]
    backwards = lag.masked_fill(~(context.allowed & earlier), 0)
    if bool((backwards < 0).any()):
        raise UserError(
            f"elapsed time {int(backwards.min())} between an event and one before it in its history is negative; "
            "sort every history by time"
        )
    # Counted from the history's first event, exactly, before they lose digits to floating point.
    start = context.time.gather(1, context.first)
    query, key = ((time - start).double() / time_unit for time in (asked, context.time))
    return Clock(query, key, lag.to(dtype) / time_unit, by_position=False, unit=time_unit)


def residual_variance(elapsed: Tensor, dynamics: Dynamics) -> Tensor:
    """Equation (9.7), with fields that broadcast against ``elapsed``; kept off 0 by a rounding's breadth."""
    span = 2 * dynamics.decay * elapsed
    # expm1: with a small decay 1 - E^2 would be rounding, times a large s2.
    diffused = torch.where(dynamics.decay > 0, -torch.expm1(-span), elapsed)
    variance = dynamics.process * diffused + dynamics.key_noise * torch.exp(-span) + dynamics.query_noise
    return variance.clamp(min=epsilon_of(variance))


def turns_of(frequency: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
    """``turns`` of queries and of keys, one for both where these have the same times."""
    query = turns(frequency, clock.query)
    return query, query if clock.key is clock.query else turns(frequency, clock.key)


def turns(frequency: Tensor, time: Tensor) -> Tensor:
    """exp(-i w t), (B or 1, H, T, K): turns a token's coordinates back to where its history began.

    The angle is formed in float64: after a long time its fraction of a circle is all that counts.
    """
    angle = -frequency.double()[None, :, None, :] * time[:, None, :, None]
    turned = torch.polar(torch.ones_like(angle), angle)
    return turned if frequency.dtype == torch.float64 else turned.to(torch.complex64)

"""Update and prediction on a GPU: one launch in each direction instead of some twenty.

    Q = softplus(q) Q_max,   softplus(q) = max(q, 0) + log(1 + exp(-|q|))                        (1)
    log(1 + e) = 2 (z + z^3 / 3 + z^5 / 5 + ..),   z = e / (2 + e) <= 1/3                        (2)

1 + exp(-|q|) would round off the digits that a small noise is made of, which (2) keeps. Sums over tokens are made of
parts that are added up in one order, so that two runs are equal bit for bit.

Shapes: N tokens, D model width; the tokens' axes come first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recbft.core.process import FLOOR
from recbft.kernels.dispatch import launched_beside
from recbft.kernels.triton_parts import added, cut, own_columns

ELEMENTS = 1024  # of a program
SUMMED = 2048  # elements of a program that adds up over tokens


def update(h: Tensor, lam: Tensor, e: Tensor, r: Tensor, updated: Tensor, after: Tensor, ramp: float) -> None:
    """As ``fused.Passes`` says."""
    _launched(_update, h)(h, lam, e, r, updated, after, ramp, h.numel(), ELEMENTS=ELEMENTS)


def update_gradients(given: tuple[Tensor | None, ...], found: tuple[Tensor, ...], ramp: float) -> None:
    """As ``fused.Passes`` says."""
    like = found[0]
    _launched(_update_gradients, like)(*given, *found, ramp, like.numel(), ELEMENTS=ELEMENTS)


def predict(
    lam: Tensor, J: Tensor, Q: Tensor, predicted: Tensor, low: float, cap: float, *, q_max: float | None = None
) -> None:
    """As ``fused.Passes`` says; with ``q_max``, Q is q of (1)."""
    sizes, each = (lam.numel(), lam.shape[-1]), J.shape == lam.shape
    _launched(_predict, lam)(lam, J, Q, predicted, low, cap, q_max, *sizes, EACH=each, FLOOR=FLOOR, ELEMENTS=ELEMENTS)


def predict_gradients(given: tuple[Tensor, ...], d_lam: Tensor, d_J: Tensor | None, low: float, cap: float) -> Tensor:
    """As ``fused.Passes`` says."""
    return _gradients_and_parts(given, d_lam, d_J, low, cap, q_max=None).sum(dim=0)


def _gradients_and_parts(
    given: tuple[Tensor, ...], d_lam: Tensor, d_J: Tensor | None, low: float, cap: float, *, q_max: float | None
) -> Tensor:
    """Parts of the gradient of Q, (parts, D); with ``q_max`` q of (1) was given in its place."""
    lam, J, Q = given[:3]
    D = lam.shape[-1]
    N = lam.numel() // max(D, 1)
    columns = triton.next_power_of_2(D)
    tokens = max(1, SUMMED // columns)
    parts = Q.new_empty(triton.cdiv(N, tokens), D)
    if len(parts):
        launched_beside(lam, _predict_gradients[(len(parts),)])(
            *(*given, d_lam, d_J, parts, low, cap, q_max, N, D),
            EACH=J.shape == lam.shape, FLOOR=FLOOR, TOKENS=tokens, COLUMNS=columns,
        )  # fmt: skip
    return parts


@dataclass(frozen=True)
class LearnedNoise:
    """What ``fused.Passes`` has for a prediction, which is given q of (1) in the place of Q."""

    q_max: float

    def predict(self, *given: Any) -> None:
        """As ``fused.Passes`` says, with q."""
        predict(*given, q_max=self.q_max)

    def predict_gradients(self, given: tuple[Tensor, ...], *found_and_bounds: Any) -> Tensor:
        """As ``fused.Passes`` says, with q and its gradient."""
        parts = _gradients_and_parts(given, *found_and_bounds, q_max=self.q_max)
        q = given[2]
        d_q = torch.empty_like(q)
        if len(q):
            grid, constants = cut(*parts.shape)
            launched_beside(q, _logit_gradients[grid])(parts, q, d_q, self.q_max, *parts.shape, **constants)
        return d_q


def _launched(kernel: Any, x: Tensor) -> Any:
    """A kernel with as many programs as the elements of ``x`` take, on its device."""
    return launched_beside(x, kernel[(max(1, triton.cdiv(x.numel(), ELEMENTS)),)])


# fmt: off
@triton.jit
def _update(
    means, precisions, innovations, observed,  # read
    updated, after,  # written
    ramp, size, ELEMENTS: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    r = tl.load(observed + at, mask=real, other=0.0)
    total = tl.load(precisions + at, mask=real, other=1.0) + r
    gain = 1 - ramp * (1 - r / total)
    h = tl.load(means + at, mask=real, other=0.0)
    e = tl.load(innovations + at, mask=real, other=0.0)
    tl.store(updated + at, h + gain * e, mask=real)
    tl.store(after + at, total, mask=real)


# fmt: off
@triton.jit
def _update_gradients(
    innovations, observed, after, of_mean, of_precision,  # read; the last may be None
    d_precision, d_innovation, d_observed,  # written
    ramp, size, ELEMENTS: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    total = tl.load(after + at, mask=real, other=1.0)
    share = tl.load(observed + at, mask=real, other=0.0) / total
    g = tl.load(of_mean + at, mask=real, other=0.0)
    p = ramp * g * tl.load(innovations + at, mask=real, other=0.0) / total
    own = -p * share
    if of_precision is not None:
        own += tl.load(of_precision + at, mask=real, other=0.0)
    tl.store(d_precision + at, own, mask=real)
    tl.store(d_observed + at, own + p, mask=real)
    tl.store(d_innovation + at, g * (1 - ramp * (1 - share)), mask=real)


@triton.jit
def _noise(noises, q_max):
    """(1), or what is given where there is no ``q_max``."""
    if q_max is not None:
        e = tl.exp(-tl.abs(noises))
        z = e / (2 + e)
        s = z * z
        series = 1 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13 + s / 15))))))
        noises = (tl.where(noises < 0, 0.0, noises) + 2 * z * series) * q_max
    return noises


# fmt: off
@triton.jit
def _predict(
    precisions, jacobians, noises,  # read
    predicted,  # written
    low, cap, q_max, size, width, EACH: tl.constexpr, FLOOR: tl.constexpr, ELEMENTS: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real, column = at < size, at % width
    lam = tl.load(precisions + at, mask=real, other=1.0)
    stretch = 1 + tl.load(jacobians + (at if EACH else column), mask=real, other=0.0)
    square = stretch * stretch
    slope = tl.where(square < FLOOR, FLOOR, square)  # not maximum, which drops what is not a number
    found = lam / (slope + _noise(tl.load(noises + column, mask=real, other=0.0), q_max) * lam)
    found = tl.where(found < low, low, found)
    tl.store(predicted + at, tl.where(found > cap, cap, found), mask=real)


# fmt: off
@triton.jit
def _predict_gradients(
    precisions, jacobians, noises, predicted, of_predicted,  # read
    d_precision, d_jacobian, d_noises,  # written; d_jacobian may be None; d_noises by program
    low, cap, q_max, num_tokens, width,
    EACH: tl.constexpr, FLOOR: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    at = tokens[:, None] * width + columns[None, :]
    real = (tokens < num_tokens)[:, None] & inside[None, :]
    lam = tl.load(precisions + at, mask=real, other=0.0)
    after = tl.load(predicted + at, mask=real, other=0.0)
    if EACH:
        stretch = 1 + tl.load(jacobians + at, mask=real, other=0.0)
    else:
        stretch = 1 + tl.load(jacobians + columns, mask=inside, other=0.0)[None, :]
    square = stretch * stretch
    slope = tl.where(square < FLOOR, FLOOR, square)
    divisor = slope + _noise(tl.load(noises + columns, mask=inside, other=0.0), q_max)[None, :] * lam
    p = tl.load(of_predicted + at, mask=real, other=0.0) / (divisor * divisor)
    p = tl.where((after > low) & (after < cap), p, 0.0)
    tl.store(d_precision + at, p * slope, mask=real)
    p *= lam
    if d_jacobian is not None:
        tl.store(d_jacobian + at, tl.where(square > FLOOR, -2 * p * stretch, 0.0), mask=real)
    tl.store(d_noises + tl.program_id(0) * width + columns, -tl.sum(p * lam, 0), mask=inside)


@triton.jit
def _logit_gradients(parts, logits, d_logits, q_max, num_parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """From the parts of the gradient of Q."""
    columns = own_columns(COLUMNS)
    inside = columns < width
    q = tl.load(logits + columns, mask=inside, other=0.0)
    e = tl.exp(-tl.abs(q))
    slope = tl.where(q < 0, e, 1.0) / (1 + e)
    total = added(parts, num_parts, columns, width, ROWS, COLUMNS)
    tl.store(d_logits + columns, total * slope * q_max, mask=inside)

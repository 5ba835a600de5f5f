"""Memories as their equations read, token by token: the plain forms every fast path must equal.

The Bayesian layer, which carries a covariance:

    Pb = A P A' + ell2 D     u = Pb k     beta = 1 / (r2 + k' u)                                  (9.15)
    M  = A M + beta u (v - (A M)' k)'     P = Pb - beta u u'                                      (9.16)
    y  = M' q     its variance q' P q     gain = beta k' u                                        (9.17)

M = 0 and P = p0 I before a history's first token. A is diagonal, or turns and damps the pairs of rows (0, 1), (2, 3),
...; D is the identity, with pairs the identity on the first row of each.

Memories without: where Pb is reset to lam I before every write (delta rules), or the write is not about the memory but
an input to it (additive rules). r2, and with it what follows from it, may differ from column to column of the values:

    reset     eta = lam / (r2 + lam |k|^2)     M = A M + k (eta * (v - (A M)' k))'                (9.19)
              q' P q = lam (|q|^2 - eta (q' k)^2) after the write     gain = eta |k|^2            (9.20)
    additive  omega = lam / (lam + r2)         M = A M + k (omega * v)'     gain = omega          (9.21)

A covariance that rounding has made negative somewhere is warned about (``check_positive``), never hidden.

Source: Dowling et al., Memory by Design, equations 9 to 13, proposition 2, table 1, appendices A and D.
Shapes: B rows, H heads, T tokens, K key width, M value width.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from recbft.autograd.transforms import transformed

Rule = Literal["reset", "additive"]
TOLERATED = 1e-3  # of the observation noise: below this a negative variance moves no gain by more


class MemoryEvent(NamedTuple):
    """What is written and read, and how the memory moves and is seen: of one token, or of (B, H, T) side by side."""

    query: Tensor  # (..., K)
    key: Tensor  # (..., K)
    value: Tensor  # (..., M)
    transition: Tensor | None  # (..., K) in (0, 1]; complex (..., K / 2) for damped rotations of pairs; None keeps all
    process_noise: Tensor  # (...), the variance added to every row, of pairs to their first row; >= 0
    observation_noise: Tensor  # (...), the variance of a value about what its key reads; > 0


class MemoryTrace(NamedTuple):
    """What every token of every history reads after its own write, and the belief after the last column.

    The belief is N(mean, I (x) covariance): every column of values has the same covariance.
    """

    readout: Tensor  # (B, H, T, M)
    readout_variance: Tensor  # (B, H, T), q' P q
    gain: Tensor  # (B, H, T), beta k' u, the share of the innovation taken up at the key, in [0, 1)
    mean: Tensor  # (B, H, K, M)
    covariance: Tensor  # (B, H, K, K), symmetric


class UnfilteredTrace(NamedTuple):
    """The same of a memory without a covariance; with noise by column, variance and gain are by column too."""

    readout: Tensor  # (B, H, T, M)
    readout_variance: Tensor | None  # (B, H, T) or (B, H, T, M); None by the additive rule
    gain: Tensor  # (B, H, T) or (B, H, T, M)
    mean: Tensor  # (B, H, K, M)


def step(M: Tensor, P: Tensor, event: MemoryEvent) -> MemoryTrace:
    """One token: predict, write, read."""
    q, k, v, a, ell2, r2 = event
    if a is not None:
        M, P = advance(a, M), advance(a, advance(a, P).mT)
    P = P + torch.diag_embed(ell2[..., None] * noisy_rows(k, a))
    u = torch.einsum("...ij,...j->...i", P, k)
    spread = (k * u).sum(-1)  # k' u
    beta = 1 / (r2 + spread)  # (9.15)
    gain = beta[..., None] * u
    innovation = v - torch.einsum("...km,...k->...m", M, k)
    M = M + gain[..., :, None] * innovation[..., None, :]
    P = P - gain[..., :, None] * u[..., None, :]  # (9.16)
    P = (P + P.mT) / 2
    readout = torch.einsum("...km,...k->...m", M, q)
    variance = torch.einsum("...i,...ij,...j->...", q, P, q)
    return MemoryTrace(readout, variance, beta * spread, M, P)  # (9.17)


def prior(k: Tensor, v: Tensor, prior_variance: Tensor) -> tuple[Tensor, Tensor]:
    """M and P before any token: of keys (..., K) and values (..., M), with prior variance (...)."""
    K, M = k.shape[-1], v.shape[-1]
    identity = torch.eye(K, dtype=k.dtype, device=k.device)
    return v.new_zeros(*v.shape[:-1], K, M), prior_variance.expand(k.shape[:-1])[..., None, None] * identity


def filter_memory_ref(
    events: MemoryEvent, prior_variance: Tensor, first: Tensor | None, *, chunk: int | None = None
) -> MemoryTrace:
    """Filter histories laid out one after another.

    Args:
        events: of (B, H, T) tokens.
        prior_variance: p0, (B, H), > 0.
        first: (B, T), True where a history begins; None for column 0.
        chunk: the longest chunk of paths that have any; it has no effect here, which goes token by token.
    """
    start = M, P = prior(events.key[:, :, 0], events.value[:, :, 0], prior_variance)
    readings = []
    for t in range(events.key.shape[2]):
        if first is not None:
            fresh = first[:, t, None, None, None]
            M, P = torch.where(fresh, start[0], M), torch.where(fresh, start[1], P)
        *reading, M, P = step(M, P, MemoryEvent._make(None if x is None else x[:, :, t] for x in events))
        readings.append(reading)
    readout, variance, gain = (torch.stack(part, dim=2) for part in zip(*readings, strict=True))
    return MemoryTrace(readout, variance, gain, M, P)


def unfiltered_step(
    mean: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, share: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """One token of a memory (..., K, M) by (9.19) or (9.21), ``share`` eta or omega, (..., M or 1): memory and M' q."""
    mean = mean if a is None else advance(a, mean)
    written = v - torch.einsum("...km,...k->...m", mean, k) if rule == "reset" else v
    mean = mean + k[..., None] * (share * written)[..., None, :]
    return mean, torch.einsum("...km,...k->...m", mean, q)


def write_share(k: Tensor, observation_noise: Tensor, variance: Tensor, rule: Rule) -> Tensor:
    """eta or omega: of keys (..., K), noise (..., M or 1) and lam, which broadcasts to the noise."""
    length = k.square().sum(-1, keepdim=True) if rule == "reset" else 1.0
    return variance / (observation_noise + variance * length)


def unfiltered_reading(
    q: Tensor, k: Tensor, share: Tensor, variance: Tensor, rule: Rule
) -> tuple[Tensor | None, Tensor]:
    """The variance of (9.20), None by the additive rule, and the gain; both as ``share`` is shaped."""
    if rule == "additive":
        return None, share
    overlap = (q * k).sum(-1, keepdim=True)
    spread = variance * (q.square().sum(-1, keepdim=True) - share * overlap.square())
    return spread, share * k.square().sum(-1, keepdim=True)


def unfiltered_memory_ref(
    q: Tensor, k: Tensor, v: Tensor, *, transition: Tensor | None, share: Tensor, rule: Rule, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What every token reads, (B, H, T, M), and the memory after the last column, (B, H, K, M)."""
    mean, readouts = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None, :]), []
    for t in range(k.shape[2]):
        if first is not None:
            mean = torch.where(first[:, t, None, None, None], torch.zeros_like(mean), mean)
        a = None if transition is None else transition[:, :, t]
        mean, readout = unfiltered_step(mean, q[:, :, t], k[:, :, t], v[:, :, t], a, share[:, :, t], rule)
        readouts.append(readout)
    return torch.stack(readouts, dim=2), mean


def advance(a: Tensor, x: Tensor) -> Tensor:
    """A x for x (..., K, n): row by row, or pair of rows by pair where ``a`` is complex."""
    if not a.is_complex():
        return a[..., None] * x
    pairs = x.unflatten(-2, (-1, 2))  # (..., K / 2, 2, n)
    real, imaginary = pairs[..., 0, :], pairs[..., 1, :]
    cos, sin = a.real[..., None], a.imag[..., None]
    turned = torch.stack((cos * real - sin * imaginary, sin * real + cos * imaginary), dim=-2)
    return turned.flatten(-3, -2)


def noisy_rows(k: Tensor, a: Tensor | None) -> Tensor:
    """The diagonal of D, (K,)."""
    rows = torch.ones(k.shape[-1], dtype=k.dtype, device=k.device)
    if a is not None and a.is_complex():
        rows[1::2] = 0
    return rows


def check_positive(readout_variance: Tensor, gain: Tensor, observation_noise: Tensor) -> None:
    """Warn where a variance that cannot be negative is: q' P q, or k' Pb k as the gain shows it; not under torch.func.

    Args:
        readout_variance, gain, observation_noise: of every token, alike in shape.
    """
    if transformed():
        return
    margin = readout_variance.detach() / observation_noise.detach()
    lost = (margin < -TOLERATED) | (gain.detach() < -TOLERATED)
    if bool(lost.any()):
        predicted = gain.detach() / (1 - gain.detach())  # k' Pb k over the noise
        worst = torch.minimum(margin, predicted)[lost]
        told = worst[worst.isfinite()]
        report_loss(int(lost.sum()), lost.numel(), told.min().item() if told.numel() else -math.inf)


def report_loss(count: int, total: int, worst: float) -> None:
    """Warn of ``count`` steps with a negative variance, the worst of them in units of the observation noise."""
    warnings.warn(
        f"the covariance of a memory lost positive definiteness at {count:,} of {total:,} steps (worst variance "
        f"{worst:.3g} times the observation noise); raise the process or observation noise, or use float64",
        RuntimeWarning,
        stacklevel=3,
    )

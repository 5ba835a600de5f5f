"""A robust filter whose process noise comes and goes: what is it worth to know when?

    python -m benchmarks.mechanisms.time_noise

    q(t) = Re sum_j c_j exp(g_j t)                                      rate of the process noise at time t
    V(s, t) = Re sum_j c_j exp(g_j s) (exp(g_j dt) - exp(-2 mu dt)) / (2 mu + g_j)        what it adds from s to t

with dt = t - s. The paper writes V by dt alone, which is V(0, dt): the truth where noise restarts at every token that
is read. States rotate and decay as in ``mechanisms.reweighting``, and are seen in constant noise eta2. A filter's
estimate of the state at t is the mean of the tokens until then, each carried to t and weighted by its precision
1 / (V + eta2 exp(-2 mu dt)). It takes q for constant, or knows it; the Kalman filter stands beside it, likewise told
one or the other. Errors are root mean squares over the second half of every history. The paper has no figures.

Source: Robust Filter Attention, appendix C.7.
Shapes: B histories, T tokens, K complex coordinates, J exponentials.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from benchmarks.mechanisms import reweighting
from benchmarks.mechanisms.reweighting import CARRY, DECAY, LENGTH, NOISE, SPREAD, K, error, moved
from recbft.reporting.tables import text_table
from recbft.system.files import write_json

NAME = "mechanisms.time_noise"
MEAN_RATE = 2 * DECAY * SPREAD  # keeps the states at a variance of SPREAD
PERIODS = (8, 16, 32)
SWING = 1.0  # the rate goes from none to twice its mean


class Rate(NamedTuple):
    """q, the rate of the process noise."""

    weight: Tensor  # (J,)  c, complex
    growth: Tensor  # (J,)  g, complex


def constant() -> Rate:
    """The mean rate at all times."""
    return Rate(torch.tensor([MEAN_RATE + 0j]).cdouble(), torch.tensor([0j]).cdouble())


def swinging(period: float) -> Rate:
    """The mean rate times 1 + SWING cos(2 pi t / period)."""
    return Rate(MEAN_RATE * torch.tensor([1.0, SWING]).cdouble(), torch.tensor([0j, 2j * math.pi / period]).cdouble())


def added(rate: Rate, start: Tensor, end: Tensor, decay: float = DECAY) -> Tensor:
    """V from each start to each end, of equal shapes."""
    start, elapsed = start.double()[..., None], (end - start).double()[..., None]
    grown = torch.exp(rate.growth * elapsed) - torch.exp(-2 * decay * elapsed)
    return (rate.weight * torch.exp(rate.growth * start) * grown / (2 * decay + rate.growth)).sum(-1).real


def histories(number: int, rate: Rate, seed: int = 0) -> tuple[Tensor, Tensor]:
    """States and what is seen of them, (B, T, K) each."""
    g = torch.Generator().manual_seed(seed)

    def noise(variance: float | Tensor) -> Tensor:
        spread = torch.as_tensor(variance, dtype=torch.float64).sqrt().expand(LENGTH)[:, None]
        return torch.randn(number, LENGTH, K, generator=g, dtype=torch.complex128) * spread

    time = torch.arange(LENGTH)
    driving = noise(added(rate, time - 1, time))
    state = moved(noise(SPREAD)[:, 0], driving)
    return state, state + noise(NOISE)


def kalman(seen: Tensor, rate: Rate) -> Tensor:
    """The states by the Kalman filter that supposes this rate, (B, T, K)."""
    time = torch.arange(LENGTH)
    return reweighting.kalman(seen, added(rate, time - 1, time).tolist())


def filtered(seen: Tensor, rate: Rate, *, by_lag: bool = False) -> Tensor:
    """The filter's estimates, (B, T, K)."""
    time = torch.arange(LENGTH)
    end, start = time[:, None].expand(LENGTH, LENGTH), time.expand(LENGTH, LENGTH)
    elapsed = (end - start).clamp_min(0)
    process = added(rate, torch.zeros_like(elapsed), elapsed) if by_lag else added(rate, end - elapsed, end)
    precision = (1 / (process + NOISE * torch.exp(-2.0 * DECAY * elapsed))).tril()
    weight = precision / precision.sum(dim=1, keepdim=True)
    carried = weight[..., None] * CARRY ** elapsed[..., None]  # (T, T, K)
    return torch.einsum("tsk,bsk->btk", carried, seen)


def measure(number: int) -> list[dict[str, Any]]:
    """Errors by period, one row each."""
    rows = []
    for period in PERIODS:
        rate = swinging(period)
        state, seen = histories(number, rate)
        found = {
            "seen": seen,
            "constant": filtered(seen, constant()),
            "by lag": filtered(seen, rate, by_lag=True),
            "known": filtered(seen, rate),
            "Kalman, constant": kalman(seen, constant()),
            "Kalman, known": kalman(seen, rate),
        }
        rows.append({"period": period, **{name: error(estimate, state) for name, estimate in found.items()}})
    return rows


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    made = machine.header(recorded(NAME, arguments))
    rows = measure(options.histories)
    print("\n".join([*machine.lines(made), ""]))
    print(
        text_table(list(rows[0]), [[str(row["period"]), *(f"{x:.3f}" for x in list(row.values())[1:])] for row in rows])
    )
    print(f"root mean square errors of {options.histories} histories of {LENGTH} tokens, K = {K}")
    if options.json:
        write_json(options.json, machine.close(made) | {"time_noise": rows})
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    made = parser(NAME, "A filter whose process noise comes and goes.")
    made.add_argument("--histories", type=count, default=400, metavar="N")
    return parse(made, arguments)


if __name__ == "__main__":
    finish(main)

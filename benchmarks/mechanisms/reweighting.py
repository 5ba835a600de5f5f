"""Robust filter attention asked again with its own estimate: does reweighting more than once find the state better?

    python -m benchmarks.mechanisms.reweighting

States of the model that the filter supposes, K coordinates that rotate, decay and diffuse, are seen in noise; a share
of the tokens has noise of ``OUTLIER`` times the deviation. Queries, keys and values are what was seen; every parameter
is the true one. Each step's estimate is the next step's query (appendix C.3: iteratively reweighted least squares), or
its query, keys and values (the paper's reading of stacked layers). The Kalman filter, which takes all noise for
Gaussian, stands beside it. Errors are root mean squares over the second half of every history. The paper takes one step
per layer, starts at nu = 4 K, and has no figures.

Source: Robust Filter Attention, appendix C.3.
Shapes: B histories, T tokens, K complex coordinates.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from recbft.core import SequenceContext
from recbft.kernels.robust_filter import Dynamics, Variant, filtered, read_clock
from recbft.reporting.tables import text_table
from recbft.system.files import write_json

NAME = "mechanisms.reweighting"
FREQUENCY = torch.tensor([0.4, -0.4, 0.1, -0.1], dtype=torch.float64)
DECAY, SPREAD, NOISE = 0.05, 0.25, 0.5  # mu, variances of the state and of what is seen of it
LENGTH, K = 64, len(FREQUENCY)
OUTLIERS, OUTLIER = (0.0, 0.1, 0.2), 6.0
DOF = (0.5, 4.0)  # nu / K
STEPS = (1, 2, 3, 5, 10)
CARRY = torch.exp(torch.complex(torch.full_like(FREQUENCY, -DECAY), FREQUENCY))  # over one token
ADDED = SPREAD * -math.expm1(-2 * DECAY)


def histories(number: int, share: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """States and what is seen of them, (B, T, K) each."""
    g = torch.Generator().manual_seed(seed)

    def noise(variance: float) -> Tensor:
        return torch.randn(number, LENGTH, K, generator=g, dtype=torch.complex128) * math.sqrt(variance)

    driving = noise(ADDED)
    state = moved(noise(SPREAD)[:, 0], driving)
    wild = torch.rand(number, LENGTH, 1, generator=g) < share
    return state, state + noise(NOISE) * torch.where(wild, OUTLIER, 1.0)


def moved(first: Tensor, driving: Tensor) -> Tensor:
    """The states from a first one, (B, K), on, (B, T, K); ``driving`` is the noise that each token adds, (B, T, K)."""
    states = [first]
    for t in range(1, LENGTH):
        states.append(CARRY * states[-1] + driving[:, t])
    return torch.stack(states, dim=1)


def kalman(seen: Tensor, steps: Sequence[float] = (ADDED,) * LENGTH) -> Tensor:
    """The filtered states, (B, T, K); ``steps`` are the variances that each token's noise adds."""
    mean, variance, found = torch.zeros_like(seen[:, 0]), SPREAD, []
    for t in range(LENGTH):
        if t:
            mean, variance = CARRY * mean, variance * math.exp(-2 * DECAY) + steps[t]
        gain = variance / (variance + NOISE)
        mean, variance = mean + gain * (seen[:, t] - mean), (1 - gain) * variance
        found.append(mean)
    return torch.stack(found, dim=1)


def reweighted(seen: Tensor, dof: float, steps: int, *, stacked: bool) -> list[Tensor]:
    """The estimate after each step, (B, T, K)."""
    scalars = (DECAY, SPREAD, NOISE, NOISE, dof * K, 1.0)
    dynamics = Dynamics(FREQUENCY[None], *(torch.tensor([x], dtype=torch.float64) for x in scalars))
    place = torch.arange(LENGTH).expand(len(seen), LENGTH)
    context = SequenceContext(torch.zeros_like(place), place)
    clock = read_clock(context, dtype=torch.float64)
    query, found = seen[:, None], []
    for _ in range(steps):
        key = query if stacked else seen[:, None]
        query, _ = filtered(query, key, key, context, dynamics, clock, Variant(), with_evidence=False)
        found.append(query[:, 0])
    return found


def error(found: Tensor, state: Tensor) -> float:
    """Root mean square over the second half of the histories."""
    return (found - state)[:, LENGTH // 2 :].abs().square().mean().sqrt().item()


def measure(number: int) -> list[dict[str, Any]]:
    """Errors by share of outliers, tails and reading, one row each."""
    rows = []
    for share in OUTLIERS:
        state, seen = histories(number, share)
        beside = {"outliers": share, "seen": error(seen, state), "kalman": error(kalman(seen), state)}
        for dof in DOF:
            for stacked in (False, True):
                found = reweighted(seen, dof, max(STEPS), stacked=stacked)
                errors = {str(step): error(found[step - 1], state) for step in STEPS}
                rows.append({**beside, "dof": dof, "stacked": stacked, "errors": errors})
    return rows


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    made = machine.header(recorded(NAME, arguments))
    rows = measure(options.histories)
    print("\n".join([*machine.lines(made), ""]))
    head = ["outliers", "nu", "refined", "as seen", "Kalman", *(f"step {step}" for step in STEPS)]
    print(text_table(head, [_line(row) for row in rows]))
    print(f"root mean square errors of {options.histories} histories of {LENGTH} tokens, K = {K}")
    if options.json:
        write_json(options.json, machine.close(made) | {"reweighting": rows})
    return 0


def _line(row: dict[str, Any]) -> list[str]:
    refined = "all" if row["stacked"] else "query"
    errors = (row["seen"], row["kalman"], *row["errors"].values())
    return [f"{row['outliers']:.0%}", f"{row['dof']:g} K", refined, *(f"{x:.3f}" for x in errors)]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    made = parser(NAME, "The robust filter, asked again with its estimate.")
    made.add_argument("--histories", type=count, default=400, metavar="N")
    return parse(made, arguments)


if __name__ == "__main__":
    finish(main)

"""Comparisons of made-up ranks."""

from __future__ import annotations

import numpy as np

from recbft.comparing.comparison import Arm, Comparison
from recbft.comparing.results import results_of

MADE = {"command": "recbft compare", "date": "2026-01-01", "cpu": "a CPU", "device": "cpu", "machine": "m",
        "system": "s", "cores": 1, "memory_gib": 1.0, "threads": 1, "load_average_before": 0.0, "recbft": "1",
        "commit": "c", "python": "3", "torch": "2", "numpy": "2"}  # fmt: skip


def made_up(ranks, baseline="matched", content="a"):
    """A comparison of arms with these (S, U) ranks."""
    seeds, users = next(iter(ranks.values())).shape
    numbers = tuple(range(seeds))
    arms = {
        name: Arm(name, numbers, (None,) * seeds, {"unfiltered": each}, tuple([] for _ in numbers), {})
        for name, each in ranks.items()
    }
    zeros = np.zeros(users, dtype=np.int64)
    protocol = {"items": 12345, "dataset": content, "filter_seen": False, "config": {}}
    protocol |= dict.fromkeys(("content_hash", "target_hash"), content)
    return Comparison(None, protocol, zeros, zeros, zeros, zeros, arms, baseline, numbers, ())


def drawn(*names, seeds=6, users=40, seed=4):
    """Ranks of these arms."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(1, 40, (seeds, users)) for name in names}


def on_data(content, shift):
    """Results of a comparison on these data, in which most ranks of ``bft`` are ``shift`` greater."""
    rng = np.random.default_rng(3)
    base = rng.integers(5, 40, (8, 60))
    ranks = {"matched": base, "bft": np.maximum(1, base + shift + rng.integers(-3, 4, base.shape))}
    made = {"made": {**MADE, "command": f"recbft compare -d {content}"}}
    return results_of(made_up(ranks, content=content)) | made

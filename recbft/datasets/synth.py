"""A seeded generator of event logs whose noise is known: Zipf popularity, drifting tastes, unreliable items and users.

    taste     s_u(t) = c s_u(t') + sqrt(1 - c^2) w,   c = exp(-(t - t') / drift),   w ~ N(0, I)                   (a)
    proposal  P(i | u, t)  proportional to  pop_i exp(focus s_u(t) . v_i / sqrt(K)),   pop_i = rank_i^-zipf         (b)
    event     the proposed item with probability r_u r_i; otherwise noise: an item of the same reliability as the
              proposed one, drawn by popularity alone                                                             (c)

The reliability r in (0, 1] is the truth: how far an event of this user, on this item, is to be believed as a sign of
taste. Because noise stays within a reliability level, the items of level r receive taste and noise in the shares r and
1 - r (for a user of reliability 1). Reliability is independent of popularity, so counts alone do not reveal it. Nobody
takes an item twice. Times are whole seconds: sessions of minutes, days apart; taste drifts with elapsed time.

Shapes: U users of one block, V items, K taste factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from recbft.datasets.events import Events
from recbft.errors import UserError
from recbft.system.files import user_path, write_parquet

SHORTEST = 5
SESSION_SECONDS = 300.0
PAUSE_SECONDS = 4 * 86_400.0
FIRST_SECOND = 1_577_836_800  # 2020-01-01
BLOCK_CELLS = 4_000_000  # users x items held at once
MAX_FOCUS = 1e30  # its products stay finite in float32
TINIEST = 103.0  # exp(-103) is above 0 in float32, if barely


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """How much is generated, and how noisy it is.

    Args:
        num_users, num_items: sizes; an item that nobody takes does not reach the data set.
        mean_length: mean events per user; the shortest history has 5 events, the longest a quarter of the items.
        num_factors: K, the width of taste.
        focus: how sharply taste decides, from 0, where nothing but popularity is left, to 1e30.
        drift_days: time constant of (a); small is fast.
        zipf: exponent of popularity, >= 0; at most 103 / ln num_items.
        item_reliabilities, item_shares: levels r_i and the share of items at each.
        user_reliabilities, user_shares: levels r_u and the share of users at each.
        seed: equal seeds give equal events.
    """

    num_users: int = 2000
    num_items: int = 1000
    mean_length: float = 20.0
    num_factors: int = 4
    focus: float = 8.0
    drift_days: float = 60.0
    zipf: float = 0.6
    item_reliabilities: tuple[float, ...] = (1.0, 0.5, 0.2)
    item_shares: tuple[float, ...] = (0.7, 0.15, 0.15)
    user_reliabilities: tuple[float, ...] = (1.0, 0.4)
    user_shares: tuple[float, ...] = (0.8, 0.2)
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.seed >= 0, "seed", self.seed, ">= 0")
        _require(self.num_users >= 1, "num_users", self.num_users, ">= 1")
        _require(self.num_items >= 4 * SHORTEST, "num_items", self.num_items, f">= {4 * SHORTEST}")
        _require(SHORTEST <= self.mean_length <= self.num_items / 8, "mean_length", self.mean_length,
                 f"between {SHORTEST} and num_items / 8 = {self.num_items / 8:g}")  # fmt: skip
        _require(self.num_factors >= 1, "num_factors", self.num_factors, ">= 1")
        _require(0 <= self.focus <= MAX_FOCUS, "focus", self.focus, f"between 0 and {MAX_FOCUS:g}")
        _require(self.drift_days > 0, "drift_days", self.drift_days, "> 0")
        steepest = TINIEST / math.log(self.num_items)  # beyond it the rarest item could not be drawn
        _require(0 <= self.zipf <= steepest, "zipf", self.zipf, f"between 0 and {steepest:.3g} with this num_items")
        for side in ("item", "user"):
            levels, shares = getattr(self, f"{side}_reliabilities"), getattr(self, f"{side}_shares")
            _require(bool(levels) and all(0 < r <= 1 for r in levels), f"{side}_reliabilities", levels, "in (0, 1]")
            good = len(shares) == len(levels) and min(shares) >= 0 and abs(sum(shares) - 1) < 1e-9
            _require(good, f"{side}_shares", shares, f"one share per level of {side}_reliabilities, adding up to 1")


class Synthetic(NamedTuple):
    """A generated log and the truth behind it."""

    events: pd.DataFrame  # user_id, item_id, timestamp (int64), in order of time over all users
    items: pd.DataFrame  # item_id, reliability, num_events, taste_share (of its events, share that followed taste)
    users: pd.DataFrame  # user_id, reliability, num_events, taste_share


def generate(config: SyntheticConfig) -> Synthetic:
    """Generate events and truth; the same config gives the same tables."""
    rng = np.random.default_rng(config.seed)
    vectors = rng.standard_normal((config.num_items, config.num_factors)).astype(np.float32)
    vectors *= np.sqrt(config.num_factors) / np.linalg.norm(vectors, axis=1, keepdims=True)
    popularity = rng.permutation(np.arange(1, config.num_items + 1)) ** -float(config.zipf)
    item_level = _levels(rng, config.num_items, config.item_shares)
    user_level = _levels(rng, config.num_users, config.user_shares)
    user_reliability = np.asarray(config.user_reliabilities)[user_level]
    world = _World(config, vectors, popularity, item_level)
    lengths = _lengths(rng, config)
    block = max(1, BLOCK_CELLS // config.num_items)
    parts = []
    for first in range(0, config.num_users, block):
        chosen = slice(first, first + block)
        user, item, time, taste = _histories(rng, world, lengths[chosen], user_reliability[chosen])
        parts.append((user + first, item, time, taste))
    user, item, time, taste = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((user, time))
    # within a user the draws come in time order, and lexsort is stable
    events = pd.DataFrame({"user_id": user[order] + 1, "item_id": item[order] + 1, "timestamp": time[order]})
    item_reliability = np.asarray(config.item_reliabilities)[item_level]
    return Synthetic(
        events=events,
        items=_truth("item_id", item, taste, item_reliability),
        users=_truth("user_id", user, taste, user_reliability),
    )


def synthetic_events(config: SyntheticConfig) -> Events:
    """The generated log alone."""
    table = pa.Table.from_pandas(generate(config).events, preserve_index=False)
    return Events.from_table(table, source="synthetic", user="user_id", item="item_id", time="timestamp")


def save_synthetic(synthetic: Synthetic, path: str | Path) -> list[Path]:
    """Write NAME.parquet and, beside it, NAME.truth-items.parquet and NAME.truth-users.parquet; returns the paths."""
    path = user_path(path)
    if path.suffix.lower() != ".parquet":
        raise UserError(f"{path}: synthetic data is written as Parquet; let its name end in .parquet")
    paths = [path, *truth_files(path)]
    for place, table in zip(reversed(paths), (synthetic.users, synthetic.items, synthetic.events), strict=True):
        write_parquet(place, table)  # the events last: where they are, the truth is too
    return paths


def truth_files(path: Path) -> tuple[Path, Path]:
    """Where the truth of the items and of the users lies beside a file of generated events."""
    return path.with_name(f"{path.stem}.truth-items.parquet"), path.with_name(f"{path.stem}.truth-users.parquet")


class _World(NamedTuple):
    config: SyntheticConfig
    vectors: NDArray[np.float32]  # (V, K)
    popularity: NDArray[np.float64]  # (V,)
    item_level: NDArray[np.int64]  # (V,)


def _histories(
    rng: np.random.Generator, world: _World, lengths: NDArray[np.int64], reliability: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Draw the histories of one block of users, event after event: user, item, time and whether taste decided."""
    config, V, U = world.config, len(world.popularity), len(lengths)
    item_reliability = np.asarray(config.item_reliabilities)[world.item_level]
    level_weights = world.popularity * (world.item_level == np.arange(len(config.item_reliabilities))[:, None])
    free = np.ones((U, V), dtype=bool)  # False where the user has the item already
    taste = rng.standard_normal((U, config.num_factors)).astype(np.float32)
    time = FIRST_SECOND + rng.integers(0, 365 * 86_400, U)
    drawn: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]] = []
    for step in range(int(lengths.max())):
        active = np.flatnonzero(lengths > step)
        logits = taste[active] @ world.vectors.T * np.float32(config.focus / np.sqrt(config.num_factors))
        logits[~free[active]] = -np.inf
        logits -= logits.max(axis=1, keepdims=True)
        proposed = _draw(rng, np.exp(logits) * world.popularity.astype(np.float32))
        follows = rng.random(len(active)) < reliability[active] * item_reliability[proposed]
        item = proposed.copy()
        noisy = np.flatnonzero(~follows)
        if len(noisy):
            weights = level_weights[world.item_level[proposed[noisy]]] * free[active[noisy]]
            item[noisy] = _draw(rng, weights)
        free[active, item] = False
        drawn.append((active, item, time[active].copy(), follows))
        pause = np.where(rng.random(U) < 0.6, SESSION_SECONDS, PAUSE_SECONDS) * rng.exponential(size=U)
        time = time + pause.astype(np.int64)
        keep = np.exp(-pause / (config.drift_days * 86_400.0))[:, None]  # (a)
        taste = (keep * taste + np.sqrt(1 - keep**2) * rng.standard_normal(taste.shape)).astype(np.float32)
    user, item, when, follows = (np.concatenate(columns) for columns in zip(*drawn, strict=True))
    return user, item, when, follows


def _draw(rng: np.random.Generator, weights: NDArray[np.floating]) -> NDArray[np.int64]:
    """One column index per row, in proportion to the weights (at least one of a row is positive)."""
    total = np.cumsum(weights, axis=1, dtype=np.float64)
    # strictly below the row's total, so that the first column to exceed it has weight
    threshold = rng.random((len(weights), 1)) * total[:, -1:]
    return np.asarray(np.argmax(total > threshold, axis=1), dtype=np.int64)


def _levels(rng: np.random.Generator, count: int, shares: tuple[float, ...]) -> NDArray[np.int64]:
    """A level for each of ``count``, in the given shares exactly (up to rounding) and in random order."""
    edges = np.round(np.cumsum(shares) * count).astype(np.int64)
    return rng.permutation(np.searchsorted(edges, np.arange(count), side="right"))


def _lengths(rng: np.random.Generator, config: SyntheticConfig) -> NDArray[np.int64]:
    """Geometric above the shortest, cut at a quarter of the items."""
    extra = rng.geometric(1 / (config.mean_length - SHORTEST + 1), config.num_users) - 1
    return np.minimum(SHORTEST + extra, config.num_items // 4).astype(np.int64)


def _truth(
    name: str, index: NDArray[np.int64], taste: NDArray[np.bool_], reliability: NDArray[np.float64]
) -> pd.DataFrame:
    count = np.bincount(index, minlength=len(reliability))
    followed = np.bincount(index, weights=taste, minlength=len(reliability))
    share = np.divide(followed, count, out=np.full(len(count), np.nan), where=count > 0)
    ids = np.arange(1, len(reliability) + 1)
    columns = {name: ids, "reliability": reliability, "num_events": count, "taste_share": share}
    table: pd.DataFrame = pd.DataFrame(columns)
    return table


def _require(good: bool, name: str, value: object, rule: str) -> None:
    if not good:
        raise UserError(f"{name} is {value!r}; it must be {rule}")

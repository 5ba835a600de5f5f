"""How likely each item is the user's next: scores as probabilities, by two numbers fitted on validation.

    p_i = (1 - u) exp(s_i / T) / sum_j exp(s_j / T) + u / n     over the n items j that a list may hold      (6.7)
    T, u = argmax of  ln f(T) + ln g(u) + sum over users of ln p_target     over validation targets          (6.8)
    f(T) = 1 / (1 + (ln T / 0.4)^2)       g(u) = u (1 - u)^3       up to a factor                            (6.9)

The lapse rate u is the share of events that come evenly from all items, whatever the scores. Without it T alone must
make room for targets that nobody foresaw, and takes it from the items at the head of a list. For each T the best u
follows from the targets' softmax alone (the sum is concave in u), so (6.8) is a search in one dimension: over a grid of
T (steps of 2 from 1/32 to 2^20, of 2^(1/4) from 1/8 to 2), then by Brent's method between the neighbours of its peaks.
Where users are few there may be two peaks, one near 1 and one below it, where scores foresee some targets and the rest
count as lapses; steps of 2 can miss the higher one. The prior (6.9) matters there: ln T is Cauchy, near 0 as far as
nothing speaks against it, and u is as if one event had been a lapse and three had not. Lists of fewer items than (6.8)
was fitted on take the same T and u over those.

T = 1 and u = 0 is the softmax that a model was trained as. What such a distribution says of a user, over all V items,
seen ones included (``predicted``):

    NLL    = mean over users of -ln p_target                                                                 (a)
    H      = -sum_i p_i ln p_i                                                                               (b)
    P@k    = sum of the k largest p: what the model itself gives for the target being among its k best       (c)

Source: docs/method.md, section 6. Temperature: Guo et al., On Calibration of Modern Neural Networks (2017); lapse rate:
Wichmann and Hill, The psychometric function I (2001), who bound it by a prior too; their product and (6.9) are ours.
Shapes: N users, V items, D state width; a block has n users by w items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.dataset import Dataset
from recbft.datasets.split import View
from recbft.evaluation.score_blocks import Excluded, align, score_block, spans, user_blocks
from recbft.evaluation.views import evaluation_mode, events_of, some_users, states_of_view, view_of
from recbft.kernels.cross_entropy.torch import exponentials
from recbft.models.contract import ItemTable, SequenceModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
FITTED_SCORES = 20_000_000  # a run's probabilities are fitted on so many users by items,
FITTED_USERS = 500  # or on so many users where that is more
# Of T; the hottest are for scores that are counts of events.
GRID = sorted({2.0**power for power in range(-5, 21)} | {2.0 ** (quarters / 4) for quarters in range(-12, 5)})
SCALE_OF_LOG_T = 0.4  # of (6.9)
LAPSED, FORESEEN = 1, 3  # events of (6.9)
CLOSE = 1.0  # a peak of the grid further below the highest one is not looked into
COPIES = 4  # of a block of scores that are alive at once
CACHED_SCORES = 1_000_000  # a block of so many stays in a processor's cache from one step to the next
TOLERANCE = 1e-3  # of ln T, of which its own uncertainty is a hundred times as much


class Calibration(NamedTuple):
    """What makes probabilities of scores, by (6.7)."""

    temperature: float  # T > 0
    lapse: float  # u in [0, 1]


AS_TRAINED = Calibration(1.0, 0.0)


class Predicted(NamedTuple):
    """What each user's distribution says, (N,) each, float64."""

    nll: FloatArray  # -ln p_target
    entropy: FloatArray  # (b), in nats, between 0 and ln V
    top: dict[int, FloatArray]  # k -> (c)


class LogSum:
    """ln sum_j exp(s_j / T) of some users, over one block of items after another."""

    def __init__(self, temperature: float, room: Tensor) -> None:
        """``room`` is as large as a block, and written over."""
        self.temperature, self.room = temperature, room
        self.value = room.new_empty(0)  # (n, 1) float64

    def add(self, block: Tensor, *, first: bool) -> None:
        """Scores of some users, of the first items or of more, (n, w), -inf where excluded; they stay as they are."""
        scaled = torch.mul(block, 1 / self.temperature, out=self.room[: block.numel()].view_as(block))
        _, total, shift = exponentials(scaled, shifted=True)
        assert shift is not None
        value = torch.where(shift == -torch.inf, -torch.inf, total.double().log() + shift)  # nothing is left
        self.value = value if first else torch.logaddexp(self.value, value)

    def log_softmax(self, scores: Tensor) -> Tensor:
        """Of some items of these users, (n, k), float64."""
        return (scores.double() / self.temperature - self.value).clamp(max=0)


def calibrations(
    model: SequenceModel, dataset: Dataset, *, memory_mb: float = 256.0
) -> dict[str, dict[str, float] | None]:
    """Equation (6.8) for a trained model, on users drawn from a fixed seed where the catalogue is large.

    Returns:
        "unfiltered" over all items, "filtered" over those that the user has not seen, fitted where the target is among
        them; None if it never is. Ready for JSON.
    """
    view = fitting_view(dataset)
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        states, _ = states_of_view(model, dataset, view, table.weight.device)
        every = fit(states, table, view.target, memory_mb=memory_mb)
        new = rows_of_new_targets(view)
        if not new.size:
            return {"unfiltered": every._asdict(), "filtered": None}
        seen = events_of(view.items, view.start[new], view.stop[new])
        unseen = fit(states[new], table, view.target[new], seen=seen, memory_mb=memory_mb)
    return {"unfiltered": every._asdict(), "filtered": unseen._asdict()}


def fitting_view(dataset: Dataset, users: IntArray | None = None) -> View:
    """What (6.8) is fitted on: the next events of all users of validation, or of a large catalogue of some.

    Args:
        users: the users to choose from, by their row in the data set; all unless given.
    """
    view = view_of(dataset, "validation", next_events=True)
    if users is not None and np.isin(view.user, users).any():
        view = view.rows(np.flatnonzero(np.isin(view.user, users)))
    return view.rows(some_users(len(view.target), dataset.num_items, scores=FITTED_SCORES, at_least=FITTED_USERS))


def rows_of_new_targets(view: View) -> IntArray:
    """The users of a view, by row, whose target is not in their history."""
    items, offsets = events_of(view.items, view.start, view.stop)
    user = np.repeat(np.arange(len(view.target)), np.diff(offsets))
    return np.setdiff1d(user, user[items == view.target[user]])


def fit(
    states: Tensor,
    table: ItemTable,
    targets: IntArray,
    *,
    seen: tuple[IntArray, IntArray] | None = None,
    lapses: bool = True,
    prior: bool = True,
    memory_mb: float = 256.0,
) -> Calibration:
    """Equation (6.8), or with ``lapses=False`` T alone, u being 0; with ``prior=False`` by likelihood alone.

    Args:
        states: (N, D).
        targets: item index per user, (N,).
        seen: items that (6.7) leaves out, and their offsets by user, (N + 1,); no target is among its user's.
        memory_mb: bound on the scores that are alive at a time, and on what (6.7) makes of them.
    """
    from scipy.optimize import minimize_scalar  # half a second to import, which nobody who only recommends waits for

    num_items = len(table.weight) - 1
    items, offsets = (None, None) if seen is None else seen
    excluded = Excluded.of(items, offsets, len(states), num_items)
    log_chance = -np.log(excluded.left(num_items))

    counts = (LAPSED, FORESEEN) if prior else (0, 0)
    tried: dict[float, tuple[float, float]] = {}  # by T: its best u, and (6.8) there

    def try_all(temperatures: Sequence[float]) -> None:
        found = log_softmax_of_targets(states, table, targets, excluded, temperatures, memory_mb)
        for temperature, own in zip(temperatures, found, strict=True):
            u, value = best_lapse(own, log_chance, *counts) if lapses else (0.0, float(own.sum()))
            tried[temperature] = u, value + (_log_prior(temperature) if prior else 0.0)

    def loss(x: float) -> float:
        try_all([math.exp(x)])
        return -tried[math.exp(x)][1]

    try_all(GRID)
    for n in _peaks([tried[temperature][1] for temperature in GRID]):
        bounds = math.log(GRID[max(n - 1, 0)]), math.log(GRID[min(n + 1, len(GRID) - 1)])
        minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": TOLERANCE})
    temperature = max(tried, key=lambda one: tried[one][1])
    return Calibration(temperature, tried[temperature][0])


def _peaks(values: Sequence[float]) -> list[int]:
    """Where values are higher than beside them, and close to the highest."""
    beside, highest = [-math.inf, *values, -math.inf], max(values)
    return [n for n, x in enumerate(values) if beside[n] < x >= beside[n + 2] and x > highest - CLOSE]


def _log_prior(temperature: float) -> float:
    """ln f of (6.9)."""
    return -math.log1p((math.log(temperature) / SCALE_OF_LOG_T) ** 2)


def best_lapse(
    log_p: FloatArray, log_chance: FloatArray, lapsed: float = LAPSED, foreseen: float = FORESEEN
) -> tuple[float, float]:
    """The u at which  a ln u + b ln(1 - u) + sum ln((1 - u) p + u c)  is largest, and that sum.

    Args:
        log_p: ln of the softmax at each target, (N,).
        log_chance: ln c, c = 1 / n, (N,).
        lapsed, foreseen: a and b of the prior.
    """
    gain = np.expm1((log_chance - log_p).clip(max=500))  # c / p - 1; beyond it the slope is 1 / u, as here

    def slope(u: float) -> float:
        return float((gain / (1 + u * gain)).sum()) + lapsed / u - foreseen / (1 - u)

    low, high = 0.0, 1.0
    if not lapsed and gain.sum() <= foreseen:
        high = 0.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    u = (low + high) / 2
    prior = sum(number * math.log(share) for number, share in ((lapsed, u), (foreseen, 1 - u)) if number)
    return u, prior + float(log_of_mixture(log_p, log_chance, u).sum())


def log_of_mixture(log_p: FloatArray, log_chance: FloatArray, lapse: float) -> FloatArray:
    """ln of (6.7) from those of its softmax and of c = 1 / n, (N,) each."""
    log_lapse = math.log(lapse) if lapse > 0 else -math.inf
    mixed: FloatArray = np.logaddexp(math.log1p(-lapse) + log_p, log_lapse + log_chance)
    return mixed


def log_softmax_of_targets(
    states: Tensor,
    table: ItemTable,
    targets: IntArray,
    excluded: Excluded,
    temperatures: Sequence[float],
    memory_mb: float,
) -> list[FloatArray]:
    """ln of the softmax of (6.7) at each user's target, (N,), at each temperature."""
    states, candidates = align(states, table)
    num_items = len(candidates.weight)
    rows, width, chunks = user_blocks(states, num_items, memory_mb / 2)
    candidates = candidates.for_blocks(len(states), rows)
    room, other = states.new_empty(rows * width), states.new_empty(rows * width)
    own = torch.from_numpy(targets - 1).to(states.device)
    score = torch.linalg.vecdot(states, candidates.weight[own])
    if candidates.bias is not None:
        score += candidates.bias[own]
    found: list[list[Tensor]] = [[] for _ in temperatures]
    for users in chunks:
        sums = [LogSum(temperature, other) for temperature in temperatures]
        for columns in spans(num_items, width):
            block = score_block(states[users], candidates, columns, room)
            excluded.mask(block, users, columns)
            for one in sums:
                one.add(block, first=columns.start == 0)
        for parts, one in zip(found, sums, strict=True):
            parts.append(one.log_softmax(score[users, None])[:, 0])
    return [torch.cat(parts).cpu().numpy() for parts in found]


def predicted(
    states: Tensor,
    table: ItemTable,
    targets: IntArray,
    *,
    calibrations: Sequence[Calibration],
    ks: Sequence[int],
    memory_mb: float,
) -> list[Predicted]:
    """Equations (6.7) and (a) to (c) user by user, once for each T and u.

    Args:
        states: (N, D).
        targets: item index per user, (N,).
        ks: cut-offs of (c); a k beyond the catalogue takes all of it.
        memory_mb: bound on the scores that are alive at a time; at least one user's are.
    """
    found: list[list[Tensor]] = [[] for _ in calibrations]
    for scores, own in score_rows(states, table, targets, memory_mb):
        best = scores.topk(min(max(ks), scores.shape[1]), dim=1).indices
        for (temperature, lapse), parts in zip(calibrations, found, strict=True):
            z = scores / temperature
            log_p = z.sub_(z.logsumexp(dim=1, keepdim=True))
            if lapse > 0:
                even = torch.full((), math.log(lapse) - math.log(scores.shape[1]), dtype=z.dtype, device=z.device)
                log_p = torch.logaddexp(log_p.add_(math.log1p(-lapse)), even)
            p = log_p.exp()
            entropy = -torch.linalg.vecdot(p, log_p).clamp(max=0)
            parts.append(torch.cat([-log_p.gather(1, own), entropy[:, None], p.gather(1, best)], dim=1))
    # Summed on the CPU: on a GPU a running sum has no fixed order, and PyTorch refuses it where one is asked for.
    return [_predicted(torch.cat(parts).cpu(), ks) for parts in found]


def _predicted(columns: Tensor, ks: Sequence[int]) -> Predicted:
    """From -ln p_target, (b) and the largest p in falling order, user by user, (N, 2 + max k)."""
    nll, entropy = columns[:, :2].double().T.contiguous().numpy()
    top = columns[:, 2:].cumsum(dim=1).clamp(max=1).double()
    return Predicted(nll, entropy, {k: top[:, min(k, top.shape[1]) - 1].contiguous().numpy() for k in ks})


def score_rows(
    states: Tensor, table: ItemTable, targets: IntArray, memory_mb: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of some users for all items, (n, V), to be overwritten at will, and their targets' columns, (n, 1)."""
    states, candidates = align(states, table)
    num_items = len(candidates.weight)
    fitting = min(CACHED_SCORES, int(memory_mb * 2**20) // (COPIES * states.element_size()))
    at_once = max(1, min(len(states), fitting // num_items))
    own = torch.from_numpy(targets - 1).to(states.device)[:, None]
    candidates = candidates.for_blocks(len(states), at_once)
    room = states.new_empty(at_once * num_items)
    for first in range(0, len(states), at_once):
        chunk = slice(first, first + at_once)
        yield score_block(states[chunk], candidates, slice(0, num_items), room), own[chunk]

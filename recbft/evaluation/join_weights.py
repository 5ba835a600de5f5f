"""The weights of two models that are joined, fitted by how likely they make validation targets.

    s_ui = a_b s_1ui + d_b s_2ui,   b the bin of item i,   w_b = (a_b, d_b)                                  (1)
    L(w) = sum_u ( s_u,target - ln sum_i exp s_ui )      over the items i that u has not seen                 (2)
    w_b ~ N(w_0, (kappa I_0)^-1)      w_0 the one pair with the largest L, I_0 its information per target     (3)
    kappa = tr((C + kappa P)^-1 C) / sum_b (w_b - w_0)' I_0 (w_b - w_0)      within [1, N]                    (4)

(2) is concave in the weights, whose features are f_b = (s_1, s_2) within a bin and 0 outside: its gradient is f of the
target less its mean under the softmax, and its Hessian less the covariance of f. Newton's method, with steps halved
until it rises, finds the maximum of (2), and of (2) with the prior (3), whatever the units of the scores. So a bin of
few targets stays near the weights of all, and one of many has its own. kappa is how many targets the prior is worth:
by (4), C being minus the Hessian of (2) and P that of the prior over kappa, the bins' weights are as likely as can be.

A bin without targets has only reasons to stand lower, so it has no weights of its own: it takes those of the next bin
that has targets, or of the last. Users whose target is an item they have seen are left out, and of many users some are
drawn from a fixed seed.

Source of (4): MacKay, Bayesian Interpolation (1992), equation 4.10.
Shapes: N users, V items, G bins, of which K have targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.dataset import Dataset
from recbft.errors import UserError
from recbft.evaluation.probability import rows_of_new_targets
from recbft.evaluation.score_blocks import Candidates, Excluded, align, score_block
from recbft.evaluation.views import evaluation_mode, events_of, some_users, states_of_view, view_of
from recbft.models.contract import ItemTable
from recbft.models.join import Join

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
FITTED_SCORES, FITTED_USERS = 40_000_000, 3000  # users by items that (2) is taken over, or users where that is more
TOLERANCE = 1e-5  # of (2): what a whole step would still add
MOST_STEPS, MOST_HALVINGS = 100, 40
MOST_PRIORS, SETTLED = 12, 0.05  # values of kappa that are tried, and the relative change that ends it
BYTES = 48  # per score that are alive at once
KEPT = 2  # times as much memory as scores are made in, for those that are kept


class JoinWeights(NamedTuple):
    """What was fitted."""

    weights: FloatArray  # (G, 2)
    targets: IntArray  # (G,) fitted targets in each bin
    source: IntArray  # (G,) the bin whose weights each has: its own where it has targets
    prior_targets: float  # kappa of (3); 0 where one pair is fitted, which needs no prior
    log_likelihood: float  # (2) per target
    alone: tuple[float, float]  # the same with the weights (1, 0) and (0, 1)


def fit_join(model: Join, dataset: Dataset, *, memory_mb: float = 256.0) -> JoinWeights:
    """The most likely weights of ``model.bins`` by (2) and (3); the model is left as it is.

    Raises:
        UserError: every validation target is an item that its user has seen.
    """
    view = view_of(dataset, "validation")
    new = rows_of_new_targets(view)
    if not new.size:
        raise UserError(
            f"every validation target of data set {dataset.name!r} is an item that its user has seen before, and a "
            "join is fitted on new ones; compare the two runs instead, and use the better one"
        )
    view = view.rows(new[some_users(len(new), dataset.num_items, scores=FITTED_SCORES, at_least=FITTED_USERS)])
    with torch.inference_mode(), evaluation_mode(model):
        parts = []
        for part in model.parts:
            table = part.item_table()
            parts.append((states_of_view(part, dataset, view, table.weight.device)[0], table))
        seen = events_of(view.items, view.start, view.stop)
        return fit_weights(
            parts[0], parts[1], model.bins.cpu().numpy(), len(model.weights), view.target, seen, memory_mb=memory_mb
        )


def fit_weights(
    first: tuple[Tensor, ItemTable],
    second: tuple[Tensor, ItemTable],
    bins: IntArray,
    num_bins: int,
    targets: IntArray,
    seen: tuple[IntArray, IntArray],
    *,
    memory_mb: float = 256.0,
) -> JoinWeights:
    """The most likely weights by (2) and (3).

    Args:
        first, second: states of the users, (N, D), and the item table of either model.
        bins: of each item, (V + 1,), below ``num_bins``; that of padding is not read.
        targets: item index per user, (N,).
        seen: items that (2) leaves out, and their offsets by user, (N + 1,); no target is among its user's.
        memory_mb: bound on what is alive at a time, beside scores that are kept, at most twice as much.
    """
    count = np.bincount(bins[targets], minlength=num_bins)
    full = np.flatnonzero(count)
    place = np.minimum(np.searchsorted(full, np.arange(num_bins)), len(full) - 1)  # among the bins with targets
    scores = _Scores(first, second, place[bins], len(full), targets, seen, memory_mb)
    theta, value, kappa = _most_likely(scores, len(targets))
    alone = [scores.of(torch.tensor(one).expand(len(full), 2)).value for one in ([1.0, 0.0], [0.0, 1.0])]
    return JoinWeights(
        weights=theta.cpu().numpy()[place],
        targets=count,
        source=full[place],
        prior_targets=kappa,
        log_likelihood=value / len(targets),
        alone=(alone[0] / len(targets), alone[1] / len(targets)),
    )


class _Terms(NamedTuple):
    """(2), or (2) with the prior, at some weights."""

    value: float
    gradient: Tensor  # (2 K,)
    curvature: Tensor  # (2 K, 2 K) minus the Hessian


def _most_likely(scores: _Scores, num_targets: int) -> tuple[Tensor, float, float]:
    """The weights, (K, 2), with (2) there and kappa."""
    K = scores.num_bins

    def as_one(pair: Tensor) -> _Terms:
        here = scores.of(pair.expand(K, 2))
        return _Terms(here.value, here.gradient.view(K, 2).sum(dim=0), here.curvature.view(K, 2, K, 2).sum(dim=(0, 2)))

    pair, at_pair = _maximum(as_one, torch.zeros(1, 2, dtype=torch.float64))
    if K == 1:
        return pair, at_pair.value, 0.0
    prior = torch.block_diag(*[at_pair.curvature / num_targets] * K)  # P of (4)
    kappa, theta = 1.0, pair.repeat(K, 1)

    def with_prior(theta: Tensor) -> _Terms:
        here, pull = scores.of(theta), kappa * prior @ (theta - pair).flatten()
        penalty = float((theta - pair).flatten() @ pull) / 2
        return _Terms(here.value - penalty, here.gradient - pull, here.curvature + kappa * prior)

    for _ in range(MOST_PRIORS):
        theta, here = _maximum(with_prior, theta)
        moved = (theta - pair).flatten()
        own = here.curvature - kappa * prior
        determined = float(torch.trace(_inverse(here.curvature) @ own))
        spread = float(moved @ prior @ moved)
        value = here.value + kappa * spread / 2
        before, kappa = kappa, min(max(determined / max(spread, 1e-300), 1.0), float(num_targets))  # (4)
        if abs(kappa - before) <= SETTLED * before:
            break
    return theta, value, before


def _inverse(curvature: Tensor) -> Tensor:
    """By the scale of each number; directions in which nothing changes are left alone: their inverse is 0."""
    scale = curvature.diagonal().clamp(min=0).rsqrt().nan_to_num(posinf=0)
    scaled = scale[:, None] * curvature * scale
    inverse: Tensor = scale[:, None] * torch.linalg.pinv(scaled, rtol=1e-12, hermitian=True) * scale
    return inverse


def _maximum(of: Callable[[Tensor], _Terms], theta: Tensor) -> tuple[Tensor, _Terms]:
    """The weights with the largest value of a concave function, from given ones on, and its terms there."""
    here = of(theta)
    for _ in range(MOST_STEPS):
        step = _inverse(here.curvature) @ here.gradient
        if float(step @ here.gradient) < TOLERANCE:
            break
        for _ in range(MOST_HALVINGS):
            there = of(theta + step.view_as(theta))
            if there.value > here.value:
                break
            step = step / 2
        else:
            break  # as high as rounding lets it rise
        theta, here = theta + step.view_as(theta), there
    return theta, here


class _Scores:
    """Both models' scores, in blocks of users; items that share a bin stand side by side."""

    def __init__(
        self,
        first: tuple[Tensor, ItemTable],
        second: tuple[Tensor, ItemTable],
        bins: IntArray,
        num_bins: int,
        targets: IntArray,
        seen: tuple[IntArray, IntArray],
        memory_mb: float,
    ) -> None:
        order = np.argsort(bins[1:], kind="stable")  # (V,)
        where = np.zeros(len(bins), np.int64)
        where[order + 1] = np.arange(1, len(bins))  # 1..V in the new order, 0 for padding
        self.num_bins, self.num_items = num_bins, len(order)
        size = np.bincount(bins[1:], minlength=num_bins)
        self.spans = [slice(stop - n, stop) for n, stop in zip(size, np.cumsum(size), strict=True)]
        self.models = []
        for states, table in (first, second):
            states, (weight, bias, _) = align(states, table)
            rows = torch.from_numpy(order).to(weight.device)
            self.models.append((states, Candidates(weight[rows], None if bias is None else bias[rows])))
        self.targets = torch.from_numpy(where[targets] - 1).to(self.models[0][0].device)
        self.excluded = Excluded.of(where[seen[0]], seen[1], len(targets), self.num_items)
        self.rows = max(1, int(memory_mb * 2**20) // (BYTES * self.num_items))
        needed = sum(states.element_size() * len(states) * self.num_items for states, _ in self.models)
        # They are asked for a hundred times, and making them takes longer than all else where states are wide.
        self.kept = list(self._made()) if needed <= KEPT * memory_mb * 2**20 else None

    def of(self, theta: Tensor) -> _Terms:
        """(2), its gradient and its curvature at some weights, (K, 2)."""
        K, device = self.num_bins, self.targets.device
        theta = theta.to(device, torch.float64)
        size = torch.tensor([span.stop - span.start for span in self.spans], device=device)
        share = theta.repeat_interleave(size, dim=0)  # (V, 2)
        value, gradient = 0.0, torch.zeros(K, 2, dtype=torch.float64, device=device)
        squares = torch.zeros(K, 2, 2, dtype=torch.float64, device=device)
        products = torch.zeros(2 * K, 2 * K, dtype=torch.float64, device=device)
        bin_of = torch.arange(K, device=device).repeat_interleave(size)
        for users, scores in self._blocks():
            joined = scores[0] * share[:, 0] + scores[1] * share[:, 1]
            self.excluded.mask(joined, users, slice(0, self.num_items))
            own = self.targets[users, None]
            total = joined.logsumexp(dim=1, keepdim=True)
            value += float((joined.gather(1, own) - total).sum())
            p = joined.sub_(total).exp_()
            means, hit = [], F.one_hot(bin_of[own[:, 0]], K).double()  # (n, K)
            for number, one in enumerate(scores):
                gradient[:, number] += hit.T @ one.gather(1, own)[:, 0]
                weighed = p * one
                means.append(torch.stack([weighed[:, span].sum(dim=1) for span in self.spans], dim=1))  # (n, K)
                for other in range(number, 2):
                    by_item = torch.linalg.vecdot(weighed, scores[other], dim=0)  # (V,)
                    moment = torch.stack([by_item[span].sum() for span in self.spans])
                    squares[:, number, other] += moment
                    if other != number:
                        squares[:, other, number] += moment
            mean = torch.stack(means, dim=2)  # (n, K, 2)
            gradient -= mean.sum(dim=0)
            products += mean.flatten(1).T @ mean.flatten(1)
        curvature = torch.block_diag(*squares) - products
        return _Terms(value, gradient.flatten().cpu(), curvature.cpu())

    def _blocks(self) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
        """Some users, and their scores by both models, (n, V) each."""
        for users, (one, other) in self._made() if self.kept is None else self.kept:
            yield users, (one.double(), other.double())

    def _made(self) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
        num_users = len(self.targets)
        for start in range(0, num_users, self.rows):
            users = slice(start, min(start + self.rows, num_users))
            found = []
            for states, candidates in self.models:
                room = states.new_empty((users.stop - users.start) * self.num_items)
                found.append(score_block(states[users], candidates, slice(0, self.num_items), room))
            yield users, (found[0], found[1])

"""Losses over the item vocabulary: the full cross-entropy, and losses that look at drawn negatives only.

With l_i = x . w_i + b_i the score of item i and y the target of a position,

    ce               -l_y + log sum_i exp l_i                                                        (6.3)
    ce_unseen        the same, i over y and the items that the history does not hold                 (6.10)
    sampled_softmax  -l_y + log(exp l_y + sum_j exp(l_j - log E_j)),  j over the negatives except y  (6.4)
    bce              (6.6) with beta = 1                                                             (6.5)
    gbce             -(beta log s(l_y) + sum_j log(1 - s(l_j))) / (k + 1),  s the logistic function  (6.6)
                     beta = alpha (t (1 - 1/alpha) + 1/alpha),  alpha = min(1, k / (V - 1))
    bpr              -(1/k) sum_j log s(l_y - l_j),  j over the negatives                            (6.11)
    focal            (1 - p)^g (-log p),  p = exp(-CE(y)),  g = softplus(alpha), alpha learned, from 0   (6.20)
    smoothed ce      (1 - e) CE(y) + (e / V) sum_i CE(i)  =  CE(y) + e (l_y - mean_i l_i)           (10.4)

With weights c_n of the positions each is a mean with the shares c_n / sum_n c_n in the place of 1 / N (the means over
k stay). Negatives that are drawn from the batch's targets are then drawn in proportion to these, or, where all are
taken, each stands for its weight.

(6.10) asks what a list without seen items is judged by. What a position has seen are the tokens that it reads and the
events before them, whether they are read or not.

In (6.4) the m negatives are shared by all positions of a batch and E_j is how often item j is expected among them:
m / V for ``uniform``, m times the item's share of the training events for ``in_batch`` (negatives drawn from the
batch's own targets). So the sum in (6.4) has that of (6.3) as its expectation; negatives may repeat. In (6.6) and
(6.11) each position draws k negatives of its own, uniformly from all items but its target. A model that knows items by
their content draws only items with training events. All draws come from PyTorch's default generator.

The exponent of (6.20) is minimised along with the rest, as in its source. A larger one lowers the loss, since
1 - p < 1: it grows as long as training goes on, and how far is a matter of the learning rate. It is a control.

Source: Bengio and Senecal (2008) for (6.4); Kang and McAuley, SASRec (arXiv 1808.09781) for bce; Petrov and Macdonald,
gSASRec (arXiv 2308.07192) for (6.6); Rendle et al., BPR (arXiv 1205.2618) for (6.11), as RecBole's models train by it;
Precision Tracked Transformer (arXiv 2605.18832), appendix O.2, equation 16, for (6.20).
Shapes: N positions, V items, D width, m shared negatives, k negatives per position; B rows, T tokens, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.boundaries import eagerly, in_full_precision
from recbft.autograd.transforms import applied, beyond_first_gradients, once_differentiable
from recbft.config.fields import check_choice, check_range
from recbft.datasets.batches import Batch
from recbft.errors import UserError
from recbft.kernels.cross_entropy import Pairs, full_cross_entropy

if TYPE_CHECKING:
    from recbft.models.backbone import BackboneConfig

Negatives = Literal["uniform", "in_batch"]

GBCE_T = 0.75
BLOCK_ELEMENTS = 4_000_000  # of gathered item vectors, or of logits, at a time
LEAST_WRONG = 1e-6  # 1 - p of (6.20), of which powers below 1 have an endless slope at 0


def check_loss(settings: BackboneConfig) -> None:
    """Refuse values out of range and settings without effect."""
    check_range("num_negatives", settings.num_negatives, at_least=1)
    check_range("gbce_t", settings.gbce_t, at_least=0, at_most=1)
    check_choice("loss", settings.loss, LOSSES)
    given = {"num_negatives": settings.num_negatives, "negatives": settings.negatives, "gbce_t": settings.gbce_t}
    for key, value in given.items():
        if value is not None and key not in LOSSES[settings.loss].reads:
            losses = " or ".join(name for name, loss in LOSSES.items() if key in loss.reads)
            raise UserError(f"{key} has no effect with loss {settings.loss!r}; leave it out or choose loss {losses}")


class ItemLoss:
    """The configured loss as a function of states and item vectors.

    Args:
        training_counts: events per item index, or the sums of their weights, (V + 1,), index 0 padding.
        only_trained: no item without training events is drawn as a negative.
    """

    def __init__(self, settings: BackboneConfig, training_counts: Tensor, *, only_trained: bool = False) -> None:
        self.name, self.spec, self.in_batch = settings.loss, LOSSES[settings.loss], settings.negatives == "in_batch"
        self.num_items = training_counts.numel() - 1
        self.drawn: Tensor | None = None  # rows that uniform negatives are drawn from, in order; None for all
        if only_trained and self.spec.num_negatives and not bool((training_counts[1:] > 0).all()):
            self.drawn = (training_counts[1:] > 0).nonzero()[:, 0]
            self.num_items = len(self.drawn)
        if self.spec.num_negatives and self.num_items < 2:
            raise UserError(f"loss {self.name!r} needs items to draw from, but there is only one; take loss 'ce'")
        self.num_negatives = settings.num_negatives or self.spec.num_negatives
        self.gbce_t = GBCE_T if settings.gbce_t is None else settings.gbce_t
        counts = training_counts[1:].double()
        # No target of a training batch is without events; one that is found elsewhere is as rare as an item of one.
        rarest = torch.where(counts > 0, counts, 1.0)
        self.log_share = (rarest / torch.where(counts.sum() > 0, counts.sum(), 1.0)).log()  # (V,)
        self.label_smoothing = 0.0  # of ``ce``; a training-time controller may set it

    def __call__(
        self,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        seen: Tensor | None = None,
        added: Pairs | None = None,
        shares: Tensor | None = None,
        exponent: Tensor | None = None,
    ) -> Tensor:
        """The mean over positions.

        Args:
            states: (N, D).
            weight, bias: item vectors (V, D) and item biases (V,) or None.
            target: row of ``weight`` that each position should find, (N,).
            seen: of (6.10), as ``seen_items`` gives it.
            added: to scores of some positions and rows of ``weight``, for losses over all items.
            shares: of each position in the mean, (N,), as ``shares_of`` gives them; None for equal ones.
            exponent: alpha of (6.20), for a loss that has one.
        """
        given = {"added": added, "exponent": exponent}
        more = {name: value for name, value in given.items() if value is not None}
        return self.spec.mean(self, *with_bias(states, weight, bias), target, seen, shares, **more)

    def own_negatives(self, target: Tensor) -> Tensor:
        """Negatives of (6.6) and (6.11), (N, k): uniform over all items but the target."""
        rows = None if self.drawn is None else self.drawn.to(target.device)
        place = target if rows is None else torch.searchsorted(rows, target)
        drawn = torch.randint(self.num_items - 1, (target.numel(), self.num_negatives), device=target.device)
        drawn += drawn >= place[:, None]  # whatever is not below it moves up by one
        return drawn if rows is None else rows[drawn]

    def shared_negatives(
        self, target: Tensor, dtype: torch.dtype, shares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Negatives of (6.4), (m,), and log E of each."""
        m = self.num_negatives
        if not self.in_batch:
            drawn = torch.randint(self.num_items, (m,), device=target.device)
            drawn = drawn if self.drawn is None else self.drawn.to(target.device)[drawn]
            return drawn, drawn.new_full((m,), math.log(m / self.num_items), dtype=dtype)
        few = m >= target.numel()
        share = self.log_share.to(device=target.device, dtype=dtype)
        if shares is not None and few:
            return target, share[target] - shares.to(dtype).log()
        if shares is not None:
            drawn = target[torch.multinomial(shares, m, replacement=True)]
        else:
            drawn = target if few else target[torch.randint(target.numel(), (m,), device=target.device)]
        return drawn, share[drawn] + math.log(drawn.numel())


def shares_of(weights: Tensor) -> Tensor:
    """Each position's share of the weights of all, (N,), so that they add up to 1; all 0 where the weights are."""
    return weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def mean_of(each: Tensor, shares: Tensor | None) -> Tensor:
    """The mean of what each position has, (N,) or (N, k), with its share."""
    if shares is None:
        return each.mean()
    return (shares * (each if each.dim() == 1 else each.mean(dim=1))).sum()


def _cross_entropy(
    loss: ItemLoss,
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    seen: Tensor | None,
    shares: Tensor | None,
    added: Pairs | None = None,
) -> Tensor:
    mean = full_cross_entropy(states, weight, target, left_out=seen, added=added, shares=shares)
    if loss.label_smoothing:  # (10.4)
        above_mean = (states * (weight[target] - weight.mean(dim=0))).sum(dim=1)  # (N,) l_y - mean_i l_i
        if added is not None:
            position, item = added.which
            factor = (item == target[position]).to(added.added) - 1 / len(weight)
            above_mean = above_mean.index_add(0, position, (factor * added.added).to(above_mean.dtype))
        mean = mean + loss.label_smoothing * mean_of(above_mean, shares)
    return mean


def _focal(
    loss: ItemLoss,
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    seen: None,
    shares: Tensor | None,
    added: Pairs | None = None,
    *,
    exponent: Tensor,
) -> Tensor:
    """(6.20), whose gradient is that of the cross-entropy with each position's share times the slope of its loss."""
    each = _position_losses(states, weight, target, added)  # (N,) without a gradient
    shares = torch.full_like(each, 1 / len(each)) if shares is None else shares
    mean = full_cross_entropy(states, weight, target, added=added, shares=shares * _focal_slope(each, exponent))
    return (shares * focal_losses(each, exponent)).sum() + mean - mean.detach()


def focal_losses(losses: Tensor, alpha: Tensor) -> Tensor:
    """(6.20) of positions from their cross-entropies, (N,)."""
    return _wrong(losses) ** F.softplus(alpha) * losses


def _wrong(losses: Tensor) -> Tensor:
    """1 - p."""
    return (-torch.expm1(-losses)).clamp(min=LEAST_WRONG)


@torch.no_grad()
def _focal_slope(losses: Tensor, alpha: Tensor) -> Tensor:
    """d ``focal_losses`` / d losses, >= 0."""
    wrong, g = _wrong(losses), F.softplus(alpha)
    return wrong**g + g * losses * (1 - wrong) * wrong ** (g - 1)


@eagerly
@torch.no_grad()
def _position_losses(states: Tensor, weight: Tensor, target: Tensor, added: Pairs | None) -> Tensor:
    """The cross-entropy of each position, (N,), of whose logits there is only ever a block."""
    rows, parts = max(1, BLOCK_ELEMENTS // len(weight)), []
    for first in range(0, len(states), rows):
        logits = states[first : first + rows] @ weight.T
        if added is not None:
            own = (added.which[0] >= first) & (added.which[0] < first + rows)
            row, item = added.which[:, own]
            logits.index_put_((row - first, item), added.added[own].to(logits.dtype), accumulate=True)
        parts.append(F.cross_entropy(logits, target[first : first + rows], reduction="none"))
    return torch.cat(parts)


def _sampled_softmax(
    loss: ItemLoss, states: Tensor, weight: Tensor, target: Tensor, seen: None, shares: Tensor | None
) -> Tensor:
    return sampled_softmax(states, weight, target, *loss.shared_negatives(target, states.dtype, shares), shares=shares)


def _bce(loss: ItemLoss, states: Tensor, weight: Tensor, target: Tensor, seen: None, shares: Tensor | None) -> Tensor:
    return binary_cross_entropy(states, weight, target, loss.own_negatives(target), shares=shares)


def _gbce(loss: ItemLoss, states: Tensor, weight: Tensor, target: Tensor, seen: None, shares: Tensor | None) -> Tensor:
    beta = gbce_beta(loss.num_negatives, loss.num_items, loss.gbce_t)
    return binary_cross_entropy(states, weight, target, loss.own_negatives(target), beta=beta, shares=shares)


def _bpr(loss: ItemLoss, states: Tensor, weight: Tensor, target: Tensor, seen: None, shares: Tensor | None) -> Tensor:
    return pairwise_ranking(states, weight, target, loss.own_negatives(target), shares=shares)


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """A loss by name."""

    # over positions: of the configured loss, states, item vectors, targets, seen items and shares
    mean: Callable[..., Tensor]
    num_negatives: int = 0  # that are drawn unless the config says; 0 for a loss that draws none
    reads: tuple[str, ...] = ()  # the settings that have an effect
    leaves_out_seen: bool = False  # items that a history holds are no rivals of its targets
    has_exponent: bool = False  # which the model learns


LOSSES: dict[str, LossSpec] = {
    "ce": LossSpec(mean=_cross_entropy),
    "ce_unseen": LossSpec(mean=_cross_entropy, leaves_out_seen=True),
    "focal": LossSpec(mean=_focal, has_exponent=True),
    "sampled_softmax": LossSpec(mean=_sampled_softmax, num_negatives=512, reads=("num_negatives", "negatives")),
    "bce": LossSpec(mean=_bce, num_negatives=1, reads=("num_negatives",)),
    "gbce": LossSpec(mean=_gbce, num_negatives=256, reads=("num_negatives", "gbce_t")),
    "bpr": LossSpec(mean=_bpr, num_negatives=1, reads=("num_negatives",)),
}


def with_bias(states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """An item bias as one more coordinate of items, (.., V, D), which every state has at 1."""
    if bias is None:
        return states, weight
    return torch.cat([states, torch.ones_like(states[:, :1])], dim=1), torch.cat([weight, bias[..., None]], dim=-1)


def seen_items(batch: Batch, learn: Tensor, target: Tensor, *, num_items: int, causal: bool) -> Tensor:
    """What each position has seen but for its target, (2, P): the number of the position, ascending, and the item.

    Args:
        batch: knows the items before what is read, where there are any.
        learn: flat index of each position in the batch, (N,).
        target: the row of the item table less padding that each should find, (N,).
        num_items: V; what is above is a mask.
        causal: whether a token reads itself and earlier ones alone.
    """
    row = learn.div(batch.items.shape[1], rounding_mode="floor")
    segment, position = batch.segment.flatten()[learn], batch.position.flatten()[learn]
    read = (batch.segment[row] == segment[:, None]) & (batch.items[row] <= num_items)  # (N, T)
    if causal:
        read &= batch.position[row] <= position[:, None]
    each = read.sum(dim=1)
    before = torch.zeros_like(each) if batch.num_earlier is None else batch.num_earlier[segment]
    first = (each + before).cumsum(0) - each - before  # of each position among all pairs
    who = _spread(each + before)
    seen = torch.empty_like(who)
    reader, column = read.nonzero(as_tuple=True)
    seen[_within(each, reader, first)] = batch.items[row[reader], column]
    if batch.earlier is not None and batch.num_earlier is not None:
        reader, begin = _spread(before), batch.num_earlier.cumsum(0) - batch.num_earlier
        seen[_within(before, reader, first + each)] = batch.earlier[_within(before, reader, begin[segment])]
    seen -= 1
    others = (seen != target[who]) & (seen < num_items)
    return torch.stack([who, seen]) if others.all() else torch.stack([who[others], seen[others]])


def _spread(counts: Tensor) -> Tensor:
    """0 counts[0] times, 1 counts[1] times, ..."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def _within(counts: Tensor, owner: Tensor, first: Tensor) -> Tensor:
    """first[n], first[n] + 1, ... for each n, counts[n] of them; ``owner`` is the n of each."""
    return torch.arange(len(owner), device=owner.device) + (first - (counts.cumsum(0) - counts))[owner]


def sampled_softmax(
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    negatives: Tensor,
    log_expected: Tensor,
    *,
    shares: Tensor | None = None,
) -> Tensor:
    """Equation (6.4).

    Args:
        states, weight, target, shares: as in ``ItemLoss``.
        negatives: rows of ``weight``, (m,), shared by all positions; those that are a position's target do not count.
        log_expected: log E_j of each, (m,).
    """
    positive = (states * weight[target]).sum(dim=1)  # (N,)
    scores = states @ weight[negatives].T - log_expected
    scores = scores.masked_fill(negatives == target[:, None], float("-inf"))
    logits, first = torch.cat([positive[:, None], scores], dim=1), torch.zeros_like(target)
    if shares is None:
        return F.cross_entropy(logits, first)
    return mean_of(F.cross_entropy(logits, first, reduction="none"), shares)


def binary_cross_entropy(
    states: Tensor,
    weight: Tensor,
    target: Tensor,
    negatives: Tensor,
    *,
    beta: float = 1.0,
    shares: Tensor | None = None,
) -> Tensor:
    """Equation (6.6), ``negatives`` (N, k) for each position its own."""
    positive = (states * weight[target]).sum(dim=1)
    scores = gathered_scores(states, weight, negatives)
    if shares is not None:
        each = -beta * F.logsigmoid(positive) - F.logsigmoid(-scores).sum(dim=1)
        return mean_of(each, shares) / (negatives.shape[1] + 1)
    total = -beta * F.logsigmoid(positive).sum() - F.logsigmoid(-scores).sum()
    return total / (negatives.numel() + target.numel())


def pairwise_ranking(
    states: Tensor, weight: Tensor, target: Tensor, negatives: Tensor, *, shares: Tensor | None = None
) -> Tensor:
    """Equation (6.11), ``negatives`` (N, k) for each position its own; RecBole's to 1e-10, which it adds to s."""
    positive = (states * weight[target]).sum(dim=1, keepdim=True)
    return -mean_of(F.logsigmoid(positive - gathered_scores(states, weight, negatives)), shares)


def gbce_beta(num_negatives: int, num_items: int, t: float) -> float:
    """beta of (6.6): 1 at t = 0 (plain bce), the sampling rate at t = 1 (calibrated as the full softmax)."""
    alpha = min(1.0, num_negatives / (num_items - 1))
    return alpha * (t * (1 - 1 / alpha) + 1 / alpha)


@eagerly
@in_full_precision
def gathered_scores(states: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """``states[n] . weight[index[n, j]]`` as (N, k), the (N, k, D) gathered vectors only ever a block at a time."""
    if beyond_first_gradients():
        return (weight[index] * states[:, None]).sum(dim=-1)
    scores: Tensor = applied(_GatheredScores, states, weight, index)
    return scores


class _GatheredScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight, index)
        parts = [torch.bmm(weight[index[rows]], states[rows, :, None])[..., 0] for rows in _blocks(states, index)]
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        states, weight, index = ctx.saved_tensors
        d_states, d_weight = torch.empty_like(states), torch.zeros_like(weight)
        for rows in _blocks(states, index):
            torch.bmm(grad[rows, None, :], weight[index[rows]], out=d_states[rows, None, :])
            pairs = grad[rows, :, None] * states[rows, None, :]
            d_weight.index_add_(0, index[rows].flatten(), pairs.flatten(0, 1))
        return d_states, d_weight, None


def _blocks(states: Tensor, index: Tensor) -> list[slice]:
    rows = max(1, BLOCK_ELEMENTS // (index.shape[1] * states.shape[1]))
    return [slice(first, first + rows) for first in range(0, states.shape[0], rows)]

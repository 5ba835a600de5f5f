"""What is known of an item before and after its events: content as the prior, events as the evidence.

    m_i = W x_i                                       the mean that content alone suggests                     (6.12)
    e_i = m_i + c_i / (c_i + kappa) v_i               belief: the more events, the more of the item's own      (6.13)
    e_i = m_i + v_i      m_i + s(A m_i + B v_i) v_i      m_i             additive, gate, content               (6.14)
    g_t = sum_l rho^l x_(i_(t-l)),  l < content_events     content of what a history holds, the latest first   (6.15)
    score(i) = h_t . e_i + w(c_i) g_t . x_i           w(c) = a + b r / (c + r)                                 (6.16)

c_i counts the training events of an item, or adds up their weights where they have some; x_i is the vector of its
content, of length 1, and v_i what training makes of its number; kappa, rho, a, b and r are learned. (6.13) is a Kalman
update of the prior mean: kappa is how many events the prior is worth. (6.15) and (6.16) krige over content: an item
resembles what the history holds as far as x says, with nothing to forget, and the weight of that falls as events come
in. Other arms than belief have b = 0.

In training some items of a step count as if they had no event, so that content alone is met as a target, and (6.16)
takes the ``content_neighbours`` items that are most similar to each event, the rest adding little. Items without a
training event stand in no denominator: never being a target, they would only learn to be unlike everything.

Shapes: V items, D model width, F content width, K neighbours, L events, N positions, A pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from recbft.datasets.batches import Batch
from recbft.errors import UserError
from recbft.kernels.cross_entropy import Pairs
from recbft.kernels.product import product, updated_product
from recbft.mixers.interface import Group, TrainedPart
from recbft.models.contract import ComparedContent

if TYPE_CHECKING:
    from recbft.models.backbone import BackboneConfig

ItemVector = Literal["id", "additive", "gate", "content", "belief"]

KAPPA_START = 1.0
DECAY_START = 0.6
WEIGHT_START = (3.0, 3.0)  # a and b
EVENTS_START = 4.5  # r
CAUTION = 0.1  # a step of a learned number of this module, relative to other precision parameters
SIMILARITIES_AT_ONCE = 4_000_000
PRODUCTS_KEPT = 1 << 28  # a gigabyte in single precision


class ItemBelief(TrainedPart):
    """The vectors of all items, (6.13) or (6.14), and their content's part of the score, (6.16).

    Args:
        config: ``item_vector`` names the arm.
        counts: (V + 1,) training events of each item, or the sums of their weights, index 0 padding.
        content: (V + 1, F) vectors of length 1, or 0 where nothing is known; row 0 is 0.
    """

    groups: Mapping[str, Group] = dict.fromkeys(
        ("kappa_logit", "decay_logit", "base_weight", "rare_weight", "events_logit"), "precision"
    )
    content: Tensor
    counts: Tensor
    new_item_bias: Tensor  # (V + 1,) added to the scores of items without events: (6.17)

    def __init__(self, config: BackboneConfig, counts: Tensor, content: Tensor) -> None:
        super().__init__()
        assert content.shape[0] == counts.numel(), "content has a row per item and one for padding"
        D, width = config.hidden_size, content.shape[1]
        self.arm: ItemVector = config.item_vector or "belief"
        self.thinned = config.thinned_items
        self.num_neighbours, self.num_events = config.content_neighbours, config.content_events
        dtype = torch.get_default_dtype()
        self.register_buffer("content", content.to(dtype))
        self.register_buffer("counts", counts.to(dtype))
        self.register_buffer("new_item_bias", torch.zeros(len(content), dtype=dtype))
        with_mean = self.arm == "content" or (config.content_mean and self.arm != "id")
        self.prior = nn.Linear(width, D, bias=False) if with_mean else None
        self.gate = nn.Linear(2 * D, D) if self.arm == "gate" else None
        number = lambda value: nn.Parameter(torch.tensor(value / CAUTION))  # noqa: E731
        self.kappa_logit = number(math.log(KAPPA_START)) if self.arm == "belief" else None
        self.decay_logit = number(math.log(DECAY_START / (1 - DECAY_START))) if self.num_events else None
        self.base_weight = number(WEIGHT_START[0]) if self.num_events else None
        by_count = self.num_events and self.arm == "belief"
        self.rare_weight = number(WEIGHT_START[1]) if by_count else None
        self.events_logit = number(math.log(EVENTS_START)) if by_count else None
        self._kept: _Kept | None = None

    @property
    def kappa(self) -> Tensor:
        """How many events the prior is worth, (6.13)."""
        assert self.kappa_logit is not None
        return (CAUTION * self.kappa_logit).exp()

    @property
    def decay(self) -> Tensor:
        """rho of (6.15)."""
        assert self.decay_logit is not None
        return torch.sigmoid(CAUTION * self.decay_logit)

    @property
    def has_events(self) -> Tensor:
        """(V + 1,) whether an item has a training event."""
        return self.counts > 0

    def thinned_counts(self) -> Tensor:
        """c, (V + 1,); in training that of a few items is 0, drawn anew for each step."""
        if not (self.training and self.thinned):
            return self.counts
        kept = torch.rand(self.counts.shape, device=self.counts.device) >= self.thinned
        return self.counts * kept.to(self.counts.dtype)

    def vectors(self, own: Tensor, counts: Tensor, rows: Tensor | None = None) -> Tensor:
        """e of every row of ``own``, (R, D): of padding and the items, then of what is none.

        Args:
            own: v of all rows, or of ``rows``.
            counts: c, (V + 1,).
            rows: ascending numbers, (R,); None for all.
        """
        if self.arm == "id":
            return own
        content, num_items, gain = self.content, len(self.content), None
        if rows is not None:
            items = rows[rows < num_items]
            content, counts, num_items = content[items], counts[items], len(items)
        of_items = own if len(own) == num_items else own[:num_items]
        if self.kappa_logit is not None:  # (6.13)
            gain = counts / (counts + self.kappa)
        if self.arm == "content":
            of_items = 0 * of_items
        if self.gate is not None and self.prior is not None:
            mean = self.prior(content)
            of_items = mean + torch.sigmoid(self.gate(torch.cat([mean, of_items], dim=1))) * of_items
        elif self.prior is not None:
            of_items = updated_product(content, self.prior.weight, of_items, gain)
        elif gain is not None:
            of_items = gain[:, None] * of_items
        return of_items if len(own) == num_items else torch.cat([of_items, own[num_items:]])

    def weights(self, counts: Tensor) -> Tensor:
        """w(c) of (6.16)."""
        assert self.base_weight is not None
        weight = CAUTION * self.base_weight
        if self.rare_weight is not None and self.events_logit is not None:
            r = (CAUTION * self.events_logit).exp()
            return weight + CAUTION * self.rare_weight * r / (counts + r)
        return weight.expand_as(counts)

    def raise_new_items(self, by: float) -> None:
        """Add to the scores of all items without a training event."""
        self.new_item_bias[1:] += by * ~self.has_events[1:]

    def new_item_delta(self) -> Tensor:
        """delta of (6.17); 0 where no item of the catalogue was without events."""
        fitted = self.new_item_bias[1:][~self.has_events[1:]]
        return fitted[0] if len(fitted) else self.new_item_bias[0]

    def bias(self, own: Tensor | None) -> Tensor | None:
        """Item biases, (V + 1,), with that of items without events; None where all are 0."""
        if self.has_events[1:].all():
            return own
        return self.new_item_bias if own is None else own + self.new_item_bias

    def prior_share(self, counts: Tensor) -> Tensor:
        """kappa / (c + kappa): what is left of the prior after so many events; without kappa all or nothing."""
        if self.kappa_logit is None:
            return (counts == 0).to(self.counts.dtype)
        return self.kappa / (counts + self.kappa)

    def state(self, batch: Batch, at: Tensor) -> Tensor:
        """g of (6.15), (N, F), at tokens counted through the rows, (N,)."""
        items, decay = self._latest(batch, at)
        return torch.einsum("nl,nlf->nf", decay, self.content[items])

    def pairs(self, batch: Batch, at: Tensor, counts: Tensor) -> Pairs:
        """The content's part of the scores of (6.16) for the neighbours of each position's events.

        Items are numbered among those that have training events.
        """
        near, similarity = self.neighbours()
        items, decay = self._latest(batch, at)
        there = items > 0
        position, _ = there.nonzero(as_tuple=True)  # of A' pairs of a position and an event
        of_event = items[there]
        found = near.index_select(0, of_event)  # (A', K)
        # Gathered counts, unlike gathered weights, have no gradient that would have to be scattered.
        weight = self.weights(counts[self.has_events][found])
        values = decay.masked_select(there)[:, None] * (similarity.index_select(0, of_event) * weight)
        return Pairs(torch.stack([position[:, None].expand_as(found), found]).flatten(1), values.flatten())

    def neighbours(self) -> tuple[Tensor, Tensor]:
        """Of each item the most similar ones that have training events: their numbers among these, and x . x, (V+1, K).

        An item is none of its own neighbours; similarity is 0 where there are fewer than K that are similar at all.
        """
        if (kept := self._still_kept()) is None:
            with torch.no_grad():
                kept = self._kept = self._compare()
        return kept.near, kept.similarity

    @torch.no_grad()
    def compared(self, batches: Iterable[Batch]) -> ComparedContent | None:
        """What (6.16) adds to the scores of the last tokens of batches, where training has kept the products of x."""
        kept = self._still_kept()
        if kept is None or kept.products is None or not self.num_events:
            return None
        items, decay = zip(*(self._latest(batch, batch.last) for batch in batches), strict=True)
        weight = self.weights(self.counts)[1:]
        return ComparedContent(self.content.shape[1], kept.products, weight, torch.cat(items), torch.cat(decay))

    def _compare(self) -> _Kept:
        chosen, V1 = self.has_events.nonzero()[:, 0], len(self.content)
        K = min(self.num_neighbours, len(chosen))
        keep = self.content.device.type == "cpu" and V1 * V1 <= PRODUCTS_KEPT
        products = self.content.new_empty(V1, V1 - 1) if keep else None
        near, similarity = [], []
        for first in range(0, V1, step := max(1, SIMILARITIES_AT_ONCE // V1)):
            rows = torch.arange(first, min(first + step, V1), device=chosen.device)
            found = product(self.content[rows], self.content[1:])
            if products is not None:
                products[first : first + step] = found
            cosine = found if len(chosen) == V1 - 1 else found[:, chosen - 1]
            cosine[rows[:, None] == chosen] = 0
            best = cosine.topk(K, dim=1)
            near.append(best.indices)
            similarity.append(best.values.clamp(min=0))
        return _Kept(self._sources(), torch.cat(near), torch.cat(similarity), products)

    def _still_kept(self) -> _Kept | None:
        """What is kept, unless content or counts were replaced or written over since."""
        same = self._kept is not None and all(
            old is new and version == now
            for (old, version), (new, now) in zip(self._kept.sources, self._sources(), strict=True)
        )
        return self._kept if same else None

    def _sources(self) -> tuple[tuple[Tensor, int], ...]:
        """Content and counts, and how often each was written to, as far as that is counted."""
        return tuple((own, 0 if own.is_inference() else own._version) for own in (self.content, self.counts))

    def _latest(self, batch: Batch, at: Tensor) -> tuple[Tensor, Tensor]:
        return latest_events(batch, at, self.decay, number=self.num_events, num_items=len(self.content) - 1)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}  # which a copy does not need

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        kept, given = self._still_kept(), [state.get(f"{prefix}{name}") for name in ("content", "counts")]
        same = [
            new is None or torch.equal(new.to(old), old)
            for new, old in zip(given, (self.content, self.counts), strict=True)
        ]
        super()._load_from_state_dict(state, prefix, *arguments)
        self._kept = kept._replace(sources=self._sources()) if kept is not None and all(same) else None


class _Kept(NamedTuple):
    """What follows from the content of items and which of them have events."""

    sources: tuple[tuple[Tensor, int], ...]  # that it is of
    near: Tensor  # of ``neighbours``
    similarity: Tensor
    products: Tensor | None  # (V + 1, V) x_j . x_i, where that is not too much to keep


def latest_events(batch: Batch, at: Tensor, rho: Tensor, *, number: int, num_items: int) -> tuple[Tensor, Tensor]:
    """The events of (6.15) up to each token, the latest first, and rho^l: (N, L) each; what is no item is 0."""
    lag = torch.arange(number, device=at.device)
    there = lag <= batch.position.flatten()[at][:, None]
    items = batch.items.flatten()[(at[:, None] - lag).clamp(min=0)]
    there &= items <= num_items  # a mask is no item
    return items * there, rho ** lag.to(rho.dtype) * there


def check_items(config: BackboneConfig, content: Tensor | None) -> None:
    """Refuse arms that need features where there are none."""
    if content is None and config.item_vector not in (None, "id"):
        raise without_features(f"item_vector is {config.item_vector!r}", "leave item_vector out")


def without_features(asked: str, instead: str) -> UserError:
    """What to say where item features are asked for and there are none."""
    return UserError(
        f"{asked}, but the data has no item features; give them (data.items, or --items in a shell), or {instead}"
    )

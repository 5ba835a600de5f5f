"""What SASRec, BERT4Rec and HSTU share: embed items and positions, stack blocks, score the vocabulary.

    h_0 = s emb(item) + pos(position), normalised where the backbone has a norm there; pos can be off  (6.1)
    h_L by L blocks;   state = read_out(h_L);   score(i) = state . emb_i + bias_i                      (6.2)
    state <- its coordinates scaled by their precision, ``core.read_out``                              (6.18)

A backbone is put together from parts: its blocks, a read-out, whether it looks both ways, whether a token (a mask) is
appended at prediction. Positions count from the oldest event that is read, or back from the latest.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 5.
Shapes: B rows, T tokens, D model width, V items, S histories, N training positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from recbft.autograd.boundaries import HALVES, eagerly
from recbft.autograd.transforms import behind_transforms, untransformed
from recbft.config.fields import check_range
from recbft.core import Belief, SequenceContext, pick
from recbft.datasets.batches import Batch
from recbft.errors import UserError
from recbft.kernels.dropout import Dropout
from recbft.kernels.layer_norm import LayerNorm
from recbft.kernels.product import common_size
from recbft.mixers.interface import DECAY_KEPT, Group, Mixer, take_penalties
from recbft.models.block import Block
from recbft.models.contract import ComparedContent, ItemTable, TrainableModel, UserStates
from recbft.models.feed_forward import FeedForward
from recbft.models.item_belief import ItemBelief, ItemVector, check_items
from recbft.models.losses import ItemLoss, Negatives, check_loss, seen_items, shares_of
from recbft.models.precision_channel import LAM_MIN, CoreConfig, ItemPrecision
from recbft.models.precision_read_out import PrecisionReadOut
from recbft.models.reliability import ReliabilityInput, ReliabilityPrecision


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The keys that every backbone has (the ``backbone`` section of a config)."""

    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 2
    inner_size: int | None = None  # of the feed-forward network; None means 4 hidden_size
    max_length: int = 50  # tokens of a history that are read, the last ones
    absolute_positions: bool = True  # a learned vector per position; False for mixers that know the lag
    positions: Literal["oldest", "latest"] = (
        "oldest"  # event that is 0; with latest, tokens know how many come after them
    )
    dropout: float = 0.5
    embedding_scale: float | None = None  # None means the backbone's own
    initializer_range: float = 0.02  # standard deviation of the initial weights
    # of linear maps; None means normal, as the other weights; xavier has the variance 2 / (inputs + outputs)
    linear_init: Literal["normal", "xavier"] | None = None
    norm_eps: float = 1e-8
    recency_decay: bool = True  # a learned decay of attention with the lag
    recency_start: float | None = None  # rho, what it begins with; None means 0.99
    output_projection: bool = False  # a linear map after the heads are joined
    loss: str = "ce"  # a name of ``losses.LOSSES``
    num_negatives: int | None = None  # None means 512 for sampled_softmax, 256 for gbce, 1 for bce and bpr
    negatives: Negatives | None = None  # of sampled_softmax; None means uniform
    gbce_t: float | None = None  # calibration of gbce in [0, 1]; None means 0.75
    item_vector: ItemVector | None = None  # what it is made of; None means belief with item features, id without
    # what data.reliability becomes: a factor of the event's precision, or a vector added to its item's; None: unread
    reads_reliability: Literal["precision", "input"] | None = None
    content_events: int = 5  # latest events whose content is compared with that of candidates; 0 compares none
    content_neighbours: int = 50  # of an event that are compared in training, the most similar ones
    content_width: int = 256  # numbers in the vector of a column of features, at most
    content_mean: bool = True  # items have a vector from their content, to which events add
    thinned_items: float = 0.12  # share of the items that count as new in a training step


def check_backbone(config: BackboneConfig) -> None:
    """Refuse values out of range, and settings that have no effect."""
    for name in ("hidden_size", "n_layers", "n_heads", "inner_size", "max_length"):
        check_range(name, getattr(config, name), at_least=1)
    check_range("dropout", config.dropout, at_least=0, below=1)
    check_range("embedding_scale", config.embedding_scale, above=0)
    check_range("initializer_range", config.initializer_range, above=0)
    check_range("norm_eps", config.norm_eps, above=0)
    check_range("recency_start", config.recency_start, above=0, below=1)
    check_range("content_events", config.content_events, at_least=0)
    check_range("content_neighbours", config.content_neighbours, at_least=1)
    check_range("content_width", config.content_width, at_least=2)
    check_range("thinned_items", config.thinned_items, at_least=0, below=1)
    if config.positions != type(config).positions and not config.absolute_positions:
        raise UserError("positions has no effect without absolute_positions; leave it out")
    if config.hidden_size % config.n_heads:
        divisors = [str(n) for n in range(1, config.hidden_size + 1) if config.hidden_size % n == 0]
        raise UserError(
            f"n_heads is {config.n_heads}, which does not divide hidden_size {config.hidden_size}; "
            f"choose one of {', '.join(divisors)}"
        )
    check_loss(config)


class Backbone(TrainableModel):
    """A model over item histories; ``core`` None leaves the precision channel out.

    Args:
        training_counts: (V + 1,) counts of each item in training, or sums of the weights of its events; 0 is padding.
        content: (V + 1, F) vectors of what is known of each item, for ``config.item_vector``.
        embedding_scale: s of (6.1).
        seed: equal seeds give equal weights to the parameters that two arms share.
        read_out: from the last layer's mean to the state; a LayerNorm unless given.
        norm_embedding: normalise (6.1), before dropout.
        item_bias: learn the bias of (6.2).
        both_ways: tokens see their whole history, and a mask stands at the end when predicting: the item V + 1 of
            count 0, the last of ``max_length`` tokens.
        positions: counted from the ``oldest`` token that is read, or back from the ``latest``.
        reads_times, shows_target_time: what the blocks want to know of times.
    """

    ramp: Tensor
    groups: Mapping[str, Group] = {"item_precision": "precision", "reliability_precision": "precision"}
    per_item = (
        "item_embedding.weight",
        "item_bias",
        *(f"item_precision.{name}" for name in ("base", "credibility", "table", "known")),
        *(f"item_belief.{name}" for name in ("content", "counts", "new_item_bias")),
    )

    def __init__(
        self,
        config: BackboneConfig,
        core: CoreConfig | None,
        training_counts: Tensor,
        blocks: Sequence[Block],
        *,
        embedding_scale: float,
        seed: int = 0,
        read_out: nn.Module | None = None,
        norm_embedding: bool = False,
        item_bias: bool = False,
        both_ways: bool = False,
        positions: Literal["oldest", "latest"] = "oldest",
        reads_times: bool = False,
        shows_target_time: bool = False,
        content: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_items(config, content)
        D = config.hidden_size
        self.config, self.core, self.max_length = config, core, config.max_length
        self.embedding_scale, self.both_ways, self.positions = embedding_scale, both_ways, positions
        self.reads_times, self.shows_target_time = reads_times, shows_target_time
        self.num_items = training_counts.numel() - 1
        token_counts = training_counts
        if both_ways:
            self.append = self.num_items + 1
            token_counts = torch.cat([training_counts, training_counts.new_zeros(1)])
        self.item_embedding = nn.Embedding(token_counts.numel(), D)
        self.position_embedding = nn.Embedding(config.max_length, D) if config.absolute_positions else None
        self.norm_embedding = LayerNorm(D, eps=config.norm_eps) if norm_embedding else None
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = LayerNorm(D, eps=config.norm_eps) if read_out is None else read_out
        self.item_bias = nn.Parameter(torch.zeros(self.num_items + 1)) if item_bias else None
        self.item_precision: ItemPrecision | None = None
        if core is not None:
            head_width = D // config.n_heads
            self.item_precision = ItemPrecision(
                core, token_counts, num_items=self.num_items, hidden_size=D, head_width=head_width, content=content
            )
        self.precision_read_out: PrecisionReadOut | None = None
        if core is not None and core.read_out != "off":
            if core.read_out == "shrinkage" and not isinstance(self.norm, nn.LayerNorm):
                raise UserError(
                    "core.read_out shrinkage is for a state with the coordinates of the last layer, and backbone.head "
                    "mixes them; take temperature, or leave head out"
                )
            self.precision_read_out = PrecisionReadOut(core.read_out, hidden_size=D)
        self.reliability_precision = self.reliability_input = None
        if config.reads_reliability == "precision":
            if core is None:
                raise UserError(
                    "backbone.reads_reliability is 'precision', but this model tracks none; take arm bft, or "
                    "reads_reliability input"
                )
            self.reliability_precision = ReliabilityPrecision()
        elif config.reads_reliability == "input":
            self.reliability_input = ReliabilityInput(D)
        self.reads_reliability = config.reads_reliability is not None
        # The warm-up w of the precision and recency biases, as of the last optimiser step: evaluation uses it.
        self.register_buffer("ramp", torch.zeros(()))
        self._told: tuple[Tensor, int, float] | None = None  # the ramp as it was set last, and its value
        self.item_belief = None if content is None else ItemBelief(config, training_counts, content)
        self.item_loss = ItemLoss(config, training_counts, only_trained=content is not None)
        self.focal_exponent = nn.Parameter(torch.zeros(())) if self.item_loss.spec.has_exponent else None
        self._initialise(seed)

    def encode(self, batch: Batch, *, only: Tensor | None = None, vectors: Tensor | None = None) -> Belief:
        """The belief about every token after the last layer, its mean read out; precision is ones without ``core``.

        ``only`` names tokens, counted through the rows, whose belief is all that is wanted: the result is (N, D).
        ``vectors`` are those of all tokens, (V + 1 or more, D), where they are made already.
        """
        if only is not None and self.training:  # what layers keep in training is of all tokens
            whole = self.encode(batch, vectors=vectors)
            return Belief(pick(whole.mean, only), pick(whole.precision, only))
        if self.item_belief is None:
            embedded = self.item_embedding(batch.items)  # (B, T, D)
        else:
            embedded = self._embed(batch.items) if vectors is None else F.embedding(batch.items, vectors)
        mean = self.embedding_scale * embedded
        if self.position_embedding is not None:
            mean = mean + self.position_embedding(self._positions(batch))
        if self.reliability_input is not None and batch.reliability is not None:
            mean = mean + self.reliability_input(batch.reliability)
        if self.norm_embedding is not None:
            mean = self.norm_embedding(mean)
        mean = self.dropout(mean)
        precision = torch.ones_like(mean[..., :1])
        if self.item_precision is not None:
            precision = self.item_precision(batch.items, embedded)
            if self.reliability_precision is not None and batch.reliability is not None:
                factor = self.reliability_precision(batch.reliability)
                precision = (factor * precision).clamp(LAM_MIN, self.item_precision.lam_max)
        belief, ramp = Belief(mean, precision.expand_as(mean)), self._ramp()
        context = self._context(batch)
        for block in self.blocks[:-1]:
            belief = block(belief, context, ramp)
        belief = self.blocks[-1](belief, context, ramp, only)
        state: Tensor = self.norm(belief.mean)
        if self.precision_read_out is not None:
            state = self.precision_read_out(state, belief.precision, context.valid, ramp)
        return Belief(state, belief.precision)

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss over the positions that have a target, by ``config.loss``, with the shares of their weights."""
        assert batch.target is not None
        if self.core is not None and self.ramp.dtype in HALVES:
            raise UserError(
                f"a model that tracks precision is trained in float32 or float64, got {self.ramp.dtype}; for products "
                "in half precision set training.autocast: bf16, or call the model within torch.autocast"
            )
        target = batch.target.flatten()
        learn = target.nonzero().squeeze(1)  # (N,); a device is waited for here, before it has much to do
        wanted, seen = target[learn] - 1, None
        if self.item_loss.spec.leaves_out_seen:
            seen = seen_items(batch, learn, wanted, num_items=self.num_items, causal=not self.both_ways)
        shares = None if batch.weight is None else shares_of(batch.weight.flatten()[learn]).to(self.ramp.dtype)
        if self.item_belief is not None:
            loss = self._loss_of_beliefs(batch, learn, wanted, seen, shares)
        else:
            mean = self.encode(batch).mean.flatten(0, 1)
            weight, bias = self.item_table()
            bias = None if bias is None else bias[1:]
            loss = self.item_loss(
                mean[learn], weight[1:], bias, wanted, seen, shares=shares, exponent=self.focal_exponent
            )
        penalties = take_penalties(self)  # of mixers that have some; none at all for most
        return loss if penalties is None else loss + penalties

    def _loss_of_beliefs(
        self, batch: Batch, learn: Tensor, wanted: Tensor, seen: Tensor | None, shares: Tensor | None
    ) -> Tensor:
        """The loss with item vectors by (6.13) and scores by (6.16), among the items that have training events."""
        items, alpha = self.item_belief, self.focal_exponent
        assert items is not None
        counts = items.thinned_counts()
        vectors = self._vectors(counts)
        states = self.encode(batch, vectors=vectors).mean.flatten(0, 1)[learn]
        known = items.has_events[1:]
        # Validation may ask for an item without any; a loss that draws items looks up the whole of a few scores.
        if not self.training or self.item_loss.spec.num_negatives or not known[wanted].all():
            weight, bias = self._table(vectors, counts)
            states = self.with_content(states, batch, learn)
            bias = None if bias is None else bias[1:]
            return self.item_loss(states, weight[1:], bias, wanted, seen, shares=shares, exponent=alpha)
        weight, bias = vectors[1 : self.num_items + 1], None if self.item_bias is None else self.item_bias[1:]
        if not known.all():
            rows = items.has_events.nonzero()[:, 0]
            weight = vectors.index_select(0, rows)
            bias = None if self.item_bias is None else self.item_bias.index_select(0, rows)
            number = known.cumsum(0) - 1  # (V,) of each item among those
            wanted = number[wanted]
            if seen is not None:
                kept = known[seen[1]]
                seen = torch.stack([seen[0][kept], number[seen[1][kept]]])
        added = items.pairs(batch, learn, counts) if items.num_events else None
        return self.item_loss(states, weight, bias, wanted, seen, added, shares, alpha)

    def fit_reliability(self, values: NDArray[np.float64]) -> None:
        """Take the quantiles (5.12) of the reliability of the training events, (n,), NaN where it is missing."""
        for part in (self.reliability_precision, self.reliability_input):
            if part is not None:
                part.quantiles.fit(values)

    def user_states(self, batch: Batch) -> UserStates:
        """State and mean posterior precision at each history's last token."""
        return self.states_of(self.encode(batch, only=batch.last), batch)

    def states_of(self, belief: Belief, batch: Batch) -> UserStates:
        """The user states of beliefs about each history's last token that are computed already, (S, D)."""
        state = self.with_content(belief.mean, batch, batch.last)
        return UserStates(state, None if self.core is None else belief.precision.mean(dim=-1))

    def compared(self, batches: Iterable[Batch]) -> ComparedContent | None:
        """What (6.16) adds to scores, after training among neighbours."""
        return None if self.item_belief is None else self.item_belief.compared(batches)

    def item_table(self) -> ItemTable:
        """The tied item embeddings, beside their content where it is compared, and item biases where there are any."""
        if self.item_belief is None:
            return ItemTable(self.item_embedding.weight[: self.num_items + 1], self.item_bias)
        return self._table(self._vectors(), self.item_belief.counts)

    def _table(self, vectors: Tensor, counts: Tensor) -> ItemTable:
        """The item table with the vectors of all tokens, and with (6.16), at some counts, (V + 1,)."""
        items, weight = self.item_belief, vectors[: self.num_items + 1]
        assert items is not None
        if items.num_events:
            weight = torch.cat([weight, items.weights(counts)[:, None] * items.content], dim=1)
        return ItemTable(weight, items.bias(self.item_bias))

    def _embed(self, tokens: Tensor) -> Tensor:
        """The vectors of some tokens, (B, T, D), by (6.13) or (6.14), of which few are of different items."""
        belief, own = self.item_belief, self.item_embedding.weight
        assert belief is not None
        rows, place = tokens.unique(return_inverse=True)
        more = common_size(len(rows), own) - len(rows)
        rows = F.pad(rows, (more, 0))
        return F.embedding(place + more, belief.vectors(own[rows], belief.counts, rows))

    def _vectors(self, counts: Tensor | None = None) -> Tensor:
        """The vector of every token, by (6.13) or (6.14)."""
        assert self.item_belief is not None
        own = self.item_embedding.weight
        return self.item_belief.vectors(own, self.item_belief.counts if counts is None else counts)

    def with_content(self, states: Tensor, batch: Batch, at: Tensor) -> Tensor:
        """States, (N, D), beside (6.15) where content is compared."""
        items = self.item_belief
        return states if items is None or not items.num_events else torch.cat([states, items.state(batch, at)], dim=1)

    def with_items(self, content: Tensor, counts: Tensor) -> Backbone:
        """A copy that knows N more items, V + 1 to V + N, by their content alone.

        Their own vectors are 0.

        Args:
            content: (N, F), as that of the others.
            counts: (N,) events of each so far, of which the model has learned nothing.
        """
        grown, items = copy.deepcopy(self), self.item_belief
        assert items is not None, "the model reads no item features"
        fresh = {
            "item_belief.content": content,
            "item_belief.new_item_bias": items.new_item_delta() * items.prior_share(counts),
        }
        if self.item_precision is not None:
            fresh["item_precision.base"] = self.item_precision.base_of(counts, items.counts)
            fresh["item_precision.known"] = content.any(dim=1)
        V1, learned = self.num_items + 1, dict(self.named_parameters())
        for name, old in (learned | dict(self.named_buffers())).items():
            if name in self.per_item:
                new = fresh.get(name, old.new_zeros(len(counts), *old.shape[1:]))
                rows = torch.cat([old.detach()[:V1], new.detach().to(old), old.detach()[V1:]])
                path, _, last = name.rpartition(".")
                setattr(grown.get_submodule(path), last, nn.Parameter(rows) if name in learned else rows)
        grown.num_items += len(counts)
        grown.append = None if self.append is None else self.append + len(counts)
        return grown.eval()

    def set_ramp(self, ramp: float) -> None:
        """Set the warm-up w in [0, 1], before an optimiser step; it is not written where it is known to be that."""
        value = torch.tensor(ramp, dtype=self.ramp.dtype, device="cpu").item()
        if self._known_ramp() == value:
            return
        self.ramp.fill_(ramp)
        if not self.ramp.is_inference():  # which counts no changes
            self._told = self.ramp, self.ramp._version, value

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        """Mixers keep their recency decay whole where those of the state do."""
        for path, part in self.named_modules():
            if DECAY_KEPT in part._buffers:
                kept = state.get(f"{prefix}{path}.{DECAY_KEPT}")
                part.register_buffer(DECAY_KEPT, None if kept is None else torch.ones_like(self.ramp))
        super()._load_from_state_dict(state, prefix, *arguments)

    @eagerly
    @untransformed
    def _ramp(self) -> float:
        """w as a number, as it was set last: a device is not waited for unless something else has written there."""
        if (known := self._known_ramp()) is not None:
            return known
        least, most = (bound.item() for bound in behind_transforms(self.ramp).aminmax())  # of all that vmap has stacked
        if least < most:
            raise ValueError(f"models stacked by vmap have ramps from {least:g} to {most:g}; set the same ramp in all")
        return most

    def _known_ramp(self) -> float | None:
        """w as it was set last, or None where something else may have written there."""
        if self._told is None:
            return None
        ramp, version, value = self._told
        return value if ramp is self.ramp and ramp._version == version else None

    def __getstate__(self) -> dict[str, Any]:
        """Without the ramp's value: the ramp of a copy counts its changes anew."""
        return {**vars(self), "_told": None}

    def refresh(self) -> None:
        """Bring what is kept from the weights up to date: at the start of an epoch and before evaluation."""
        for block in self.blocks:
            assert isinstance(block, Block)
            if block.precision is not None and isinstance(network := block.network, FeedForward):
                block.precision.refresh(network.inner.weight, network.outer.weight)

    def _positions(self, batch: Batch) -> Tensor:
        """(B, T) rows of the position embedding."""
        if self.positions == "oldest":
            return batch.position
        latest = batch.position.flatten()[batch.last]  # (S,)
        return torch.where(batch.segment >= 0, latest[batch.segment.clamp(min=0)] - batch.position, 0)

    def _context(self, batch: Batch) -> SequenceContext:
        return SequenceContext(
            batch.segment,
            batch.position,
            batch.time,
            causal=not self.both_ways,
            query_time=batch.next_time if self.shows_target_time else None,
        )

    def _initialise(self, seed: int) -> None:
        """Normal weights, zero biases; one generator for what arms share, another for the precision channel.

        With ``xavier`` the same numbers are drawn, and those of linear maps are scaled. A complex output counts once
        and its parts share the variance: the Rayleigh start of Robust Filter Attention (paper), appendix D.2.
        """
        shared, own = (torch.Generator().manual_seed(2 * seed + part) for part in (0, 1))
        # These start where they say, and draw nothing that arms share.
        rules = {"reliability_", *(f"blocks.{number}.update." for number in range(len(self.blocks)))}
        groups = self.optimiser_groups()
        linear = {f"{path}.weight" for path, part in self.named_modules() if isinstance(part, nn.Linear)}
        mixers = ((path, part) for path, part in self.named_modules() if isinstance(part, Mixer))
        in_pairs = {f"{path}.{name}.weight" for path, mixer in mixers for name in mixer.complex_maps}
        for name, parameter in self.named_parameters():
            if any(name.startswith(rule) for rule in rules):
                continue
            generator = own if groups[name] == "precision" else shared
            if parameter.dim() == 2:
                std = self.config.initializer_range
                if self.config.linear_init == "xavier" and generator is shared and name in linear:
                    outputs, inputs = parameter.shape
                    std = math.sqrt(1 / (outputs / 2 + inputs) if name in in_pairs else 2 / (outputs + inputs))
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if self.item_precision is not None and self.item_precision.mode == "hybrid":
            last = self.item_precision.read[2]
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)  # softplus starts at ln 2


def root_of_width(config: BackboneConfig) -> float:
    """The embedding scale of SASRec and HSTU: sqrt(D), unless asked otherwise."""
    return math.sqrt(config.hidden_size) if config.embedding_scale is None else config.embedding_scale

"""SASRec: a causal Transformer over a user's items, scored against the item embeddings.

    h_0 = s emb(item) + pos(position)       s = sqrt(D) unless asked otherwise                   (1)
    h_L by L blocks;   state = Norm(h_L);   score(i) = state . emb_i                             (2)

Three arms of the same code: ``published`` (the authors' layer: normalised queries over raw keys and values, residual
from the normalised stream, no output projection, ReLU feed-forward of width D), ``matched`` (the pre-norm layer with
the precision channel off) and ``bft`` (precision tracked).

Source: Kang and McAuley, Self-Attentive Sequential Recommendation (arXiv 1808.09781);
Precision Tracked Transformer (arXiv 2605.18832).
Shapes: B rows, T tokens, D model width, V items, S histories, N training positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from recbft.config import check_range
from recbft.core import Belief, SequenceContext
from recbft.datasets.batches import Batch
from recbft.errors import UserError
from recbft.kernels.cross_entropy import full_cross_entropy
from recbft.kernels.dropout import Dropout
from recbft.mixers import SoftmaxAttention
from recbft.models.block import Block
from recbft.models.contract import ItemTable, TrainableModel, UserStates
from recbft.models.precision_channel import ItemPrecision, LayerPrecision
from recbft.models.precision_config import CoreConfig

RECENCY_START = 0.99


@dataclass(frozen=True, kw_only=True)
class SASRecConfig:
    """Shape of the backbone (the ``backbone`` section of a config)."""

    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 2
    inner_size: int | None = None  # None means 4 hidden_size, or hidden_size in the original layer
    max_length: int = 50  # events of a history that are read, the last ones
    dropout: float = 0.5
    attention_dropout: float | None = None  # None means 0, or dropout in the original layer
    embedding_scale: float | None = None  # None means sqrt(hidden_size)
    initializer_range: float = 0.02  # standard deviation of the initial weights
    norm_eps: float = 1e-8
    recency_decay: bool = True  # a learned decay of attention with the lag
    output_projection: bool = False
    activation: Literal["gelu", "relu"] = "gelu"
    layer: Literal["pre_norm", "original"] = "pre_norm"

    @property
    def attention_dropout_rate(self) -> float:
        """Probability of dropping an attention weight."""
        if self.attention_dropout is None:
            return self.dropout if self.layer == "original" else 0.0
        return self.attention_dropout

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward network."""
        return self.inner_size or self.hidden_size * (1 if self.layer == "original" else 4)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "n_layers", "n_heads", "inner_size", "max_length"):
            check_range(name, getattr(self, name), at_least=1)
        check_range("dropout", self.dropout, at_least=0, below=1)
        check_range("attention_dropout", self.attention_dropout, at_least=0, below=1)
        check_range("embedding_scale", self.embedding_scale, above=0)
        check_range("initializer_range", self.initializer_range, above=0)
        check_range("norm_eps", self.norm_eps, above=0)
        if self.hidden_size % self.n_heads:
            raise UserError(
                f"n_heads is {self.n_heads}, which does not divide hidden_size {self.hidden_size}; "
                f"choose one of {', '.join(str(n) for n in _divisors(self.hidden_size))}"
            )


class SASRec(TrainableModel):
    """The model; ``core`` None leaves the precision channel out (arms ``published`` and ``matched``).

    Args:
        config: shape of the backbone.
        core: the precision channel, or None.
        training_counts: (V + 1,) counts of each item in training, index 0 padding.
        seed: equal seeds give equal weights to the parameters that two arms share.
    """

    ramp: Tensor

    def __init__(
        self, config: SASRecConfig, core: CoreConfig | None, training_counts: Tensor, *, seed: int = 0
    ) -> None:
        super().__init__()
        if core is not None and (config.layer != "pre_norm" or config.activation != "gelu"):
            raise UserError(
                f"arm 'bft' needs layer pre_norm and activation gelu, got {config.layer} and {config.activation}"
            )
        D = config.hidden_size
        self.config, self.core, self.max_length = config, core, config.max_length
        self.embedding_scale = math.sqrt(D) if config.embedding_scale is None else config.embedding_scale
        self.item_embedding = nn.Embedding(training_counts.numel(), D)
        self.position_embedding = nn.Embedding(config.max_length, D)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            _block(config, core, is_last=layer == config.n_layers - 1) for layer in range(config.n_layers)
        )
        self.norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.item_precision: ItemPrecision | None = None
        if core is not None:
            self.item_precision = ItemPrecision(core, training_counts, hidden_size=D, head_width=D // config.n_heads)
        # The warm-up w of the precision and recency biases, as of the last optimiser step: evaluation uses it.
        self.register_buffer("ramp", torch.zeros(()))
        self._initialise(seed)

    def encode(self, batch: Batch) -> Belief:
        """The belief about every token after the last layer, mean normalised; precision is ones without ``core``."""
        context = SequenceContext(batch.segment, batch.position, batch.time)
        embedded = self.item_embedding(batch.items)  # (B, T, D)
        mean = self.dropout(self.embedding_scale * embedded + self.position_embedding(batch.position))
        precision = torch.ones_like(mean[..., :1])
        if self.item_precision is not None:
            precision = self.item_precision(batch.items, embedded)
        belief, ramp = Belief(mean, precision.expand_as(mean)), float(self.ramp)
        for block in self.blocks:
            belief = block(belief, context, ramp)
        return Belief(self.norm(belief.mean), belief.precision)

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of the next item over all items, at every position that has one."""
        assert batch.target is not None
        mean = self.encode(batch).mean.flatten(0, 1)
        learn = batch.target.flatten().nonzero().squeeze(1)  # (N,)
        return full_cross_entropy(mean[learn], self.item_embedding.weight[1:], batch.target.flatten()[learn] - 1)

    def user_states(self, batch: Batch) -> UserStates:
        """State and mean posterior precision after each history's last event."""
        belief = self.encode(batch)
        state = belief.mean.flatten(0, 1)[batch.last]
        if self.core is None:
            return UserStates(state, None)
        return UserStates(state, belief.precision.flatten(0, 1)[batch.last].mean(dim=-1))

    def item_table(self) -> ItemTable:
        """The tied item embeddings."""
        return ItemTable(self.item_embedding.weight, None)

    def set_ramp(self, ramp: float) -> None:
        """Set the warm-up w in [0, 1], before an optimiser step."""
        self.ramp.fill_(ramp)

    def refresh(self) -> None:
        """Bring what is kept from the weights up to date: at the start of an epoch and before evaluation."""
        for block in self.blocks:
            assert isinstance(block, Block)
            if block.precision is not None:
                block.precision.refresh(block.inner.weight, block.outer.weight)

    def is_precision_parameter(self, name: str) -> bool:
        """Whether a parameter belongs to the optimiser's precision group."""
        return "precision" in name.split(".") or "item_precision" in name or "decay_logit" in name

    def _initialise(self, seed: int) -> None:
        """Normal weights, zero biases; one generator for what arms share, another for the precision channel."""
        shared, own = (torch.Generator().manual_seed(2 * seed + part) for part in (0, 1))
        for name, parameter in self.named_parameters():
            generator = own if self.is_precision_parameter(name) else shared
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=self.config.initializer_range, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if self.item_precision is not None and self.item_precision.mode == "hybrid":
            last = self.item_precision.read[2]
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)  # softplus starts at ln 2


def _block(config: SASRecConfig, core: CoreConfig | None, *, is_last: bool) -> Block:
    D = config.hidden_size
    mixer = SoftmaxAttention(
        D,
        config.n_heads,
        dropout=config.attention_dropout_rate,
        output_projection=config.output_projection,
        recency_decay=RECENCY_START if config.recency_decay else None,
        estimator=None if core is None else core.estimator,
        prior_dof=1.0 if core is None else core.prior_dof,
        prior_variance=None if core is None else core.prior_variance,
        cap=100.0 if core is None else core.lam_max,
    )
    precision = None
    if core is not None:
        precision = LayerPrecision(core, hidden_size=D, head_width=D // config.n_heads, is_last=is_last)
    return Block(
        mixer,
        precision,
        hidden_size=D,
        inner_size=config.ffn_size,
        dropout=config.dropout,
        norm_eps=config.norm_eps,
        activation=config.activation,
        layer=config.layer,
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]

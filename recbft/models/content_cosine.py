"""What resembles a user's last events by its content: the reference for models that learn, as nothing is trained.

    g = sum_l rho^l x_(i_(t-l)),  l < content_events      score(i) = g . x_i        rho is ``content_decay``

That is (6.15) with a decay that is given. x is of length 1, so that each product is a cosine.

Shapes: S histories, V items, F content width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recbft.config.fields import check_range
from recbft.datasets.batches import Batch
from recbft.models.contract import ItemTable, SequenceModel, UserStates
from recbft.models.item_belief import latest_events, without_features


@dataclass(frozen=True, kw_only=True)
class ContentCosineConfig:
    """Which events are compared with candidates, and how."""

    content_events: int = 5  # latest events whose content is compared
    content_decay: float = 0.8  # weight of an event relative to the one after it
    content_width: int = 256  # numbers in the vector of a column of features, at most

    def __post_init__(self) -> None:
        check_range("content_events", self.content_events, at_least=1)
        check_range("content_decay", self.content_decay, above=0, at_most=1)
        check_range("content_width", self.content_width, at_least=2)


class ContentCosine(nn.Module, SequenceModel):
    """The state is g, the item table x.

    Args:
        content: x, (V + 1, F), of length 1, or 0 where nothing is known; row 0 is 0.
    """

    content: Tensor

    def __init__(self, config: ContentCosineConfig, content: Tensor) -> None:
        super().__init__()
        self.max_length, self.decay = config.content_events, config.content_decay
        self.register_buffer("content", content.to(torch.get_default_dtype()))

    def user_states(self, batch: Batch) -> UserStates:
        """g of every history; zero where nothing is known of what it holds."""
        x = self.content
        rho = torch.full((), self.decay, dtype=x.dtype, device=x.device)
        items, weight = latest_events(batch, batch.last, rho, number=self.max_length, num_items=len(x) - 1)
        return UserStates(torch.einsum("sl,slf->sf", weight, x[items]), None)

    def item_table(self) -> ItemTable:
        """The items' content."""
        return ItemTable(self.content, None)

    def with_items(self, content: Tensor) -> ContentCosine:
        """A copy that knows N more items, by their content, (N, F)."""
        grown = copy.deepcopy(self)
        grown.content = torch.cat([self.content, content.to(self.content)])
        return grown


def content_cosine(
    config: ContentCosineConfig, core: Any, training_counts: Tensor, *, seed: int = 0, content: Tensor | None = None
) -> ContentCosine:
    """The model of data with item features."""
    if content is None:
        raise without_features("model 'content-cosine' compares the content of items", "take another model")
    return ContentCosine(config, content)

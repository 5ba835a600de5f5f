"""Users and items as vectors whose products are the scores: for an index of neighbours, or as features elsewhere.

    score(user, item) = x_user . y_item        x = state,       y = weight                           (a)
                                               x = (state, 1),  y = (weight, bias)   with item biases (b)

Shapes: S histories, V items, D width of (a), or one more in (b).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from recbft.datasets.vocabulary import Vocabulary
from recbft.evaluation.views import evaluation_mode
from recbft.models.contract import SequenceModel
from recbft.serving.histories import Histories, encode
from recbft.serving.lists import HISTORIES_AT_ONCE, check_asked, states_of


class UserVectors(NamedTuple):
    """What a model knows of users after their last event."""

    users: pd.Series[Any]  # (S,) raw ids, of histories with a known item
    vectors: NDArray[np.floating]  # (S, D)
    precision: NDArray[np.floating]  # (S,) posterior precision, NaN where the model keeps none
    unknown_events: int  # events of items that the model does not know
    skipped_users: list[Any]  # without a known item


class ItemVectors(NamedTuple):
    """The items of the vocabulary."""

    items: NDArray[Any]  # (V,) raw ids
    vectors: NDArray[np.floating]  # (V, D)


def user_vectors(
    model: SequenceModel,
    vocabulary: Vocabulary,
    histories: Histories,
    *,
    time_unit: str | None = None,
) -> UserVectors:
    """``Recommender.user_vectors``; see there."""
    check_asked(model, 1)
    encoded = encode(histories, vocabulary, reads_times=model.reads_times, time_unit=time_unit)
    table, blocks = model.item_table(), []
    with torch.inference_mode(), evaluation_mode(model):
        for first in range(0, len(encoded.users), HISTORIES_AT_ONCE):
            own = slice(first, min(first + HISTORIES_AT_ONCE, len(encoded.users)))
            state, precision = states_of(model, encoded, own, table.weight.device)
            if table.bias is not None:  # (b)
                state = torch.cat([state, torch.ones_like(state[:, :1])], dim=1)
            blocks.append((state.cpu().numpy(), precision.cpu().numpy()))
    vectors, precisions = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return UserVectors(encoded.users, vectors, precisions, encoded.unknown_events, list(encoded.skipped_users))


@torch.inference_mode()
def item_vectors(model: SequenceModel, vocabulary: Vocabulary) -> ItemVectors:
    """``Recommender.item_vectors``; see there."""
    weight, bias = model.item_table()
    vectors = weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)
    return ItemVectors(vocabulary.ids.copy(), vectors[1:].cpu().numpy().copy())

"""The vectors behind the lists: for an index of neighbours, as features elsewhere, and to find similar items.

    score(user, item) = x_user . y_item        x = state,       y = weight                           (a)
                                               x = (state, 1),  y = (weight, bias)   with item biases (b)
    similarity(i, j)  = w_i . w_j / (|w_i| |w_j|)               w = weight, without biases            (c)

Shapes: S histories, V items, D width of (a), or one more in (b).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from recbft.datasets.vocabulary import Vocabulary, shown_id
from recbft.errors import UserError
from recbft.evaluation.top_k import top_k
from recbft.evaluation.views import evaluation_mode
from recbft.models.contract import ItemTable, SequenceModel
from recbft.serving.histories import Histories, column_of, encode
from recbft.serving.lists import HISTORIES_AT_ONCE, check_asked, check_k, states_of, work_of
from recbft.system.torch_state import threads_for


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
    encoded = encode(histories, vocabulary, model, time_unit=time_unit, keep_empty=model.same_for_all)
    table, blocks = model.item_table(), []
    with torch.inference_mode(), evaluation_mode(model):
        for first in range(0, len(encoded.users), HISTORIES_AT_ONCE):
            rows = np.arange(first, min(first + HISTORIES_AT_ONCE, len(encoded.users)))
            with threads_for(work_of(model, encoded, rows, table)):
                state, precision = states_of(model, encoded, rows, table.weight.device)
            if table.bias is not None:  # (b)
                state = torch.cat([state, torch.ones_like(state[:, :1])], dim=1)
            blocks.append((state.cpu().numpy(), precision.cpu().numpy()))
    vectors, precisions = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    users = column_of(encoded.users)
    return UserVectors(users, vectors, precisions, encoded.unknown_events, list(encoded.skipped_users))


@torch.inference_mode()
def item_vectors(model: SequenceModel, vocabulary: Vocabulary) -> ItemVectors:
    """``Recommender.item_vectors``; see there."""
    weight, bias = model.item_table()
    vectors = weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)
    return ItemVectors(vocabulary.ids.copy(), vectors[1:].cpu().numpy().copy())


@torch.inference_mode()
def similar_items(model: SequenceModel, vocabulary: Vocabulary, item: Any, k: int = 10) -> pd.DataFrame:
    """``Recommender.similar_items``; see there."""
    check_k(k)
    (index,) = vocabulary.encode([item])
    if not index:
        raise UserError(
            f"item {shown_id(item)} is not in the model's vocabulary; name an item of the training data, such as "
            f"{vocabulary.example!r}"
        )
    weight = model.item_table().weight
    if weight.shape[1] == 1:
        raise UserError("this model has a count for each item and no vector, so that no two items can be compared")
    with threads_for(2 * weight.numel()):
        directions = F.normalize(weight.float(), dim=1)  # (c)
        own = np.array([index])
        best = top_k(
            directions[index : index + 1], ItemTable(directions, None), min(k, len(vocabulary)),
            exclude_items=own, exclude_offsets=np.array([0, 1]),
        )  # fmt: skip
    num = int(best.lengths[0])
    found: pd.DataFrame = pd.DataFrame(
        {
            "item": pd.Series(vocabulary.decode(best.items[0, :num]), dtype=vocabulary.dtype),
            "score": best.scores[0, :num],
            "rank": np.arange(1, num + 1),
        }
    )
    return found

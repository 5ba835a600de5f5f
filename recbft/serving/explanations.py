"""Why this item? The events of a history by kriging weight, and what the score loses without each of them.

    weight_j      mean of  a_tj / sum_i |a_ti|  over the last layer's heads (or coordinates), t the last token   (a)
    change_j(i)   score(i | history) - score(i | history without event j)                                       (b)

(a) is the share of the last layer's observation that comes from token j: with softmax weights it is the attention
itself and sums to one over all tokens, a mask's own among them (``own_weight``); weights of both signs (HSTU) keep
theirs, and their sizes sum to one. It is the same for every item, and it says what is read, not what that does: by the
last layer a token has itself read others. (b) is exact and of the whole model: the history without that event is scored
anew, cut to the model's length as any other, so that where a history is longer an older event moves up. A positive
change is an event that speaks for the item. Events are left out one at a time, repeats too; the only event of a history
has no change (NaN).

Rolling weights up through the layers is left out: it takes every residual path for a half and knows no gain, no
feed-forward network and no value.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 2.3; leave-one-out: Cook (1977).
Shapes: n events that the model reads, I items explained, D state width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.columns import check_columns
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError
from recbft.evaluation.score_blocks import align
from recbft.evaluation.trace import LayerTrace, trace
from recbft.evaluation.views import evaluation_mode
from recbft.models.contract import SequenceModel, read_histories
from recbft.serving.histories import Histories, as_frame, as_list, encode
from recbft.serving.lists import Asked, blocks_of_lists, check_asked
from recbft.system.torch_state import threads_for

EXPLAINED = 3
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def explanation_table(
    model: SequenceModel,
    vocabulary: Vocabulary,
    history: Sequence[Any] | pd.DataFrame,
    item: Any = None,
    k: int | None = None,
    *,
    memory_mb: float = 256.0,
    time_unit: str | None = None,
) -> pd.DataFrame:
    """``Recommender.explain``; see there."""
    if item is not None and k is not None:
        raise UserError(f"k is {k}, which has no effect where an item is named; give one of them")
    check_asked(model, 1 if k is None else k)
    histories, raw = _one(as_frame(history))
    encoded = encode(histories, vocabulary, model, time_unit=time_unit)
    places = np.flatnonzero(vocabulary.encode(raw) > 0)  # of the known events
    items = [item]
    if item is None:
        left = len(vocabulary) - len(np.unique(encoded.items))
        if left < (k or 1):
            asked = "" if k is None else f"k is {k}, but "
            raise UserError(
                f"{asked}only {left} of {len(vocabulary)} items are not in the history; name an item to explain"
                + (", or lower k" if left else "")
            )
        asked_for = Asked(min(EXPLAINED, left) if k is None else k, memory_mb=memory_mb)
        (best,) = blocks_of_lists(model, vocabulary, encoded, asked_for)
        items = best["item"].tolist()
    wanted = vocabulary.encode(items)
    if (wanted == 0).any():
        raise UserError(f"item {item!r} is not in the model's vocabulary; name an item of the training data")
    found = explain(model, encoded.items, wanted, times=encoded.times, reliability=encoded.reliability)
    n, weight = len(found.events), found.weight
    table: pd.DataFrame = pd.DataFrame(
        {
            "item": np.repeat(vocabulary.decode(wanted), n),
            "score": np.repeat(found.score, n),
            "position": np.tile(places[found.events] + 1, len(items)),
            "event": np.tile(vocabulary.decode(encoded.items[found.events]), len(items)),
            "weight": np.tile(np.full(n, np.nan) if weight is None else weight, len(items)),
            "change": found.change.reshape(-1),
        }
    )
    order = np.lexsort((-table["weight"].to_numpy(), np.repeat(np.arange(len(items)), n)))
    table = table.iloc[order].reset_index(drop=True)
    table.attrs = {
        "precision": found.precision,
        "own_weight": found.own_weight,
        "unknown_events": encoded.unknown_events,
    }
    return table


def _one(history: Any) -> tuple[Histories, list[Any]]:
    """One history as ``encode`` takes them, and its raw items."""
    if not isinstance(history, pd.DataFrame):
        raw = as_list(history, "the history is")
        return [raw], raw
    check_columns([str(column) for column in history.columns], ["user_id", "item_id"], "the history")
    if (num_users := history["user_id"].nunique()) > 1:
        raise UserError(f"the data frame holds {num_users} users; give the events of one")
    return history, history["item_id"].tolist()


class Explanation(NamedTuple):
    """One history; only its last n events, which the model reads, are listed, oldest first."""

    events: IntArray  # (n,) place in the history, from 0
    weight: FloatArray | None  # (n,) equation (a); None where the model attends to nothing
    own_weight: float  # (a) of a token that is no event, such as a mask; 0 without one
    score: FloatArray  # (I,)
    change: FloatArray  # (I, n) equation (b)
    precision: float | None  # posterior precision behind all scores


def explain(
    model: SequenceModel,
    history: IntArray,
    items: IntArray,
    *,
    times: IntArray | None = None,
    reliability: FloatArray | None = None,
) -> Explanation:
    """Explain the scores of some items for one history.

    Args:
        history: item indices, oldest first, at least one.
        items: item indices to explain, (I,).
        times: time per event, for models that read times.
        reliability: that of each event, for models that read it.

    Raises:
        UserError: the model reads times and there are none.
    """
    num_events = len(history)
    read = min(num_events, model.max_length - (model.append is not None))
    events = np.arange(num_events - read, num_events)
    work = (1 + read) * read * 32 * model.item_table().weight.shape[1] ** 2
    with torch.inference_mode(), evaluation_mode(model), threads_for(work):
        table = model.item_table()
        device = table.weight.device
        starts, stops = np.array([0]), np.array([num_events])
        known: dict[str, Any] = {"times": times, "reliability": reliability}
        (batch,) = read_histories(model, history, starts, stops, **known, source="the history")
        states, layers = trace(model, batch.to(device))
        weight, own_weight = _weight(layers, int(batch.last[0]), read)
        change = np.full((len(items), read), np.nan)
        full = _scores(states.state, model, items)  # (I, 1)
        if num_events > 1:
            near = np.arange(max(0, num_events - read - 1), num_events)  # one event more than is read, which moves up
            kept = np.concatenate([near[near != event] for event in events])
            stops = np.arange(1, read + 1) * (len(near) - 1)
            own: dict[str, Any] = {name: None if each is None else each[kept] for name, each in known.items()}
            starts = stops - (len(near) - 1)
            parts = read_histories(model, history[kept], starts, stops, **own, source="the history")
            without = torch.cat([model.user_states(part.to(device)).state for part in parts])
            change = full - _scores(without, model, items)
        return Explanation(
            events=events,
            weight=weight,
            own_weight=own_weight,
            score=full[:, 0],
            change=change,
            precision=None if states.precision is None else float(states.precision[0]),
        )


def _scores(states: Tensor, model: SequenceModel, items: IntArray) -> FloatArray:
    """Scores of the items by each state, (I, S)."""
    states, candidates = align(states, model.item_table())
    rows = torch.from_numpy(items - 1).to(states.device)
    scores = candidates.weight[rows] @ states.T
    if candidates.bias is not None:
        scores = scores + candidates.bias[rows, None]
    found: FloatArray = scores.double().cpu().numpy()
    return found


def _weight(layers: list[LayerTrace], last: int, num_events: int) -> tuple[FloatArray | None, float]:
    """Equation (a) over the events, and over what is no event."""
    if not layers or layers[-1].weights is None or layers[-1].shares is None:
        return None, 0.0
    shares = (layers[-1].shares * layers[-1].weights.sign())[0, :, last].double().mean(dim=0).cpu().numpy()  # (T,)
    return shares[:num_events], float(shares[num_events:].sum())

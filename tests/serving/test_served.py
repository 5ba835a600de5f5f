"""A model as it answers requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recbft.models import MODELS
from recbft.models.precision_channel import CoreConfig
from recbft.serving.histories import Encoded, Users
from recbft.serving.lists import states_of
from recbft.serving.served import Served

HISTORIES = [[3], [1, 2, 5], [4, 4, 4, 1, 2, 3, 5, 6, 7, 8, 9, 1, 2]]


def model_of(name, mixer=None, max_length=6, **backbone):
    spec = MODELS[name]
    settings = spec.config(hidden_size=8, max_length=max_length, **spec.arms["bft"], **backbone)
    model = spec.make(settings, CoreConfig(**spec.core), torch.arange(10), seed=0, mixer=mixer)
    model.set_ramp(0.5)
    return model


def encoded(histories):
    items = np.concatenate([np.array(history) for history in histories])
    offsets = np.cumsum([0, *map(len, histories)])
    return Encoded(list(range(len(histories))), items, offsets, items.cumsum(), 0, Users())


@pytest.mark.parametrize(
    ("name", "how"),
    [("sasrec", {}), ("bert4rec", {}), ("hstu", {"time_bias": True}), ("sasrec", {"mixer": "rope"}),
     ("sasrec", {"max_length": 600})],
)  # fmt: skip
def test_a_history_alone_has_the_state_that_it_has_among_others(name, how):
    served, device = Served(model_of(name, **how)), torch.device("cpu")
    with torch.inference_mode():
        whole = encoded(HISTORIES)
        together = states_of(served, whole, np.arange(3), device)
        for row in range(3):
            alone = states_of(served, whole, np.array([row]), device)
            for one, other in zip(alone, together, strict=True):
                torch.testing.assert_close(one, other[row : row + 1], rtol=1e-5, atol=1e-5)


def test_the_table_of_items_is_made_once(monkeypatch):
    served = Served(model_of("sasrec"))
    first = served.item_table()
    monkeypatch.setattr(served.model, "item_table", None)
    assert served.item_table() is first and not served.model.training

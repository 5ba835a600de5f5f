"""How high items without a training event stand: the share of the softmax that they get."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from recbft.datasets import Dataset
from recbft.evaluation.new_item_bias import fit_new_item_bias
from recbft.evaluation.views import states_of_view, view_of
from recbft.models import MODELS


def data(new_targets):
    """40 users of items 0 to 9, whose validation targets are, for some of them, items that nobody trains on."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(40):
        events = [*rng.integers(0, 10, 4), 100 + user if user < new_targets else 3, int(rng.integers(0, 10))]
        rows += [(user, item) for item in events]
    return Dataset.from_frame(pd.DataFrame(rows, columns=["user_id", "item_id"]))


def model_of(dataset):
    spec = MODELS["sasrec"]
    V = dataset.num_items
    content = torch.nn.functional.normalize(torch.randn(V + 1, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    content[0] = 0
    config = spec.config(hidden_size=8, **spec.arms["matched"])
    counts = torch.from_numpy(dataset.training_counts)
    return spec.make(config, None, counts, seed=0, content=content).eval()


@pytest.mark.parametrize("new_targets", [1, 7])
def test_of_unseen_items_new_ones_get_the_share_of_the_softmax_that_they_have_of_the_targets(new_targets):
    dataset = data(new_targets)
    model, view = model_of(dataset), view_of(dataset, "validation")
    model.item_belief.raise_new_items(fit_new_item_bias(model, dataset))
    with torch.no_grad():
        table = model.item_table()
        states, _ = states_of_view(model, dataset, view, torch.device("cpu"))
        scores = states @ table.weight[1:].T + table.bias[1:]
    new = torch.from_numpy(dataset.training_counts[1:] == 0)
    shares = []
    for row, (target, start, stop) in enumerate(zip(view.target, view.start, view.stop, strict=True)):
        seen = view.items[start:stop]
        if target not in seen:
            scores[row, torch.from_numpy(seen - 1)] = -torch.inf
            shares.append(scores[row].softmax(dim=0)[new].sum().item())
    assert np.mean(shares) == pytest.approx((new_targets + 0.5) / (len(shares) + 1), rel=1e-5)
    assert fit_new_item_bias(model, dataset) == pytest.approx(0, abs=1e-5)


def test_where_all_targets_were_seen_nothing_says_how_high_new_items_stand():
    rows = [(user, item) for user in range(5) for item in (user, 7, user, user, 20 + user)]
    dataset = Dataset.from_frame(pd.DataFrame(rows, columns=["user_id", "item_id"]))
    assert fit_new_item_bias(model_of(dataset), dataset) == 0


def test_where_every_item_is_known_there_is_nothing_to_fit():
    dataset = data(0)
    assert fit_new_item_bias(model_of(dataset), dataset) == 0 and model_of(dataset).item_table().bias is None

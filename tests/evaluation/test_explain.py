"""Explanations against scoring by hand, history by history."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from recbft.datasets.batches import pack_histories
from recbft.evaluation.trace import trace
from recbft.models import Popularity
from recbft.serving.explanations import explain

HISTORY = np.array([3, 1, 7, 3, 12, 5])


def score(model, history, items, times=None):
    """The scores of items after a history read alone."""
    keep = model.max_length - (model.append is not None)
    cut = len(history) - min(len(history), keep)
    batch = pack_histories(history, np.array([cut]), np.array([len(history)]), times=times, append=model.append)
    with torch.no_grad():
        state = model.user_states(batch).state[0]
        weight, bias = model.item_table()
        return (weight[items] @ state + (0 if bias is None else bias[items])).numpy()


@pytest.mark.parametrize("max_length", [3, 6, 20])
def test_the_change_is_the_score_less_that_of_the_history_without_the_event(lab, arm, max_length):
    model = lab.make_model(lab.dataset, *arm, max_length=max_length)
    items = np.array([2, 12, 17])
    found = explain(model, HISTORY, items)
    np.testing.assert_allclose(found.score, score(model, HISTORY, items), rtol=1e-9)
    read = min(6, max_length - (model.append is not None))
    assert found.events.tolist() == list(range(6 - read, 6)) and found.change.shape == (3, read)
    for column, event in enumerate(found.events):
        without = score(model, np.delete(HISTORY, event), items)
        np.testing.assert_allclose(found.change[:, column], found.score - without, rtol=1e-8, atol=1e-10)


def test_what_is_not_read_of_a_long_history_takes_no_memory(lab):
    model, history = lab.make_model(lab.dataset, max_length=30), np.arange(50_000) % 5 + 1
    tracemalloc.start()
    try:
        found = explain(model, history, np.array([7]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.events[-1] == len(history) - 1 and len(found.events) == 30
    assert peak < 4 * history.nbytes


@pytest.mark.parametrize("core", [{}, {"kriging": "per_dimension"}], ids=str)
def test_softmax_weights_are_the_last_row_of_the_last_layer_and_sum_to_one_with_the_mask(lab, arm, core):
    if core and arm != ("sasrec", "bft"):
        arm = ("sasrec", "bft")
    model = lab.make_model(lab.dataset, *arm, core=core, max_length=10, n_layers=3)
    found = explain(model, HISTORY, np.array([2]))
    batch = pack_histories(HISTORY, np.array([0]), np.array([6]), append=model.append)
    with torch.no_grad():
        weights = trace(model, batch)[1][-1].weights[0, :, -1]
    expected = (weights / weights.abs().sum(dim=-1, keepdim=True)).mean(dim=0).numpy()
    np.testing.assert_allclose(found.weight, expected[:6], rtol=1e-10)
    assert found.own_weight == pytest.approx(expected[6:].sum())
    if arm[0] != "hstu":
        assert found.weight.sum() + found.own_weight == pytest.approx(1) and (found.weight > 0).all()
        assert (found.own_weight > 0) == (arm[0] == "bert4rec")


@pytest.mark.parametrize("n_layers", [1, 2])
def test_one_event_has_all_the_weight_and_no_change_and_two_have_one_each(lab, n_layers):
    model, items = lab.make_model(lab.dataset, n_layers=n_layers), np.array([2, 3])
    found = explain(model, HISTORY[:1], items)
    assert found.weight.tolist() == [1.0] and np.isnan(found.change).all() and found.precision > 0
    pair = explain(model, HISTORY[:2], items)
    np.testing.assert_allclose(pair.score - pair.change[:, 1], found.score, rtol=1e-9)


def test_a_model_that_reads_times_is_asked_with_the_times_of_the_events_that_stay(lab):
    model = lab.make_model(lab.dataset, "hstu", time_bias=True)
    times = np.array([0, 50, 60, 4000, 4100, 90000])
    found = explain(model, HISTORY, np.array([9]), times=times)
    for event in range(6):
        without = score(model, np.delete(HISTORY, event), [9], times=np.delete(times, event))
        assert found.change[0, event] == pytest.approx((found.score - without)[0], rel=1e-8)


def test_popularity_heeds_no_event_and_a_model_in_training_stays_in_training(lab):
    model = Popularity(lab.dataset.training_counts)
    found = explain(model, HISTORY, np.array([1, 2]))
    assert found.weight is None and found.precision is None and (found.change == 0).all()
    model = lab.make_model(lab.dataset, dropout=0.5).train()
    one, two = (explain(model, HISTORY, np.array([1])).change for _ in range(2))
    assert model.training and np.array_equal(one, two)

"""Which items lists show: worked by hand, at its ends, and of a model's own lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recbft.datasets.split import leave_one_out
from recbft.evaluation import evaluate as evaluating
from recbft.evaluation.evaluate import evaluate, exposure, shown
from recbft.models.contract import read_histories


def test_lists_worked_by_hand():
    items = np.array([[1, 2], [1, 3], [2, 0]])  # the last list is short
    counts = shown(items, 4, [1, 2])
    assert counts.tolist() == [[2, 1, 0, 0], [2, 2, 1, 0]]
    found = exposure(counts, np.array([10, 20, 60, 80]), [1, 2])
    assert found == pytest.approx(
        {
            "coverage@1": 2 / 4, "gini@1": (1 * 1 + 3 * 2) / (4 * 3), "popularity@1": (2 * 10 + 20) / 3,
            "coverage@2": 3 / 4, "gini@2": (-1 * 1 + 1 * 2 + 3 * 2) / (4 * 5), "popularity@2": (20 + 40 + 60) / 5,
        }
    )  # fmt: skip


def test_gini_is_the_mean_difference_of_two_items_over_twice_their_mean():
    n = np.random.default_rng(0).integers(0, 9, 50)
    found = exposure(n[None], np.ones(50, np.int64), [3])["gini@3"]
    assert found == pytest.approx(np.abs(n[:, None] - n).mean() / (2 * n.mean()))


@pytest.mark.parametrize(("counts", "gini"), [([5, 5, 5, 5], 0.0), ([0, 0, 9, 0], 3 / 4)])
def test_gini_is_0_where_all_items_are_shown_alike_and_1_less_1_over_v_where_one_is(counts, gini):
    assert exposure(np.array([counts]), np.ones(4, np.int64), [1])["gini@1"] == pytest.approx(gini)


def test_lists_without_an_item_cover_nothing_and_have_neither_gini_nor_popularity():
    found = exposure(np.zeros((1, 3), np.int64), np.ones(3, np.int64), [10])
    assert found == {"coverage@10": 0.0}


@pytest.mark.parametrize("memory_mb", [1e-3, 256.0])
def test_an_evaluation_tells_of_the_lists_of_its_own_scores_in_both_settings(lab, arm, histories_at_once, memory_mb):
    histories_at_once(16)
    dataset = lab.make_dataset(num_users=70, num_items=40, seed=1)
    model = lab.make_model(dataset, *arm)
    found = evaluate(model, dataset, "test", ks=(3, 50), memory_mb=memory_mb, lists=True)
    assert evaluate(model, dataset, "test", ks=(3, 50)).exposure is None
    view = leave_one_out(dataset).test
    with torch.no_grad():
        (batch,) = read_histories(model, dataset.items, view.start, view.stop, times=dataset.times, source="")
        states, _ = model.user_states(batch)
        weight, bias = model.item_table()
        scores = (states @ weight[1:].T + (0 if bias is None else bias[1:])).numpy()
    seen = [dataset.items[start:stop] - 1 for start, stop in zip(view.start, view.stop, strict=True)]
    for setting in ("unfiltered", "filtered"):
        lists = []
        for row, own in zip(scores.copy(), seen, strict=True):
            order = np.argsort(-row, kind="stable")
            lists.append(order if setting == "unfiltered" else order[~np.isin(order, own)])
        for k in (3, 50):
            entries = np.concatenate([each[:k] for each in lists])
            n, c = np.bincount(entries, minlength=dataset.num_items), dataset.training_counts[1:]
            measures = found.exposure[setting]
            assert measures[f"coverage@{k}"] == len(set(entries.tolist())) / dataset.num_items
            assert measures[f"popularity@{k}"] == pytest.approx(c[entries].mean())
            assert measures[f"gini@{k}"] == pytest.approx(np.abs(n[:, None] - n).mean() / (2 * n.mean()))


def test_on_large_data_the_lists_are_of_some_users_the_same_each_time_and_however_shared(
    lab, monkeypatch, histories_at_once
):
    histories_at_once(16)
    dataset = lab.make_dataset(num_users=70, num_items=40, seed=1)
    model = lab.make_model(dataset, "sasrec", "bft")
    monkeypatch.setattr(evaluating, "LISTED_USERS", 5)
    monkeypatch.setattr(evaluating, "LISTED_SCORES", 20 * dataset.num_items)
    made = []
    monkeypatch.setattr(evaluating, "shown", lambda items, *sizes: made.append(items) or shown(items, *sizes))
    found = evaluate(model, dataset, "test", ks=(3,), memory_mb=1e-3, lists=True)
    lists = np.concatenate(made[::2])  # of all items; every second one is of the items not seen
    users = np.sort(np.random.default_rng(0).permutation(dataset.num_users)[:20])
    view = leave_one_out(dataset).test
    with torch.no_grad():
        (batch,) = read_histories(model, dataset.items, view.start[users], view.stop[users], source="")
        states, _ = model.user_states(batch)
        scores = (states @ model.item_table().weight[1:].T).numpy()
    assert (lists == 1 + np.argsort(-scores, axis=1, kind="stable")[:, :3]).all()
    counts = shown(lists, dataset.num_items, [3])
    assert found.exposure["unfiltered"] == exposure(counts, dataset.training_counts[1:], [3])

    class Halves:
        def each_does(self, count, work):
            return [work(slice(0, 33)), work(slice(33, 33)), work(slice(33, count))]

    shared = evaluate(model, dataset, "test", ks=(3,), sharing=Halves(), lists=True)
    assert shared.exposure == found.exposure

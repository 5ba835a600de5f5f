"""New items beside known ones: every figure against ranks counted by hand, and against the one pass of evaluation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from recbft.datasets import Dataset
from recbft.errors import RunError
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.new_items import SHARES, K, new_items
from recbft.evaluation.views import seen_of
from recbft.models import Popularity
from tests.evaluation.test_evaluate import SumModel


def log(seed, **how):
    rng = np.random.default_rng(seed)
    n = 500
    columns = {
        "user_id": rng.integers(0, 30, n),
        "item_id": rng.integers(0, 60, n),
        "t": np.sort(rng.integers(0, 99, n)),
    }
    return Dataset.from_frame(pd.DataFrame(columns), time="t").with_split(hold_out_items=0.3, **how)


HOW = [
    {},
    {"split": "global_time", "split_at": 60},
    {"split": "global_time", "split_at": 60, "split_targets": "successive"},
]


def by_hand(model, dataset, constant, *, filter_seen):
    """Rank of each test target with a constant on new items, and its rank and share of losers among new ones."""
    view, weight = dataset.split.test, model.weight.double().numpy()
    is_new = dataset.training_counts[1:] == 0
    items, offsets = seen_of(view)
    ranks, among, auc = [], [], []
    for row, target in enumerate(view.target):
        scores = weight[1:] @ weight[view.items[view.start[row] : view.stop[row]]].sum(0)
        there = np.ones(scores.size, bool)
        if filter_seen:
            there[items[offsets[row] : offsets[row + 1]] - 1] = False
            there[target - 1] = True
        shifted = scores + np.where(is_new, constant, 0)
        ranks.append((shifted[there] >= shifted[target - 1]).sum())
        if is_new[target - 1]:
            own = scores[there & is_new]
            among.append((own >= scores[target - 1]).sum())
            others = np.delete(own, np.flatnonzero(own == scores[target - 1])[0])
            auc.append(((others < scores[target - 1]) + 0.5 * (others == scores[target - 1])).mean())
    return np.array(ranks), np.array(among), np.array(auc)


def of_users(values, view, which):
    """Mean over users of each user's mean."""
    return pd.Series(values[which]).groupby(view.user[which]).mean().mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", HOW, ids=["leave-one-out", "all", "successive"])
@pytest.mark.parametrize("filter_seen", [False, True])
def test_every_figure_is_that_of_ranks_counted_by_hand(seed, how, filter_seen):
    dataset = log(seed, **how)
    model, view = SumModel(dataset.num_items, seed=seed), dataset.split.test
    found = new_items(model, dataset, filter_seen=filter_seen)
    new = dataset.training_counts[view.target] == 0
    rows = {"all": np.arange(new.size), "known": np.flatnonzero(~new), "new": np.flatnonzero(new)}
    assert found["targets"] == {name: which.size for name, which in rows.items()}
    for step in [{"constant": 0.0, **found["as_is"]}, *found["sweep"][::4]]:
        ranks, among, auc = by_hand(model, dataset, step["constant"], filter_seen=filter_seen)
        for name, which in rows.items():
            assert step[name]["hr@10"] == pytest.approx(of_users(ranks <= K, view, which)), (step["constant"], name)
    assert found["among_new"]["auc"] == pytest.approx(pd.Series(auc).groupby(view.user[rows["new"]]).mean().mean())
    assert found["among_new"]["hr"] == pytest.approx(
        pd.Series(among <= K).groupby(view.user[rows["new"]]).mean().mean()
    )
    assert found["never_listed"]["new"] == {"hr@10": 0.0, "ndcg@10": 0.0}
    loss = found["known_loss"]["hr@10"]
    assert loss["difference"] == pytest.approx(
        found["as_is"]["known"]["hr@10"] - found["never_listed"]["known"]["hr@10"]
    )
    assert loss["difference"] <= 0 and loss["num_users"] == found["users"]["known"]
    setting = "filtered" if filter_seen else "unfiltered"
    assert found["as_is"]["all"]["ndcg@10"] == pytest.approx(
        evaluate(model, dataset, "test").metrics[setting]["ndcg@10"]
    )


def test_along_the_sweep_new_items_gain_what_known_ones_lose_and_hold_as_many_places():
    dataset = log(0)
    model = SumModel(dataset.num_items)
    model.weight.add_(torch.rand(model.weight.shape, generator=torch.Generator().manual_seed(0)))  # no ties
    sweep, view = new_items(model, dataset)["sweep"], dataset.split.test
    is_new = dataset.training_counts[1:] == 0
    for step in sweep[1:-1]:
        held = []
        for row in range(len(view.target)):
            scores = (model.weight[1:] @ model.weight[view.items[view.start[row] : view.stop[row]]].sum(0)).numpy()
            held.append(is_new[np.argsort(-(scores + is_new * step["constant"]))[:K]].mean())
        assert np.mean(held) == pytest.approx(step["share"], abs=0.01)
    assert sweep[0]["new"]["hr@10"] == 0 and sweep[-1]["known"]["hr@10"] == 0
    assert [step["share"] for step in sweep] == list(SHARES)
    for of, sign in (("new", 1), ("known", -1), ("constant", 1)):
        along = [step[of] if of == "constant" else step[of]["hr@10"] for step in sweep]
        assert (sign * np.diff(along) >= 0).all()


def test_a_model_that_knows_nothing_of_new_items_has_an_auc_of_a_half_and_blocks_change_nothing():
    dataset = log(1)
    model = Popularity(dataset.training_counts)
    found = new_items(model, dataset)
    assert found["among_new"]["auc"] == 0.5 and found["as_is"]["new"]["hr@10"] == 0
    assert new_items(model, dataset, memory_mb=0.01) == found
    some = new_items(model, dataset, users=np.arange(20))
    assert some["num_users"] == 20 and some["targets"]["all"] == 20


def test_without_a_target_of_a_new_item_there_is_nothing_to_say():
    dataset = log(1)
    plain = dataset.with_split()
    targets_new = (plain.training_counts[plain.split.test.target] == 0).any()
    assert not targets_new and new_items(Popularity(plain.training_counts), plain) is None


def test_scores_that_are_no_numbers_are_refused():
    dataset = log(2)
    model = SumModel(dataset.num_items)
    model.weight[3] = torch.nan
    with pytest.raises(RunError, match="scores are NaN"):
        new_items(model, dataset)

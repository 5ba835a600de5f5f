from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from recbft.datasets import Dataset, leave_one_out
from recbft.datasets.prepare import Preparation
from recbft.errors import RunError, UserError
from recbft.evaluation import evaluate as evaluating
from recbft.evaluation import views
from recbft.evaluation.evaluate import evaluate, exposure, shown
from recbft.evaluation.ranks import full_ranks
from recbft.evaluation.views import evaluation_mode, view_of
from recbft.models import Popularity
from recbft.models.contract import ItemTable, SequenceModel, UserStates, read_histories
from recbft.training.run_config import load_run_config


def make_dataset(histories):
    rows = [(user, item) for user, items in histories.items() for item in items]
    return Dataset.from_frame(pd.DataFrame(rows, columns=["user_id", "item_id"]), name="small")


def draw_dataset(seed, num_users=40, num_items=30):
    rng = np.random.default_rng(seed)
    return make_dataset(
        {f"u{u}": [f"i{i}" for i in rng.integers(0, num_items, rng.integers(3, 12))] for u in range(num_users)}
    )


class SumModel(nn.Module, SequenceModel):
    """State: the sum of the embeddings read, so that what was read shows in the scores; whole numbers, so exactly."""

    def __init__(self, num_items, *, max_length=50, seed=0):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.max_length = max_length
        self.register_buffer("weight", torch.tensor(rng.integers(-3, 4, (num_items + 1, 4)), dtype=torch.float32))
        self.dropout = nn.Dropout(0.5)
        self.inner = nn.Sequential(nn.Dropout(0.5))

    def user_states(self, batch):
        assert not self.training and not torch.is_grad_enabled()
        real = batch.segment >= 0
        state = torch.zeros(len(batch.last), 4).index_add(0, batch.segment[real], self.weight[batch.items[real]])
        length = torch.bincount(batch.segment[real])
        return UserStates(self.inner(self.dropout(state)), length.float())

    def item_table(self):
        return ItemTable(self.weight, None)


class Shares:
    """Processes that divide the rows at some of them."""

    def __init__(self, *cuts):
        self.cuts = cuts

    def each_does(self, size, work):
        return [work(slice(*span)) for span in itertools.pairwise([0, *self.cuts, size])]


def test_popularity_on_a_data_set_worked_by_hand():
    dataset = make_dataset({"ann": "abcd", "bob": "aabc", "cem": ["b", "a", "d"]})
    # Training: ann ab, bob aa, cem b; counts a 3, b 2, c 0, d 0. Test: d (after abc), c (after aab), d (after ba).
    result = evaluate(Popularity(dataset.training_counts), dataset, "test")
    assert result.per_user.to_dict("list") == {
        "user": ["ann", "bob", "cem"],
        "history_length": [3, 3, 2],
        "target": ["d", "c", "d"],
        "target_count": [0, 0, 0],
        "rank_unfiltered": [4, 4, 4],
        "rank_filtered": [1, 2, 2],
    }
    assert result.metrics["unfiltered"]["hr@5"] == 1 and result.metrics["unfiltered"]["mrr"] == 1 / 4
    assert result.metrics["filtered"]["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 2) / 3)
    assert result.precision is None
    # Validation targets: c (after ab), b (after aa), a (after b): tie of c and d against the target.
    result = evaluate(Popularity(dataset.training_counts), dataset, "validation", filter_seen=True)
    assert result.per_user["target"].tolist() == ["c", "b", "a"]
    assert result.per_user["target_count"].tolist() == [0, 2, 3]
    assert result.per_user["history_length"].tolist() == [2, 2, 1]
    assert result.per_user["rank_unfiltered"].tolist() == [4, 2, 1]
    assert result.per_user["rank_filtered"].tolist() == [2, 1, 1]
    assert result.headline == result.metrics["filtered"]


@pytest.mark.parametrize(("seed", "part", "max_length"), [(0, "validation", 50), (1, "test", 4), (2, "validation", 4)])
def test_each_user_is_ranked_from_the_right_events(histories_at_once, seed, part, max_length):
    histories_at_once(7)
    dataset = draw_dataset(seed)
    model = SumModel(dataset.num_items, max_length=max_length, seed=seed)
    result = evaluate(model, dataset, part)
    weight = model.weight.numpy()
    back = 2 if part == "validation" else 1
    for u, row in result.per_user.iterrows():
        history = dataset.items[dataset.offsets[u] : dataset.offsets[u + 1] - back]
        target = dataset.items[dataset.offsets[u + 1] - back]
        scores = weight[1:] @ weight[history[-max_length:]].sum(0)
        at_least = scores >= scores[target - 1]
        assert row.user == dataset.user_ids[u] and row.target == dataset.decode([target])[0]
        assert row.rank_unfiltered == at_least.sum()
        at_least[np.setdiff1d(history, [target]) - 1] = False  # all seen items, also those beyond what the model reads
        assert row.rank_filtered == at_least.sum()
        assert row.history_length == len(history)
        assert result.precision[u] == min(len(history), max_length)


def test_neither_batches_nor_memory_change_a_result(histories_at_once):
    dataset = draw_dataset(5)
    model = SumModel(dataset.num_items)
    whole = evaluate(model, dataset, "test")
    for at_once, memory_mb in ((1, 256), (7, 1e-4), (1000, 1e-3)):
        histories_at_once(at_once)
        cut = evaluate(model, dataset, "test", memory_mb=memory_mb)
        pd.testing.assert_frame_equal(whole.per_user, cut.per_user)
        assert whole.metrics == cut.metrics and whole.precision.tolist() == cut.precision.tolist()


@pytest.mark.parametrize(("at_once", "held"), [(7, 13), (16, 16)])
def test_no_more_states_are_held_than_memory_or_one_batch_allows(monkeypatch, histories_at_once, at_once, held):
    histories_at_once(at_once)
    ranked = []

    def watched(states, *arguments, **how):
        ranked.append(len(states))
        return full_ranks(states, *arguments, **how)

    monkeypatch.setattr(evaluating, "full_ranks", watched)
    dataset = draw_dataset(5)
    memory_mb = 13 * 4 * 4 / 2**20  # of thirteen states of four single-precision numbers
    evaluate(SumModel(dataset.num_items), dataset, "test", memory_mb=memory_mb)
    assert ranked == [held] * (40 // held) + [40 % held]


def test_a_model_in_half_precision_gives_its_posterior_precision_in_single(lab):
    result = evaluate(lab.make_model(lab.dataset).bfloat16(), lab.dataset, "test")
    assert result.precision.dtype == np.float32 and (result.precision > 0).all()


def test_one_user_is_evaluated_and_none_is_refused():
    result = evaluate(Popularity(np.array([0, 1, 0, 0])), make_dataset({"ann": "abc"}), "test")
    assert result.per_user["rank_unfiltered"].tolist() == [3]
    with pytest.raises(UserError, match="data set 'small' has no user to evaluate; users need at least 3 events"):
        view_of(draw_dataset(0), "test", np.empty(0, np.int64))


def test_the_model_gets_its_modes_back_part_by_part():
    model = SumModel(3)
    model.train()
    model.inner.eval()
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert model.training and model.dropout.training and not model.inner.training
    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        raise ZeroDivisionError
    assert model.training and not model.inner.training


def test_an_unknown_part_is_refused():
    dataset = draw_dataset(0)
    with pytest.raises(UserError, match="unknown part 'training'; choose validation or test"):
        evaluate(SumModel(dataset.num_items), dataset, "training")


def test_broken_weights_are_an_error_that_names_a_user():
    dataset = draw_dataset(0)
    model = SumModel(dataset.num_items)
    model.weight[1:] = torch.nan
    with pytest.raises(RunError, match="NaN for 40 of 40 users, first for user 'u0'"):
        evaluate(model, dataset, "test")


def test_the_cuts_are_those_asked_for():
    dataset = draw_dataset(0)
    result = evaluate(Popularity(dataset.training_counts), dataset, "test", ks=(3,))
    assert list(result.headline) == ["hr@3", "ndcg@3", "mrr@3", "mrr"]


@pytest.mark.parametrize(
    ("settings", "device", "histories"),
    [
        ([], "cpu", 256),
        ([], "cuda", 10_000),  # all of them
        (["max_length=200"], "cuda", 1_000),
        (["max_length=2000"], "cuda", 256),
        (["core.kriging=per_dimension"], "cuda", 256),
    ],
)
def test_a_gpu_is_given_as_many_histories_at_once_as_their_tokens_allow(settings, device, histories):
    config = load_run_config(None, ["hidden_size=8", "max_length=20", *settings], model="sasrec", arm="bft")
    model, lengths = config.build(torch.tensor([0, 2, 1])), np.full(10_000, 2_000)
    assert views.histories_at_once(model, torch.device(device), lengths) == histories
    assert views.histories_at_once(Popularity(torch.tensor([0, 2, 1])), torch.device("cpu"), lengths) == 256


def test_of_histories_in_the_order_of_their_lengths_no_batch_has_too_many_tokens():
    model = load_run_config(None, ["hidden_size=8", "max_length=200"], model="sasrec", arm="bft").build(
        torch.tensor([0, 2, 1])
    )
    lengths = np.sort(np.random.default_rng(torch.seed() % 1000).geometric(0.05, size=60_000))
    at_once = views.histories_at_once(model, torch.device("cuda"), lengths)
    batches = [np.minimum(lengths[n : n + at_once], 200).sum() for n in range(0, 60_000, at_once)]
    assert 50_000 < max(batches) <= 200_000 and at_once > 1_000
    assert views.histories_at_once(model, torch.device("cuda"), lengths[:1]) == 256


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


def test_lists_without_an_item_cover_nothing_and_have_neither_gini_nor_popularity():
    found = exposure(np.zeros((1, 3), np.int64), np.ones(3, np.int64), [10])
    assert found == {"coverage@10": 0.0}


@pytest.mark.parametrize("memory_mb", [1e-3, 256.0])
def test_an_evaluation_tells_of_the_lists_of_its_own_scores_in_both_settings(lab, arm, histories_at_once, memory_mb):
    histories_at_once(16)
    dataset = lab.make_dataset(num_users=70, num_items=40, seed=1)
    model = lab.make_model(dataset, *arm)
    found = evaluate(model, dataset, "test", ks=(3, 50, 9 * 10**18), memory_mb=memory_mb, lists=True)
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

    shared = evaluate(model, dataset, "test", ks=(3,), sharing=Shares(33, 33), lists=True)
    assert shared.exposure == found.exposure


@pytest.mark.parametrize("part", ["validation", "test"])
def test_users_who_only_train_are_not_ranked(part):
    frame = pd.DataFrame([(user, item) for user, items in {"x": "ab", "ann": "abcd", "bob": "aabc"}.items()
                          for item in items], columns=["user_id", "item_id"])  # fmt: skip
    dataset = Dataset.from_frame(frame, preparation=Preparation(min_history=2))
    per_user = evaluate(Popularity(dataset.training_counts), dataset, part, lists=True).per_user
    assert per_user.user.tolist() == ["ann", "bob"]
    assert per_user.target.tolist() == (["c", "b"] if part == "validation" else ["d", "c"])
    # Training: ann ab, bob aa, x ab; counts a 4, b 2, c 0, d 0
    assert per_user.target_count.tolist() == ([0, 2] if part == "validation" else [0, 0])
    assert per_user.rank_unfiltered.tolist() == ([4, 2] if part == "validation" else [4, 4])


def timed_dataset(seed, **how):
    """Users by times 0..99, split by time."""
    rng = np.random.default_rng(seed)
    n = 300
    frame = pd.DataFrame(
        {"user_id": rng.integers(0, 25, n), "item_id": rng.integers(0, 40, n), "t": np.sort(rng.integers(0, 100, n))}
    )
    return Dataset.from_frame(frame, time="t").with_split(split="global_time", split_at=60, test_at=80, **how)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", [{}, {"split_targets": "successive"}, {"hold_out_items": 0.2}])
def test_each_target_of_a_split_by_time_is_ranked_as_by_hand(seed, how):
    dataset = timed_dataset(seed, **how)
    model = SumModel(dataset.num_items, seed=seed)
    result, view = evaluate(model, dataset, "test", ks=(5,)), dataset.split.test
    shared = evaluate(model, dataset, "test", ks=(5,), sharing=Shares(10, 21, 32))  # which cuts through users' targets
    pd.testing.assert_frame_equal(shared.per_user, result.per_user)
    weight, targets_of = model.weight.numpy(), {}
    for row, user in enumerate(view.user):
        key = (user, row) if "split_targets" in how else user
        targets_of.setdefault(key, set()).add(int(view.target[row]))
    for row, (user, target) in enumerate(zip(view.user, view.target, strict=True)):
        history = view.items[view.start[row] : view.stop[row]]
        scores = weight @ weight[history].sum(0)
        own = targets_of[(user, row) if "split_targets" in how else user]
        unseen = np.setdiff1d(np.arange(1, dataset.num_items + 1), np.setdiff1d(history, list(own)))
        found = result.per_user.iloc[row]
        assert found["rank_unfiltered"] == (scores[1:] >= scores[target]).sum()
        assert found["rank_filtered"] == (scores[unseen] >= scores[target]).sum()
        assert found["history_length"] == len(history) and found["user"] == dataset.user_ids[user]
        assert found["training_length"] == dataset.split.training_length[user]
        assert found["target_count"] == dataset.training_counts[target]
    names = {"hr@5", "ndcg@5", "mrr@5", "mrr"} | (set() if "split_targets" in how else {"recall@5", "list_ndcg@5"})
    assert set(result.headline) == names
    by_user = (result.per_user.assign(hit=result.per_user["rank_unfiltered"] <= 5)).groupby("user")["hit"].mean()
    assert result.metrics["unfiltered"]["hr@5"] == pytest.approx(by_user.mean())


def test_the_histories_that_targets_share_are_read_once_and_each_user_has_one_list():
    dataset = timed_dataset(0)
    read = []

    class Counting(SumModel):
        def user_states(self, batch):
            read.append(len(batch.last))
            return super().user_states(batch)

    result = evaluate(Counting(dataset.num_items), dataset, "test", lists=True, ks=(5,))
    users = dataset.num_tested
    assert sum(read) == users < len(result.per_user)
    assert result.exposure is not None and f"of {users:,} users" in repr(result)
    assert len(result.precision) == len(result.per_user)

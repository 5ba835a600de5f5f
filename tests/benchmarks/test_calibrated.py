"""What is claimed of lists beside what comes true, of runs whose probabilities were made three ways."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from benchmarks.study import calibrated
from recbft import Recommender
from recbft.datasets import Dataset, leave_one_out
from recbft.models import Popularity


@pytest.fixture
def trained(train_arms):
    return train_arms("bft")


def test_claims_and_truth_are_those_of_the_lists_that_a_recommender_gives(trained, tmp_path, capsys):
    calibrated.main([str(trained), "--json", str(tmp_path / "found.json")])
    said, rows = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())["calibrated"]
    assert "study.calibrated OUT" in said and str(tmp_path) not in said and [row["seed"] for row in rows] == [0, 1]
    recommender = Recommender.load(trained / "runs" / "bft-seed0")
    dataset: Dataset = recommender.own_dataset()
    view = leave_one_out(dataset).test
    histories = {
        user: dataset.decode(dataset.items[start:stop]).tolist()
        for user, start, stop in zip(dataset.user_ids.tolist(), view.start, view.stop, strict=True)
    }
    target = dict(zip(dataset.user_ids.tolist(), dataset.decode(view.target).tolist(), strict=True))
    for name, filter_seen in (("all items", False), ("items not seen", True)):
        lists = recommender.recommend(histories, 10, filter_seen=filter_seen)
        found = rows[0][name]["temperature and lapse rate"]
        assert recommender.calibration(filter_seen=filter_seen) == pytest.approx((found["temperature"], found["lapse"]))
        claimed = lists.groupby("user")["probability"].sum().clip(upper=1)
        hit = (lists["item"] == lists["user"].map(target)).groupby(lists["user"]).any()
        assert found["@10"]["mean_probability"] == pytest.approx(claimed.mean(), rel=1e-5)
        assert found["@10"]["hit_rate"] == pytest.approx(np.mean(hit))
        everything = recommender.recommend(histories, dataset.num_items, filter_seen=filter_seen)
        p = everything.loc[everything["item"] == everything["user"].map(target), "probability"]
        assert found["nll"] == pytest.approx(-np.log(p).mean(), rel=1e-5)
        assert rows[0][name]["as trained"]["lapse"] == rows[0][name]["temperature"]["lapse"] == 0
    assert said.count("| all items |") == said.count("| items not seen |") == 3


def test_on_validation_those_who_judge_took_no_part_in_the_fit(trained, tmp_path):
    calibrated.main([str(trained), "--json", str(tmp_path / "found.json"), "--part", "validation"])
    found = json.loads((tmp_path / "found.json").read_text())["calibrated"][0]["all items"]
    recommender = Recommender.load(trained / "runs" / "bft-seed0")
    dataset = recommender.own_dataset()
    rank = recommender.evaluate(dataset, "validation").per_user["rank_unfiltered"].to_numpy()
    assert found["temperature"]["@10"]["hit_rate"] == pytest.approx(np.mean(rank[1::2] <= 10))
    assert found["temperature"]["temperature"] != pytest.approx(recommender.calibration(filter_seen=False).temperature)


@pytest.mark.parametrize("unseen", [False, True])
def test_lists_of_all_that_is_left_claim_every_hit_where_targets_are_repeated(unseen):
    items = np.random.default_rng(0).integers(0, 12, (60, 7))  # of some users the target was seen before
    rows = pd.DataFrame({"user": np.repeat(np.arange(60), 7), "item": items.ravel()})
    dataset = Dataset.from_frame(rows, user="user", item="item")
    for one in calibrated.judged(Popularity(dataset.training_counts), dataset, unseen).values():
        assert one["@100"]["hit_rate"] == 1 and one["@100"]["mean_probability"] == pytest.approx(1)

"""Requests of plain JSON values, and the run that answers them."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pandas as pd
import pytest

from recbft import Dataset, Recommender
from recbft.api import service as service_module
from recbft.api.service import Limits, Service
from recbft.datasets import ItemFeatures
from recbft.errors import UserError
from tests.serving.conftest import SMALL, dataset

__all__ = ["dataset"]


@pytest.fixture(scope="session")
def two_runs(dataset, tmp_path_factory):
    """Folders of two runs of different weights."""
    out = tmp_path_factory.mktemp("served")
    for seed in (0, 1):
        Recommender("sasrec", arm="bft", seed=seed, **SMALL).fit(dataset, out=out / f"run{seed}")
    return out / "run0", out / "run1"


@pytest.fixture
def link(two_runs, tmp_path):
    """A link to the first run."""
    os.symlink(two_runs[0], tmp_path / "current")
    return tmp_path / "current"


def turn(link, run):
    """Let a link lead elsewhere at once."""
    os.symlink(run, link.with_name("next"))
    os.replace(link.with_name("next"), link)


def test_lists_are_those_of_the_recommender(two_runs):
    service, recommender = Service(two_runs[0]), Recommender.load(two_runs[0])
    a, b, c = recommender.item_vectors().items[:3].tolist()
    asked = {"k": 3, "exclude": [c], "filter_seen": False, "fallback": "popular"}
    found = service.recommend({"histories": {"ann": [a, b], "new": []}, "candidates": None, **asked})
    expected = recommender.recommend_lists({"ann": [a, b], "new": []}, **asked)
    assert found["run"] == "run0" and found["weights"] == recommender.weights[:12]
    assert found["lists"] == [
        {"user": user, **one._asdict()} for user, one in zip(("ann", "new"), expected, strict=True)
    ]
    numbered = service.recommend({"histories": [[a, b], []], "exclude": {"0": [c]}, "k": 3, "filter_seen": False})
    assert [one["user"] for one in numbered["lists"]] == [0, 1]
    assert numbered["lists"][0]["items"] == found["lists"][0]["items"] and numbered["lists"][1]["items"] == []
    assert len(Service(two_runs[0], Limits(k=2)).recommend({"histories": [[a]]})["lists"][0]["items"]) == 2
    similar, table = service.similar(str(a), 4), recommender.similar_items(a, 4)
    assert similar["items"] == table["item"].tolist() and similar["scores"] == table["score"].tolist()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([], r"the request is a list; give an object, such as"),
        ({}, "has no histories"),
        ({"histories": None}, "has no histories"),
        ({"history": [[1]]}, "unknown key 'history' in the request; did you mean 'histories'"),
        ({"histories": "tea"}, "histories is 'tea'; give lists of item ids by user"),
        ({"histories": []}, "there is no history to recommend for"),
        ({"histories": {"ann": "tea"}}, "the history of user 'ann' is 'tea'"),
        ({"histories": [[["tea"]]]}, r"an item id is \['tea'\]"),
        ({"histories": [[{"id": 1}]]}, r"an item id is \{'id': 1\}"),
        ({"histories": [[1e300]]}, "so large are not exact"),
        ({"histories": [[]] * 6}, "has 6 users, and this service takes 5 at once"),
        ({"histories": [[1]], "k": 8}, "k is 8, and this service makes lists of up to 7"),
        ({"histories": [[1]], "k": True}, "k is True; give a whole number"),
        ({"histories": [[1]], "k": "3"}, "k is '3'; give a whole number"),
        ({"histories": [[1]], "filter_seen": "false"}, "filter_seen is 'false'"),
        ({"histories": [[1]], "fallback": True}, "fallback is True; give 'popular'"),
        ({"histories": [[1]], "candidates": ["none such"]}, "none of the 1 candidates"),
        ({"histories": [[1]], "exclude": 3}, "exclude is 3"),
        ({"histories": [[1]], "times": [[]]}, "user 0 has 1 items and 0 times"),
        ({"histories": [[1]], "times": [["now"]]}, "a time of user 0 is 'now'"),
        ({"histories": [[1]], "times": [[2**63]]}, "give whole numbers of 64 bits"),
        ({"histories": [[1]], "times": {"0": [1]}}, "times and histories have different forms"),
    ],
)
def test_a_wrong_request_is_told_what_to_change(two_runs, request_, message):
    service = Service(two_runs[0], Limits(users=5, k=7))
    with pytest.raises(UserError, match=message):
        service.recommend(request_)


def test_of_similar_items_the_item_and_the_number_are_checked(two_runs):
    service = Service(two_runs[0], Limits(k=7))
    for item, k, message in (("none such", 3, "not in the model's vocabulary"), ("1", 8, "k is 8"), ("1", 0, "k is 0")):
        with pytest.raises(UserError, match=message):
            service.similar(item, k)


def test_a_model_that_reads_times_gets_them_from_the_request(dataset, tmp_path):
    run = tmp_path / "timed"
    fitted = Recommender("hstu", time_bias=True, **SMALL).fit(dataset, out=run)
    a, b = fitted.item_vectors().items[:2].tolist()
    service = Service(run)
    frame = {"user_id": ["x", "x", "y"], "item_id": [a, b, b], "timestamp": [10, 20, 30]}
    expected = fitted.recommend_lists(pd.DataFrame(frame), 3)
    asked = {"k": 3, "histories": {"x": [a, b], "none": [], "y": [b]}, "times": {"y": [30], "x": [10, 20]}}
    lists = service.recommend(asked)["lists"]
    assert [one["user"] for one in lists] == ["x", "none", "y"] and lists[1]["items"] == []
    assert [lists[0]["items"], lists[2]["items"]] == [one.items for one in expected]
    np.testing.assert_allclose(lists[2]["scores"], expected[1].scores, rtol=1e-5)
    with pytest.raises(UserError, match="reads event times"):
        service.recommend({"histories": [[a]]})
    assert service.recommend({"histories": [[]], "times": [[]], "fallback": "popular"})["lists"][0]["fallback"]


def test_another_run_answers_once_the_link_leads_to_it(two_runs, link):
    service = Service(link)
    assert service.named["run"] == "run0" and service.refresh() is None
    turn(link, two_runs[1])
    assert service.refresh() == "loaded" and service.named["run"] == "run1" and service.refresh() is None
    service.ask_to_reload()
    assert service.refresh() == "loaded" and service.refresh() is None


def test_a_run_that_is_replaced_in_its_folder_is_noticed(two_runs, tmp_path):
    shutil.copytree(two_runs[0], tmp_path / "run")
    service = Service(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert service.refresh() is None  # nothing stands there: the old one goes on
    shutil.copytree(two_runs[1], tmp_path / "run")
    before = service.named["weights"]
    assert service.refresh() == "loaded" and service.named["weights"] != before


def test_a_run_that_cannot_be_loaded_leaves_the_old_one(two_runs, link, tmp_path, monkeypatch, caplog):
    service, broken = Service(link), tmp_path / "broken"
    shutil.copytree(two_runs[1], broken)
    shutil.rmtree(broken / "checkpoint")
    turn(link, broken)
    assert service.refresh() == "failed" and service.named["run"] == "run0"
    assert "was not loaded, run0 goes on" in caplog.text
    assert service.refresh() is None  # it is not tried all the time
    monkeypatch.setattr(service_module, "TRY_AGAIN", -1.0)
    assert service.refresh() is None
    service.ask_to_reload()
    assert service.refresh() == "failed" and service.refresh() == "failed"
    shutil.copytree(two_runs[1] / "checkpoint", broken / "checkpoint")
    assert service.refresh() == "loaded" and service.named["run"] == "broken"


def test_the_log_names_the_file_of_items_that_is_missing(tmp_path, dataset, caplog):
    items = pd.DataFrame({"item_id": dataset.item_ids.astype(str), "kind": np.arange(dataset.num_items) % 3})
    known = ItemFeatures.from_frame(items, kinds={"kind": "category"})
    Recommender("content-cosine").fit(dataset.with_features(known), out=tmp_path / "run")
    items.tail(1).assign(item_id=10**6).to_csv(tmp_path / "new.csv", index=False)
    service = Service(tmp_path / "run", items=[tmp_path / "new.csv"])
    (tmp_path / "new.csv").unlink()
    assert service.refresh() == "failed" and "new.csv" in caplog.text and "no finished run" not in caplog.text


def test_the_log_says_once_that_nothing_stands_there_to_load(two_runs, link, caplog):
    service, nothing = Service(link), link.with_name("nothing")
    turn(link, nothing)
    assert service.refresh() is None and service.refresh() is None and service.named["run"] == "run0"
    assert caplog.text.count("holds no finished run now, run0 goes on") == 1
    turn(link, two_runs[1])
    assert service.refresh() == "loaded"


def test_a_folder_without_a_finished_run_is_refused(tmp_path, two_runs):
    shutil.copytree(two_runs[0], tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    for path, message in ((tmp_path / "none", "there is no run folder"), (tmp_path / "run", "is not finished")):
        with pytest.raises(UserError, match=message):
            Service(path)


def test_a_request_caps_its_lists(two_runs, tmp_path):
    log = pd.DataFrame({"user_id": np.repeat(np.arange(6), 5), "item_id": list("abcde") * 6})
    items = pd.DataFrame({"item_id": list("abcde"), "kind": list("xxxyy")})
    Recommender("pop").fit(Dataset.from_frame(log, items=items), out=tmp_path / "run")
    asked = {"histories": {"ann": []}, "cap": {"kind": 1}}
    assert Service(tmp_path / "run").recommend(asked)["lists"][0]["items"] == ["a", "d"]
    for cap, said in (
        ({"kind": "1"}, "cap of 'kind' is '1'"),
        ([1], r"cap is \[1\]"),
        ({"size": 1}, "cap names 'size'"),
    ):
        with pytest.raises(UserError, match=said):
            Service(tmp_path / "run").recommend({**asked, "cap": cap})

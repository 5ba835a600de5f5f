"""A model that reads how reliable events are: trained, kept, asked from frames, files and requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from recbft import Dataset, Recommender
from recbft.api.service import Limits, Service
from recbft.errors import UserError
from recbft.training import one_run
from recbft_cli.main import main
from tests.training.conftest import StopAt, Stopped, assert_equal_runs, config, dataset

__all__ = ["dataset"]

READS = {"reads_reliability": "precision"}


@pytest.fixture(scope="module")
def log(dataset):
    """Events with ratings, of which some are missing."""
    stars = np.random.default_rng(0).choice([1, 3, 5, np.nan], size=dataset.num_events)
    users = dataset.user_ids[np.repeat(np.arange(dataset.num_users), dataset.lengths)]
    return pd.DataFrame({"user": users, "item": dataset.decode(dataset.items), "stars": stars})


@pytest.fixture(scope="module")
def rated(log):
    return Dataset.from_frame(log, user="user", item="item", reliability="stars")


@pytest.fixture(scope="module")
def fitted(rated, tmp_path_factory):
    settings = {"hidden_size": 8, "max_length": 8, "batch_size": 16, "epochs": 2, "warmup_steps": 2, "device": "cpu"}
    return Recommender("sasrec", **READS, **settings).fit(rated, out=tmp_path_factory.mktemp("runs") / "run")


def lists(found):
    return [(one.items, one.scores) for one in found]


def test_a_stopped_run_goes_on_exactly_and_what_its_ratings_are_matters(rated, tmp_path):
    asked = config("bft", epochs=2, **READS)
    whole = one_run.train(asked, tmp_path / "whole", dataset=rated)
    with pytest.raises(Stopped):
        one_run.train(asked, tmp_path / "stopped", dataset=rated, progress=StopAt(1))
    assert_equal_runs(one_run.resume(tmp_path / "stopped", dataset=rated), whole)
    other = replace(rated, reliability=np.roll(rated.reliability, 1))
    assert one_run.train(asked, tmp_path / "other", dataset=other).metrics["test"] != whole.metrics["test"]


def test_a_frame_a_request_and_a_file_give_the_same_lists(fitted, log, tmp_path, capsys):
    frame = log[log["user"].isin(log["user"].unique()[:3])]
    expected = lists(fitted.recommend_lists(frame, 4))
    usual = frame.rename(columns={"user": "user_id", "item": "item_id", "stars": "reliability"})
    assert lists(fitted.recommend_lists(usual, 4)) == expected
    without = lists(fitted.recommend_lists(frame.drop(columns="stars"), 4))
    histories = {user: own["item"].tolist() for user, own in frame.groupby("user", sort=False)}
    assert without != expected and lists(fitted.recommend_lists(histories, 4)) == without
    known = {
        user: [None if np.isnan(one) else one for one in own["stars"]]
        for user, own in frame.groupby("user", sort=False)
    }
    service = Service(fitted.run.path)
    asked = {"histories": {str(user): items for user, items in histories.items()}, "k": 4}
    answer = service.recommend({**asked, "reliability": {str(user): own for user, own in known.items()}})
    assert [(one["items"], one["scores"]) for one in answer["lists"]] == expected
    assert [(one["items"], one["scores"]) for one in service.recommend(asked)["lists"]] == without
    frame.to_csv(tmp_path / "histories.csv", index=False)
    out = tmp_path / "lists.csv"
    assert main(["recommend", str(fitted.run.path), "--histories", str(tmp_path / "histories.csv"), "-k", "4",
                 "--out", str(out)]) == 0  # fmt: skip
    read = pd.read_csv(out)
    np.testing.assert_allclose(read["score"], np.concatenate([scores for _, scores in expected]), rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([["much"]], "a reliability of user 0 is 'much'; give numbers, or null where it is missing"),
        ([[1, 2]], "user 0 has 1 items and 2 reliability; give one for each item"),
    ],
)
def test_a_request_with_no_numbers_is_refused(fitted, values, said):
    item = fitted.item_vectors().items[0].item()
    with pytest.raises(UserError, match=said):
        Service(fitted.run.path, Limits()).recommend({"histories": [[item]], "reliability": values})


def test_a_loaded_run_evaluates_explains_and_gives_vectors_as_before(fitted, rated, log):
    loaded = Recommender.load(fitted.run.path)
    assert loaded.evaluate(rated).metrics == fitted.evaluate(rated).metrics
    own = log[log["user"] == log["user"].iloc[0]]
    assert loaded.user_vectors(own).vectors.tolist() != loaded.user_vectors(own.drop(columns="stars")).vectors.tolist()
    explained = loaded.explain(own, k=1)
    bare = loaded.explain(own.drop(columns="stars"), item=explained["item"].iloc[0])
    assert explained["score"].iloc[0] != bare["score"].iloc[0]
    unknown = replace(rated, reliability=np.full(rated.num_events, np.nan))
    assert loaded.evaluate(unknown).metrics != fitted.evaluate(rated).metrics


def test_data_without_reliability_are_refused_where_a_model_reads_it(dataset):
    with pytest.raises(
        UserError, match=r"has no reliability; name its column as data.reliability, in a shell by --rel"
    ):
        Recommender("sasrec", **READS).fit(dataset)

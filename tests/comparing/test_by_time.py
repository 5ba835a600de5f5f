"""Runs under a split by time, with items held out and several targets a user: trained, compared, stratified."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from recbft.api import Recommender
from recbft.comparing.comparison import comparison_of
from recbft.comparing.finished_runs import read_run
from recbft.comparing.results import results_of
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.evaluation.metrics import over_users, owner_of, protocol_lines
from recbft.reporting.comparison_tables import comparison_document
from recbft.reporting.stratum_tables import available, stratified, subject_of_runs
from recbft.runs.folder import RunFolder
from recbft.training.one_run import resume, train
from tests.comparing.made_up import MADE
from tests.experiments.conftest import jobs_of

BY_TIME = ("split=global_time", "split_at=0.7", "hold_out_items=0.2", "hold_out_seed=2")
METRICS = ("hr@10", "recall@10", "list_ndcg@10")


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """Users who come back: a file whose events lie anywhere in time."""
    rng = np.random.default_rng(0)
    columns = {"user_id": rng.integers(0, 40, 400), "item_id": rng.integers(0, 50, 400), "timestamp": np.arange(400)}
    path = tmp_path_factory.mktemp("by-time-data") / "log.parquet"
    pd.DataFrame(columns).to_parquet(path)
    return path


@pytest.fixture(scope="module")
def runs(events, tmp_path_factory):
    out = tmp_path_factory.mktemp("by-time")
    jobs = jobs_of(events, out, seeds=(0, 1), settings=(*BY_TIME, "epochs=1"))
    return [train(job.config, job.path).path for job in jobs]


@pytest.fixture(scope="module")
def data(events):
    settings = {"split": "global_time", "split_at": 0.7, "hold_out_items": 0.2, "hold_out_seed": 2}
    return Dataset.load(events, time="timestamp").with_split(**settings)


def test_a_run_says_how_its_data_are_split_and_holds_a_row_per_target(runs, data):
    run = RunFolder.open(runs[0])
    assert run.protocol["split"] == data.split.text and run.protocol["split_counts"] == data.split.counts
    assert run.protocol["target_hash"] == data.target_hash and run.config["data"]["split_at"] == 0.7
    rows, test = pd.read_parquet(run.per_user_file), data.split.test
    assert rows["user"].tolist() == data.user_ids[test.user].tolist() and len(rows) > rows["user"].nunique()
    assert rows["training_length"].tolist() == data.split.training_length[test.user].tolist()
    lines = protocol_lines(run.protocol)
    assert "test targets of global time among all items, ties against them" in lines[1]
    assert lines[2].startswith("split: global time: events before ") and lines[-1].startswith("test: ")
    counts = pd.read_parquet(run.checkpoint / "vocabulary.parquet")["training_count"]
    assert counts.tolist() == data.training_counts[1:].tolist()


def test_a_comparison_averages_over_a_users_targets_first_and_then_pairs_users(runs):
    found = comparison_of(runs)
    assert found.owner is not None and found.num_users < len(found.users)
    arm = found.arms["bft"]
    hits = over_users((arm.ranks["unfiltered"] <= 10).astype(float), owner_of(found.users))
    np.testing.assert_allclose(found.per_user("bft", "unfiltered", "hr@10"), hits.mean(0))
    for metric in METRICS:
        said = [RunFolder(run).metrics["test"]["unfiltered"][metric] for run in arm.runs]
        np.testing.assert_allclose(found.values("bft", "unfiltered", metric), said)
    cell = results_of(found, metrics=METRICS)["comparisons"]["matched"]["bft"]["unfiltered"]["recall@10"]
    assert cell["over_users"]["num_users"] == found.num_users
    said = comparison_document(results_of(found, metrics=METRICS) | {"made": MADE}, markdown=True)
    assert f"Split: {found.protocol['split']}. A user's value is the mean over the user's targets." in said
    assert "The last event" not in said
    assert cell["over_users"]["difference"] == pytest.approx(cell["over_seeds"]["difference"])


def test_strata_begin_with_what_is_new_and_count_users(runs, data):
    subject = subject_of_runs(runs[1], baseline=runs[0])
    names, missing = available(subject)
    assert not missing
    made = {one.by: one for one in stratified(subject, by=names, metrics=["hr@10"], quantiles=3, setting="unfiltered")}
    new = made["item-frequency"].results[0]
    test = data.split.test
    is_new = data.training_counts[test.target] == 0
    assert (new.name, new.bounds) == ("new", "0") and is_new.any()
    assert new.num_users == np.unique(test.user[is_new]).size
    assert made["user-activity"].strata.unit == "training events of the user"
    assert subject.items is not None and subject.items.gap is not None and (subject.items.gap >= 0).all()


def test_a_file_of_ranks_names_the_target_of_each(runs, tmp_path):
    rows = pd.read_parquet(runs[0] / "per_user.parquet")
    shuffled = rows.sample(frac=1, random_state=0)[["user", "target", "rank_unfiltered"]]
    shuffled.to_csv(tmp_path / "ranks.csv", index=False)
    found = comparison_of(runs, external={"other": tmp_path / "ranks.csv"})
    assert found.arms["other"].ranks["unfiltered"][0].tolist() == rows["rank_unfiltered"].tolist()
    shuffled.drop(columns="target").to_csv(tmp_path / "bare.csv", index=False)
    with pytest.raises(UserError, match="has no column 'target', and the split gives a user several"):
        comparison_of(runs, external={"other": tmp_path / "bare.csv"})


def test_a_run_is_evaluated_probed_and_gone_on_with_under_its_own_split(runs, data, events):
    run = RunFolder.open(runs[1])
    loaded = Recommender.load(run.path)
    again = loaded.evaluate()
    assert again.metrics == run.metrics["test"]
    plain = Dataset.load(events, time="timestamp")
    assert loaded.evaluate(plain).metrics == again.metrics, "data without a split of their own get the run's"
    with pytest.raises(UserError, match="give the data without a split of their own, or both the same"):
        loaded.evaluate(plain.with_split(split="global_time", split_at=0.5))
    probed = loaded.probe(samples=10)
    assert probed["mechanism"]["num_users"] == probed["uncertainty"]["num_users"] == data.num_tested
    assert resume(run.path).path == run.path


def test_leave_one_out_runs_refuse_their_own_data_split_otherwise(events, tmp_path, data):
    plain = data.with_split()
    (job,) = jobs_of(events, tmp_path, arms="matched", seeds=(0,), settings=("epochs=1",))
    trained = Recommender.load(train(job.config, job.path).path)
    with pytest.raises(UserError, match="targets of the one are training events of the other"):
        trained.evaluate(data)
    assert len(trained.evaluate(plain).per_user) == plain.num_tested


def test_runs_of_two_splits_are_not_compared(runs, events, tmp_path):
    (job,) = jobs_of(events, tmp_path, arms="matched", seeds=(0,), settings=(*BY_TIME[:2], "epochs=1"))
    other = train(job.config, job.path).path
    with pytest.raises(UserError, match=r"the runs differ in (target_hash|split)"):
        comparison_of([*runs, other])
    assert read_run(other).owner is not None

"""What one run says: no metric without its protocol, and whose lists are told of."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from recbft.datasets.dataset import Dataset
from recbft.evaluation.evaluate import evaluate, exposure
from recbft.evaluation.metrics import config_hash, protocol
from recbft.models import Popularity
from recbft.reporting.run_tables import format_exposure, format_metrics

CONFIG = {"model": "pop", "arm": "published"}


@pytest.fixture(scope="module")
def dataset():
    rows = [(user, item) for user in range(3) for item in np.roll(range(4), user)]
    return Dataset.from_frame(pd.DataFrame(rows, columns=["user_id", "item_id"]), name="small")


def made(dataset, filter_seen=False):
    return protocol(dataset, part="test", filter_seen=filter_seen, max_length=50, seed=7, config=CONFIG)


def test_metrics_print_with_their_protocol(dataset):
    result = evaluate(Popularity(dataset.training_counts), dataset, "test", ks=(10,))
    lines = format_metrics(result.metrics, made(dataset)).splitlines()
    assert lines[0].split() == ["HR@10", "NDCG@10", "MRR@10", "MRR"]
    assert lines[1].startswith("all items") and lines[2].startswith("seen masked")
    assert lines[1].split()[2:] == [f"{value:.4f}" for value in result.metrics["unfiltered"].values()]
    assert lines[3].startswith("data: small, 3 users, 4 items, 12 events, content " + dataset.content_hash[:12])
    assert "ties against it" in lines[4] and "filter_seen false" in lines[4] and "seed 7" in lines[4]
    assert "max length 50" in lines[4] and "pop published" in lines[4] and config_hash(CONFIG)[:12] in lines[4]
    assert "headline seen masked (filter_seen true)" in format_metrics({}, made(dataset, filter_seen=True))


def test_rows_may_have_different_metrics_and_none_is_printed_without_its_protocol(dataset):
    text = format_metrics({"a": {"hr@5": 0.5}, "b": {"mrr": 0.25}}, made(dataset))
    assert [line.split() for line in text.splitlines()[1:3]] == [["a", "0.5000", "-"], ["b", "-", "0.2500"]]
    with pytest.raises(KeyError, match="seed"):
        format_metrics({}, {key: value for key, value in made(dataset).items() if key != "seed"})


def test_lists_are_told_of_beside_the_targets_and_where_they_are_of_some_users(monkeypatch):
    nothing = exposure(np.zeros((1, 3), np.int64), np.ones(3, np.int64), [10])
    lines = format_exposure({"filtered": nothing}, 2.25, {"users": 0, "items": 3}).splitlines()
    assert lines[0].split() == ["lists", "of", "10", "show", "COVERAGE", "GINI", "POPULARITY"]
    assert lines[1].split() == ["seen", "masked", "0.0000", "-", "-"] and lines[2].split() == ["the", "targets", "2.2"]
    assert len(lines) == 3
    monkeypatch.setattr("recbft.evaluation.evaluate.LISTED_USERS", 5)
    monkeypatch.setattr("recbft.evaluation.evaluate.LISTED_SCORES", 20 * 40)
    some = exposure(np.ones((2, 4), np.int64), np.arange(4), [3, 7])
    told = format_exposure({"unfiltered": some}, 1.0, {"users": 70, "items": 40}).splitlines()
    assert told[-1] == "lists of 20 of the 70 users, drawn from a fixed seed" and told[0].startswith("lists of 7 show")

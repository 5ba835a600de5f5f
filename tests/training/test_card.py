"""The model card of a run says what the run's files say."""

from __future__ import annotations

import json

import pytest

from recbft import Recommender
from recbft.training.card import card_text
from tests.serving.conftest import SMALL, dataset

__all__ = ["dataset"]


@pytest.mark.parametrize("model", ["sasrec", "pop"])
def test_every_finished_run_has_a_card_with_its_figures_and_their_protocol(model, dataset):
    run = Recommender(model, **({} if model == "pop" else SMALL)).fit(dataset).run
    card = (run.path / "card.md").read_text()
    test = run.metrics["test"]["unfiltered"]
    (row,) = [line for line in card.splitlines() if line.startswith("| test, all items ")]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [f"{value:.4f}" for value in test.values()]
    assert f"content {dataset.content_hash[:12]}" in card and "protocol: test target of leave-one-out" in card
    assert card.startswith(f"# {model} ({run.config['arm']}) on synthetic\n")
    assert ("calibrated on validation targets" in card) is bool(run.metrics["probability"]["unfiltered"])


def test_a_card_is_told_from_files_of_an_older_version_and_keeps_its_tables_whole(dataset):
    run = Recommender("pop").fit(dataset).run
    metrics = json.loads(json.dumps(run.metrics)) | {"probability": None, "exposure": None}
    card = card_text({**run.protocol, "dataset": "a|b"}, metrics, {})
    assert "| data set | a/b: 50 users" in card and "| probabilities | none |" in card

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import parity, train_speed
from benchmarks.train_speed import main, make_contestant, train_in_turn
from recbft.datasets import Dataset
from recbft.errors import RunError, UserError
from recbft.experiments.arms import parse_arms
from recbft.runs.checkpoint import load
from recbft.training.one_run import train
from recbft.training.run_config import load_run_config


def test_the_table_and_the_json_hold_every_arm(small, tmp_path, capsys):
    file = tmp_path / "speed.json"
    assert main([*small, "--repeats", "2", "--chunk-steps", "2", "--threads", "1", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert list(result["arms"]) == ["published", "matched", "bft"]
    for label, arm in result["arms"].items():
        assert f"\n{label} " in out
        assert arm["seconds_per_epoch"] > 0 and arm["evaluation_seconds"] > 0 and len(arm["seconds_of_epochs"]) == 2
        assert 0 <= arm["ndcg@10"] <= arm["hr@10"] <= 1
        ratio = arm["ratio"]
        assert ratio["to"] == "matched" and ratio["min"] <= ratio["median"] <= ratio["max"]
        assert ratio["pairs"] == 2 * -(-4 // 2)  # 120 users in batches of 32, chunks of 2, two epochs
    assert result["arms"]["matched"]["ratio"]["median"] == 1
    assert result["parity"]["bft"] < parity.TOLERANCE and result["peak_rss_mb"] > 0


def test_an_arm_trained_in_turn_becomes_what_it_becomes_alone(events, small, tmp_path):
    settings = [word for word in small[2:] if word != "--set"]
    dataset = Dataset.load(events, time="timestamp")
    arms = parse_arms("matched,published,bft")
    contestants = [make_contestant(arm, arm.config(settings, dataset=str(events)), dataset) for arm in arms]
    train_in_turn(contestants, epochs=2, chunk_steps=3)
    for c in contestants[:2]:
        alone = train(load_run_config(None, settings, arm=c.arm.name, dataset=str(events)), tmp_path / c.arm.name)
        trained, weights = c.model.state_dict(), load(alone.checkpoint).model_state
        assert all(torch.equal(trained[key], weights[key]) for key in weights), c.arm.name


def test_no_time_is_printed_where_parity_fails(small, capsys, monkeypatch):
    monkeypatch.setattr(parity, "TOLERANCE", 0.0)
    with pytest.raises(RunError, match=r"bft at ramp 0 differs from the plain layer by .* no time is taken"):
        main([*small, "--threads", "1"])
    assert capsys.readouterr().out == ""


def test_the_profile_names_operators(small, capsys):
    assert main([*small, "--threads", "1", "--profile", "matched", "--profile-steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "matched: 1 training steps" in out and "aten::" in out and "Self CPU" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "no/such/folder/x.json"], "no/such/folder does not exist; create it"),
        (["--model", "pop", "--arms", "published"], "has no effect|unknown key"),
    ],
)
def test_bad_options_are_refused_before_any_work(small, options, message):
    with pytest.raises(UserError, match=message):
        train_speed.main([*small, *options])

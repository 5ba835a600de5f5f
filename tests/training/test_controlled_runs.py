"""Controllers in a run: switched on by the config, resumed exactly, gone when it is over."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from recbft.datasets import Dataset
from recbft.datasets.synth import SyntheticConfig, generate
from recbft.runs.checkpoint import load
from recbft.training import session
from recbft.training.one_run import resume, train
from recbft.training.progress import Silent
from recbft.training.run_config import load_run_config
from tests.training.conftest import StopAt, Stopped, assert_equal_runs

EVERY = {
    "ema": {}, "swa": {"start": 0.0, "gain": 0.0}, "chaos": {}, "lr_floor": {},
    "label_smoothing": {}, "dropout_glide": {}, "context_game": {"lengths": [4, 10]},
}  # fmt: skip
SMALL = {"epochs": 4, "hidden_size": 8, "max_length": 10, "batch_size": 16, "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def dataset():
    events = generate(SyntheticConfig(num_users=60, num_items=64, mean_length=8.0, seed=2)).events
    return Dataset.from_frame(events)


def config(**more):
    return load_run_config(**{**SMALL, "mixer": "regime", "regimes": 3, **more})


def weights(run):
    [file] = run.checkpoint.glob("best-*.safetensors")
    return load_file(file)


def test_no_controllers_is_the_default_and_a_config_with_them_reads_back(tmp_path):
    plain = config()
    assert plain.controllers.named == []
    steered = config(controllers=EVERY | {"guardian": {}})
    assert set(steered.controllers.named) == {*EVERY, "guardian"}
    (tmp_path / "config.yaml").write_text(steered.to_yaml())
    assert load_run_config(tmp_path / "config.yaml") == steered
    assert load_run_config(None, ["controllers.ema={}"]).controllers.named == ["ema"]


def test_a_run_broken_off_and_resumed_equals_one_that_was_not(dataset, tmp_path):
    asked = config(controllers=EVERY | {"guardian": {}}, learning_rate=0.01)
    whole = train(asked, tmp_path / "whole", dataset=dataset)
    with pytest.raises(Stopped):
        train(asked, tmp_path / "broken", dataset=dataset, progress=StopAt(3))
    assert load(tmp_path / "broken" / "checkpoint").controllers_state["swa"]["epochs"] > 0
    assert_equal_runs(resume(tmp_path / "broken", dataset=dataset), whole)


def test_steering_changes_training_and_leaves_an_ordinary_run(dataset, tmp_path):
    from recbft import Recommender

    plain = train(config(), tmp_path / "plain", dataset=dataset)
    steered = train(config(controllers={"ema": {}}), tmp_path / "steered", dataset=dataset)
    one, two = weights(plain), weights(steered)
    assert one.keys() == two.keys() and any(not torch.equal(one[name], two[name]) for name in one)
    evaluation = Recommender.load(steered.path).evaluate(dataset)
    assert evaluation.metrics["unfiltered"] == steered.metrics["test"]["unfiltered"]


def test_the_weights_kept_as_best_are_those_that_were_validated(dataset, tmp_path, monkeypatch):
    evaluated, judged = session.evaluate, []

    def watch(model, *arguments, **named):
        judged.append(model.blocks[0].mixer.temperature_logit.item())
        return evaluated(model, *arguments, **named)

    monkeypatch.setattr(session, "evaluate", watch)
    run = train(config(controllers={"guardian": {}}), tmp_path / "run", dataset=dataset)
    assert len(set(judged)) > 2, "the guardian has moved it"
    assert weights(run)["blocks.0.mixer.temperature_logit"].item() == judged[run.metrics["best_epoch"] - 1]


class Notes(Silent):
    def __init__(self):
        self.heard = []

    def note(self, message):
        self.heard.append(message)


def test_a_run_says_that_nothing_was_averaged(dataset, tmp_path):
    notes = Notes()
    train(config(controllers={"swa": {"gain": 9.0}}), tmp_path / "run", dataset=dataset, progress=notes)
    # Before the last pass over all users is announced.
    assert notes.heard[-2] == "controllers.swa has averaged nothing: fewer than two epochs gained enough"


@pytest.mark.parametrize("good", [True, False])
def test_averaged_weights_are_kept_if_they_are_better(good, dataset, tmp_path, monkeypatch):
    evaluated = session.evaluate

    def judge(model, data, part, **named):
        """Of averaged weights, which are offered last, as they are to be found."""
        found = evaluated(model, data, part, **named)
        if part == "validation" and not named.get("lists"):
            seen.append(found.headline["ndcg@10"])
            if len(seen) == 5:
                found.metrics["unfiltered"]["ndcg@10"] = found.metrics["filtered"]["ndcg@10"] = float(good)
        return found

    seen, notes = [], Notes()
    monkeypatch.setattr(session, "evaluate", judge)
    asked = config(controllers={"swa": {"gain": 0.0, "start": 0.0}}, learning_rate=0.01)
    run = train(asked, tmp_path / "run", dataset=dataset, progress=notes)
    best = max(range(1, 5), key=lambda epoch: (seen[epoch - 1], -epoch))
    kept = "are kept" if good else f"those of epoch {best} are kept"
    assert notes.heard[-2] == f"the averaged weights have valid ndcg@10 {float(good):.4f}, and {kept}"
    assert run.metrics["best_epoch"] == (4 if good else best)
    assert (run.metrics["validation"]["unfiltered"]["ndcg@10"] == max(seen[:4])) != good

"""A run from config to finished folder: repeatable, resumable bit for bit, no trace where it cannot begin."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from recbft.api.own_run import TrainedRun
from recbft.datasets import Dataset, ItemContent, ItemFeatures
from recbft.errors import RunError, UserError
from recbft.evaluation.evaluate import evaluate
from recbft.models import Popularity
from recbft.models.backbone import Backbone
from recbft.runs import checkpoint, environment
from recbft.runs.folder import RunFolder
from recbft.training import one_run, session
from recbft.training.build import build_model
from recbft.training.bundle import CONTENT_FOLDER, load_trained
from recbft.training.many_seeds import train_seeds
from recbft.training.progress import Silent
from recbft.training.run_config import load_run_config
from tests.training.conftest import StopAt, Stopped, assert_equal_runs, config

# Results ---------------------------------------------------------------------------------------------


def test_a_finished_run_holds_what_its_folder_promises(whole, dataset):
    run = whole
    assert os.listdir(run.path.parent) == [run.path.name]
    files = "card.md checkpoint config.yaml environment.json history.csv metrics.json per_user.parquet protocol.json"
    assert sorted(os.listdir(run.path)) == files.split()
    asked = config()
    named = replace(asked, data=replace(asked.data, dataset="synthetic"))  # a run knows which data it saw
    assert load_run_config(run.config_file) == named
    assert [row["epoch"] for row in run.read_history()] == [1, 2, 3, 4]
    metrics = run.metrics
    assert metrics["epochs"] == 4 and metrics["steps"] == 16 and 1 <= metrics["best_epoch"] <= 4
    best = run.read_history()[metrics["best_epoch"] - 1]
    for name, value in metrics["validation"]["unfiltered"].items():
        assert best[f"valid_{name}"] == value
    per_user = pd.read_parquet(run.per_user_file)
    assert per_user["user"].tolist() == dataset.user_ids.tolist()
    assert np.mean(per_user["rank_unfiltered"] <= 10) == pytest.approx(metrics["test"]["unfiltered"]["hr@10"])
    assert np.mean(1 / per_user["rank_filtered"]) == pytest.approx(metrics["test"]["filtered"]["mrr"])
    protocol = run.protocol
    assert protocol["seed"] == 0 and dataset.content_hash in json.dumps(protocol)


def test_the_best_epoch_s_weights_are_the_ones_evaluated(dataset, tmp_path):
    run = one_run.train(config(epochs=8, learning_rate=0.05, patience=2), tmp_path / "a", dataset=dataset)
    state = checkpoint.load_state(run.checkpoint)
    assert state.best_epoch < state.epoch, "this configuration is meant to overshoot"
    rows = run.read_history()
    assert max(row["valid_ndcg@10"] for row in rows) == run.metrics["validation"]["unfiltered"]["ndcg@10"]
    assert rows[-1]["valid_ndcg@10"] < state.best_metric
    assert run.metrics["epochs"] == state.epoch < 8 and state.bad_epochs == 2


def test_what_is_kept_of_the_weights_is_theirs_whenever_they_are_evaluated(dataset, tmp_path, monkeypatch):
    evaluated, fresh = session.evaluate, []

    def watch(model, *given, **named):
        kept = [block.precision.factors[0].clone() for block in model.blocks[:-1]]
        model.refresh()
        fresh.append(
            all(torch.equal(block.precision.factors[0], own) for block, own in zip(model.blocks, kept, strict=False))
        )
        return evaluated(model, *given, **named)

    monkeypatch.setattr(session, "evaluate", watch)
    one_run.train(config(epochs=2), tmp_path / "run", dataset=dataset)
    assert fresh == [True] * 4


def test_what_is_known_of_items_is_fitted_once_for_several_seeds_and_kept_with_each(dataset, tmp_path, monkeypatch):
    columns = pd.DataFrame({"item_id": dataset.item_ids, "group": dataset.item_ids % 7, "price": dataset.item_ids**2.0})
    described = dataset.with_features(ItemFeatures.from_frame(columns, kinds={"group": "category"}))
    asked = config(epochs=0, content_width=4)
    expected = ItemContent.fit(described.features, described.training_counts, asked.content_config)
    fit, fitted = ItemContent.fit, []
    monkeypatch.setattr(ItemContent, "fit", lambda *given: fitted.append(given) or fit(*given))
    paths = [tmp_path / "0", tmp_path / "1"]
    train_seeds([asked, replace(asked, seed=1)], paths, dataset=described)
    assert len(fitted) == 1
    values = expected.matrix(described.features).values
    for path in paths:
        kept = ItemContent.load(path / "checkpoint" / CONTENT_FOLDER)
        np.testing.assert_array_equal(kept.matrix(described.features).values, values)
        np.testing.assert_array_equal(load_trained(path).model.item_belief.content, values)


def test_equal_configs_give_equal_runs_and_seeds_differ(whole, dataset, tmp_path):
    torch.manual_seed(1)
    assert_equal_runs(whole, one_run.train(config(), tmp_path / "two", dataset=dataset))
    other = one_run.train(config(seed=1), tmp_path / "other", dataset=dataset)
    assert other.metrics["test"] != whole.metrics["test"]


def test_runs_in_threads_are_those_of_their_seeds(whole, dataset, tmp_path):
    def trained(place):
        return one_run.train(config(), tmp_path / place, dataset=dataset)

    with ThreadPoolExecutor(2) as pool:
        for run in pool.map(trained, ("one", "two")):
            assert_equal_runs(run, whole)


def test_a_model_that_is_not_trained_is_evaluated_and_finished(dataset, tmp_path):
    run = one_run.train(load_run_config(model="pop", filter_seen=True), tmp_path / "pop", dataset=dataset)
    model = Popularity(dataset.training_counts)
    for part in ("validation", "test"):
        assert run.metrics[part] == evaluate(model, dataset, part, filter_seen=True).metrics
    assert run.metrics["filter_seen"] is True and run.metrics["epochs"] == 0
    assert one_run.resume(run.path, dataset=dataset).metrics == run.metrics


def test_no_epoch_evaluates_what_training_would_begin_with_and_no_rate_changes_nothing(dataset, tmp_path):
    none = one_run.train(config("matched", epochs=0), tmp_path / "none", dataset=dataset)
    still = one_run.train(config("matched", epochs=1, learning_rate=0), tmp_path / "still", dataset=dataset)
    assert none.metrics["epochs"] == 0 and none.metrics["best_epoch"] is None and none.read_history() == []
    assert none.metrics["test"] == still.metrics["test"]
    untrained = build_model(config("matched", epochs=0), dataset)
    for run in (none, still):
        for name, value in checkpoint.load_best(run.checkpoint).items():
            assert name == "ramp" or torch.equal(value, untrained.state_dict()[name]), name
    (together,) = train_seeds([config("matched", epochs=0)], [tmp_path / "together"], dataset=dataset)
    assert together.metrics["test"] == none.metrics["test"]


# Resuming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(2, None), (2, 3), (0, 2)], ids=["between", "within", "first"])
def test_two_epochs_and_two_more_equal_four_bit_for_bit(stop, whole, dataset, tmp_path):
    with pytest.raises(Stopped):
        one_run.train(config(), tmp_path / "cut", dataset=dataset, progress=StopAt(*stop))
    torch.manual_seed(123)  # the caller's random state must not matter
    assert_equal_runs(whole, one_run.resume(tmp_path / "cut", dataset=dataset))


RESUMED = [
    ("published", {}),
    ("matched", {"recency_decay": True, "clip_norm": 0.5, "weight_decay": 0.01, "eval_every": 3}),
    (
        "matched",
        {
            "output_projection": True,
            "attention_dropout": 0.2,
            "samples": "windows",
            "max_length": 3,
            "loss": "ce_unseen",
        },
    ),
    ("matched", {"samples": "prefixes", "optimizer": "adamw", "weight_decay": 0.1, "batch_size": 64}),
    ("bft", {"prior_scale": "per_layer", "jacobian": "running_mean", "initial": "table", "recency_decay": False}),
    ("bft", {"jacobian": "exact", "jacobian_in_evaluation": "low_rank", "patience": 1, "learning_rate": 0.05}),
]


@pytest.mark.parametrize(("arm", "settings"), RESUMED, ids=lambda value: str(value))
def test_other_settings_go_on_bit_for_bit_too(dataset, tmp_path, arm, settings):
    chosen = config(arm, **settings)
    unbroken = one_run.train(chosen, tmp_path / "whole", dataset=dataset)
    stop = StopAt(2, steps=3) if len(unbroken.read_history()) > 2 else StopAt(1)
    with pytest.raises(Stopped):
        one_run.train(chosen, tmp_path / "cut", dataset=dataset, progress=stop)
    torch.manual_seed(123)
    assert_equal_runs(unbroken, one_run.resume(tmp_path / "cut", dataset=dataset))


def test_a_run_stopped_after_every_epoch_equals_one_that_was_not(whole, dataset, tmp_path):
    with pytest.raises(Stopped):
        one_run.train(config(), tmp_path / "cut", dataset=dataset, progress=StopAt(1))
    for _ in range(3):
        with pytest.raises(Stopped):
            one_run.resume(tmp_path / "cut", dataset=dataset, progress=StopAt(1))
    run = one_run.resume(tmp_path / "cut", dataset=dataset)
    assert_equal_runs(whole, run)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    assert one_run.resume(run.path, dataset=dataset).metrics == run.metrics
    assert before == {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}, "a finished run is left as it is"


def test_a_history_line_without_its_checkpoint_is_dropped(whole, stopped, dataset):
    rows = stopped.read_history()
    stopped.write_history([*rows, {**rows[-1], "epoch": 3, "loss": 99.0}])
    assert_equal_runs(whole, one_run.resume(stopped.path, dataset=dataset))


def test_a_run_stopped_before_its_first_checkpoint_starts_from_the_beginning(whole, dataset, tmp_path):
    with pytest.raises(Stopped):
        one_run.train(config(), tmp_path / "cut", dataset=dataset, progress=StopAt(0, steps=1))
    shutil.rmtree(tmp_path / "cut" / "checkpoint")
    (tmp_path / "cut" / "checkpoint").mkdir()
    assert_equal_runs(whole, one_run.resume(tmp_path / "cut", dataset=dataset))


@pytest.mark.parametrize("damage", ["cut off", "another's"])
def test_a_vocabulary_that_was_damaged_is_written_again(stopped, dataset, damage):
    path = stopped.checkpoint / "vocabulary.parquet"
    whole = path.read_bytes()
    if damage == "cut off":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        pd.read_parquet(path).assign(item_id=lambda table: table["item_id"] + 1).to_parquet(path)
    one_run.resume(stopped.path, dataset=dataset)
    assert path.read_bytes() == whole and len(load_trained(stopped.path)[2]) == dataset.num_items


def test_what_was_left_or_planted_in_a_run_does_not_stop_its_resume(whole, stopped, dataset):
    for folder in (stopped.path, stopped.checkpoint):
        (folder / ".x.tmp" / "in it").mkdir(parents=True)
        (folder / ".y.tmp").symlink_to(stopped.path.parent)
    assert_equal_runs(whole, one_run.resume(stopped.path, dataset=dataset))
    assert not list(stopped.path.rglob(".*"))


def test_whoever_listens_is_told_that_the_last_pass_over_all_users_begins(dataset, tmp_path):
    heard = []

    class Diary(Silent):
        def stop(self):
            heard.append("stop")

        def note(self, message):
            heard.append((message, (tmp_path / "run" / "metrics.json").exists()))

    one_run.train(config(epochs=1), tmp_path / "run", dataset=dataset, progress=Diary())
    assert heard == ["stop", ("ranking each user's validation and test item", False)]


def test_a_run_stopped_after_its_last_epoch_is_evaluated_and_no_epoch_is_announced(whole, dataset, tmp_path):
    with pytest.raises(Stopped):
        one_run.train(config(), tmp_path / "cut", dataset=dataset, progress=StopAt(4))

    class Deaf(Silent):
        def start(self, total_epochs, first_epoch):
            raise AssertionError(f"epoch {first_epoch} of {total_epochs} is announced")

    assert_equal_runs(whole, one_run.resume(tmp_path / "cut", dataset=dataset, progress=Deaf()))


def test_an_interrupt_says_how_to_go_on_and_leaves_a_run_that_does(whole, dataset, tmp_path):
    stop = StopAt(2, 2, KeyboardInterrupt)
    hint = rf"interrupted; the state after epoch 2 is saved, go on with: recbft train --resume {tmp_path / 'cut'}$"
    with pytest.raises(RunError, match=hint):
        one_run.train(config(), tmp_path / "cut", dataset=dataset, progress=stop)
    run = RunFolder.open(tmp_path / "cut")
    assert not run.is_finished and len(run.read_history()) == 2
    with pytest.raises(UserError, match=r"holds a run that stopped after epoch 2; go on with `recbft train --resume"):
        one_run.train(config(), tmp_path / "cut", dataset=dataset)
    assert_equal_runs(whole, one_run.resume(tmp_path / "cut", dataset=dataset))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda patch: torch.set_num_threads(torch.get_num_threads() + 1), r"threads \d+ \(so far \d+\)"),
        (lambda patch: patch.setattr(environment, "_kernels_in_c", lambda: "other"), r"kernels other \(so far \w+\)"),
    ],
    ids=["threads", "kernels"],
)
def test_a_run_that_goes_on_with_what_rounds_otherwise_says_and_records_it(stopped, dataset, monkeypatch, change, said):
    threads, before = torch.get_num_threads(), stopped.environment
    try:
        change(monkeypatch)
        told = rf"run goes on with {said}: its last digits will differ .*; environment\.json says so"
        with pytest.warns(UserWarning, match=told), pytest.raises(Stopped):
            one_run.resume(stopped.path, dataset=dataset, progress=StopAt(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it goes on as it did last
            run = one_run.resume(stopped.path, dataset=dataset)
    finally:
        torch.set_num_threads(threads)
    now = run.environment
    (changed,) = now.pop("changed")
    assert now == before and changed.pop("after_epoch") == 2
    ((key, (was, after)),) = changed.items()
    assert said.startswith(key) and was == before[key] and after != was


@pytest.mark.parametrize(("lam_max", "layers"), [(0.5, "1 and 2"), (100.0, None)])
def test_a_run_whose_observation_precisions_stand_at_the_cap_says_so_once(dataset, tmp_path, lam_max, layers):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        one_run.train(config(lam_max=lam_max, epochs=1), tmp_path / "run", dataset=dataset)
    said = [str(one.message) for one in told if "observation precisions" in str(one.message)]
    assert len(said) == (layers is not None)
    assert all(f"in layers {layers}," in line and f"(core.lam_max {lam_max:g})" in line for line in said)


def test_an_interrupt_within_the_first_epoch_leaves_a_run_that_goes_on(dataset, tmp_path):
    with pytest.raises(RunError, match="the state after epoch 0 is saved"):
        one_run.train(config(), tmp_path / "cut", dataset=dataset, progress=StopAt(0, 1, KeyboardInterrupt))
    assert one_run.resume(tmp_path / "cut", dataset=dataset).is_finished


def test_a_loss_that_is_not_finite_leaves_the_last_good_epoch(dataset, tmp_path):
    with pytest.raises(RunError, match=r"the loss is (nan|inf) at step \d+ \(epoch 1\)"):
        one_run.train(config("matched", learning_rate=1e38), tmp_path / "bad", dataset=dataset)
    run = RunFolder.open(tmp_path / "bad")
    assert checkpoint.load_state(run.checkpoint).epoch == 0 and not run.is_finished
    assert all(torch.isfinite(value).all() for value in checkpoint.load(run.checkpoint).model_state.values())


# Refusals --------------------------------------------------------------------------------------------


def frame_of(dataset):
    users = np.repeat(dataset.user_ids, np.diff(dataset.offsets))
    return pd.DataFrame({"user_id": users, "item_id": dataset.decode(dataset.items)})


def refused(stopped, dataset, message):
    """Resuming fails by message and changes nothing."""
    before = {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=message):
        one_run.resume(stopped.path, dataset=dataset)
    assert before == {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file()}


def test_resuming_with_changed_events_over_the_same_items_is_refused(stopped, dataset):
    frame = frame_of(dataset)
    changed = Dataset.from_frame(pd.concat([frame, frame.tail(1)], ignore_index=True), name="synthetic")
    assert changed.item_ids.tolist() == dataset.item_ids.tolist()
    refused(
        stopped, changed, r"with content \w{12}, but 'synthetic' as loaded has \w{12}; load the data it was trained on"
    )


def test_resuming_with_other_item_features_is_refused(dataset, tmp_path):
    items = pd.DataFrame({"item_id": dataset.item_ids, "size": np.arange(dataset.num_items)})
    same, other = items.iloc[::-1], items.assign(size=items["size"] ** 2)
    known = [dataset.with_features(ItemFeatures.from_frame(frame)) for frame in (items, same, other)]
    run = one_run.train(load_run_config(model="pop"), tmp_path / "run", dataset=known[0])
    assert one_run.resume(run.path, dataset=known[1]).is_finished
    for changed, has in ((dataset, "has none"), (known[2], r"has features \w{12}")):
        with pytest.raises(UserError, match=rf"trained with item features \w{{12}}, and 'synthetic' as loaded {has}"):
            one_run.resume(run.path, dataset=changed)


def test_resuming_a_changed_config_is_refused(stopped, dataset):
    """Here alone the two records of a run's settings are held against each other."""
    whole = stopped.config_file.read_text()
    stopped.config_file.write_text(whole.replace("epochs: 4", "epochs: 40"))
    said = r"config.yaml was changed since the run was begun: training.epochs is 40 and was 4; restore the file \(prot"
    refused(stopped, dataset, said)
    load_trained(stopped.path)  # how it was to go on is nothing to its model
    stopped.config_file.write_text(whole.replace("n_heads: 2", "n_heads: 1"))
    with pytest.raises(UserError, match=r"backbone\.n_heads is 1 and was 2"):
        load_trained(stopped.path)
    stopped.config_file.write_text(whole.partition("  patience:")[0])
    refused(stopped, dataset, r"config.yaml lacks training.patience, with which the run was begun, and may be cut off")


@pytest.fixture(scope="module")
def others(dataset, tmp_path_factory):
    """A run of another seed, and one of other data of equal sizes and ids under the same name."""
    folder, frame = tmp_path_factory.mktemp("others"), frame_of(dataset)
    swapped = Dataset.from_frame(frame.assign(item_id=frame["item_id"].to_numpy()[::-1]), name="synthetic")
    assert (swapped.num_users, swapped.num_items) == (dataset.num_users, dataset.num_items)
    return {
        "seed": one_run.train(config(seed=1, epochs=1), folder / "seed", dataset=dataset),
        "data": one_run.train(config(), folder / "data", dataset=swapped),
    }


@pytest.mark.parametrize("other", ["seed", "data"])
def test_the_checkpoint_of_another_run_is_refused(stopped, dataset, others, other):
    shutil.rmtree(stopped.checkpoint)
    shutil.copytree(others[other].checkpoint, stopped.checkpoint)
    said = (
        r"checkpoint is of another run \(seed \d, data set 'synthetic' with content \w{12}\) than .*protocol.json; put"
    )
    refused(stopped, dataset, said)
    with pytest.raises(UserError, match=said):
        load_trained(stopped.path)


@pytest.mark.parametrize("other", ["seed", "data"])
def test_the_protocol_or_the_metrics_of_another_run_are_refused(whole, others, other, tmp_path):
    run = RunFolder.open(shutil.copytree(whole.path, tmp_path / "run"))
    shutil.copy(others[other].metrics_file, run.metrics_file)
    with pytest.raises(UserError, match=r"metrics\.json is of another run than protocol\.json; put its own file back"):
        TrainedRun.read(run.path)
    shutil.copy(whole.metrics_file, run.metrics_file)
    assert run.metrics == whole.metrics and load_trained(run.path)
    shutil.copy(others[other].protocol_file, run.protocol_file)
    with pytest.raises(UserError, match=r"of another run|was changed since the run was begun: seed is 0 and was 1"):
        load_trained(run.path)


def test_resuming_in_another_precision_is_refused(stopped, dataset):
    torch.set_default_dtype(torch.float64)
    try:
        refused(stopped, dataset, r"was trained in torch.float32, and this process works in torch.float64; go on after")
    finally:
        torch.set_default_dtype(torch.float32)
    assert one_run.resume(stopped.path, dataset=dataset).is_finished


def test_resuming_a_model_that_another_commit_built_otherwise_is_refused(stopped, dataset, monkeypatch):
    monkeypatch.setattr(Backbone, "_initialise", lambda self, seed: self.register_buffer("later", torch.zeros(2)))
    refused(
        stopped, dataset, r"holds another model than .* \(Missing key.*\"later\".*go on with the recbft that began it"
    )


def test_resuming_without_the_state_that_was_saved_is_refused(stopped, dataset):
    (stopped.checkpoint / "state.json").unlink()
    refused(stopped, dataset, r"state\.json is gone, and what was trained with it; restore it, or train with")
    shutil.rmtree(stopped.checkpoint)
    refused(stopped, dataset, "checkpoint is gone, and what was trained with it; restore it, or train with")


def test_nothing_is_left_where_a_run_cannot_begin(tmp_path, dataset):
    short = pd.DataFrame({"user_id": [1, 1, 1, 2, 2, 2], "item_id": [1, 2, 3, 3, 2, 1]})
    for chosen, data, message in (
        (config(dataset="no-such-data"), None, "no-such-data"),
        (config(dataset=str(tmp_path / "missing.parquet")), None, "missing.parquet"),
        (config(), Dataset.from_frame(short), "has nothing to learn from: no user has 4 events"),
        (config(layer="original"), dataset, "backbone.layer is original, but arm 'bft' needs pre_norm"),
        (config(device="cuda:7"), dataset, "device is 'cuda:7', but PyTorch sees"),
    ):
        with pytest.raises(UserError, match=message):
            one_run.train(chosen, tmp_path / "runs" / "a", dataset=data)
        assert os.listdir(tmp_path) == []


def test_a_folder_that_is_taken_is_refused_before_the_data_are_read(whole):
    before = whole.metrics_file.read_bytes()
    with pytest.raises(UserError, match="run holds a finished run; name another folder"):
        one_run.train(config(dataset="no-such-data"), whole.path)
    assert whole.metrics_file.read_bytes() == before


# The caller's process --------------------------------------------------------------------------------


def test_a_run_on_the_cpu_leaves_the_random_state_of_gpus_alone(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("it belongs to the caller"))
    guarded = {"mixer": "regime", "controllers": {"guardian": {}}}
    one_run.train(config(epochs=1, **guarded), tmp_path / "a", dataset=dataset)


def test_the_caller_s_random_state_threads_and_determinism_are_left_as_they_were(dataset, tmp_path):
    threads = torch.get_num_threads()
    torch.manual_seed(42)
    np.random.seed(42)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    chosen = config(threads=threads + 1, deterministic=True, epochs=2)
    with pytest.raises(RunError):
        one_run.train(chosen, tmp_path / "a", dataset=dataset, progress=StopAt(1, error=KeyboardInterrupt))
    one_run.resume(tmp_path / "a", dataset=dataset)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


NOTHING_LEARNED = {"recency_decay": False, "core": {"initial": "uniform", "process_noise": False}}


@pytest.mark.parametrize(
    ("arm", "more", "said"),
    [
        ("matched", {}, ["training.warmup_steps"]),
        ("matched", {"recency_decay": True}, []),
        ("bft", {}, []),
        # Precision is ramped in also where it has no parameters.
        ("bft", {**NOTHING_LEARNED, "precision_lr_multiplier": 3}, ["training.precision_lr_multiplier"]),
    ],
)
def test_settings_of_precision_are_said_to_have_no_effect_where_there_is_none(dataset, tmp_path, arm, more, said):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        one_run.train(config(arm, epochs=1, **more), tmp_path / "run", dataset=dataset)
    why = "has no effect: this model has neither precision nor recency to learn"
    assert [str(warning.message) for warning in heard] == [f"{key} {why}" for key in said]


def test_a_caller_who_only_warns_of_what_is_not_deterministic_still_only_warns(dataset, tmp_path):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        one_run.train(config(epochs=1), tmp_path / "a", dataset=dataset)
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["x/../../../ours", "/etc", "two\nlines", "\x1b[31mred\x00"])
def test_the_run_s_name_is_that_of_one_folder_whatever_a_file_calls_its_data(name, tmp_path):
    assert one_run.run_name(config("matched", seed=7), "ml-1m") == "sasrec-matched-ml-1m-seed7"
    assert one_run.run_name(config("matched+recency"), "a") == "sasrec-matched+recency-a-seed0"
    made = one_run.run_name(config("matched", seed=7), name)
    assert (tmp_path / made).parent == tmp_path and Path(made).name == made and made.isprintable()

"""Seeds trained together become what each becomes alone, to 1e-5, whatever stops them on the way."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from recbft.datasets.synth import SyntheticConfig, generate
from recbft.errors import RunError, UserError
from recbft.runs import checkpoint
from recbft.runs.folder import RunFolder
from recbft.training import many_seeds, one_run, process_settings
from recbft.training.many_seeds import train_seeds
from recbft.training.progress import Silent
from recbft.training.run_config import load_run_config
from tests.training.conftest import StopAt, Stopped, config

SEEDS = (0, 1, 5)
# Softmax does not see what is added to all keys, so the gradient of their bias is rounding alone, which Adam scales to
# full steps: it wanders, and no result depends on it.
IDLE = "mixer.key.bias"
# In float32 the precision parameters, whose steps are 100 times as long, amplify rounding likewise; what is compared
# there is what comes of it. In float64 everything is.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def in_float64():
    with float64():
        yield


def together(base, folder, dataset, seeds=SEEDS, **options):
    configs = [replace(base, seed=seed) for seed in seeds]
    return train_seeds(configs, [folder / f"seed{seed}" for seed in seeds], dataset=dataset, **options)


def alone(base, folder, dataset, seeds=SEEDS):
    return [one_run.train(replace(base, seed=seed), folder / f"seed{seed}", dataset=dataset) for seed in seeds]


@pytest.fixture(scope="module")
def apart(dataset, tmp_path_factory):
    """The runs of ``config()`` in float64, trained alone; nobody changes them."""
    with float64():
        return alone(config(), tmp_path_factory.mktemp("apart"), dataset)


def with_each(monkeypatch, change):
    """Change each run of a group when it has begun."""

    def begin(config, *arguments, **options):
        made = one_run.begin(config, *arguments, **options)
        change(made)
        return made

    monkeypatch.setattr(many_seeds, "begin", begin)


def assert_close_runs(found, expected):
    """Losses, weights and running means to rounding; ranks, epochs, and where the random numbers stand exactly."""
    tolerance = TOLERANCE[torch.get_default_dtype()]
    history, other = (pd.DataFrame(run.read_history()) for run in (found, expected))
    np.testing.assert_allclose(history["loss"], other["loss"], rtol=tolerance)
    last, last_other = checkpoint.load(found.checkpoint), checkpoint.load(expected.checkpoint)
    assert torch.equal(last.rng_state["cpu"], last_other.rng_state["cpu"])
    assert {**vars(last.state), "best_metric": 0} == {**vars(last_other.state), "best_metric": 0}
    best, best_other = checkpoint.load_best(found.checkpoint), checkpoint.load_best(expected.checkpoint)
    for weights, weights_other in ((last.model_state, last_other.model_state), (best, best_other)):
        assert set(weights) == set(weights_other)
        for name, value in weights_other.items():
            if not name.endswith(IDLE) and not (value.dtype == torch.float32 and "precision" in name):
                torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance, msg=name)
    pd.testing.assert_frame_equal(pd.read_parquet(found.per_user_file), pd.read_parquet(expected.per_user_file))
    metrics, metrics_other = (
        {name: value for name, value in run.metrics.items() if name != "training_seconds"} for run in (found, expected)
    )
    fitted, fitted_other = metrics.pop("probability"), metrics_other.pop("probability")
    assert all(fitted[name] == pytest.approx(fitted_other[name], rel=1e-2, abs=1e-3) for name in fitted_other)
    shown, shown_other = metrics.pop("exposure"), metrics_other.pop("exposure")  # of items that all but tie
    assert all(shown[name] == pytest.approx(shown_other[name], rel=1e-2) for name in shown_other)
    assert metrics == metrics_other and found.protocol == expected.protocol


# Equality --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"arm": "published", "attention_dropout": 0.0},
        {"arm": "matched", "recency_decay": True, "clip_norm": 0.5, "weight_decay": 0.01, "optimizer": "adamw"},
        {"model": "bert4rec", "arm": "bft", "samples": "windows", "max_length": 4, "loss": "ce_unseen"},
        {"estimator": "reml_naive", "initial": "count", "jacobian": "exact", "jacobian_detach": True},
        {"estimator": "sandwich", "jacobian": "running_mean", "process_noise": False, "read_out": "shrinkage"},
        {"estimator": "delta", "propagation": "discount", "initial": "uniform", "lam_max": 2.0},
        {"estimator": "design_effect", "propagation": "decay", "initial": "empirical_bayes"},
        {"prior_scale": "per_layer", "update": "residual", "jacobian": "off", "dropout": 0.0},
        {"prior_variance": "running", "linear_init": "xavier", "read_out": "temperature"},
        {"kriging": "per_dimension", "update": "fixed", "samples": "prefixes", "batch_size": 60},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_seeds_trained_together_equal_seeds_trained_alone(settings, dataset, tmp_path, in_float64):
    base, seeds = config(**settings, epochs=3), (0, 5)
    for found, expected in zip(
        together(base, tmp_path / "together", dataset, seeds),
        alone(base, tmp_path / "alone", dataset, seeds),
        strict=True,
    ):
        assert_close_runs(found, expected)


def test_in_single_precision_losses_and_weights_agree_to_1e_5_and_all_ranks(whole, dataset, tmp_path):
    found = together(config(), tmp_path, dataset, (0, 1))
    assert_close_runs(found[0], whole)


@pytest.mark.parametrize("tokens", [1, 100_000])
def test_how_seeds_are_spread_over_stacks_changes_nothing(tokens, apart, dataset, tmp_path, monkeypatch, in_float64):
    monkeypatch.setattr(many_seeds, "STACK_TOKENS", tokens)
    for one, other in zip(together(config(), tmp_path, dataset), apart, strict=True):
        assert_close_runs(one, other)


def test_two_threads_give_what_one_gives_bit_for_bit(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(many_seeds, "STACK_TOKENS", 1)
    one, two = (together(config(threads=threads, epochs=2), tmp_path / str(threads), dataset) for threads in (1, 2))
    for run, other in zip(one, two, strict=True):
        weights, others = (checkpoint.load(each.checkpoint).model_state for each in (run, other))
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def close_at_once(monkeypatch, number):
    """Have runs closed so as they are on a GPU."""
    group = many_seeds._Group
    monkeypatch.setattr(many_seeds, "_Group", lambda sessions, workers, closing: group(sessions, workers, number))


def test_runs_that_are_closed_at_once_are_those_closed_in_turn_bit_for_bit(dataset, tmp_path, monkeypatch):
    base, seeds = config(patience=1, epochs=6, learning_rate=0.01), range(4)
    expected = together(base, tmp_path / "in turn", dataset, seeds)
    close_at_once(monkeypatch, 3)
    for run, other in zip(together(base, tmp_path / "at once", dataset, seeds), expected, strict=True):
        assert run.metrics.keys() == other.metrics.keys()
        assert all(run.metrics[name] == other.metrics[name] for name in run.metrics if name != "training_seconds")
        weights, others = (checkpoint.load(each.checkpoint).model_state for each in (run, other))
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert [row["loss"] for row in run.read_history()] == [row["loss"] for row in other.read_history()]


def test_runs_are_validated_at_once_but_for_the_first_of_all(dataset, tmp_path, monkeypatch):
    close_at_once(monkeypatch, 4)
    meet = {epoch: threading.Barrier(number, timeout=60) for epoch, number in ((1, 3), (2, 4))}  # nobody passes alone
    others, was_alone = threading.Event(), []

    def meeting(made):
        def validate(own=made.validate):
            if (made.state.epoch, made.config.seed) == (1, 0):
                was_alone.append(not others.wait(0.5))
            else:
                others.set()
                meet[made.state.epoch].wait()
            return own()

        made.validate = validate

    with_each(monkeypatch, meeting)
    together(config(epochs=2), tmp_path, dataset, range(4))
    assert was_alone == [True]


def test_on_a_gpu_one_stack_at_a_time_is_trained_and_some_of_its_runs_are_closed_at_once():
    assert many_seeds._threads_on(torch.device("cuda")) == (1, many_seeds.CLOSING_ON_GPU)
    assert many_seeds._threads_on(torch.device("cpu")) == (1, 1)


def test_nothing_is_closed_once_a_group_has_been_stopped():
    group = many_seeds._Group([], workers=1, closing=1)
    group.stop.set()
    group._close_epoch(SimpleNamespace(), {})  # which has nothing to validate or save


@pytest.mark.parametrize("seed", [0, 1])
def test_closed_at_once_a_failed_run_leaves_the_others_and_anything_else_ends_them(
    seed, dataset, tmp_path, monkeypatch
):
    close_at_once(monkeypatch, 3)
    failure = [RunError("no room")]

    def failing(row, best):
        raise failure[0]

    with_each(monkeypatch, lambda made: made.config.seed == seed and setattr(made, "keep", failing))
    with pytest.raises(RunError, match=f"the run of seed {seed} failed: no room"):
        together(config(epochs=2), tmp_path / "failed", dataset, range(4))
    finished = [RunFolder.open(tmp_path / f"failed/seed{n}").is_finished for n in range(4)]
    assert finished == [n != seed for n in range(4)]
    failure[0] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        together(config(epochs=2), tmp_path / "broken", dataset, range(4))
    assert not any(RunFolder.open(tmp_path / f"broken/seed{n}").is_finished for n in range(4))


def test_threads_work_on_the_gpu_that_is_the_run_s(monkeypatch):
    quiet = SimpleNamespace(start=lambda *_: None, stop=lambda: None)
    asked = SimpleNamespace(training=SimpleNamespace(epochs=1))
    run = SimpleNamespace(
        device=torch.device("cuda"), config=asked, state=SimpleNamespace(epoch=0), progress=quiet,
        make_resumable=lambda: None,
    )  # fmt: skip
    current = threading.local()
    current.gpu, seen = 1, []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "gpu", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(current, "gpu", gpu))
    group = many_seeds._Group([run], workers=1, closing=2)
    stack = SimpleNamespace(sessions=[run, run], train_epoch=lambda is_stopped: [{}, {}])
    monkeypatch.setattr(group, "has_closed", True)

    def note(*run_and_row):
        assert process_settings._thread.works  # for the run whose turn it is
        seen.append(torch.cuda.current_device())

    def rounds(pool):
        pool.submit(note).result()
        pool.submit(group._epoch, stack).result()

    monkeypatch.setattr(group, "_close_epoch", note)
    monkeypatch.setattr(group, "_rounds", rounds)
    group.finish()
    assert seen == [1, 1, 1]


def test_a_seed_that_stops_early_leaves_the_others_training(dataset, tmp_path, in_float64):
    base = config(patience=1, epochs=30, learning_rate=0.01)
    found, expected = together(base, tmp_path / "together", dataset), alone(base, tmp_path / "alone", dataset)
    epochs = [run.metrics["epochs"] for run in found]
    assert len(set(epochs)) > 1 and max(epochs) < 30
    for one, other in zip(found, expected, strict=True):
        assert_close_runs(one, other)


# Folders ---------------------------------------------------------------------------------------------


def test_a_folder_says_which_seeds_were_trained_together_and_is_otherwise_that_of_any_run(whole, dataset, tmp_path):
    for run in together(config(epochs=1), tmp_path, dataset):
        environment = json.loads(run.environment_file.read_text())
        assert environment.pop("trained_together") == list(SEEDS)
        assert environment == whole.environment
        assert {path.name for path in run.path.iterdir()} == {path.name for path in whole.path.iterdir()}


def test_the_caller_s_threads_and_random_state_are_left_as_they_were(dataset, tmp_path):
    before = torch.get_rng_state()
    together(config(threads=2, epochs=1), tmp_path, dataset)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == 1


def test_finished_runs_are_kept_and_only_the_rest_is_trained(dataset, tmp_path):
    (first,) = together(config(epochs=1), tmp_path, dataset, [1])
    written = first.metrics_file.stat().st_mtime_ns
    runs = together(config(epochs=1), tmp_path, dataset)
    assert first.metrics_file.stat().st_mtime_ns == written and [run.is_finished for run in runs] == [True] * 3


def test_runs_that_were_stopped_go_on_together_as_if_they_had_not_been(apart, dataset, tmp_path, in_float64):
    epoch = 2
    listeners = [Silent(), StopAt(epoch), Silent()]
    with pytest.raises(Stopped):
        together(config(), tmp_path / "together", dataset, progresses=listeners)
    saved = [checkpoint.load_state(tmp_path / f"together/seed{seed}/checkpoint").epoch for seed in SEEDS]
    assert set(saved) <= {epoch - 1, epoch} and epoch in saved
    found = together(config(), tmp_path / "together", dataset)
    for one, other in zip(found, apart, strict=True):
        assert_close_runs(one, other)


def test_a_run_that_was_stopped_together_with_others_can_go_on_alone(apart, dataset, tmp_path, in_float64):
    with pytest.raises(Stopped):
        together(config(), tmp_path / "together", dataset, progresses=[StopAt(2), Silent(), Silent()])
    found = one_run.resume(tmp_path / "together" / "seed0", dataset=dataset)
    assert_close_runs(found, apart[0])


def test_a_run_whose_loss_is_not_finite_fails_alone(apart, dataset, tmp_path, monkeypatch, in_float64):
    def spoil(made):
        if made.config.seed == 1:
            made.model.item_embedding.weight.data[3:9] = float("nan")

    with_each(monkeypatch, spoil)
    message = r"the run of seed 1 failed: the loss is nan at step 1 \(epoch 1\), which is not saved"
    with pytest.raises(RunError, match=message):
        together(config(), tmp_path / "together", dataset)
    for seed, expected in ((0, apart[0]), (5, apart[2])):
        assert_close_runs(RunFolder.open(tmp_path / f"together/seed{seed}"), expected)
    failed = RunFolder.open(tmp_path / "together/seed1")
    assert not failed.is_finished and checkpoint.load_state(failed.checkpoint).epoch == 0


@pytest.mark.parametrize(("broken", "said"), [((1, 5), "; so did 1 other run"), ((0, 1, 5), "; so did 2 other runs")])
def test_a_group_says_how_many_of_its_runs_failed(broken, said, dataset, tmp_path, monkeypatch):
    def spoil(made):
        if made.config.seed in broken:
            made.model.item_embedding.weight.data.fill_(float("nan"))

    with_each(monkeypatch, spoil)
    with pytest.raises(RunError, match=rf"set clip_norm{said}$"):
        together(config(epochs=1), tmp_path, dataset)


# What cannot be trained together ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arm": "published"}, "several seeds cannot be trained together with dropout of attention weights; train the"),
        ({"model": "hstu"}, "several seeds cannot be trained together with mixer PointwiseAttention"),
        ({"arm": "matched", "loss": "bce"}, r"several seeds cannot be trained together with loss 'bce', which draws"),
        ({"output_projection": True}, "several seeds cannot be trained together with output_projection under a prec"),
        ({"update": "gate"}, "several seeds cannot be trained together with parameter blocks.0.update.weight"),
        ({"initial": "table"}, "several seeds cannot be trained together with parameter item_precision.table"),
        (
            {"autocast": "bf16"},
            "training.autocast has no effect on seeds that are trained together, whose products are",
        ),
        ({"cuda_graphs": True}, "training.cuda_graphs has no effect on seeds that are trained together, whose kernels"),
        ({"controllers": {"ema": {}}}, "controllers.ema steers one run, and these are trained together; leave it out"),
    ],
)
def test_what_cannot_be_stacked_is_refused_before_a_folder_is_made(settings, message, dataset, tmp_path):
    with pytest.raises(UserError, match=message):
        together(config(**settings), tmp_path / "none", dataset)
    assert not (tmp_path / "none").exists()


def test_a_model_without_training_is_refused(dataset, tmp_path):
    with pytest.raises(UserError, match="a model of kind Popularity is not trained; train its seeds one by one"):
        together(load_run_config(model="pop", device="cpu"), tmp_path, dataset)


def test_configs_that_differ_in_more_than_the_seed_are_refused(dataset, tmp_path):
    configs = [config(seed=0), config(seed=1, learning_rate=0.5)]
    with pytest.raises(UserError, match="seeds 0 and 1 differ in more than the seed; train them one by one"):
        train_seeds(configs, [tmp_path / "a", tmp_path / "b"], dataset=dataset)
    with pytest.raises(UserError, match="seed 1 is given twice; give each once"):
        together(config(), tmp_path, dataset, [1, 1])
    with pytest.raises(UserError, match="there are no runs to train; give at least one seed"):
        train_seeds([], [], dataset=dataset)


def test_a_folder_with_another_run_is_refused(dataset, tmp_path):
    together(config(epochs=1), tmp_path, dataset, [1])
    message = r"seed1 holds a run with training\.epochs 1, and 2 is asked for; give another folder, or remove that"
    with pytest.raises(UserError, match=message):
        together(config(epochs=2), tmp_path, dataset)
    with pytest.raises(UserError, match=r"seed1 holds a run with seed 1, and 2 is asked for"):
        train_seeds([config(epochs=1, seed=2)], [tmp_path / "seed1"], dataset=dataset)
    assert not (tmp_path / "seed0").exists()


def test_runs_go_on_with_their_data_wherever_they_lie_and_with_no_others(tmp_path):
    places = [tmp_path / name for name in ("events.parquet", "moved.parquet", "other.parquet")]
    for place, seed in zip(places, (1, 1, 2), strict=True):
        generate(SyntheticConfig(num_users=50, num_items=60, mean_length=7, seed=seed)).events.to_parquet(place)
    events, moved, other = (config(dataset=str(place), epochs=3) for place in places)
    whole = together(events, tmp_path / "whole", None, (0, 1))
    with pytest.raises(Stopped):
        together(events, tmp_path / "cut", None, (0, 1), progresses=[Silent(), StopAt(2)])
    for run, apart in zip(together(moved, tmp_path / "cut", None, (0, 1)), whole, strict=True):
        assert_close_runs(run, apart)
    with pytest.raises(UserError, match=r"seed0 holds a run on data with content .* and 'other' as loaded has"):
        together(other, tmp_path / "cut", None, (0, 1))

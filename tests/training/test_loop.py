"""The loop itself, on real models, with the keeping and the validating done by the test."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch

from recbft.datasets.batches import TrainingBatches
from recbft.errors import RunError
from recbft.models import CoreConfig
from recbft.models.sasrec import SASRecConfig, sasrec
from recbft.runs.checkpoint import TrainState
from recbft.training.controllers import Controllers
from recbft.training.loop import fit
from recbft.training.optimiser import make_optimizer
from recbft.training.progress import Silent
from recbft.training.run_config import TrainingConfig

V = 15


def new_state():
    return TrainState(epoch=0, step=0, seed=0, dataset="d", content_hash="c", vocabulary_hash="v", config_hash="f")


def batches(num_users=12, batch_size=4, seed=0, uneven=False):
    items = np.random.default_rng(seed).integers(1, V + 1, num_users * 6)
    start = np.arange(num_users) * 6
    stop = start + 6 - (np.arange(num_users) % 4 if uneven else 0)
    return TrainingBatches(items, start, stop, max_length=5, batch_size=batch_size, seed=seed)


def build(core=True, **settings):
    config = SASRecConfig(hidden_size=8, max_length=5, dropout=0.2, **settings)
    return sasrec(config, CoreConfig() if core else None, torch.arange(V + 1))


class Recorder(Silent):
    def __init__(self):
        self.calls, self.rows, self.batches = [], [], []

    def start(self, total_epochs, first_epoch):
        self.calls.append(("start", total_epochs, first_epoch))

    def batch(self, done, total, loss, tokens):
        self.batches.append((done, total, loss, tokens))

    def epoch(self, row):
        self.calls.append(("epoch", row["epoch"]))
        self.rows.append(row)

    def note(self, message):
        self.calls.append(("note", message))

    def stop(self):
        self.calls.append(("stop",))


def train(
    model,
    metrics=None,
    *,
    state=None,
    optimizer=None,
    progress=None,
    data=None,
    controllers=None,
    kept=None,
    **settings,
):
    """Fit with a given sequence of validation metrics; returns what was kept."""
    config = TrainingConfig(**{"epochs": 3, "learning_rate": 1e-2, **settings})
    state = new_state() if state is None else state
    values = iter(metrics if metrics is not None else np.linspace(0.1, 0.9, 1000))
    kept = [] if kept is None else kept
    fit(
        model,
        make_optimizer(model, config) if optimizer is None else optimizer,
        batches() if data is None else data,
        config,
        state,
        validate=lambda: {"ndcg@10": next(values), "mrr": 0.5},
        keep=lambda row, best: kept.append((row, best)),
        progress=Silent() if progress is None else progress,
        controllers=Controllers(controllers or {}),
    )
    return state, kept


# A loss that is not finite ---------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_it():
    model = build()
    with torch.no_grad():
        model.item_embedding.weight[3] = float("nan")
    state, progress = new_state(), Recorder()
    state.epoch, state.step = 4, 20
    optimizer = make_optimizer(model, TrainingConfig())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        RunError,
        match=r"the loss is nan at step 21 \(epoch 5\), which is not saved: lower learning_rate \(0.001\) or set",
    ):
        train(model, state=state, epochs=9, learning_rate=1e-3, optimizer=optimizer, progress=progress)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0, equal_nan=True, msg=name)
    assert not optimizer.state and (state.epoch, state.step) == (4, 20)
    assert progress.calls == [("start", 9, 5), ("stop",)]


def test_an_infinite_loss_is_not_finite_either(monkeypatch):
    model = build()
    loss = model.loss
    monkeypatch.setattr(model, "loss", lambda batch: loss(batch) * float("inf"))
    with pytest.raises(RunError, match=r"the loss is inf at step 1 \(epoch 1\)"):
        train(model)


# Epochs, early stopping, validation -------------------------------------------------------------------


def test_training_ends_after_the_last_epoch_and_the_best_epochs_are_kept_as_such():
    state, kept = train(build(), [0.2, 0.1, 0.3, 0.3, 0.25], epochs=5)
    assert [row["epoch"] for row, _ in kept] == [1, 2, 3, 4, 5]
    assert [best for _, best in kept] == [True, False, True, False, False]
    assert (state.best_metric, state.best_epoch, state.bad_epochs) == (0.3, 3, 2)
    assert state.epoch == 5 and state.step == 5 * 3


def test_every_epoch_has_an_order_of_its_own(monkeypatch):
    data, asked = batches(), []
    epoch = data.epoch
    monkeypatch.setattr(data, "epoch", lambda number: asked.append(number) or epoch(number))
    train(build(), data=data)
    assert asked == [0, 1, 2]


def test_training_stops_when_validation_has_not_improved_for_as_long_as_the_patience():
    state, kept = train(build(), [0.1, 0.5, 0.4, 0.5, 0.3, 0.9], epochs=50, patience=3)
    assert len(kept) == 5 and state.best_epoch == 2 and state.bad_epochs == 3


@pytest.mark.parametrize(("patience", "times"), [(1, "1 validation"), (2, "2 validations")])
def test_why_a_run_stopped_early_is_told(patience, times):
    progress = Recorder()
    train(build(), [0.1, 0.5, 0.4, 0.3], epochs=50, patience=patience, eval_every=2, progress=progress)
    why = f"stopped after epoch {2 * (2 + patience)}: ndcg@10 has not risen for {times}, the best was epoch 4"
    assert progress.calls[-2:] == [("note", why), ("stop",)]


def test_nothing_is_told_of_a_run_whose_patience_ends_with_its_last_epoch():
    progress = Recorder()
    train(build(), [0.5, 0.4], epochs=2, patience=1, progress=progress)
    assert progress.calls == [("start", 2, 1), ("epoch", 1), ("epoch", 2), ("stop",)]


def test_a_first_validation_of_zero_is_an_improvement_on_none():
    state, kept = train(build(), [0.0, 0.0], epochs=50, patience=1)
    assert [best for _, best in kept] == [True, False] and state.best_epoch == 1


def test_a_run_that_has_stopped_early_does_not_go_on_when_asked_again():
    state, _ = train(build(), [0.5, 0.4], epochs=50, patience=1)
    assert train(build(), state=state, epochs=50, patience=1)[1] == []


def test_validation_comes_every_so_many_epochs_and_after_the_last():
    _, kept = train(build(), epochs=5, eval_every=2)
    assert ["valid_ndcg@10" in row for row, _ in kept] == [False, True, False, True, True]
    assert [best for _, best in kept] == [False, True, False, True, True]


def test_the_metric_that_judges_is_the_configured_one():
    state, _ = train(build(), [0.1, 0.2, 0.3], valid_metric="mrr")
    assert state.best_metric == 0.5 and state.best_epoch == 1


# The row, the progress, the warm-up --------------------------------------------------------------------


@pytest.mark.parametrize("uneven", [False, True])
def test_the_row_s_loss_is_the_mean_over_all_training_positions(uneven):
    model = build(core=False, recency_decay=False)
    reference = copy.deepcopy(model)
    model.dropout.p = reference.dropout.p = 0.0
    for block in (*model.blocks, *reference.blocks):
        block.dropout.p = 0.0
    progress = Recorder()
    data = batches(batch_size=5, uneven=uneven)
    _, ((row, _),) = train(model, epochs=1, learning_rate=1e-12, data=data, progress=progress)
    (whole,) = batches(batch_size=12, uneven=uneven).epoch(0)
    assert row["loss"] == pytest.approx(reference.loss(whole).item(), rel=1e-5)
    assert progress.batches[-1][3] == data.num_targets == (60 - 18 * uneven)
    assert row["seconds"] > 0 and row["tokens_per_second"] > 0


def test_an_epoch_trains_with_dropout_whatever_mode_the_model_was_left_in():
    trained = []
    for mode in (True, False):
        model = build().train(mode)
        torch.manual_seed(0)
        train(model, epochs=1)
        assert model.training
        trained.append(model.state_dict())
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def test_progress_hears_of_every_batch_and_epoch_in_order():
    progress = Recorder()
    _, kept = train(build(), epochs=2, progress=progress, data=batches(num_users=10, batch_size=4))
    assert progress.calls == [("start", 2, 1), ("epoch", 1), ("epoch", 2), ("stop",)]
    assert [call[:2] for call in progress.batches] == [(1, 3), (2, 3), (3, 3)] * 2
    assert [call[3] for call in progress.batches] == [20, 40, 50] * 2
    assert progress.batches[2][2] == progress.rows[0]["loss"] and progress.rows == [row for row, _ in kept]


def test_precision_is_ramped_in_over_the_warm_up_steps():
    model, ramps = build(), []

    class Watch(Silent):
        def batch(self, done, total, loss, tokens):
            ramps.append(float(model.ramp))

    train(model, epochs=3, warmup_steps=4, progress=Watch())  # 3 steps per epoch
    assert ramps == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    ramps.clear()
    train(model, epochs=1, warmup_steps=0, progress=Watch())
    assert ramps == [1.0] * 3


def test_a_gradient_is_clipped_to_the_asked_norm():
    # A clipped plain-SGD step shows the norm; Adam would hide it.
    model = build(core=False, recency_decay=False)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(model, epochs=1, clip_norm=1e-3, optimizer=optimizer, data=batches(num_users=4))
    change = torch.cat([(p.detach() - before[name]).flatten() for name, p in model.named_parameters()])
    assert change.norm().item() == pytest.approx(1e-3, rel=1e-2)


class Diary:
    """A controller that writes down when it is asked, and halves the learning rate from step to step."""

    def __init__(self):
        self.lines = []

    def on_epoch_start(self, moment):
        self.lines.append(f"epoch {moment.epoch}")

    def on_batch(self, batch):
        self.lines.append("batch")
        return batch

    def lr_factor(self, moment):
        self.lines.append(f"rate {moment.step} of {moment.total_steps}, {moment.epoch} of {moment.total_epochs}")
        return 0.5**moment.step

    def after_step(self, moment, loss):
        assert loss > 0
        self.lines.append(f"after {moment.step}")


def test_controllers_are_asked_in_order_and_their_rate_is_the_one_of_the_step():
    model, diary, values = build(core=False, recency_decay=False), Diary(), []
    model.item_embedding.weight.register_post_accumulate_grad_hook(
        lambda weight: values.append((weight.detach().clone(), weight.grad.clone()))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(model, epochs=2, optimizer=optimizer, data=batches(num_users=8, batch_size=4), controllers={"diary": diary})
    expected, step = [], 0
    for epoch in range(2):
        expected.append(f"epoch {epoch}")
        for _ in range(2):
            expected += ["batch", f"rate {step} of 4, {epoch} of 2", f"after {step + 1}"]
            step += 1
    assert diary.lines == expected
    values.append((model.item_embedding.weight.detach(), None))
    for step, ((before, grad), (after, _)) in enumerate(pairwise(values)):
        torch.testing.assert_close(after, before - 0.5 * 0.5**step * grad)


def test_a_gradient_that_is_not_finite_is_told_before_its_weights_are_kept():
    model, kept = build(), []
    model.item_embedding.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(RunError, match=r"item_embedding\.weight is not finite after step 1 \(epoch 1\), which is not"):
        train(model, data=batches(num_users=4), eval_every=3, kept=kept)
    assert kept == []

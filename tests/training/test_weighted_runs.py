"""Weights of events in training: the same objective alone, in shares, as a graph and beside other seeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from recbft.core import count_quantiles
from recbft.datasets.side_by_side import lay_side_by_side
from recbft.errors import UserError
from recbft.models.stacked import Stacked
from recbft.runs import checkpoint
from recbft.training import one_run
from recbft.training.build import build_model, training_batches
from recbft.training.bundle import load_trained
from recbft.training.graphs import cut, pad, padded_loss
from recbft.training.loop import targets_of
from recbft.training.process_team import share_of
from tests.training.conftest import assert_equal_runs, config

STILL = {"dropout": 0.0, "batch_size": 12}  # nothing is drawn
models = pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])


@pytest.fixture(scope="module")
def weighted(dataset):
    drawn = np.random.default_rng(0).choice([0, 0.25, 1, 5], size=dataset.num_events)
    return replace(dataset, weights=drawn)


def made(dataset, model="sasrec", **settings):
    asked = config("bft", model, **{**STILL, **settings})
    module = build_model(asked, dataset).double().train()
    module.set_ramp(1.0)
    module.refresh()
    return module, next(training_batches(asked, dataset).epoch(0))


def gradients(module, loss):
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@models
def test_a_batch_has_the_mean_loss_of_its_targets_by_weight(model, weighted):
    module, batch = made(weighted, model)
    learns = batch.target.flatten().nonzero()[:, 0]
    assert len(set(batch.weight.flatten()[learns].tolist())) > 1
    loss, total = module.loss(batch).item(), 0.0
    for at in learns.tolist():
        alone = torch.zeros_like(batch.target).flatten()
        alone[at] = batch.target.flatten()[at]
        own = batch._replace(target=alone.view_as(batch.target), weight=None)
        total += module.loss(own).item() * float(batch.weight.flatten()[at])
    assert loss == pytest.approx(total / batch.learned_weight)
    learned = targets_of(batch)
    assert (learned.number, learned.weight) == (len(learns), batch.learned_weight)


@models
def test_shares_of_several_processes_and_a_padded_graph_have_the_gradient_of_the_batch(model, weighted):
    module, batch = made(weighted, model)
    whole = gradients(module, module.loss(batch))
    parts = [share_of(batch, rank, 3) for rank in range(3)]
    assert sum(weight for _, weight in parts) == pytest.approx(1)
    shared = [gradients(module, module.loss(share) * weight) for share, weight in parts]
    shape, numbers = pad(batch, module.max_length)
    graphed = gradients(module, padded_loss(module, cut(numbers, shape)))
    assert shape.weights and numbers.dtype == torch.int64
    for name, gradient in whole.items():
        torch.testing.assert_close(sum(each.get(name, 0) for each in shared), gradient, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(graphed[name], gradient, rtol=1e-6, atol=1e-9)


def test_seeds_together_have_the_loss_of_each_alone(weighted):
    pairs = [made(weighted, seed=seed) for seed in (0, 1)]
    alone = [module.loss(batch).item() for module, batch in pairs]
    stack = Stacked([module for module, _ in pairs], [torch.Generator() for _ in pairs])
    stack.body.train()
    stack.set_ramp(1.0)
    stack.refresh()
    assert stack.losses(lay_side_by_side([batch for _, batch in pairs])).tolist() == pytest.approx(alone)


@pytest.mark.parametrize("model", ["sasrec", "bert4rec"])
def test_a_run_whose_weights_are_all_one_is_that_without_any(model, dataset, tmp_path):
    asked = config("bft", model, epochs=2)
    plain = one_run.train(asked, tmp_path / "plain", dataset=dataset)
    ones = one_run.train(asked, tmp_path / "ones", dataset=replace(dataset, weights=np.ones(dataset.num_events)))
    best = [checkpoint.load_best(run.checkpoint) for run in (plain, ones)]
    assert all(best[1][name].equal(tensor) for name, tensor in best[0].items())
    assert plain.metrics["test"] == ones.metrics["test"]
    assert plain.identity != ones.identity and plain.protocol["content_hash"] != ones.protocol["content_hash"]


def test_a_weighted_run_trains_resumes_and_is_loaded_with_the_precision_it_began_with(weighted, dataset, tmp_path):
    asked = config("bft", epochs=2)
    run = one_run.train(asked, tmp_path / "run", dataset=weighted)
    assert_equal_runs(one_run.train(asked, tmp_path / "again", dataset=weighted), run)
    trained = load_trained(run.path)
    expected = count_quantiles(torch.from_numpy(weighted.training_weights))
    torch.testing.assert_close(trained.model.item_precision.base.double(), expected, rtol=1e-6, atol=1e-7)
    assert trained.counts.tolist() == dataset.training_counts.tolist(), "what is popular is counted in events"
    other = one_run.train(asked, tmp_path / "plain", dataset=dataset)
    assert run.metrics["test"] != other.metrics["test"]


def test_events_of_weight_0_teach_nothing(dataset):
    """Whatever their items are as targets: only what they are in histories moves the weights."""
    weights = np.ones(dataset.num_events)
    weights[::3] = 0
    module, batch = made(replace(dataset, weights=weights), samples="windows")
    plain = next(training_batches(config("bft", **STILL, samples="windows"), dataset).epoch(0))
    left_out = (plain.target > 0) & (batch.target == 0)
    assert left_out.any() and batch.items.equal(plain.items)
    without = plain._replace(target=plain.target * ~left_out)
    assert module.loss(batch).item() == pytest.approx(module.loss(without).item())


def test_weights_of_nothing_but_0_are_refused(dataset):
    with pytest.raises(UserError, match="every event that trains has weight 0; give some a weight above 0"):
        training_batches(config(), replace(dataset, weights=np.zeros(dataset.num_events)))

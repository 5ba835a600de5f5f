"""torch.func's grad and vmap take every model, and give the gradients that each seed has by itself."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from recbft.mixers import MIXERS
from recbft.models import MODELS
from recbft.training import build
from recbft.training.run_config import load_run_config

MADE = [
    (model, arm, mixer)
    for model, spec in MODELS.items()
    if spec.trainable
    for arm in ("published", "matched", "bft")
    for mixer in (spec.mixers if arm == "bft" else spec.mixers[:1])
] + [("sasrec", arm, "experts") for arm in ("matched", "bft")]
SMALL = {"hidden_size": 8, "max_length": 8, "dropout": 0.0, "batch_size": 4, "device": "cpu"}


class Loss(nn.Module):
    """A model whose forward is its loss, in float64."""

    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model).double().train()
        self.model.set_ramp(1.0)
        self.model.refresh()

    def forward(self, batch):
        torch.manual_seed(0)  # of negatives
        return self.model.loss(batch)

    def backward_gradients(self, batch):
        """By autograd and the fast paths."""
        model = copy.deepcopy(self)
        model(batch).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def models_of(dataset, model, arm, mixer, **core):
    """Two seeds of a model, and a batch."""
    own = {} if mixer is None else {"mixer": mixer}
    if mixer == "experts":  # which take no place of a mixer
        own = {"moe": {"experts": 4, "gate_noise": False}}
    if arm == "bft":  # kept factors of the Jacobian would be those of one seed
        without = mixer in MIXERS and MIXERS[mixer].precision == "none"
        own["core"] = {"jacobian": "exact"} | ({"update": "residual"} if without else {}) | core
    config = load_run_config(model=model, arm=arm, **SMALL, **own)
    batch = next(iter(build.training_batches(config, dataset).epoch(0)))
    return [Loss(build.build_model(replace(config, seed=seed), dataset)) for seed in (0, 1)], batch


def stacked_gradients(losses, batch):
    """By vmap over the seeds, on the parameters of both stacked and the buffers of the first."""
    parameters, _ = stack_module_state(losses)

    def loss(own):
        return functional_call(losses[0], own, (batch,))

    return vmap(grad(loss), randomness="same")(parameters)


@pytest.mark.parametrize(("model", "arm", "mixer"), MADE, ids=lambda value: str(value))
def test_the_gradients_of_seeds_stacked_by_vmap_are_those_of_each(model, arm, mixer, dataset):
    losses, batch = models_of(dataset, model, arm, mixer)
    found = stacked_gradients(losses, batch)
    for seed, alone in enumerate(losses):
        for name, expected in alone.backward_gradients(batch).items():
            torch.testing.assert_close(found[name][seed], expected, rtol=1e-6, atol=1e-9, msg=name)


class States(nn.Module):
    """A model whose forward is the states of its users, in evaluation."""

    def __init__(self, model):
        super().__init__()
        self.model = model.eval()

    def forward(self, batch):
        return self.model.user_states(batch).state


@pytest.mark.parametrize(("model", "arm", "mixer"), MADE, ids=lambda value: str(value))
def test_an_ensemble_stacked_with_its_buffers_gives_the_states_of_each(model, arm, mixer, dataset):
    losses, batch = models_of(dataset, model, arm, mixer)
    with torch.no_grad():
        for alone in losses:  # so that running means differ
            alone(batch)
        members = [States(alone.model) for alone in losses]
        stacked = vmap(lambda *own: functional_call(members[0], own, (batch,)))(*stack_module_state(members))
        for found, member in zip(stacked, members, strict=True):
            torch.testing.assert_close(found, member(batch), rtol=1e-6, atol=1e-9)


def test_an_ensemble_has_one_warm_up(dataset):
    losses, batch = models_of(dataset, "sasrec", "bft", None)
    losses[1].model.set_ramp(0.5)
    with pytest.raises(ValueError, match=r"ramps from 0\.5 to 1; set the same ramp in all"):
        vmap(lambda *own: functional_call(losses[0], own, (batch,)))(*stack_module_state(losses))


def test_a_low_rank_jacobian_is_the_exact_one_of_the_weights_given(dataset):
    (exact, batch), (low_rank, _) = (
        models_of(dataset, "sasrec", "bft", None, jacobian=jacobian) for jacobian in ("exact", "low_rank")
    )
    expected, found = stacked_gradients(exact, batch), stacked_gradients(low_rank, batch)
    for name, of_parameter in expected.items():
        torch.testing.assert_close(found[name], of_parameter, msg=name)


def test_running_means_are_left_as_they_stand(dataset):
    losses, batch = models_of(dataset, "sasrec", "bft", "regime")
    before = {name: buffer.clone() for name, buffer in losses[0].named_buffers()}
    stacked_gradients(losses, batch)
    for name, buffer in losses[0].named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, msg=name)

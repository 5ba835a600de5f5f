from __future__ import annotations

import pytest
import torch

from recbft.errors import UserError
from recbft.models import CoreConfig
from recbft.models.layers import Mixing
from recbft.models.sasrec import SASRecConfig, sasrec
from recbft.training.optimiser import clip_gradients, make_optimizer, warmup_ramp
from recbft.training.run_config import TrainingConfig


def build(core, **settings):
    counts = torch.tensor([0, 3, 1, 2, 5])
    return sasrec(SASRecConfig(hidden_size=8, max_length=5, **settings), core, counts)


def names_of(model, group):
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name_of[id(parameter)] for parameter in group["params"]}


@pytest.mark.parametrize(
    ("core", "expected"),
    [
        (
            CoreConfig(prior_scale="per_layer", initial="hybrid"),
            {
                "blocks.0.mixer.decay_logit",
                "blocks.1.mixer.decay_logit",
                "blocks.0.precision.noise_logits",
                "blocks.1.precision.noise_logits",
                "blocks.0.precision.log_kappa",
                "blocks.1.precision.log_kappa",
                "item_precision.range",
                *(f"item_precision.read.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")),
            },
        ),
        (
            CoreConfig(initial="table", process_noise=False),
            {"blocks.0.mixer.decay_logit", "blocks.1.mixer.decay_logit", "item_precision.table"},
        ),
    ],
)
def test_the_precision_parameters_are_a_group_of_their_own_at_a_higher_rate_without_weight_decay(core, expected):
    model = build(core)
    config = TrainingConfig(learning_rate=1e-3, weight_decay=0.1, precision_lr_multiplier=50.0)
    backbone, precision = make_optimizer(model, config).param_groups
    assert names_of(model, precision) == expected
    assert names_of(model, backbone) | expected == {name for name, _ in model.named_parameters()}
    assert (backbone["lr"], backbone["weight_decay"]) == (1e-3, 0.1)
    assert (precision["lr"], precision["weight_decay"]) == (pytest.approx(0.05), 0.0)
    assert backbone["betas"] == precision["betas"] == (0.9, 0.999)


def test_adamw_decays_weights_apart_from_the_gradient():
    moved = {}
    for kind in ("adam", "adamw"):
        model = build(None, recency_decay=False)
        before = model.item_embedding.weight.detach().clone()
        optimizer = make_optimizer(model, TrainingConfig(learning_rate=0.1, weight_decay=0.5, optimizer=kind))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moved[kind] = model.item_embedding.weight.detach() - before
    torch.testing.assert_close(moved["adamw"], -0.05 * before)
    assert moved["adam"].abs().max() > 0.09, "a step of Adam is as long as the rate, however small the gradient"
    with pytest.raises(UserError, match="optimizer adamw has no effect with weight_decay 0"):
        TrainingConfig(optimizer="adamw")


def test_recency_decay_alone_is_learned_at_the_precision_rate_too():
    _, group = make_optimizer(build(None), TrainingConfig()).param_groups
    assert group["lr"] == pytest.approx(0.1) and len(group["params"]) == 2


def test_a_plain_model_has_one_group():
    (group,) = make_optimizer(build(None, recency_decay=False), TrainingConfig(learning_rate=0.5)).param_groups
    assert group["lr"] == 0.5


class Dynamic(torch.nn.Module):
    """A weight of each kind."""

    def __init__(self):
        super().__init__()
        self.weight, self.precision, self.decay = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))

    def optimiser_groups(self):
        return {"weight": "backbone", "precision": "precision", "decay": "dynamics"}


def test_stochastic_dynamics_take_half_the_rate_no_momentum_and_no_weight_decay():
    model = Dynamic()
    config = TrainingConfig(learning_rate=0.01, weight_decay=0.3, precision_lr_multiplier=5.0)
    *others, group = make_optimizer(model, config).param_groups
    assert [names_of(model, one) for one in (*others, group)] == [{"weight"}, {"precision"}, {"decay"}]
    found = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "clip_norm")}
    assert found == {"lr": 0.005, "betas": (0.0, 0.999), "eps": 1e-7, "weight_decay": 0.0, "clip_norm": 1e-4}
    assert [one["eps"] for one in others] == [1e-8] * 2 and not any(one.get("clip_norm") for one in others)


@pytest.mark.parametrize(
    ("mixer", "learned"),
    [
        ("sc_rfa", {"raw_process", "raw_key_noise", "raw_query_noise", "raw_dof", "raw_temperature"}),
        ("decayed_rope", {"decay.raw"}),
    ],
)
def test_what_a_mixer_learns_of_its_dynamics_and_of_its_evidence_is_in_their_groups(mixer, learned):
    model = sasrec(
        SASRecConfig(hidden_size=8, max_length=5, n_layers=1, recency_decay=mixer != "sc_rfa"),
        CoreConfig(),
        torch.arange(6),
        mixing=Mixing(mixer),
    )
    *others, dynamics = make_optimizer(model, TrainingConfig()).param_groups
    assert names_of(model, dynamics) == {f"blocks.0.mixer.sde.{name}" for name in learned}
    evidence = {"blocks.0.mixer.precision.log_scale"} if mixer == "sc_rfa" else set()
    assert evidence <= names_of(model, others[1])


@pytest.mark.parametrize(
    ("clip_norm", "norms"), [(None, (10.0, 10.0, 1e-4)), (1.0, (0.5**0.5, 0.5**0.5, 1e-5 / 2**0.5))]
)
def test_the_gradient_of_stochastic_dynamics_is_clipped_by_itself_and_then_all_together(clip_norm, norms):
    model = Dynamic()
    optimizer = make_optimizer(model, TrainingConfig())
    for parameter in model.parameters():
        parameter.grad = torch.tensor([6.0, 8.0])
    clip_gradients(model, optimizer, clip_norm)
    found = [parameter.grad.norm().item() for parameter in model.parameters()]
    assert found == pytest.approx(norms, rel=1e-4)


def test_the_warm_up_is_linear_from_nothing_to_all():
    assert [warmup_ramp(step, 4) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert warmup_ramp(0, 0) == 1.0

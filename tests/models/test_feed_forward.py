"""The mixture of experts against its sums written out, its gates and penalty, and what it may know of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recbft.core import Belief, SequenceContext, gelu_slope, kalman_update_ref, predict_precision_ref, process_noise
from recbft.errors import UserError
from recbft.mixers import SoftmaxAttention
from recbft.mixers.interface import take_penalties
from recbft.models import CoreConfig
from recbft.models.block import Block
from recbft.models.feed_forward import FuzzyMoE, FuzzyMoEConfig
from recbft.models.precision_channel import LayerPrecision

D, INNER, E, R = 6, 10, 4, 3


def real(tokens):
    return torch.tensor(tokens, dtype=torch.bool)


def moe(seed=0, **settings):
    torch.manual_seed(seed)
    model = FuzzyMoE(
        D, INNER, FuzzyMoEConfig(**{"experts": E, "gate_regimes": R, "gate_width": 5, **settings})
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return model.eval()


def drawn(seed=0, B=2, T=5):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixture_by_hand(model, x, gates):
    total, slope = torch.zeros_like(x), torch.zeros_like(x)
    for e, (inner, outer) in enumerate(zip(model.inner, model.outer, strict=True)):
        a = inner(x)
        total = total + gates[..., e, None] * outer(F.gelu(a))
        slope = slope + gates[..., e, None] * (gelu_slope(a) @ (outer.weight.T * inner.weight))
    return total, slope


@pytest.mark.parametrize("top_k", [2, 3, 4])
def test_each_token_gets_the_mixture_of_the_experts_it_is_sent_to(top_k):
    model, x = moe(experts_per_token=top_k), drawn()
    probability = torch.softmax(model.memberships(x) @ model.route.weight.T / 0.5, dim=-1)
    gates = torch.zeros_like(probability)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            best = sorted(range(E), key=lambda e: -probability[b, t, e])[:top_k]
            gates[b, t, best] = probability[b, t, best] / probability[b, t, best].sum()
    torch.testing.assert_close(model.gates(model.memberships(x)), gates)
    found = model(x, real([[True] * 5] * 2), with_jacobian=True)
    for one, two in zip(found, mixture_by_hand(model, x, gates), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_the_jacobian_is_the_diagonal_of_autograd_s_where_gates_are_fixed():
    model, x = moe(), drawn(T=1, B=1)
    with torch.no_grad():
        model.route.weight.zero_()
        model.route.weight[:2] = 0.1  # the first two experts alike, whatever the memberships
        model.memberships.log_width.zero_()
    found = model(x, real([[True]]), with_jacobian=True)

    def output(vector):
        return mixture_by_hand(model, vector, model.gates(model.memberships(x))[0, 0].detach())[0]

    jacobian = torch.autograd.functional.jacobian(output, x[0, 0])
    torch.testing.assert_close(found.jacobian[0, 0], jacobian.diagonal())
    weights = [expert.weight for expert in model.outer]  # constants of the slope, as in a plain layer
    assert not any(torch.autograd.grad(found.jacobian.sum(), weights, allow_unused=True))


@pytest.mark.parametrize("tracked", [False, True])
def test_a_layer_with_experts_adds_their_mixture_and_predicts_through_its_slope(tracked):
    core = CoreConfig(jacobian="exact", jacobian_in_evaluation="exact")
    precision = LayerPrecision(core, hidden_size=D, head_width=D // 2) if tracked else None
    mixer = SoftmaxAttention(D, 2, estimator="reml" if tracked else None)
    shape = {"hidden_size": D, "inner_size": INNER, "dropout": 0.0, "norm_eps": 1e-8}
    block = Block(mixer, precision, **shape, moe=moe()).double().eval()
    context = SequenceContext(torch.tensor([[0] * 5, [1] * 3 + [-1] * 2]), torch.tensor([[0, 1, 2, 3, 4]] * 2))
    before = Belief(drawn(), torch.full((2, 5, D), 3.0).double())
    found = block(before, context, 1.0)
    observed = mixer(block.norm_mixer(before.mean), before.precision if tracked else None, context)
    updated = kalman_update_ref(before, *observed)[0] if tracked else Belief(before.mean + observed.innovation, 3.0)
    predicted = block.moe(block.norm_ffn(updated.mean), context.valid, with_jacobian=True)
    torch.testing.assert_close(found.mean, updated.mean + predicted.output)
    expected = before.precision
    if tracked:
        noise = process_noise(precision.noise_logits, 1.0)
        expected = predict_precision_ref(updated.precision, predicted.jacobian, noise)
    torch.testing.assert_close(found.precision, expected)


def test_the_penalty_is_left_in_training_alone_and_pulls_on_the_gates():
    model, x, where = (
        moe(gate_noise=False, load_balance=0.3),
        drawn(),
        real([[True] * 5, [True, True, False, False, False]]),
    )
    model(x, where)
    assert take_penalties(model) is None
    model.train()(x, where)
    penalty = take_penalties(model)
    gates = model.gates(model.memberships(x)) * where[..., None]
    load = gates.sum(dim=(0, 1)) / 7
    torch.testing.assert_close(penalty, 0.3 * (load - 1 / E).square().mean())
    penalty.backward()
    assert model.route.weight.grad.any() and model.memberships.centres.grad.any()


def test_noise_is_drawn_in_training_alone_and_sends_tokens_in_proportion():
    model, x, where = moe(), drawn(T=1, B=1), real([[True]])
    object.__setattr__(model.config, "experts_per_token", 1)  # refused, but it shows where each token is sent first
    assert torch.equal(model(x, where).output, model(x, where).output)
    state = torch.get_rng_state()
    model(x, where)
    assert torch.equal(torch.get_rng_state(), state), "evaluation draws nothing"
    model.train()
    torch.manual_seed(0)
    mu = model.memberships(x).expand(1, 20000, R)
    sent = (model.gates(mu) > 0).double().mean(dim=1)[0]
    expected = torch.softmax(model.route(mu[0, 0]), dim=-1)  # the Gumbel maximum
    torch.testing.assert_close(sent, expected, atol=0.015, rtol=0)


def test_gradients_are_those_of_the_function_and_every_parameter_gets_one():
    model, x, where = moe(), drawn(T=3).requires_grad_(), real([[True] * 3, [True, False, False]])
    assert torch.autograd.gradcheck(lambda x: tuple(model(x, where, with_jacobian=True)), (x,), atol=1e-6)
    model.train()(drawn(T=60), real([[True] * 60] * 2)).output.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all() and parameter.grad.any(), name


def test_a_step_with_experts_in_half_precision_is_nearly_the_step():
    model, x, where = moe(experts_per_token=E).float(), drawn().float(), real([[True] * 5] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x, where, with_jacobian=True)
    for near, whole in zip(half, model(x, where, with_jacobian=True), strict=True):
        assert near.dtype == torch.float32 and float(((near - whole).norm() / whole.norm()).detach()) < 0.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token is 5, but there are 4 experts; take at most 4"),
        ({"experts": 4, "experts_per_token": 1}, "experts_per_token is 1; give a whole number >= 2"),
        ({"experts": 1}, "experts is 1; give a whole number >= 2"),
        ({"experts_per_token": 3}, "experts_per_token has no effect without experts"),
        ({"load_balance": 0.5}, "load_balance has no effect without experts"),
        ({"experts": 4, "gate_regimes": 1}, "gate_regimes is 1; give a whole number >= 2"),
        ({"experts": 4, "gate_regimes": 5, "gate_width": 4}, "gate_width is 4; give a whole number >= 5"),
        ({"experts": 4, "load_balance": -0.1}, "load_balance is -0.1; give a number >= 0"),
    ],
)
def test_experts_that_cannot_be_are_refused_with_what_to_give(settings, message):
    with pytest.raises(UserError, match=message):
        FuzzyMoEConfig(**settings)

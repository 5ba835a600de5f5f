"""Values in units of their own spread: an oracle written out here, and precision without a unit."""

from __future__ import annotations

import pytest
import torch

from recbft.mixers import MIXERS, SoftmaxAttention, pointwise
from recbft.mixers.boosted import BoostedAttention
from tests.mixers.histories import context, drawn

D, H = 8, 2
K = D // H
WHERE = context((5, 1), (4,), width=8)
SOFTMAX = ["reml", "reml_naive", "sandwich", "design_effect"]


def batches(num=3):
    return [drawn(seed, B=2, T=8, D=D) for seed in range(num)]


def make(name="attention", seed=0, **settings):
    torch.manual_seed(seed)
    mixer = MIXERS[name].kind(D, H, running=True, **settings).double().train()
    with torch.no_grad():
        for part in mixer.modules():
            if isinstance(part, torch.nn.Linear) and part.bias is not None:
                part.bias.normal_()
    return mixer


def unit_of(mixer):
    (unit,) = [part for name, part in mixer.named_modules() if name.rpartition(".")[2] == "unit"]
    return unit


def dense(mixer, x, precision, estimator):
    """Mean, variance of the mean and what it is shrunk from, for each (row, head, token, coordinate), by weights."""
    weights = mixer.attention(x, precision, WHERE)
    v = mixer.value(x).view(2, 8, H, K).transpose(1, 2)[:, :, None]  # (B, H, 1, J, K)
    a = weights[..., None]  # (B, H, T, J, 1)
    mean = (a * v).sum(dim=3)
    n = 1 / a.square().sum(dim=3)
    by = {"sandwich": a.square() / a.square().sum(dim=3, keepdim=True), "design_effect": (a > 0) / (a > 0).sum(3, True)}
    own = by.get(estimator, a)
    centre = (own * v).sum(dim=3, keepdim=True)
    return mean, n, (own * (v - centre).square()).sum(dim=3)


def by_hand(estimator, n, S, v_mean_off):
    """Precision in units of 1 / d^2, from S / d^2."""
    if estimator == "reml":
        return (n + 1) / (S + 1)
    if estimator == "design_effect":
        return n / (S + 1)
    if estimator == "reml_naive":
        return torch.where(n > 1 + 1e-6, (n - 1) / S, 100.0)
    return n / (S + v_mean_off)


@pytest.mark.parametrize("estimator", SOFTMAX)
def test_precision_is_that_of_values_over_the_root_of_the_running_mean_of_s(estimator):
    mixer = make(estimator=estimator, prior_variance=1.0)
    variance, real = torch.tensor(1.0).double(), WHERE.valid
    for number, (x, precision) in enumerate(batches()):
        with torch.no_grad():
            found = mixer(x, precision, WHERE)
            mean, n, S = dense(mixer, x, precision, estimator)
        off = 0.0
        if estimator == "sandwich":  # its centre is the mean under the weights, not under their squares
            weights = mixer.attention(x, precision, WHERE)[..., None]
            squares = weights.square() / weights.square().sum(dim=3, keepdim=True)
            v = mixer.value(x).view(2, 8, H, K).transpose(1, 2)[:, :, None]
            off = ((squares * v).sum(dim=3) - mean).square() / variance
        expected = by_hand(estimator, n, S / variance, off).clamp(max=100)
        for one, other in ((found.innovation, mean), (found.precision, expected)):
            other = other.transpose(1, 2).flatten(2)
            torch.testing.assert_close(one[real], other[real].detach(), rtol=1e-7, atol=1e-9)
        batch = S.detach().transpose(1, 2)[real].mean()
        variance = batch if number == 0 else 0.99 * variance + 0.01 * batch
        torch.testing.assert_close(unit_of(mixer).variance, variance)
    kept = unit_of(mixer).variance.clone()
    found = mixer.eval()(*batches()[0], WHERE)
    assert torch.equal(unit_of(mixer).variance, kept), "evaluation moves nothing"
    torch.testing.assert_close(found.precision, make_fixed(mixer, estimator)(*batches()[0], WHERE).precision)


def make_fixed(mixer, estimator):
    """The same layer with its values divided in its weights, and a prior of a given size."""
    plain = SoftmaxAttention(D, H, estimator=estimator, prior_variance=1.0).double().eval()
    plain.load_state_dict({name: each for name, each in mixer.state_dict().items() if not name.startswith("unit.")})
    with torch.no_grad():
        for part in (plain.value.weight, plain.value.bias):
            part /= unit_of(mixer).variance.sqrt()
    return plain


SCALED = [
    *(("attention", {"estimator": estimator}) for estimator in SOFTMAX),
    ("attention", {"estimator": "reml", "kriging": "per_dimension", "recency_decay": 0.9}),
    ("attention", {"estimator": "reml", "dropout": 0.5}),
    ("rope", {"estimator": "reml"}),
    ("regime", {"estimator": "reml", "length": 8}),
    ("spectral", {"estimator": "reml", "length": 8}),
    ("twicing", {"estimator": "reml"}),
]


@pytest.mark.parametrize("scale", [10.0, 1e-3])
@pytest.mark.parametrize(("name", "settings"), SCALED, ids=str)
def test_values_ten_times_as_large_change_no_precision(name, settings, scale):
    found = []
    for factor in (1.0, scale):
        mixer = make(name, prior_variance=1.0, **settings)
        with torch.no_grad():
            for path, part in mixer.named_modules():
                if path.rpartition(".")[2] == "value":
                    part.weight *= factor
                    part.bias *= factor
        torch.manual_seed(5)
        with torch.no_grad():
            seen = [mixer(x, precision, WHERE) for x, precision in batches()]
            seen.append(mixer.eval()(*batches()[0], WHERE))
        found.append(seen[1:])  # of the first batch no spread is known
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.precision, one.precision, rtol=1e-6, atol=1e-9)
        if name != "spectral":
            torch.testing.assert_close(other.innovation, scale * one.innovation, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [10.0, 1e-2])
def test_pointwise_values_of_another_size_change_no_precision(scale, monkeypatch):
    moments, found = pointwise.silu_moments, []
    for factor in (1.0, scale):
        monkeypatch.setattr(
            pointwise,
            "silu_moments",
            lambda q, k, v, *given, by=factor, **named: moments(q, k, by * v, *given, **named),
        )
        mixer = make("pointwise", estimator="sandwich", length=8)
        with torch.no_grad():
            found.append([mixer(x, precision, WHERE) for x, precision in batches()][1:])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.precision, one.precision, rtol=1e-6, atol=1e-9)
    assert unit_of(mixer).updates == 3


def test_of_boosted_rounds_the_one_that_is_estimated_keeps_its_spread():
    mixer = BoostedAttention(D, H, estimator="reml", running=True).double()
    assert [part.unit is not None for part in mixer.rounds] == [False, True]
    assert SoftmaxAttention(D, H, running=True).unit is None, "a plain layer keeps nothing"


def test_values_that_are_all_alike_are_no_nan():
    mixer = make(estimator="reml", prior_variance=1.0)
    alone = context((1,), (1,))
    for _ in range(2):
        x = torch.randn(2, 1, D, dtype=torch.float64, requires_grad=True)
        seen = mixer(x, torch.ones_like(x), alone)
        (seen.innovation.sum() + seen.precision.sum()).backward()
        assert seen.innovation.isfinite().all() and x.grad.isfinite().all()
    torch.testing.assert_close(seen.precision, torch.full_like(seen.precision, 2))

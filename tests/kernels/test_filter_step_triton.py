"""Update and prediction in Triton against the analytic path in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from recbft.core import Belief, process_noise
from recbft.kernels import dispatch, filter_step
from recbft.kernels.filter_step import analytic
from recbft.kernels.filter_step import triton as kernels
from recbft.kernels.filter_step.fused import Fused

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(0, 4), (1, 1), (7, 33), (130, 48)]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(kernels, "SUMMED", 512)
    monkeypatch.setattr(kernels, "ELEMENTS", 256)


def drawn(*shape, low=-1.0, high=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)).to(DEVICE)


def values_and_gradients(function, inputs, dtype):
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    outputs = function(*leaves)
    places = (torch.arange(1, y.numel() + 1, device=DEVICE, dtype=dtype).cos().view_as(y) for y in outputs)
    loss = sum((y * place).sum() for y, place in zip(outputs, places, strict=True))
    return [x.detach().double() for x in (*outputs, *torch.autograd.grad(loss, leaves))]


def compare(function, inputs):
    """``function(path, *inputs)`` by the kernels and by the analytic path."""
    exact = values_and_gradients(lambda *x: function(analytic, *x), inputs, torch.float64)
    found, again = (
        values_and_gradients(lambda *x: function(Fused(kernels), *x), inputs, torch.float32) for _ in range(2)
    )
    for ours, same, theirs in zip(found, again, exact, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("ramp", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_update(size, ramp):
    inputs = [drawn(*size), drawn(*size, low=0.01, high=5, seed=1), drawn(*size, seed=2), drawn(*size, low=0, seed=3)]
    compare(lambda path, h, lam, e, r: path.kalman_update(Belief(h, lam), e, r, ramp=ramp), inputs)


@pytest.mark.parametrize("kept", [0, 1], ids=["mean", "precision"])
@pytest.mark.parametrize("size", SIZES)
def test_an_update_of_which_one_half_is_used(size, kept):
    inputs = [drawn(*size), drawn(*size, low=0.01, high=5, seed=1), drawn(*size, seed=2), drawn(*size, low=0, seed=3)]
    compare(lambda path, h, lam, e, r: (path.kalman_update(Belief(h, lam), e, r, ramp=0.7)[kept],), inputs)


@pytest.mark.parametrize("jacobian", ["each", "shared", "scalar"])
@pytest.mark.parametrize("noise", ["each", "scalar"])
@pytest.mark.parametrize("size", SIZES)
def test_prediction(size, noise, jacobian):
    N, D = size
    lam, Q = drawn(N, D, low=0.01, high=5), drawn(*((D,) if noise == "each" else ()), low=0, seed=2)
    J = drawn(*{"each": (N, D), "shared": (D,), "scalar": ()}[jacobian], low=-1.5, seed=1)
    bounds = {"low": 0.05, "cap": 3.0}
    if jacobian == "each":
        compare(lambda path, lam, Q, J: (path.predict_precision(lam, J, Q, **bounds),), [lam, Q, J])
    else:
        compare(lambda path, lam, Q: (path.predict_precision(lam, J.to(lam.dtype), Q, **bounds),), [lam, Q])


def by_logits(path, lam, logits, J, q_max):
    """Prediction with learned noise: by the kernels, or by the analytic path."""
    bounds = {"low": 0.05, "cap": 3.0}
    if path is analytic:
        return (analytic.predict_precision(lam, J.to(lam.dtype), process_noise(logits, q_max), **bounds),)
    return (Fused(kernels.LearnedNoise(q_max)).predict_precision(lam, J.to(lam.dtype), logits, **bounds),)


@pytest.mark.parametrize("jacobian", ["each", "shared", "scalar"])
@pytest.mark.parametrize("size", SIZES)
def test_prediction_with_learned_noise(size, jacobian):
    N, D = size
    lam, logits = drawn(N, D, low=0.01, high=5), drawn(D, low=-6, high=3, seed=2)
    J = drawn(*{"each": (N, D), "shared": (D,), "scalar": ()}[jacobian], low=-1.5, seed=1)
    if jacobian == "each":
        compare(lambda path, lam, logits, J: by_logits(path, lam, logits, J, 0.7), [lam, logits, J])
    else:
        compare(lambda path, lam, logits: by_logits(path, lam, logits, J, 0.7), [lam, logits])


@pytest.mark.parametrize("sign", [-1, 1])
def test_noise_has_all_its_digits_from_logits_far_and_near(sign):
    logits = sign * torch.tensor([0.0, 1e-9, 1e-3, 0.3, 0.69, 1.0, 3.0, 9.0, 19.9, 20.1, 40.0, 80.0])
    logits = logits.float().to(DEVICE).requires_grad_()
    lam = torch.full((3, 12), 1e-3, device=DEVICE)  # where it is what adds most to 1 / lam
    J = torch.full((), -1.0, device=DEVICE)

    def noise_of(path, logits):
        found = path.predict_precision(lam.to(logits.dtype), J.to(logits.dtype), logits, low=0.0, cap=1e9)
        return 1 / found[0].double() - 10, torch.autograd.grad((1 / found[0].double()).sum(), logits)[0]

    noise, slope = noise_of(Fused(kernels.LearnedNoise(1e4)), logits)
    wide = logits.detach().double().requires_grad_()
    expected = process_noise(wide, 1e4)
    torch.testing.assert_close(noise, expected.detach(), rtol=2e-6, atol=3e-6)
    torch.testing.assert_close(slope.double(), torch.autograd.grad(expected.sum(), wide)[0], rtol=5e-6, atol=1e-20)


def test_of_logits_too_what_is_not_a_number_stays_visible():
    lam, logits = torch.ones(2, 3, device=DEVICE), torch.zeros(3, device=DEVICE)
    logits[1] = float("nan")
    logits.requires_grad_()
    after = Fused(kernels.LearnedNoise(1.0)).predict_precision(lam, lam, logits, low=0.01, cap=9.0)
    assert after.isnan().nonzero().tolist() == [[0, 1], [1, 1]]


def test_what_has_learned_noise_goes_to_the_kernels(monkeypatch):
    lam, logits = drawn(5, 3, low=0.1).float(), drawn(3).float().requires_grad_()

    def found():
        after = filter_step.predict_by_logits(lam, lam, logits, q_max=0.7, low=0.01, cap=9.0)
        return after, torch.autograd.grad(after.sum(), logits)[0]

    plain, predict = found(), kernels.LearnedNoise.predict
    monkeypatch.setattr(dispatch, "serves_steps", lambda x: x.dtype == torch.float32)
    asked = []
    monkeypatch.setattr(kernels.LearnedNoise, "predict", lambda self, *given: asked.append(predict(self, *given)))
    for ours, theirs in zip(found(), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=3e-6)
    with torch.no_grad():  # under torch.func, noise is made by plain operations
        called = torch.func.vmap(lambda q: filter_step.predict_by_logits(lam, lam, q, q_max=0.7, low=0.01, cap=9.0))(
            logits[None]
        )
    torch.testing.assert_close(called[0], plain[0].detach(), rtol=3e-6, atol=3e-6)
    assert len(asked) == 1


def test_axes_in_front_odd_strides_and_expanded_gradients_change_nothing():
    inputs = [drawn(4, 6, 3, low=0.1, seed=seed).transpose(0, 2) for seed in range(4)]
    compare(lambda path, h, lam, e, r: path.kalman_update(Belief(h, lam), e, r, ramp=1.0), inputs)
    lam, J = (x.float().requires_grad_() for x in inputs[:2])
    Fused(kernels).predict_precision(lam, J, torch.zeros(4, device=DEVICE), low=0.01, cap=9.0).sum().backward()
    assert lam.grad.isfinite().all() and J.grad.isfinite().all()


def test_what_is_not_a_number_stays_visible():
    lam, J = torch.ones(2, 3, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    J[0, 1], lam[1, 2] = float("nan"), float("nan")
    after = Fused(kernels).predict_precision(lam, J, torch.ones(3, device=DEVICE), low=0.01, cap=9.0)
    assert after.isnan().nonzero().tolist() == [[0, 1], [1, 2]]


def test_a_step_of_training_is_the_same_with_them(monkeypatch):
    def gradients():
        inputs = [drawn(2, 5, 8, low=0.1, seed=seed).float().requires_grad_() for seed in range(4)]
        belief = filter_step.kalman_update(Belief(*inputs[:2]), *inputs[2:], ramp=0.5)
        noise = torch.full((8,), 0.1, device=DEVICE, requires_grad=True)
        after = filter_step.predict_precision(belief.precision, belief.mean, noise, low=0.01, cap=9.0)
        return torch.autograd.grad(after.sum() + belief.mean.square().sum(), [*inputs, noise])

    plain = gradients()
    monkeypatch.setattr(filter_step, "_path", lambda x, plain: Fused(kernels))
    for ours, theirs in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=3e-6)

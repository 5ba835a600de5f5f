"""Softmax and SiLU attention in C against the references in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbft.core import Readers, SequenceContext
from recbft.kernels import c_library, filter_step
from recbft.kernels.silu_moments import silu_mean, silu_moments
from recbft.kernels.softmax_moments import softmax_mean, softmax_moments, softmax_reml
from tests.packed_rows import packed
from tests.tolerances import assert_as_near_as

REASON = c_library.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PRIOR = {"prior_scale": 0.2, "prior_dof": 1.0, "cap": 20.0}


def drawn(B, H, T, K, *, seed, num_queries=None):
    """q, k, v, log precision and log decay in float64."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, H, num_queries or T, K), (B, H, T, K), (B, H, T, K), (B, T)
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    return [*inputs, torch.tensor(-0.05, dtype=torch.float64)]


def moments(impl, q, k, v, log_precision, log_decay, context):
    return softmax_moments(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl=impl)


def mean(impl, q, k, v, log_precision, log_decay, context):
    return (softmax_mean(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl=impl),)


def reml(impl, q, k, v, log_precision, log_decay, context):
    found = softmax_moments(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl="reference")
    if impl == "reference":
        return found.mean, filter_step.reml_precision(found.residual_variance, found.effective_sample_size, **PRIOR)
    impl = "composed" if impl == "torch" else impl
    return softmax_reml(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl=impl, **PRIOR)


def silu_biases(log_precision, log_decay):
    lag_bias = log_precision.flatten().cos()[-30:]  # the last of which serves longer lags
    return {"log_precision": log_precision, "log_decay": log_decay, "lag_bias": lag_bias, "length": 20}


def silu(impl, q, k, v, log_precision, log_decay, context):
    return silu_moments(q, k, v, context, **silu_biases(log_precision, log_decay), impl=impl)


def silu_alone(impl, q, k, v, log_precision, log_decay, context):
    return (silu_mean(q, k, v, context, **silu_biases(log_precision, log_decay), impl=impl),)


def with_gradients(function, impl, inputs, context, dtype):
    """Outputs, and gradients of a mixture of them, in float64."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs = function(impl, *inputs, context)
    g = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype)).sum() for x in outputs)
    return [x.detach().double() for x in (*outputs, *torch.autograd.grad(loss, inputs))]


@pytest.mark.usefixtures("scratch_full_of_nan")
@pytest.mark.parametrize("function", [moments, mean, reml, silu, silu_alone])
@pytest.mark.parametrize(("causal", "shuffled"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(("T", "K"), [(1, 1), (7, 8), (9, 5), (65, 33), (130, 16)])
def test_attention_equals_the_reference_in_values_and_gradients(T, K, shuffled, causal, function):
    order = torch.randperm(T, generator=torch.Generator().manual_seed(T)) if shuffled else None
    lengths = [[T], [T // 2, T - T // 2] if T > 1 else [1], [max(1, T - 1)], [], [1] * T]
    context = packed(lengths, T, causal=causal, order=order)
    inputs = drawn(5, 2, T, K, seed=T + K)
    exact = with_gradients(function, "reference", inputs, context, torch.float64)
    found, plain = (with_gradients(function, impl, inputs, context, torch.float32) for impl in ("c", "torch"))
    # The gradient of the decay is one number, in which most of what is summed cancels.
    assert_as_near_as(found[:-1], plain[:-1], exact[:-1], slack=2e-6)
    torch.testing.assert_close(found[-1], exact[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("function", [moments, reml, silu])
@given(
    seed=st.integers(0, 2**16),
    B=st.integers(0, 3),
    T=st.sampled_from([1, 2, 7, 15, 16, 17, 33, 64, 65, 90]),
    K=st.integers(1, 40),
    causal=st.booleans(),
    in_order=st.booleans(),
)
@settings(deadline=None, max_examples=12)
def test_any_batch_is_served_as_the_reference_serves_it(function, seed, B, T, K, causal, in_order):
    g = torch.Generator().manual_seed(seed)
    segment = torch.randint(-1, 4, (B, T), generator=g)
    segment = segment.sort(dim=1).values if in_order else segment
    position = torch.stack([torch.randperm(T, generator=g) for _ in range(B)]) if B else torch.zeros(0, T).long()
    context = SequenceContext(segment, position, causal=causal)
    inputs = drawn(B, 2, T, K, seed=seed)
    exact = with_gradients(function, "reference", inputs, context, torch.float64)
    found, plain = (with_gradients(function, impl, inputs, context, torch.float32) for impl in ("c", "torch"))
    assert_as_near_as(found[:-1], plain[:-1], exact[:-1], slack=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("function", [moments, mean, reml, silu, silu_alone])
def test_fewer_queries_than_keys_read_as_among_all(function, causal):
    whole = packed([[4, 5], [9], [2, 2]], 9, causal=causal)
    only = torch.tensor([3, 8, 17, 19])
    readers = Readers.of(only, 3, 9)
    inputs = drawn(3, 2, 9, 6, seed=3)
    all_of_them = function("reference", *inputs, whole)
    q = readers.take(inputs[0].transpose(1, 2).flatten(2)).unflatten(2, (2, 6)).transpose(1, 2)
    few = with_gradients(function, "c", [q, *inputs[1:]], readers.context(whole), torch.float32)
    for some, every in zip(few, all_of_them, strict=False):  # what follows are gradients
        rows = some.transpose(1, 2).flatten(0, 1)[readers.place]
        torch.testing.assert_close(rows, every.transpose(1, 2).flatten(0, 1)[only], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("causal", "shuffled"), [(True, False), (False, True)])
@pytest.mark.parametrize("shape", [(4, 2, 70, 70), (1, 1, 70, 70)])
@pytest.mark.parametrize("attend", [softmax_moments, softmax_mean, silu_moments, silu_mean])
def test_a_bias_per_pair_and_its_gradient(attend, shape, shuffled, causal):
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2)) if shuffled else None
    context = packed([[70], [30, 40], [5, 9, 11], []], 70, causal=causal, order=order)
    q, k, v, log_precision, log_decay = drawn(4, 2, 70, 8, seed=3)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    more = {"length": 50} if attend in (silu_moments, silu_mean) else {}

    def function(impl, q, k, v, log_precision, bias, context):
        decay = log_decay.to(q.dtype)
        biases = {"log_precision": log_precision, "bias": bias, "log_decay": decay}
        found = attend(q, k, v, context, **biases, **more, impl=impl)
        return (found,) if isinstance(found, torch.Tensor) else found

    inputs = [q, k, v, log_precision, bias]
    exact = with_gradients(function, "reference", inputs, context, torch.float64)
    found, plain = (with_gradients(function, impl, inputs, context, torch.float32) for impl in ("c", "torch"))
    assert_as_near_as(found, plain, exact, slack=2e-6)


def test_a_decay_of_each_row_and_none_at_all():
    context = packed([[5], [3, 2]], 5, causal=False)
    q, k, v, log_precision, _ = (x.float() for x in drawn(2, 2, 5, 4, seed=1))
    for bias, decay in ((None, None), (log_precision, None), (None, torch.tensor([[-0.1], [-0.9]]))):
        one, two = (moments(impl, q, k, v, bias, decay, context) for impl in ("c", "reference"))
        for found, expected in zip(one, two, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("given", [(), ("log_precision",), ("lag_bias",), ("log_decay",)])
def test_silu_moments_with_few_biases_or_none(given):
    context = packed([[20], [12, 8]], 20)
    inputs = drawn(2, 2, 20, 4, seed=1)

    def some(impl, q, k, v, log_precision, log_decay, context):
        biases = {name: x for name, x in silu_biases(log_precision, log_decay).items() if name in (*given, "length")}
        unread = 0 * (log_precision.sum() + log_decay)  # so that each has a gradient
        return (*silu_moments(q, k, v, context, **biases, impl=impl), unread)

    exact = with_gradients(some, "reference", inputs, context, torch.float64)
    found = with_gradients(some, "c", inputs, context, torch.float32)
    for one, true in zip(found, exact, strict=True):
        torch.testing.assert_close(one, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [moments, silu])
def test_odd_strides_and_expanded_gradients_change_nothing(function):
    context = packed([[6], [2, 4]], 6)
    inputs = [x.float() for x in drawn(2, 3, 6, 8, seed=5)]
    plain = [x.clone().requires_grad_() for x in inputs]
    odd = [x.clone().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs[:3]]
    odd[2] = torch.stack([inputs[2], inputs[2]], dim=-1)[..., 0].requires_grad_()  # elements two apart
    odd += [x.clone().requires_grad_() for x in inputs[3:]]
    grads = []
    for each in (plain, odd):
        outputs = function("c", *each, context)
        grads.append(torch.autograd.grad(sum(x.sum() for x in outputs), each))  # gradients of stride 0
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("function", [moments, mean, reml, silu, silu_alone])
def test_a_gradient_is_the_same_where_the_others_are_not_asked_for(function, causal):
    context = packed([[5, 4], [9]], 9, causal=causal)
    inputs = [x.float() for x in drawn(2, 2, 9, 6, seed=4)]

    def gradients(wanted):
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        outputs = function("c", *leaves, context)
        return torch.autograd.grad(sum(x.sin().sum() for x in outputs), [leaves[i] for i in wanted])

    every = gradients(range(5))
    for wanted in ((0, 1, 2), (3,), (4,)):
        assert all(torch.equal(one, every[i]) for i, one in zip(wanted, gradients(wanted), strict=True))


@pytest.mark.parametrize("function", [reml, silu])
def test_runs_and_numbers_of_threads_give_the_same_bits(function, runs_by_threads):
    context, inputs = packed([[50], [20, 30], [5] * 10, [49]], 50), drawn(4, 2, 50, 32, seed=2)
    first, *others = runs_by_threads(lambda: with_gradients(function, "c", inputs, context, torch.float32))
    assert all(torch.equal(one, two) for run in others for one, two in zip(first, run, strict=True))


def test_extreme_logits_offsets_and_precisions_stay_finite():
    context = packed([[40], [40]], 40)
    q, k, v, log_precision, log_decay = drawn(2, 2, 40, 8, seed=9)
    q, v = 300 * q, v + 10
    log_precision[:, ::3] = -1e30
    inputs = [q, k, v, log_precision, log_decay]
    exact = with_gradients(moments, "reference", inputs, context, torch.float64)
    found, plain = (with_gradients(moments, impl, inputs, context, torch.float32) for impl in ("c", "torch"))
    assert all(torch.isfinite(x).all() for x in found)
    assert_as_near_as(found[:3], plain[:3], exact[:3], slack=1e-5)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("function", [moments, silu])
def test_what_is_not_a_number_stays_visible(function, where):
    context = packed([[4]], 4)
    inputs = [x.float() for x in drawn(1, 1, 4, 3, seed=0)]
    inputs["qkv".index(where)][0, 0, 1, 2] = float("nan")
    found = function("c", *inputs, context)
    assert torch.isnan(found.mean[0, 0, 1:]).any()


def test_what_it_cannot_serve_goes_to_another_path():
    context = packed([[4]], 4)
    q, k, v, *_ = drawn(1, 1, 4, 3, seed=0)
    for call, reason in (
        ({"q": q}, "serves float32, got float64"),
        ({"dropout": 0.1}, "attention dropout is left to another path"),
    ):
        given = {"q": q.float(), **call}
        with pytest.raises(ValueError, match=f"c path declined: {reason}"):
            softmax_moments(given.pop("q"), k.float(), v.float(), context, impl="c", **given)
    for given in ((q.float(), k.float()[..., :2], v.float()), (q.float(), k.float(), v.float()[:, :, :3])):
        with pytest.raises(ValueError, match="have shape"):
            softmax_moments(*given, context, impl="c")
    with pytest.raises(ValueError, match="and the context"):
        softmax_moments(*(torch.randn(2, 1, 4, 3) for _ in range(3)), context, impl="c")

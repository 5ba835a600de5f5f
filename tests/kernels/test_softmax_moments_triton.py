"""The Triton kernels of softmax moments against the float64 reference; interpreted where there is no GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from recbft.core import SequenceContext, reml_precision_ref, softmax_mean_ref, softmax_moments_ref
from recbft.kernels.dispatch import interpreted
from recbft.kernels.softmax_moments import MOMENTS, softmax_reml
from recbft.kernels.softmax_moments import triton as path
from tests import packed_rows

pytestmark = pytest.mark.skipif(not (interpreted() or torch.cuda.is_available()), reason="needs a GPU")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 16
packed = partial(packed_rows.packed, device=DEVICE)
TOLERANCE = {"rtol": 2e-5, "atol": 1e-5}  # float32, relative to values and gradients of order one
NAMES = ("q", "k", "v", "log_precision", "log_decay", "bias")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    launch = {"OWN": TILE, "OTHER": TILE, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(path, "_tiles", lambda *_, **__: launch)
    monkeypatch.setattr(path, "SPANS_TILE", TILE)
    monkeypatch.setattr(path, "COLUMNS_TILE", TILE)
    return launch


@pytest.fixture(autouse=True)
def memory_full_of_nan(monkeypatch):
    def filled(like, *shape, dtype=torch.float32):
        return torch.full(shape, float("nan") if dtype.is_floating_point else 10**6, dtype=dtype, device=like.device)

    monkeypatch.setattr(path, "_output", filled)


def drawn(context, *, H=1, K=8, seed=0, leave_out=(), bias_shape=None, per_row=False):
    """Inputs in float64 whose numbers float16 holds exactly."""
    g = torch.Generator().manual_seed(seed)
    B, T = context.segment.shape
    named = {name: torch.randn(B, H, T, K, generator=g) for name in "qkv"}
    named["log_precision"] = torch.randn(B, T, generator=g)
    named["log_decay"] = -torch.rand((B, 1) if per_row else (), generator=g) / 8
    named["bias"] = torch.randn(bias_shape or (1, 1, T, T), generator=g)
    absent = {*leave_out, *(() if bias_shape else ("bias",))}
    return {name: None if name in absent else x.half().double().to(DEVICE) for name, x in named.items()}


def values_and_gradients(function, inputs, context, dtype, *, only=None):
    """Moments and the gradients of a fixed mixture of them; biases stay float32 where the inputs are in half."""
    bias_type = torch.float32 if dtype == torch.float16 and function is not softmax_moments_ref else dtype
    types = {"log_precision": bias_type, "log_decay": bias_type}
    given = {n: None if x is None else x.to(types.get(n, dtype)).requires_grad_() for n, x in inputs.items()}
    found = function(*(given[n] for n in "qkv"), context, dropout=0.0, **{n: given[n] for n in NAMES[3:]})
    found = found if isinstance(found, tuple) else (found,)
    g = torch.Generator().manual_seed(11)
    weights = [torch.randn(x.shape, generator=g).double().to(DEVICE) for x in found]
    chosen = range(len(found)) if only is None else only
    loss = sum((found[n].double() * weights[n]).sum() for n in chosen)
    wanted = {n: x for n, x in given.items() if x is not None}
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return [f"output {n}" for n in range(len(found))] + list(wanted), [*found, *gradients]


def check(inputs, context, *, function=path.softmax_moments, plain=softmax_moments_ref, only=None):
    names, ours = values_and_gradients(function, inputs, context, torch.float32, only=only)
    _, theirs = values_and_gradients(plain, inputs, context, torch.float64, only=only)
    for name, one, two in zip(names, ours, theirs, strict=True):
        two = torch.zeros_like(one) if two is None else two
        one = torch.zeros_like(two) if one is None else one
        scale = max(1.0, float(two.detach().abs().max())) if two.numel() else 1.0
        atol = TOLERANCE["atol"] * scale
        torch.testing.assert_close(one.double(), two.double(), rtol=2e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 2, TILE, 2 * TILE + 5])
def test_values_and_gradients_equal_the_reference_at_every_length(T, causal):
    context = packed([[T], [T // 2, (T + 1) // 2 - 1] if T > 1 else []], T, causal=causal)
    check(drawn(context, H=1 + T % 2, seed=T), context)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_squares_that_overflow_half_precision_are_no_small_variance(larger_of_numbers):
    context = packed([[5]], 5)
    q, k, v = (drawn(context)[name].half() for name in "qkv")
    v[0, 0, :, 0] = torch.tensor([0.0, 300.0, -300.0, 300.0, -300.0])
    terms = {"log_precision": None, "log_decay": None}
    S = path.softmax_moments(q, k, v, context, dropout=0.0, **terms)[1]
    precision = softmax_reml(q, k, v, context, **terms, prior_scale=0.2, prior_dof=1.0, cap=100.0, impl="triton")[1]
    assert not (S[0, 0, 1:, 0] < 255).any() and not (precision[0, 0, 1:, 0] > 0.1).any()


@pytest.mark.parametrize("leave_out", [("log_precision",), ("log_decay",), ("log_precision", "log_decay")])
def test_biases_that_are_not_given_are_not_needed(leave_out):
    context = packed([[12, 9]], 21, causal=len(leave_out) == 1)
    check(drawn(context, leave_out=leave_out), context)


@pytest.mark.parametrize(("shape", "causal"), [((2, 2), True), ((1, 1), False)])
def test_a_bias_per_pair_is_added_and_gets_its_gradient(shape, causal):
    context = packed([[20], [7, 10]], 20, causal=causal)
    check(drawn(context, H=2, bias_shape=(*shape, 20, 20), per_row=True), context)


@pytest.mark.parametrize("only", [[1], [0, 2]])
def test_moments_that_no_loss_reads_may_be_left_out(only):
    context = packed([[18]], 19)
    check(drawn(context), context, only=only)


@pytest.mark.parametrize("K", [1, 24])
def test_any_head_width_is_served(K):
    context = packed([[18]], 18)
    check(drawn(context, K=K), context)


def test_histories_may_be_interleaved_and_out_of_order():
    g = torch.Generator().manual_seed(3)
    for causal in (True, False):
        segment = torch.randint(-1, 3, (2, 37), generator=g)
        segment[1, :20] = 5  # tiles of one history, in no order
        position = torch.stack([torch.randperm(37, generator=g) for _ in range(2)])
        context = SequenceContext(segment.to(DEVICE), position.to(DEVICE), causal=causal)
        check(drawn(context, seed=4), context)


def test_odd_strides_give_the_same_bits():
    context = packed([[20, 3]], 23)
    inputs = drawn(context, H=2, K=5)
    _, plain = values_and_gradients(path.softmax_moments, inputs, context, torch.float32)
    for name in "qkv":
        B, H, T, K = inputs[name].shape
        wide = torch.full((T, 2 * B, K + 1, H), float("nan"), dtype=torch.float64, device=DEVICE)
        view = wide[:, ::2, 1:, :].permute(1, 3, 0, 2)
        inputs[name] = view.copy_(inputs[name])
    for name in ("log_precision", "log_decay"):
        inputs[name] = inputs[name][..., None].expand(*inputs[name].shape, 3)[..., 1]
    context = SequenceContext(
        torch.stack([context.segment, context.segment], dim=-1)[..., 1],
        context.position.T.contiguous().T,
    )
    _, other = values_and_gradients(path.softmax_moments, inputs, context, torch.float32)
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("nu", "cap"), [(1.0, 100.0), (2.0, 3.0)])
def test_the_reml_precision_is_that_of_the_moments(nu, cap):
    def composed(q, k, v, where, **rest):
        e, S, n = softmax_moments_ref(q, k, v, where, **rest)
        return e, reml_precision_ref(S, n, prior_scale=0.2, prior_dof=nu, cap=cap)

    def fused(q, k, v, where, **rest):
        return softmax_reml(q, k, v, where, **rest, prior_scale=0.2, prior_dof=nu, cap=cap, impl="triton")

    context = packed([[TILE + 4, 2]], TILE + 8)
    inputs = drawn(context)
    inputs["v"][:, :, 0] = inputs["v"][:, :, 1]  # residuals of 0 where there is more than one key
    exact = composed(*(inputs[n] for n in "qkv"), context, log_precision=None, log_decay=None, dropout=0.0)[1]
    assert cap == 100.0 or (exact == cap).any()
    check(inputs, context, function=fused, plain=composed)
    check(inputs, context, function=fused, plain=composed, only=[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_precision_of_padding_is_not_read(dtype, precision=float("nan")):
    context = packed([[5], [20]], TILE + 9)
    inputs = drawn(context)
    inputs["log_precision"][context.segment < 0] = precision
    names, found = values_and_gradients(path.softmax_moments, inputs, context, dtype)
    for name, x in zip(names, found, strict=True):
        assert torch.isfinite(x).all(), name


def test_two_runs_are_bitwise_equal_and_the_mean_alone_is_the_mean_of_the_moments():
    context = packed([[30, 7]], 37)
    inputs = drawn(context)
    names, one = values_and_gradients(path.softmax_moments, inputs, context, torch.float32, only=[0])
    _, two = values_and_gradients(path.softmax_moments, inputs, context, torch.float32, only=[0])
    _, mean = values_and_gradients(path.softmax_mean, inputs, context, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for name, a, b in zip(names, one, [mean[0], None, None, *mean[1:]], strict=True):
        assert name in ("output 1", "output 2") or torch.equal(a, b), name
    check(inputs, context, function=path.softmax_mean, plain=softmax_mean_ref)


@pytest.mark.parametrize(("dtype", "worst", "median"), [(torch.float32, 1e-5, 1e-6), (torch.float16, 2e-2, 2e-3)])
def test_an_offset_of_ten_deviations_does_not_spoil_the_residual_variance(dtype, worst, median):
    context = packed([[25, 20]], 45)
    inputs = drawn(context, leave_out=("log_precision", "log_decay"))
    offset = torch.where(context.segment == 0, 10.0, -30.0)[:, None, :, None]  # each history has one of its own
    inputs["v"] = (inputs["v"] + offset).to(dtype).double()
    rest = {"log_precision": None, "log_decay": None, "dropout": 0.0}
    exact = softmax_moments_ref(*(inputs[n] for n in "qkv"), context, **rest)
    found = path.softmax_moments(*(inputs[n].to(dtype) for n in "qkv"), context, **rest)
    later = context.position[0] >= 8
    relative = ((found.residual_variance - exact.residual_variance).abs() / exact.residual_variance)[:, :, later]
    assert relative.max() < worst and relative.median() < median
    assert found.mean.dtype == dtype and found.residual_variance.dtype == torch.float32


def test_half_precision_is_at_most_twice_as_wrong_as_the_plain_path_in_the_same_type():
    context = packed([[40], [9, 20]], 40)
    inputs = drawn(context, K=16, leave_out=("log_decay",), bias_shape=(1, 1, 40, 40))
    names, exact = values_and_gradients(softmax_moments_ref, inputs, context, torch.float64)
    _, plain = values_and_gradients(softmax_moments_ref, inputs, context, torch.float16)
    _, found = values_and_gradients(path.softmax_moments, inputs, context, torch.float16)
    for name, ours, theirs, truth in zip(names, found, plain, exact, strict=True):
        error, allowed = (float((x.double() - truth).square().mean().sqrt().detach()) for x in (ours, theirs))
        assert error <= 2 * allowed, f"{name}: {error:.2e} against {allowed:.2e}"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 3e-2)])
def test_a_token_of_no_precision_is_not_read(dtype, tolerance):
    context = packed([[20, 9], [5, 30]], 36)
    inputs = drawn(context, leave_out=("log_decay",))
    trusted = inputs["log_precision"].float()
    trusted[:, 3] = trusted[1, 6] = float("-inf")
    leaves = [inputs[name].to(dtype).requires_grad_() for name in "qkv"]
    found = {}
    for name, function in (("plain", softmax_moments_ref), ("triton", path.softmax_moments)):
        moments = function(*leaves, context, log_precision=trusted, log_decay=None, dropout=0.0)
        total = sum(moment.float().square().mean() for moment in moments)
        found[name] = [*(moment.detach() for moment in moments), *torch.autograd.grad(total, leaves)]
    for ours, plain in zip(found["triton"], found["plain"], strict=True):
        torch.testing.assert_close(ours.float(), plain.float(), rtol=tolerance, atol=tolerance)
    assert not found["triton"][-1][0, :, 3].any()


@pytest.mark.parametrize(
    ("q", "dropout", "reason"),
    [
        (torch.zeros(1, 1, 1, 8, dtype=torch.float64), 0.0, "serves float32, float16 and bfloat16, got float64"),
        (torch.zeros(1, 1, 1, 200), 0.0, "serves heads up to 128 wide in float32, got 200"),
        (torch.zeros(1, 1, 1, 300, dtype=torch.float16), 0.0, "serves heads up to 256 wide in float16, got 300"),
        (torch.zeros(1, 1, 1, 8), 0.1, "moments with attention dropout are served by the reference"),
        (torch.zeros(1, 1, 1, 128), 0.0, None),
    ],
)
def test_what_it_cannot_serve_is_declined_with_the_reason(q, dropout, reason):
    assert next(iter(MOMENTS)) == "triton"
    assert MOMENTS["triton"].decline(q, dropout=dropout, read_by_all=True) == reason

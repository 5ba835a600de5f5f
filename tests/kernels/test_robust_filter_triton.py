"""Robust filter attention's Triton kernels, in Triton's interpreter where there is no GPU, against the tensor form."""

from __future__ import annotations

import pytest
import torch

from recbft.core import SequenceContext
from recbft.kernels import dispatch, robust_filter
from recbft.kernels.robust_filter import Dynamics, Variant, filtered, read_clock, reference

pytest.importorskip("triton", minversion="3.3")

from recbft.kernels.robust_filter import triton as fast
from tests import packed_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, K, TILE = 2, 3, fast.OWN
SCALARS = ("decay", "process", "key noise", "query noise", "dof", "temperature")
NAMES = ("mean", "evidence", "q", "k", "v", *SCALARS, "bias")
PLAIN = Variant()
VARIANTS = [
    Variant(kernel="gaussian"),
    Variant(multiplicative=False),
    Variant(kernel="gaussian", multiplicative=False, horizon=1.5),
    Variant(rotate_values=False, horizon=0.7),
]


@pytest.fixture(autouse=True)
def memory_of_nans():
    torch.set_deterministic_debug_mode("warn")  # which fills new memory with NaN
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


def one_history(T, B=1):
    return SequenceContext(torch.zeros(B, T, dtype=torch.int64), torch.arange(T).expand(B, -1))


def packed(*, causal=True, shuffled=False):
    """Rows of 20 columns: two histories that end in different tiles, padding alone, three histories and padding."""
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5)) if shuffled else None
    at = packed_rows.packed([[14, 6], [], [1, 2, 15]], 20, order=order)
    time = torch.where(at.segment >= 0, 1_700_000_000 + 30 * at.position + at.position**2, 0)
    return SequenceContext(at.segment, at.position, time, causal=causal)


def on(device, context):
    moved = (x if x is None else x.to(device) for x in (context.segment, context.position, context.time))
    asked = context.query_time
    return SequenceContext(*moved, causal=context.causal, query_time=asked if asked is None else asked.to(device))


def drawn(B, T, seed=0):
    """q, k, v in real and imaginary parts, the scalars, a bias of keys; the second head does not decay."""
    g = torch.Generator().manual_seed(seed)
    pairs = [torch.randn(B, H, T, K, 2, generator=g, dtype=torch.float64) for _ in range(3)]
    scalars = torch.rand(6, H, generator=g, dtype=torch.float64) + 0.2
    scalars[0, 1] = 0.0
    scalars[4] *= 5
    return pairs, list(scalars), torch.randn(H, K, generator=g).double(), torch.randn(B, T, generator=g).double()


def values_and_gradients(impl, context, variant=PLAIN, *, biased=True, unit=None, seed=0, **options):
    """By name; the reference in float64, the kernels in float32 on their device."""
    device, dtype = ("cpu", torch.float64) if impl == "reference" else (DEVICE, torch.float32)
    context = on(device, context)
    B, T = context.segment.shape
    pairs, scalars, frequency, bias = drawn(B, T, seed)
    leaves = [x.to(device, dtype).requires_grad_() for x in (*pairs, *scalars, *([bias] if biased else []))]
    settings = {}
    if unit is not None:
        leaves.append(torch.tensor(unit, dtype=dtype, device=device, requires_grad=True))
        settings = {"use_time": True, "time_unit": leaves[-1]}
    value, evidence = filtered(
        *(torch.view_as_complex(x) for x in leaves[:3]),
        context,
        Dynamics(frequency.to(device, dtype), *leaves[3:9]),
        read_clock(context, dtype=dtype, **settings),
        variant,
        key_bias=leaves[9] if biased else None,
        impl=impl,
        **options,
    )
    outputs = [torch.view_as_real(value)] + ([] if evidence is None else [evidence])
    g = torch.Generator().manual_seed(4)
    loss = sum((x.cpu().double() * torch.randn(x.shape, generator=g, dtype=torch.float64)).sum() for x in outputs)
    found = [x.cpu() for x in (*outputs, *torch.autograd.grad(loss, leaves))]
    names = [name for name in NAMES if (biased or name != "bias") and (evidence is not None or name != "evidence")]
    return dict(zip(names + ["unit"] * (unit is not None), found, strict=True))


def assert_equal_to_the_reference(context, variant=PLAIN, **settings):
    fused, exact = (values_and_gradients(impl, context, variant, **settings) for impl in ("triton", "reference"))
    assert list(fused) == list(exact)
    for name, truth in exact.items():
        assert fused[name].shape == truth.shape and fused[name].dtype == torch.float32
        error, scale = (fused[name] - truth).abs().max(), truth.abs().max()
        bound = 5e-6 if dispatch.interpreted() else 2e-5  # a GPU has three products of TF32 for one of float32
        assert error <= bound * scale + bound, f"{name}: {error:.1e} of {scale:.1e}"  # sums that vanish keep rounding


@pytest.mark.parametrize("T", [1, 2, TILE, 2 * TILE + 5])
def test_the_kernels_equal_the_tensor_form_in_values_and_gradients(T):
    assert_equal_to_the_reference(one_history(T), seed=T)


@pytest.mark.parametrize("place", [0, 1], ids=["query", "key"])
def test_what_is_no_number_is_no_perfect_match(place, larger_of_numbers):
    context = one_history(TILE + 3)
    pairs, scalars, frequency, _ = drawn(1, TILE + 3)
    pairs[place][0, 1, 4, 2, 0] = float("nan")
    heads = [torch.view_as_complex(x.float()).to(DEVICE) for x in pairs]
    dynamics = Dynamics(frequency.float().to(DEVICE), *(x.float().to(DEVICE) for x in scalars))
    here = on(DEVICE, context)
    clock = read_clock(here, dtype=torch.float32)
    lost = [
        [torch.isnan(x) if x.dim() == 3 else torch.view_as_real(x).isnan().any(dim=(-2, -1)) for x in found]
        for found in (filtered(*heads, here, dynamics, clock, PLAIN, impl=impl) for impl in ("triton", "reference"))
    ]
    assert all(torch.equal(*each) for each in zip(*lost, strict=True)) and lost[0][1].any()


def test_positions_and_frequencies_may_have_any_strides(monkeypatch):
    context, draw = packed(shuffled=True), drawn
    by_column = SequenceContext(context.segment, context.position.T.contiguous().T)
    assert_equal_to_the_reference(by_column)

    def drawn_by_column(B, T, seed):
        pairs, scalars, frequency, bias = draw(B, T, seed)
        return pairs, scalars, frequency.T.contiguous().T, bias

    monkeypatch.setitem(globals(), "drawn", drawn_by_column)
    assert_equal_to_the_reference(one_history(5))


@pytest.mark.parametrize(("own", "step"), [(16, 32)])
def test_so_do_tiles_of_other_sizes(own, step, monkeypatch):
    monkeypatch.setattr(fast, "OWN", own)
    monkeypatch.setattr(fast, "STEP", step)
    assert_equal_to_the_reference(one_history(35))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_so_do_all_variants(variant):
    assert_equal_to_the_reference(one_history(TILE + 3), variant, biased=False)


def test_a_mean_without_evidence_has_the_same_gradients():
    assert_equal_to_the_reference(one_history(TILE + 3), with_evidence=False)


@pytest.mark.parametrize("layout", ["shuffled", "both ways"])
def test_rows_of_several_histories_and_padding_equal_the_tensor_form(layout):
    assert_equal_to_the_reference(packed(causal=layout != "both ways", shuffled=layout == "shuffled"))


def test_real_times_and_a_learned_unit_of_time_equal_the_tensor_form(shuffled=True):
    at = packed(shuffled=shuffled)
    later = SequenceContext(at.segment[:1], at.position[:1], at.time[:1], query_time=at.time[:1] + 40)
    assert_equal_to_the_reference(later, unit=20.0, biased=shuffled)


def test_a_short_lag_long_after_the_start_keeps_its_digits():
    time = torch.tensor([[0, 5, 2**40, 2**40 + 5]])
    context = on(DEVICE, SequenceContext(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], time))
    d = Dynamics(*(torch.tensor([x], device=DEVICE) for x in ([0.0] * K, 0.1, 0.3, 0.5, 0.2, 8.0, 1.0)))
    nothing = torch.zeros(1, 1, 4, K, dtype=torch.complex64, device=DEVICE)
    clock = read_clock(context, use_time=True, dtype=torch.float32)
    _, evidence = filtered(nothing, nothing, nothing, context, d, clock, PLAIN, impl="triton")
    lags = torch.tensor([0.0, 5.0, 2.0**40, 2.0**40], dtype=torch.float64)
    E2 = torch.exp(-0.2 * lags)
    expected = (1 / (0.3 * (1 - E2) + 0.5 * E2 + 0.2)).sum()  # precision by the last token's lags
    torch.testing.assert_close(evidence[0, 0, 3].cpu().double(), expected, rtol=1e-6, atol=0)


def test_two_runs_are_equal_bit_by_bit():
    one, two = (values_and_gradients("triton", one_history(TILE + 1)) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_dropped_weights_are_scaled_and_their_gradient_is_that_of_the_same_drop(monkeypatch):
    T, p, width = 9, 0.4, 9
    context = on(DEVICE, one_history(T))
    scalars = torch.tensor([0.1, 0.3, 0.5, 0.2, 8.0, 1.0], device=DEVICE).unsqueeze(-1).expand(-1, H)
    d = Dynamics(torch.zeros(H, width, device=DEVICE), *scalars)
    exact = Dynamics(*(x.cpu().double() for x in d))
    q, k = torch.randn(2, 1, H, T, width, dtype=torch.complex64, device=DEVICE)
    axes = torch.eye(T, dtype=torch.complex64, device=DEVICE).expand(1, H, T, T)  # the mean of which is the weights

    def run(impl, d, *inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        place = on(leaves[0].device, context)
        clock = read_clock(place, dtype=d.dof.dtype)
        torch.manual_seed(7)
        value, evidence = filtered(*leaves, place, d, clock, PLAIN, dropout=p, impl=impl)
        return [value, evidence, *torch.autograd.grad(value.abs().square().sum() + evidence.log().sum(), leaves)]

    weights = run("triton", d, q, k, axes)[0]
    monkeypatch.setattr(reference.F, "dropout", lambda weights, p: weights)
    all_kept = run("reference", exact, *(x.cpu().to(torch.complex128) for x in (q, k, axes)))[0]
    share = torch.where(all_kept == 0, 0, weights.cpu() / all_kept).real[..., None]
    kept = share > 0.5
    torch.testing.assert_close(share, kept.double() / (1 - p), rtol=1e-5, atol=1e-6)
    assert 0.4 < kept.sum() / (T * (T + 1) / 2 * H) < 0.8
    monkeypatch.setattr(reference.F, "dropout", lambda weights, p: weights * kept / (1 - p))
    v = torch.randn_like(q)
    found = run("triton", d, q, k, v)
    for one, two in zip(
        found, run("reference", exact, *(x.cpu().to(torch.complex128) for x in (q, k, v))), strict=True
    ):
        torch.testing.assert_close(one.cpu().to(two.dtype), two, rtol=1e-4, atol=1e-5)


def test_the_kernels_decline_what_they_cannot_serve():
    q = torch.zeros(1, 1, 1, 2, dtype=torch.complex64, device=DEVICE)
    assert dispatch.choose("triton", robust_filter.PATHS, q) is fast.robust_filter
    with pytest.raises(ValueError, match=r"triton path declined: needs complex64, got torch\.complex128"):
        dispatch.choose("triton", robust_filter.PATHS, q.to(torch.complex128))
    with pytest.raises(ValueError, match="triton path declined: serves up to 64 complex coordinates per head, got 65"):
        dispatch.choose("triton", robust_filter.PATHS, q[..., :1].expand(1, 1, 1, 65))

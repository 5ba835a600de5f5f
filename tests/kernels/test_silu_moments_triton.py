"""SiLU moments in Triton against the plain form in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from recbft.core import SiluMoments
from recbft.kernels.silu_moments import silu_mean, silu_moments
from recbft.kernels.silu_moments import triton as kernels
from tests import packed_rows

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 wrongly.
HALF = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
FLOAT32 = {"rtol": 2e-5, "atol": 2e-6}
N = 9
BIASES = {"rows": (2, 1, 0, 0), "heads": (2, 0, 0), "pairs": (0, 0), "all": (2, 2, 0, 0), "keys": (2, 1, 1, 0)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for table in (kernels.TILES, kernels.TILES_OF_EXACT):
        monkeypatch.setitem(table, 64, kernels.Tiles(16, 16, 4))


def packed(*rows, T, causal=True, shuffled=False):
    """Rows of histories of these lengths, padding behind; shuffled, the tokens of a row stand in any order."""
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0)) if shuffled else None
    return packed_rows.packed(rows, T, causal=causal, order=order, device=DEVICE)


def drawn(B, T, *, H=2, K=6, bias="rows", dtype=torch.float32, seed=0):
    """q, k, v, and a bias of one of the shapes above (0 stands for T) or none."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, H, T, K)] * 3 + ([] if bias is None else [tuple(n or T for n in BIASES[bias])])
    return [torch.randn(shape, generator=g).to(dtype).to(DEVICE) for shape in shapes]


def moments_and_gradients(impl, inputs, context, *, of=SiluMoments._fields):
    """The moments, and the gradients of a random sum of some of them, all in float64."""
    q, k, v, *bias = leaves = [x.detach().requires_grad_() for x in inputs]
    moments = silu_moments(q, k, v, context, length=N, bias=bias[0] if bias else None, impl=impl)
    g = torch.Generator().manual_seed(1)
    factors = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(DEVICE) for x in moments]
    total = sum(
        (getattr(moments, name).double() * factor).sum()
        for name, factor in zip(SiluMoments._fields, factors, strict=True)
        if name in of
    )
    grads = torch.autograd.grad(total, leaves, materialize_grads=True)
    names = (*SiluMoments._fields, "d_q", "d_k", "d_v", "d_bias")
    return {name: found.detach().double() for name, found in zip(names, (*moments, *grads), strict=False)}


def compare(inputs, context, of=SiluMoments._fields, **tolerance):
    ours = moments_and_gradients("triton", inputs, context, of=of)
    exact = moments_and_gradients("reference", [x.double() for x in inputs], context, of=of)
    assert ours.keys() == exact.keys()
    for name, found in ours.items():
        assert_close(name, found, exact[name], **(tolerance or FLOAT32))


def assert_close(name, found, expected, **tolerance):
    torch.testing.assert_close(found, expected, msg=lambda m: f"{name}: {m}", **tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("T", "rows"),
    [
        (1, [[1]]),
        (16, [[7, 5]]),
        (17, [[17], [4, 3], []]),
        (37, [[3, 20, 10], [37]]),
    ],
)
def test_moments_and_gradients_equal_the_plain_form(T, rows, causal):
    compare(drawn(len(rows), T, H=1, bias="pairs"), packed(*rows, T=T, causal=causal))


@pytest.mark.parametrize("bias", [None, "rows", "heads", "keys"])
def test_a_bias_may_be_shared_by_rows_heads_and_readers(bias):
    compare(drawn(2, 9, bias=bias), packed([4, 5], [8], T=9))


def test_tokens_may_stand_in_any_order():
    compare(drawn(1, 35, H=1, bias="pairs"), packed([20, 12], T=35, causal=False, shuffled=True))


def test_columns_are_found_beyond_those_that_are_looked_up_at_once():
    inputs, context = drawn(1, 150, H=1, K=3, bias=None), packed([3, 130, 10], T=150)
    with torch.no_grad():
        found = silu_moments(*inputs, context, length=N, impl="triton")
        expected = silu_moments(*(x.double() for x in inputs), context, length=N, impl="reference")
    for name, one, other in zip(SiluMoments._fields, found, expected, strict=True):
        assert_close(name, one.double(), other, **FLOAT32)


@pytest.mark.parametrize("of", [["mean"], ["square_sum", "square_second"]])
def test_gradients_of_some_moments_alone_are_theirs(of):
    compare(drawn(2, 9), packed([4, 5], [8], T=9), of)


def test_the_mean_alone_is_that_of_the_moments():
    q, k, v, bias = drawn(2, 9)
    context = packed([4, 5], [8], T=9)
    found = silu_mean(q, k, v, context, length=N, bias=bias, impl="triton")
    assert torch.equal(found, silu_moments(q, k, v, context, length=N, bias=bias, impl="triton").mean)


def test_any_strides_are_read_in_place():
    g = torch.Generator().manual_seed(0)
    joined = torch.randn(2, 18, 3, 2, 7, generator=g).to(DEVICE)  # (B, T, 3, H, K + 1)
    q, k, v = (x.transpose(1, 2) for x in joined[..., :6].unbind(2))
    k = k.transpose(2, 3).contiguous().transpose(2, 3)  # coordinates far apart
    bias = torch.randn(18, 2, 18, 1, generator=g).to(DEVICE).permute(1, 3, 2, 0)
    assert v.stride() == (18 * 42, 7, 42, 1) and k.stride(-1) == 18
    compare([q, k, v, bias], packed([10, 8], [17], T=18))


def test_the_mean_has_the_layout_and_type_of_the_values():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).half() for x in drawn(2, 5, bias=None))
    sums = silu_moments(q, k, v, packed([5], [5], T=5), length=N, impl="triton")
    assert sums.mean.stride() == v.stride()
    assert [x.dtype for x in sums] == [torch.float16, *[torch.float32] * 4]


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_errs_no_more_than_the_plain_form(dtype):
    inputs, context = drawn(1, 33, H=1, bias="pairs", dtype=dtype), packed([20, 12], T=33)
    exact = moments_and_gradients("reference", [x.double() for x in inputs], context)
    ours, plain = (moments_and_gradients(impl, inputs, context) for impl in ("triton", "reference"))
    for name in exact:
        error, usual = ((found[name] - exact[name]).norm() for found in (ours, plain))
        assert error <= 2 * usual, name


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_keeps_the_squares_of_small_weights(dtype):
    q, k, v = (x * factor for x, factor in zip(drawn(1, 17, H=1, bias=None, dtype=dtype), (0.02, 0.02, 1), strict=True))
    context = packed([17], T=17)
    found = silu_moments(q, k, v, context, length=200, impl="triton")
    exact = silu_moments(q.double(), k.double(), v.double(), context, length=200, impl="reference")
    error = (found.square_second.double() - exact.square_second).norm() / exact.square_second.norm()
    assert error < (0.002 if dtype == torch.float16 else 0.01)


def test_two_runs_are_equal_bit_for_bit():
    inputs, context = drawn(1, 34, H=1, bias="pairs"), packed([20, 13], T=34)
    one, two = (moments_and_gradients("triton", inputs, context) for _ in range(2))
    assert all(one[name].equal(two[name]) for name in one)


def test_what_it_cannot_serve_is_declined_with_the_reason():
    def serve(dtype, K):
        q, k, v = drawn(1, 2, K=K, bias=None, dtype=dtype)
        return silu_moments(q, k, v, packed([2], T=2), length=N, impl="triton")

    with pytest.raises(ValueError, match="needs float32, bfloat16 or float16, got float64"):
        serve(torch.float64, 4)
    for dtype, most in ((torch.float32, 128), (torch.float16, 128), (torch.bfloat16, 256)):
        with pytest.raises(ValueError, match=f"needs heads of at most {most} coordinates in .*, got {most + 1}"):
            serve(dtype, most + 1)

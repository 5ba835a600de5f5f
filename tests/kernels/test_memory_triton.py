"""The Bayesian layer's Triton kernels, in Triton's interpreter where there is no GPU, against the loop in float64."""

from __future__ import annotations

import pytest
import torch

from recbft.kernels import dispatch
from recbft.kernels.memory import FILTER, reference
from recbft.mixers.bayesian import filter_memory
from tests.kernels import test_memory
from tests.kernels.test_memory import filtered

pytest.importorskip("triton", minversion="3.3")

from recbft.kernels.memory import triton as fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK, K = 16, 6
KINDS = ["identity", "scalar", "diagonal"]
OUTPUTS = ("readout", "readout variance", "gain", "mean", "covariance")


@pytest.fixture(autouse=True)
def memory_of_nans(monkeypatch):
    monkeypatch.setattr(fast, "CHUNK", CHUNK)
    torch.set_deterministic_debug_mode("warn")  # which fills new memory with NaN
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


def drawn(T, *, B=1, **how):
    return {n: x if x is None else x.detach() for n, x in test_memory.drawn(T, B=B, least=0.5, **how).items()}


def packed(T):
    """Where histories begin: in one row three, in one every token one, as padding may be, in one the first column."""
    first = torch.zeros(3, T, dtype=torch.bool)
    first[:, 0] = first[1] = True
    first[0, [1, CHUNK + 2]] = True
    return first


def values_and_gradients(path, inputs, first=None, *, wanted=OUTPUTS, **options):
    """By name; the reference in float64, the kernels in float32 on their device."""
    device, dtype = ("cpu", torch.float64) if path is reference.filter_memory_ref else (DEVICE, torch.float32)
    leaves = {name: x if x is None else x.to(device, dtype).requires_grad_() for name, x in inputs.items()}
    trace = filtered(path, leaves, first if first is None else first.to(device), **options)
    found = {name: x.cpu() for name, x in zip(OUTPUTS, trace, strict=True) if name in wanted}
    g = torch.Generator().manual_seed(9)
    loss = sum((x.double() * torch.randn(x.shape, generator=g, dtype=torch.float64)).sum() for x in found.values())
    given = {name: x for name, x in leaves.items() if x is not None}
    gradients = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    filled = (torch.zeros_like(x) if one is None else one for x, one in zip(given.values(), gradients, strict=True))
    return found | dict(zip(given, (x.cpu() for x in filled), strict=True))


def assert_equal_to_the_reference(inputs, first=None, *, tolerance=5e-6, **settings):
    exact = values_and_gradients(reference.filter_memory_ref, inputs, first, **settings)
    fused, again = (values_and_gradients(fast.filter_memory, inputs, first, **settings) for _ in range(2))
    assert list(fused) == list(exact)
    for name, truth in exact.items():
        assert fused[name].shape == truth.shape and fused[name].dtype == torch.float32
        assert torch.equal(fused[name], again[name])
        error, scale = (fused[name] - truth).abs().max(), truth.abs().max()
        assert error <= tolerance * scale + 1e-6, f"{name}: {error:.1e} of {scale:.1e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, CHUNK, 2 * CHUNK + 5])
def test_the_kernels_equal_the_loop_in_values_and_gradients(T, kind):
    assert_equal_to_the_reference(drawn(T, kind=kind, seed=T, H=1))


@pytest.mark.parametrize("kind", ["identity", "diagonal"])
def test_rows_of_several_histories_equal_the_loop(kind):
    T = CHUNK + 5
    assert_equal_to_the_reference(drawn(T, B=3, H=1, kind=kind), packed(T))


def test_chunks_are_shorter_where_memories_are(least=0.011):
    inputs = drawn(19, H=1, kind="diagonal")
    inputs["transition"] = torch.where(torch.rand(1, 1, 19, K) < 0.3, least, inputs["transition"])
    assert fast.chunk_length(19, CHUNK, inputs["transition"], fast.MAX_LOG_DECAY) < CHUNK
    assert_equal_to_the_reference(inputs, tolerance=5e-5)


@pytest.mark.parametrize("wanted", OUTPUTS[1:4])
def test_each_output_alone_has_the_loops_gradient(wanted):
    assert_equal_to_the_reference(drawn(5, H=1), wanted=(wanted,))


def test_the_public_filter_takes_the_kernels_where_they_are_asked_for():
    inputs = {name: x.float().to(DEVICE) for name, x in drawn(4, B=2, H=1).items()}
    shared = inputs | {"process_noise": inputs["process_noise"][:1, :1, :1], "transition": inputs["transition"][:, :1]}
    exact = filter_memory(**shared, impl="reference")
    for chunk in (None, 3):
        for one, two in zip(filter_memory(**shared, impl="triton", chunk=chunk), exact, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_strides_do_not_matter():
    inputs = {name: x.float().to(DEVICE) for name, x in drawn(5).items()}
    views = {
        "last axes swapped": lambda x: x.mT.contiguous().mT if x.dim() > 2 else x,
        "every other": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
        "a slice": lambda x: torch.cat((x, x, x), dim=0)[1:2],
    }
    expected = filtered(fast.filter_memory, inputs)
    for name, view in views.items():
        found = filtered(fast.filter_memory, {key: view(x) for key, x in inputs.items()})
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True)), name


def test_a_history_leaves_nothing_to_the_others_in_its_row():
    T, mine = CHUNK + 5, slice(3, CHUNK + 1)
    first = torch.zeros(1, T, dtype=torch.bool, device=DEVICE)
    first[:, [0, mine.start, mine.stop]] = True
    inputs = {name: x.float().to(DEVICE) for name, x in drawn(T, H=1).items()}
    whole = filtered(fast.filter_memory, inputs, first=first)
    noisy = {name: x.clone() for name, x in inputs.items()}
    for name, x in noisy.items():
        if name != "prior_variance":
            x[:, :, : mine.start] *= 0.5
            x[:, :, mine.stop :] *= 0.5
            x.requires_grad_()
    other = filtered(fast.filter_memory, noisy, first=first)
    for one, two in zip(whole[:3], other[:3], strict=True):
        assert torch.equal(one[:, :, mine], two[:, :, mine])
    leaves = [x for x in noisy.values() if x.requires_grad]
    loss = sum(x[:, :, mine].sum() for x in other[:3])
    for gradient in torch.autograd.grad(loss, leaves):
        assert gradient[:, :, mine].any()
        assert not gradient[:, :, : mine.start].any() and not gradient[:, :, mine.stop :].any()


def test_a_pivot_that_is_not_positive_is_raised_and_reported():
    inputs = {name: x.float().to(DEVICE) for name, x in drawn(3, H=1, kind="scalar").items()}
    inputs["prior_variance"] *= -20  # what rounding would have to do to P
    with pytest.warns(RuntimeWarning, match=r"lost positive definiteness at \d of 3 steps \(worst variance -"):
        trace = filtered(fast.filter_memory, inputs)
    assert torch.isfinite(trace.readout).all()


def test_the_kernels_decline_what_they_cannot_serve():
    def choose(impl, *, width=8, dtype=torch.float32, transition=None):
        v = torch.zeros(1, 1, 3, 8, dtype=dtype, device=DEVICE)
        found = dispatch.choose(impl, FILTER, v, key_width=width, transition=transition)
        return getattr(found, "__wrapped__", found)  # on a GPU it is launched beside its tensors

    assert choose("triton", transition=torch.full((1, 1, 3, 1), 0.01)) is fast.filter_memory
    for call, message in (
        ({"dtype": torch.float64}, r"needs float32, got torch\.float64"),
        ({"width": 65}, "serves widths up to 64, got keys of 65 and values of 8"),
        ({"transition": torch.ones(1, 1, 3, 4, dtype=torch.complex64)}, "does not turn pairs of rows"),
        (
            {"transition": torch.full((1, 1, 3, 1), 0.002)},
            r"0\.002 leaves less than e\^-24 of a memory within 4 tokens",
        ),
    ):
        with pytest.raises(ValueError, match=f"triton path declined: .*{message}"):
            choose("triton", **call)

"""Robust filter attention in C against its isotropic form in float64."""

from __future__ import annotations

import pytest
import torch

from recbft.core import SequenceContext
from recbft.kernels import c_library
from recbft.kernels.dispatch import choose
from recbft.kernels.robust_filter import PATHS, Dynamics, Variant, filtered, read_clock
from tests.packed_rows import packed

REASON = c_library.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

VARIANTS = {
    "student": Variant(),
    "gaussian": Variant(kernel="gaussian"),
    "still": Variant(multiplicative=False, rotate_values=False, horizon=1.0),
}
SCALARS = ("decay", "process", "key_noise", "query_noise", "dof", "temperature")


def drawn(B, H, T, K, *, seed=0):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    inputs = {name: normal(B, H, T, K, 2) for name in "qkv"}
    inputs |= {name: 0.3 * normal(H) - (2 if name == "decay" else 0) for name in SCALARS}
    return inputs | {"frequency": normal(H, K), "key_bias": normal(B, T)}


def run(path, inputs, context, variant, dtype, *, with_evidence=True, learned=()):
    """Outputs, and gradients of a mixture of them, by name, in float64."""
    x = {name: value.to(dtype).clone() for name, value in inputs.items()}
    wanted = {name: x[name].requires_grad_() for name in x if name != "frequency" or name in learned}
    q, k, v = (torch.view_as_complex(x[name]) for name in "qkv")
    dynamics = Dynamics(x["frequency"], *(x[name].exp() for name in SCALARS))
    clock = read_clock(context, dtype=dtype)
    more = {"key_bias": x.get("key_bias"), "with_evidence": with_evidence}
    mean, evidence = filtered(q, k, v, context, dynamics, clock, variant, impl=path, **more)
    outputs = {"mean": torch.view_as_real(mean.resolve_conj())} | ({"evidence": evidence} if with_evidence else {})
    g = torch.Generator().manual_seed(5)
    loss = sum((y * torch.randn(y.shape, generator=g, dtype=torch.float64).to(dtype)).sum() for y in outputs.values())
    gradients = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    found = outputs | {f"d {name}": grad for name, grad in zip(wanted, gradients, strict=True)}
    return {name: value.detach().double() for name, value in found.items()}


def compare(inputs, context, variant=VARIANTS["student"], **settings):
    """The path in C in float32 with the isotropic form in float64."""
    exact = run("isotropic", inputs, context, variant, torch.float64, **settings)
    found = run("c", inputs, context, variant, torch.float32, **settings)
    for name, true in exact.items():
        # Gradients of the scalars are sums in which most cancels.
        slack = 2e-3 if name[2:] in (*SCALARS, "frequency") else 3e-5
        error, size = ((x.abs().max().item() if x.numel() else 0.0) for x in (found[name] - true, true))
        assert error <= slack * size + 1e-5, f"{name}: {error} off, of {size}"
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("causal", "shuffled"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(("T", "K"), [(1, 1), (9, 4), (65, 17)])
def test_it_equals_the_isotropic_form_in_values_and_gradients(T, K, shuffled, causal, variant):
    order = torch.randperm(T, generator=torch.Generator().manual_seed(T)) if shuffled else None
    lengths = [[T], [T // 2, T - T // 2] if T > 1 else [1], [max(1, T - 1)], []]
    context = packed(lengths, T, causal=causal, order=order)
    inputs = drawn(4, 2, T, K, seed=T)
    for with_evidence in (True, False):
        compare(inputs, context, VARIANTS[variant], with_evidence=with_evidence)


def test_learned_frequencies_have_their_gradients():
    context = packed([[6], [2, 4]], 6)
    found = compare(drawn(2, 2, 6, 3), context, learned=("frequency",))
    assert found["d frequency"].abs().max() > 0


def test_the_logarithm_of_a_misfit_is_exact_over_its_range():
    N = 2000  # rows of one token, whose evidence is P (1 + x) to the power of -kappa
    inputs = {name: x.float().double() for name, x in drawn(N, 1, 1, 1).items()}
    inputs["k"].zero_()
    inputs["q"][:, 0, 0, 0, 0] = torch.logspace(-3, 4, N).double()
    context = packed([[1]] * N, 1)
    exact = run("isotropic", inputs, context, Variant(), torch.float64)["evidence"].log()
    found = run("c", inputs, context, Variant(), torch.float32)["evidence"].log()
    assert ((found - exact).abs() / (1 + exact.abs())).max() < 4e-7


def test_keys_without_a_bias_weigh_as_they_do_with_one_of_0():
    context = packed([[6], [2, 4]], 6)
    inputs = drawn(2, 2, 6, 3)
    inputs["key_bias"].zero_()
    biased = run("c", inputs, context, Variant(), torch.float32)
    del inputs["key_bias"]
    for name, found in run("c", inputs, context, Variant(), torch.float32).items():
        assert torch.equal(found, biased[name])


@pytest.mark.parametrize("causal", [True, False])
def test_positions_may_have_holes(causal):
    context = packed([[40], [9, 31], [40]], 40, causal=causal, offset=3)
    position = context.position.clone()
    position[0] *= 3
    position[1, 20:] += 2
    position[2, :6] -= 3
    context = SequenceContext(context.segment, position, causal=causal)
    compare(drawn(3, 2, 40, 5), context)


@pytest.mark.parametrize("causal", [True, False])
def test_a_key_without_weight_counts_in_the_evidence(causal):
    context = packed([[5, 4], [9]], 11, causal=causal, order=torch.arange(11).flip(0))
    inputs = drawn(2, 2, 11, 3)
    inputs["key_bias"][context.position == 1] = float("-inf")
    compare(inputs, context)


def test_runs_and_numbers_of_threads_give_the_same_bits(runs_by_threads):
    context, inputs = packed([[50], [20, 30], [5] * 10], 50), drawn(3, 2, 50, 8)
    first, *others = runs_by_threads(lambda: run("c", inputs, context, Variant(), torch.float32))
    assert all(torch.equal(other[name], value) for other in others for name, value in first.items())


def test_what_is_not_a_number_stays_visible():
    inputs = drawn(1, 1, 4, 3)
    inputs["q"][0, 0, 1, 2, 0] = float("nan")
    found = run("c", inputs, packed([[4]], 4), Variant(), torch.float32)
    assert torch.isnan(found["mean"][0, 0, 1]).any() and torch.isnan(found["evidence"][0, 0, 1])


def test_what_it_cannot_serve_goes_to_another_path():
    q = torch.zeros(1, 1, 2, 2, dtype=torch.complex64)
    assert choose("auto", PATHS, q) is PATHS["c"].load()
    for tensor, call, reason in (
        (q.to(torch.complex128), {}, "serves complex64, got complex128"),
        (q, {"dropout": 0.1}, "attention dropout is left to another path"),
        (q, {"by_position": False}, "real elapsed times are left to another path"),
    ):
        assert choose("auto", PATHS, tensor, **call) is PATHS["isotropic"].load()
        with pytest.raises(ValueError, match=f"c path declined: {reason}"):
            choose("c", PATHS, tensor, **call)
    context = packed([[2]], 2)
    scalars = Dynamics(torch.zeros(1, 2), *torch.ones(6, 1))
    with pytest.raises(ValueError, match=r"values torch.float64; the kernels in C take float32"):
        filtered(q, q, q.to(torch.complex128), context, scalars, read_clock(context, dtype=torch.float32), Variant())

"""Cross-entropy in Triton against its definition in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from recbft.kernels.cross_entropy import full_cross_entropies, full_cross_entropy, reference
from recbft.kernels.cross_entropy import triton as kernels

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 wrongly.
HALF = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
FLOAT32 = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernels, "tiles", lambda row_bytes, **kind: kernels.Tiles(16, 16, 4, 2))
    monkeypatch.setattr(kernels, "ENOUGH_PROGRAMS", 4)


def drawn(counts, V, D, *, dtype=torch.float32, scale=1.0, seed=0):
    """States, item vectors of each seed, and targets."""
    g = torch.Generator().manual_seed(seed)
    states = (torch.randn(sum(counts), D, generator=g) * scale).to(dtype)
    weight = torch.randn(len(counts), V, D, generator=g).to(dtype)
    return states.to(DEVICE), weight.to(DEVICE), torch.randint(V, (sum(counts),), generator=g).to(DEVICE)


def losses_and_gradients(path, states, weight, target, counts):
    """Of sum_s (s + 1) loss_s, all in float64."""
    leaves = [x.detach().requires_grad_() for x in (states, weight)]
    losses = path(*leaves, target, counts)
    total = (losses * torch.arange(1, len(counts) + 1, device=DEVICE)).sum()
    return {
        name: found.detach().double()
        for name, found in zip(
            ("loss", "d_states", "d_weight"), (losses, *torch.autograd.grad(total, leaves)), strict=True
        )
    }


def triton_path(states, weight, target, counts):
    return full_cross_entropies(states, weight, target, counts, impl="triton")


def compare(states, weight, target, counts, **tolerance):
    ours = losses_and_gradients(triton_path, states, weight, target, counts)
    exact = losses_and_gradients(reference.full_cross_entropies, states.double(), weight.double(), target, counts)
    for name, found in ours.items():
        torch.testing.assert_close(found, exact[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


@pytest.mark.parametrize("D", [1, 16, 20])
@pytest.mark.parametrize(("N", "V"), [(1, 1), (1, 2), (2, 1), (15, 17), (16, 16), (17, 15), (40, 50)])
def test_loss_and_gradients_equal_the_definition(N, V, D):
    compare(*drawn([N], V, D), [N], **FLOAT32)


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_the_parts_of_the_vocabulary_are_merged_into_the_same_sums(programs, monkeypatch):
    monkeypatch.setattr(kernels, "ENOUGH_PROGRAMS", programs)
    compare(*drawn([5], 100, 8), [5], **FLOAT32)


@pytest.mark.parametrize("counts", [[1, 1], [33, 1, 20]])
def test_each_seed_has_the_loss_of_its_own_positions(counts):
    compare(*drawn(counts, 21, 6), counts, **FLOAT32)


@pytest.mark.parametrize("programs", [1, 7, 1000])
def test_the_parts_of_the_positions_add_up_to_the_same_gradients(programs, monkeypatch):
    monkeypatch.setattr(kernels, "ENOUGH_PROGRAMS", programs)
    compare(*drawn([150, 1, 40], 21, 6), [150, 1, 40], **FLOAT32)


def test_a_seed_without_positions_moves_no_item_of_its_own():
    states, weight, target = drawn([5, 0], 21, 6)
    weight.requires_grad_()
    triton_path(states, weight, target, [5, 0])[0].backward()
    assert torch.isfinite(weight.grad).all() and weight.grad[0].any() and not weight.grad[1].any()


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_small_and_extreme_logits_keep_their_digits(scale):
    states, weight, target = drawn([20], 40, 8, scale=scale)
    compare(states, weight, target, [20], rtol=2e-5, atol=2e-5 * max(scale, 1))


def test_logits_far_from_what_exp_can_take_give_their_exact_losses():
    states = torch.full((4, 2), 300.0, device=DEVICE, requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]], device=DEVICE)
    loss = full_cross_entropy(states, weight, torch.tensor([0, 1, 2, 0], device=DEVICE), impl="triton")
    loss.backward()
    assert loss.item() == (0 + 1200 + 600 + 0) / 4
    torch.testing.assert_close(states.grad[:, 0].cpu(), torch.tensor([0.0, 0.5, 0.25, 0.0]))


def test_targets_may_repeat():
    states, weight, _ = drawn([40], 20, 8)
    compare(states, weight, torch.tensor([3, 19], device=DEVICE).repeat_interleave(20), [40], **FLOAT32)


def test_any_strides_are_read_in_place():
    states, weight, target = drawn([2 * 19], 24, 11)
    table = torch.cat([torch.full_like(weight[:, :1], float("nan")), weight], dim=1)[:, 1:, 2:10]
    odd = states[::2, 2:10].T.contiguous().T
    assert odd.stride(1) == 19 and table.stride(1) == 11
    compare(odd, table, target[::2], [19], **FLOAT32)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_errs_no_more_than_the_plain_form(dtype):
    states, weight, target = drawn([40], 60, 16, dtype=dtype, scale=0.5)
    exact, ours, plain = (
        losses_and_gradients(path, s, w, target, [40])
        for path, s, w in (
            (reference.full_cross_entropies, states.double(), weight.double()),
            (triton_path, states, weight),
            (reference.full_cross_entropies, states, weight),
        )
    )
    for name in exact:
        error, usual = ((found[name] - exact[name]).norm() for found in (ours, plain))
        assert error <= 2 * usual, name


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_keeps_small_probabilities(dtype):
    """One item takes nearly all of it; what is left to the others is below the steps of float16."""
    states = torch.ones(8, 16, dtype=dtype, device=DEVICE)
    weight = torch.zeros(20, 16, dtype=dtype, device=DEVICE)
    weight[7] = 0.984375  # a logit of 15.75
    target = torch.full((8,), 7, device=DEVICE)
    leaf = weight.clone().requires_grad_()
    loss = full_cross_entropy(states, leaf, target, impl="triton") * 2**14  # as a loss is scaled for float16
    loss.backward()
    left = math.exp(-15.75) / (1 + 19 * math.exp(-15.75))
    assert leaf.grad[0, 0].item() == pytest.approx(2**14 * left, rel=0.01)


def test_mixed_types_and_autocast_multiply_in_the_type_they_agree_on():
    states, weight, target = drawn([18], 20, 8)
    plain = full_cross_entropy(states.half(), weight[0].half(), target, impl="triton")
    assert plain.dtype == torch.float32
    if DEVICE == "cuda":
        with torch.autocast("cuda", dtype=torch.float16):
            assert full_cross_entropy(states, weight[0], target, impl="triton").equal(plain)
    mixed = full_cross_entropy(states.half().float(), weight[0].half(), target, impl="triton")
    torch.testing.assert_close(mixed, plain, rtol=1e-3, atol=0)


def test_two_runs_are_equal_bit_for_bit_and_so_is_a_second_backward():
    states, weight, target = drawn([30], 70, 8)
    one, two = (losses_and_gradients(triton_path, states, weight, target, [30]) for _ in range(2))
    assert all(one[name].equal(two[name]) for name in one)
    leaf = weight[0].requires_grad_()
    loss = full_cross_entropy(states, leaf, target, impl="triton")
    first, again = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert first.equal(again)


def test_gradients_nobody_asks_for_are_not_made():
    states, weight, target = drawn([18], 20, 8)
    loss = full_cross_entropy(states, weight[0], target, impl="triton")
    assert not loss.requires_grad
    expected = losses_and_gradients(triton_path, states, weight, target, [18])
    for name, leaf in (("d_states", states), ("d_weight", weight)):
        leaf.requires_grad_()
        (found,) = torch.autograd.grad(full_cross_entropies(states, weight, target, [18], impl="triton").sum(), leaf)
        assert found.double().equal(expected[name])
        leaf.requires_grad_(False)


@pytest.mark.parametrize("target", [-1, 20])
def test_a_target_that_is_no_item_gives_nan(target):
    states, weight, targets = drawn([3], 20, 4)
    targets[1] = target
    assert full_cross_entropy(states, weight[0], targets, impl="triton").isnan()


def test_what_it_cannot_serve_is_declined_with_the_reason():
    def serve(dtype, D):
        x = torch.ones(2, D, dtype=dtype, device=DEVICE)
        return full_cross_entropy(x, x, torch.zeros(2, dtype=torch.long, device=DEVICE), impl="triton")

    with pytest.raises(ValueError, match="needs float32, bfloat16 or float16, got float64"):
        serve(torch.float64, 4)
    with pytest.raises(ValueError, match="needs a width of at most 256 in float32, got 257"):
        serve(torch.float32, 257)
    with pytest.raises(ValueError, match="needs a width of at most 512 in float16, got 513"):
        serve(torch.float16, 513)

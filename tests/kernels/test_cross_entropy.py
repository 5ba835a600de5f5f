"""Cross-entropy over all items: every path against its definition in float64, for one seed and several."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from recbft.kernels import dispatch
from recbft.kernels.cross_entropy import Pairs, full_cross_entropies, full_cross_entropies_ref, full_cross_entropy
from recbft.kernels.cross_entropy.torch import Added, exponentials
from tests.tolerances import assert_as_near_as, assert_same

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 wrongly.
HALF = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
FAST = pytest.mark.parametrize("impl", ["torch", "triton"])
BY_TRITON = pytest.mark.parametrize("impl", ["triton"])


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Small tiles for small tables."""
    if dispatch.missing("triton") is not None:
        return None
    module = importlib.import_module("recbft.kernels.cross_entropy.triton")
    monkeypatch.setattr(module, "tiles", lambda row_bytes, **kind: module.Tiles(16, 16, 4, 2))
    monkeypatch.setattr(module, "ENOUGH_PROGRAMS", 4)
    return module


@pytest.fixture(params=["blocks", "tiles"])
def pieces(request, monkeypatch):
    """Small pieces of either form of ``torch``: blocks of positions, or tiles of positions by items."""
    longest = 0 if request.param == "tiles" else 10**9
    small = {"BLOCK_ELEMENTS": 40 * 16, "LONGEST_ROW": longest, "POSITIONS": 16, "ITEMS": 15}
    for name, value in small.items():
        monkeypatch.setattr(f"recbft.kernels.cross_entropy.torch.{name}", value)


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
    return [found.detach().double() for found in (losses, *torch.autograd.grad(total, leaves))]


def by(impl):
    return lambda *given: full_cross_entropies(*given, impl=impl)


def compare(impl, states, weight, target, counts):
    exact = losses_and_gradients(full_cross_entropies_ref, states.double(), weight.double(), target, counts)
    plain = losses_and_gradients(full_cross_entropies_ref, states, weight, target, counts)
    found = losses_and_gradients(by(impl), states, weight, target, counts)
    largest = float((states.double() @ weight.double().flatten(0, 1).T).abs().max())
    assert_as_near_as(found, plain, exact, slack=1e-6, least=max(1.0, largest))


@BY_TRITON
@pytest.mark.parametrize(("N", "V", "D"), [(1, 1, 1), (2, 1, 20), (15, 17, 16), (17, 15, 20), (40, 50, 16)])
def test_loss_and_gradients_equal_the_definition(N, V, D, impl):
    compare(impl, *drawn([N], V, D), [N])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize(("N", "V", "D"), [(1, 1, 3), (17, 30, 8), (300, 40, 8)])
def test_pieces_equal_the_definition(N, V, D, scale, pieces):
    compare("torch", *drawn([N], V, D, scale=scale), [N])
    wide = drawn([N], V, D, scale=scale, dtype=torch.float64)
    assert_same(*(losses_and_gradients(by(impl), *wide, [N]) for impl in ("torch", "reference")))


def test_pieces_give_the_loss_alone_where_nothing_learns(pieces):
    states, weight, target = drawn([5], 7, 3, dtype=torch.float64)
    alone, expected = (full_cross_entropies(states, weight, target, [5], impl=impl) for impl in ("torch", "reference"))
    torch.testing.assert_close(alone, expected)
    assert not alone.requires_grad


@BY_TRITON
@pytest.mark.parametrize("programs", [1, 7, 1000])
def test_the_parts_of_items_and_of_positions_add_up(programs, impl, monkeypatch, kernels):
    monkeypatch.setattr(kernels, "ENOUGH_PROGRAMS", programs)
    compare(impl, *drawn([5], 100, 8), [5])
    compare(impl, *drawn([150, 1, 40], 21, 6), [150, 1, 40])


@FAST
def test_each_seed_has_the_loss_of_its_own_positions(impl):
    for scale in (1.0, 30.0):  # without and with the shift of the logits
        compare(impl, *drawn([33, 1, 20], 21, 6, scale=scale), [33, 1, 20])


@BY_TRITON
def test_a_seed_without_positions_moves_no_item_of_its_own(impl):
    states, weight, target = drawn([5, 0], 21, 6)
    by(impl)(states, weight.requires_grad_(), target, [5, 0])[0].backward()
    assert torch.isfinite(weight.grad).all() and weight.grad[0].any() and not weight.grad[1].any()


@FAST
def test_logits_far_from_what_exp_can_take_give_their_exact_losses(impl, pieces):
    states = torch.full((4, 2), 300.0, device=DEVICE, requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]], device=DEVICE)
    loss = full_cross_entropy(states, weight, torch.tensor([0, 1, 2, 0], device=DEVICE), impl=impl)
    loss.backward()
    assert loss.item() == (0 + 1200 + 600 + 0) / 4
    torch.testing.assert_close(states.grad[:, 0].cpu(), torch.tensor([0.0, 0.5, 0.25, 0.0]))


@pytest.mark.parametrize("largest", [59.0, 61.0, 89.0, 104.0])
def test_logits_near_the_limits_of_single_precision_lose_nothing(largest, pieces):
    states, weight = torch.tensor([[largest], [-largest]]), torch.tensor([[1.0], [-1.0], [0.5]])[None]
    for found in (0, 1):
        target = torch.tensor([found, 2])
        exact = losses_and_gradients(full_cross_entropies_ref, states.double(), weight.double(), target, [2])
        for one, two in zip(losses_and_gradients(by("torch"), states, weight, target, [2]), exact, strict=True):
            torch.testing.assert_close(one, two, rtol=2e-6, atol=2e-6)


@BY_TRITON
def test_any_strides_are_read_in_place_and_targets_may_repeat(impl):
    states, weight, target = drawn([2 * 19], 24, 11)
    table = torch.cat([torch.full_like(weight[:, :1], float("nan")), weight], dim=1)[:, 1:, 2:10]
    odd = states[::2, 2:10].T.contiguous().T
    assert odd.stride(1) == 19 and table.stride(1) == 11
    compare(impl, odd, table, target[::2] // 12, [19])


@BY_TRITON
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_errs_no_more_than_the_plain_form(dtype, impl):
    states, weight, target = drawn([40], 60, 16, dtype=dtype, scale=0.5)
    exact = losses_and_gradients(full_cross_entropies_ref, states.double(), weight.double(), target, [40])
    ours, plain = (losses_and_gradients(by(way), states, weight, target, [40]) for way in (impl, "reference"))
    for one, other, true in zip(ours, plain, exact, strict=True):
        assert (one - true).norm() <= 2 * (other - true).norm()


@BY_TRITON
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_keeps_small_probabilities(dtype, impl):
    """One item takes nearly all of it; what is left to the others is below the steps of float16."""
    states = torch.ones(8, 16, dtype=dtype, device=DEVICE)
    weight = torch.zeros(20, 16, dtype=dtype, device=DEVICE)
    weight[7] = 0.984375  # a logit of 15.75
    leaf = weight.clone().requires_grad_()
    loss = full_cross_entropy(states, leaf, torch.full((8,), 7, device=DEVICE), impl=impl) * 2**14  # scaled for float16
    loss.backward()
    left = math.exp(-15.75) / (1 + 19 * math.exp(-15.75))
    assert leaf.grad[0, 0].item() == pytest.approx(2**14 * left, rel=0.01)


@BY_TRITON
def test_mixed_types_and_autocast_multiply_in_the_type_they_agree_on(impl):
    states, weight, target = drawn([18], 20, 8)
    plain = full_cross_entropy(states.half(), weight[0].half(), target, impl=impl)
    assert plain.dtype == torch.float32
    if DEVICE == "cuda":
        with torch.autocast("cuda", dtype=torch.float16):
            assert full_cross_entropy(states, weight[0], target, impl=impl).equal(plain)
    mixed = full_cross_entropy(states.half().float(), weight[0].half(), target, impl=impl)
    torch.testing.assert_close(mixed, plain, rtol=1e-3, atol=0)


@BY_TRITON
def test_two_runs_and_a_second_backward_are_equal_and_only_what_is_asked_for_is_made(impl):
    states, weight, target = drawn([30], 70, 8)
    one, two = (losses_and_gradients(by(impl), states, weight, target, [30]) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))
    assert not full_cross_entropy(states, weight[0], target, impl=impl).requires_grad
    for leaf, expected in ((states, one[1]), (weight, one[2])):
        loss = by(impl)(states, weight, target, [30]) if leaf.requires_grad_() is leaf else None
        for _ in range(2):
            (found,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
            assert found.double().equal(expected)
        leaf.requires_grad_(False)


@BY_TRITON
def test_a_target_that_is_no_item_gives_nan(impl):
    states, weight, targets = drawn([3], 20, 4)
    for target in (-1, 20):
        targets[1] = target
        assert full_cross_entropy(states, weight[0], targets, impl=impl).isnan()


@BY_TRITON
def test_what_it_cannot_serve_is_declined_with_the_reason(impl):
    for dtype, D, reason in (
        (torch.float64, 4, "needs float32, bfloat16 or float16, got float64"),
        (torch.float32, 257, "needs a width of at most 256 in float32, got 257"),
        (torch.float16, 513, "needs a width of at most 512 in float16, got 513"),
    ):
        x = torch.ones(2, D, dtype=dtype, device=DEVICE)
        with pytest.raises(ValueError, match=reason):
            full_cross_entropy(x, x, torch.zeros(2, dtype=torch.long, device=DEVICE), impl=impl)


def test_what_is_not_a_number_stays_visible():
    states = torch.randn(4, 3)
    states[2, 1] = float("nan")
    assert torch.isnan(full_cross_entropy(states, torch.randn(7, 3), torch.zeros(4, dtype=torch.long)))


@pytest.mark.parametrize(("shifted", "offset"), [(True, 0), (True, -100), (False, 0)])
@pytest.mark.parametrize(("N", "V"), [(1, 1), (3, 17), (9, 5000)])
def test_exponentials_and_their_sums(N, V, shifted, offset):
    logits = offset + 20 * torch.randn(N, V + 3, generator=torch.Generator().manual_seed(V))
    logits[:, V:] = 500.0  # of others
    exact = logits[:, :V].double()
    top = exact.amax(dim=1, keepdim=True) if shifted else torch.zeros(N, 1)
    odds, total, shift = exponentials(logits[:, :V], shifted=shifted)
    expected = (exact - top).exp()
    torch.testing.assert_close(odds.double(), expected, rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(total.double(), expected.sum(dim=1, keepdim=True), rtol=1e-6, atol=0)
    assert shift is None if not shifted else torch.equal(shift, top.float())
    assert odds.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize(("N", "V", "pairs"), [(1, 1, 1), (3, 17, 0), (9, 5000, 400)])
def test_what_is_added_before_exponentials_is_there_and_its_share_of_the_sum_is_kept(N, V, pairs, shifted):
    generator = torch.Generator().manual_seed(V)
    logits, values = torch.randn(N, V, generator=generator), torch.randn(pairs, generator=generator)
    row, item = torch.randint(N, (pairs,), generator=generator).sort().values, torch.arange(pairs) % min(V, 20)
    exact = logits.double().index_put((row, item), values.double(), accumulate=True)
    share = torch.full((pairs,), torch.nan)
    odds, total, shift = exponentials(logits, shifted=shifted, added=Added(100, 100 + row, item, values, share))
    expected = (exact - (shift.double() if shifted else 0)).exp()
    torch.testing.assert_close(odds.double(), expected, rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(total.double(), expected.sum(dim=1, keepdim=True), rtol=1e-6, atol=0)
    torch.testing.assert_close(share.double(), exact.softmax(dim=1)[row, item], rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("item", [-1, 5])
def test_what_is_added_to_no_item_is_refused(item):
    states, weight, target = drawn([2], 5, 4)
    added = Pairs(torch.tensor([[0, 1], [2, item]]), torch.ones(2))
    with pytest.raises(IndexError, match="an item that is not among the 5"):
        full_cross_entropy(states, weight[0], target, added=added, impl="torch")


@pytest.mark.parametrize("impl", ["c"])
def test_an_exponential_is_exact_to_two_units_in_the_last_place(impl):
    x = torch.linspace(-87, 88, 100_001)
    found, *_ = exponentials(x.clone()[None], shifted=False)
    expected = x.double().exp()
    assert ((found[0].double() - expected) / expected).abs().max() < 2 * torch.finfo(torch.float32).eps
    beyond = torch.tensor([[-87.001, -1e30, -torch.inf, 88.001, 1e30, torch.inf, torch.nan]])
    found, *_ = exponentials(beyond, shifted=False)
    assert found[0].tolist()[:6] == [0, 0, 0, *[torch.inf] * 3] and found[0, 6].isnan()


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("counts", [[1], [17], [100, 1, 40]])
def test_what_is_left_out_weighs_nothing_and_learns_nothing(counts, scale, pieces):
    states, weight, target = drawn(counts, 31, 8, scale=scale)
    chosen = torch.rand(len(target), 31, generator=torch.Generator().manual_seed(1)) < 0.4
    chosen[0] = True  # all rivals of a position
    chosen[torch.arange(len(target)), target.cpu()] = False
    left_out = chosen.nonzero().T.contiguous().to(DEVICE)

    def dense(states, weight, target, counts):
        parts = zip(states.split(counts), weight, target.split(counts), chosen.to(DEVICE).split(counts), strict=True)
        logits = [(s @ w.T).masked_fill(out, float("-inf")) for s, w, _, out in parts]
        return torch.stack([F.cross_entropy(x, t) for x, t in zip(logits, target.split(counts), strict=True)])

    exact = losses_and_gradients(dense, states.double(), weight.double(), target, counts)
    plain = losses_and_gradients(dense, states, weight, target, counts)
    for impl in ("torch", "reference") if DEVICE == "cpu" else ("reference",):
        found = losses_and_gradients(
            lambda *given, impl=impl: full_cross_entropies(*given, left_out=left_out, impl=impl),
            states, weight, target, counts,
        )  # fmt: skip
        assert_as_near_as(found, plain, exact, slack=1e-6, least=scale * 30)
        one = full_cross_entropy(states[: counts[0]], weight[0], target[: counts[0]], impl=impl,
                                 left_out=left_out[:, left_out[0] < counts[0]])  # fmt: skip
        torch.testing.assert_close(one.double(), found[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("counts", [[1], [17], [100, 1, 40]])
@pytest.mark.parametrize("leaves_out", [False, True])
def test_what_is_added_to_a_logit_counts_and_has_its_gradient(counts, scale, leaves_out, pieces):
    states, weight, target = drawn(counts, 31, 8, scale=scale)
    generator = torch.Generator().manual_seed(1)
    N = len(target)
    chosen = torch.rand(N, 31, generator=generator) < 0.3
    chosen[0], chosen[-1] = True, False  # of one position all, the target too, of another none
    which = chosen.nonzero().T.contiguous().to(DEVICE)
    values = (scale * torch.randn(which.shape[1], generator=generator)).to(DEVICE)
    out = (torch.rand(N, 31, generator=generator) < 0.2).to(DEVICE)
    out[torch.arange(N), target] = False
    left_out = out.nonzero().T.contiguous() if leaves_out else None

    def dense(states, weight, values, target, counts):
        more = torch.zeros(N, 31, dtype=values.dtype, device=DEVICE).index_put(tuple(which), values)
        logits = [s @ w.T for s, w in zip(states.split(counts), weight, strict=True)]
        logits = [x + own for x, own in zip(logits, more.split(counts), strict=True)]
        if leaves_out:
            logits = [x.masked_fill(o, float("-inf")) for x, o in zip(logits, out.split(counts), strict=True)]
        return torch.stack([F.cross_entropy(x, t) for x, t in zip(logits, target.split(counts), strict=True)])

    def found(function, *given):
        given = [x.clone().requires_grad_() for x in given]
        losses = function(*given, target, counts)
        weights = torch.linspace(1, 2, len(losses), dtype=losses.dtype, device=DEVICE)
        return losses.detach(), *torch.autograd.grad((losses * weights).sum(), given)

    exact = found(dense, states.double(), weight.double(), values.double())
    for impl in ("torch", "reference") if DEVICE == "cpu" else ("reference",):

        def ours(states, weight, values, target, counts, impl=impl):
            added = Pairs(which, values)
            return full_cross_entropies(states, weight, target, counts, left_out=left_out, added=added, impl=impl)

        for one, right in zip(found(ours, states, weight, values), exact, strict=True):
            torch.testing.assert_close(one.double(), right, rtol=2e-4, atol=2e-6 * scale)


def test_a_sum_of_some_items_is_not_for_triton():
    states, weight, target = drawn([3], 5, 4)
    with pytest.raises(ValueError, match="triton path declined"):
        full_cross_entropy(states, weight[0], target, left_out=torch.tensor([[0], [1]]), impl="triton")


def shares_for(counts, *, seed=5):
    """Random ones that add up to 1 for each seed, some of them 0."""
    g = torch.Generator().manual_seed(seed)
    kept = [(torch.rand(n, generator=g) < 0.8) | (torch.arange(n) == 0) for n in counts]
    each = [own * (0.01 + torch.rand(len(own), generator=g).pow(4)) for own in kept]
    return torch.cat([own / own.sum() for own in each]).to(DEVICE)


def with_shares(shares, impl):
    return lambda *given: full_cross_entropies(*given, shares=shares.to(given[0].dtype), impl=impl)


@FAST
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("counts", [[1], [17], [100, 1, 40]])
def test_each_position_has_its_share_of_the_loss(counts, scale, impl, pieces):
    states, weight, target = drawn(counts, 31, 8, scale=scale)
    shares = shares_for(counts)

    def dense(states, weight, target, counts):
        parts = zip(states.split(counts), weight, target.split(counts), shares.split(counts), strict=True)
        return torch.stack([c.to(s.dtype) @ F.cross_entropy(s @ w.T, y, reduction="none") for s, w, y, c in parts])

    exact = losses_and_gradients(dense, states.double(), weight.double(), target, counts)
    plain = losses_and_gradients(dense, states, weight, target, counts)
    for path in (impl, "reference"):
        found = losses_and_gradients(with_shares(shares, path), states, weight, target, counts)
        # Triton's forward and backward sum in other orders. Where logits are thousands, the last bit of one moves a
        # probability by 1e-4, which a gradient multiplies by states of hundreds; how much shows, the processor decides.
        slack = 2e-5 if path == "triton" and scale > 1 else 1e-6
        assert_as_near_as(found, plain, exact, slack=slack, least=scale * 30)


@FAST
@pytest.mark.parametrize("counts", [[17], [100, 1, 40]])
def test_equal_shares_are_a_mean(counts, impl, pieces):
    problem = drawn(counts, 31, 8)
    equal = torch.cat([torch.full((n,), 1 / n) for n in counts]).to(DEVICE)
    mean, same = (losses_and_gradients(path, *problem, counts) for path in (by(impl), with_shares(equal, impl)))
    for one, two in zip(same, mean, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@FAST
def test_positions_of_share_0_move_nothing_even_where_there_are_no_others(impl):
    states, weight, target = drawn([6], 7, 4)
    found = losses_and_gradients(with_shares(torch.zeros(6, device=DEVICE), impl), states, weight, target, [6])
    assert all(not one.any() for one in found)


@BY_TRITON
@pytest.mark.parametrize("dtype", HALF)
def test_shares_far_apart_fit_in_half_precision(impl, dtype):
    states, weight, target = drawn([40], 31, 8, dtype=dtype)
    shares = torch.full((40,), 1e-4, device=DEVICE)
    shares[3] = 1 - 39e-4
    exact = losses_and_gradients(with_shares(shares, "reference"), states.double(), weight.double(), target, [40])
    found = losses_and_gradients(with_shares(shares, impl), states, weight, target, [40])
    for one, right in zip(found, exact, strict=True):
        torch.testing.assert_close(one, right, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("counts", [[17], [60, 1, 40]])
def test_what_is_added_has_the_gradient_of_its_positions_share(counts, pieces):
    states, weight, target = drawn(counts, 31, 8, dtype=torch.float64)
    shares = shares_for(counts).double()
    which = (torch.rand(len(target), 31, generator=torch.Generator().manual_seed(1)) < 0.4).nonzero().T.contiguous()
    values = torch.randn(which.shape[1], dtype=torch.float64).to(DEVICE)
    found = {}
    for impl in ("torch", "reference"):
        leaves = [x.clone().requires_grad_() for x in (states, weight, values)]
        added = Pairs(which.to(DEVICE), leaves[2])
        losses = full_cross_entropies(*leaves[:2], target, counts, added=added, shares=shares, impl=impl)
        found[impl] = [losses.detach(), *torch.autograd.grad(losses.sum(), leaves)]
    for one, right in zip(found["torch"], found["reference"], strict=True):
        torch.testing.assert_close(one, right)

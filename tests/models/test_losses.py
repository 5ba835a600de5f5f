"""Losses over the item vocabulary against dense oracles, and the draws they make."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recbft.datasets.batches import ClozeBatches, TrainingBatches, pack_histories
from recbft.datasets.samples import SAMPLE_KINDS
from recbft.datasets.side_by_side import lay_side_by_side
from recbft.errors import UserError
from recbft.kernels.cross_entropy import Pairs
from recbft.models.losses import (
    ItemLoss,
    binary_cross_entropy,
    focal_losses,
    gathered_scores,
    gbce_beta,
    sampled_softmax,
    seen_items,
    shares_of,
)
from recbft.models.sasrec import SASRecConfig, sasrec
from recbft.models.stacked import Stacked

N, V, D = 7, 11, 5


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    states, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in ((N, D), (V, D))
    )
    bias = torch.randn(V, generator=generator, dtype=torch.float64, requires_grad=True)
    return states, weight, bias, torch.randint(V, (N,), generator=generator)


def loss_of(name, counts=None, **settings):
    settings = {"negatives": None, "num_negatives": None, "gbce_t": None, **settings}
    return ItemLoss(SimpleNamespace(loss=name, **settings), torch.arange(V + 1) if counts is None else counts)


@pytest.mark.parametrize("with_bias", [False, True])
def test_ce_is_the_full_cross_entropy_in_value_and_gradients(with_bias):
    states, weight, bias, target = problem()
    inputs = [states, weight, *([bias] if with_bias else [])]
    found = loss_of("ce")(states, weight, bias if with_bias else None, target)
    expected = F.cross_entropy(states @ weight.T + (bias if with_bias else 0), target)
    torch.testing.assert_close(found, expected)
    for one, two in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("negatives", [None, "in_batch"])
def test_the_drawn_sum_of_sampled_softmax_is_unbiased(negatives):
    """exp(loss + score of the target) estimates the sum of the full softmax: (6.4)."""
    states, weight, _, _ = problem()
    states, weight = states.detach()[:1], weight.detach()
    counts = torch.tensor([0, 5, 1, 3, 2, 4, 1, 1, 6, 2, 3, 2])
    # The batch's targets are spread as the training events are, so that E of in_batch is right.
    target = torch.repeat_interleave(torch.arange(V), counts[1:])
    loss = loss_of("sampled_softmax", counts, negatives=negatives, num_negatives=20)
    torch.manual_seed(0)
    total = 0.0
    for _ in range(1000):
        drawn, log_expected = loss.shared_negatives(target, torch.float64)
        scores = (states @ weight[drawn].T - log_expected)[0]
        total += float(scores[drawn != 4].exp().sum())
    exact = (states @ weight.T)[0].exp()
    assert total / 1000 == pytest.approx(float(exact.sum() - exact[4]), rel=0.05)


def test_sampled_softmax_is_its_definition_with_each_negative_by_how_often_it_was_expected():
    states, weight, _, target = problem(1)
    negatives, expected = torch.tensor([3, 0, 7, 3]), torch.tensor([0.5, 2.0, 3.0, 0.5]).double()
    total = 0.0
    for n in range(N):
        scores = (weight @ states[n]).exp()
        drawn = sum(scores[j] / e for j, e in zip(negatives, expected, strict=True) if j != target[n])
        total = total - (scores[target[n]] / (scores[target[n]] + drawn)).log()
    found = sampled_softmax(states, weight, target, negatives, expected.log())
    torch.testing.assert_close(found, total / N)


def test_sampled_softmax_does_not_count_the_target_among_its_negatives():
    states, weight, _, target = problem()
    hits = sampled_softmax(states[:1], weight, target[:1], target[:1].repeat(3), torch.zeros(3, dtype=torch.float64))
    assert hits == 0 and torch.isfinite(torch.autograd.grad(hits, states)[0]).all()


def test_items_without_training_events_take_no_share_of_the_others():
    counts = torch.tensor([0, 6, 0, 0, 2, 0])
    loss = loss_of("sampled_softmax", counts, negatives="in_batch", num_negatives=4)
    drawn, log_expected = loss.shared_negatives(torch.tensor([0, 3, 0]), torch.float64)
    assert drawn.tolist() == [0, 3, 0]
    torch.testing.assert_close(log_expected.exp(), torch.tensor([3 * 6 / 8, 3 * 2 / 8, 3 * 6 / 8]).double())
    unseen = loss.shared_negatives(torch.tensor([1]), torch.float64)[1]
    torch.testing.assert_close(unseen.exp(), torch.tensor([1 / 8]).double())
    assert loss_of("sampled_softmax", 0 * counts, negatives="in_batch").log_share.isfinite().all()


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_binary_cross_entropy_is_its_definition_in_value_and_gradients(beta):
    states, weight, _, target = problem()
    negatives = torch.randint(V, (N, 4), generator=torch.Generator().manual_seed(1))
    scores = states @ weight.T
    positive = torch.sigmoid(scores[torch.arange(N), target]) ** beta
    negative = 1 - torch.sigmoid(scores.gather(1, negatives))
    expected = -(positive.log() + negative.log().sum(1)).mean() / 5
    found = binary_cross_entropy(states, weight, target, negatives, beta=beta)
    torch.testing.assert_close(found, expected)
    for one, two in zip(
        torch.autograd.grad(found, (states, weight)), torch.autograd.grad(expected, (states, weight)), strict=True
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("k", [1, 3])
def test_pairwise_ranking_is_its_definition_in_value_and_gradients(k):
    states, weight, _, target = problem(k)
    loss = loss_of("bpr", num_negatives=k)
    torch.manual_seed(7)
    found = loss(states, weight, None, target)
    torch.manual_seed(7)
    scores, negatives = states @ weight.T, loss.own_negatives(target)
    assert negatives.shape == (N, k) and (negatives != target[:, None]).all()
    expected = -torch.sigmoid(scores.gather(1, target[:, None]) - scores.gather(1, negatives)).log().mean()
    torch.testing.assert_close(found, expected)
    for one, two in zip(
        torch.autograd.grad(found, (states, weight)), torch.autograd.grad(expected, (states, weight)), strict=True
    ):
        torch.testing.assert_close(one, two)


def test_gathered_scores_do_not_depend_on_the_blocks_they_are_made_in(monkeypatch):
    states, weight, _, _ = problem()
    index = torch.randint(V, (N, 3), generator=torch.Generator().manual_seed(2))
    expected = (states @ weight.T).gather(1, index)
    gradients = torch.autograd.grad(expected.square().sum(), (states, weight))
    for block in (1, 31, 10_000):
        monkeypatch.setattr("recbft.models.losses.BLOCK_ELEMENTS", block)
        found = gathered_scores(states, weight, index)
        torch.testing.assert_close(found, expected)
        for one, two in zip(torch.autograd.grad(found.square().sum(), (states, weight)), gradients, strict=True):
            torch.testing.assert_close(one, two)


def test_beta_of_gbce_runs_from_bce_to_the_sampling_rate():
    assert gbce_beta(10, 101, 0.0) == pytest.approx(1.0)
    assert gbce_beta(10, 101, 1.0) == pytest.approx(0.1)
    assert gbce_beta(10, 101, 0.75) == pytest.approx(0.1 * (0.75 * (1 - 10) + 10))
    assert gbce_beta(500, 101, 0.75) == 1.0  # more negatives than items: nothing to calibrate


DRAWING = [("sampled_softmax", {}), ("bce", {}), ("gbce", {"gbce_t": 0.75}), ("bpr", {})]


@pytest.mark.parametrize(("name", "known"), DRAWING, ids=str)
def test_a_loss_draws_as_many_as_its_authors_unless_told_otherwise(name, known):
    items = 2000
    states, weight = torch.randn(N, D).double(), torch.randn(items, D).double()
    target, counts = torch.arange(N), torch.ones(items + 1)
    number = {"sampled_softmax": 512, "bce": 1, "gbce": 256, "bpr": 1}[name]
    values = []
    for settings in ({}, {"num_negatives": number, **known}):
        torch.manual_seed(0)
        values.append(loss_of(name, counts, **settings)(states, weight, None, target))
    assert torch.equal(*values)


def test_smoothed_labels_make_torch_s_smoothed_cross_entropy():
    states, weight, bias, target = problem(2)
    loss = loss_of("ce")
    loss.label_smoothing = 0.2
    expected = F.cross_entropy(states @ weight.T + bias, target, label_smoothing=0.2)
    torch.testing.assert_close(loss(states, weight, bias, target), expected)


@pytest.mark.parametrize(("name", "beta"), [("bce", 1.0), ("gbce", 0.3 * (0.75 * (1 - 1 / 0.3) + 1 / 0.3))])
def test_only_the_calibrated_loss_weighs_its_target(name, beta):
    states, weight, _, target = problem(3)
    loss = loss_of(name, num_negatives=3)
    torch.manual_seed(4)
    found = loss(states, weight, None, target)
    torch.manual_seed(4)
    drawn = torch.randint(V - 1, (N, 3))
    drawn = torch.where(drawn >= target[:, None], drawn + 1, drawn)
    torch.testing.assert_close(found, binary_cross_entropy(states, weight, target, drawn, beta=beta))


@pytest.mark.parametrize("cloze", [False, True])
@pytest.mark.parametrize("samples", SAMPLE_KINDS)
def test_items_that_a_history_holds_are_no_rivals_of_its_targets(samples, cloze):
    rng = np.random.default_rng(3)
    stop = np.cumsum([9, 4, 14])
    items, start, V = rng.integers(1, 12, stop[-1]), stop - [9, 4, 14], 12  # some items repeat
    items[:9] = [1, 2, 3, 4, 5, 6, 7, 1, 8]
    settings = {"max_length": 4, "batch_size": 5, "seed": 0, "samples": samples, "with_earlier": True}
    if cloze:
        batches = ClozeBatches(items, start, stop, mask=V + 1, **settings)
    else:
        batches = TrainingBatches(items, start, stop, **settings)
    whole = [items[a:b].tolist() for a, b in zip(start, stop, strict=True)]
    for batch in batches.epoch(1):
        target = batch.target.flatten()
        learn = target.nonzero().squeeze(1)
        who, seen = seen_items(batch, learn, target[learn] - 1, num_items=V, causal=not cloze)
        assert (who.diff() >= 0).all()
        earlier = batch.earlier.split(batch.num_earlier.tolist())
        for n, at in enumerate(learn.tolist()):
            row, column = divmod(at, batch.items.shape[1])
            number = int(batch.segment[row, column])
            own = batch.segment[row] == number
            before = earlier[number].tolist()
            piece = batch.items[row, own].where(batch.target[row, own] == 0, batch.target[row, own]).tolist()
            if not cloze:
                own &= batch.position[row] <= batch.position[row, column]
                piece = batch.items[row, own].tolist()
            assert any(h[: len(before) + len(piece)] == before + piece for h in whole), "all events up to here"
            expected = set(before) | set(batch.items[row, own].tolist())
            assert set((seen[who == n] + 1).tolist()) == expected - {int(target[at]), V + 1}


def test_the_loss_over_unseen_items_is_that_of_a_list_without_them():
    torch.manual_seed(0)
    model = sasrec(SASRecConfig(hidden_size=8, max_length=4, dropout=0.0, loss="ce_unseen"), None, torch.ones(7)).eval()
    items = np.array([1, 2, 3, 4, 5, 2, 6])
    batch = pack_histories(items, np.array([2]), np.array([6]), with_targets=True, first=np.array([0]))
    scores = model.encode(batch).mean[0] @ model.item_table().weight[1:].T
    for token, seen in enumerate(([1, 2, 3], [1, 2, 3, 4], [1, 3, 4, 5], [1, 2, 3, 4, 5])):  # 2 is a target once more
        scores[token, torch.tensor(seen) - 1] = float("-inf")
    expected = F.cross_entropy(scores, torch.tensor([4, 5, 2, 6]) - 1)
    torch.testing.assert_close(model.loss(batch), expected)


def test_rows_and_seeds_keep_the_items_before_their_histories():
    items, bounds = np.arange(1, 31), np.array([0, 10, 20])
    batch = pack_histories(
        items, bounds + np.array([1, 5, 2]), bounds + np.array([4, 8, 9]), with_targets=True, first=bounds
    )
    rows = torch.arange(1, len(batch.items))
    some = batch.of_rows(rows)
    kept = [n for n in range(3) if int(batch.last[n]) // batch.items.shape[1] in rows.tolist()]
    parts = batch.earlier.split(batch.num_earlier.tolist())
    assert some.earlier.tolist() == [x for n in kept for x in parts[n].tolist()]
    assert some.num_earlier.tolist() == [len(parts[n]) for n in kept]
    side = lay_side_by_side([batch, some])
    assert side.batch.earlier.tolist() == batch.earlier.tolist() + some.earlier.tolist()


WEIGHTS = torch.tensor([1.0, 0.5, 3, 0, 2, 0.25, 1], dtype=torch.float64)  # of N positions


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ce", {}),
        ("sampled_softmax", {"num_negatives": 4}),
        ("bce", {"num_negatives": 2}),
        ("gbce", {"num_negatives": 3}),
        ("bpr", {"num_negatives": 2}),
    ],
)
def test_a_weight_multiplies_the_loss_of_its_position(name, settings):
    """The mean of the losses that positions have alone, by weight; and equal weights are as none."""
    states, weight, bias, target = problem()
    loss = loss_of(name, **settings)
    own = loss.own_negatives(target) if name in ("bce", "gbce", "bpr") else None
    loss.own_negatives = lambda target: own[: len(target)] if len(target) == N else own[loss.row][None]
    drawn = loss.shared_negatives(target, torch.float64) if name == "sampled_softmax" else None
    loss.shared_negatives = lambda *_: drawn
    each = []
    for row in range(N):
        loss.row = row
        each.append(loss(states[row : row + 1], weight, bias, target[row : row + 1]))
    found = loss(states, weight, bias, target, shares=shares_of(WEIGHTS))
    expected = (WEIGHTS * torch.stack(each)).sum() / WEIGHTS.sum()
    torch.testing.assert_close(found, expected)
    inputs = (states, weight, bias)
    for one, two in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, two)
    equal = loss(states, weight, bias, target, shares=shares_of(torch.full((N,), 3.0, dtype=torch.float64)))
    torch.testing.assert_close(equal, loss(states, weight, bias, target))


def test_a_smoothed_loss_and_one_of_unseen_items_are_weighed_too():
    states, weight, _, target = problem()
    left_out = torch.tensor([[0, 2, 5], [0, 0, 0]])
    left_out[1] = (target[left_out[0]] + 1) % V
    for name, seen, smoothing in (("ce", None, 0.2), ("ce_unseen", left_out, 0.0)):
        loss = loss_of(name)
        loss.label_smoothing = smoothing
        logits = states @ weight.T
        if seen is not None:
            logits = logits.index_put(tuple(seen), torch.tensor(float("-inf"), dtype=torch.float64))
        each = F.cross_entropy(logits, target, reduction="none")
        each = each + smoothing * (states * (weight[target] - weight.mean(dim=0))).sum(dim=1)
        found = loss(states, weight, None, target, seen, shares=shares_of(WEIGHTS))
        torch.testing.assert_close(found, (WEIGHTS * each).sum() / WEIGHTS.sum())


@pytest.mark.parametrize("m", [4, 50])
def test_negatives_from_weighed_targets_are_unbiased(m):
    """Item j is among them as often as its share of the weights says, whether some are drawn or all are taken."""
    target = torch.tensor([0, 1, 1, 2, 3, 3, 3])
    weights = torch.tensor([4.0, 1, 2, 0.5, 1, 1, 0.5], dtype=torch.float64)
    counts = torch.zeros(V + 1, dtype=torch.float64).index_add(0, target + 1, weights)
    loss = loss_of("sampled_softmax", counts, num_negatives=m, negatives="in_batch")
    logits, sums = torch.linspace(-1, 1, V, dtype=torch.float64), []
    torch.manual_seed(0)
    for _ in range(1 if m > 7 else 4000):
        drawn, log_expected = loss.shared_negatives(target, torch.float64, shares_of(weights))
        sums.append((logits[drawn] - log_expected).exp().sum())
    expected = logits[:4].exp().sum()
    torch.testing.assert_close(torch.stack(sums).mean(), expected, rtol=1e-10 if m > 7 else 0.02, atol=0)


def with_exponent(alpha):
    return torch.tensor(float(alpha), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("alpha", [-40, -1.0, 0.0, 2.5])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("block", [1, 3 * V, 10**6])
def test_focal_loss_is_its_definition_in_value_and_gradients(alpha, weights, block, monkeypatch):
    monkeypatch.setattr("recbft.models.losses.BLOCK_ELEMENTS", block)
    states, weight, bias, target = problem(4)
    exponent, added = with_exponent(alpha), torch.tensor([0.7, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    which = torch.tensor([[0, 2, 5], [1, 3, int(target[5])]])
    shares = None if weights is None else shares_of(weights)
    found = loss_of("focal")(states, weight, bias, target, added=Pairs(which, added), shares=shares, exponent=exponent)
    logits = (states @ weight.T + bias).index_put(tuple(which), added, accumulate=True)
    p = logits.softmax(dim=1)[torch.arange(N), target]
    each = -((1 - p) ** torch.log1p(exponent.exp())) * p.log()
    expected = each.mean() if weights is None else (weights * each).sum() / weights.sum()
    torch.testing.assert_close(found, expected)
    inputs = (states, weight, bias, added, exponent)
    for one, two in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, two)


def test_focal_loss_without_an_exponent_is_the_cross_entropy_and_of_a_sure_target_finite():
    states, weight, bias, target = problem(5)
    plain = loss_of("ce")(states, weight, bias, target)
    torch.testing.assert_close(loss_of("focal")(states, weight, bias, target, exponent=with_exponent(-40)), plain)
    sure = (100 * weight[target].sign()).detach().requires_grad_()
    loss = loss_of("focal")(sure, weight.detach().sign(), None, target, exponent=with_exponent(-3.0))
    assert loss.isfinite() and torch.autograd.grad(loss, sure)[0].isfinite().all()


def test_a_model_learns_the_exponent_of_its_focal_loss_and_seeds_apart_from_each_other():
    torch.manual_seed(0)
    model = sasrec(SASRecConfig(hidden_size=8, max_length=4, dropout=0.0, loss="focal"), None, torch.ones(7))
    batch = pack_histories(np.array([1, 2, 3, 4, 5]), np.array([0]), np.array([4]), with_targets=True)
    loss = model.loss(batch)
    loss.backward()
    assert model.focal_exponent.item() == 0 and model.focal_exponent.grad < 0  # a larger one lowers the loss
    assert model.optimiser_groups()["focal_exponent"] == "backbone"
    states, table = model.encode(batch).mean[0], model.item_table().weight[1:]
    each = F.cross_entropy(states @ table.T, torch.tensor([1, 2, 3, 4]), reduction="none")
    torch.testing.assert_close(loss, focal_losses(each, torch.zeros(())).mean())
    stacked = sasrec(SASRecConfig(hidden_size=8, max_length=4, dropout=0.0, loss="focal"), None, torch.ones(7))
    with pytest.raises(UserError, match="together with loss 'focal', whose exponent each learns"):
        Stacked([stacked], [torch.Generator()])

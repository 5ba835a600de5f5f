"""Scores that read the precision of the state: equation (6.18), its limits, and what learns of it."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from recbft.errors import UserError
from recbft.models.precision_read_out import PRIOR_START, PrecisionReadOut, above, read

KINDS = ["temperature", "shrinkage"]


def oracle(h, lam, mean_log, learned, kind, w):
    """(6.18) number by number; ``learned`` is a, or nu."""
    found = np.empty_like(h)
    for place in np.ndindex(h.shape[:-1]):
        ratio = lam[place] / np.exp(mean_log)
        if kind == "temperature":
            found[place] = h[place] * np.prod(ratio) ** (w * learned / len(ratio))
        else:
            prior = learned * np.exp(mean_log)
            kept = (1 + learned) * lam[place] / (lam[place] + prior)
            found[place] = (1 - w) * h[place] + w * kept * h[place]
    return found


def read_all(h, lam, mean_log, strength, *, kind, ramp):
    return read(h, above(lam, mean_log), None, strength, kind=kind, ramp=ramp)


def inputs(seed=0, shape=(3, 4, 5)):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape), rng.uniform(0.1, 90, shape), rng.normal(1, 1, shape[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("w", [0.4, 1.0])
@pytest.mark.parametrize("learned", [0.3, 1.7])
def test_a_state_is_read_as_the_formula_says(kind, w, learned):
    for seed in range(3):
        h, lam, mean_log = inputs(seed)
        strength = torch.tensor(learned if kind == "temperature" else math.log(learned)).double()
        found = read_all(*map(torch.from_numpy, (h, lam, mean_log)), strength, kind=kind, ramp=w)
        np.testing.assert_allclose(found, oracle(h, lam, mean_log, learned, kind, w), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_usual_or_not_warmed_up_is_left_as_it_is(kind):
    h, lam, mean_log = map(torch.from_numpy, inputs())
    strength = torch.tensor(0.7).double()
    assert torch.equal(read_all(h, lam, mean_log, strength, kind=kind, ramp=0.0), h)
    usual = read_all(h, mean_log.exp().expand_as(h), mean_log, strength, kind=kind, ramp=1.0)
    torch.testing.assert_close(usual, h)
    # What counts is the ratio: precision in other units, whatever they are, changes nothing.
    one, other = (read_all(h, c * lam, mean_log + math.log(c), strength, kind=kind, ramp=1.0) for c in (1, 50))
    torch.testing.assert_close(one, other)


def test_shrinkage_goes_from_none_at_all_to_the_precision_itself():
    h, lam, mean_log = map(torch.from_numpy, inputs())
    least, most = (
        read_all(h, lam, mean_log, torch.tensor(s).double(), kind="shrinkage", ramp=1.0) for s in (-40.0, 40.0)
    )
    torch.testing.assert_close(least, h)
    torch.testing.assert_close(most, h * lam / mean_log.exp())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_numbers(kind):
    h, lam, mean_log = map(torch.from_numpy, inputs(shape=(2, 2, 3)))
    given = (h.requires_grad_(), lam.requires_grad_(), torch.tensor(0.4).double().requires_grad_())
    assert torch.autograd.gradcheck(lambda h, lam, s: read_all(h, lam, mean_log, s, kind=kind, ramp=0.8), given)


@pytest.mark.parametrize("kind", KINDS)
def test_the_level_of_a_batch_counts_and_has_no_gradient(kind):
    h, lam, _ = map(torch.from_numpy, inputs(shape=(1, 4, 5)))
    valid = torch.tensor([[True, True, True, False]])
    found = []
    for factor in (1.0, 7.0):
        out = PrecisionReadOut(kind, hidden_size=5).double().train()
        out.strength.data.fill_(0.6)
        given = (factor * lam).requires_grad_()
        state = out(h, given, valid, 1.0)
        torch.testing.assert_close(state, read_all(h, given, torch.zeros(5), out.strength, kind=kind, ramp=1.0))
        (state * valid[..., None]).square().sum().backward()
        by_log = given.grad * given.detach()  # of log lam
        torch.testing.assert_close(by_log[0, :3].sum(dim=0), torch.zeros(5).double(), rtol=0, atol=1e-9)
        assert by_log[0, :3].abs().min() > 1e-4
        found.append((state.detach(), out.strength.grad))
    assert (found[0][0] - found[1][0]).abs().max() > 0.1
    if kind == "temperature":  # all states alike are no reason to learn
        out = PrecisionReadOut(kind, hidden_size=5).double().train()
        out(h, torch.full_like(lam, 9.0), valid, 1.0).sum().backward()
        assert out.strength.grad.abs() < 1e-12


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_its_own_states_read(lab, model, kind):
    made = lab.shaken(lab.build("bft", model, core={"read_out": kind})).eval()
    made.precision_read_out.strength.data.fill_(3.0)
    plain = copy.deepcopy(made)
    plain.precision_read_out = None
    batch = lab.packed(lab.draw_histories(1), made)
    with torch.no_grad():
        before, found = plain.encode(batch, only=batch.last), made.user_states(batch)
    out = made.precision_read_out
    expected = oracle(
        before.mean.numpy(), before.precision.numpy(), out.mean_log_precision.numpy(), out.learned, kind, 1.0
    )
    np.testing.assert_allclose(found.state, expected, rtol=1e-9)
    assert (found.state / before.mean - 1).abs().max() > 0.003
    assert torch.equal(found.precision, before.precision.mean(dim=-1)), "what lists show is the posterior precision"


def test_a_model_with_a_temperature_begins_as_the_one_without_and_off_adds_nothing(lab):
    off, one = (lab.build("bft", core={"read_out": kind}) for kind in ("off", "temperature"))
    assert not any("read_out" in name for name in off.state_dict())
    batch = lab.packed(lab.draw_histories(2, shortest=2), with_targets=True)
    for model in (off, one):
        model.set_ramp(0.5)
        model.refresh()
    losses = [model.train().loss(batch) for model in (off, one)]
    assert torch.equal(*losses)
    states = [model.eval().user_states(batch).state for model in (off, one)]
    assert torch.equal(*states)
    small = lab.build("bft", core={"read_out": "shrinkage"}).precision_read_out
    assert small.learned == pytest.approx(PRIOR_START) and one.precision_read_out.learned == 0


@pytest.mark.parametrize("kind", ["off", *KINDS])
@pytest.mark.parametrize("loss", ["ce", "ce_unseen", "sampled_softmax", "bpr"])
def test_the_loss_reaches_the_last_layer_s_precision_where_it_is_read(lab, kind, loss):
    model = lab.shaken(lab.build("bft", core={"read_out": kind, "prior_scale": "per_layer"}, loss=loss)).train()
    groups = model.optimiser_groups()
    model.loss(lab.packed(lab.draw_histories(3, shortest=2), with_targets=True)).backward()
    last = model.blocks[-1].precision.noise_logits.grad
    if kind == "off":
        assert last is None or not last.any()
    else:
        assert (last != 0).all()
        assert model.precision_read_out.strength.grad.abs() > 0
        assert groups["precision_read_out.strength"] == "backbone", "at the rate of precision it memorises"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_what_a_history_gets_does_not_depend_on_its_batch_mates(lab, kind, training):
    model = lab.shaken(lab.build("bft", core={"read_out": kind}))
    histories = lab.draw_histories(4)
    packed = lab.beliefs(model, histories, training=training)
    for history, found in zip(histories, packed, strict=True):
        lab.assert_same(found, lab.beliefs(model, [history], training=training)[0])


def test_the_usual_precision_is_that_of_the_real_tokens_of_earlier_batches():
    out = PrecisionReadOut("temperature", hidden_size=2).train()
    out.strength.data.fill_(1.0)
    valid = torch.tensor([[True, True, False]])
    first = torch.tensor([[[1.0, 4.0], [4.0, 4.0], [90.0, 90.0]]])
    state = torch.ones_like(first)
    torch.testing.assert_close(out(state, first, valid, 1.0)[0, :, 0], torch.tensor([2.0, 4.0, 90.0]))
    torch.testing.assert_close(out.mean_log_precision.exp(), torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(out(state, first, valid, 1.0)[0, :2, 0], torch.tensor([0.5**0.5, 2**0.5]))
    out(state, math.e * first, valid, 1.0)
    torch.testing.assert_close(out.mean_log_precision, torch.tensor([2.0, 4.0]).log() + 0.1)
    kept = out.mean_log_precision.clone()
    out.eval()(state, first, valid, 1.0)
    assert torch.equal(out.mean_log_precision, kept)


def test_biases_and_compared_content_stay_as_they_are(lab):
    core, content = {"read_out": "temperature"}, 5
    model = lab.shaken(lab.build("bft", "bert4rec", core=core, head="gelu", content=content)).eval()
    model.precision_read_out.strength.data.fill_(3.0)
    plain = copy.deepcopy(model)
    plain.precision_read_out = None
    batch = lab.packed(lab.draw_histories(5), model)
    with torch.no_grad():
        found, before = (one.user_states(batch).state for one in (model, plain))
        assert all(torch.equal(a, b) for a, b in zip(model.item_table(), plain.item_table(), strict=True))
    assert torch.equal(found[:, lab.D :], before[:, lab.D :])
    factor = found[:, : lab.D] / before[:, : lab.D]
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor))
    assert (factor[:, 0] - 1).abs().max() > 0.003


def test_coordinates_that_are_not_those_of_the_last_layer_are_not_shrunk(lab):
    with pytest.raises(UserError, match=r"core.read_out shrinkage .* backbone.head mixes them; take temperature"):
        lab.build("bft", "bert4rec", core={"read_out": "shrinkage"}, head="gelu")

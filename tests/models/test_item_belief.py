"""Items known by their content and their events: the arms, what a vector depends on, and the score of content."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from recbft.errors import UserError
from recbft.evaluation.top_k import top_k
from recbft.models.item_belief import CAUTION

F_WIDTH = 5
HISTORIES = [[2, 3, 4, 5, 6], [7, 8, 2, 3], [9, 10, 11, 12, 2, 4, 6]]


def model_of(lab, arm=None, **settings):
    return lab.shaken(lab.build("matched", content=F_WIDTH, item_vector=arm, **settings))


def vectors(model):
    return model.item_table().weight[:, : model.config.hidden_size]


def test_without_features_an_item_is_its_number_alone(lab):
    plain = lab.shaken(lab.build("matched"))
    assert plain.item_belief is None
    known = lab.build("matched", content=F_WIDTH, item_vector="id", content_events=0).double()
    known.load_state_dict({**known.state_dict(), **plain.state_dict()})
    known.set_ramp(1.0)
    lab.assert_same(lab.beliefs(plain, HISTORIES)[0], lab.beliefs(known, HISTORIES)[0])


@pytest.mark.parametrize(("log_kappa", "arm"), [(-math.inf, "additive"), (math.inf, "content")])
def test_belief_is_additive_where_no_event_is_doubted_and_content_where_all_are(lab, log_kappa, arm):
    counts = torch.arange(lab.V + 1)  # all have events
    belief, other = (model_of(lab, name, counts=counts) for name in ("belief", arm))
    other.load_state_dict(belief.state_dict(), strict=False)
    with torch.no_grad():
        belief.item_belief.kappa_logit.fill_(log_kappa)
    torch.testing.assert_close(vectors(belief)[1:], vectors(other)[1:], rtol=0, atol=0)


def test_events_move_a_vector_from_its_content_to_its_own_as_a_kalman_gain(lab):
    counts = torch.arange(lab.V + 1) * 3
    model = model_of(lab, "belief", counts=counts)
    items, own = model.item_belief, model.item_embedding.weight
    kappa = (CAUTION * items.kappa_logit).exp()
    for item in (1, 4, lab.V):
        expected = items.prior.weight @ items.content[item] + counts[item] / (counts[item] + kappa) * own[item]
        torch.testing.assert_close(vectors(model)[item], expected)


@pytest.mark.parametrize("arm", ["additive", "gate", "content", "belief"])
def test_a_vector_depends_on_no_other_item(lab, arm):
    model = model_of(lab, arm)
    before = model.item_table().weight.clone()
    with torch.no_grad():
        model.item_embedding.weight[3] += 1
        model.item_belief.counts[3] += 5
        model.item_belief.content[3] = model.item_belief.content[4]
    changed = (model.item_table().weight != before).any(dim=1)
    assert changed.nonzero().tolist() == [[3]]


def test_a_score_is_that_of_the_state_and_that_of_each_event_by_its_age(lab):
    model = model_of(lab, content_events=3).eval()
    batch = lab.packed(HISTORIES, model)
    states, items = model.user_states(batch).state, model.item_belief
    scores = states @ model.item_table().weight.T
    plain = model.encode(batch, only=batch.last).mean @ vectors(model).T
    rho, weight = torch.sigmoid(CAUTION * items.decay_logit), items.weights(items.counts)
    for user, history in enumerate(HISTORIES):
        like = sum(rho**age * items.content @ items.content[item] for age, item in enumerate(reversed(history[-3:])))
        torch.testing.assert_close(scores[user], plain[user] + weight * like)


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_kept_products_of_contents_give_the_scores_of_the_contents(lab, model):
    model = lab.shaken(lab.build("matched", model=model, content=F_WIDTH, content_events=3)).eval()
    batch = lab.packed(HISTORIES, model)
    assert model.compared([batch]) is None  # training has kept nothing yet
    model.item_belief.neighbours()
    compared, states = model.compared([batch, batch]), model.user_states(batch).state.repeat(2, 1)
    assert copy.deepcopy(model).compared([batch]) is None
    scores = {}
    for name, given in {"contents": None, "products": compared}.items():
        best = top_k(states, model.item_table(), lab.V, compared=given)
        scores[name] = best.scores
    assert best.items.shape == (6, lab.V)
    torch.testing.assert_close(*map(torch.from_numpy, scores.values()))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert model.compared([batch]) is not None
    for changed in ("content", "counts"):
        model.item_belief.neighbours()
        with torch.no_grad():
            getattr(model.item_belief, changed)[3] *= 0.5
        assert model.compared([batch]) is None
    model.item_belief.neighbours()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["item_belief.counts"][4] = 0
    model.load_state_dict(state)
    assert model.compared([batch]) is None


@pytest.mark.parametrize("arm", ["additive", "gate", "content", "belief", "id"])
def test_the_vectors_of_tokens_are_those_of_the_catalogue(lab, arm):
    model = lab.shaken(lab.build("matched", model="bert4rec", content=F_WIDTH, item_vector=arm)).eval()
    batch = lab.packed(HISTORIES, model)  # with masks, which are no items
    lab.assert_same(model.encode(batch).mean, model.encode(batch, vectors=model._vectors()).mean)


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
@pytest.mark.parametrize(("loss", "smoothing"), [("ce", 0.0), ("ce", 0.1), ("ce_unseen", 0.0)])
def test_training_among_all_neighbours_is_the_cross_entropy_of_the_scores(lab, model, loss, smoothing):
    positive = torch.rand(lab.V + 1, 3, generator=torch.Generator().manual_seed(0))
    content = F.normalize(positive, dim=1) * (torch.arange(lab.V + 1) > 0)[:, None]
    settings = {"loss": loss, "content_neighbours": 99, "thinned_items": 0.0}
    own = lab.shaken(lab.build("matched", model, content=content, **settings)).train()
    own.item_loss.label_smoothing = smoothing
    # An item without events may still be read, where its events have weight 0.
    read_alone = [[1, *HISTORIES[0]], *HISTORIES[1:]]
    batch = lab.training_batch(own, HISTORIES if model == "bert4rec" else read_alone)
    target = batch.target.flatten()
    at = target.nonzero()[:, 0]
    states = own.with_content(own.encode(batch).mean.flatten(0, 1)[at], batch, at)
    scores = (states @ own.item_table().weight.T)[:, 1:]
    # An event is no neighbour of itself.
    events, decay = own.item_belief._latest(batch, at)
    itself = decay * own.item_belief.weights(own.item_belief.counts)[events] * (events > 0)
    scores = scores.scatter_add(1, (events - 1).clamp(min=0), -itself)
    scores = scores[:, 1:]  # without the item that has no event
    if loss == "ce_unseen":
        segment, position = batch.segment.flatten(), batch.position.flatten()
        for n, token in enumerate(at.tolist()):
            read = segment == segment[token]
            if model != "bert4rec":
                read &= position <= position[token]
            seen = [
                item for item in batch.items.flatten()[read].tolist() if 1 < item <= lab.V and item != target[token]
            ]
            scores[n, [item - 2 for item in seen]] = -math.inf
    losses = own.loss(batch), F.cross_entropy(scores, target[at] - 2, label_smoothing=smoothing)
    torch.testing.assert_close(*losses)
    names, learned = zip(*own.named_parameters(), strict=True)
    for name, one, right in zip(names, *(torch.autograd.grad(x, learned) for x in losses), strict=True):
        torch.testing.assert_close(one, right, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("events", [0, 3])
def test_negatives_from_the_batch_are_scored_as_lists_are(lab, events):
    model = model_of(
        lab, loss="sampled_softmax", negatives="in_batch", content_events=events, thinned_items=0.0
    ).train()
    batch = lab.training_batch(model, HISTORIES)
    at = batch.target.flatten().nonzero()[:, 0]
    target = batch.target.flatten()[at] - 1
    states = model.with_content(model.encode(batch).mean.flatten(0, 1)[at], batch, at)
    scores = (
        (states @ model.item_table().weight[1:].T)[:, target] - model.item_loss.log_share[target] - math.log(len(at))
    )
    scores = scores.masked_fill(target == target[:, None], -math.inf)
    own = (states * model.item_table().weight[1:][target]).sum(dim=1)
    expected = torch.logsumexp(torch.cat([own[:, None], scores], dim=1), dim=1) - own
    torch.testing.assert_close(model.loss(batch), expected.mean())


@pytest.mark.parametrize("loss", ["ce", "ce_unseen", "focal", "sampled_softmax", "bce", "gbce", "bpr"])
def test_an_item_without_events_is_no_rival_and_learns_nothing(lab, loss):
    model = model_of(lab, thinned_items=0.0, loss=loss).train()
    if loss in ("bce", "bpr"):
        model.item_loss.num_negatives = 50
    model.loss(lab.training_batch(model, HISTORIES)).backward()
    grad = model.item_embedding.weight.grad
    assert not grad[1].any() and grad[2:-1].any(dim=1).all()


def test_some_items_of_a_step_count_as_new(lab):
    items = model_of(lab, counts=torch.ones(2001).long().index_fill(0, torch.tensor([0]), 0), thinned_items=0.25)
    counts = items.item_belief.train().thinned_counts()
    assert 0.2 < (counts[1:] == 0).double().mean() < 0.3
    assert torch.equal(items.item_belief.eval().thinned_counts(), items.item_belief.counts)


def test_a_new_item_is_listed_by_its_content_alone(lab):
    model = model_of(lab).eval()
    with torch.no_grad():
        model.item_belief.content[1] = model.item_belief.content[4]
        model.item_embedding.weight[1] = 100.0  # whatever it holds
        model.item_belief.rare_weight.fill_(20 / CAUTION)
    score = model.user_states(lab.packed([[4]], model)).state @ model.item_table().weight[1:].T
    assert score.argmax() == 0


def test_saved_with_its_content_and_neighbours_follow_it(lab):
    model = model_of(lab)
    near, _ = model.item_belief.neighbours()
    other = lab.build("matched", content=F_WIDTH).double()
    other.item_belief.neighbours()
    with torch.no_grad():
        model.item_belief.content[2:] = model.item_belief.content[2:].flip(0)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert not torch.equal(other.item_belief.neighbours()[0], near)
    assert torch.equal(other.item_table().weight, model.item_table().weight)


def test_an_arm_of_features_without_features_is_refused(lab):
    with pytest.raises(UserError, match="item_vector is 'gate', but the data has no item features"):
        lab.build("matched", item_vector="gate")


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
@pytest.mark.parametrize("arm", ["matched", "bft"])
def test_items_that_come_later_are_as_if_they_had_been_there_without_events(lab, model, arm):
    counts = torch.tensor([0, *range(1, lab.V - 1), 0, 0])
    whole = lab.shaken(lab.build(arm, model, content=F_WIDTH, counts=counts)).eval()
    with torch.no_grad():
        whole.item_belief.raise_new_items(-1.5)
    fewer = lab.build(arm, model, content=whole.item_belief.content[:-1].clone(), counts=counts[:-1]).double()
    state = {}
    for name, tensor in whole.state_dict().items():
        keep = torch.arange(len(tensor)) != lab.V if name in whole.per_item else slice(None)
        state[name] = tensor[keep] if tensor.dim() else tensor
    fewer.load_state_dict(state)
    grown = fewer.with_items(whole.item_belief.content[-1:], torch.zeros(1, dtype=torch.long))
    with torch.inference_mode():
        for histories in ([[1, lab.V, 2], [3]], [[lab.V]]):
            batches = [lab.packed(histories, one) for one in (whole, grown)]
            found = [one.user_states(batch) for one, batch in zip((whole, grown), batches, strict=True)]
            torch.testing.assert_close(found[0].state, found[1].state)
            tables = [one.item_table() for one in (whole, grown)]
            torch.testing.assert_close(tables[0].weight[1:], tables[1].weight[1:])
            torch.testing.assert_close(tables[0].bias[1:], tables[1].bias[1:])
    assert fewer.num_items == lab.V - 1 and grown.num_items == lab.V


@pytest.mark.parametrize("initial", ["count", "evidence", "empirical_bayes", "credibility"])
def test_items_that_come_later_start_with_the_precision_of_their_counts(lab, initial):
    counts = torch.tensor([0, *range(10, 10 + 5 * (lab.V - 2), 5), 0, 0])  # no item has 1 to 9 events
    whole = lab.build("bft", content=F_WIDTH, counts=counts, core={"initial": initial}).item_precision.base
    grown = lab.build("bft", content=F_WIDTH, counts=counts, core={"initial": initial})
    later = torch.tensor([0, 10, 15, int(counts.max())])
    base = grown.with_items(torch.ones(4, F_WIDTH), later).item_precision.base[-4:]
    expected = [whole[counts.tolist().index(count, 1)] for count in later.tolist()]
    torch.testing.assert_close(base, torch.stack(expected))


def test_precision_grows_with_what_is_known_of_an_item_and_with_each_event(lab):
    counts = torch.tensor([0, 0, 0, 5, 10])
    content = F.normalize(torch.ones(5, 3), dim=1)
    content[[0, 2]] = 0  # nothing is known of the second item
    model = lab.build("bft", counts=counts, content=content, core={"initial": "evidence"})
    tau = model.item_precision(torch.arange(1, 5)[None], torch.zeros(1, 4, lab.D))[0, :, 0]
    event, known = model.item_precision.log_event.exp(), model.item_precision.log_content.exp()
    torch.testing.assert_close(
        tau, math.log(2) + torch.stack([known, 0 * known, known + 5 * event, known + 10 * event])
    )

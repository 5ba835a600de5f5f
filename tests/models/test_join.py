"""Two models as one: its states and table, each model reading what it reads by itself, and the bins."""

from __future__ import annotations

import pytest
import torch

from recbft.datasets.batches import history_batches
from recbft.errors import UserError
from recbft.models import MODELS
from recbft.models.content_cosine import ContentCosine, ContentCosineConfig
from recbft.models.join import BINS, Join

COUNTS = torch.tensor([0, 0, 1, 4, 5, 9, 10, 19, 20, 49, 50, 1000, 3])


def cosine(lab, events=3):
    content = torch.randn(lab.V + 1, 5, generator=torch.Generator().manual_seed(3))
    return ContentCosine(ContentCosineConfig(content_events=events), content).double()


def backbone(lab, model="sasrec", arm="matched", **settings):
    return lab.shaken(lab.build(arm, model, **settings)).eval()


def joined(first, second, *, by_count=True, seed=0):
    model = Join(first, second, COUNTS, by_count=by_count).double().eval()
    generator = torch.Generator().manual_seed(seed)
    model.weights.copy_(torch.randn(model.weights.shape, generator=generator))
    return model


def states_and_scores(model, histories):
    """As evaluation reads them."""
    items = torch.tensor([item for history in histories for item in [*history, 1]]).numpy()
    stop = torch.tensor([len(history) + 1 for history in histories]).cumsum(0).numpy() - 1
    start = stop - torch.tensor([len(history) for history in histories]).numpy()
    how = {"max_length": model.max_length, "append": model.append, "with_next_times": model.shows_target_time}
    times = 1000 + 60 * torch.arange(len(items)).numpy() ** 2
    (batch,) = history_batches(items, start, stop, times=times, **how)
    states, table = model.user_states(batch), model.item_table()
    scores = states.state @ table.weight.T
    return states, scores if table.bias is None else scores + table.bias


PAIRS = {
    "shorter": lambda lab: (backbone(lab, max_length=4), cosine(lab)),
    "mask": lambda lab: (backbone(lab, "bert4rec", "published"), backbone(lab, max_length=6)),
    "two masks": lambda lab: (backbone(lab, "bert4rec", max_length=5), backbone(lab, "bert4rec", "bft")),
    "target times": lambda lab: (
        backbone(lab, "hstu", max_length=4, time_bias=True, show_target_time=True), backbone(lab)
    ),
    "join": lambda lab: (joined(backbone(lab), cosine(lab), by_count=False), cosine(lab, 2)),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("by_count", [True, False])
def test_a_score_is_the_weighed_sum_of_what_both_models_give_by_themselves(lab, pair, by_count):
    first, second = PAIRS[pair](lab)
    model = joined(first, second, by_count=by_count)
    histories = [*lab.draw_histories(0), list(range(1, 10))]
    with torch.no_grad():
        states, scores = states_and_scores(model, histories)
        one, other = (states_and_scores(part, histories)[1] for part in (first, second))
    a, d = model.weights[model.bins].T
    torch.testing.assert_close(scores[:, 1:], (a * one + d * other)[:, 1:])
    assert (states.precision is None) == (model.core is None)


def test_the_precision_is_that_of_the_model_that_has_one(lab):
    tracked = backbone(lab, arm="bft")
    model = joined(cosine(lab), tracked)
    histories = lab.draw_histories(1)
    with torch.no_grad():
        found, alone = (states_and_scores(each, histories)[0].precision for each in (model, tracked))
    torch.testing.assert_close(found, alone)
    assert model.core is tracked.core


def test_the_bins_are_those_of_their_names(lab):
    model = joined(cosine(lab), cosine(lab))
    names = [model.names_of_bins[number] for number in model.bins[1:]]
    pairs = dict(zip(COUNTS[1:].tolist(), names, strict=True))
    assert pairs == {
        0: "none", 1: "1-4", 3: "1-4", 4: "1-4", 5: "5-9", 9: "5-9", 10: "10-19", 19: "10-19", 20: "20-49",
        49: "20-49", 50: "50 and more", 1000: "50 and more",
    }  # fmt: skip
    assert list(model.names_of_bins) == list(BINS) and len(model.weights) == 6
    alike = joined(cosine(lab), cosine(lab), by_count=False)
    assert alike.names_of_bins == ("all items",) and not alike.bins.any() and alike.weights.shape == (1, 2)


def test_it_is_not_trained():
    spec = MODELS["join"]
    with pytest.raises(UserError, match="made of two finished runs; make it with `recbft join RUN RUN`"):
        spec.make(spec.config(), None, COUNTS, seed=0)
    with pytest.raises(UserError, match="second is 3; it is written by `recbft join RUN RUN`"):
        spec.config(second=3)

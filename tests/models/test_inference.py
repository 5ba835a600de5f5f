"""The inference form against the model's own forward pass."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from recbft.datasets.batches import history_batches
from recbft.errors import UserError
from recbft.models import Popularity
from recbft.models.contract import UserStates
from recbft.models.inference import user_encoder
from recbft.models.join import Join

# model, arm, settings of ``lab.build``
CASES = [
    ("sasrec", "published", {}),
    ("sasrec", "matched", {}),
    ("sasrec", "matched", {"recency_decay": True}),
    ("sasrec", "matched", {"layer": "post_norm", "output_projection": True, "positions": "latest"}),
    ("sasrec", "matched", {"layer": "post_norm", "activation": "relu", "embedding_scale": 2.0, "n_layers": 1}),
    ("sasrec", "matched", {"absolute_positions": False, "recency_decay": True, "n_layers": 3}),
    ("sasrec", "bft", {}),
    ("sasrec", "bft", {"output_projection": True, "n_layers": 1}),
    *[("sasrec", "bft", {"core": {"initial": initial}})
      for initial in ("hybrid", "table", "credibility", "uniform", "empirical_bayes", "evidence")],
    *[("sasrec", "bft", {"core": {"estimator": estimator}})
      for estimator in ("reml_naive", "sandwich", "delta", "design_effect")],
    *[("sasrec", "bft", {"core": core}) for core in (
        {"update": "residual"}, {"update": "fixed", "fixed_gain": 0.7}, {"update": "gate", "gate": "headwise"},
        {"propagation": "discount"}, {"propagation": "decay"}, {"prior_scale": "per_layer", "process_noise": False},
        {"jacobian_in_evaluation": "exact"}, {"jacobian_in_evaluation": "low_rank", "jacobian_rank": 3},
        {"jacobian_in_evaluation": "off"}, {"prior_variance": "running"},
        {"prior_variance": "running", "estimator": "design_effect"},
        {"read_out": "temperature"}, {"read_out": "shrinkage"},
    )],
    ("bert4rec", "published", {}),
    ("bert4rec", "matched", {"recency_decay": True, "positions": "oldest"}),
    ("bert4rec", "bft", {}),
    ("hstu", "published", {}),
    ("hstu", "matched", {"recency_decay": True, "time_bias": True}),
    ("hstu", "bft", {}),
    ("hstu", "bft", {"core": {"prior_variance": "running"}}),
    ("hstu", "bft", {"time_bias": True, "output_projection": True, "core": {"sandwich_centre": "innovation"}}),
    *[("sasrec", "bft", {"content": 5, "item_vector": arm}) for arm in ("id", "additive", "gate", "content", "belief")],
    ("sasrec", "matched", {"content": 5, "content_events": 0}),
    ("bert4rec", "bft", {"content": 5}),
    ("bert4rec", "published", {"content": 5, "content_events": 2}),
    ("hstu", "bft", {"content": 5, "core": {"initial": "evidence"}}),
]  # fmt: skip


def told(case):
    model, arm, settings = case
    return "-".join([model, arm, *(f"{key}={value}" for key, value in settings.items())]).replace(" ", "")


def ragged(lab, seed):
    """Histories of one event and more, some longer than is read, and times that grow."""
    rng = np.random.default_rng(seed)
    histories = [rng.integers(1, lab.V + 1, length) for length in (1, 2, 7, lab.T - 1, lab.T, lab.T + 1, 2 * lab.T)]
    return histories, [np.cumsum(rng.integers(0, 10**6, len(history))) for history in histories]


def grid(histories, where, rng):
    """Histories as rows of one width, padded at the ``left``, at the ``right``, or ``anywhere``."""
    width = max(map(len, histories)) + 3
    rows = np.zeros((len(histories), width), np.int64)
    for row, history in zip(rows, histories, strict=True):
        columns = {
            "left": np.arange(width - len(history), width),
            "right": np.arange(len(history)),
            "anywhere": np.sort(rng.permutation(width)[: len(history)]),
        }[where]
        row[columns] = history
    return torch.from_numpy(rows)


def states_of(model, histories, times):
    """The model's own states, in one packed batch."""
    stop = np.cumsum([len(history) for history in histories])
    start = stop - [len(history) for history in histories]
    items, when = np.concatenate(histories), np.concatenate(times)
    (batch,) = history_batches(
        items, start, stop, max_length=model.max_length, times=when if model.reads_times else None, append=model.append
    )
    return model.user_states(batch)


@pytest.mark.parametrize("case", CASES, ids=told)
def test_histories_have_the_model_s_own_states(lab, case):
    name, arm, settings = case
    model = lab.shaken(lab.build(arm, name, n_heads=2, **settings)).eval()
    histories, times = ragged(lab, seed=1)
    for dtype, near in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = copy.deepcopy(model).to(dtype)
        with torch.inference_mode():
            expected, encoder = states_of(model, histories, times), user_encoder(model)
            for where in ("left", "right", "anywhere"):
                items, when = (grid(each, where, np.random.default_rng(2)) for each in (histories, times))
                check(encoder.states(items, when if model.reads_times else None), expected, near)
            alone = [
                encoder.of_one(*(torch.from_numpy(x)[None] for x in one)) for one in zip(histories, times, strict=True)
            ]
            precision = None if expected.precision is None else torch.cat([one.precision for one in alone])
            check(UserStates(torch.cat([one.state for one in alone]), precision), expected, near)


def check(found, expected, near):
    for one, two in zip(found, expected, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, rtol=near, atol=near)


def test_a_row_without_items_has_no_vector_and_biases_stand_behind_one(lab):
    model = lab.shaken(lab.build("published", "bert4rec", n_heads=2)).eval()
    with torch.inference_mode():
        (vectors,) = user_encoder(model)(torch.tensor([[0, 0, 0], [0, 3, 4]]))
        table = model.item_table()
        expected = states_of(model, [np.array([3, 4])], [np.array([1, 2])]).state @ table.weight.T + table.bias
        rows = torch.cat([table.weight, table.bias[:, None]], dim=1)
        torch.testing.assert_close(vectors[1:] @ rows.T, expected, rtol=1e-10, atol=1e-10)
    assert vectors[0].isnan().all() and vectors[1, -1] == 1


def test_a_join_has_the_states_of_both(lab):
    first = lab.shaken(lab.build("matched", "sasrec", n_heads=2)).eval()
    second = lab.shaken(lab.build("bft", "bert4rec", n_heads=2, max_length=4)).eval()
    join = Join(first, second, lab.counts_of(), by_count=True).double().eval()
    histories, times = ragged(lab, seed=3)
    with torch.inference_mode():
        found = user_encoder(join).states(grid(histories, "left", np.random.default_rng(0)))
        check(found, states_of(join, histories, times), 1e-10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixer": "rope"}, "mixer PositionalAttention has no form for export.* Recommender.user_vectors"),
        ({"core": {"kriging": "per_dimension"}}, "core.kriging per_dimension has no form"),
        ({"experts": 2}, "experts have no form"),
    ],
)
def test_what_has_no_such_form_is_refused(lab, settings, message):
    with pytest.raises(UserError, match=message):
        user_encoder(lab.build("bft", **settings))
    with pytest.raises(UserError, match="a Popularity has no encoder of its own"):
        user_encoder(Popularity(lab.counts_of()))


@pytest.mark.parametrize(
    ("name", "arm", "settings"),
    [
        ("sasrec", "bft", {}),
        ("sasrec", "bft", {"core": {"read_out": "shrinkage"}}),
        ("bert4rec", "published", {"content": 5}),
        ("hstu", "bft", {"time_bias": True}),
    ],
)
def test_the_form_is_traced_for_any_size(lab, name, arm, settings):
    model = lab.shaken(lab.build(arm, name, n_heads=2, **settings)).eval()
    encoder, free = user_encoder(model).eval(), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    number = 2 if model.reads_times else 1
    with torch.no_grad():
        given = tuple(torch.tensor([[1, 2, 3], [0, 1, 2]]) for _ in range(number))
        traced = torch.export.export(encoder, given, dynamic_shapes=(free,) * number).module()
        for shape in ((1, 1), (3, 2 * lab.T)):
            items = torch.randint(1, lab.V, shape, generator=torch.Generator().manual_seed(0))
            given = (items, items.cumsum(1))[:number]
            torch.testing.assert_close(traced(*given), encoder(*given), rtol=1e-10, atol=1e-10)

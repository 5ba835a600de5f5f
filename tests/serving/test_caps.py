"""Caps per category: what a list holds, what fills it, and what is kept in a run for it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from recbft import Dataset, Recommender
from recbft.datasets.features import ItemFeatures
from recbft.errors import UserError
from recbft.serving import caps as module
from recbft.serving.caps import Caps, Labels
from recbft.serving.lists import joined, recommend_in_blocks, recommend_lists
from tests.serving.conftest import SMALL
from tests.serving.test_lists import LETTERS, Echo, lists

# Echo ranks f, e, d, c, b, a
LABELS = Labels(
    pa.table(
        {
            "colour": ["red", "red", "blue", "blue", None, "blue"],
            "tags": pa.array([["x"], ["x", "y"], [], None, ["y", "z"], ["z"]]),
        }
    )
)


def recommend(histories, k, **how):
    return joined(recommend_in_blocks(Echo(), LETTERS, histories, k, labels=LABELS, **how))


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        ({"colour": 1}, "feb"),  # e has no colour; d and c are blue as f
        ({"colour": 2}, "fed"),
        ({"tags": 1}, "fdc"),  # e shares z with f; d and c have no tag
        ({"colour": 1, "tags": 1}, "fb"),
        (None, "fed"),
        ({}, "fed"),
    ],
)
def test_at_most_so_many_items_of_a_list_share_a_value(cap, expected):
    history = {"ann": ["c"]} if cap is None or "tags" not in cap or len(cap) == 2 else {"ann": ["a"]}
    found = recommend(history, 3, cap=cap)
    assert "".join(found["item"]) == expected
    assert found["rank"].tolist() == list(range(1, len(expected) + 1))
    assert found["score"].is_monotonic_decreasing


def test_caps_go_with_candidates_exclusions_what_was_seen_and_the_fallback():
    histories = {"ann": ["f"], "new": []}
    popular = pa.array([0, 1, 2, 3, 4, 5, 6]).to_numpy().copy()
    import torch

    how = {"cap": {"colour": 1}, "fallback": "popular", "popular": torch.from_numpy(popular)}
    found = recommend(histories, 3, candidates=["f", "d", "c", "b", "a"], exclude={"new": ["f"]}, **how)
    assert lists(found) == {"ann": ["d", "b"], "new": ["d", "b"]}
    assert found["fallback"].tolist() == [False, False, True, True]
    assert found.attrs["short_lists"] == 2
    plain = recommend_lists(Echo(), LETTERS, histories, 3, labels=LABELS, exclude=["e"], **how)
    assert [one.items for one in plain] == [["d", "b"], ["f", "b"]]


def test_lists_are_filled_from_as_far_down_as_it_takes(monkeypatch):
    monkeypatch.setattr(module, "LOOKED_AT", 2)
    rng = np.random.default_rng(0)
    V, k = 300, 5
    groups = np.where(np.arange(V) < 280, "many", rng.choice(list("abcd"), V))  # of which one is allowed
    labels = Labels(pa.table({"group": groups}))
    scores = rng.permuted(np.tile(np.arange(V), (3, 1)), axis=1) + 1000 * (groups == "many")
    looked = []

    def best(rows, length):
        looked.append((len(rows), length))
        order = np.argsort(-scores[rows], axis=1)[:, :length]
        full = np.full(len(rows), length)
        return module.TopK(order + 1, np.take_along_axis(scores[rows], order, 1) * 1.0, full, order / V)

    found = Caps.of(labels, {"group": 1}).lists(best, 3, k, V)
    for row in range(3):
        seen, expected = Counter(), []
        for item in np.argsort(-scores[row]):
            if not seen[groups[item]]:
                seen[groups[item]] += 1
                expected.append(item + 1)
        length = min(k, len(expected))
        assert found.items[row, : found.lengths[row]].tolist() == expected[:length]
        assert found.scores[row, :length].tolist() == scores[row, found.items[row, :length] - 1].tolist()
    assert looked == [(3, 50), (3, 100), (3, 200), (3, 300)]


@pytest.mark.parametrize(
    ("labels", "cap", "said"),
    [
        (LABELS, {"color": 2}, r"cap names 'color'; did you mean 'colour'\? \(this run has: colour, tags\)"),
        (LABELS, {"year": 2}, "cap names 'year'; choose one of colour, tags"),
        (LABELS, {"colour": 0}, "cap of 'colour' is 0; give a whole number of at least 1"),
        (LABELS, {"colour": 1.5}, "cap of 'colour' is 1.5"),
        (LABELS, {"colour": True}, "cap of 'colour' is True"),
        (LABELS, ["colour"], "cap is .'colour'.; give a mapping"),
        (Labels(pa.table({})), {"colour": 1}, "this run keeps no categories of items; train it with item features"),
        (None, {"colour": 1}, "this run keeps no categories"),
    ],
)
def test_what_cannot_be_capped_is_refused(labels, cap, said):
    with pytest.raises(UserError, match=said):
        Caps.of(labels, cap)


def test_a_run_keeps_categories_and_sets_and_caps_new_items_too(dataset, tmp_path):
    ids = dataset.item_ids
    features = pd.DataFrame(
        {
            "item_id": ids,
            "kind": [f"k{n % 4}" if n % 7 else None for n in range(len(ids))],
            "tags": [[f"t{n % 3}", f"t{n % 5}"] for n in range(len(ids))],
            "year": np.arange(len(ids)) % 9 + 1990,
        }
    )
    asked = {"arm": "matched", "content_width": 4, **SMALL, "epochs": 1}
    fitted = Recommender("sasrec", **asked).fit(dataset.with_features(ItemFeatures.of(features)), out=tmp_path / "run")
    loaded = Recommender.load(tmp_path / "run")
    history = ids[:4].tolist()
    kind = dict(zip(ids.tolist(), features["kind"], strict=True))
    for recommender in (fitted, loaded):
        items = recommender.recommend([history], 10, cap={"kind": 2, "tags": 5})["item"]
        counts = Counter(kind[item] for item in items)
        assert len(items) == 10 and all(n <= 2 for value, n in counts.items() if value is not None)
    capped, free = (loaded.recommend([history], 10, cap=cap) for cap in ({"kind": 2}, None))
    assert not capped["item"].equals(free["item"]) and capped["item"][0] == free["item"][0]
    both = capped.merge(free, on="item")
    np.testing.assert_allclose(both["probability_x"], both["probability_y"], err_msg="a chance is the item's own")
    assert loaded.recommend_lists([history], 10, cap={"kind": 2})[0].items == capped["item"].tolist()
    with pytest.raises(UserError, match="cap names 'year'; choose one of kind, tags"):
        loaded.recommend([history], cap={"year": 1})
    new = pd.DataFrame({"item_id": [f"new{n}" for n in range(30)], "kind": "k1", "tags": [["t9"]] * 30, "year": 1990})
    grown = loaded.with_items(new)
    items = grown.recommend([[str(one) for one in history]], 10, cap={"kind": 1}, candidates=new["item_id"])["item"]
    assert len(items) == 1
    plain = Recommender("pop").fit(dataset)
    with pytest.raises(UserError, match="this run keeps no categories of items"):
        plain.recommend([history], cap={"kind": 1})


def test_a_popular_list_of_a_data_set_with_features_is_capped():
    log = pd.DataFrame({"user_id": np.repeat(np.arange(8), 5), "item_id": list("abcde") * 8})
    items = pd.DataFrame({"item_id": list("abcde"), "kind": list("xxxyy")})
    fitted = Recommender("pop").fit(Dataset.from_frame(log, items=items))
    assert fitted.recommend([[]], 5, cap={"kind": 1}, filter_seen=False)["item"].tolist() == ["a", "d"]

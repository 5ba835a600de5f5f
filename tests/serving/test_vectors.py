"""Vectors of users and items: their products are the scores of the lists, for every model."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from recbft import Recommender
from recbft.errors import ColdStartError, UserError
from tests.serving.conftest import SMALL

MODELS = [("sasrec", "bft"), ("sasrec", "matched"), ("bert4rec", "published"), ("hstu", "bft"), ("pop", None)]


@pytest.fixture(scope="module")
def fitted(dataset, fitted):
    others = {(model, arm): Recommender(model, arm=arm, **SMALL).fit(dataset) for model, arm in MODELS[1:-1]}
    return {MODELS[0]: fitted, **others, MODELS[-1]: Recommender("pop").fit(dataset)}


@pytest.mark.parametrize("which", MODELS)
def test_products_of_user_and_item_vectors_are_the_scores_of_the_lists(fitted, dataset, which):
    recommender = fitted[which]
    histories = {f"u{n}": dataset.item_ids[n : n + 3 + n % 9].tolist() for n in range(20)}
    lists = recommender.recommend(histories, k=dataset.num_items, filter_seen=False)
    users, items = recommender.user_vectors(histories), recommender.item_vectors()
    assert users.users.tolist() == list(histories) and items.items.tolist() == dataset.item_ids.tolist()
    scores = pd.DataFrame(users.vectors @ items.vectors.T, index=users.users, columns=items.items)
    listed = lists.pivot(index="user", columns="item", values="score").loc[scores.index, scores.columns]
    np.testing.assert_allclose(scores, listed, rtol=1e-5, atol=1e-6)
    precision = lists.groupby("user")["precision"].first().loc[users.users]
    np.testing.assert_allclose(users.precision, precision, rtol=1e-6)
    assert np.isnan(users.precision).all() == (which[1] != "bft")


def test_a_user_alone_has_the_vector_that_it_has_among_others_however_many_are_read_at_once(
    fitted, dataset, monkeypatch
):
    recommender = fitted["sasrec", "bft"]
    histories = [dataset.item_ids[n : n + 4].tolist() for n in range(7)]
    together = recommender.user_vectors(histories)
    alone = np.concatenate([recommender.user_vectors([history]).vectors for history in histories])
    np.testing.assert_allclose(alone, together.vectors, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr("recbft.serving.vectors.HISTORIES_AT_ONCE", 3)
    np.testing.assert_allclose(recommender.user_vectors(histories).vectors, together.vectors, rtol=1e-5, atol=1e-6)


def test_what_has_no_vector_is_named(fitted, dataset):
    recommender = fitted["sasrec", "matched"]
    known = dataset.item_ids[:2].tolist()
    found = recommender.user_vectors({"ann": known, "bob": ["unheard of"], "cy": [known[0], "unheard of"]})
    assert found.users.tolist() == ["ann", "cy"] and len(found.vectors) == 2
    assert found.skipped_users == ["bob"] and found.unknown_events == 2
    with pytest.raises(ColdStartError, match="none of the 1 items"):
        recommender.user_vectors([["unheard of"]])
    with pytest.raises(UserError, match="not trained"):
        Recommender("sasrec").item_vectors()


def test_what_is_done_to_the_vectors_does_nothing_to_the_model(fitted, dataset):
    recommender = fitted["bert4rec", "published"]
    history = [dataset.item_ids[:3].tolist()]
    before = recommender.recommend(history)
    recommender.item_vectors().vectors[:] = 0
    recommender.item_vectors().items[:] = 0
    pd.testing.assert_frame_equal(recommender.recommend(history), before)


@pytest.mark.parametrize("which", MODELS[:-1])
def test_similar_items_are_those_of_the_largest_cosine(fitted, dataset, which):
    recommender = fitted[which]
    items = recommender.item_vectors()
    weights = items.vectors[:, : SMALL["hidden_size"]]  # without biases
    item = items.items[7]
    cosines = weights @ weights[7] / np.linalg.norm(weights, axis=1) / np.linalg.norm(weights[7])
    order = [n for n in np.argsort(-cosines, kind="stable") if n != 7]
    found = recommender.similar_items(str(item), 5)
    assert found["item"].tolist() == items.items[order[:5]].tolist() and found["rank"].tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(found["score"], cosines[order[:5]], rtol=1e-5)
    assert len(recommender.similar_items(item, 10**6)) == dataset.num_items - 1


def test_similar_items_of_what_has_no_vector_are_refused(fitted, dataset):
    with pytest.raises(UserError, match="item 'unheard' is not in the model's vocabulary; name an item of"):
        fitted["sasrec", "bft"].similar_items("unheard")
    with pytest.raises(UserError, match="k is 0"):
        fitted["sasrec", "bft"].similar_items(dataset.item_ids[0], 0)
    with pytest.raises(UserError, match="has a count for each item and no vector"):
        fitted["pop", None].similar_items(dataset.item_ids[0])

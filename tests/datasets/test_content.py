"""The transform of features: oracles, what it is fitted on, lengths, cosines, what is missing, unknown, saved."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

from recbft.datasets import ContentConfig, Dataset, ItemContent, ItemFeatures
from recbft.errors import UserError

WIDE = ContentConfig(width=4096, min_items=1)


def features_of(kinds=None, **columns):
    size = len(next(iter(columns.values())))
    return ItemFeatures.from_frame(pd.DataFrame({"item_id": range(1, size + 1), **columns}), kinds=kinds)


def fitted(features, config=WIDE, counts=None):
    counts = np.ones(len(features) + 1, np.int64) if counts is None else np.asarray(counts)
    return ItemContent.fit(features, counts, config)


def texts(num, seed=0):
    rng = np.random.default_rng(seed)
    words = [f"w{n}" for n in range(40)]
    return [" ".join(rng.choice(words, rng.integers(3, 9), p=np.arange(40, 0, -1) / 820)) for _ in range(num)]


def mixed(num=60, seed=0):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(num, 5)) * [1, 2, 3, 4, 5] + 7
    return features_of(
        {"words": "words"},
        words=texts(num, seed),
        tags=[list(rng.choice(list("abcdefgh"), 3)) if n % 7 else None for n in range(num)],
        colour=rng.choice(["red", "green", "blue"], num),
        price=np.where(np.arange(num) % 5 == 0, np.nan, rng.lognormal(size=num)),
        vector=[row.tolist() for row in vectors],
    )


def test_words_are_the_tf_idf_of_scikit_learn():
    text = pytest.importorskip("sklearn.feature_extraction.text")
    features = features_of({"words": "words"}, words=texts(30))
    content = fitted(features)
    made = content.matrix(features)
    vectorizer = text.TfidfVectorizer(sublinear_tf=True, vocabulary=content.blocks["words"].terms)
    np.testing.assert_allclose(made.values[1:], vectorizer.fit_transform(texts(30)).toarray(), atol=1e-6)


def test_numbers_are_their_quantile_on_half_a_circle():
    price = np.round(np.random.default_rng(0).lognormal(size=200), 1)
    made = fitted(features_of(price=price)).matrix(features_of(price=price)).values[1:]
    quantile = (rankdata(price) - 1) / 199  # of equal numbers the middle
    np.testing.assert_allclose(np.arctan2(made[:, 1], made[:, 0]) / np.pi, quantile, atol=1e-6)


def test_vectors_are_centred_and_scaled():
    rows = np.random.default_rng(0).normal(size=(50, 4)) * [1, 10, 100, 0] + [0, 5, -3, 8]
    features = features_of(vector=[row.tolist() for row in rows])
    standard = (rows - rows.mean(axis=0)) / np.where(rows.std(axis=0) > 1e-9, rows.std(axis=0), np.inf)
    expected = standard / np.linalg.norm(standard, axis=1, keepdims=True)
    np.testing.assert_allclose(fitted(features).matrix(features).values[1:], expected, atol=1e-5)


def test_rare_levels_are_one_and_levels_weigh_by_rarity():
    features = features_of({"x": "category"}, x=["a"] * 4 + ["b"] * 2 + ["c", "d"], y=[1.0] * 7 + [2.0])
    made = fitted(features.only(["x"]), ContentConfig(min_items=2)).matrix(features)
    assert made.values[[1, 5, 7, 8]].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    block = fitted(features, ContentConfig(min_items=2)).blocks["x"]
    np.testing.assert_allclose(block.arrays["idf"], 1 + np.log([9 / 5, 9 / 3, 9 / 3]), rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_rows_have_length_one_and_what_is_missing_is_zero(seed):
    features = mixed(seed=seed)
    made = fitted(features, ContentConfig(width=16)).matrix(features)
    assert not made.values[0].any() and not made.known[0] and made.known[1:].all()
    np.testing.assert_allclose(np.linalg.norm(made.values[1:], axis=1), 1, atol=1e-6)
    assert list(made.blocks) == ["words", "tags", "colour", "price", "vector"] and made.values.dtype == np.float32
    assert [part.stop - part.start for part in made.blocks.values()] == [16, 8, 3, 2, 5]
    for name, part in made.blocks.items():
        there = features.table[name].is_valid().to_numpy()
        assert (made.values[1:, part].any(axis=1) == there).all()


def test_an_item_of_which_nothing_is_known_is_not_known():
    dataset = Dataset.from_frame(
        pd.DataFrame({"user_id": [1] * 4, "item_id": [1, 2, 3, 1]}),
        items=pd.DataFrame({"item_id": [1, 2, 4], "x": ["a", "b", "a"]}),
        item_kinds={"x": "category"},
    )
    made = fitted(dataset.features, counts=dataset.training_counts).matrix(dataset.features)
    assert dataset.item_ids.tolist() == [1, 2, 3, 4] and made.known.tolist() == [False, True, True, False, True]
    assert made.values[1].tolist() == made.values[4].tolist() != made.values[2].tolist() and not made.values[3].any()


def test_a_data_set_fits_it_once_for_each_config_and_split():
    frame = pd.DataFrame({"user_id": [1] * 5, "item_id": [1, 2, 3, 4, 5], "t": range(5)})
    items = pd.DataFrame({"item_id": range(1, 6), "x": [1.0, 2.0, 4.0, 8.0, 16.0]})
    data = Dataset.from_frame(frame, time="t", items=items)
    once = data.content(WIDE)
    assert data.content(WIDE) is once and data.content(ContentConfig()) is not once and data.content(None) is None
    assert once.blocks["x"].arrays["quantiles"].tolist() == [1, 2, 4]
    later = data.with_split(split="global_time", split_at=2, test_at=3).content(WIDE)
    assert later.blocks["x"].arrays["quantiles"].tolist() == [1, 2]
    assert Dataset.from_frame(frame).content(WIDE) is None


def test_nothing_of_items_without_training_events_enters():
    features, num = mixed(), 60
    counts = np.r_[0, np.ones(40), np.zeros(20)].astype(np.int64)
    alone = ItemFeatures.aligned(features, features.ids[:40])
    whole, part = fitted(features, counts=counts), fitted(alone, counts=counts[:41])
    assert list(whole.blocks) == list(part.blocks)
    for name, block in whole.blocks.items():
        assert block.terms == part.blocks[name].terms
        for key, array in block.arrays.items():
            np.testing.assert_array_equal(array, part.blocks[name].arrays[key])
    np.testing.assert_array_equal(whole.matrix(features).values[:41], part.matrix(alone).values)
    assert len(whole.matrix(features).values) == num + 1


@pytest.mark.parametrize("seed", range(3))
def test_projection_keeps_cosines(seed):
    features = features_of({"words": "words"}, words=[f"{text} x{n % 50}" for n, text in enumerate(texts(300, seed))])
    exact = fitted(features).matrix(features).values[1:]
    small = fitted(features, ContentConfig(width=64, min_items=1)).matrix(features).values[1:]
    error = (exact @ exact.T - small @ small.T)[np.triu_indices(300, 1)]
    assert small.shape[1] == 64 and np.sqrt((error**2).mean()) < 1.1 / np.sqrt(64) and abs(error.mean()) < 0.02


def test_saved_it_reads_new_items_as_before(tmp_path):
    features = mixed()
    content = fitted(features, ContentConfig(width=16))
    content.save(tmp_path)
    again = ItemContent.load(tmp_path)
    assert again.config == content.config and again.width == content.width
    np.testing.assert_array_equal(again.matrix(features).values, content.matrix(features).values)
    frame = pd.DataFrame({"item_id": ["new"], "words": ["w1 w2 never never"], "tags": [["a", "zzz"]], "other": [{}]})
    made = again.matrix(again.read(frame))
    assert made.known.tolist() == [False, True] and made.ignored == {"words": 2, "tags": 1}
    assert not made.values[1, made.blocks["vector"]].any()
    nothing = again.matrix(again.read(pd.DataFrame({"item_id": ["new"], "words": ["never"]})))
    assert not nothing.known.any() and not nothing.values.any()


def test_new_items_are_cut_at_the_same_separator_and_files_read_alike(tmp_path):
    content = fitted(features_of(genres=["a|b", "b", "a|b", "b|a"]))
    content.save(tmp_path)
    frame = pd.DataFrame({"item_id": [9], "genres": ["b|a"], "more": ["x"]})
    frame.to_csv(tmp_path / "new.csv", index=False)
    for given in (frame, tmp_path / "new.csv"):
        again = ItemContent.load(tmp_path)
        assert again.read(given).table["genres"].to_pylist() == [["a", "b"]]
    with pytest.raises(UserError, match="none of the columns genres; columns are item_id, genre"):
        content.read(frame.rename(columns={"genres": "genre"}))


def test_new_items_have_their_ids_in_the_column_of_those_in_training(tmp_path):
    frame = pd.DataFrame({"movieId": [1, 2, 3], "title": ["a", "b b", "a b"]})
    fitted(ItemFeatures.from_frame(frame, kinds={"movieId": "id", "title": "words"})).save(tmp_path)
    again = ItemContent.load(tmp_path)
    for column in ("movieId", "item_id"):
        assert again.read(frame.rename(columns={"movieId": column})).ids.tolist() == [1, 2, 3]
    assert again.read(frame.rename(columns={"movieId": "sku"}), item="sku").ids.tolist() == [1, 2, 3]
    with pytest.raises(UserError, match="no column 'movieId' or 'item_id' with the item ids; rename it; columns are"):
        again.read(frame.rename(columns={"movieId": "sku"}))
    words = json.loads((tmp_path / "items.json").read_text())
    del words["id_column"]  # as of a run before this was written down
    (tmp_path / "items.json").write_text(json.dumps(words))
    assert len(ItemContent.load(tmp_path).read(frame.rename(columns={"movieId": "item_id"}))) == 3


def test_what_does_not_fit_the_transform_is_refused(tmp_path):
    content = fitted(features_of(vector=[[1.0, 2.0], [2.0, 1.0], [0.0, 1.0]]))
    with pytest.raises(UserError, match="vectors 'vector' hold 3 numbers, and those it was fitted on 2"):
        content.matrix(features_of(vector=[[1.0, 2.0, 3.0]]))
    with pytest.raises(UserError, match="column 'vector' is read as number, and was fitted as vector"):
        content.matrix(features_of(vector=[1.0, 2.0]))
    with pytest.raises(UserError, match="no column tells the 2 items with a training event apart"):
        fitted(features_of({"x": "category"}, x=["a", "a", "b"]), counts=[0, 1, 1, 0])
    with pytest.raises(UserError, match="width is 1; give a whole number >= 2"):
        ContentConfig(width=1)


@pytest.mark.parametrize("damage", ["no file", "cut", "words", "kind"])
def test_damaged_files_are_refused(tmp_path, damage):
    fitted(mixed()).save(tmp_path)
    words, arrays = tmp_path / "items.json", tmp_path / "items.safetensors"
    found = json.loads(words.read_text())
    if damage == "no file":
        words.unlink()
    elif damage == "cut":
        arrays.write_bytes(arrays.read_bytes()[:-5])
    elif damage == "words":
        found["columns"][0]["terms"] = ["a"]
        words.write_text(json.dumps(found))
    else:
        found["columns"][0]["kind"] = "vector"
        words.write_text(json.dumps(found))
    with pytest.raises(UserError, match="the transform of item features"):
        ItemContent.load(tmp_path)

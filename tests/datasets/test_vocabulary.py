from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import recbft.datasets.vocabulary
from recbft.datasets.vocabulary import Vocabulary, canonical_text
from recbft.errors import UserError


@pytest.mark.parametrize("form", [np.array, list])
def test_threads_that_ask_first_and_at_once_find_every_item(form):
    vocabulary, together = Vocabulary(np.arange(300_000)), Barrier(8)

    def ask(_):
        together.wait()
        return vocabulary.encode(form([0, 299_999, 300_000])).tolist()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [[1, 300_000, 0]] * 8


@pytest.mark.parametrize("value", [b"7", [7], np.array([7]), pd.DataFrame({"item_id": [7]})])
def test_what_is_neither_number_nor_text_is_refused_not_unknown(value):
    with pytest.raises(UserError, match="give ids that are whole numbers or text, one per event"):
        Vocabulary(np.array([7])).encode([value])


@pytest.mark.parametrize("kind", ["int64", "uint16", "float32", "object", "str", "Int64", "int64[pyarrow]", "category"])
@pytest.mark.parametrize("texts", [False, True])
def test_a_column_has_the_indices_of_its_ids_one_by_one_and_each_id_is_read_once(texts, kind, monkeypatch):
    raw = np.random.default_rng(0).integers(0, 40, 500)
    values = raw.astype(str) if kind in ("object", "str") else raw
    column, seen = pd.Series(values).astype(kind), []
    monkeypatch.setattr(recbft.datasets.vocabulary, "canonical_text", lambda x: seen.append(x) or canonical_text(x))
    ids = np.arange(0, 60, 2)
    found = Vocabulary(ids.astype(str).astype(object) if texts else ids).encode(column)
    assert found.dtype == np.int64 and found.tolist() == np.where(raw % 2, 0, raw // 2 + 1).tolist()
    assert len(seen) <= len(set(raw.tolist()))


def test_a_list_of_whole_numbers_is_looked_up_without_their_texts(monkeypatch):
    def refuse(value):
        raise AssertionError(f"the text of {value!r} was made")

    vocabulary = Vocabulary(np.array([5, -3, 2**62, 0]))
    monkeypatch.setattr(recbft.datasets.vocabulary, "canonical_text", refuse)
    asked = [np.int64(2**62), 5, 7, -3, np.int64(5)]
    assert vocabulary.encode(asked).tolist() == [3, 1, 0, 2, 1]


@pytest.mark.parametrize("odd", [True, "5", 5.0, None, 2**63, 2**64, -(2**63) - 1, np.uint64(5), np.int8(5)])
@pytest.mark.parametrize("ids", [np.array([5, 1, 2**62 + 1]), np.array(["5", "1", str(2**62 + 1), str(2**63)], object)])
def test_a_list_of_whole_numbers_beside_anything_has_the_indices_of_their_texts(ids, odd):
    texts = {str(value): index for index, value in enumerate(ids.tolist(), start=1)}
    asked = [5, odd, 2**62 + 1, 1]
    assert Vocabulary(ids).encode(asked).tolist() == [texts.get(canonical_text(value), 0) for value in asked]
    assert Vocabulary(ids).encode([]).tolist() == []


def test_ids_that_pandas_takes_for_one_keep_their_own_texts():
    vocabulary = Vocabulary(np.array(["1", "True", "nan"], object))
    mixed = np.array([1, True, 1.0, "1", None, "nan", np.nan], object)
    assert vocabulary.encode(mixed).tolist() == [1, 2, 1, 1, 0, 3, 0]
    assert vocabulary.encode(mixed[[3, 4, 5, 6]]).tolist() == [1, 0, 3, 0]


@pytest.mark.parametrize("wrap", [pd.array, pd.Series, pd.Index])
@pytest.mark.parametrize("kind", ["Int64", "int64[pyarrow]", "category"])
@pytest.mark.parametrize("ids", [np.array([7, 2**53, 2**53 + 1]), np.array(["7", str(2**53), str(2**53 + 1)], object)])
def test_large_ids_stay_exact_beside_a_blank_in_every_column_that_has_room_for_both(ids, kind, wrap):
    column = wrap(pd.array([2**53 + 1, None, 7], dtype="Int64").astype(kind))
    assert Vocabulary(ids).encode(column).tolist() == [3, 0, 1]


@pytest.mark.parametrize(
    ("ids", "number", "bits"),
    [
        ([7, 2.0**53], "9007199254740992.0", 64),
        (np.array([-(2.0**53), np.nan]), "-9007199254740992.0", 64),
        (np.array([np.inf, 2**24, 7], np.float32), "16777216.0", 32),
        ([np.float32(2**24)], "16777216.0", 32),
        (pd.array([None, 2**24 + 1], dtype="Float32"), "16777216.0", 32),
        (pd.Series([None, 2**24], dtype="float[pyarrow]"), "16777216.0", 32),
        (pd.Categorical(np.array([2**24, 7], np.float32)), "16777216.0", 32),
        (torch.tensor([7, 2.0**24]), "16777216.0", 32),
        (pd.Series([2**53 + 1, None]), "9007199254740992.0", 64),
    ],
)
def test_an_id_that_rounding_may_have_made_of_another_is_refused(ids, number, bits):
    vocabulary = Vocabulary(np.array([7, 2**24, 2**53]))
    with pytest.raises(UserError, match=f"an item id is {number}, but .* not exact as float{bits}; give integers"):
        vocabulary.encode(ids)
    assert vocabulary.encode([2.0**53 - 1, np.float32(2**24 - 1), 7.0, 1e400]).tolist() == [0, 0, 1, 0]


def test_an_arrow_column_of_ids_has_the_ids_of_its_values():
    vocabulary = Vocabulary(np.array(["7", "None", "nan"], object))
    assert vocabulary.encode(pa.array([7.0, None])).tolist() == [1, 0]
    assert vocabulary.encode(pa.array(["None", None])).tolist() == [2, 0]

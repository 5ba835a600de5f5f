"""Hashes see every value and nothing of how it is held."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from recbft.datasets.hashing import sha256_of, text_parts


@pytest.mark.parametrize("other", [np.array([1, 2], np.int32), np.array([1, 2], ">i8"), np.array([1, 2], np.uint8)])
def test_whole_numbers_of_any_width_are_the_same(other):
    assert sha256_of(np.array([1, 2])) == sha256_of(other) != sha256_of(np.array([2, 1]))


def test_ids_are_their_canonical_texts():
    assert sha256_of(*text_parts(np.array([7, 12]))) == sha256_of(*text_parts(pa.array(["7", "12"])))
    assert sha256_of(*text_parts(pa.array(["71", "2"]))) != sha256_of(*text_parts(pa.array(["7", "12"])))

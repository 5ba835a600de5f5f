from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError


@pytest.mark.parametrize("form", [np.array, list])
def test_threads_that_ask_first_and_at_once_find_every_item(form):
    vocabulary, together = Vocabulary(np.arange(300_000)), Barrier(8)

    def ask(_):
        together.wait()
        return vocabulary.encode(form([0, 299_999, 300_000])).tolist()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [[1, 300_000, 0]] * 8


@pytest.mark.parametrize("value", [b"7", [7], (7,), np.array([7])])
def test_what_is_neither_number_nor_text_is_refused_not_unknown(value):
    with pytest.raises(UserError, match="give ids that are whole numbers or text, one per event"):
        Vocabulary(np.array([7])).encode([value])

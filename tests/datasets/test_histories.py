from __future__ import annotations

import pandas as pd
import pytest

from recbft.datasets.histories import read_histories
from recbft.errors import UserError


def test_histories_keep_row_order_short_users_and_repeats(tmp_path):
    (tmp_path / "h.csv").write_text("user_id,item_id\nbob,tea\nann,milk\nbob,tea\nbob,egg\n")
    assert read_histories(tmp_path / "h.csv") == {"bob": ["tea", "tea", "egg"], "ann": ["milk"]}


def test_a_time_column_sorts_stably(tmp_path):
    frame = pd.DataFrame({"u": [1, 2, 1, 1], "i": [9, 8, 7, 6], "t": [5, 1, 5, 2]})
    frame.to_parquet(tmp_path / "h.parquet")
    assert read_histories(tmp_path / "h.parquet", user="u", item="i", time="t") == {1: [6, 9, 7], 2: [8]}


def test_a_missing_column_is_refused_by_name(tmp_path):
    (tmp_path / "h.csv").write_text("user,item_id\nbob,tea\n")
    with pytest.raises(UserError, match=r"h\.csv: no column 'user_id'; did you mean 'user'"):
        read_histories(tmp_path / "h.csv")

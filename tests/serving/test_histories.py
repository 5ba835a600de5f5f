from __future__ import annotations

import pandas as pd
import pytest

from recbft.serving.histories import histories_from_file, in_usual_columns


def test_histories_keep_row_order_short_users_and_repeats(tmp_path):
    (tmp_path / "h.csv").write_text("user_id,item_id\nbob,tea\nann,milk\nbob,tea\nbob,egg\n")
    frame = histories_from_file(tmp_path / "h.csv")
    assert frame.columns.tolist() == ["user_id", "item_id"]
    assert frame.to_numpy().tolist() == [["bob", "tea"], ["ann", "milk"], ["bob", "tea"], ["bob", "egg"]]


def test_a_time_column_sorts_stably_and_is_kept(tmp_path):
    frame = pd.DataFrame({"u": [1, 2, 1, 1], "i": [9, 8, 7, 6], "t": [5, 1, 5, 2]})
    frame.to_parquet(tmp_path / "h.parquet")
    read = histories_from_file(tmp_path / "h.parquet", user="u", item="i", time="t")
    assert read["timestamp"].dtype == "int64"
    assert read.to_numpy().tolist() == [[2, 8, 1], [1, 6, 2], [1, 9, 5], [1, 7, 5]]


def test_dates_come_back_as_dates(tmp_path):
    dates = pd.to_datetime(["2020-01-02 00:00:00.0", "2020-01-01 00:00:00.5"])
    pd.DataFrame({"user_id": [1, 1], "item_id": [8, 9], "t": dates}).to_parquet(tmp_path / "h.parquet")
    read = histories_from_file(tmp_path / "h.parquet", time="t")
    assert read["item_id"].tolist() == [9, 8] and read["timestamp"].tolist() == sorted(dates)


@pytest.mark.parametrize("timed", [False, True])
def test_rows_are_chosen_as_training_chose_them(tmp_path, timed):
    """By the row filter and without repeats, in the order of the histories, whichever order the rows have."""
    frame = pd.DataFrame({"user_id": list("aabaaab"), "item_id": list("xyxzxyx")})
    frame = frame.assign(rating=[5, 1, 4, 4, 3, 5, 5], t=range(7))
    read = {}
    for name, rows in (("whole", frame.sample(frac=1, random_state=3) if timed else frame),
                       ("chosen", frame[frame["rating"] >= 4])):  # fmt: skip
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
        where = "rating>=4" if name == "whole" else None
        for keep in (None, "first", "last"):
            read[name, keep] = histories_from_file(
                tmp_path / f"{name}.csv", time="t" if timed else None, where=where, deduplicate=keep
            )
    for keep in (None, "first", "last"):
        pd.testing.assert_frame_equal(read["whole", keep], read["chosen", keep])
    assert read["whole", None].attrs == {"filtered_out": 2, "repeated": 0}
    assert read["whole", "last"].attrs == {"filtered_out": 2, "repeated": 1}
    assert read["whole", None]["item_id"].tolist() == list("xxzyx")
    assert read["whole", "first"]["item_id"].tolist() == list("xxzy")
    assert read["whole", "last"]["item_id"].tolist() == list("xzyx")


@pytest.mark.parametrize(
    ("own", "users"),
    [
        ({"user": "who", "session": "visit"}, ["1/a", "1/a", "1/b", "2/a"]),
        ({"user": None, "session": "visit"}, ["a", "a", "b", "a"]),
        ({"user": "who"}, [1, 1, 1, 2]),
        ({"user": "absent"}, None),
    ],
)
def test_a_frame_with_the_columns_of_the_run_s_data_is_read_by_its_sessions(own, users):
    frame = pd.DataFrame({"who": [1, 1, 1, 2], "visit": ["a", "a", "b", "a"], "item_id": [5, 6, 7, 8], "more": 0})
    named = in_usual_columns(frame, item=None, time=None, **own)
    if users is None:
        assert named is frame
    else:
        assert list(named) == ["user_id", "item_id"] and named["user_id"].tolist() == users

"""Row filters on numbers, texts and dates, by tables small enough to work by hand."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from recbft.datasets import Dataset, Preparation
from recbft.datasets.row_filter import conditions_of, satisfying
from recbft.errors import UserError
from tests.datasets.test_prepare import histories, log


def kept(where, **columns):
    """The rows that a filter keeps, by number."""
    arrays = {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in columns.items()}
    num_rows = len(next(iter(arrays.values())))
    return np.flatnonzero(satisfying(arrays, conditions_of(where), num_rows, "log")).tolist()


EVENTS = ["view", "buy", " cart ", None, "buy", "NULL", "add to cart"]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("event = buy", [1, 4]),
        ("event==buy", [1, 4]),
        ("event != buy", [0, 2, 6]),
        ("event in (buy, cart)", [1, 2, 4]),
        ("event IN (buy,cart,)", [1, 2, 4]),
        ("event not in (buy, 'cart')", [0, 6]),
        ("event = 'add to cart'", [6]),
        ("event = add to cart", [6]),
        ('"event" in ("add to cart", view) and `n` < 3', [0]),
        ("event = BUY", []),
        ("event = buy and n > 1", [4]),
        ("event = buy && n = 1 AND n != 7", [1]),
        ("event = 5", []),
    ],
)
@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_texts_are_compared_letter_by_letter(where, rows, kind):
    events = pa.array(EVENTS) if kind == "dictionary" else pa.array(EVENTS, getattr(pa, kind)())
    frame = pd.DataFrame({"user_id": 1, "item_id": range(7), "event": pd.Series(EVENTS, dtype=object), "n": range(7)})
    if kind == "dictionary":
        frame["event"] = frame["event"].astype("category")
        if len(rows) >= 3:
            made = Dataset.from_frame(frame, preparation=Preparation(where=where))
            assert made.decode(made.items).tolist() == rows
        return
    assert kept(where, event=events, n=range(7)) == rows


def test_a_number_in_a_column_of_texts_is_a_text_and_in_one_of_numbers_a_number():
    assert kept("size = 5", size=["5", "5.0", "XL"]) == [0]
    assert kept("size = 5", size=["5", "5.0", "6"]) == [0, 1]
    assert kept("size in (5, XL)", size=["5", "5.0", "XL"]) == [0, 2]
    assert kept("size in (5, 6.5)", size=[5, 6, 7]) == [0] == kept("size in ('5', 6.5)", size=[5, 6, 7])
    assert kept("size not in (5, 6)", size=[5.0, None, 7.0]) == [2]
    assert kept("ok = true", ok=[True, None, False]) == [0] == kept("ok = 1", ok=[True, None, False])
    assert kept("ok != 1", ok=pa.array([None, None], pa.int64())) == []


DAYS = [datetime.datetime(2024, 1, 30, 23, 59), datetime.datetime(2024, 1, 31), datetime.datetime(2024, 1, 31, 12, 30)]
DAYS += [datetime.datetime(2024, 2, 1), None]
SECONDS = [None if day is None else int(day.replace(tzinfo=datetime.timezone.utc).timestamp()) for day in DAYS]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("t >= 2024-01-31", [1, 2, 3]),
        ("t > 2024-01-31", [3]),
        ("t <= 2024-01-31", [0, 1, 2]),
        ("t < 2024-01-31", [0]),
        ("t = 2024-01-31", [1, 2]),
        ("t != 2024-01-31", [0, 3]),
        ("t in (2024-01-30, 2024-02-01)", [0, 3]),
        ("t >= 2024-01-31 and t < 2024-02-01", [1, 2]),
        ("t >= 2024-01-31 12:30", [2, 3]),
        ("t > 2024-01-31T12:30:00Z", [3]),
        ("t = 2024-01-31 13:30:00+01:00", [2]),
        ("t < 2024-01-31 12:30:00.001", [0, 1, 2]),
    ],
)
@pytest.mark.parametrize(
    "column",
    [
        pa.array(DAYS),
        pa.array(DAYS, pa.timestamp("ns", "Europe/Berlin")),
        pa.array([None if day is None else str(day) for day in DAYS]),
        pa.array(SECONDS),
        pa.array([None if second is None else str(second) for second in SECONDS]),
        pa.array([None if second is None else second * 1000 for second in SECONDS]),
        pa.array([None if second is None else float(second) for second in SECONDS]),
    ],
    ids=["us", "ns", "text", "seconds", "digits", "ms", "float"],
)
def test_dates_are_compared_with_dates_and_with_numbers_since_1970(where, rows, column):
    assert kept(where, t=column) == rows


def test_a_day_is_compared_with_days():
    days = pa.array([None if day is None else day.date() for day in DAYS])
    assert kept("t <= 2024-01-31", t=days) == [0, 1, 2]


@pytest.mark.parametrize(
    ("where", "at"),
    [
        ("rating is good", "rating is good"),
        ("", ""),
        ("rating >= 4 and", "rating >= 4 and"),
        ("rating >= 4 and year", "year"),
        ("event in ()", "event in ()"),
        ("event in buy", "event in buy"),
        ("event = (buy)", "event = (buy)"),
        ("event in (buy, cart", "event in (buy, cart"),
        ("a = b = c", "a = b = c"),
        ("event = buy or event = cart", "event = buy or event = cart"),
        ("event = buy or cart", "event = buy or cart"),
        ("rating > ", "rating > "),
    ],
)
def test_a_filter_that_cannot_be_read_is_refused_where_it_cannot(where, at):
    with pytest.raises(UserError) as raised:
        conditions_of(where)
    assert f"row filter {where!r} cannot be read at {at!r}; write conditions such as" in str(raised.value)
    with pytest.raises(UserError, match=r"row filter .* 2024-02-30 is no date"):
        conditions_of("t > 2024-02-30")


@pytest.mark.parametrize(
    ("where", "values", "complaint"),
    [
        ("a > 3", ["5", "good", "4"], "row 2: column 'a' holds 'good', but the row filter compares it with a number"),
        ("a > x", ["5", "6"], "row 1: column 'a' holds '5', but > compares numbers or dates"),
        ("a > 2024-01-01", ["may", "june"], "row 1: column 'a' holds 'may', but > compares numbers or dates"),
        ("a = buy", [1, 2], "column 'a' has type int64, and the row filter asks for 'buy'; numbers: compare it with o"),
        ("a > 3", [datetime.date(2024, 1, 1)], "column 'a' has type date32.*, and .* asks for '3'; dates: compare it"),
        ("a > 2024-01-01", ["2024-01-02", "?"], "row 2: column 'a' holds .*write all dates alike"),
    ],
)
def test_what_cannot_be_compared_is_refused(where, values, complaint):
    with pytest.raises(UserError, match=f"^log: {complaint}"):
        kept(where, a=values)


def test_a_filter_on_the_column_of_times_keeps_their_events_in_files_and_frames(tmp_path):
    frame = log("a:o a:p a:q a:r a:s", day=["2024-01-01", "2024-01-05", "2024-01-03", "2024-01-04", "2023-12-31"])
    frame["event"] = ["buy", "buy", "view", "cart", "buy"]
    frame.to_csv(tmp_path / "a.csv", index=False)
    preparation = Preparation(where="day >= 2024-01-01 and event in (buy, cart)")
    for made in (
        Dataset.from_frame(frame, time="day", preparation=preparation),
        Dataset.load(tmp_path / "a.csv", time="day", preparation=preparation),
    ):
        assert histories(made) == {"a": ["o", "r", "p"]}
        assert made.preparation["dropped"]["events_filtered_out"] == 2


@pytest.mark.parametrize(("kind", "blank"), [("int64", False), ("Int64", True), ("str", True), ("category", False)])
def test_a_row_filter_knows_whole_numbers_that_floats_do_not(kind, blank):
    large = 2**53 + 1  # as float64 the one before it
    h = pd.Series(np.repeat([large, large - 1], 4)).astype(kind)
    frame = pd.DataFrame({"user_id": np.repeat([1, 2], 4), "item_id": [1, 2, 3, 4] * 2, "h": h})
    if blank:
        frame.loc[[3, 7], "h"] = "" if kind == "str" else None
    dataset = Dataset.from_frame(frame, preparation=Preparation(where=f"h=={large}"))
    assert dataset.user_ids.tolist() == [1]
    assert Dataset.from_frame(frame, preparation=Preparation(where=f"h<={large}.5")).num_users == 2


@pytest.mark.parametrize("kind", [np.float32, np.float64, str])
@pytest.mark.parametrize(("where", "kept"), [("h>=4.1", "bc"), ("h<=4.1", "ab"), ("h>4.1", "c"), ("h<1e39", "abc")])
def test_a_row_filter_keeps_the_same_rows_in_every_precision(where, kept, kind):
    height = np.repeat([4.0, 4.1, 4.2], 3).astype(kind)
    frame = pd.DataFrame({"user_id": np.repeat(["a", "b", "c"], 3), "item_id": 1, "h": height})
    assert "".join(Dataset.from_frame(frame, preparation=Preparation(where=where)).user_ids) == kept


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("rating>=4", "p q r s"),
        (" rating > 4 ", "q r s"),
        ("rating==5 and year<2003", "q r s"),
        ("rating>0 and year>2000 and rating>=3", "p q r s u"),
        ("rating!=5", "o p t u"),
        ("rating<=4.0 && year>=1e3", "o p t u"),
    ],
)
@pytest.mark.parametrize("kind", [int, float, str])
def test_a_row_filter_keeps_the_rows_that_satisfy_it(where, kept, kind):
    ratings, years = [1, 4, 5, 5, 5, 2, 3], [2000, 2001, 2002, 2002, 2002, 2004, 2005]
    frame = log("a:o a:p a:q a:r a:s a:t a:u", rating=[kind(r) for r in ratings], year=years)
    dataset = Dataset.from_frame(frame, preparation=Preparation(where=where))
    assert histories(dataset)["a"] == kept.split()


@pytest.mark.parametrize(
    "rating", [[5.0, None, 5.0, 5.0], *(["5", blank, "5.0", " 5"] for blank in (None, "", " NaN ", "NULL"))]
)
def test_a_row_whose_filter_value_is_blank_is_dropped_and_counted(rating):
    frame = log("a:o a:p a:q a:r", rating=rating)
    dataset = Dataset.from_frame(frame, preparation=Preparation(where="rating!=1"))
    assert histories(dataset) == {"a": ["o", "q", "r"]}
    assert dataset.preparation["dropped"]["events_filtered_out"] == 1


def test_a_row_filter_on_text_or_a_missing_column_is_refused():
    frame = log("a:o a:p a:q", rating=["5", "good", "4"])
    with pytest.raises(UserError, match="frame: row 2: column 'rating' holds 'good', but the row filter compares it"):
        Dataset.from_frame(frame, preparation=Preparation(where="rating>3"))
    with pytest.raises(UserError, match="frame: no column 'ratings'; did you mean 'rating'"):
        Dataset.from_frame(frame, preparation=Preparation(where="ratings>3"))
    dates = frame.assign(rating=pd.to_datetime(["2020-01-01"] * 3))
    with pytest.raises(
        UserError, match=r"frame: column 'rating' has type timestamp.*, and the row filter asks for '3'; dates"
    ):
        Dataset.from_frame(dates, preparation=Preparation(where="rating>3"))

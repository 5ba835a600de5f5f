"""Dates written as text are the times that a column of dates would hold; what is no date is named."""

from __future__ import annotations

import re
from datetime import date, datetime, timezone

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recbft import Dataset, Recommender
from recbft.datasets.events import read_times
from recbft.datasets.reading import dates
from recbft.errors import UserError

SECOND = 1_706_704_200  # 2024-01-31 12:30:00 UTC


def read(*values):
    times, unit = read_times(pa.array(values, pa.string()), "when", "table")
    return times.tolist(), unit


@pytest.mark.parametrize(
    ("text", "ticks", "unit"),
    [
        ("2024-01-31", SECOND - 45_000, "s"),
        ("2024-01-31 12:30", SECOND, "s"),
        (" 2024-01-31T12:30:00 ", SECOND, "s"),
        ("2024-01-31T12:30:00Z", SECOND, "s"),
        ("2024-01-31 14:30:00+02:00", SECOND, "s"),
        ("2024-01-31 07:00-0530", SECOND, "s"),
        ("2024-01-31 12:30:00 UTC", SECOND, "s"),
        ("2024-01-31 12:30:00.250 UTC", SECOND * 1000 + 250, "ms"),
        ("2024-01-31T12:30:00.25Z", SECOND * 1000 + 250, "ms"),
        ("2024-01-31 12:30:00.000001", SECOND * 10**6 + 1, "us"),
        ("2024-01-31 12:30:00.000000001", SECOND * 10**9 + 1, "ns"),
    ],
)
def test_a_date_is_its_ticks_since_1970(text, ticks, unit):
    assert read(text) == ([ticks], unit)


@given(
    st.lists(
        st.datetimes(min_value=pd.Timestamp(1970, 1, 1), max_value=pd.Timestamp(2200, 1, 1)), min_size=1, max_size=20
    ),
    st.sampled_from(["", "Z", "+05:30", "-08"]),
    st.sampled_from(["T", " "]),
)
def test_text_and_dates_agree(stamps, offset, between):
    hours = {"": 0, "Z": 0, "+05:30": -5.5, "-08": 8}[offset]
    column = pd.Series(stamps, dtype="datetime64[us]") + pd.Timedelta(hours=hours)
    if (column < pd.Timestamp(1970, 1, 1)).any():
        return
    wanted, unit = read_times(pa.array(column), "when", "table")
    found, own = read(*(stamp.isoformat(sep=between) + offset for stamp in stamps))
    assert (found, own) == (wanted.tolist(), unit)


@pytest.mark.parametrize(
    ("values", "row", "complaint"),
    [
        (["2024-01-31", "2024-02-30"], 2, "which is no date of a calendar between 1677 and 2262; write all dates"),
        (["2024-01-31T00:00Z", "9999-12-31T00:00Z"], 2, "which is no date of a calendar between 1677 and 2262"),
        (["2024-01-31", "2600-01-01"], 2, "which is no date of a calendar between 1677 and 2262"),
        (["1500-01-01"], 1, "which is no date of a calendar between 1677 and 2262"),
        (["2024-01-31", "31.01.2024"], 2, "which is no date as the column's first, '2024-01-31'; write all dates"),
        (["2024-01-31", "2024-01-31T00:00Z"], 2, "which is no date as the column's first"),
        (["2024-01-31T00:00Z", "2024-01-31"], 2, "which is no date as the column's first"),
        (["2024-01-31", "1706704200"], 2, "which is no date as the column's first"),
        (["2024-13-31"], 1, "which is no date of a calendar between 1677 and 2262; write"),
        (["2024-02-30 12:30:00+02:00"], 1, "which is no date of a calendar between 1677 and 2262; write"),
        (["2024-01-31 12:30:00,250"], 1, "which begins with a day and does not go on as a date; write all dates"),
        (["2024-01-31 01:30:00 PM"], 1, "which begins with a day and does not go on as a date"),
        (["2024-01-31 12:30 UTC", "2024-01-31"], 2, "which is no date as the column's first, '2024-01-31 12:30 UTC'"),
        (["2024-01-31", " "], 2, "but a time may not be blank"),
        (["2024-01-31", "NaT"], 2, "but a time may not be blank"),
        (["NULL", "2024-01-31"], 1, "but a time may not be blank"),
        (["", "2024-01-31"], 1, "but a time may not be blank"),
        (["2024-01-31", "1969-12-31"], 2, "but a date must not lie before 1970"),
        (["31.01.2024"], 1, "a whole number or a date; write numbers with digits alone, and dates as 2024-01-31 or"),
        (["1706704200", "2024-01-31"], 2, "but a time must be a whole number or a date"),
        (["2024-1-31"], 1, "but a time must be a whole number or a date"),
        (["2024-01-31x"], 1, "but a time must be a whole number or a date"),
    ],
)
def test_what_is_no_date_is_named(values, row, complaint):
    with pytest.raises(
        UserError, match=re.escape(f"table: row {row}: column 'when' holds ") + ".*" + re.escape(complaint)
    ):
        read(*values)


@pytest.mark.parametrize("bad", [1, 2, 500, 997, 999])
def test_the_first_of_several_bad_dates_is_named(bad):
    values = ["2024-01-31"] * 1000
    values[bad:] = ["2024-02-31"] * (1000 - bad)
    with pytest.raises(UserError, match=f"row {bad + 1}: .*2024-02-31"):
        read(*values)


def test_an_empty_column_holds_no_dates():
    assert not dates.are_dates(pa.array([], pa.string())) and not dates.are_dates(pa.array([None], pa.string()))


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    when = pd.to_datetime("2024-01-01") + pd.to_timedelta(rng.permutation(240), unit="min")
    return pd.DataFrame(
        {"user_id": np.repeat(np.arange(40), 6), "item_id": rng.integers(0, 20, 240), "timestamp": when}
    )


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_file_with_dates_in_text_is_the_data_set_of_the_dates(suffix, frame, tmp_path):
    wanted = Dataset.from_frame(frame, time="timestamp")
    text = frame.assign(timestamp=frame.timestamp.dt.strftime("%Y-%m-%dT%H:%M:%SZ"))
    path = tmp_path / f"events.{suffix}"
    if suffix == "csv":
        text.to_csv(path, index=False)
    elif suffix == "jsonl":
        text.to_json(path, orient="records", lines=True)
    else:
        text.to_parquet(path)
    for found in (Dataset.load(path, time="timestamp"), Dataset.from_frame(text, time="timestamp")):
        assert found.content_hash == wanted.content_hash
        assert found.preparation["time_unit"] == wanted.preparation["time_unit"] == "s"


def test_dates_in_a_column_of_objects_keep_their_last_digit():
    stamps = [pd.Timestamp(1_706_704_200_000_000_000 + number) for number in (5, 3, 4)]
    frame = pd.DataFrame({"user_id": ["ann"] * 3, "item_id": ["a", "b", "c"], "timestamp": pd.Series(stamps)})
    wanted = Dataset.from_frame(frame, time="timestamp")
    assert wanted.decode(wanted.items).tolist() == ["b", "c", "a"]
    for zone in (None, "UTC"):
        objects = frame.assign(timestamp=frame.timestamp.dt.tz_localize(zone).astype(object))
        assert Dataset.from_frame(objects, time="timestamp").content_hash == wanted.content_hash


def test_days_beside_dates_with_a_time_of_day_are_refused():
    noon = datetime(2024, 1, 31, 12)
    frame = pd.DataFrame({"user_id": ["ann"] * 3, "item_id": ["a", "b", "c"]})
    for values in ([noon.date(), noon, noon], [noon, noon.date(), noon]):
        mixed = frame.assign(timestamp=pd.Series(values, dtype=object))
        with pytest.raises(UserError, match=r"'timestamp' mixes values of type date, datetime; use one type per col"):
            Dataset.from_frame(mixed, time="timestamp")


@pytest.mark.parametrize("number", [1_706_704_200, 1.5, np.int64(5)])
@pytest.mark.parametrize("first", [datetime(2024, 1, 31, 12), date(2024, 1, 31), pd.Timestamp(2024, 1, 31, tz="UTC")])
def test_a_number_beside_dates_is_refused(first, number):
    frame = pd.DataFrame({"user_id": ["ann"] * 3, "item_id": ["a", "b", "c"]})
    mixed = frame.assign(timestamp=pd.Series([first, number, first], dtype=object))
    with pytest.raises(UserError, match=rf"'timestamp' mixes values of type .*{type(number).__name__}.*; use one type"):
        Dataset.from_frame(mixed, time="timestamp")


def test_dates_with_a_time_zone_beside_dates_without_one_are_refused():
    noon = datetime(2024, 1, 31, 12)
    frame = pd.DataFrame({"user_id": ["ann"] * 3, "item_id": ["a", "b", "c"]})
    mixed = frame.assign(timestamp=pd.Series([noon, noon.replace(tzinfo=timezone.utc), noon], dtype=object))
    with pytest.raises(UserError, match="mixes values of type datetime, datetime with a time zone; use one type"):
        Dataset.from_frame(mixed, time="timestamp")


def test_a_model_that_reads_times_takes_dates_in_text(frame):
    dataset = Dataset.from_frame(frame, time="timestamp")
    model = Recommender("hstu", arm="published", time_bias=True, hidden_size=8, epochs=1, device="cpu").fit(dataset)
    histories = frame.sort_values(["user_id", "timestamp"])
    text = histories.assign(timestamp=histories.timestamp.astype(str))
    pd.testing.assert_frame_equal(model.recommend(text, k=3), model.recommend(histories, k=3))

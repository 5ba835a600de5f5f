"""What counts as an id and as a time, dates in text, words for missing values, and how refusals read."""

from __future__ import annotations

import datetime
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recbft.datasets import Dataset, Events
from recbft.datasets.columns import stands_for_nothing
from recbft.datasets.events import check_unit, in_unit, read_times
from recbft.errors import UserError

SECOND = 1_706_704_200  # 2024-01-31 12:30:00 UTC
LOG = pd.DataFrame({"user_id": ["ann"] * 3 + ["bob"] * 3, "item_id": list("abcabd")})


def events_of(**columns):
    columns = {"user_id": ["u"] * 3, "item_id": ["a", "b", "c"], **columns}
    time = "timestamp" if "timestamp" in columns else None
    return Events.from_table(pa.table(columns), source="log", user="user_id", item="item_id", time=time)


def test_a_column_has_one_meaning():
    table = pa.table({"user_id": ["u"] * 3, "when": [1, 2, 3]})
    with pytest.raises(
        UserError, match="log: user, item, time and session must be columns of their own, not user_id, when, when"
    ):
        Events.from_table(table, source="log", user="user_id", item="when", time="when")


@pytest.mark.parametrize(
    "times",
    [
        [1, 0, 2**62],
        [0.0, 881250949.0, 2.0],
        ["1", "0", "9000000000000000001"],
        ["1.0", " 881250949.000", "9.78E8"],
        ["0.0", "0E0", "+5E0"],
        pa.array([1, 2, 3], pa.uint64()),
        pa.array([1, 2, 3], pa.float32()),
        [Decimal(1), Decimal(2), Decimal("3.0")],
    ],
)
def test_whole_times_are_taken_exactly_however_they_are_written(times):
    taken = events_of(timestamp=times).time
    assert taken.dtype == np.int64
    assert taken.tolist() == [
        int(float(t)) if "E" in str(t) or "." in str(t) else int(str(t)) for t in pa.array(times).to_pylist()
    ]


BLANK = "but a time may not be blank; fill it in, drop the row, or name no time column"
NO_TIME = r"but a time must be a number from 0 to 2\*\*63 or a date since 1970, such as 2024-01-31 or"


@pytest.mark.parametrize(
    ("times", "row", "value", "complaint"),
    [
        ([1.0, float("nan"), 2.0], 2, "nan", BLANK),
        ([1, None, 2], 2, "nothing", BLANK),
        ([1, 2, -7], 3, "-7", NO_TIME),
        ([datetime.datetime(2020, 1, 1), datetime.datetime(1969, 1, 1)], 2, r"datetime.datetime\(1969, .*\)", NO_TIME),
        ([1.5, -2.5, 3.0], 2, "-2.5", NO_TIME),
        (
            [1.5, float("inf"), 3.0],
            2,
            "inf",
            r"but whole numbers above 2\*\*53 are not exact as float64; store integers",
        ),
        (pa.array([1, 2, 2**63], pa.uint64()), 3, "'9223372036854775808'", NO_TIME),
        (
            [1.0, float("inf"), 3.0],
            2,
            "inf",
            r"but whole numbers above 2\*\*53 are not exact as float64; store integers",
        ),
        (pa.array([1, 2**24], pa.float32()), 2, "16777216.0", r"but whole numbers above 2\*\*24 are not exact as fl"),
        (["1", "", "2"], 2, "''", BLANK),
        (["1", "2", "-3.0"], 3, "'-3.0'", NO_TIME),
        (["1", "2", "inf"], 3, "'inf'", NO_TIME),
        (["1", "2", "9" * 30], 3, "'9+'", NO_TIME),
        (["1", "2", "1e-400"], 3, "'1e-400'", NO_TIME),
        (["1", "2", "1_0"], 3, "'1_0'", NO_TIME),
        (["31.01.2024"], 1, "'31.01.2024'", NO_TIME),
        (["2024-01-31x"], 1, "'2024-01-31x'", NO_TIME),
        (["2024-01-31", "NaT"], 2, "'NaT'", BLANK),
    ],
)
def test_what_is_no_time_is_refused_by_row_and_value(times, row, value, complaint):
    with pytest.raises(UserError, match=rf"^log: row {row}: column 'timestamp' holds {value}, {complaint}"):
        read_times(times if isinstance(times, pa.Array) else pa.array(times), "timestamp", "log")


@pytest.mark.parametrize(
    "times",
    [
        ["2024-01-31", "2024-02-30"],
        ["2024-01-31", "31.01.2024"],
        ["2024-01-31T00:00Z", "9999-12-31T00:00Z"],
        ["2024-01-31", "2600-01-01"],
        ["1500-01-01"],
        ["2024-01-31", "2024-01-31T00:00Z"],
        ["2024-01-31T00:00Z", "2024-01-31"],
        ["2024-01-31 01:30:00 PM"],
    ],
)
def test_a_date_that_is_none_or_unlike_the_first_is_refused_by_its_value(times):
    with pytest.raises(UserError, match=rf"^log: .*column 'timestamp'.*'{times[-1]}'.*write all dates alike"):
        read_times(pa.array(times), "timestamp", "log")


def test_a_day_is_its_first_second_and_times_of_another_type_are_refused():
    days = events_of(timestamp=[datetime.date(2020, 1, 1)] * 3)
    assert (days.time_unit, days.time.tolist()) == ("s", [1577836800] * 3)
    with pytest.raises(UserError, match="column 'timestamp' has type bool, but times must be numbers or dates"):
        events_of(timestamp=[True, True, False])


@pytest.mark.parametrize(
    ("text", "ticks", "unit"),
    [
        ("2024-01-31", SECOND - 45_000, "s"),
        (" 2024-01-31T12:30 ", SECOND, "s"),
        ("2024-01-31 14:30:00+02:00", SECOND, "s"),
        ("2024-01-31 07:00-0530", SECOND, "s"),
        ("2024-01-31 12:30:00.250 UTC", SECOND * 1000 + 250, "ms"),
        ("2024-01-31 12:30:00.000001Z", SECOND * 10**6 + 1, "us"),
        ("2024-01-31 12:30:00.000000001", SECOND * 10**9 + 1, "ns"),
    ],
)
def test_a_date_in_text_is_its_ticks_since_1970(text, ticks, unit):
    times, own = read_times(pa.array([text]), "when", "table")
    assert (times.tolist(), own) == ([ticks], unit)


@given(
    st.lists(
        st.datetimes(min_value=pd.Timestamp(1970, 1, 2), max_value=pd.Timestamp(2200, 1, 1)), min_size=1, max_size=20
    ),
    st.sampled_from([("", 0), ("Z", 0), ("+05:30", -5.5), ("-08", 8)]),
    st.sampled_from(["T", " "]),
)
def test_text_and_dates_agree(stamps, offset, between):
    column = pd.Series(stamps, dtype="datetime64[us]") + pd.Timedelta(hours=offset[1])
    wanted, unit = read_times(pa.array(column), "when", "table")
    text = pa.array([stamp.isoformat(sep=between) + offset[0] for stamp in stamps])
    found, own = read_times(text, "when", "table")
    assert (found.tolist(), own) == (wanted.tolist(), unit)


@pytest.mark.parametrize(
    ("written", "ticks", "unit"),
    [
        (["1700000000.25", "1700000001", "1.7E9"], [1_700_000_000_250, 1_700_000_001_000, 1_700_000_000_000], "ms"),
        (["1700000000.000001", "1700000001.5"], [1_700_000_000_000_001, 1_700_000_001_500_000], "us"),
        (["1700000000123.25", "0.5"], [1_700_000_000_123_250, 500], "us"),  # of a thousandth
        (["0.5", "7.0"], [500, 7000], "ms"),
    ],
)
def test_fractions_are_read_exactly_however_they_are_written(written, ticks, unit):
    for form in (written, [Decimal(text) for text in written], [float(text) for text in written]):
        found, own = read_times(pa.array(form), "when", "table")
        assert (found.tolist(), own) == (ticks, unit)


def test_a_fraction_in_single_precision_is_what_was_written():
    found, unit = read_times(pa.array([0.1, 2.25], pa.float32()), "when", "table")
    assert (found.tolist(), unit) == ([100, 2250], "ms")


def test_what_is_finer_than_nanoseconds_is_cut_off():
    found, unit = read_times(pa.array(["1700000000.1234567899", "1700000000"]), "when", "table")
    assert (found.tolist(), unit) == ([1700000000123456789, 1700000000000000000], "ns")


@pytest.mark.parametrize("form", [pa.array, lambda values: pa.array(map(str, values))])
def test_times_in_several_units_are_each_taken_in_their_own_with_a_warning(form):
    said = r"log: column 'when' holds times in several units \(1 in s, 3 in ms; row 3 holds 1700000500, in s\): each is"
    mixed = [1_700_000_000_000, 1_700_000_900_000, 1_700_000_500, 1_700_000_400_001]
    with pytest.warns(UserWarning, match=said):
        found, unit = read_times(form(mixed), "when", "log")
    assert unit is None and found.tolist() == [*mixed[:2], 1_700_000_500_000, mixed[3]]
    with pytest.warns(UserWarning, match=r"1 in s, 1 in us; .*all are kept in us"):
        found, _ = read_times(form([1_700_000_000, 1_700_000_000_000_000]), "when", "log")
    assert found.tolist() == [1_700_000_000_000_000] * 2


def test_zeros_among_dates_are_warned_of_and_kept():
    with pytest.warns(
        UserWarning, match="column 'when' holds 0 in 2 rows, first in row 2, beside dates in s: these ev"
    ):
        assert read_times(pa.array([1_700_000_000, 0, 0]), "when", "log")[0].tolist() == [1_700_000_000, 0, 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "times", [[0, 1, 2], [0, 10**3, 10**12], [5, 1_700_000_000, 1_700_000_000_000], [1_000_000_000, 3_999_999_999], []]
)
def test_numbers_of_which_some_are_no_date_of_our_time_keep_their_size(times):
    assert read_times(pa.array(times, pa.int64()), "when", "log")[0].tolist() == times


def test_a_file_with_dates_in_text_is_the_data_set_of_the_dates(tmp_path):
    when = pd.to_datetime("2024-01-01") + pd.to_timedelta(np.random.default_rng(0).permutation(24), unit="min")
    frame = pd.DataFrame({"user_id": np.repeat(np.arange(4), 6), "item_id": np.arange(24) % 7, "timestamp": when})
    wanted = Dataset.from_frame(frame, time="timestamp")
    text = frame.assign(timestamp=frame.timestamp.dt.strftime("%Y-%m-%dT%H:%M:%SZ"))
    text.to_csv(tmp_path / "events.csv")
    for found in (Dataset.load(tmp_path / "events.csv", time="timestamp"), Dataset.from_frame(text, time="timestamp")):
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


NOON = datetime.datetime(2024, 1, 31, 12)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ([NOON.date(), NOON, NOON], "date, datetime"),
        ([NOON, NOON.date(), NOON], "date, datetime"),
        ([NOON, NOON.replace(tzinfo=datetime.timezone.utc), NOON], "datetime, datetime with a time zone"),
        ([NOON, 1_706_704_200, NOON], "datetime, int"),
        ([pd.Timestamp(NOON, tz="UTC"), np.int64(5), NOON], "datetime, datetime with a time zone, int64"),
        ([NOON.date(), 1.5, NOON.date()], "date, float"),
        ([1, "b", "c"], "int, str"),
        ([1j, 2j, 3j], "complex"),
    ],
)
def test_a_column_of_objects_from_which_arrow_would_lose_something_is_refused(values, kinds):
    frame = LOG.iloc[:3].assign(when=pd.Series(values, dtype=object))
    with pytest.raises(UserError, match=f"frame: column 'when' holds values of type {kinds}; make it numbers, text or"):
        Dataset.from_frame(frame, time="when")


@pytest.mark.parametrize("blank", ["", "   ", None])
@pytest.mark.parametrize("column", ["user_id", "item_id"])
def test_a_blank_id_is_refused_by_row(column, blank):
    with pytest.raises(UserError, match=f"log: row 2: column '{column}' holds .*, but an id may not be blank"):
        events_of(**{column: ["a", blank, "c"]})


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([1.0, float("nan"), 3.0], "row 2: column 'item_id' holds nan, but an id may not be blank"),
        ([1.0, 2.5, 3.0], "row 2: column 'item_id' holds 2.5, but an id must be a whole number or a text"),
        ([1.0, -(2.0**53), 3.0], r"row 2: .* holds -9007199254740992.0, but .* 2\*\*53 are not exact as float64; st"),
        (pa.array([1, 2**24, 3], pa.float32()), r"row 2: .* holds 16777216.0, but .* 2\*\*24 are not exact as float32"),
        (pa.array(np.array([1, 2**11, 3], np.float16)), r"row 2: .* holds 2048.0, but .* 2\*\*11 are not exact as fl"),
        ([True, False, True], "column 'item_id' has type bool, but ids must be whole numbers or text, one per row; m"),
    ],
)
def test_an_id_that_is_neither_integer_nor_text_is_refused(ids, complaint):
    with pytest.raises(UserError, match=complaint):
        events_of(item_id=ids)


def test_ids_keep_their_type_and_text_is_kept_exactly():
    events = events_of(user_id=["007", "7", " 7"], item_id=[1.0, 2.0, 3.0])
    assert events.user.to_pylist() == ["007", "7", " 7"]
    assert events.item.to_pylist() == [1, 2, 3]
    assert events_of(user_id=pa.array([2**64 - 1, 1, 2], pa.uint64())).user.to_pylist() == [str(2**64 - 1), "1", "2"]
    assert events_of(user_id=pa.array([3, 1, 2], pa.uint64())).user.to_pylist() == [3, 1, 2]
    assert events_of(user_id=[2.0**53 - 1, 1.0 - 2.0**53, 0.0]).user.to_pylist() == [2**53 - 1, 1 - 2**53, 0]
    for ids in (["x", "y", "x"], [7, 9, 7]):
        assert events_of(user_id=pa.array(ids).dictionary_encode()).user.to_pylist() == ids


@pytest.mark.parametrize("kind", [pa.null(), pa.bool_(), pa.float64(), pa.string()])
def test_a_table_without_rows_has_no_events_whatever_the_types(kind):
    table = pa.table({"user_id": pa.array([], kind), "item_id": pa.array([], kind)})
    assert len(Events.from_table(table, source="log", user="user_id", item="item_id")) == 0
    with pytest.raises(UserError, match=r"no user has 3 events after filtering \(0 events of 0 users read"):
        Dataset.from_frame(table)


@pytest.mark.parametrize(
    ("ticks", "unit", "wanted", "expected"),
    [
        ([0, 5], "s", "ms", [0, 5000]),
        ([7], "us", "us", [7]),
        ([2_000, 3_000], "ms", "s", [2, 3]),
        ([2_000, 3_001], "ms", "s", None),
        ([1, 2**62], "s", "ns", None),  # one that does not fit is enough
    ],
)
def test_ticks_are_told_in_another_unit_exactly_or_not_at_all(ticks, unit, wanted, expected):
    found = in_unit(np.array(ticks), unit, wanted)
    assert (None if found is None else found.tolist()) == expected
    assert in_unit(np.array([2_000, 3_999]), "ms", "s", cut=True).tolist() == [2, 3]


@pytest.mark.filterwarnings("error")
def test_whole_numbers_of_another_unit_than_the_dates_that_were_learned_from_are_refused_or_warned_about():
    milliseconds = np.array([5, 1_700_000_000_000])
    for times, own in (
        (milliseconds, "ms"),
        (milliseconds // 1000, "s"),
        (milliseconds[:0], "s"),
        (milliseconds[:1], "us"),
        (np.array([999_999_999]), "ms"),  # eleven days that begin with 1970, as well as a date of 2001 in seconds
    ):
        check_unit(times, own, "f", stacklevel=1)
    with pytest.raises(UserError, match="of f are whole numbers up to 1700000000000, which look like dates in ms, but"):
        check_unit(milliseconds, "s", "f", stacklevel=1)
    for times, unit in ((milliseconds, "ms"), (milliseconds // 1000, "s")):
        with pytest.warns(UserWarning, match=f"look like dates in {unit}, but the model takes them for .* in us, as"):
            check_unit(times, "us", "f", stacklevel=1)


def test_words_for_a_missing_value_are_known_in_any_letters():
    words = ["nan", "None", "NULL", "null", " N/A ", "<NA>", "NaT", "\\N", "(null)", "undefined", "", "  ", None]
    assert stands_for_nothing(pa.array(words)).to_pylist() == [True] * len(words)
    assert stands_for_nothing(pa.array(["0", "nana", "-1", "no", "Nanna"])).to_pylist() == [False] * 5


def test_an_id_that_is_a_word_for_a_missing_one_is_kept_with_a_warning(tmp_path):
    frame = pd.DataFrame({"user_id": ["ann"] * 6, "item_id": ["nan", "None", "tea", "None", "None", "NULL"]})
    frame.to_csv(tmp_path / "log.csv", index=False)
    said = "item id 'None' (3 events; 2 more like it) is a word for a missing id, but counts as any other id; if"
    with pytest.warns(UserWarning) as found:
        dataset = Dataset.from_frame(frame)
        Dataset.load(tmp_path / "log.csv")
    assert [said in str(one.message) for one in found] == [True, True]
    assert {one.filename for one in found} == {__file__} and "None" in dataset.item_ids
    with pytest.warns(UserWarning, match="user id 'NULL' .3 events. is a word"):
        Dataset.from_frame(LOG.assign(user_id=["NULL"] * 3 + ["bob"] * 3))
    with pytest.warns(
        UserWarning, match=r"item id '8\.0' .3 events; 1 more like it. is text, and not the same id as the"
    ):
        Dataset.from_frame(LOG.assign(item_id=["8.0", "7.0"] * 3))


def test_what_a_spreadsheet_has_rounded_is_warned_of():
    frame = LOG.assign(item_id=["1.23457E+12", "7.3E+08", "a"] * 2)
    with pytest.warns(UserWarning, match=r"item id '.*E\+..' \(2 events; 1 more like it\) looks like a number"):
        Dataset.from_frame(frame)
    said = r"column 'timestamp' holds '1.6E\+12' and the like in 2 rows: a spreadsheet has rounded"
    with pytest.warns(UserWarning, match=said):
        assert events_of(timestamp=["5", "1.6E+12", "1.60001E+12"]).time.tolist() == [5, 16 * 10**11, 160001 * 10**7]


def test_other_ids_and_what_is_dropped_are_no_matter():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.from_frame(LOG.assign(item_id=["1e5", "1.0", "007", "12E3", "1E+5", "0"]))
        frame = pd.concat([LOG, pd.DataFrame({"user_id": ["nan"], "item_id": ["a"]})])  # a user of one event
        assert Dataset.from_frame(frame).num_users == 2

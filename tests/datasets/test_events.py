"""What counts as an id and as a time, and how refusals read."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from recbft.datasets import Dataset, Events
from recbft.datasets.events import check_columns, check_unit, in_unit
from recbft.errors import UserError


def events_of(**columns):
    columns = {"user_id": ["u"] * 3, "item_id": ["a", "b", "c"], **columns}
    time = "timestamp" if "timestamp" in columns else None
    return Events.from_table(pa.table(columns), source="log", user="user_id", item="item_id", time=time)


def test_a_column_has_one_meaning():
    table = pa.table({"user_id": ["u"] * 3, "when": [1, 2, 3]})
    with pytest.raises(UserError, match="log: column 'user_id' is named as user and item; give each its own"):
        Events.from_table(table, source="log", user="user_id", item="user_id")
    with pytest.raises(UserError, match="log: column 'when' is named as item and time; give each its own"):
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
    ],
)
def test_whole_times_are_taken_exactly_however_they_are_written(times):
    taken = events_of(timestamp=times).time
    assert taken.dtype == np.int64
    assert taken.tolist() == [
        int(float(t)) if "E" in str(t) or "." in str(t) else int(str(t)) for t in pa.array(times).to_pylist()
    ]


@pytest.mark.parametrize(
    ("times", "complaint"),
    [
        ([1.0, float("nan"), 2.0], r"log: row 2: column 'timestamp' holds nan, but a time may not be blank"),
        ([1, None, 2], r"row 2: column 'timestamp' holds nothing, but a time may not be blank"),
        ([1, 2, -7], r"row 3: column 'timestamp' holds -7, but a time must be >= 0"),
        (
            [datetime.datetime(2020, 1, 1), datetime.datetime(1969, 1, 1), datetime.datetime(2020, 1, 1)],
            r"row 2: .* holds datetime.datetime\(1969, .*\), but a date must not lie before 1970; correct it",
        ),
        ([1.0, -7.0, 2.0], r"row 2: column 'timestamp' holds -7.0, but a time must be >= 0"),
        ([1.5, 2.0, 3.0], r"row 1: .* holds 1.5, but a time must be a whole number or a date; where seconds have a fr"),
        ([Decimal("1.5"), Decimal(2), Decimal(3)], r"row 1: .* holds '1.5', but a time must be .*; where seconds have"),
        (pa.array([1, 2, 2**63], pa.uint64()), r"row 3: .* holds '9223372036854775808', but a time must fit in 64 bit"),
        (
            [1.0, float("inf"), 3.0],
            r"row 2: column 'timestamp' holds inf, but a number must be finite; correct it, or leave the row out",
        ),
        ([1.0, 1e17, 3.0], r"row 2: column 'timestamp' holds 1e\+17, but whole numbers above 2\*\*53 are not exact"),
        (
            pa.array([1, 2**24, 3], pa.float32()),
            r"row 2: column 'timestamp' holds 16777216.0, but whole numbers above 2\*\*24 are not exact as float32",
        ),
        (["1", "", "2"], r"row 2: column 'timestamp' holds '', but a time may not be blank"),
        (["1", "NaN", "2"], r"row 2: column 'timestamp' holds 'NaN', but a time may not be blank"),
        (["1", "\\N", "2"], r"row 2: column 'timestamp' holds '.*N', but a time may not be blank"),
        (
            ["1", "2", "3.25"],
            r"row 3: .* holds '3.25', but a time must be a whole number or a date; where seconds have",
        ),
        (
            ["1", "2", "1,600"],
            r"row 3: .* holds '1,600', but a time must be a whole number or a date; write numbers with",
        ),
        (["1", "2", "-3"], r"row 3: column 'timestamp' holds '-3', but a time must be >= 0"),
        (["1", "2", "-3.0"], r"row 3: column 'timestamp' holds '-3.0', but a time must be >= 0"),
        (["1", "2", "inf"], r"row 3: column 'timestamp' holds 'inf', but a time must be a whole number"),
        (["1", "2", "9" * 30], r"row 3: column 'timestamp' holds '9+', but a time must fit in 64 bits"),
        (["1", "2", "1e400"], r"row 3: column 'timestamp' holds '1e400', but a time must fit in 64 bits"),
        (["1", "2", "1e-400"], r"row 3: column 'timestamp' holds '1e-400', but a time must be a whole number"),
        (["1", "2", "0x10"], r"row 3: column 'timestamp' holds '0x10', but a time must be a whole number"),
        (["1", "2", "1_0"], r"row 3: column 'timestamp' holds '1_0', but a time must be a whole number"),
        (["1", "2", "2020-01-01"], r"row 3: column 'timestamp' holds '2020-01-01', but a time must be a whole number"),
        ([True, True, False], r"column 'timestamp' has type bool, but times must be whole numbers or dates"),
    ],
)
def test_a_time_that_is_not_a_whole_number_is_refused_by_row_and_value(times, complaint):
    with pytest.raises(UserError, match=complaint):
        events_of(timestamp=times)


def test_times_that_a_spreadsheet_has_rounded_are_warned_of():
    said = (
        "log: column 'timestamp' holds '1.6E\\+12' and the like in 2 rows, which look like numbers that a spreadsheet"
    )
    with pytest.warns(UserWarning, match=said):
        assert events_of(timestamp=["5", "1.6E+12", "1.60001E+12"]).time.tolist() == [5, 16 * 10**11, 160001 * 10**7]


def test_dates_become_ticks_of_the_coarsest_unit_that_loses_nothing():
    day = datetime.datetime(2020, 1, 1)
    whole = events_of(timestamp=[day + datetime.timedelta(seconds=s) for s in range(3)])
    assert (whole.time_unit, whole.time.tolist()) == ("s", [1577836800, 1577836801, 1577836802])
    fine = events_of(timestamp=[day + datetime.timedelta(milliseconds=s) for s in range(3)])
    assert (fine.time_unit, fine.time.tolist()) == ("ms", [1577836800000, 1577836800001, 1577836800002])
    assert events_of(timestamp=[day.date()] * 3).time.tolist() == [1577836800] * 3
    assert events_of(timestamp=[datetime.datetime(1970, 1, 1), day, day]).time.tolist() == [0] + [1577836800] * 2


@pytest.mark.parametrize("blank", ["", "   ", None])
@pytest.mark.parametrize("column", ["user_id", "item_id"])
def test_a_blank_id_is_refused_by_row(column, blank):
    with pytest.raises(UserError, match=f"log: row 2: column '{column}' holds .*, but an id may not be blank"):
        events_of(**{column: ["a", blank, "c"]})


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([1.0, float("nan"), 3.0], "row 2: column 'item_id' holds nan, but an id may not be blank"),
        ([1.0, float("-inf"), 3.0], "row 2: column 'item_id' holds -inf, but a number must be finite; correct it"),
        ([1.0, 2.5, 3.0], "row 2: column 'item_id' holds 2.5, but an id must be a whole number or a text"),
        (
            [-(2.0**53), 2.0, 3.0],
            r"row 1: .* holds -9007199254740992.0, but .* 2\*\*53 are not exact as float64; store",
        ),
        ([1.0, 2.0**53, 3.0], r"row 2: .* holds 9007199254740992.0, but .* 2\*\*53 are not exact as float64; store"),
        (pa.array([1, 2**24, 3], pa.float32()), r"row 2: .* holds 16777216.0, but .* 2\*\*24 are not exact as float32"),
        (
            pa.array(np.array([1, 2**11, 3], np.float16)),
            r"row 2: .* holds 2048.0, but .* 2\*\*11 are not exact as float16",
        ),
        ([True, False, True], "column 'item_id' has type bool, but ids must be whole numbers or text; make it text"),
        (
            [{"id": 1}, {"id": 2}, {"id": 3}],
            "struct<.*>, but ids must .*; give what is the id in it a column of its own",
        ),
        ([b"a", b"b", b"c"], r"has type binary, but ids must .*; make it text \(in pandas: .str.decode\('utf-8'\)\)"),
        (
            [[1], [2], [3, 4]],
            r"list<.*, but ids must .*; give a row for each event \(in pandas: frame.explode\('item_id",
        ),
    ],
)
def test_an_id_that_is_neither_integer_nor_text_is_refused(ids, complaint):
    with pytest.raises(UserError, match=complaint):
        events_of(item_id=ids)


def test_text_that_is_not_utf8_is_refused_by_row():
    raw = pa.array([b"a", b"caf\xe9", b"c"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    with pytest.raises(UserError, match=r"row 2: column 'item_id' holds b'caf\\xe9', which is not UTF-8"):
        events_of(item_id=broken)


def test_ids_keep_their_type_and_text_is_kept_exactly():
    events = events_of(user_id=["007", "7", " 7"], item_id=[1.0, 2.0, 3.0])
    assert events.user.to_pylist() == ["007", "7", " 7"]
    assert events.item.to_pylist() == [1, 2, 3]
    assert events_of(user_id=pa.array([2**64 - 1, 1, 2], pa.uint64())).user.to_pylist() == [str(2**64 - 1), "1", "2"]
    assert events_of(user_id=pa.array([3, 1, 2], pa.uint64())).user.to_pylist() == [3, 1, 2]
    assert events_of(user_id=[2.0**53 - 1, 1.0 - 2.0**53, 0.0]).user.to_pylist() == [2**53 - 1, 1 - 2**53, 0]
    for ids in (["x", "y", "x"], [7, 9, 7]):
        assert events_of(user_id=pa.array(ids).dictionary_encode()).user.to_pylist() == ids


def test_a_missing_column_is_named_with_the_nearest_and_all_columns():
    frame = pd.DataFrame({"user_id": [1], "item": [2]})
    with pytest.raises(
        UserError, match=r"frame: no column 'item_id'; did you mean 'item'\? \(columns: user_id, item\)"
    ):
        Dataset.from_frame(frame)
    with pytest.raises(UserError, match="frame: no column 'zzz'; choose one of item, user_id"):
        Dataset.from_frame(frame, user="zzz")


def test_a_column_of_mixed_types_is_refused_by_name():
    frame = pd.DataFrame({"user_id": [1, 1, 1], "item_id": [1, "b", "c"]})
    with pytest.raises(
        UserError, match="frame: column 'item_id' mixes values of type int, str; use one type per column"
    ):
        Dataset.from_frame(frame)


@pytest.mark.parametrize("kind", [pa.null(), pa.bool_(), pa.float64(), pa.string()])
def test_a_table_without_rows_has_no_events_whatever_the_types(kind):
    table = pa.table({"user_id": pa.array([], kind), "item_id": pa.array([], kind)})
    assert len(Events.from_table(table, source="log", user="user_id", item="item_id")) == 0
    with pytest.raises(UserError, match=r"no user has 3 events after filtering \(0 events of 0 users read"):
        Dataset.from_frame(table)


def test_something_that_is_not_a_table_is_refused():
    with pytest.raises(UserError, match="a list is not a table; give a pandas data frame or a pyarrow table"):
        Dataset.from_frame([1, 2])


@pytest.mark.parametrize(
    ("ticks", "unit", "wanted", "expected"),
    [
        ([0, 5], "s", "ms", [0, 5000]),
        ([7], "us", "us", [7]),
        ([2_000, 3_000], "ms", "s", [2, 3]),
        ([2_000, 3_001], "ms", "s", None),
        ([2**62], "s", "ns", None),
        ([1, 2**62], "s", "ns", None),  # one that does not fit is enough
    ],
)
def test_ticks_are_told_in_another_unit_exactly_or_not_at_all(ticks, unit, wanted, expected):
    found = in_unit(np.array(ticks), unit, wanted)
    assert (None if found is None else found.tolist()) == expected


def test_what_is_finer_than_a_unit_is_cut_where_that_is_asked_for():
    assert in_unit(np.array([2_000, 3_999]), "ms", "s", cut=True).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "f: no column 'user_id'; there is no column at all"),
        (["user_id;item_id"], r"there is one column, 'user_id;item_id': if ';' stands between its fields, give it as"),
        (["user"], r"f: no column 'user_id'; did you mean 'user'\?"),
    ],
)
def test_a_missing_column_is_explained_by_the_header(names, said):
    with pytest.raises(UserError, match=said):
        check_columns(names, ["user_id"], "f")


def test_an_atomic_file_without_tabs_is_not_given_a_separator_that_it_cannot_have():
    with pytest.raises(UserError, match=r"if ',' stands between its fields, write the file with tabs there"):
        check_columns(["user_id:token,item_id"], ["user_id"], "shop.inter")


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
    with pytest.raises(UserError, match="the times of f are whole numbers up to 1700000000000, which are dates in ms"):
        check_unit(milliseconds, "s", "f", stacklevel=1)
    for times, unit in ((milliseconds, "ms"), (milliseconds // 1000, "s")):
        with pytest.warns(UserWarning, match=f"look like dates in {unit}, but the model reads them in us, .* of 1970"):
            check_unit(times, "us", "f", stacklevel=1)

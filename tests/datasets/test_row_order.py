"""Times that nobody has named are held against the row order, whatever their column is called and however written."""

from __future__ import annotations

import datetime
import warnings
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from recbft import Dataset
from recbft.datasets.row_order import steps_back, time_columns
from recbft.serving.histories import histories_from_file

ROWS = pd.DataFrame({"user_id": [1, 1, 1, 2, 2, 2], "item_id": range(6), "time": [3, 2, 1, 1, 2, 3]})


def test_columns_of_times_are_known_by_their_names():
    for name in ("timestamp", "created_at", "createdAt", "event_time", "unixReviewTime", "InvoiceDate", "ts"):
        assert time_columns(["user_id", name, "rating"]) == [name]
    assert time_columns(["date", "timestamp", "time", "time"]) == ["timestamp", "date"]
    assert time_columns(["release_date", "updated_at", "runtime", "watch_time", "birth date", "hour"]) == []


@pytest.mark.parametrize("form", [list, lambda days: [datetime.date(2020, 1, day) for day in days]])
def test_steps_back_are_counted_within_users(form):
    times = pa.array(form([3, 9, 2, 5, 5]))
    assert steps_back(np.array([0, 1, 0, 1, 1]), times) == 2


def test_dates_in_text_that_go_back_are_counted():
    column = pa.array(["2024-01-02", "2024-01-01", "2024-01-03", "2024-01-02"])
    assert steps_back(np.array([0, 0, 1, 1]), column) == 2
    assert steps_back(np.array([0, 0, 1, 1]), pa.array(column.to_pylist(), pa.string_view())) == 2
    assert steps_back(np.array([0, 1, 0, 1]), column) == 0


@pytest.mark.parametrize("blank", [None, "", "NULL", "nan", "NaT"])
def test_rows_without_a_time_hide_no_step_back(blank):
    users = np.array([0, 0, 0])
    assert steps_back(users, pa.array(["2024-01-02", blank, "2024-01-01"])) == 1
    assert steps_back(users, pa.array([blank, "9", "8"])) == 1
    assert steps_back(users, pa.array([9, None, 8])) == 1


def test_times_that_are_infinite_count_as_such_and_without_a_word_of_numpy():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert steps_back(np.zeros(4, int), pa.array([np.inf, np.inf, 3.0, -np.inf])) == 2


@pytest.mark.parametrize("column", [["x", "y"], ["2024-01-02", "yesterday"], [None, None], ["", "NULL"], [[1], [2]]])
def test_what_holds_no_times_is_said_to_hold_none(column):
    assert steps_back(np.array([0, 0]), pa.array(column)) is None


def test_times_of_any_usual_name_that_contradict_the_rows_are_warned_of(tmp_path):
    frame = ROWS.rename(columns={"time": "Event Time"})
    frame.to_csv(tmp_path / "a.csv", index=False, sep=";")
    frame.to_csv(tmp_path / "b.dat", index=False, sep=";", header=False)
    frame.to_parquet(tmp_path / "c.parquet")
    said = "rows are taken in file order, but column 'Event Time' goes backwards within a user 2 times; name it as the"
    for file, how in {
        "a.csv": {"separator": ";"},
        "b.dat": {"separator": ";", "columns": list(frame.columns)},
        "c.parquet": {},
    }.items():
        for read in (Dataset.load, histories_from_file):
            with pytest.warns(UserWarning, match=said):
                read(tmp_path / file, **how)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                read(tmp_path / file, time="Event Time", **how)
    for table in (frame, pa.Table.from_pandas(frame), frame.astype({"Event Time": "category"})):
        with pytest.warns(UserWarning, match="the frame's order, but column '.*' goes backwards") as found:
            assert Dataset.from_frame(table).items.tolist() == [1, 2, 3, 4, 5, 6], "and taken as they are"
        assert found[0].filename == __file__, "it points at the call"


def test_the_first_column_that_holds_times_decides():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.from_frame(ROWS.assign(timestamp=range(6)))  # sorted by it; time is another matter
    with pytest.warns(UserWarning, match="column 'time' goes backwards within a user 2 times"):
        Dataset.from_frame(ROWS.assign(timestamp="?"))


@pytest.mark.parametrize("text", ["13.09.2020 13:57", "9/13/2020 1:57:11 PM", "09 13, 2020"])
def test_dates_that_are_not_read_are_said_to_tell_nothing(tmp_path, text):
    frame = ROWS.assign(time=text)
    frame.to_csv(tmp_path / "a.csv", index=False)
    said = rf"column 'time' could not be checked, since not all of its dates \(the first is '{text}'\) are written"
    for read in (lambda: Dataset.from_frame(frame), lambda: Dataset.load(tmp_path / "a.csv")):
        with pytest.warns(UserWarning, match=said):
            read()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.from_frame(ROWS.assign(time="12:30:00"))
        Dataset.from_frame(ROWS.assign(time="never"))


def test_equal_times_of_a_file_that_stands_newest_first_are_warned_of(tmp_path):
    """They keep their row order all the same."""
    frame = pd.DataFrame(
        {
            "user_id": ["u", "v", "u", "v", "u", "v", "u"],
            "item_id": list("abcdefg"),
            "day": ["2024-01-03", "2024-01-03", "2024-01-02", "2024-01-02", "2024-01-02", "2024-01-01", "2024-01-01"],
        }
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    said = "rows stand newest first, and 1 of them have the time of the row before: those stay in row order"
    with pytest.warns(UserWarning, match=said) as found:
        dataset = Dataset.from_frame(frame, time="day")
    assert found[0].filename == __file__ and dataset.decode(dataset.items[:4]).tolist() == list("gcea")
    with pytest.warns(UserWarning, match=said):
        Dataset.load(tmp_path / "a.csv", time="day")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.from_frame(frame.iloc[::-1], time="day")
        Dataset.from_frame(frame.assign(day=range(7, 0, -1)), time="day")  # no two are equal
        Dataset.from_frame(frame.assign(day="2024-01-01"), time="day")  # all are
        Dataset.from_frame(frame.iloc[[0, 1, 2, 3, 4, 6, 5, 5]].assign(day=[3, 3, 2, 2, 2, 4, 1, 1]), time="day")
        Dataset.from_frame(pd.concat([frame.iloc[::-1]] * 2), time="day")  # oldest first, twice


def shopping(users=20, events=6, items=40, seed=0):
    """A log whose rows stand user by user in the order of time, with ids in any order."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"user_id": np.repeat(np.arange(users), events)})
    frame["item_id"] = np.concatenate([rng.permutation(items)[:events] for _ in range(users)])
    seconds = pd.to_timedelta(np.arange(len(frame)) % events, unit="h")
    return frame.assign(created_at=pd.Timestamp("2024-01-31 08:00") + seconds, date="2024-01-31")


@pytest.mark.parametrize("kind", [int, str, "csv"])
@pytest.mark.parametrize(("ascending", "said"), [(True, "ascend"), (False, "descend")])
def test_rows_that_stand_in_the_order_of_item_ids_are_warned_of(tmp_path, kind, ascending, said):
    frame = shopping()[["user_id", "item_id"]].sort_values(["user_id", "item_id"], ascending=ascending)
    said = f"nearly all events of a user {said} by 'item_id': that is the order of a sorted table"
    if kind == "csv":
        frame.to_csv(tmp_path / "a.csv", index=False)  # 10 after 9
        read = partial(Dataset.load, tmp_path / "a.csv")
    else:
        frame["item_id"] = frame.item_id.map("{:02}".format) if kind is str else frame.item_id
        read = partial(Dataset.from_frame, frame)
    with pytest.warns(UserWarning, match=said):
        read()


@pytest.mark.parametrize("seed", range(5))
def test_rows_in_any_other_order_or_with_times_are_not(seed):
    frame = shopping(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.from_frame(frame[["user_id", "item_id"]])
        Dataset.from_frame(frame, time="created_at")
        by_item = frame.sort_values(["user_id", "item_id"])
        Dataset.from_frame(by_item, time="created_at")
        Dataset.from_frame(by_item.head(40)[["user_id", "item_id"]])  # too few to tell
        watched = frame.assign(item_id=np.arange(len(frame)))  # episodes one after the other: their times agree
        Dataset.from_frame(watched)


@pytest.mark.parametrize("form", ["frame", "csv", "parquet"])
def test_times_that_tie_for_nearly_all_neighbours_are_warned_of_and_a_finer_column_named(tmp_path, form):
    frame = shopping()
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")

    def read(table, time):
        if form == "frame":
            return Dataset.from_frame(table, time=time)
        return Dataset.load(tmp_path / f"a.{form}", time=time)

    said = (
        r"100% of a user's neighbouring events have equal times in column 'date', which does not order them: they stay"
    )
    with pytest.warns(UserWarning, match=f"{said}.*; column 'created_at' is finer: name it"):
        read(frame, "date")
    if form == "frame":
        with pytest.warns(UserWarning, match=f"{said}.*; name a finer column if there is one"):
            read(frame[["user_id", "item_id", "date"]], "date")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(frame, "created_at")


def test_the_advice_to_name_a_column_of_times_names_the_finer_one():
    frame = shopping().iloc[::-1].assign(timestamp=20240131)
    with pytest.warns(UserWarning, match="but column 'created_at' goes backwards within a user 100 times; name it"):
        Dataset.from_frame(frame)

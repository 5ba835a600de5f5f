"""Words for a missing value are seen where an id or a time should stand, and so are ids that a spreadsheet has cut."""

from __future__ import annotations

import warnings

import pandas as pd
import pyarrow as pa
import pytest

from recbft import Dataset
from recbft.datasets.reading.missing import stands_for_nothing

FRAME = pd.DataFrame({"user_id": ["ann"] * 3 + ["bob"] * 3, "item_id": list("abcabd")})


def test_words_for_a_missing_value_are_known_in_any_letters():
    words = ["nan", "None", "NULL", "null", " N/A ", "<NA>", "NaT", "\\N", "(null)", "undefined", "", "  ", None]
    assert stands_for_nothing(pa.array(words)).to_pylist() == [True] * len(words)
    assert stands_for_nothing(pa.array(["0", "nana", "-1", "no", "Nanna"])).to_pylist() == [False] * 5


@pytest.mark.parametrize("word", ["nan", "None", "NULL", "\\N"])
@pytest.mark.parametrize("column", ["user_id", "item_id"])
def test_an_id_that_is_a_word_for_a_missing_one_is_warned_of(tmp_path, column, word):
    frame = FRAME.assign(**{column: [word] * 3 + FRAME[column].tolist()[3:]})
    frame.to_csv(tmp_path / "log.csv", index=False)
    side = column.removesuffix("_id")
    said = f"{side} id {word!r} (3 events) is a word for a missing id, but counts as any other id; if"
    with pytest.warns(UserWarning) as found:
        dataset = Dataset.from_frame(frame)
        Dataset.load(tmp_path / "log.csv")
    assert [said in str(one.message) for one in found] == [True, True] and found[0].filename == __file__
    assert word in (dataset.user_ids if side == "user" else dataset.item_ids), "it is kept all the same"


def test_the_word_with_most_events_is_named_and_the_others_are_counted():
    frame = pd.DataFrame({"user_id": ["ann"] * 6, "item_id": ["nan", "None", "tea", "None", "None", "NULL"]})
    with pytest.warns(UserWarning, match=r"item id 'None' \(3 events; 2 more like it\) is a word"):
        Dataset.from_frame(frame)


def test_ids_that_a_spreadsheet_has_rounded_are_warned_of():
    frame = FRAME.assign(item_id=["1.23457E+12", "7.3E+08", "a"] * 2)
    with pytest.warns(UserWarning, match=r"item id '.*E\+..' \(2 events; 1 more like it\) looks like a number"):
        Dataset.from_frame(frame)


def test_other_ids_are_no_matter():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.from_frame(FRAME.assign(item_id=["1e5", "1.0", "007", "12E3", "1E+5", "0"]))
        Dataset.from_frame(FRAME.assign(item_id=range(6)))


def test_words_that_are_dropped_with_their_rows_are_no_matter():
    frame = pd.concat([FRAME, pd.DataFrame({"user_id": ["nan"], "item_id": ["a"]})])  # a user of one event
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Dataset.from_frame(frame).num_users == 2

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbft.datasets import Dataset
from recbft.datasets.atomic import save_atomic
from recbft.errors import UserError

FRAME = pd.DataFrame({"user": ["b", "a", "b", "a", "a", "b"], "item": list("xyzxzy"), "at": [9, 2, 9, 2, 1, 3]})


def rows(path):
    return [line.split("\t") for line in path.read_text().splitlines()]


def histories(dataset):
    return {
        str(user): [str(item) for item in dataset.decode(dataset.items[start:stop])]
        for user, start, stop in zip(dataset.user_ids, dataset.offsets, dataset.offsets[1:], strict=False)
    }


def test_rows_go_user_by_user_in_the_data_sets_order_and_ties_keep_theirs(tmp_path):
    for frame in (FRAME[::-1], FRAME):  # a file that is there is replaced
        path = save_atomic(Dataset.from_frame(frame, user="user", item="item", time="at"), tmp_path / "new", "shop")
    header, *events = rows(path)
    assert path == tmp_path / "new" / "shop" / "shop.inter"
    assert header == ["user_id:token", "item_id:token", "timestamp:float"]
    assert ["".join(row) for row in events] == ["by3", "bx9", "bz9", "az1", "ay2", "ax2"]


def test_without_times_an_event_has_its_number(tmp_path):
    dataset = Dataset.from_frame(FRAME, user="user", item="item")
    _, *events = rows(save_atomic(dataset, tmp_path, "shop"))
    assert [row[2] for row in events] == ["0", "1", "2", "0", "1", "2"]
    assert Dataset.load(tmp_path / "shop" / "shop.inter", time="timestamp").target_hash == dataset.target_hash


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2**40)), min_size=1, max_size=40))
@settings(max_examples=25)
def test_the_file_gives_the_same_data_back_and_rounding_to_single_precision_keeps_the_order(tmp_path_factory, events):
    frame = pd.DataFrame(events, columns=["user_id", "item_id", "time"])
    frame = pd.concat([frame, pd.DataFrame({"user_id": [9] * 3, "item_id": [1, 2, 3], "time": [5, 5, 5]})])
    dataset = Dataset.from_frame(frame, time="time")
    path = save_atomic(dataset, tmp_path_factory.mktemp("atomic"), "some")
    again = Dataset.load(path, time="timestamp")
    assert histories(again) == histories(dataset)
    assert (again.content_hash, again.target_hash) == (dataset.content_hash, dataset.target_hash)
    rounded = pd.read_csv(path, sep="\t")["timestamp:float"].to_numpy().astype(np.float32)
    for start, stop in zip(dataset.offsets, dataset.offsets[1:], strict=False):
        assert np.all(np.diff(rounded[start:stop]) >= 0)


@pytest.mark.parametrize(
    ("item", "message"), [("NA", "'NA' is read as a missing value by"), ('6"', "holds a tab, a line")]
)
def test_an_id_that_recbole_would_not_read_back_is_refused(tmp_path, item, message):
    frame = pd.DataFrame({"user_id": [1, 1, 1], "item_id": ["x", item, "y"]})
    with pytest.raises(UserError, match=message):
        save_atomic(Dataset.from_frame(frame), tmp_path, "some")
    assert not list(tmp_path.rglob("*.inter"))

"""Storage, vocabulary, hashes, the canonical file and the split."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recbft.datasets import Dataset, Preparation, describe, leave_one_out
from recbft.datasets.config import DataConfig
from recbft.datasets.events import Events
from recbft.datasets.loading import ROLES, CardFile
from recbft.datasets.statistics import distinct, remarks
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import UserError
from tests.datasets.test_prepare import histories

TEXT_IDS = st.text(min_size=1, max_size=5).filter(lambda text: text.strip() != "")
INT_IDS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def frames(draw, ids=None):
    """A log in which at least one user has 3 events."""
    ids = draw(st.sampled_from([TEXT_IDS, INT_IDS])) if ids is None else ids
    users = draw(st.lists(ids, min_size=1, max_size=4, unique=True))
    items = draw(st.lists(ids, min_size=1, max_size=6, unique=True))
    event = st.tuples(st.sampled_from(users), st.sampled_from(items), st.integers(0, 3) | st.integers(0, 2**62))
    rows = draw(st.lists(event, min_size=1, max_size=20)) + [(users[0], items[0], 1)] * 3
    return pd.DataFrame(draw(st.permutations(rows)), columns=["user_id", "item_id", "timestamp"])


def assert_equal(one, other):
    assert one.name == other.name and one.preparation == other.preparation
    for field in ("items", "offsets", "user_ids", "item_ids"):
        assert getattr(one, field).tolist() == getattr(other, field).tolist()
        assert getattr(one, field).dtype == getattr(other, field).dtype
    assert (one.times is None) == (other.times is None)
    assert one.times is None or one.times.tolist() == other.times.tolist()
    assert (one.content_hash, one.target_hash) == (other.content_hash, other.target_hash)


@pytest.mark.parametrize("time", [None, "timestamp"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frame=frames())
def test_a_saved_data_set_loads_as_it_was(tmp_path, time, frame):
    dataset = Dataset.from_frame(frame, time=time, preparation=Preparation(deduplicate=None))
    dataset.save(tmp_path / "saved.parquet")
    assert_equal(Dataset.load(tmp_path / "saved.parquet"), dataset)


@settings(max_examples=25, deadline=None)
@given(frame=frames(), seed=st.integers(0, 100))
def test_interleaving_users_otherwise_does_not_change_histories(frame, seed):
    dataset = Dataset.from_frame(frame, time="timestamp")
    # draw whose row comes next; each user's own rows keep their order
    order = np.random.default_rng(seed).permutation(frame.user_id.to_numpy(dtype=object))
    rows = {user: iter(list(part.itertuples(index=False))) for user, part in frame.groupby("user_id", sort=False)}
    shuffled = pd.DataFrame([next(rows[user]) for user in order], columns=frame.columns)
    other = Dataset.from_frame(shuffled, time="timestamp")
    assert histories(other) == histories(dataset)
    assert dict(zip(other.user_ids.tolist(), other.lengths.tolist(), strict=True)) == dict(
        zip(dataset.user_ids.tolist(), dataset.lengths.tolist(), strict=True)
    )


@settings(max_examples=20, deadline=None)
@given(frame=frames(ids=INT_IDS))
def test_hashes_see_the_text_of_ids_not_their_type_nor_the_interleaving(frame):
    dataset = Dataset.from_frame(frame, time="timestamp")
    as_text = frame.assign(user_id=frame.user_id.astype(str), item_id=frame.item_id.astype(str))
    grouped = frame.iloc[np.argsort(pd.factorize(frame.user_id)[0], kind="stable")]
    for same in (as_text, pa.table(frame), pa.Table.from_pandas(as_text), grouped):
        other = Dataset.from_frame(same, name="other name", time="timestamp")
        assert (other.content_hash, other.target_hash) == (dataset.content_hash, dataset.target_hash)


@settings(max_examples=20, deadline=None)
@given(frame=frames(), shift=st.integers(1, 5))
def test_the_content_hash_sees_ids_order_and_times(frame, shift):
    dataset = Dataset.from_frame(frame, time="timestamp")
    assert Dataset.from_frame(frame.assign(timestamp=frame.timestamp + shift), time="timestamp").content_hash != (
        dataset.content_hash
    )
    assert Dataset.from_frame(frame).content_hash != dataset.content_hash, "times or none"
    renamed = frame.assign(item_id=["new " + str(item) for item in frame.item_id])
    assert Dataset.from_frame(renamed, time="timestamp").target_hash != dataset.target_hash
    users = frame.assign(user_id=["new " + str(user) for user in frame.user_id])
    assert Dataset.from_frame(users, time="timestamp").target_hash != dataset.target_hash


def test_the_target_hash_does_not_depend_on_how_items_are_numbered():
    one, other = (Dataset.from_frame(pd.DataFrame({"user_id": 1, "item_id": ids})) for ids in ([5, 6, 7], [6, 5, 7]))
    assert one.target_hash == other.target_hash and one.content_hash != other.content_hash


def test_ids_cannot_trade_letters_and_keep_the_hash():
    hashes = {
        Dataset.from_frame(pd.DataFrame({"user_id": ["u"] * 3, "item_id": items})).content_hash
        for items in (["a", "bc", "d"], ["ab", "c", "d"], ["a", "b", "cd"])
    }
    assert len(hashes) == 3


def test_hashes_are_those_of_the_first_release():
    frame = pd.DataFrame({"user_id": [1, 1, 2, 1, 2, 2], "item_id": list("abacbb"), "t": [1, 2, 3, 4, 5, 6]})
    dataset = Dataset.from_frame(frame, time="t")
    assert (dataset.content_hash[:16], dataset.target_hash[:16]) == ("c50c88a4b337e753", "f1c82b4899172158")


@pytest.mark.parametrize("ids", [[10, 20, 30], ["10", "20", "é x"]])
def test_encode_answers_to_ids_of_either_type(ids):
    dataset = Dataset.from_frame(pd.DataFrame({"user_id": [1, 1, 1], "item_id": ids}))
    for asked in ([10, 20, 99], np.array([10, 20, 99], np.uint8), [np.int32(10), np.str_("20"), None],
                  pd.Series(["10", "20", "020"]), pd.Series([10, 20, None]), pa.array([10, 20, 7])):  # fmt: skip
        encoded = dataset.encode(asked)
        assert encoded.tolist() == [1, 2, 0] and encoded.dtype == np.int64
    assert dataset.encode([]).tolist() == []
    assert dataset.decode(dataset.encode(ids)).tolist() == ids
    assert dataset.decode([[3, 1]]).tolist() == [[ids[2], ids[0]]]
    for wrong in (0, 4):
        with pytest.raises(UserError, match=f"item index {wrong} is not in the vocabulary; indices are 1 to 3"):
            dataset.decode([1, wrong])


def test_text_ids_with_leading_zeros_stay_apart():
    dataset = Dataset.from_frame(pd.DataFrame({"user_id": ["u"] * 3, "item_id": ["007", "7", "07"]}))
    assert dataset.encode([7, "007", "0007"]).tolist() == [2, 1, 0]


def test_arrays_are_writable_int64_so_that_torch_takes_them_without_copies():
    dataset = Dataset.from_frame(pd.DataFrame({"user_id": [1, 1, 1], "item_id": [3, 4, 5], "t": [1, 2, 3]}), time="t")
    for array in (dataset.items, dataset.offsets, dataset.times, dataset.training_counts):
        assert array.dtype == np.int64 and array.flags.writeable and array.flags.c_contiguous
    json.dumps(dataset.preparation)


def test_leave_one_out_takes_the_last_event_for_test_and_the_one_before_for_validation():
    frame = pd.DataFrame({"user_id": list("aaaabbb"), "item_id": [1, 2, 3, 4, 1, 9, 8]})
    dataset = Dataset.from_frame(frame)
    split = leave_one_out(dataset)
    training = [dataset.items[a:b].tolist() for a, b in zip(split.training_start, split.training_stop, strict=True)]
    assert training == [[1, 2], [1]]
    assert dataset.decode(split.validation.target).tolist() == [3, 9]
    assert dataset.decode(split.test.target).tolist() == [4, 8]
    assert (split.validation.stop - split.validation.start).tolist() == [2, 1]
    assert (split.test.stop - split.test.start).tolist() == [3, 2]
    assert split.training_start is split.test.start or np.shares_memory(split.training_start, split.test.start)
    assert dataset.training_counts.tolist() == [0, 2, 1, 0, 0, 0, 0], "held-out items keep their place"


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_distinct_values_are_those_of_numpy(size):
    values = np.random.default_rng(0).integers(-(2**40), 2**40, size)[np.arange(size) // 3]
    before = values.copy()
    assert distinct(values).tolist() == np.unique(values).tolist()
    assert (values == before).all()


def test_statistics_by_hand():
    frame = pd.DataFrame({"user_id": list("aaaabbb"), "item_id": [1, 2, 3, 1, 1, 2, 2], "t": [1, 1, 2, 2, 2, 6, 7]})
    statistics = describe(Dataset.from_frame(frame, time="t"))
    assert (statistics.num_users, statistics.num_items, statistics.num_events) == (2, 3, 7)
    assert statistics.mean_length == 7 / 2 and statistics.density == 7 / 6
    quantiles = {"min": 3, "25%": 3.25, "50%": 3.5, "75%": 3.75, "90%": pytest.approx(3.9), "max": 4}
    assert statistics.length_quantiles == quantiles
    assert (statistics.first_time, statistics.last_time) == ("1", "7")
    assert statistics.tied_neighbours == 2 / 5
    assert statistics.tied_last_two == 1 / 2
    assert statistics.unseen_targets == 0
    assert statistics.repeated_events == pytest.approx(2 / 7)
    assert describe(Dataset.from_frame(frame)).tied_last_two is None
    since = describe(Dataset.from_frame(frame.assign(t=frame.t * 200_000_000), time="t"))
    assert (since.first_time, since.last_time) == ("1976-05-03 19:33:20", "2014-05-13 16:53:20"), (
        "of the last one's unit"
    )
    assert json.loads(json.dumps(statistics.to_dict()))["tied_neighbours"] == 2 / 5


def test_what_a_data_set_leaves_out_and_what_ties_is_said_in_a_line_each():
    frame = pd.DataFrame({"user_id": np.repeat(np.arange(31), 3), "item_id": np.tile([1, 2, 3], 31), "t": 5})
    short = frame[(frame.user_id > 0) | (frame.item_id < 3)]
    left_out = "left out: 1 of 31 users, who have under 3 events; min_history=2 trains on those of 2"
    tied = "equal times: 100.0% of a user's neighbouring events, 100.0% of the test items; these stay in the order of "
    assert remarks(Dataset.from_frame(short[["user_id", "item_id"]].iloc[:20])) == [left_out.replace("31", "7")]
    said = remarks(Dataset.from_frame(short, time="t"))
    assert said == [left_out, f"{tied}the rows, in which item ids ascend"]
    shuffled = frame.assign(item_id=frame.item_id.where(frame.user_id % 2 == 0, 4 - frame.item_id))
    assert remarks(Dataset.from_frame(shuffled, time="t")) == [f"{tied}the rows, which says nothing of time"]
    assert remarks(Dataset.from_frame(frame.assign(t=range(93)), time="t")) == []
    kept = Dataset.from_frame(short.assign(t=range(92)), time="t", preparation=Preparation(min_history=2))
    assert remarks(kept) == ["trained on and not tested: 1 users of 2 events"]
    empty = Dataset.from_frame(frame.assign(stars=np.nan), reliability="stars")
    assert remarks(empty) == ["reliability: no event has one; check the column, or leave it out"]


def test_shares_by_hand():
    frame = pd.DataFrame({"user_id": np.repeat(np.arange(9), 3), "item_id": np.tile([1, 2, 3], 9)})
    assert describe(Dataset.from_frame(frame)).repeated_events == 0
    frame = pd.DataFrame({"user_id": list("aaabbb"), "item_id": [1, 2, 3, 1, 2, 1]})
    assert describe(Dataset.from_frame(frame)).unseen_targets == 1 / 2


def test_histories_are_numbered_as_another_vocabulary_has_their_items():
    frame = pd.DataFrame({"user_id": list("aaabbb"), "item_id": [7, 8, 9, 9, 7, 7], "t": [1, 2, 3, 1, 2, 3]})
    dataset = Dataset.from_frame(frame, time="t")
    other = dataset.numbered_as(Vocabulary(np.array(["5", "9", "8", "7"], dtype=object)))
    assert other.items.tolist() == [4, 3, 2, 2, 4, 4] and other.num_items == 4
    assert histories(other) == {"a": ["7", "8", "9"], "b": ["9", "7", "7"]} and other.times.tolist() == [1, 2, 3] * 2
    assert other.target_hash == dataset.target_hash
    assert dataset.numbered_as(Vocabulary(np.array([7, 8, 9]))) is dataset
    assert dataset.numbered_as(Vocabulary(np.array([7, 8, 9, 5]))).num_items == 4
    with pytest.raises(UserError, match=r"1 of the 3 items of data set 'frame' are unknown there, such as 8$"):
        dataset.numbered_as(Vocabulary(np.array([7, 9])))


def test_a_saved_data_set_keeps_its_name_and_record_and_can_be_filtered_again(tmp_path):
    frame = pd.DataFrame({"user_id": list("aaaabbbc"), "item_id": [1, 2, 3, 1, 1, 2, 3, 9]})
    first = Dataset.from_frame(frame, name="mine")
    first.save(tmp_path / "file.parquet")
    again = Dataset.load(tmp_path / "file.parquet", preparation=Preparation(deduplicate="first"))
    assert again.name == "mine" and again.num_events == 6
    assert again.preparation["filters"]["deduplicate"] == "first"
    assert again.preparation["earlier"] == first.preparation
    first.save(tmp_path / "UPPER.PARQUET")
    assert_equal(Dataset.load(tmp_path / "UPPER.PARQUET"), first)
    (tmp_path / "UPPER.PARQUET").unlink()
    with pytest.raises(UserError, match=r"the canonical file is Parquet; let its name end in \.parquet"):
        first.save(tmp_path / "file.csv")
    assert [p.name for p in tmp_path.iterdir()] == ["file.parquet"]


def test_a_saved_data_set_is_not_filtered_again_by_what_it_was_prepared_with(tmp_path):
    frame = pd.DataFrame({"user_id": list("aaaaabbb"), "item_id": [1, 2, 3, 4, 5, 2, 3, 4], "stars": [0, *[1] * 7]})
    first = Dataset.from_frame(frame, preparation=Preparation(where="stars>0"))
    first.save(tmp_path / "file.parquet")
    assert_equal(Dataset.load(tmp_path / "file.parquet", preparation=Preparation(where="stars>0")), first)
    without = Preparation(where="stars>0", drop_last_events=1)
    Dataset.from_frame(frame, preparation=without).save(tmp_path / "without.parquet")
    assert Dataset.load(tmp_path / "without.parquet", preparation=without).lengths.tolist() == [3]  # not one more
    fewer = Dataset.load(tmp_path / "file.parquet", preparation=Preparation(min_item_events=2))
    assert fewer.num_events < first.num_events
    assert DataConfig.behind(fewer).load_again(str(tmp_path / "file.parquet")).content_hash == fewer.content_hash
    with pytest.raises(UserError, match="no column 'stars'"):
        Dataset.load(tmp_path / "file.parquet", preparation=Preparation(where="stars>1"))


@pytest.mark.parametrize(
    "asked", [{"user": "user_id"}, {"time": "timestamp"}, {"preparation": Preparation(deduplicate="first")}]
)
def test_naming_the_usual_columns_of_a_saved_data_set_changes_nothing(asked, tmp_path):
    frame = pd.DataFrame({"user_id": list("aaaabbb"), "item_id": [1, 2, 3, 4, 1, 2, 3], "t": [1, 2, 3, 4, 1, 2, 3]})
    frame["t"] = pd.to_datetime(frame["t"], unit="s")
    Dataset.from_frame(frame, time="t").save(tmp_path / "file.parquet")
    plain, named = (Dataset.load(tmp_path / "file.parquet", **given) for given in ({}, asked))
    assert named.times is not None and named.content_hash == plain.content_hash
    assert named.preparation["time_unit"] == plain.preparation["time_unit"] == "s"


def test_a_data_set_knows_the_columns_of_a_file_that_does_not_tell_them(tmp_path):
    (tmp_path / "a.csv").write_text("u,i\n" + "1,2\n" * 3)
    dataset = Dataset.load(tmp_path / "a.csv", user="u", item="i")
    assert dataset.columns == {"user": "u", "item": "i", "time": None}
    dataset.save(tmp_path / "a.parquet")
    assert Dataset.load(tmp_path / "a.parquet").columns == {}


def test_a_time_column_that_nobody_named_may_be_damaged(tmp_path):
    (tmp_path / "a.csv").write_text("user_id,item_id,timestamp,timestamp\n" + "1,2,3,4\n" * 3)
    (tmp_path / "b.jsonl").write_text(
        "".join(f'{{"user_id": 1, "item_id": 2, "timestamp": {time}}}\n' for time in ("1", '"x"', "[2]"))
    )
    for name in ("a.csv", "b.jsonl"):
        assert Dataset.load(tmp_path / name).num_events == 3
    with pytest.raises(UserError, match="column 'timestamp' occurs 2 times"):
        Dataset.load(tmp_path / "a.csv", time="timestamp")


def test_a_run_of_a_file_without_header_reads_files_of_other_forms(tmp_path):
    rows = pd.DataFrame({"user": ["u"] * 3, "item": ["007", "7", "8"], "when": [3, 1, 2]})
    rows.to_csv(tmp_path / "own.dat", sep="|", header=False, index=False)
    rows.to_csv(tmp_path / "other.dat", sep="|", header=False, index=False)
    rows.to_csv(tmp_path / "other.csv", index=False)
    rows.to_csv(tmp_path / "other.tsv", sep=";", index=False)
    rows.to_parquet(tmp_path / "other.parquet")
    names = {"user": "user", "item": "item", "time": "when"}
    config = DataConfig(dataset=str(tmp_path / "own.dat"), separator="|", columns=("user", "item", "when"), **names)
    for other in ("own.dat", "other.dat", "other.csv", "other.parquet"):
        assert config.load_again(str(tmp_path / other)).content_hash == config.load().content_hash
    assert config.load_again(str(tmp_path / "other.tsv"), separator=";").content_hash == config.load().content_hash
    with pytest.raises(UserError, match=r"column names are for delimited files, not \.parquet; leave"):
        config.load_again(str(tmp_path / "other.parquet"), columns=["user", "item", "when"])


def test_tables_of_other_libraries_and_numbered_columns_are_read():
    frame = pd.DataFrame([["ann", "tea"], ["ann", "milk"], ["ann", "egg"]])
    made = Dataset.from_frame(frame, user=0, item=1)
    kinds = pa.dictionary(pa.int32(), pa.string_view())
    items = pa.DictionaryArray.from_arrays([0, 1, 2], pa.array(["tea", "milk", "egg"], pa.string_view()))
    table = pa.table({"0": ["ann"] * 3, "1": items.cast(kinds)})
    assert Dataset.from_frame(table, user="0", item="1").content_hash == made.content_hash


@pytest.mark.parametrize("ids", [[2**64, 1, 2**64], [2**63, -1, 2**63]])
def test_whole_numbers_beyond_64_bits_are_kept_as_their_text(ids, tmp_path):
    dataset = Dataset.from_frame(pd.DataFrame({"user_id": ["u"] * 3, "item_id": ids}))
    assert dataset.decode(dataset.items).tolist() == [str(number) for number in ids]
    assert dataset.encode(ids).tolist() == [1, 2, 1]
    lines = [json.dumps({"user_id": "u", "item_id": number}) for number in ids]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert Dataset.load(tmp_path / "a.jsonl").content_hash == dataset.content_hash
    with pytest.raises(UserError, match="frame: row 2: column 'item_id' holds nothing, but an id may not be blank"):
        Dataset.from_frame(pd.DataFrame({"user_id": ["u"] * 2, "item_id": pd.Series([2**64, None], dtype=object)}))


def test_a_saved_data_set_that_was_changed_is_read_as_any_other_file(tmp_path):
    frame = pd.DataFrame({"user_id": np.repeat([1, 2, 3], 5), "item_id": [1, 2, 3, 4, 5] * 3, "when": range(15)})
    five = Preparation(min_user_events=5)
    Dataset.from_frame(frame, name="mine", time="when", preparation=five).save(tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    pq.write_table(table.slice(0, 14), tmp_path / "b.parquet")
    with pytest.warns(UserWarning, match=r"b\.parquet: recbft wrote 15 events and it has 14: .* column, 'timestamp'"):
        made = Dataset.load(tmp_path / "b.parquet", time="timestamp", preparation=five)
    assert made.lengths.tolist() == [5, 5] and made.name == "b" and made.times is not None
    assert made.preparation["before"]["events"] == 14 and made.preparation["after"]["events"] == 10
    assert made.columns == {"user": "user_id", "item": "item_id", "time": "timestamp"}


@pytest.mark.parametrize("frame", [pd.Series(["a", "b"]), "ratings.csv", pa.chunked_array([["a"]]), [1, 2]])
def test_what_is_no_table_is_refused(frame):
    with pytest.raises(UserError, match="is not a table; give a pandas data frame"):
        Dataset.from_frame(frame)


@pytest.mark.parametrize("made", [Dataset.from_frame, Dataset.load, Events.from_table, DataConfig, CardFile])
def test_every_role_of_a_column_is_an_argument_a_setting_and_of_a_card(made):
    assert set(ROLES) <= inspect.signature(made).parameters.keys()
    assert set(ROLES) - {"split_column"} <= inspect.signature(Dataset.from_frames).parameters.keys()

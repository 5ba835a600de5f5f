"""A split of the data's own: from a column, from three files or frames, with what it is ranked from and counted as."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from recbft.datasets import Dataset, Preparation
from recbft.datasets.config import DataConfig
from recbft.errors import UserError

TRAIN = pd.DataFrame({"user_id": [1, 1, 1, 2, 2, 4], "item_id": list("abcbac"), "t": [1, 2, 3, 1, 2, 1]})
VALID = pd.DataFrame({"user_id": [1, 3], "item_id": list("da"), "t": [4, 5]})
TEST = pd.DataFrame({"user_id": [1, 1, 2, 3, 5], "item_id": list("eabca"), "t": [6, 5, 7, 8, 9]})
FRAMES = {"train": TRAIN, "valid": VALID, "test": TEST}


def whole(**words):
    """One frame of all, newest first, with a column that says the part."""
    named = [frame.assign(part=words.get(name, name)) for name, frame in FRAMES.items()]
    return pd.concat(named)[::-1].reset_index(drop=True)


def tasks(dataset, part):
    """user -> (history, targets), by raw ids."""
    view, found = getattr(dataset.split, part), {}
    for row in range(view.target.size):
        history = "".join(dataset.decode(view.items[view.start[row] : view.stop[row]]))
        user = int(dataset.user_ids[view.user[row]])
        found.setdefault(user, (history, []))[1].append(dataset.decode(view.target[row]).item())
    return found


def test_validation_is_ranked_from_training_and_the_test_from_both():
    dataset = Dataset.from_frames(TRAIN, VALID, TEST, time="t")
    assert tasks(dataset, "validation") == {1: ("abc", ["d"])}
    assert tasks(dataset, "test") == {1: ("abcd", ["a", "e"]), 2: ("ba", ["b"]), 3: ("a", ["c"])}
    assert dataset.training_counts[dataset.encode(list("abcde"))].tolist() == [2, 2, 2, 0, 0]
    counts = dataset.split.counts
    assert counts["training"] == {"users": 3, "events": 6, "items": 3}
    # user 3 trains with nothing, and is new in the test; user 5 has nothing before the test at all
    assert counts["validation"]["users_left_out"] == 1 and counts["validation"]["new_items"] == 1
    test = counts["test"]
    assert (test["users"], test["new_users"], test["targets"], test["users_left_out"]) == (3, 1, 4, 1)
    assert dataset.split.text.startswith(
        "given with the data: of each part but training each user's events are targets"
    )
    assert dataset.splitting.chosen() == {"split": "given"}


def test_a_column_says_the_same_as_three_frames_and_parts_are_in_the_hash():
    frames = Dataset.from_frames(TRAIN, VALID, TEST, time="t")
    column = Dataset.from_frame(whole(train="Train ", valid="VALIDATION"), time="t", split_column="part")
    for part in ("validation", "test"):
        assert tasks(column, part) == tasks(frames, part)
    again = Dataset.from_frames(TRAIN, VALID, TEST, time="t")
    assert again.content_hash == frames.content_hash
    moved = Dataset.from_frames(TRAIN, pd.concat([VALID, TEST[:1]]), TEST[1:], time="t")
    assert moved.content_hash != frames.content_hash
    other = frames.with_split(split="given", split_targets="first")
    assert tasks(other, "test")[1] == ("abcd", ["a"])


def test_three_files_and_the_canonical_file_give_what_frames_give(tmp_path):
    for name, frame in FRAMES.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    files = {"validation": str(tmp_path / "valid.csv"), "test": str(tmp_path / "test.csv")}
    config = DataConfig(dataset=str(tmp_path / "train.csv"), time="t", **files)
    assert config.splitting().split == "given"
    loaded = config.load()
    frames = Dataset.from_frames(TRAIN, VALID, TEST, time="t")
    assert loaded.content_hash == frames.content_hash
    behind = DataConfig.behind(loaded)
    assert (behind.validation, behind.test, behind.split) == (*files.values(), "given")
    assert behind.load().content_hash == frames.content_hash
    loaded.save(tmp_path / "kept.parquet")
    kept = Dataset.load(tmp_path / "kept.parquet")
    assert kept.content_hash == frames.content_hash and kept.splitting.split == "given"
    assert tasks(kept, "test") == tasks(frames, "test")


def test_other_data_of_a_run_need_no_files_and_no_column_of_a_split(tmp_path):
    log = pd.DataFrame({"user_id": [1] * 4, "item_id": list("abca"), "t": range(4)})
    log.to_csv(tmp_path / "other.csv", index=False)
    whole().assign(w=1.0).to_csv(tmp_path / "own.csv", index=False)
    of_column = DataConfig(dataset=str(tmp_path / "own.csv"), time="t", split_column="part", weight="w", split="given")
    of_files = DataConfig(dataset="x", time="t", validation="y", test="z", split="given")
    for config in (of_column, of_files):
        other = config.load_again(str(tmp_path / "other.csv"))
        assert other.splitting.is_plain and other.num_tested == 1


def test_ids_that_are_numbers_in_one_frame_and_text_in_another_are_text():
    test = TEST.assign(user_id=[str(user) for user in TEST["user_id"]])
    dataset = Dataset.from_frames(TRAIN, VALID, test, time="t")
    assert tasks(dataset, "test")[1] == ("abcd", ["a", "e"])


def test_training_events_after_a_target_of_their_user_are_counted():
    late = TRAIN.assign(t=[1, 2, 9, 1, 2, 1])
    with pytest.warns(
        UserWarning, match="1 events of 1 users are later than an event of the same user in a later part"
    ):
        dataset = Dataset.from_frames(late, VALID, TEST, time="t")
    assert tasks(dataset, "test")[1] == ("abcd", ["a", "e"]), "parts come before times"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Dataset.from_frame(whole(valid="dev"), split_column="part"), "row 6: column 'part' holds 'dev', but"),
        (lambda: Dataset.from_frame(whole().assign(part=1), split_column="part"), "has type int64, but 'part' says"),
        (
            lambda: Dataset.from_frames(TRAIN, VALID[:0], TEST).split,
            "leaves no target .* in validation .*; give events",
        ),
        (
            lambda: Dataset.from_frames(TRAIN, VALID, TEST.drop(columns="item_id")),
            r"frame \(test\): no column 'item_id'",
        ),
        (
            lambda: Dataset.from_frames(TRAIN, VALID, TEST, preparation=Preparation(drop_last_events=1)),
            "drop_last_events does not go with a split of the data's own",
        ),
        (lambda: Dataset.from_frames(TRAIN, VALID, TEST).with_split().split, "split is 'leave_one_out', but .* own"),
        (lambda: Dataset.from_frame(TRAIN).with_split(split="given").split, "'given', but .* no split of its own"),
        (lambda: DataConfig(dataset="a.csv", validation="b.csv"), "test is missing"),
        (lambda: DataConfig(dataset="a.csv", validation="b.csv", test="c", split_column="d"), "give one of the two"),
        (lambda: DataConfig(dataset="a.csv", split_column="d", split="global_time", split_at=0.5), "leave one of them"),
        (lambda: DataConfig(split="given", split_at=0.5), "split_at has no effect with split given"),
    ],
)
def test_what_is_no_split_is_refused(make, said):
    with pytest.raises(UserError, match=said):
        make()


def test_counts_are_ready_for_json():
    assert json.loads(json.dumps(Dataset.from_frames(TRAIN, VALID, TEST).split.counts))["test"]["targets"] == 4

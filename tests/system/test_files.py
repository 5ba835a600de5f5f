from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recbft.errors import RunError, UserError
from recbft.system.files import (
    json_text,
    make_folder,
    new_folder,
    refuse_input,
    user_path,
    write_atomic,
    write_json,
    write_parquet,
)


def fill_the_disk(file):
    """Write a little, then meet the system's own refusal of a full disk."""
    file.write(b"half of")
    with open("/dev/full", "wb", buffering=0) as full:
        full.write(b"it")


def interrupt(file):
    file.write(b"half of")
    raise KeyboardInterrupt


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="the system has no /dev/full")


def test_a_written_file_holds_the_content_and_nothing_stands_beside_it(tmp_path):
    write_atomic(tmp_path / "a.bin", b"one")
    write_atomic(tmp_path / "a.bin", lambda file: file.write(b"two"))
    assert (tmp_path / "a.bin").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.bin"]


@needs_dev_full
@pytest.mark.parametrize(
    ("stop", "kind", "said"),
    [
        (fill_the_disk, RunError, r"no space left while writing .*a\.bin; nothing there was changed: free some"),
        (interrupt, KeyboardInterrupt, None),
    ],
)
def test_what_stops_the_writing_leaves_the_old_file_and_no_other(tmp_path, stop, kind, said):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    with pytest.raises(kind, match=said):
        write_atomic(target, stop)
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.bin"]


def test_content_is_on_the_disk_before_it_takes_its_name_by_a_rename_within_its_folder(tmp_path, monkeypatch):
    replace, fsync, done = os.replace, os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda number: done.append("on the disk") or fsync(number))
    monkeypatch.setattr(os, "replace", lambda old, new: done.append(Path(old).parent) or replace(old, new))
    write_atomic(tmp_path / "a.bin", b"one")
    write_atomic(tmp_path / "a.bin", b"two", durable=False)
    assert done == ["on the disk", tmp_path, tmp_path]


@needs_dev_full
def test_a_disk_that_fills_up_within_parquet_is_a_full_disk_too(tmp_path, monkeypatch):
    import pyarrow.parquet

    write_table = pyarrow.parquet.write_table

    def on_a_full_disk(table, file):
        with open("/dev/full", "wb", buffering=0) as full:
            write_table(table, full)

    monkeypatch.setattr(pyarrow.parquet, "write_table", on_a_full_disk)
    with pytest.raises(RunError, match="no space left while writing"):
        write_parquet(tmp_path / "a.parquet", pd.DataFrame({"a": [1]}))
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"the folder .*nowhere does not exist; create it or name another"):
        write_atomic(tmp_path / "nowhere" / "a.bin", b"")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*a: is a directory; name another place"):
        write_atomic(tmp_path / "a", b"")
    assert os.listdir(tmp_path) == ["a"]


def test_a_refusal_that_another_place_would_not_mend_fails_the_run(tmp_path):
    def break_off(file):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(RunError, match=r"cannot write .*a: input/output error; nothing there was changed"):
        write_atomic(tmp_path / "a", break_off)
    assert os.listdir(tmp_path) == []


def test_json_takes_numpy_numbers_and_refuses_nan(tmp_path):
    write_json(tmp_path / "a.json", {"a": np.int64(3), "b": np.float64(0.1), "c": np.arange(2), "d": (1, "é")})
    assert json.loads((tmp_path / "a.json").read_bytes()) == {"a": 3, "b": 0.1, "c": [0, 1], "d": [1, "é"]}
    with pytest.raises(ValueError):
        write_json(tmp_path / "b.json", {"a": float("nan")})
    with pytest.raises(TypeError, match="set cannot be written as JSON"):
        json_text({1, 2})
    assert os.listdir(tmp_path) == ["a.json"]


def test_parquet_gives_the_table_back(tmp_path):
    frame = pd.DataFrame({"user": ["a", "b"], "rank": np.array([1, 3])}, index=[7, 8])
    write_parquet(tmp_path / "a.parquet", frame)
    back = pd.read_parquet(tmp_path / "a.parquet")
    assert back.columns.tolist() == ["user", "rank"] and back["rank"].tolist() == [1, 3]


def test_a_new_folder_appears_whole(tmp_path):
    with new_folder(tmp_path / "deep" / "run") as made:
        (made / "a").write_text("a")
        assert not (tmp_path / "deep" / "run").exists()
    assert os.listdir(tmp_path / "deep") == ["run"] and os.listdir(tmp_path / "deep" / "run") == ["a"]


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, ZeroDivisionError])
def test_a_new_folder_that_is_not_completed_leaves_nothing(tmp_path, stopped_by):
    with pytest.raises(stopped_by), new_folder(tmp_path / "run") as made:
        (made / "a").write_text("a")
        raise stopped_by
    assert os.listdir(tmp_path) == []


WRITERS = {
    "file": "write_atomic(sys.argv[1], lambda file: (print('held', flush=True), sys.stdin.read()))",
    "folder": "made = new_folder(sys.argv[1]); made.__enter__(); print('held', flush=True); sys.stdin.read()",
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_killed_process_left_goes_at_the_next_start_and_what_is_being_written_stays(tmp_path, kind):
    def write(content):
        if kind == "file":
            write_atomic(tmp_path / "a", content)
        else:
            with new_folder(tmp_path / content.decode()) as made:
                (made / "in it").touch()

    code = f"import sys; from recbft.system.files import *; {WRITERS[kind]}"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "a"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout.readline() == b"held\n"
        (left,) = os.listdir(tmp_path)
        os.utime(tmp_path / left, (0, 0))
        write(b"a")
        assert sorted(os.listdir(tmp_path)) == [left, "a"], "another is at work on it"
        writer.kill()
    if kind == "folder":
        (tmp_path / "a" / "in it").unlink()
    (tmp_path / ".b.01234567.tmp").touch()
    (tmp_path / ".a.01234567.tmp").touch()
    os.utime(tmp_path / ".b.01234567.tmp", (0, 0))
    write(b"a")
    kept = [".a.01234567.tmp", ".b.01234567.tmp", "a"]
    assert sorted(os.listdir(tmp_path)) == kept, "one is of another name, and one that was made just now"


def test_where_files_cannot_be_locked_nothing_is_swept_and_all_is_written(tmp_path, monkeypatch):
    def refused(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".a.01234567.tmp").touch()
    monkeypatch.setattr(fcntl, "flock", refused)
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and len(os.listdir(tmp_path)) == 2


def test_a_new_folder_takes_the_place_of_an_empty_one_only(tmp_path):
    (tmp_path / "run").mkdir()
    with new_folder(tmp_path / "run") as made:
        (made / "a").write_text("a")
    with pytest.raises(UserError, match=r"run exists already; name another or remove it"), new_folder(tmp_path / "run"):
        pass
    assert os.listdir(tmp_path) == ["run"] and os.listdir(tmp_path / "run") == ["a"]


def test_a_new_folder_below_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    refusal = pytest.raises(UserError, match=r"file exists already|cannot write .*run: not a directory")
    with refusal, new_folder(tmp_path / "file" / "run"):
        pass


def test_a_folder_is_made_with_those_above_it_or_taken_as_it_is(tmp_path):
    made = make_folder(tmp_path / "deep" / "out")
    (made / "a").write_text("a")
    assert make_folder(str(made)) == made == tmp_path / "deep" / "out" and os.listdir(made) == ["a"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file", r"cannot write .*file: not a folder; name another place"),
        ("file/out", "out: not a directory; name anoth"),
    ],
)
def test_a_folder_that_a_file_is_in_the_way_of_is_refused(tmp_path, place, message):
    (tmp_path / "file").write_text("a")
    with pytest.raises(UserError, match=message):
        make_folder(tmp_path / place)
    assert (tmp_path / "file").read_text() == "a"


def test_a_folder_that_the_disk_refuses_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"cannot write .*out: read-only file system; name another place"):
        make_folder(tmp_path / "out")


def test_what_is_read_is_not_written_over_whatever_path_leads_to_it(tmp_path):
    source = tmp_path / "a.csv"
    source.write_text("a")
    refuse_input(tmp_path / "b.csv", source)
    refuse_input(source, tmp_path / "missing.csv")
    (tmp_path / "linked").symlink_to(tmp_path)
    for same in (source, tmp_path / "linked" / "a.csv"):
        with pytest.raises(
            UserError, match=r"a\.csv is the file that is read, and writing would replace it; give another"
        ):
            refuse_input(same, source)


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "a.bin")
    for content in (b"one", b"two"):  # made, and then replaced
        write_atomic(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "a.bin").read_bytes() == content
    assert os.listdir(tmp_path / "disk") == ["a.bin"]


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UserError, match=f"{place} is a device or a pipe, and a whole file is written"):
            write_atomic(place, b"content")
    assert (tmp_path / "pipe").is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_path_from_home_is_written_there_and_makes_no_folder_called_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    make_folder("~/kept")
    write_atomic("~/kept/a.txt", b"a")
    with new_folder("~/made/b") as made:
        (made / "c").write_text("c")
    assert (tmp_path / "home" / "kept" / "a.txt").read_bytes() == b"a"
    assert (tmp_path / "home" / "made" / "b" / "c").is_file() and not (tmp_path / "~").exists()
    assert user_path("a~/b") == Path("a~/b")

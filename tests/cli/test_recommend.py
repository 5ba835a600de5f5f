"""``recbft recommend``: lists for histories from files and pipes, into files and pipes."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import threading

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from recbft import Recommender
from recbft.errors import RunError
from tests.cli.conftest import run, train

COLUMNS = ["user", "item", "score", "rank", "precision", "probability"]


@pytest.fixture
def histories(events, tmp_path):
    path = tmp_path / "histories.csv"
    known = pd.read_parquet(events)["item_id"].iloc[:3].tolist()
    rows = [("ann", known[0]), ("bob x", known[1]), ("ann", known[2]), ("bob x", "unheard"), ("eve", "unheard")]
    path.write_text("user_id,item_id\n" + "".join(f"{user},{item}\n" for user, item in rows))
    return path


def test_recommend_writes_lists_for_users_never_seen(capsys, finished, histories, tmp_path):
    code, out, err = run(
        capsys, "recommend", finished, "--histories", histories, "-k", "4", "--out", tmp_path / "recs.parquet"
    )
    assert code == 0 and "8 recommendations written to" in out
    assert "skipped events with items that the model does not know: 2" in err
    assert "skipped users without a known item: 1, such as eve" in err
    lists = pd.read_parquet(tmp_path / "recs.parquet")
    assert list(lists.columns) == COLUMNS
    assert lists["user"].tolist() == ["ann"] * 4 + ["bob x"] * 4 and lists["rank"].tolist() == [1, 2, 3, 4] * 2
    assert (lists["precision"] > 0).all()
    for _, own in lists.groupby("user"):
        assert (np.diff(own["score"]) <= 0).all() and own["item"].is_unique


@pytest.mark.parametrize("option", ["--exclude", "--candidates", "--histories"])
def test_recommend_does_not_replace_a_file_that_it_reads(capsys, finished, histories, tmp_path, option):
    items = tmp_path / "items.csv"
    items.write_text(histories.read_text().splitlines()[1].split(",")[1])
    before = items.read_bytes()
    code, _, err = run(capsys, "recommend", finished, "--histories", histories, option, items, "--out", items)
    assert code == 2 and f"--out {items} is the file that is read" in err and items.read_bytes() == before


def test_ids_with_a_carriage_return_come_back_from_a_csv_file(capsys, finished, events, tmp_path):
    known = pd.read_parquet(events)["item_id"].iloc[0]
    frame = pd.DataFrame({"user_id": ["ann\rlee", "bob\r", "eve"], "item_id": [str(known)] * 3})
    frame.to_parquet(tmp_path / "histories.parquet")
    words = ("recommend", finished, "--histories", tmp_path / "histories.parquet", "-k", "2", "--out")
    for file in (tmp_path / "recs.csv", tmp_path / "recs.parquet"):
        assert run(capsys, *words, file)[0] == 0
    read = pd.read_csv(tmp_path / "recs.csv")
    pd.testing.assert_frame_equal(read, pd.read_parquet(tmp_path / "recs.parquet"), check_dtype=False)
    assert read["user"].unique().tolist() == frame["user_id"].tolist()


def test_recommend_without_a_file_prints_csv(capsys, finished, histories, tmp_path):
    _, out, _ = run(capsys, "recommend", finished, "--histories", histories, "-k", "2")
    assert out.splitlines()[0] == ",".join(COLUMNS) and len(out.splitlines()) == 5
    run(capsys, "recommend", finished, "--histories", histories, "-k", "2", "--out", tmp_path / "recs.csv")
    assert (tmp_path / "recs.csv").read_text() == out


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_recommend_writes_block_by_block_what_it_writes_at_once(
    capsys, monkeypatch, finished, histories, tmp_path, ending
):
    whole, parts = tmp_path / f"whole.{ending}", tmp_path / f"parts.{ending}"
    words = ("recommend", finished, "--histories", histories, "-k", "500")
    _, _, err = run(capsys, *words, "--out", whole)
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", 1)
    assert run(capsys, *words, "--out", parts)[2] == err
    assert "users with fewer than 500 items left: 2, the fewest 5" in err
    read = pd.read_csv if ending == "csv" else pd.read_parquet
    # Where a history stands in its row decides the order of its sums: scores of .1 differ by 1e-8, those near 0 too.
    pd.testing.assert_frame_equal(read(whole), read(parts), atol=1e-7)
    assert list(read(parts).columns) == COLUMNS and len(read(parts)) > 20
    if ending == "parquet":
        assert pq.ParquetFile(parts).num_row_groups == 2
        assert pq.read_schema(whole).equals(pq.read_schema(parts), check_metadata=True)


def test_recommend_says_now_and_then_how_far_it_is(capsys, monkeypatch, finished, histories, tmp_path):
    monkeypatch.setattr("recbft.serving.lists.HISTORIES_AT_ONCE", 1)
    words = ("recommend", finished, "--histories", histories, "-k", "3")
    _, lists, err = run(capsys, *words)
    assert "so far" not in err  # nobody has waited
    monkeypatch.setattr("recbft_cli.recommend.SILENCE", 0.0)
    code, out, err = run(capsys, *words)
    assert (code, out) == (0, lists)
    assert [line for line in err.splitlines() if "so far" in line] == [
        "3 recommendations so far",
        "6 recommendations so far",
    ]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_recommend_writes_a_file_without_rows_where_no_item_is_left(capsys, finished, histories, tmp_path, ending):
    (tmp_path / "own.csv").write_text("".join(histories.read_text().splitlines(keepends=True)[:2]))
    (tmp_path / "only.txt").write_text((tmp_path / "own.csv").read_text().split(",")[-1])
    words = ("recommend", finished, "--histories", tmp_path / "own.csv", "--candidates", tmp_path / "only.txt")
    code, out, err = run(capsys, *words, "--out", tmp_path / f"recs.{ending}")
    assert code == 0 and "0 recommendations written" in out
    assert "users with fewer than 10 items left: 1, the fewest 0" in err
    read = pd.read_csv if ending == "csv" else pd.read_parquet
    table = read(tmp_path / f"recs.{ending}")
    assert len(table) == 0 and list(table.columns) == COLUMNS
    if ending == "parquet":
        assert str(pq.read_schema(tmp_path / "recs.parquet").field("user").type).endswith("string")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RunError("scores are NaN")])
def test_recommend_stopped_half_way_leaves_what_was_there(
    capsys, monkeypatch, finished, histories, tmp_path, ending, error
):
    def one_block(recommender, *args, **options):
        yield recommender.recommend(*args, **options)
        raise error

    monkeypatch.setattr(Recommender, "recommend_in_blocks", one_block)
    (tmp_path / f"recs.{ending}").write_text("before")
    code, out, err = run(
        capsys, "recommend", finished, "--histories", histories, "-k", "2", "--out", tmp_path / f"recs.{ending}"
    )
    assert (code, out) == (1, "") and err in ("error: interrupted\n", "error: scores are NaN\n")
    assert (tmp_path / f"recs.{ending}").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["histories.csv", f"recs.{ending}"]


def piped(monkeypatch, content):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_recommend_reads_stdin_and_prints_nothing_but_lists(capsys, monkeypatch, finished, histories, tmp_path):
    _, expected, said = run(capsys, "recommend", finished, "--histories", histories, "-k", "2")
    frame = pd.read_csv(histories)
    frame.to_parquet(tmp_path / "histories.parquet")
    lines = frame.to_json(orient="records", lines=True).encode()
    csv, parquet = histories.read_bytes(), (tmp_path / "histories.parquet").read_bytes()
    for content in (csv, parquet, lines, b"\xef\xbb\xbf" + lines, gzip.compress(csv), gzip.compress(lines)):
        piped(monkeypatch, content)
        assert run(capsys, "recommend", finished, "--histories", "-", "-k", "2", "--out", "-") == (0, expected, said)


def test_recommend_names_stdin_in_what_is_wrong_with_it(capsys, monkeypatch, finished):
    wrong = b"who,item_id\na,b\n", "error: stdin: no column 'user_id'"
    cut = gzip.compress(b"user_id,item_id\na,b\n" * 99)[:-12], "error: stdin: cannot be read: "
    for content, message in (wrong, (b"", "stdin: the file is"), cut, (b"\x1f\x8b", cut[1])):
        piped(monkeypatch, content)
        code, out, err = run(capsys, "recommend", finished, "--histories", "-")
        assert (code, out) == (2, "") and message in err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_recommend_reads_a_named_pipe(capsys, finished, histories, tmp_path):
    expected = run(capsys, "recommend", finished, "--histories", histories, "-k", "2")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(histories.read_bytes()))
    writer.start()
    assert run(capsys, "recommend", finished, "--histories", tmp_path / "pipe", "-k", "2") == expected
    writer.join()


def test_recommend_ends_quietly_when_its_reader_has_gone(finished, histories):
    command = ["recommend", str(finished), "--histories", str(histories), "-k", "50"]
    code = f"import sys; from recbft_cli.main import main; sys.exit(main({command!r}))"
    found = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    found.stdout.close()
    said = found.stderr.read().decode()
    assert found.wait() == 1 and "Error" not in said and "error" not in said


def test_recommend_leaves_out_the_items_of_a_file(capsys, finished, histories, tmp_path):
    def lists(*more):
        code, out, err = run(capsys, "recommend", finished, "--histories", histories, "-k", "2", *more)
        assert code == 0, err
        return [line.split(",")[1] for line in out.splitlines()[1:]]

    ids = tmp_path / "ids.txt"
    before = lists()
    ids.write_bytes(b"\xef\xbb\xbf" + f"{before[0]}\r\n\r\nnothing\r\n".encode())
    assert before[0] not in lists("--exclude", ids)
    ids.write_text("\n".join(before))
    assert set(lists("--candidates", ids)) <= set(before)


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl", "txt", "semicolon"])
def test_a_table_of_users_and_items_is_for_each_user(capsys, finished, events, tmp_path, form):
    """By the usual names, the options' names, or those of the histories; a table without users is for all."""
    known = pd.read_parquet(events)["item_id"].drop_duplicates().iloc[:4].tolist()
    file, histories = tmp_path / f"own.{'csv' if form == 'semicolon' else form}", tmp_path / "histories.csv"
    more = ["--separator", ";"] if form == "semicolon" else []
    separator = ";" if more else ","
    rows = [("ann", known[0]), (7, known[1])]
    pd.DataFrame(rows, columns=["user_id", "item_id"]).to_csv(histories, index=False, sep=separator)
    # The ids of the users are items too.
    own = pd.DataFrame([("7", known[2]), ("ann", known[3]), ("7", known[0])], columns=["user_id", "item_id"])

    def write(frame):
        if form == "parquet":
            frame.to_parquet(file)
        elif form == "jsonl":
            frame.to_json(file, orient="records", lines=True)
        else:
            frame.to_csv(file, index=False, sep=separator)

    def lists(option):
        code, out, err = run(capsys, "recommend", finished, "--histories", histories, "-k", "60", option, file, *more)
        assert code == 0, err
        table = pd.read_csv(io.StringIO(out), dtype={"user": str})
        return table.groupby("user")["item"].agg(set).to_dict()

    write(own)
    assert lists("--candidates") == {"ann": {known[3]}, "7": {known[2], known[0]}}
    found = lists("--exclude")
    assert known[3] not in found["ann"] and known[2] in found["ann"]
    assert not {known[2], known[0], known[1]} & found["7"] and known[3] in found["7"]
    write(own[["item_id"]].iloc[:2])
    assert lists("--candidates") == {user: {known[2], known[3]} for user in ("ann", "7")}


def test_a_fallback_leaves_no_user_out(capsys, finished, histories):
    code, out, err = run(capsys, "recommend", finished, "--histories", histories, "-k", "2", "--fallback", "popular")
    table = pd.read_csv(io.StringIO(out))
    assert code == 0 and list(table.columns) == [*COLUMNS, "fallback"]
    assert table.groupby("user", sort=False)["fallback"].first().to_dict() == {
        "ann": False,
        "bob x": False,
        "eve": True,
    }
    assert "users who get popular items, unknown or with nothing left: 1" in err and "skipped users" not in err


def test_printed_lists_are_utf_8_whatever_the_terminal_speaks(capsys, events, tmp_path):
    named = pd.read_parquet(events).assign(item_id=lambda frame: "日" + frame["item_id"].astype(str))
    named.to_parquet(tmp_path / "named.parquet")
    train(capsys, tmp_path / "named.parquet", tmp_path, "-q", "--set", "epochs=1")
    command = ["recommend", str(tmp_path / "sasrec-bft-named-seed0"), "--histories", str(tmp_path / "named.parquet")]
    code = f"import sys; from recbft_cli.main import main; sys.exit(main({command!r}))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"}
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.decode("utf-8").splitlines()[1].split(",")[1].startswith("日")


def test_a_model_that_reads_times_recommends_for_timed_histories(capsys, events, tmp_path):
    code, _, _ = train(capsys, events, tmp_path, "-q", "-m", "hstu", "--set", "time_bias=true")
    folder, histories = tmp_path / "hstu-bft-tiny-seed0", tmp_path / "histories.parquet"
    timed = pd.read_parquet(events).iloc[:40]
    timed.drop(columns="timestamp").to_parquet(histories)
    code, out, err = run(capsys, "recommend", folder, "--histories", histories, "-k", "2")
    assert code == 2 and "reads event times" in err and out == ""
    timed.to_parquet(histories)
    code, own, _ = run(capsys, "recommend", folder, "--histories", histories, "-k", "2")
    assert code == 0 and own.splitlines()[0] == ",".join(COLUMNS)
    assert run(capsys, "recommend", folder, "--histories", histories, "--time", "timestamp", "-k", "2")[1] == own


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["-k", "0"], "k is 0"),
        (["--user", "who"], "no column 'who'"),
        (["--exclude", "no.txt"], "no.txt: No such file or directory; give a text file with one item id per line"),
        (["--out", "no-folder/recs.parquet"], "no-folder"),
    ],
)
def test_recommend_refuses_what_it_cannot_do(capsys, monkeypatch, finished, histories, tmp_path, more, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "recommend", finished, "--histories", histories, *more)
    assert code == 2 and out == "" and message in err and err.splitlines()[-1].startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["histories.csv"]


def test_rows_that_go_back_in_time_are_warned_of_once(capsys, finished, events, tmp_path):
    frame = pd.read_parquet(events).iloc[::-1]  # with the times of training in another column
    frame.rename(columns={"timestamp": "date"}).to_csv(tmp_path / "histories.csv", index=False)
    words = ("recommend", finished, "--histories", tmp_path / "histories.csv", "-k", "2")
    code, _, err = run(capsys, *words)
    assert code == 0 and err.count("goes backwards within a user") == 1
    assert run(capsys, *words, "--time", "date")[::2] == (0, "")


def test_histories_with_the_columns_of_the_run_s_data_are_read_as_those_were(capsys, events, tmp_path):
    """Rows out of order included, whatever the ids' columns are called; options win."""
    names = {"user_id": "who", "item_id": "what", "timestamp": "when"}
    frame = pd.read_parquet(events).rename(columns=names).iloc[::-1]
    frame.to_csv(tmp_path / "own.csv", index=False)
    frame.drop(columns="when").to_csv(tmp_path / "rows.csv", index=False)
    settings = ["--user", "who", "--item", "what", "--time", "when"]
    ids = ["--user", "who", "--item", "what"]
    assert train(capsys, tmp_path / "own.csv", tmp_path, "-q", *settings)[0] == 0
    run_folder = tmp_path / "sasrec-bft-own-seed0"

    def lists(file, *more):
        code, out, err = run(capsys, "recommend", run_folder, "--histories", tmp_path / file, "-k", "2", *more)
        assert (code, err) == (0, "")
        return out

    assert lists("own.csv") == lists("own.csv", *ids, "--time", "when") != lists("own.csv", *ids)
    assert lists("rows.csv") == lists("rows.csv", *ids)
    frame.rename(columns={"who": "user_id", "what": "item_id"}).to_csv(tmp_path / "usual.csv", index=False)
    assert lists("usual.csv") == lists("own.csv")
    frame.assign(user_id=1, item_id=frame["what"].to_numpy()[::-1]).to_csv(tmp_path / "both.csv", index=False)
    assert lists("both.csv") == lists("own.csv")


def test_histories_of_the_ending_of_the_run_s_data_may_be_written_as_those_were(capsys, events, tmp_path):
    """With their separator, or without a header; where the columns are found without, they are read as usual."""
    frame = pd.read_parquet(events).rename(columns={"user_id": "who", "item_id": "what"})
    for name, separator, header in (("own.csv", ";", True), ("comma.csv", ",", True), ("bare.dat", ";", False)):
        frame.to_csv(tmp_path / name, index=False, sep=separator, header=header)
    columns = ",".join(frame.columns)
    settings = ["--set", "user=who", "--set", "item=what", "--set", "time=timestamp", "--set", "separator=;"]
    assert train(capsys, tmp_path / "own.csv", tmp_path, "-q", *settings)[0] == 0
    assert train(capsys, tmp_path / "bare.dat", tmp_path, "-q", *settings, "--set", f"columns=[{columns}]")[0] == 0

    def lists(run_name, file, *more):
        code, out, err = run(capsys, "recommend", tmp_path / run_name, "--histories", tmp_path / file, "-k", "2", *more)
        assert (code, err) == (0, "")
        return out

    own = "sasrec-bft-own-seed0"
    assert lists(own, "own.csv") == lists(own, "comma.csv") == lists(own, "own.csv", "--separator", ";")
    assert lists("sasrec-bft-bare-seed0", "bare.dat") == lists(own, "own.csv")


def test_histories_are_filtered_as_the_run_s_own_data_were(capsys, events, tmp_path):
    """By the row filter where the file has its columns, and without repeats; how many were left out is said."""
    frame = pd.read_parquet(events)
    again = frame.groupby("user_id").head(2).assign(timestamp=frame["timestamp"].max() + 1)
    frame = pd.concat([frame, again], ignore_index=True)
    frame["rating"] = np.random.default_rng(2).integers(1, 6, len(frame))
    frame.to_csv(tmp_path / "rated.csv", index=False)
    settings = ["--set", "time=timestamp", "--set", "where=rating>=2", "--set", "deduplicate=last"]
    assert train(capsys, tmp_path / "rated.csv", tmp_path, "-q", *settings)[0] == 0
    liked = frame[frame["rating"] >= 2].sort_values("timestamp", kind="stable")
    once = liked.drop_duplicates(["user_id", "item_id"], keep="last")
    once.drop(columns="rating").to_csv(tmp_path / "once.csv", index=False)
    liked.drop(columns="rating").to_csv(tmp_path / "liked.csv", index=False)

    def lists(file):
        asked = ["--histories", tmp_path / file, "--time", "timestamp", "-k", "2"]
        code, out, err = run(capsys, "recommend", tmp_path / "sasrec-bft-rated-seed0", *asked)
        assert code == 0
        return out, err

    repeated = f"left out, as in training, repeated events (all but the last): {len(liked) - len(once):,}\n"
    filtered = f"left out, as in training, events without rating>=2: {len(frame) - len(liked):,}\n"
    plain, nothing = lists("once.csv")
    assert len(liked) > len(once) and nothing == ""
    assert lists("liked.csv") == (plain, repeated)
    assert lists("rated.csv") == (plain, filtered + repeated)


def test_candidates_may_stand_in_a_parquet_file(capsys, finished, events, histories, tmp_path):
    known = pd.read_parquet(events)["item_id"].unique()[:6].tolist()
    words = ["recommend", finished, "--histories", histories, "--out", tmp_path / "recs.csv", "--keep-seen"]
    for table in ({"item_id": known, "price": 1.0}, {"sold": known}):
        pd.DataFrame(table).to_parquet(tmp_path / "only.parquet")
        code, _, err = run(capsys, *words, "--candidates", tmp_path / "only.parquet")
        assert code == 0, err
        assert set(pd.read_csv(tmp_path / "recs.csv")["item"].map(str)) == set(map(str, known))
    pd.DataFrame({"a": known, "b": known}).to_parquet(tmp_path / "only.parquet")
    code, _, err = run(capsys, *words, "--candidates", tmp_path / "only.parquet")
    assert code == 2 and "only.parquet: no column 'item_id' (columns: a, b); name it with --item" in err


@pytest.mark.parametrize("beside", [False, True])
def test_a_run_of_sessions_reads_histories_by_their_sessions(capsys, tmp_path, beside):
    rows = [("ann" if s % 2 else "bob", f"s{s}", f"i{(s * 3 + n) % 7}") for s in range(9) for n in range(4)]
    frame = pd.DataFrame(rows, columns=["user_id", "visit", "item_id"])
    frame.to_csv(tmp_path / "log.csv", index=False)
    settings = ["--set", "session=visit", *(["--set", "user=user_id"] if beside else [])]
    words = ["train", "-m", "pop", "-d", tmp_path / "log.csv", "--out", tmp_path, "--name", "run", *settings]
    assert run(capsys, *words)[0] == 0
    words = ["recommend", tmp_path / "run", "-k", "1", "--keep-seen", "--histories"]
    code, out, err = run(capsys, *words, tmp_path / "log.csv")
    assert code == 0, err
    users = [line.split(",")[0] for line in out.splitlines()[1:]]
    assert users == [f"{'ann/' if s % 2 else 'bob/'}s{s}" if beside else f"s{s}" for s in range(9)]
    frame.drop(columns="visit").to_csv(tmp_path / "users.csv", index=False)
    code, out, err = run(capsys, *words, tmp_path / "users.csv")
    assert code == 0 and [line.split(",")[0] for line in out.splitlines()[1:]] == ["bob", "ann"], err


def test_a_cap_holds_for_every_list_and_is_read_as_feature_and_number(capsys, tmp_path):
    log = pd.DataFrame({"user_id": np.repeat(np.arange(6), 5), "item_id": list("abcde") * 6})
    log.to_csv(tmp_path / "log.csv", index=False)
    pd.DataFrame({"item_id": list("abcde"), "kind": list("xxxyy")}).to_csv(tmp_path / "items.csv", index=False)
    words = ["train", "-m", "pop", "-d", tmp_path / "log.csv", "--items", tmp_path / "items.csv", "--out", tmp_path]
    assert run(capsys, *words, "--name", "run")[0] == 0
    words = ["recommend", tmp_path / "run", "--keep-seen", "--histories", tmp_path / "log.csv", "--cap"]
    code, out, err = run(capsys, *words, "kind=1")
    assert code == 0 and [line.split(",")[1] for line in out.splitlines()[1:3]] == ["a", "d"], err
    assert "users with fewer than 10 items left: 6, the fewest 2" in err
    code, _, err = run(capsys, *words, "kind")
    assert code == 2 and "--cap kind cannot be read; write FEATURE=N, such as category=3" in err
    code, _, err = run(capsys, *words, "year=2")
    assert code == 2 and "cap names 'year'; choose one of kind" in err

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recbft.datasets.dataset import Dataset
from recbft.errors import OneProcessError, RunError, UserError
from recbft_cli import main as main_module
from tests.cli.conftest import run

COMMANDS = "train evaluate recommend serve compare report stratify probe sweep tune data models".split()  # noqa: SIM905


@pytest.fixture
def events(tmp_path):
    rows = [f"u{user},i{(user * step) % 7},{step}" for user in range(1, 9) for step in range(1, 7)]
    path = tmp_path / "events.csv"
    path.write_text("user,item,when\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("command", [*COMMANDS, "", "data prepare"])
def test_help_ends_well_and_shows_an_example(capsys, command):
    code, out, err = run(capsys, *command.split(), "--help")
    assert code == 0 and "Usage: recbft" in out and not err
    assert "recbft" in out.split("Usage", 1)[1].split("\n", 1)[1]


def test_help_lists_the_commands_in_the_order_of_use(capsys):
    _, out, _ = run(capsys, "--help")
    assert re.findall(rf"^\W*({'|'.join(COMMANDS)})  ", out, re.MULTILINE) == COMMANDS


def test_help_needs_neither_torch_nor_pandas():
    code = (
        "import sys; from recbft_cli.main import main; main(['train', '--help']); "
        "sys.exit(bool({'torch', 'pandas', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_the_version_is_printed(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("recbft ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "no such command 'tran'"),
        (["train", "--seed", "x"], "invalid value for '--seed'"),
        (["evaluate"], "missing argument 'RUN'; see recbft evaluate --help"),
        (["train", "--resume", "runs/x", "--seed", "0"], "--seed has no effect with --resume"),
        (["train", "-m", "sasrek"], "model is 'sasrek'; did you mean 'sasrec'?"),
        (["train", "-d", "ml-100k", "--set", "epocs=3"], "unknown key 'epocs'; did you mean 'epochs'?"),
        (["train", "-d", "ml-2m"], "unknown data set 'ml-2m'; did you mean 'ml-1m'?"),
        (["evaluate", "no-run"], "there is no run folder no-run"),
        (["evaluate", "no-run", "--both", "--filter-seen"], "--filter-seen has no effect with --both"),
        (["recommend", "no-run", "--histories", "x.csv", "--out", "x.json"], "let the name end in .parquet or .csv"),
        (["data", "list", "--data-root", "no-folder"], "no-folder: the data root is not a folder"),
        (["data", "synth", "--out", "x", "--set", "num_user=3"], "unknown key 'num_user'; did you mean 'num_users'?"),
        (["models", "--arm", "bft"], "--arm needs a model"),
    ],
)
def test_bad_usage_is_one_line_on_stderr_and_exit_code_2(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


SHORTAGE = "error: out of memory; lower training.batch_size or evaluation.memory_mb"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("two\nlines; mend it"), 2, "error: two lines; mend it"),
        (RunError("step 3 failed; resume it"), 1, "error: step 3 failed; resume it"),
        (KeyboardInterrupt(), 1, "error: interrupted"),
        (OSError(5, "Input/output error", "/x"), 1, "error: /x: Input/output error"),
        (
            PermissionError(13, "Permission denied", "/x"),
            2,
            "error: /x cannot be opened: permission denied; ask for the right to it, or name another",
        ),
        (MemoryError(), 1, SHORTAGE),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, SHORTAGE),
        (RuntimeError("no"), 1, "error: RuntimeError: no (a defect of recbft; add --debug to see where)"),
        (KeyError("k"), 1, "error: KeyError: 'k' (a defect of recbft; add --debug to see where)"),
    ],
)
def test_each_kind_of_failure_has_its_line_and_code(capsys, monkeypatch, error, code, line):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    assert run(capsys, "models") == (code, "", line + "\n")


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("error", "told_by"),
    [
        (UserError("lower k"), "0"),
        (RunError("the loss is nan"), "0"),
        (KeyboardInterrupt(), "0"),
        (OneProcessError("out of memory"), "01"),
        (KeyError("k"), "01"),
    ],
)
def test_what_all_processes_of_a_run_meet_is_told_once(capsys, monkeypatch, error, told_by, rank):
    def fail():
        raise error

    for name, value in {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("recbft.datasets.loading.card_names", fail)
    code, out, err = run(capsys, "data", "list")
    assert code > 0 and out == "" and err.count("error: ") == (rank in told_by)


def test_a_message_shows_what_would_steer_the_terminal(capsys, tmp_path):
    file = tmp_path / "theirs.csv"
    file.write_text("\x1b[2J\u202eBesuch größer 日本,b\n1,2\n", encoding="utf-8")
    code, _, err = run(capsys, "data", "show", file)
    said = r"no column 'user_id'; choose one of \x1b[2J\u202eBesuch größer 日本, b"
    advice = (
        "name the column as user: user='NAME' in Python, in a shell --user NAME, or --set user=NAME where there is "
    )
    advice += f"no such option (`recbft data look {file}` guesses all of them)"
    assert code == 2 and err == f"error: {file}: {said}; {advice}\n"


def test_ctrl_c_inside_a_command_is_a_failed_run(capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("recbft.datasets.loading.card_names", interrupt)
    code, out, err = run(capsys, "data", "list")
    assert (code, out, err.strip()) == (1, "", "error: interrupted")


def test_a_stream_that_the_shell_closed_leads_nowhere_and_no_file_takes_its_number(tmp_path):
    code = (
        "import sys; from recbft_cli.main import main; code = main(['data', 'list']), main(['evaluate', 'x']); "
        "file = open(sys.argv[1], 'w'); file.write(f'{code} {file.fileno() > 2} {sys.stdin.read()!r}')"
    )
    told = tmp_path / "told"
    command = [sys.executable, "-c", code, str(told)]
    subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], stdin=subprocess.DEVNULL, capture_output=True)
    assert told.read_text() == "(0, 2) True ''"


def test_training_goes_on_without_a_stream_for_its_progress(capsys, monkeypatch, events, tmp_path):
    monkeypatch.setattr(sys, "stderr", None)
    small = ("user=user", "item=item", "time=when", "epochs=1", "hidden_size=4", "n_layers=1", "max_length=5")
    settings = [word for setting in small for word in ("--set", setting)]
    assert run(capsys, "train", "-d", events, *settings, "--out", tmp_path / "runs", "--name", "a")[0] == 0
    assert (tmp_path / "runs" / "a" / "metrics.json").exists()


@pytest.mark.parametrize("arguments", [["--debug", "models", "sasrek"], ["models", "sasrek", "--debug"]])
def test_debug_shows_the_traceback_before_the_line(capsys, arguments):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "Traceback" in err and err.splitlines()[-1].startswith("error: model is 'sasrek'")


def test_warnings_are_one_line_each(capsys, events):
    events.write_text(events.read_text().replace("user,item,when", "user_id,item_id,timestamp").replace(",6\n", ",0\n"))
    code, _, err = run(capsys, "data", "show", events)
    assert code == 0 and err.startswith("warning: ") and err.count("\n") == 1


def test_data_prepare_writes_what_data_show_and_dataset_load_read(capsys, events, tmp_path):
    out = tmp_path / "prepared.parquet"
    how = ["--user", "user", "--item", "item", "--time", "when"]
    code, printed, err = run(capsys, "data", "prepare", events, *how, "--out", out)
    assert code == 0 and err == "" and f"written to {out}" in printed
    assert pq.read_schema(out).names == ["user_id", "item_id", "timestamp"]
    direct = Dataset.load(events, user="user", item="item", time="when")
    assert Dataset.load(out).content_hash == direct.content_hash
    _, shown, _ = run(capsys, "data", "show", out)
    assert direct.content_hash in shown


def test_data_prepare_does_not_replace_the_file_it_reads(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "events.parquet"
    pq.write_table(pa.table({"user_id": [1, 1, 1, 2, 2, 2], "item_id": [1, 2, 3, 4, 5, 6]}), source)
    before = source.read_bytes()
    for given, out in ((source, "events.parquet"), ("events.parquet", source), ("events", source)):
        code, said, err = run(capsys, "data", "prepare", given, "--data-root", tmp_path, "--out", out)
        assert (code, said) == (2, "")
        assert err == f"error: --out {out} is the file that is read, and writing would replace it; give another --out\n"
        assert source.read_bytes() == before
    code, _, err = run(capsys, "data", "prepare", source, "--out", tmp_path / "prepared.parquet")
    assert code == 0, err


def test_the_synthetic_data_set_may_be_written_twice(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        words = ["data", "prepare", "synthetic", "--data-root", tmp_path, "--out", "synthetic.parquet"]
        code, _, err = run(capsys, *words)
        assert code == 0, err


def test_a_file_without_header_is_read_with_columns_and_separator(capsys, tmp_path):
    path = tmp_path / "ratings.dat"
    path.write_text("".join(f"{user}::{item}::5\n" for user in range(4) for item in range(4)))
    how = ["--separator", "::", "--columns", "user_id,item_id,rating"]
    code, out, err = run(capsys, "data", "show", path, *how)
    assert (code, err) == (0, "") and "4" in out


def test_data_show_says_what_is_known_of_the_items(capsys, events, tmp_path):
    items = tmp_path / "items.csv"
    items.write_text("id,genres,name\ni1,a|b,x y\ni2,b|a,z w\nnew,a,v u\n")
    how = ["--items", items, "--item-kind", "id=id", "--item-kind", "name=words"]
    how = ["--user", "user", "--item", "item", "--time", "when", *how]
    code, out, err = run(capsys, "data", "show", events, *how)
    assert (code, err) == (0, "")
    assert re.search(r"\ngenres +set +37\.5% +2  a, b *\nname +words +37\.5% +3  x y *\n", out)  # 3 of 8 items
    assert "items without any event: 1 (they are part of the catalogue)" in out
    code, _, err = run(capsys, "data", "show", events, *how, "--item-kind", "name=wrods")
    assert code == 2 and "the kind of column 'name' is 'wrods'; choose one of category" in err


def test_data_list_shows_every_name_and_whether_it_was_found(capsys):
    code, out, _ = run(capsys, "data", "list")
    assert code == 0
    assert all(name in out for name in ("ml-100k", "ml-1m", "amazon-beauty", "synthetic"))


def test_data_synth_writes_events_and_truth(capsys, tmp_path):
    out = tmp_path / "new" / "folder"
    small = ["--set", "num_users=40", "--set", "num_items=60", "--set", "mean_length=6"]
    code, printed, _ = run(capsys, "data", "synth", "--out", out, "--seed", 1, *small)
    assert code == 0 and sorted(path.name for path in out.iterdir()) == [
        "synthetic.parquet",
        "synthetic.truth-items.parquet",
        "synthetic.truth-users.parquet",
    ]
    assert str(out) in printed


def test_models_prints_settings_that_train_accepts_as_a_file(capsys, tmp_path):
    from recbft.training.run_config import load_run_config

    _, out, _ = run(capsys, "models", "sasrec", "--arm", "matched")
    (tmp_path / "run.yaml").write_text(out)
    assert load_run_config(tmp_path / "run.yaml") == load_run_config(model="sasrec", arm="matched")


def test_models_prints_settings_with_which_every_mixer_can_be_built(capsys, tmp_path):
    import torch

    from recbft.models import MODELS
    from recbft.training.run_config import load_run_config

    for mixer in MODELS["sasrec"].mixers:
        _, out, _ = run(capsys, "models", "sasrec", "--mixer", mixer)
        (tmp_path / "run.yaml").write_text(out)
        load_run_config(tmp_path / "run.yaml").build(torch.ones(6, dtype=torch.int64))


def test_a_path_from_home_leads_there_behind_an_equals_sign_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "log.csv").write_text("user_id~item_id\n" + "".join(f"u~i{n}\n" for n in range(4)))
    words = ["data", "prepare", "~/log.csv", "--separator", "~"]
    for out in (["--out=~/a.parquet"], ["--out", "~/b.parquet"]):
        code, _, err = run(capsys, *words, *out)
        assert code == 0, err
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["a.parquet", "b.parquet", "log.csv"]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_the_command_that_data_look_prints_trains(tmp_path, capsys):
    rows = [f"{n % 5};c{n % 3};2024-01-{1 + n % 28:02} 10:00;{n % 7}\n" for n in range(60)]
    (tmp_path / "my log.csv").write_text("Quantity;Customer ID;InvoiceDate;StockCode\n" + "".join(rows))
    code, out, err = run(capsys, "data", "look", tmp_path / "my log.csv")
    assert code == 0 and "semicolon between the fields" in out and out.count(" 10:00\n") == 0, err
    assert "2024-01-01 10:00:00  2024-01-28 10:00:00" in out
    command = shlex.split(out.splitlines()[-1].removeprefix("train on it with: "))
    assert command[:2] == ["recbft", "train"]
    code, out, err = run(capsys, *command[1:], "-m", "pop", "--out", tmp_path / "runs")
    assert code == 0 and "3 users, 7 items, 60 events" in out, err
    (tmp_path / "short.csv").write_text("user_id,item_id\n1,2\n2,3\n")
    code, out, err = run(capsys, "data", "look", tmp_path / "short.csv")
    assert code == 2 and "no user has 3 events" in err and "what was guessed: recbft train -d" in err

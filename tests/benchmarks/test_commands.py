"""Commands that time and compare: what takes part, that ways agree before they are timed, and one small run of each."""

from __future__ import annotations

import getpass
import importlib
import json
import platform
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks import (
    kernel_speed,
    kill_resume,
    large_log,
    machine,
    many_seeds,
    mixer_speed,
    serve_speed,
    train_speed,
    warm_start,
)
from benchmarks.command import recorded
from benchmarks.mixer_speed import Case, Shape
from recbft.datasets import Dataset
from recbft.errors import RunError, UserError
from recbft.experiments.plan import parse_arms
from recbft.mixers import MIXERS
from recbft.runs.checkpoint import load
from recbft.training.one_run import train
from recbft.training.run_config import load_run_config


def settings_of(small):
    return [word for word in small[2:] if word != "--set"]


def read(path):
    return json.loads(path.read_text())


# What all commands share


def test_a_recorded_command_has_no_places_of_the_machine():
    given = ["--dataset", "ml-1m", "--data-root", "/home/x/data", "--out=/tmp/y", "--set", "epochs=2", "--json", "z"]
    assert recorded("train_speed", given) == (
        "python -m benchmarks.train_speed --dataset ml-1m --data-root DIR --out OUT --set epochs=2 --json FILE"
    )


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_of_something_is_at_least_one(text, capsys):
    with pytest.raises(SystemExit) as ended:
        mixer_speed.main(["--rounds", text])
    assert ended.value.code == 2
    assert f"argument --rounds: is {text}; give a whole number of at least 1" in capsys.readouterr().err


NAMES = """
    gpu_rehearsal gpu_suite gpu_training kernel_speed kill_resume large_log many_seeds mechanisms.collision
    mechanisms.denoising mechanisms.extrapolation mechanisms.mqar mechanisms.random_keys mechanisms.reweighting
    mechanisms.time_noise mixer_speed peer_speed serve_load serve_speed train_speed warm_start
""".split()  # noqa: SIM905  a table


@pytest.mark.parametrize("name", NAMES)
def test_a_command_says_how_it_is_used(name, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert ended.value.code == 0 and f"usage: python -m benchmarks.{name}" in capsys.readouterr().out


def test_the_header_names_versions_device_and_data_but_no_host_and_no_place(events):
    dataset = Dataset.load(events, time="timestamp")
    header = machine.close(machine.header("python -m benchmarks.machine", dataset))
    text = "\n".join(machine.lines(header))
    assert dataset.content_hash[:12] in text and header["torch"] in text and header["cpu"] in text
    assert header["data"]["content_hash"] == dataset.content_hash
    everything = (text + json.dumps(header)).split()
    for private in (platform.node(), str(Path.home()), getpass.getuser(), str(events.parent)):
        assert private not in everything
    assert 30 < machine.peak_rss_mb() < 30_000


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (kernel_speed, ["--parts", "atention"], "unknown part 'atention'; did you mean 'attention'"),
        (kernel_speed, ["--parts", "attention", "--shapes", "3x4"], "shape '3x4' is not BxHxTxK"),
        (mixer_speed, ["--mixers", "rfaa"], "unknown mixer 'rfaa'; did you mean 'rfa'"),
        (mixer_speed, ["--mixers", "rfa[width=3]"], "unknown key"),
        (train_speed, ["--dataset", "d", "--json", "no/such/x.json"], "no/such does not exist; create it"),
        (train_speed, ["--dataset", "d", "--model", "pop", "--arms", "published"], "is not trained"),
        (warm_start, ["--dataset", "d", "--share", "1"], "between 0 and 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(command, arguments, message):
    with pytest.raises(UserError, match=message):
        command.main(arguments)


# Arms in training


def test_train_speed_prints_and_records_every_arm(small, tmp_path, capsys):
    file = tmp_path / "speed.json"
    few = ["--repeats", "2", "--chunk-steps", "2", "--threads", "1"]
    assert train_speed.main([*small, *few, "--json", str(file)]) == 0
    out, result = capsys.readouterr().out, read(file)
    assert list(result["arms"]) == ["published", "matched", "bft"]
    for label, arm in result["arms"].items():
        assert f"\n{label} " in out
        assert arm["seconds_per_epoch"] > 0 and arm["evaluation_seconds"] > 0 and len(arm["seconds_of_epochs"]) == 2
        assert 0 <= arm["ndcg@10"] <= arm["hr@10"] <= 1
        ratio = arm["ratio"]
        assert ratio["to"] == "matched" and ratio["min"] <= ratio["median"] <= ratio["max"]
        assert ratio["pairs"] == 2 * -(-4 // 2)  # 120 users in batches of 32, chunks of 2, two epochs
    assert result["arms"]["matched"]["ratio"]["median"] == 1
    assert result["parity"]["bft"] < train_speed.TOLERANCE and result["peak_rss_mb"] > 0


def test_an_arm_trained_in_turn_becomes_what_it_becomes_alone(events, small, tmp_path):
    dataset = Dataset.load(events, time="timestamp")
    contestants = [
        train_speed.make_contestant(arm, arm.config(settings_of(small), dataset=str(events)), dataset)
        for arm in parse_arms("matched,published")
    ]
    train_speed.train_in_turn(contestants, epochs=2, chunk_steps=3)
    for c in contestants:
        config = load_run_config(None, settings_of(small), arm=c.arm.name, dataset=str(events))
        alone = load(train(config, tmp_path / c.arm.name).checkpoint).model_state
        assert all(torch.equal(c.model.state_dict()[key], alone[key]) for key in alone), c.arm.name


def test_no_time_is_printed_where_arms_or_seeds_do_not_agree(small, capsys, monkeypatch):
    for command, where, more in (
        (train_speed, "bft at ramp 0 differs from", []),
        (many_seeds, "between seeds trained together and", ["--seeds", "2"]),
    ):
        monkeypatch.setattr(command, "TOLERANCE", -1.0)
        with pytest.raises(RunError, match=rf"{where} .* no time is taken"):
            command.main([*small, "--arms", "bft", "--threads", "1", *more])
    assert capsys.readouterr().out == ""


def test_the_profile_names_operators(small, capsys):
    assert train_speed.main([*small, "--threads", "1", "--profile", "matched", "--profile-steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "matched: 1 training steps" in out and "aten::" in out and "Self CPU" in out


def test_many_seeds_times_three_kinds_of_run(small, tmp_path, capsys):
    file = tmp_path / "seeds.json"
    few = ["--arms", "matched", "--seeds", "2", "--epochs", "1", "--repeats", "1", "--threads", "1"]
    assert many_seeds.main([*small, *few, "--json", str(file)]) == 0
    result = read(file)
    arm = result["arms"]["matched"]
    assert result["equality"]["matched"] <= many_seeds.TOLERANCE and "\nmatched " in capsys.readouterr().out
    for kind in many_seeds.KINDS:
        assert 0 < arm["times"][kind]["training"][0] < arm["times"][kind]["whole"][0]


def test_equal_runs_do_not_differ_and_another_seed_is_noticed_everywhere(events, small, tmp_path):
    runs = [
        train(load_run_config(None, settings_of(small), dataset=str(events), seed=seed, epochs=1), tmp_path / name)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert kill_resume.differences(runs[0], runs[1]) == []
    found = kill_resume.differences(runs[0], runs[2])
    for part in ("weights item_embedding.weight", "best weights item_embedding.weight", "random state cpu"):
        assert part in found
    assert any(name.startswith("optimiser") for name in found)
    assert {"checkpoint state", "history.csv", "per_user.parquet", "metrics.json"} <= set(found)


# Kernels and mixers


def outputs_of(measured):
    """The name of what is measured alone, and what each of its ways returns."""
    ((name, ways, _),) = measured
    found = (run() for run in ways.values())
    return name, [[one] if isinstance(one, torch.Tensor) else list(one) for one in found]


def test_all_ways_of_a_part_compute_the_same():
    _, (plain, mean, moments, by_pytorch, eager) = outputs_of(kernel_speed.attention([Shape(2, 2, 5, 4)]))
    torch.testing.assert_close(mean[0], plain[0])
    torch.testing.assert_close(moments, eager)
    torch.testing.assert_close(by_pytorch, eager)
    _, (plain, *others) = outputs_of(kernel_speed.vocabulary([(20, 50, 8)]))
    assert len(others) == 1 + hasattr(torch.nn.functional, "linear_cross_entropy")
    for other in others:
        torch.testing.assert_close(other, plain)
    shape, (loop, chunks) = outputs_of(kernel_speed.memory([(2, 1, 7, 4)]))
    assert shape == "2x1x7x4"
    torch.testing.assert_close(chunks, loop, rtol=1e-4, atol=1e-5)


def test_kernel_speed_prints_ratios_to_the_first_way(tmp_path, capsys):
    file = tmp_path / "speed.json"
    named = ["--parts", "attention", "--shapes", "2x2x5x4,1x1x3x4", "--rounds", "2", "--json", str(file)]
    assert kernel_speed.main(named) == 0
    rows = read(file)["kernel_speed"]
    assert [row["shape"] for row in rows] == ["2x2x5x4"] * 5 + ["1x1x3x4"] * 5
    assert all(rows[first][f"{part}_x"] == 1.0 for first in (0, 5) for part in ("forward", "both"))
    assert "recbft moments" in capsys.readouterr().out


def test_every_mixer_takes_part_with_and_without_the_precision_it_has():
    cases = mixer_speed.cases_of(mixer_speed._mixers("all"))
    assert cases[0] == Case("attention", False)
    assert {case.mixer for case in cases} == {name for name, spec in MIXERS.items() if spec.precision != "silu"}
    assert not any(case.precision and MIXERS[case.mixer].precision == "none" for case in cases)
    for case in cases:
        mixer_speed.make_pass(case, Shape(2, 2, 5, 4))()


def test_mixer_speed_prints_ratios_to_softmax_and_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixer_speed, "memory_of", lambda case, shape: 2.5)
    file = tmp_path / "speed.json"
    named = ["--mixers", "alibi,boosted[rounds=3]", "--shapes", "3x2x6x4", "--rounds", "2", "--json", str(file)]
    assert mixer_speed.main(named) == 0
    rows = read(file)["mixer_speed"]
    assert [(row["mixer"], row["precision"]) for row in rows] == [
        ("attention", False),
        *((name, precision) for name in ("alibi", "boosted[rounds=3]") for precision in (False, True)),
    ]
    assert rows[0]["ratio"] == 1.0 and all(len(row["seconds"]) == 2 and row["memory_mb"] == 2.5 for row in rows)
    assert "boosted[rounds=3] with precision" in capsys.readouterr().out
    assert mixer_speed.print_memory(json.dumps([Case("alibi", True), Shape(3, 2, 6, 4)])) == 0
    assert int(capsys.readouterr().out) >= 0


# Runs that answer, large logs, and data that have grown


def test_every_run_is_timed_at_every_size(train_arms, tmp_path, capsys):
    folder = train_arms("matched,bft") / "runs"
    runs = [str(folder / f"{arm}-seed0") for arm in ("matched", "bft")]
    serve_speed.main([*runs, "--users", "1", "7", "--calls", "3", "--json", str(tmp_path / "found.json")])
    found = read(tmp_path / "found.json")["runs"]
    assert [run["run"] for run in found] == ["matched-seed0", "bft-seed0"]
    for told in (run[f"users_{users}"] for run in found for users in (1, 7)):
        assert told["calls"] == 3 and 0 < told["median_ms"] <= told["p99_ms"]
    assert "7 users, ms (99 %)" in capsys.readouterr().out


def test_a_log_has_long_and_short_histories_whatever_its_ids():
    tables = [large_log.generate(300, 6000, 500, texts=texts) for texts in (False, True)]
    numbers, texts = (Dataset.from_frame(table, time="timestamp") for table in tables)
    assert numbers.items.tolist() == texts.items.tolist() and numbers.offsets.tolist() == texts.offsets.tolist()
    assert numbers.num_users == 300 and 5500 < numbers.num_events < 6500
    assert numbers.lengths.min() >= 5 and numbers.lengths.max() > 4 * numbers.lengths.mean()
    counts = sorted(numbers.training_counts)[::-1]
    assert sum(counts[:50]) > 0.3 * sum(counts)


def test_a_log_is_written_as_recbft_reads_it(tmp_path, capsys):
    few = ["--out", str(tmp_path / "log"), "--users", "20", "--events", "300", "--items", "40", "--csv"]
    assert large_log.main(few) == 0
    rows = pq.read_table(tmp_path / "log" / "log.parquet").num_rows
    assert f"{rows:,} events of 20 users written to" in capsys.readouterr().out
    read_as = [Dataset.load(tmp_path / "log" / f"log.{end}", time="timestamp") for end in ("parquet", "csv")]
    assert read_as[0].content_hash == read_as[1].content_hash


def test_older_data_are_the_events_up_to_a_time_for_all_users(events):
    dataset = Dataset.load(events, time="timestamp")
    older = warm_start.earlier(dataset, 0.7)
    latest = np.quantile(dataset.times, 0.7)
    assert older.times.max() <= latest
    of = dict(zip(dataset.user_ids.tolist(), np.split(dataset.times, dataset.offsets[1:-1]), strict=True))
    kept = {user: int((times <= latest).sum()) for user, times in of.items()}
    assert dict(zip(older.user_ids.tolist(), older.lengths.tolist(), strict=True)) == {
        user: number for user, number in kept.items() if number >= 3
    }


def test_all_ways_to_begin_are_measured(small, tmp_path, capsys):
    few = ["--arm", "matched", "--seeds", "0", "--share", "0.8", "--keeps", "0.4", "--set", "epochs=1"]
    warm_start.main([*small[:-2], *few, "--json", str(tmp_path / "found.json")])
    [row] = read(tmp_path / "found.json")["seeds"]
    assert row["as it was"]["epochs"] == 0 < row["afresh"]["epochs"]
    assert row["0.4 kept"]["epochs"] == 1 and 0 <= row["0.4 kept"]["filtered"] <= 1
    assert "| 0.4 kept |" in capsys.readouterr().out


def test_of_a_beginning_without_a_hit_nothing_is_said_relative_to_it():
    rows = [
        {start: dict.fromkeys(("epochs", "seconds", *warm_start.METRICS), value * seed) for start, value in starts}
        for seed in (1, 2)
        for starts in [(("afresh", 0.0), ("1 kept", 0.2))]
    ]
    assert warm_start.table(rows).splitlines()[-1].count("| 0.3000 (p 0.205, 2 of 2) ") == len(warm_start.METRICS)

"""``recbft sweep``: validation chooses, and the test is shown beside it."""

from __future__ import annotations

import json
from statistics import mean, stdev

import numpy as np
import pytest

from recbft.comparing.comparison import load_comparison
from recbft.evaluation.paired import compare_seeds, holm
from recbft.experiments.plan import Job
from recbft.experiments.sweep import plan_sweep, sweep_results
from recbft.reporting.comparison_tables import sweep_document
from recbft.reporting.tables import written
from recbft.runs.folder import RunFolder
from recbft.system.files import write_json
from tests.cli.conftest import SETTINGS, run
from tests.comparing.made_up import MADE


def test_a_sweep_compares_each_value_with_the_default_and_chooses_by_validation(capsys, events, tmp_path):
    out_dir = tmp_path / "out"
    command = ["sweep", "-d", events, *SETTINGS, "--vary", "lam_max=0.5,100,5", "--seeds", "0-1", "--out", out_dir]
    code, out, _ = run(capsys, *command)
    assert code == 0
    names = {path.name for path in (out_dir / "runs").iterdir()}
    assert names == {f"{arm}-seed{s}" for arm in ("bft", "bft_lam_max=0.5", "bft_lam_max=5") for s in (0, 1)}
    result = json.loads((out_dir / "sweep.json").read_text())
    assert [(row["value"], row["is_default"]) for row in result["rows"]] == [(0.5, False), (5, False), (100, True)]
    for part in ("validation", "test"):
        for row, name in ((0, "bft_lam_max=0.5"), (2, "bft")):
            runs = [RunFolder(out_dir / "runs" / f"{name}-seed{seed}") for seed in (0, 1)]
            assert result["rows"][row][part]["values"] == [run.metrics[part]["unfiltered"]["ndcg@10"] for run in runs]
    assert result["rows"][2]["validation"]["difference"] is None and result["metric"] == "ndcg@10"
    best = max(result["rows"], key=lambda row: row["validation"]["mean"])
    assert result["chosen"] == best["value"] and result["key"] == "core.lam_max"
    assert f"core.lam_max={best['value']}. The test columns played no part" in out and "100.0 (default)" in out
    assert "validation difference" in out and "test difference" in out
    assert (out_dir / "sweep.md").read_text().startswith("`recbft sweep -d")
    assert load_comparison(out_dir).baseline == "bft"
    assert run(capsys, *command)[2].startswith("6 of 6 runs are finished already")
    assert run(capsys, *command, "--dry-run")[:2] == (0, "")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--vary", "lam_max"], "--vary 'lam_max' is not KEY=VALUE,VALUE,...; write for example core.lam_max=10,20,50"),
        (["--vary", "lam_max=5", "--set", "seed=3"], "--set seed has no effect, since --seeds decides it for each run"),
        (["--vary", "lam_max=100"], "names only the default; give at least one other value"),
        (["--vary", "seed=1,2"], "--vary cannot vary seed: every value is trained on the seeds that --seeds gives"),
        (["--vary", "k_core=0,2"], "--vary cannot vary k_core: its values are judged by one metric on one data set"),
        (["--vary", "core={lam_max: 5},{q_max: 2}"], "changes core.lam_max and core.q_max; vary one setting at a time"),
        (["--vary", "lam_max=5,5.0"], "--vary names lam_max=5.0 twice; name each value once"),
        (["--set", "ema={decay: 0.5}", "--vary", "ema={},~"], "--vary names ema=~ twice; name each value once"),
        (["--vary", "lam_max=5", "--vary", "epochs=3"], "--vary is given twice; vary one setting at a time, or search"),
        (["--vary", "lam_max=5", "--seeds", "4"], "names one seed; paired differences need at least 2"),
        (
            ["--vary", "update=kalman,gate", "--batch-seeds", "2"],
            "--batch-seeds cannot be given with arm bft[update=gate]",
        ),
        (["--vary", "lam_max=5", "--arm", "matched"], "core.lam_max has no effect in arm 'matched'"),
    ],
)
def test_a_sweep_that_cannot_be_meant_is_refused(capsys, monkeypatch, events, tmp_path, more, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "sweep", "-d", events, *SETTINGS, "--out", "x", *more)
    assert code == 2 and out == "" and message in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("vary", "values"),
    [
        ("mixer=attention,rfa,alibi", {"bft": "attention", "bft[mixer=rfa]": "rfa", "bft[mixer=alibi]": "alibi"}),
        ("controllers.ema=none,{},{decay: 0.5}", {"bft": None, "bft[controllers.ema={}]": {"decay": 0.999},
                                                  "bft[controllers.ema={decay: 0.5}]": {"decay": 0.5}}),
        ("ema={}", {"bft": None, "bft[ema={}]": {"decay": 0.999}}),
        ("mixing.time=false,true", {"bft": False, "bft[mixing.time=true]": True}),
    ],
)  # fmt: skip
def test_a_mixer_or_a_controller_can_be_varied(vary, values):
    settings = ("mixer=rfa",) if vary.startswith("mixing") else ()
    planned = plan_sweep(vary, "bft", lambda spec: spec.config(settings, dataset="synthetic"))
    assert planned.values == values and [arm.label for arm in planned.arms] == list(values)
    assert planned.default == values["bft"]


def swept(folder, figures, *settings):
    """The results of a sweep over lam_max (bft has 100) whose runs of seeds 0, 1, ... found these figures.

    ``figures`` are by value, then "validation" or "test", then "unfiltered" or "filtered"; what is left out is 0.
    """
    planned = plan_sweep(
        f"lam_max={','.join(map(str, figures))}", "bft", lambda arm: arm.config(settings, dataset="synthetic")
    )
    jobs = []
    for arm in planned.arms:
        found = figures[planned.values[arm.label]]
        for seed in range(len(next(iter(next(iter(found.values())).values())))):
            job = Job(arm, arm.config(settings, dataset="synthetic", seed=seed), folder / f"{arm.folder}-{seed}")
            metrics = {
                part: {
                    setting: {"ndcg@10": found.get(part, {}).get(setting, [0, 0, 0])[seed], "mrr": 0.5}
                    for setting in ("unfiltered", "filtered")
                }
                for part in ("validation", "test")
            }
            job.path.mkdir()
            write_json(job.path / "metrics.json", metrics)
            jobs.append(job)
    # Runs come seed by seed, as ``plan`` has them.
    return sweep_results(planned, sorted(jobs, key=lambda job: job.config.seed))


@pytest.mark.parametrize("setting", ["unfiltered", "filtered"])
def test_the_mean_validation_of_the_headline_setting_chooses_whatever_test_and_the_other_setting_say(tmp_path, setting):
    other = {"unfiltered": "filtered", "filtered": "unfiltered"}[setting]
    low, high = [0.1, 0.2, 0.6], [0.3, 0.3, 0.4]  # means 0.3 and 1/3, in which the best seed is the other's
    figures = {
        5.0: {"validation": {setting: high}, "test": {setting: low}},
        100.0: {"validation": {setting: low, other: high}, "test": {setting: high, other: high}},
        20.0: {"validation": {setting: low, other: high}, "test": {setting: high}},
    }
    found = swept(tmp_path, figures, f"filter_seen={setting == 'filtered'}")
    assert (found["chosen"], found["default"], found["setting"]) == (5.0, 100.0, setting)
    assert [row["value"] for row in found["rows"]] == [5.0, 20.0, 100.0]
    for row in found["rows"]:
        for part in ("validation", "test"):
            assert row[part]["values"] == figures[row["value"]][part][setting]
            if row["value"] != 100.0:
                expected = compare_seeds(figures[100.0][part][setting], row[part]["values"])
                assert row[part]["difference"]["difference"] == expected.difference
                assert row[part]["difference"]["p_t"] == expected.p_t
    for part in ("validation", "test"):
        tested = [row[part]["difference"] for row in found["rows"][:2]]
        assert [d["p_holm"] for d in tested] == holm([d["p_t"] for d in tested])


@pytest.mark.parametrize("best", [5.0, 100.0])
def test_every_number_of_a_sweeps_table_is_one_of_its_results(tmp_path, best):
    rng = np.random.default_rng(0)
    figures = {
        value: {
            part: {"unfiltered": list(0.1 + (value == best) + 0.01 * rng.random(3))} for part in ("validation", "test")
        }
        for value in (100.0, 5.0, 20.0)
    }
    found = swept(tmp_path, figures)
    header = {
        "made": MADE,
        "protocol": {"items": 9, "filter_seen": False, "config": {}},
        "seeds": [0, 1, 2],
        "notes": [],
    }
    text = sweep_document({**header, **found}, markdown=True)
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("| ")]
    names = ["mean ± sd", "difference", "relative", "95 % interval", "p", "p Holm"]
    assert rows[0] == ["core.lam_max", *(f"{part} {name}" for part in ("validation", "test") for name in names)]
    assert [row[0] for row in rows[2:]] == ["5.0", "20.0", "100.0 (default)"]
    for row, result in zip(rows[2:], found["rows"], strict=True):
        for part, cells in (("validation", row[1:7]), ("test", row[7:])):
            of_part, d = result[part], result[part]["difference"]
            names = {"difference": "signed", "relative": "percent", "interval": "interval", "p_t": "p", "p_holm": "p"}
            told = ["-"] * 5 if d is None else [written(d[name], kind) for name, kind in names.items()]
            assert cells == [f"{mean(of_part['values']):.4f} ± {stdev(of_part['values']):.4f}", *told]
    assert "without an interval" not in text
    said = "the default, core.lam_max=100.0." if best == 100.0 else "core.lam_max=5.0."
    assert f"Chosen by validation: {said}" in text and "Holm over the 2 other values" in text


def test_a_sweep_says_whose_p_stands_beside_one_difference_in_every_seed(tmp_path):
    figures = {value: {"validation": {"unfiltered": [0.1 * up, 0.2 * up]}} for value, up in ((100.0, 1), (5.0, 2))}
    figures[20.0] = {"validation": {"unfiltered": [0.15, 0.25]}}
    found = {**swept(tmp_path, figures), "made": MADE, "seeds": [0, 1], "notes": [],
             "protocol": {"items": 9, "filter_seen": False, "config": {}}}  # fmt: skip
    text = " ".join(sweep_document(found, markdown=False).split())
    assert "Holm over the 2 other values. A difference without an interval is the same in every seed" in text


@pytest.mark.parametrize("order", [(5.0, 100.0, 20.0), (100.0, 5.0, 20.0), (20.0, 5.0, 100.0)])
def test_where_another_value_is_as_good_the_default_is_chosen(tmp_path, order):
    equal = {value: {"validation": {"unfiltered": [0.2, 0.4]}} for value in order}
    assert swept(tmp_path, equal)["chosen"] == 100.0


def test_a_sweep_over_a_controller_is_written_as_it_is_set(capsys, events, tmp_path):
    command = ["sweep", "-d", events, *SETTINGS, "--set", "epochs=1", "--vary", "ema={decay: 0.5}", "--seeds", "0-1"]
    code, out, _ = run(capsys, *command, "--out", tmp_path)
    assert code == 0 and '{"decay": 0.5} ' in out and "null (default)" in out and "controllers.ema=" in out
    assert json.loads((tmp_path / "sweep.json").read_text())["rows"][1]["value"] == {"decay": 0.5}

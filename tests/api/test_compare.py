"""``compare`` as a notebook calls it: trains what is missing, and gives the tables as data frames."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import recbft
from recbft import Dataset, Recommender, compare
from recbft.api.compare import Compared
from recbft.comparing.comparison import DATA_FILE, load_comparison
from recbft.comparing.results import results_of
from recbft.datasets.synth import SyntheticConfig, generate
from recbft.errors import RunError, RunInterruptedError, UserError
from recbft.evaluation.paired import compare_seeds, holm
from recbft.reporting.stratum_tables import subject_of_comparison
from recbft.runs.folder import RunFolder
from recbft_cli.main import main
from tests.comparing.test_results import made_up
from tests.experiments.conftest import Watch

SMALL = {"hidden_size": 8, "max_length": 10, "batch_size": 32, "epochs": 1, "device": "cpu"}
ARMS = "matched,bft[lam_max=10]"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def frame():
    return generate(SyntheticConfig(num_users=60, num_items=60, mean_length=7.0, seed=3)).events


@pytest.fixture(scope="module")
def dataset(frame):
    return Dataset.from_frame(frame, name="mine", time="timestamp")


@pytest.fixture(scope="module")
def made(dataset, tmp_path_factory):
    """A finished comparison, its folder, and what was said; nobody changes them."""
    out, watch = tmp_path_factory.mktemp("made") / "out", Watch()
    return compare(ARMS, dataset, out=out, seeds=range(2), jobs=2, progress=watch, **SMALL), out, watch


def test_the_package_offers_what_a_notebook_imports():
    assert {"Dataset", "Recommender", "compare"} <= set(recbft.__all__) <= set(
        dir(recbft)
    ) and recbft.compare is compare


def test_the_data_frames_hold_what_the_comparison_says(made):
    compared, out, watch = made
    assert watch.said[0] == "0 of 4" and watch.said[-1] == "stop"
    assert compared.path == out and {path.name for path in out.iterdir()} == {
        "comparison.json", "comparison.md", "commands.txt", "dataset.parquet", "queue", "runs"
    }  # fmt: skip
    comparison = compared.comparisons["sasrec"]
    assert list(comparison.arms) == ["matched", "bft[lam_max=10]"] and comparison.baseline == "matched"
    cells = pd.MultiIndex.from_product([["unfiltered", "filtered"], ["hr@10", "ndcg@10", "mrr"]])
    assert len(compared.arms) == 2 * len(cells)
    assert len(compared.differences) == len(compared.over_users) == len(cells)
    found = compared.arms.set_index(["arm", "setting", "metric"])
    d = compared.differences.set_index(["setting", "metric"])
    for setting, metric in cells:
        pair = [comparison.values(arm, setting, metric) for arm in comparison.arms]
        row = found.loc[("matched", setting, metric)]
        assert (row["mean"], row["sd"]) == pytest.approx((pair[0].mean(), pair[0].std(ddof=1)))
        expected, row = compare_seeds(*pair), d.loc[(setting, metric)]
        assert row["difference"] == pytest.approx(expected.difference)
        interval = (np.nan, np.nan) if expected.is_constant else expected.interval
        assert (row["low"], row["high"]) == pytest.approx(interval, nan_ok=True)
        assert row["p_t"] == pytest.approx(expected.p_t) and row["wins"] == expected.wins
    assert compared.differences["p_holm"].tolist() == pytest.approx(holm(compared.differences["p_t"].tolist()))
    held = compared.on_validation.set_index(["setting", "metric"])
    for setting, metric in cells:
        pair = [[RunFolder(run).metrics["validation"][setting][metric] for run in arm.runs]
                for arm in comparison.arms.values()]  # fmt: skip
        assert held.at[(setting, metric), "difference"] == pytest.approx(np.mean(pair[1]) - np.mean(pair[0]))
    over_users = compared.over_users
    assert over_users["p_holm"].tolist() == pytest.approx(holm(over_users["p_sign_flip"].tolist()))
    assert (over_users["num_users"] == 60).all() and (over_users["low"] <= over_users["difference"]).all()
    assert any("no sign-flip p can be below" in note for note in compared.notes)
    assert "Difference from matched, paired by seed" in str(compared)
    assert load_comparison(out).notes == tuple(compared.results["sasrec"]["notes"])


def test_the_call_stands_beside_the_results_without_places(made, tmp_path):
    compared, out, _ = made
    text = (out / "comparison.md").read_text()
    assert text.startswith("`recbft.compare('matched,bft[lam_max=10]', 'mine', seeds='0,1', ")
    assert "epochs=1" in text.splitlines()[0] and "out='OUT'" in text and str(out) not in text
    assert compared.results["sasrec"]["made"]["command"] in text


def test_the_same_call_trains_nothing_again_and_another_is_refused(made, dataset, tmp_path):
    compared, out = made[0], shutil.copytree(made[1], tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in [*out.glob("runs/*/metrics.json"), out / "dataset.parquet"]}
    again = compare(ARMS.split(","), dataset, out=out, seeds="0-1", **SMALL)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    pd.testing.assert_frame_equal(again.differences, compared.differences)
    with pytest.raises(UserError, match=r"with training\.epochs 1, and 2 is asked for; give another out, or"):
        compare(ARMS, dataset, out=out, seeds="0-1", **SMALL | {"epochs": 2})
    fewer = Dataset.from_frame(dataset_frame(dataset).iloc[:-1], name="mine", time="timestamp")
    with pytest.raises(UserError, match="holds a run on data with content"):
        compare(ARMS, fewer, out=out, seeds="0-1", **SMALL)
    assert Dataset.load(out / "dataset.parquet").content_hash == dataset.content_hash


def dataset_frame(dataset):
    """The events of a data set with times."""
    users = np.repeat(dataset.user_ids, dataset.lengths)
    return pd.DataFrame({"user_id": users, "item_id": dataset.decode(dataset.items), "timestamp": dataset.times})


def features_of(items):
    """A column of every kind, some values missing, and two items that nobody has chosen."""
    items = [*items, 98, 99]
    n = np.arange(len(items))
    return pd.DataFrame(
        {
            "item_id": items,
            "brand": [None if k % 5 == 0 else f"b{k % 4}" for k in n],
            "price": np.where(n % 7 == 0, np.nan, n / 3),
            "tags": [["a"] if k % 2 else ["b", "c"] for k in n],
            "title": [f"thing of {k % 6} parts" for k in n],
            "picture": [[k / 9, 1.0 - k] for k in n],
        }
    )


@pytest.mark.parametrize("kind", ["text ids and dates", "no times", "item features"])
def test_a_data_set_is_kept_as_it_was_given(frame, tmp_path, kind):
    events, how = frame.sample(frac=1, random_state=0), {"time": "timestamp"}
    if kind == "no times":
        events, how = events[["user_id", "item_id"]], {}
    elif kind == "item features":
        how["items"] = features_of(sorted(set(events["item_id"])))
    else:
        events = events.assign(
            user_id="0" + events["user_id"].astype(str),
            item_id=events["item_id"].map("{:05}".format),
            timestamp=pd.to_datetime(events["timestamp"], unit="s"),
        )
    given = Dataset.from_frame(events, name="a/name, of sorts", **how)
    compared = compare("published,matched", given, out=tmp_path, seeds="0-1", **SMALL)
    protocol = compared.comparisons["sasrec"].protocol
    assert (protocol["content_hash"], protocol["dataset"]) == (given.content_hash, "a/name, of sorts")
    assert protocol.get("features_hash") == given.hashes.get("features_hash")
    kept = Dataset.load(tmp_path / "dataset.parquet")
    assert kept.target_hash == given.target_hash
    if kind != "item features":
        assert kept.preparation == given.preparation
    run = compared.comparisons["sasrec"].arms["matched"].runs[0]
    alone = Recommender("sasrec", arm="matched", seed=0, threads=1, **SMALL).fit(given)
    pd.testing.assert_frame_equal(pd.read_parquet(run / "per_user.parquet"), alone.evaluate(given).per_user)
    assert Recommender.load(run).evaluate().metrics == alone.evaluate(given).metrics


@pytest.mark.parametrize("several", [False, True])
def test_a_comparison_that_was_moved_has_its_data_set_still(several, made, dataset, tmp_path):
    folder = tmp_path / "moved" / "sasrec" if several else tmp_path / "moved"
    shutil.copytree(made[1], folder)
    if several:
        (folder / DATA_FILE).rename(folder.parent / DATA_FILE)
    for protocol in folder.glob("runs/*/protocol.json"):  # as of a call with a folder relative to where it was made
        content = json.loads(protocol.read_bytes())
        content["config"]["data"]["dataset"] = f"elsewhere/{DATA_FILE}"
        protocol.write_text(json.dumps(content))
    subject = subject_of_comparison(load_comparison(folder))
    assert subject.items is not None and subject.missing == ""
    np.testing.assert_array_equal(subject.items.counts, dataset.training_counts[1:])
    (folder.parent / DATA_FILE if several else folder / DATA_FILE).unlink()
    assert f"elsewhere/{DATA_FILE}: no such file" in subject_of_comparison(load_comparison(folder)).missing


def test_it_trains_what_the_command_trains(capsys, made, frame, tmp_path):
    compared, _, _ = made
    frame.to_parquet(tmp_path / "mine.parquet")
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    command = ["compare", "-d", tmp_path / "mine.parquet", "--set", "time=timestamp", *settings, "--arms", ARMS]
    assert main([str(word) for word in [*command, "--seeds", "0-1", "--out", tmp_path / "out"]]) == 0
    theirs = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert theirs["comparisons"] == compared.results["sasrec"]["comparisons"]
    # and takes up its folder
    again = compare(ARMS, tmp_path / "mine.parquet", out=tmp_path / "out", seeds=[0, 1], time="timestamp", **SMALL)
    pd.testing.assert_frame_equal(again.differences, compared.differences)
    assert not (tmp_path / "out" / "dataset.parquet").exists()


def test_several_models_have_a_folder_each_and_one_table(dataset, tmp_path):
    compared = compare(
        ["published", "matched"],
        dataset,
        out=tmp_path,
        model=["sasrec", "hstu"],
        seeds=(3, 5),
        metrics=["mrr"],
        **SMALL,
    )
    assert list(compared.results) == ["sasrec", "hstu"] == compared.arms["model"].unique().tolist()
    assert {path.name for path in tmp_path.iterdir()} == {"sasrec", "hstu", "dataset.parquet"}
    assert compared.differences["metric"].unique().tolist() == ["mrr"] and len(compared.differences) == 4
    assert compared.over_users.groupby("model")["p_holm"].apply(list).map(len).tolist() == [2, 2]
    call = "recbft.compare('published,matched', 'mine', model=['sasrec', 'hstu'], seeds='3,5', metrics='mrr', "
    assert call in (tmp_path / "hstu" / "comparison.md").read_text()


def test_each_row_is_a_test_and_holm_is_over_those_of_one_model_against_one_baseline():
    rng, results = np.random.default_rng(0), {}
    for model in ("sasrec", "hstu"):
        ranks = {name: rng.integers(1, 40, (3, 30)) for name in ("matched", "matched+recency", "bft")}
        ranks["file"] = np.repeat(rng.integers(1, 40, (1, 30)), 3, axis=0)  # one set of ranks for all seeds
        results[model] = json.loads(json.dumps(results_of(made_up(ranks), metrics=["mrr", "hr@10"])))
    compared = Compared(Path("out"), {}, results)
    spread = compared.arms.set_index(["model", "arm", "metric"])["sd"]
    assert spread.isna().groupby("arm").all().to_dict() == {name: name == "file" for name in ranks}
    for over, frame, p in (
        ("over_seeds", compared.differences, "p_t"),
        ("over_users", compared.over_users, "p_sign_flip"),
    ):
        families = frame.groupby(["model", "baseline"])
        assert families.size().to_dict() == {
            (model, baseline): 2 * others
            for model in results
            for baseline, others in (("matched", 3), ("matched+recency", 2))
        }
        for _, family in families:
            assert family["p_holm"].tolist() == pytest.approx(holm(family[p].tolist()), rel=1e-12)
        for _, row in frame.iterrows():
            found = results[row["model"]]["comparisons"][row["baseline"]][row["arm"]][row["setting"]][row["metric"]][
                over
            ]
            assert [row["low"], row["high"]] == found["interval"]
            assert (row["difference"], row[p]) == (found["difference"], found[p])
    one = results_of(made_up({name: rng.integers(1, 40, (3, 1)) for name in ("matched", "bft")}), metrics=["mrr"])
    alone = Compared(Path("out"), {}, {"sasrec": one})
    assert len(alone.differences) == 1 and len(alone.over_users) == 0, "of one user nothing is said over users"


def test_one_difference_in_every_seed_has_no_interval_and_no_smallest_effect_in_a_data_frame():
    base = np.random.default_rng(0).integers(20, 40, (4, 30))
    first_hits, noise = base.copy(), base - np.arange(120).reshape(4, 30) % 17
    first_hits[:, 0] = 5
    ranks = {"matched": base, "equal": base, "one hit more": first_hits, "noise": noise}
    compared = Compared(Path("out"), {}, {"sasrec": results_of(made_up(ranks), metrics=["hr@10"])})
    found = compared.differences.set_index("arm")
    assert found.loc[["equal", "one hit more"], ["low", "high", "smallest_effect"]].isna().all(axis=None)
    assert found.at["one hit more", "difference"] == pytest.approx(1 / 30) and found.at["one hit more", "p_t"] == 1 / 8
    assert found.loc["noise", ["low", "high", "smallest_effect"]].notna().all()


@pytest.fixture
def planned(monkeypatch):
    """The configs of the runs that a call would train, by arm."""

    def plan(*asked, **how):
        def keep(jobs, *rest, **more):
            configs.update({job.arm.label: job.config for job in jobs})
            raise RunError("enough")

        configs = {}
        monkeypatch.setattr("recbft.api.compare.train_and_compare", keep)
        with pytest.raises(RunError, match="enough"):
            compare(*asked, **how)
        return configs

    return plan


def test_an_arms_own_settings_win_over_those_of_all_runs(dataset, tmp_path, planned):
    arms = ["bft", "bft[lam_max=20]", "bft[dropout=0.1]"]
    settings = SMALL | {"core": {"lam_max": 5}, "dropout": np.float64(0.3)}
    configs = planned(arms, dataset, out=tmp_path, seeds="0-1", batch_seeds=2, **settings)
    found = {name: (config.core.lam_max, config.backbone.dropout) for name, config in configs.items()}
    assert found == {"bft": (5, 0.3), "bft[lam_max=20]": (20, 0.3), "bft[dropout=0.1]": (5, 0.1)}


@pytest.mark.parametrize("word", ["none", "Null", "~"])
def test_a_word_for_null_means_what_it_means_to_a_recommender(dataset, tmp_path, word, planned):
    settings = {"clip_norm": word, "backbone": {"embedding_scale": word}, **SMALL}
    assert Recommender("sasrec", **settings).config.training.clip_norm is None
    config = planned(ARMS, dataset, out=tmp_path, seeds="0-1", **settings)["matched"]
    assert config.training.clip_norm is None and config.backbone.embedding_scale is None


class CtrlC(Watch):
    """Ctrl-C when the first run is finished."""

    def finished(self, job, seconds):
        raise KeyboardInterrupt


def test_an_interrupted_comparison_goes_on_with_the_same_call(made, dataset, tmp_path):
    call = {"out": tmp_path, "seeds": "0-1", "jobs": 1, **SMALL}
    with pytest.raises(RunInterruptedError, match=r"interrupted; 1 of 4 .* \(in Python: the same call of compare\)"):
        compare(ARMS, dataset, progress=CtrlC(), **call)
    watch = Watch()
    pd.testing.assert_frame_equal(compare(ARMS, dataset, progress=watch, **call).arms, made[0].arms)
    assert watch.said[0] == "1 of 4"


def test_a_failed_run_is_a_run_error_that_names_it(dataset, tmp_path):
    with pytest.raises(RunError, match=r"2 of 4 runs failed \(bft\[learning_rate=1e30\] seed 0, .*the same call of"):
        compare("matched,bft[learning_rate=1e30]", dataset, out=tmp_path, seeds="0-1", **SMALL)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"arms": "bft"}, r"^arms 'bft' names one arm; a comparison needs at least 2, such as matched,bft$"),
        ({"arms": ["matched", "btf"]}, "arm btf: arm of sasrec is 'btf'; did you mean 'bft'"),
        ({"arms": "matched,bft[k_core=3]"}, "data.k_core is 3, but the data set that is given was prepared with 0"),
        ({"seeds": [3]}, "^seeds '3' names one seed"),
        ({"seeds": 3}, "^seeds is 3; give a list, or text with commas$"),
        ({"seeds": [0, -1]}, "^seeds has '-1'; give numbers and ranges"),
        ({"baseline": "pop"}, "^baseline 'pop' is not an arm; choose one of matched, bft"),
        ({"metrics": "auc"}, "unknown metric 'auc'"),
        ({"model": ["sasrec", "sasrec"]}, "names a model twice; name each once"),
        ({"jobs": 0}, "jobs is 0; give a whole number of at least 1"),
        ({"batch_seeds": 1.5}, "batch_seeds is 1.5; give a whole number"),
        ({"arms": "published,bft", "batch_seeds": 2}, "^batch_seeds cannot be given with arm published: several seeds"),
        ({"seed": 3}, "seed is 3, but a comparison has several; give seeds"),
        ({"epochz": 3}, "unknown key 'epochz'; did you mean 'epochs'"),
        ({"epochs": object()}, "epochs is <object .*; give a number, text, a list, or a section"),
        ({"user": "who"}, "data.user is 'who', but a data set is given, which has its columns; leave it out"),
        ({"lam_max": 3}, "core.lam_max has no effect in arm 'matched'"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(dataset, tmp_path, more, message):
    asked = {"arms": "matched,bft", "seeds": "0-1", "out": tmp_path / "out", **SMALL} | more
    with pytest.raises(UserError, match=message):
        compare(asked.pop("arms"), dataset, **asked)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_data_set_is_refused_with_what_makes_one(frame, tmp_path):
    with pytest.raises(UserError, match=r"dataset is a DataFrame; make a data set of it with Dataset\.from_frame"):
        compare(ARMS, frame, out=tmp_path)


def test_a_data_set_that_no_file_keeps_is_refused(dataset, tmp_path):
    other = dataset.numbered_as(replace(dataset, item_ids=dataset.item_ids[::-1].copy()).vocabulary)
    with pytest.raises(UserError, match="data set 'mine' has its items in another order than that in which they appea"):
        compare(ARMS, other, out=tmp_path, seeds="0-1", **SMALL)
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
from recbft import compare
print(compare("published,matched", "synthetic", out="out", seeds="0-1", epochs=1, hidden_size=8, jobs=1))
"""


@pytest.mark.slow
def test_a_script_needs_the_guard_and_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.endswith("; in a script it has to stand under `if __name__ == '__main__':`)\n")


def test_a_script_on_standard_input_is_refused_before_anything_is_written(dataset, tmp_path, monkeypatch):
    script = types.ModuleType("__main__")
    script.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", script)
    with pytest.raises(UserError, match="<stdin> is no file; save the script as a file, with the call under"):
        compare(ARMS, dataset, out=tmp_path / "out", **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(dataset, tmp_path):
    with pytest.raises(UserError, match=r"device is 'cuda:64', but PyTorch sees \d+ CUDA devices; use cpu or auto"):
        compare(ARMS, dataset, out=tmp_path / "out", **{**SMALL, "device": "cuda:64"})
    with pytest.raises(UserError, match=r"device is 'cuda:64', but PyTorch sees"):
        compare("matched,bft[device=cuda:64]", dataset, out=tmp_path / "out", **SMALL)
    assert list(tmp_path.iterdir()) == []

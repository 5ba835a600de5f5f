"""Comparisons read from run folders and files of ranks: what they hold, what they refuse, and what they note."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from recbft.api.train_and_compare import conclude
from recbft.comparing import provenance
from recbft.comparing.comparison import comparison_of, load_comparison
from recbft.comparing.external_ranks import read_external
from recbft.comparing.finished_runs import check_same, config_of, label_runs, read_run
from recbft.comparing.provenance import notes_on_machines, recorded
from recbft.comparing.results import results_of, write_comparison
from recbft.config.fields import to_dict
from recbft.datasets import Dataset, leave_one_out
from recbft.errors import UserError
from recbft.experiments.plan import leaves, parse_arms
from recbft.mixers import MIXERS
from recbft.runs.folder import RunFolder
from recbft.system.files import write_json
from recbft.training.join import join
from recbft.training.one_run import train
from recbft.training.run_config import load_run_config
from tests.experiments.conftest import SMALL, runs_in


def edit_json(path, **entries):
    write_json(path, json.loads(path.read_bytes()) | entries)


def ranks_file(path, run, *, seed=None, **columns):
    """A file as another system would write it, with the ranks of one of our runs."""
    table = pd.read_parquet(run / "per_user.parquet")
    made = pd.DataFrame({"user": table["user"].astype(str), "rank": table["rank_unfiltered"]})
    if seed is not None:
        made["seed"] = seed
    made = made.assign(**columns)
    made.to_csv(path, index=False)
    return path


def ranks_by_seed(trained, arm):
    """Of our runs, as a file with seeds has them: a table for each."""
    columns = ["seed", "user", "rank_unfiltered", "rank_filtered"]
    return [
        pd.read_parquet(run / "per_user.parquet").assign(seed=seed)[columns]
        for seed, run in enumerate(runs_in(trained, arm))
    ]


def beside(trained, file, **how):
    """Our runs and a file of ranks."""
    return comparison_of(runs_in(trained), external={"other": file}, **how)


def test_a_comparison_holds_what_the_runs_and_the_data_say(events, trained):
    found = comparison_of(runs_in(trained))
    dataset = Dataset.load(events, time="timestamp")
    split = leave_one_out(dataset)
    assert list(found.arms) == ["bft", "matched"] and found.baseline == "matched" and found.seeds == (0, 1, 2)
    assert found.path is None and found.notes == ()
    assert found.users.tolist() == dataset.user_ids.tolist()
    assert found.target.tolist() == dataset.decode(split.test.target).tolist()
    assert found.training_length.tolist() == (split.training_stop - split.training_start).tolist()
    assert found.target_frequency.tolist() == dataset.training_counts[split.test.target].tolist()
    assert found.protocol["content_hash"] == dataset.content_hash and found.protocol["seed"] == "0-2"
    backwards = comparison_of([*runs_in(trained, "bft")[::-1], *runs_in(trained, "matched")])
    for name, arm in found.arms.items():
        assert arm.seeds == (0, 1, 2) and arm.runs == tuple(runs_in(trained, name)) == backwards.arms[name].runs
        assert [len(rows) for rows in arm.histories] == [2, 2, 2] and arm.config["arm"] == name
        for setting in ("unfiltered", "filtered"):
            assert arm.ranks[setting].shape == (3, len(found.users))
            for metric in ("hr@10", "ndcg@5", "mrr@20", "mrr"):
                said = [RunFolder(run).metrics["test"][setting][metric] for run in arm.runs]
                np.testing.assert_allclose(found.values(name, setting, metric), said, rtol=1e-12)
                assert found.per_user(name, setting, metric).shape == (len(found.users),)
                assert found.per_user(name, setting, metric).mean() == pytest.approx(np.mean(said))


def test_any_cut_off_can_be_asked_for_and_what_is_not_there_is_refused(trained):
    found = comparison_of(runs_in(trained))
    hits = found.arms["bft"].ranks["filtered"] <= 7
    assert found.values("bft", "filtered", "hr@7").tolist() == hits.mean(1).tolist()
    with pytest.raises(UserError, match="unknown arm 'btf'; did you mean 'bft'"):
        found.values("btf", "filtered", "mrr")
    with pytest.raises(UserError, match="unknown metric 'auc'; give hr@K"):
        found.values("bft", "filtered", "auc")
    with pytest.raises(UserError, match="baseline 'x' is not an arm"):
        comparison_of(runs_in(trained), baseline="x")


def configured(run, arms, *settings):
    """This run as if it were of each of these arms."""
    specs = parse_arms(arms)
    configs = [spec.config([*SMALL, *settings], dataset="x", seed=run.seed) for spec in specs]
    return [replace(run, protocol=run.protocol | {"config": to_dict(config)}) for config in configs]


def test_arms_are_named_by_the_settings_in_which_they_differ(trained):
    runs = [
        one
        for run in map(read_run, runs_in(trained, "bft"))
        for one in configured(run, "matched,matched+recency,bft,bft[lam_max=50],bft[recency_decay=false]")
    ]
    others = {"bft", "bft[core.lam_max=50.0]", "bft[backbone.recency_decay=false]"}
    found = label_runs(runs)
    assert set(found) == {"matched", "matched+recency"} | others
    assert all([run.seed for run in group] == [0, 1, 2] for group in found.values())


def test_what_is_written_is_read_back_also_from_another_place(trained, copied, tmp_path):
    ranks = ranks_file(tmp_path / "other.csv", runs_in(copied, "bft")[0])
    found = comparison_of(runs_in(copied), external={"other": ranks}, baseline="bft")
    write_comparison(found, copied, made={}, external={"other": ranks})
    ranks.unlink()
    moved = tmp_path / "moved"
    copied.rename(moved)
    again = load_comparison(moved)
    assert again.path == moved and again.baseline == "bft" and set(found.notes) < set(again.notes)
    assert list(again.arms) == list(found.arms)
    for name, arm in found.arms.items():
        for setting, values in arm.ranks.items():
            np.testing.assert_array_equal(again.arms[name].ranks[setting], values)
    shutil.rmtree(moved / "runs" / "bft-seed1")
    with pytest.raises(UserError, match=r"there is no run folder .*bft-seed1"):
        load_comparison(moved)
    with pytest.raises(UserError, match=r"holds no comparison.json; finish .*: recbft compare RUN_DIR\.\.\. --out"):
        load_comparison(tmp_path)
    (tmp_path / "comparison.json").write_text("{")
    with pytest.raises(UserError, match=r"comparison\.json is damaged; make it again"):
        load_comparison(tmp_path)


def test_neither_the_day_nor_which_seeds_shared_a_process_makes_another_environment(copied):
    environment = copied / "runs" / "matched-seed1" / "environment.json"
    edit_json(environment, date="1999-12-31", trained_together=[1, 2])
    assert len(write_comparison(comparison_of(runs_in(copied)), copied, made={})["environments"]) == 1
    edit_json(environment, cpu="another")
    assert len(write_comparison(comparison_of(runs_in(copied)), copied, made={})["environments"]) == 2


def test_pairs_of_several_machines_and_runs_of_unknown_ones_are_noted(copied):
    assert notes_on_machines(comparison_of(runs_in(copied))) == []
    bft, matched = (copied / "runs" / f"{arm}-seed1" / "environment.json" for arm in ("bft", "matched"))
    edit_json(bft, cpu="A processor", device="cpu")
    edit_json(matched, cpu="A processor", device="A card")
    (note,) = notes_on_machines(comparison_of(runs_in(copied)))
    assert note.startswith("seed 1: arms were trained on different machines (")
    assert "bft A processor" in note and "matched A card" in note
    edit_json(bft, device="A card", cpu="another processor")
    assert notes_on_machines(comparison_of(runs_in(copied))) == []
    matched.unlink()
    (note,) = results_of(comparison_of(runs_in(copied)))["notes"][:1]
    assert note.startswith("arm matched, seed 1: trained on a machine that is not known, since environment.json")


def test_runs_that_cannot_be_compared_are_refused_by_the_field(trained):
    run = read_run(runs_in(trained)[0])
    for field in ("content_hash", "target_hash", "split", "ranking", "ties", "filter_seen", "recbft_version", "items"):
        other = replace(run, protocol=run.protocol | {field: "another"})
        with pytest.raises(UserError, match=rf"the runs differ in {field}: .* in .*, another in .*; compare runs with"):
            check_same([run, other])


def test_other_targets_under_the_same_hash_are_refused(copied):
    path = copied / "runs" / "matched-seed1" / "per_user.parquet"
    table = pd.read_parquet(path)
    table.loc[0, "target"] = table["target"][1]
    table.to_parquet(path)
    with pytest.raises(UserError, match="lists other values of 'target' than"):
        comparison_of(runs_in(copied))


def test_ids_are_equal_by_text_whatever_file_they_came_from(copied):
    path = copied / "runs" / "matched-seed1" / "per_user.parquet"
    table = pd.read_parquet(path)
    assert pd.api.types.is_integer_dtype(table["user"])
    table.assign(user=table["user"].astype(str), target=table["target"].astype(str)).to_parquet(path)
    assert comparison_of(runs_in(copied)).seeds == (0, 1, 2)


def test_unequal_seeds_are_cut_to_the_common_ones_and_the_others_named(copied):
    shutil.rmtree(copied / "runs" / "bft-seed1")
    found = comparison_of(runs_in(copied))
    assert found.seeds == (0, 2) and found.arms["matched"].ranks["filtered"].shape[0] == 2
    assert found.notes == ("seeds not common to all arms are left out: matched 1",)
    shutil.rmtree(copied / "runs" / "bft-seed2")
    with pytest.raises(UserError, match=r"the arms share 1 seed, .* needs at least 2 \(seeds: bft 0; matched 0-2\)"):
        comparison_of(runs_in(copied))


def test_one_arm_or_two_runs_of_one_seed_are_refused(copied):
    with pytest.raises(UserError, match="there is one arm, bft; a comparison needs at least 2"):
        comparison_of(runs_in(copied, "bft"))
    shutil.copytree(copied / "runs" / "bft-seed0", copied / "runs" / "again-seed0")
    with pytest.raises(UserError, match=r"arm bft has two runs of seed 0: .*again-seed0 and .*bft-seed0; give one"):
        comparison_of(runs_in(copied))
    with pytest.raises(UserError, match="there is no run to compare"):
        comparison_of([])


def delete(name):
    return lambda run: (run / name).unlink()


def overwrite(name, content):
    return lambda run: (run / name).write_bytes(content)


def shuffle_ranks(run):
    table = pd.read_parquet(run / "per_user.parquet")
    table["rank_filtered"] = table["rank_filtered"] + 1
    table.to_parquet(run / "per_user.parquet")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (delete("per_user.parquet"), "per_user.parquet is missing, which holds every user's rank; restore"),
        (overwrite("per_user.parquet", b"PAR1 no"), r"per_user\.parquet is damaged"),
        (shuffle_ranks, r"gives HR@\d+ 0\.\d+ \(filtered\) and metrics.json says 0\.\d+; they are not of one run"),
        (delete("metrics.json"), "is not finished; go on with `recbft train --resume"),
        (shutil.rmtree, "there is no run folder"),
    ],
)
def test_a_broken_run_is_named_and_left_out_only_when_asked(copied, damage, message):
    runs = runs_in(copied)
    damage(copied / "runs" / "bft-seed1")
    with pytest.raises(
        UserError, match=f"{message}.*; `recbft compare --skip-broken` leaves such a run out$"
    ) as caught:
        comparison_of(runs)
    assert "bft-seed1" in str(caught.value)
    found = comparison_of(runs, skip_broken=True)
    assert found.seeds == (0, 2)
    assert found.notes[0].startswith("left out, broken: ") and "bft-seed1" in found.notes[0]
    assert found.notes[1] == "seeds not common to all arms are left out: matched 1"


def test_a_run_that_cannot_say_where_it_was_made_is_left_out_too(copied):
    file = copied / "runs" / "bft-seed1" / "environment.json"
    file.unlink()
    found = comparison_of(runs_in(copied), skip_broken=True)
    assert found.seeds == (0, 2) and found.notes[0].startswith(f"left out, broken: {file} is ")


def test_identical_arms_differ_by_nothing_with_p_one_and_a_note(copied, tmp_path):
    for seed in range(3):
        run, twin = copied / "runs" / f"matched-seed{seed}", copied / "runs" / f"bft-seed{seed}"
        for name in ("per_user.parquet", "metrics.json"):
            shutil.copyfile(run / name, twin / name)
    found = comparison_of(runs_in(copied))
    assert found.notes == (
        "arm bft has the same ranks as matched for every user and seed: the difference is 0 and p is 1",
    )
    result = write_comparison(found, tmp_path / "out", made={})  # JSON refuses NaN
    for settings in result["comparisons"]["matched"]["bft"].values():
        for cell in settings.values():
            d = cell["over_seeds"]
            assert (d["difference"], d["p_t"], d["p_sign_flip"], d["p_holm"], d["wins"]) == (0, 1, 1, 1, 0)
            assert (cell["over_users"]["difference"], cell["over_users"]["p_sign_flip"]) == (0, 1)


def test_a_constant_metric_is_noted_and_compared_without_nan(trained, tmp_path):
    found = comparison_of(runs_in(trained))
    vocabulary = found.protocol["items"]
    result = write_comparison(found, tmp_path / "out", made={})
    assert not any("cannot tell" in note for note in result["notes"])
    result = results_of(found, metrics=[f"hr@{vocabulary}"])
    assert f"HR@{vocabulary} (filtered) is 1 for every arm and seed: it cannot tell the arms apart" in result["notes"]
    assert result["comparisons"]["matched"]["bft"]["filtered"][f"hr@{vocabulary}"]["over_seeds"]["p_t"] == 1


def test_how_long_an_arm_trained_is_what_its_runs_say(trained, tmp_path):
    file = ranks_file(tmp_path / "other.csv", runs_in(trained)[0])
    arms = results_of(beside(trained, file), metrics=["mrr"])["arms"]
    for name in ("matched", "bft"):
        ran = [RunFolder(run).metrics for run in runs_in(trained, name)]
        assert arms[name]["epochs"] == [one["epochs"] for one in ran] == [2, 2, 2]
        assert arms[name]["best_epochs"] == [one["best_epoch"] for one in ran]
        assert arms[name]["training_seconds"] == [one["training_seconds"] for one in ran]
        assert (arms[name]["config"]["arm"], arms[name]["config"]["seed"]) == (name, "each of the seeds")
    assert (arms["other"]["epochs"], arms["other"]["config"]) == ([], {})


def test_settings_of_training_that_differ_are_noted(copied):
    for run in runs_in(copied, "bft"):
        config = json.loads((run / "protocol.json").read_bytes())["config"]
        edit_json(run / "protocol.json", config=config | {"training": config["training"] | {"epochs": 1}})
    assert comparison_of(runs_in(copied)).notes == ("the arms differ in training.epochs: bft 1, matched 2",)


@pytest.mark.parametrize(
    ("arms", "noted"),
    [
        ("matched,bft", ["bft"]),
        ("matched,matched+recency,bft", []),
        ("matched,bft[recency_decay=false]", []),
        ("matched+recency,bft", []),
        ("matched,bft[mixer=rfa]", []),  # which has a decay of its own, so that this one has no effect
    ],
)
def test_a_lead_that_may_be_the_decays_alone_is_noted(trained, arms, noted):
    found = comparison_of(runs_in(trained))
    groups = label_runs(configured(read_run(runs_in(trained)[0]), arms))
    ranks = {name: replace(found.arms["bft"], name=name, config=config_of(runs)) for name, runs in groups.items()}
    made = replace(found, arms=ranks, baseline=next(iter(ranks)))
    notes = results_of(made, metrics=["mrr"])["notes"]
    assert [note for note in notes if "decay" in note] == [
        f"{name} has the recency decay and matched has not, so a difference between them may be the decay's alone; "
        "matched+recency as another arm tells"
        for name in noted
    ]


def test_what_all_runs_have_is_the_protocol_and_what_one_has_otherwise_is_not(copied):
    shared = comparison_of(runs_in(copied)).protocol
    first, *_, last = (json.loads((run / "protocol.json").read_bytes()) for run in runs_in(copied))
    assert (shared["max_length"], shared["dataset"]) == (10, "tiny") and shared["arms"] == ["bft", "matched"]
    one, other = leaves(first["config"]), leaves(last["config"])
    assert shared["config"] == {key: one[key] for key in one if key in other and one[key] == other[key]}
    assert {"arm", "seed"} & set(shared["config"]) == set() and shared["config"]["training.epochs"] == 2
    path = copied / "runs" / "matched-seed2" / "protocol.json"
    training = last["config"]["training"] | {"threads": 8}
    edit_json(path, max_length=7, dataset="another", config=last["config"] | {"training": training})
    found = comparison_of(runs_in(copied)).protocol
    assert (found["max_length"], found["dataset"]) == ("of each arm", "data of several names")
    assert set(shared["config"]) - set(found["config"]) == {"training.threads"}
    assert {key for key, value in shared.items() if found.get(key) != value} == {"max_length", "dataset", "config"}


def test_runs_of_other_machines_belong_to_the_same_arm(copied):
    path = copied / "runs" / "bft-seed1" / "protocol.json"
    config = json.loads(path.read_bytes())["config"]
    config["training"] |= {"threads": 8, "device": "cuda"}
    config["data"]["dataset"] = "/elsewhere/tiny.parquet"
    edit_json(path, config=config)
    assert list(comparison_of(runs_in(copied)).arms) == ["bft", "matched"]


# External ranks ------------------------------------------------------------------------------------------


def begun_from(run, older, path):
    """A copy of a run that says that it began from an older one."""
    shutil.copytree(run, path)
    config = json.loads((run / "protocol.json").read_bytes())["config"]
    edit_json(path / "protocol.json", config=config | {"training": config["training"] | {"warm_start": older}})


def test_runs_that_each_began_from_an_older_run_of_their_seed_are_one_arm(copied):
    for run in runs_in(copied, "bft"):
        for older in ("old/sasrec-bft-{}", "older/{}", "one/seed0"):
            seed = run.name.removeprefix("bft-")
            begun_from(run, older.format(seed), copied / "runs" / f"{older.partition('/')[0]}-{seed}")
    found = comparison_of(runs_in(copied))
    per_seed, of_one = "training.warm_start=old/sasrec-bft-seedSEED", "training.warm_start=one/seed0"
    others = {f"bft[{per_seed}]", f"bft[{of_one}]", "bft[training.warm_start=older/seedSEED]"}
    assert set(found.arms) == {"matched", "bft"} | others and found.seeds == (0, 1, 2)
    assert found.arms[f"bft[{per_seed}]"].config["training"]["warm_start"] == "old/sasrec-bft-seedSEED"
    assert found.arms[f"bft[{of_one}]"].config["training"]["warm_start"] == "one/seed0"
    [line] = [line for line in found.notes if "training.warm_start" in line]
    assert f"bft[{per_seed}] old/sasrec-bft-seedSEED" in line


def test_runs_that_recbole_trained_are_an_arm_of_their_own(copied, tmp_path):
    for run in runs_in(copied, "bft"):
        shutil.copytree(run, copied / "runs" / f"theirs-{run.name[4:]}")
        metrics = json.loads((run / "metrics.json").read_bytes())
        kept = ("filter_seen", "test", "validation", "exposure", "probability")  # what ``to_run`` writes
        theirs = {key: metrics[key] for key in kept} | {"trained_by": "recbole"}
        write_json(copied / "runs" / f"theirs-{run.name[4:]}" / "metrics.json", theirs)
    alone = comparison_of([*runs_in(copied, "matched"), *runs_in(copied, "theirs")])
    assert list(alone.arms) == ["matched", "bft"]
    assert alone.notes == (
        "arm bft was trained by RecBole: a target per row, its own early stopping, and no record of its epochs",
    )
    found = comparison_of(runs_in(copied))
    assert list(found.arms) == ["bft", "matched", "bft[trained_by=recbole]"]
    said = conclude(found, tmp_path, made=provenance.header("recbft compare"))
    training = said.partition("Epochs and time of a run")[2].partition("Means over seeds")[0].split("\n")
    assert {line.split()[0] for line in training if line} == {"arm", "bft", "matched"}
    assert list(load_comparison(tmp_path).arms) == list(found.arms)


def test_ranks_of_another_system_join_as_an_arm(trained, tmp_path):
    run = runs_in(trained, "bft")[0]
    file = ranks_file(tmp_path / "other.csv", run)
    shuffled = pd.read_csv(file, dtype=str).sample(frac=1, random_state=0)
    shuffled = pd.concat([shuffled, pd.DataFrame({"user": ["nobody"], "rank": ["3"]})])
    shuffled.to_csv(file, index=False)
    found = beside(trained, file)
    arm = found.arms["other"]
    ours = pd.read_parquet(run / "per_user.parquet")["rank_unfiltered"].to_numpy()
    assert (arm.ranks["unfiltered"] == ours).all() and arm.ranks["unfiltered"].shape[0] == 3
    assert arm.runs == (None,) * 3 and arm.histories == ([], [], []) and "filtered" not in arm.ranks
    assert found.settings("other", "bft") == ("unfiltered",)
    assert found.run_folders == runs_in(trained, "bft") + runs_in(trained, "matched")
    with pytest.raises(UserError, match="arm other has no filtered ranks; use unfiltered"):
        found.values("other", "filtered", "mrr")
    assert list(results_of(found)["comparisons"]["matched"]["other"]) == ["unfiltered"]
    assert [note.split(":")[0] for note in found.notes] == [
        "arm other is external",
        "arm other has one set of ranks, used for every seed",
        "arm other",
    ]
    assert found.notes[2] == "arm other: 1 user of its file, not in this comparison, left out"


@pytest.mark.parametrize("column", ["rank_unfiltered", "rank_filtered"])
def test_a_file_with_seeds_has_a_standard_deviation_where_any_rank_of_any_seed_is_another(trained, tmp_path, column):
    first, file = ranks_by_seed(trained, "bft")[0], tmp_path / "other.parquet"
    parts = [first.assign(seed=seed) for seed in range(3)]
    pd.concat(parts).to_parquet(file)
    alike = results_of(beside(trained, file), metrics=["mrr"])
    parts[2].loc[4, column] += 1
    pd.concat(parts).to_parquet(file)
    found = results_of(beside(trained, file), metrics=["mrr"])
    for setting in ("unfiltered", "filtered"):
        assert alike["arms"]["other"]["metrics"][setting]["mrr"]["sd"] is None
        mrr = found["arms"]["other"]["metrics"][setting]["mrr"]
        assert mrr["sd"] == np.std(mrr["values"], ddof=1) and (mrr["sd"] > 1e-9) == (column == f"rank_{setting}")


def test_an_arm_with_the_ranks_of_the_baseline_in_one_setting_alone_is_not_called_the_same(trained, tmp_path):
    table, file = pd.concat(ranks_by_seed(trained, "matched"), ignore_index=True), tmp_path / "other.parquet"
    same = "arm other has the same ranks as matched for every user and seed: the difference is 0 and p is 1"
    for changed in (None, "rank_unfiltered", "rank_filtered"):
        ranks = table.copy()
        if changed is not None:
            ranks.loc[70, changed] += 1
        ranks.to_parquet(file)
        assert (same in beside(trained, file).notes) == (changed is None)


def test_external_ranks_with_seeds_are_paired_by_them(trained, tmp_path):
    runs, parts, file = runs_in(trained, "bft"), ranks_by_seed(trained, "bft"), tmp_path / "other.parquet"
    pd.concat(parts[::-1]).to_parquet(file)
    found = beside(trained, file)
    for setting in ("unfiltered", "filtered"):
        np.testing.assert_array_equal(found.arms["other"].ranks[setting], found.arms["bft"].ranks[setting])
    fewer = comparison_of([*runs[1:], *runs_in(trained, "matched")], external={"other": file}).arms
    np.testing.assert_array_equal(fewer["other"].ranks["filtered"], fewer["bft"].ranks["filtered"])
    pd.concat(parts[1:])[["seed", "user", "rank_filtered"]].to_parquet(file)
    assert beside(trained, file).seeds == (1, 2)


def replaced(column, value):
    def change(table):
        table[column] = table[column].astype(object)
        table.loc[0, column] = value
        return table

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.rename(columns={"rank": " rank"}), r"has columns 'user', ' rank'; it needs 'user' and 'rank' or"),
        (lambda t: t.assign(rank_unfiltered=t["rank"]), "has both 'rank' and 'rank_unfiltered'"),
        (lambda t: t[1:], r"lacks 1 of \d+ users, such as '\w+'; rank every user's test target"),
        (
            lambda t: t.assign(user=t["user"] + ".0"),
            r"\(and has \d+ others, such as '\w+\.0'\); rank every user's test",
        ),
        (
            lambda t: pd.concat([t, t[:1]]),
            "lists 1 user more than once, such as .*, or the seed of each in a column 's",
        ),
        (
            lambda t: pd.concat([t, t[:2], t[:2]]).assign(seed=1),
            "seed 1 lists 2 users more .*; give one rank per user$",
        ),
        (
            lambda t: t.assign(target=""),
            r"ranks other targets than the runs, such as '' for user '\w+', whose target here is '\w+' \(\d+ such rows",
        ),
        (replaced("rank", 0), r"column 'rank' holds 0 \(1 such values\); give whole ranks from 1 to"),
        (replaced("rank", 1.5), r"column 'rank' holds 1\.5"),
        (replaced("rank", 10**6), "column 'rank' holds 1000000"),
        (replaced("rank", ""), r"column 'rank' holds nothing \(1 such values\)"),
        (lambda t: t.assign(seed=[0, *[1] * (len(t) - 1)]), r"seed 0 lacks \d+ of"),
        (lambda t: t.assign(seed="x"), r"column 'seed' holds x \(\d+ such values\); give whole seeds from 0 to 4,294,"),
        (lambda t: t.assign(seed=-1), "column 'seed' holds -1"),
        (lambda t: t.assign(seed=0, user="nobody"), r"lacks (\d+) of \1 users, such as"),
    ],
)
def test_a_file_that_is_not_of_ranks_is_refused(trained, tmp_path, change, message):
    run = runs_in(trained)[0]
    table, file = pd.read_parquet(run / "per_user.parquet"), ranks_file(tmp_path / "other.csv", run)
    change(pd.read_csv(file, dtype={"user": str})).to_csv(file, index=False)
    with pytest.raises(UserError, match=message):
        read_external(file, table["user"].to_numpy(), table["target"].to_numpy(), num_items=60)


def test_ranks_that_masking_makes_worse_are_noted(trained, tmp_path):
    table, file = ranks_by_seed(trained, "bft")[0].drop(columns="seed"), tmp_path / "other.parquet"
    table.to_parquet(file)
    assert "masked" not in str(beside(trained, file).notes)
    table.loc[[3, 4], "rank_filtered"] = table["rank_unfiltered"] + 1
    table.to_parquet(file)
    found = beside(trained, file).notes
    assert found[2].startswith("arm other: for 2 users the rank is worse with seen items masked than among all, which")


def test_seeds_of_a_file_that_runs_do_not_have_may_be_numbered_anew(trained, tmp_path):
    file = ranks_file(tmp_path / "other.csv", runs_in(trained)[0], seed=2020)
    with pytest.raises(
        UserError, match=r"other 2020\); train more seeds; or number those of a file anew, or leave its"
    ):
        beside(trained, file)
    with pytest.raises(UserError, match=r"matched 0-2\); train more seeds$"):
        comparison_of([runs_in(trained, "bft")[0], *runs_in(trained, "matched")])


def test_a_file_of_ranks_may_say_its_targets_as_one_of_a_run_does(trained, tmp_path):
    run, file = runs_in(trained, "bft")[0], tmp_path / "other.csv"
    table = pd.read_parquet(run / "per_user.parquet")
    table.sample(frac=1, random_state=0).to_csv(file, index=False)
    for path in (run / "per_user.parquet", file):
        ranks = comparison_of(runs_in(trained), external={"other": path}).arms["other"].ranks
        np.testing.assert_array_equal(ranks["unfiltered"][0], table["rank_unfiltered"])
    table.loc[7, "target"] = table["target"][table["target"] != table["target"][7]].iloc[0]
    table.to_csv(file, index=False)
    said = rf"such as '{table['target'][7]}' for user '{table['user'][7]}', whose target here is '\w+' \(1 such"
    with pytest.raises(UserError, match=said):
        beside(trained, file)


def test_an_id_in_a_file_of_ranks_that_is_none_is_named_with_the_file(tmp_path):
    file, users, targets = tmp_path / "other.parquet", np.array(["a", "b"]), np.array(["x", "y"])
    pd.DataFrame({"user": [b"a", b"b"], "rank": [1, 2]}).to_parquet(file)
    with pytest.raises(UserError, match=r"other\.parquet: an id in column 'user' is b'a'; give ids that are"):
        read_external(file, users, targets, num_items=2)
    pd.DataFrame({"user": ["a", "b"], "rank": [1, 2], "target": [1e300, 1]}).to_parquet(file)
    with pytest.raises(UserError, match=r"other\.parquet: an id in column 'target' is 1e\+300, but whole numbers"):
        read_external(file, users, targets, num_items=2)


def test_ids_ranks_and_seeds_may_be_whole_floats_and_numbers_written_as_text(tmp_path):
    table = pd.DataFrame({"user": [7.0, 8.0], "rank": ["1", "2.0"], "seed": ["3", "3.0"]})
    table.to_parquet(tmp_path / "other.parquet")
    found = read_external(tmp_path / "other.parquet", np.array([8, 7]), np.array(["x", "y"]), num_items=2)
    assert found.seeds == (3,) and found.ranks["unfiltered"].tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.csv", None, "no such file; give a .csv or .parquet file with columns user and rank"),
        ("other.txt", b"", r"the ending '\.txt' is not known"),
        ("other.csv", b"", "cannot be read"),
        ("other.parquet", b"PAR1", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_external(tmp_path / name, np.array(["a"]), np.array(["x"]), num_items=2)


def test_two_files_of_one_seed_are_not_told_apart_over_seeds(trained, tmp_path):
    run = runs_in(trained, "bft")[0]
    files = {name: ranks_file(tmp_path / f"{name}.csv", run) for name in ("pop", "peer")}
    assert comparison_of(runs_in(trained), external=files).baseline == "matched"
    with pytest.raises(UserError, match="arms pop and peer have one set of ranks each"):
        comparison_of(runs_in(trained), external=files, baseline="pop")
    files["matched+recency"] = files.pop("pop")  # the name of a second baseline makes none of it
    found = results_of(comparison_of(runs_in(trained), external=files), metrics=["mrr"])
    assert list(found["comparisons"]) == ["matched"]


def test_popularity_is_not_told_apart_over_seeds_from_ranks_that_are_alike_in_all(events, trained, tmp_path):
    runs = [tmp_path / f"pop-seed{seed}" for seed in range(3)]
    for seed, run in enumerate(runs):
        train(load_run_config(model="pop", dataset=str(events), time="timestamp", device="cpu", seed=seed), run)
    alike, seeds = ranks_file(tmp_path / "alike.csv", runs_in(trained)[0]), tmp_path / "seeds.csv"
    pd.concat([pd.read_csv(alike).assign(seed=seed) for seed in range(3)]).to_csv(seeds, index=False)
    for file in (alike, seeds):
        with pytest.raises(UserError, match="arms published and file have one set of ranks each"):
            comparison_of(runs, external={"file": file})
    found = comparison_of([*runs, *runs_in(trained, "bft")], external={"file": seeds}, baseline="sasrec/bft")
    said = results_of(found, metrics=["mrr"])["arms"]
    sds = [one["metrics"]["unfiltered"]["mrr"]["sd"] for one in said.values()]
    shown = [said[name]["exposure"]["filtered"]["gini@10"]["sd"] for name in ("pop/published", "sasrec/bft")]
    assert list(said) == ["pop/published", "sasrec/bft", "file"]
    assert sds[0] is sds[2] is shown[0] is None and sds[1] > 0 and shown[1] > 0
    mixed = comparison_of([*runs, *runs_in(trained)])
    assert next(iter(mixed.arms)) == "pop/published" and mixed.baseline == "sasrec/matched"


def test_joins_are_arms_over_seeds_named_by_what_they_are_made_of_where_they_differ(events, trained, tmp_path):
    popular = train(load_run_config(model="pop", dataset=str(events), time="timestamp", device="cpu"), tmp_path / "pop")
    made = {
        (arm, run.name): join(run, popular.path, tmp_path / f"{arm}-{run.name}", by="none").path
        for arm in ("bft", "matched")
        for run in runs_in(trained, arm)[:2]
    }
    alone = [path for (arm, _), path in made.items() if arm == "bft"]
    found = comparison_of([*alone, *runs_in(trained)[:2], *runs_in(trained, "matched")[:2]])
    assert list(found.arms) == ["join/one_weight", "sasrec/bft", "sasrec/matched"] and found.seeds == (0, 1)
    both = comparison_of([*made.values(), *runs_in(trained, "matched")[:2]])
    own = "[backbone.hidden_size=8,backbone.max_length=10]"
    assert list(both.arms) == [
        f"join/one_weight[backbone.first=sasrec/bft{own}]", f"join/one_weight[backbone.first=sasrec/matched{own}]",
        "sasrec/matched",
    ]  # fmt: skip


def test_a_file_of_ranks_may_be_the_baseline_where_something_varies_over_seeds(trained, tmp_path):
    runs = runs_in(trained, "bft")
    popular = ranks_file(tmp_path / "popular.csv", runs[0])
    found = comparison_of(runs_in(trained), external={"popular": popular}, baseline="popular")
    cell = results_of(found, metrics=["mrr"])["comparisons"]["popular"]["bft"]["unfiltered"]["mrr"]
    values = found.values("bft", "unfiltered", "mrr")
    expected = stats.ttest_1samp(values, values[0])
    assert cell["over_seeds"]["p_t"] == pytest.approx(expected.pvalue)
    assert cell["over_seeds"]["interval"] == pytest.approx(
        tuple(end - values[0] for end in stats.t.interval(0.95, 2, values.mean(), stats.sem(values)))
    )
    seeds = pd.concat([pd.read_csv(ranks_file(tmp_path / "one.csv", run, seed=n)) for n, run in enumerate(runs)])
    seeds.to_csv(tmp_path / "seeds.csv", index=False)
    files = {"popular": popular, "seeds": tmp_path / "seeds.csv"}
    for baseline in files:
        assert comparison_of(runs_in(trained), external=files, baseline=baseline).baseline == baseline


def test_a_plain_layer_with_the_decay_is_never_called_without(trained):
    plain, tracked = (read_run(runs_in(trained, arm)[0]) for arm in ("matched", "bft"))
    config = plain.config | {"backbone": plain.config["backbone"] | {"recency_decay": True}}
    decayed = replace(plain, protocol=plain.protocol | {"config": config})
    assert list(label_runs([decayed, tracked])) == ["matched+recency", "bft"]


def test_a_mixers_own_defaults_are_no_part_of_an_arms_name(trained):
    run = read_run(runs_in(trained, "bft")[0])

    def mixed(mixer: str, **mixing: object):
        return replace(run, protocol=run.protocol | {"config": run.config | {"mixer": mixer, "mixing": mixing}})

    usual = to_dict(MIXERS["rfa"].options())
    runs = [run, mixed("rfa", **usual), mixed("rfa", **usual | {"kernel": "gaussian"}), mixed("elsewhere", width=3)]
    assert list(label_runs(runs)) == [
        "bft", "bft[mixer=rfa]", "bft[mixer=rfa,mixing.kernel=gaussian]", "bft[mixer=elsewhere,mixing.width=3]",
    ]  # fmt: skip
    assert list(label_runs(runs[1:3])) == ["bft", "bft[mixing.kernel=gaussian]"]


def test_an_external_arm_may_not_take_a_trained_arms_name(trained, tmp_path):
    file = ranks_file(tmp_path / "other.csv", runs_in(trained)[0])
    with pytest.raises(UserError, match="external arm 'bft' has the name of a trained arm"):
        comparison_of(runs_in(trained), external={"bft": file})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-d", "/home/ann/x.csv"], "-d x.csv"),
        (["-d/home/ann/x.csv", "-j", "2"], "-d x.csv -j 2"),
        (["--dataset=/home/ann/x.csv"], "--dataset x.csv"),
        (["--external=o=/home/ann/o.csv", "--external", "p=p.csv"], "--external o=o.csv --external p=p.csv"),
        (
            ["--set", "data.data_root=/home/ann", "--set=training.epochs=3"],
            "--set data.data_root=ann --set training.epochs=3",
        ),
        (["--out", "/home/ann/x", "/home/ann/runs/a", "b"], "--out OUT a b"),
    ],
)
def test_no_place_of_this_machine_is_written(arguments, said):
    assert recorded("recbft compare", arguments) == f"recbft compare {said}"

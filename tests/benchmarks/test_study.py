"""The study's own experiments: what is replaced and what never, and that a choice reads validation alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from benchmarks.study import by_noise, choose, corrupted, grid, ledger, overview, paper, planted, reliable, tables
from recbft.datasets import SyntheticConfig, leave_one_out, synthetic_dataset
from recbft.datasets.batches import ClozeBatches, TrainingBatches
from recbft.errors import UserError
from recbft.evaluation.paired import compare_seeds
from recbft.experiments.plan import parse_arms
from recbft.models import MODELS
from recbft.training.build import build_model

DOCS = Path(__file__).parents[2] / "docs"
ARMS = "matched,matched[backbone.n_heads=1]"
SHORT = ["--users", "60", "--set", "epochs=1", "--set", "hidden_size=8"]  # of planted histories


@pytest.fixture
def dataset():
    return synthetic_dataset(SyntheticConfig(num_users=400, num_items=80, mean_length=9.0))


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_about_the_share_is_replaced_and_no_target(dataset, share):
    noisy = corrupted.corrupted(dataset, share, noise_seed=1)
    for part in ("validation", "test"):
        whole, read = getattr(leave_one_out(dataset), part), getattr(leave_one_out(noisy), part)
        np.testing.assert_array_equal(read.target, whole.target)
    events = len(dataset.items) - 2 * dataset.num_users
    changed = (noisy.items != dataset.items).sum()
    expected = share * events * (1 - 1 / dataset.num_items)
    assert abs(changed - expected) < 4 * np.sqrt(expected)
    assert noisy.items.min() >= 1 and noisy.items.max() <= dataset.num_items
    np.testing.assert_array_equal(noisy.items, corrupted.corrupted(dataset, share, noise_seed=1).items)
    assert (noisy.items != corrupted.corrupted(dataset, share, noise_seed=2).items).any()


def test_the_command_measures_every_place_and_repeats_itself(small, tmp_path, capsys):
    found = []
    for seeds in ("0-1", "1"):
        file = tmp_path / f"{seeds}.json"
        options = ["--arms", "matched,bft", "--seeds", seeds, "--shares", "0.5", "--json", str(file)]
        assert corrupted.main([*small, *options]) == 0
        found.append(json.loads(file.read_text())["corrupted"])
    assert [row for row in found[0] if row["seed"] == 1] == found[1]
    cells = {(row["where"], row["share"]) for row in found[0]}
    assert cells == {("nowhere", 0.0), ("test", 0.5), ("training", 0.5), ("both", 0.5)}
    whole, read = (
        [row for row in found[0] if row["where"] == where and row["arm"] == "matched"] for where in ("nowhere", "test")
    )
    assert [row["ndcg@10 unfiltered"] for row in whole] != [row["ndcg@10 unfiltered"] for row in read]
    assert "| both | 0.5 |" in capsys.readouterr().out


def batches_of(dataset, kind=TrainingBatches, **how):
    split = dataset.split
    how = {"max_length": 12, "batch_size": 64, "seed": 2, "samples": "windows", **how}
    return kind(split.items, split.training_start, split.training_stop, **how)


@pytest.mark.parametrize(("kind", "how"), [(TrainingBatches, {}), (ClozeBatches, {"mask": 81})])
def test_noise_in_targets_is_nested_and_leaves_what_is_read_as_it_is(dataset, kind, how):
    noisy = [corrupted.corrupted(dataset, share, noise_seed=1).items for share in (0.0, 0.1, 0.4)]
    np.testing.assert_array_equal(noisy[0], dataset.items)
    hit = noisy[1] != dataset.items
    np.testing.assert_array_equal(noisy[2][hit], noisy[1][hit])
    plain = batches_of(dataset, kind, **how)
    for share, targets in zip((0, 0.1, 0.4), noisy, strict=True):
        wrong = total = 0
        for own, other in zip(plain.epoch(1), corrupted.Retargeted(plain, targets).epoch(1), strict=True):
            assert own.items.equal(other.items) and (own.target > 0).equal(other.target > 0)
            wrong += int((own.target != other.target).sum())
            total += int((own.target > 0).sum())
        assert abs(wrong - share * total) <= 4 * np.sqrt(share * total)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_distractors_stand_around_each_event_and_are_never_asked_for(dataset, k):
    made, targets = corrupted.distracted(dataset, k, noise_seed=3)
    blocks = made.items.reshape(-1, k)
    assert ((blocks == dataset.items[:, None]).sum(axis=1) == 1).all(), (
        "the event, and no distractor of its user's items"
    )
    for user in range(dataset.num_users):
        own = slice(dataset.offsets[user], dataset.offsets[user + 1])
        others = blocks[own][blocks[own] != dataset.items[own, None]]
        assert len(others) == (k - 1) * (own.stop - own.start) and not np.isin(others, dataset.items[own]).any()
    more, _ = corrupted.distracted(dataset, k + 1, noise_seed=3)
    found = more.items.reshape(-1, k + 1)
    assert all(np.isin(some, all_of).all() for some, all_of in zip(blocks, found, strict=True)), "nested"
    for part in ("validation", "test"):
        whole, read = getattr(dataset.split, part), getattr(made.split, part)
        np.testing.assert_array_equal(read.target, whole.target)
        np.testing.assert_array_equal(read.stop - read.start, k * (whole.stop - whole.start))
        np.testing.assert_array_equal(made.items[read.event], whole.target)
    asked = []
    for batch in corrupted.Retargeted(batches_of(made, max_length=12 * k), targets).epoch(0):
        asked += batch.target[batch.target > 0].tolist()
    usual = [t for batch in batches_of(dataset).epoch(0) for t in batch.target[batch.target > 0].tolist()]
    assert sorted(asked) == sorted(usual), "every training event but a user's first, once"


def test_a_target_is_asked_for_after_the_block_before_it(dataset):
    made, targets = corrupted.distracted(dataset, 3, noise_seed=0)
    split = made.split
    how = {"max_length": 10**4, "batch_size": 1, "seed": 0, "samples": "last"}
    batches = TrainingBatches(split.items, split.training_start[:1], split.training_stop[:1], **how)
    (batch,) = corrupted.Retargeted(batches, targets).epoch(0)
    own = dataset.items[dataset.offsets[0] : dataset.offsets[1] - 2]
    assert batch.target[0, 2::3].tolist() == own[1:].tolist()
    assert batch.target[0].count_nonzero() == len(own) - 1


def known(capsys, file, command, options, monkeypatch):
    """What a command prints whose runs are all in its file."""
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(by_noise.Cell, "figures", lambda cell: pytest.fail("trained again"))
        assert command([*options, "--csv", str(file)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("noise", "level", "seeds"), [("targets", ["--shares", "0.5"], "0-1"), ("distractors", ["--ks", "3"], "0")]
)
def test_runs_with_known_noise_are_kept_and_compared_level_by_level(
    small, noise, level, seeds, tmp_path, capsys, monkeypatch
):
    file, arms = tmp_path / "noise.csv", "matched+recency,matched+recency[backbone.loss=focal]"
    options = [*small, "--set", "epochs=1", "--noise", noise, *level, "--arms", arms]
    for some in ("0", seeds):
        assert corrupted.main([*options, "--seeds", some, "--csv", str(file)]) == 0
    lines, number = ledger.read(file), 4 if noise == "targets" else 2
    assert len(lines) == number and lines["mrr all items"].nunique() > number // 2
    out = known(capsys, file, corrupted.main, [*options, "--seeds", seeds], monkeypatch)
    assert out.count("already") == number
    assert f"| {noise} | seeds | `matched+recency` | `matched+recency[backbone.loss=focal]` |" in out
    lead = r"[-+]\d+\.\d % \([-+].* to [-+].*\), p " if noise == "targets" else ""
    line = rf"\| sasrec \| tiny \| {level[1]} \| {number // 2} \| 0\.\d+ \| {lead}0?\."
    assert re.search(line, out) and re.search(line, tables.noise(tmp_path, noise))


def test_options_of_other_noise_are_refused(small):
    for options, said in (
        (["--noise", "targets", "--ks", "2"], "--ks has no effect with noise in targets; give --shares"),
        (["--noise", "distractors", "--ks", "0"], "--ks is '0'; give whole numbers of at least 1"),
        (["--noise", "targets", "--json", "x.json"], "--json has no effect with noise in targets; give --csv"),
        (["--noise", "distractors", "--set", "samples=prefixes"], "take sasrec or hstu with training.samples windows"),
    ):
        with pytest.raises(UserError, match=said):
            corrupted.main([*small, *options])


def test_ways_to_read_a_rating_are_compared_on_the_same_targets(events, tmp_path, capsys, monkeypatch):
    frame = pd.read_parquet(events)
    frame.assign(stars=np.arange(len(frame)) % 5 + 1.0).to_csv(tmp_path / "rated.csv", index=False)
    file, arms = tmp_path / "noise.csv", "matched+recency,bft[reads_reliability=precision],bft[data.weight={column}]"
    options = ["--dataset", "rated.csv", "--data-root", str(tmp_path), "--column", "stars", "--seeds", "0"]
    options += ["--set", "time=timestamp", "--set", "hidden_size=8", "--set", "epochs=1", "--arms", arms]
    assert reliable.main([*options, "--csv", str(file)]) == 0
    out = known(capsys, file, reliable.main, options, monkeypatch)
    assert "| `bft[backbone.reads_reliability=precision]` | `bft[data.weight=stars]` |" in out
    assert "| sasrec | rated | stars | 1 | 0." in out


def test_of_a_baseline_without_a_hit_nothing_is_said_relative_to_it():
    values = [(arm, seed, value * seed) for arm, value in (("matched", 0.0), ("bft", 0.2)) for seed in (1, 2)]
    rows = [
        {"arm": arm, "seed": seed, "where": "both", "ndcg@10 unfiltered": value, "share": 0.5, "found": None}
        | dict.fromkeys(planted.METRICS["items"], value)
        for arm, seed, value in values
    ]
    assert corrupted.table(rows, ["matched", "bft"]).endswith("| 0.3000 (p 0.205) |")
    said = planted.table(rows, "matched", of="items").splitlines()[-1]
    assert said.count("| 0.3000 (p 0.205, 2 of 2) ") == len(planted.METRICS["items"])


@pytest.mark.parametrize("shares", ["0", "1", "half"])
def test_a_share_that_is_none_is_refused(small, shares):
    with pytest.raises(UserError, match="give shares between 0 and 1"):
        corrupted.main([*small, "--shares", shares])


def test_the_oracle_knows_the_planted_truth_and_keeps_it():
    dataset, truth, users = planted.planted(0.5, num_users=60, num_items=80, mean_length=8.0)
    assert set(truth.tolist()) == {1.0, np.float32(planted.UNRELIABLE)} and len(truth) == dataset.num_items + 1
    assert set(users.tolist()) == {1.0} and len(users) == dataset.num_users
    config = planted.ORACLE.config(["hidden_size=8", "n_heads=2"], model="sasrec")
    model = build_model(config, dataset)
    planted.fix(model, truth)
    items = torch.arange(1, dataset.num_items + 1)
    found = model.item_precision(items, model.item_embedding(items))[:, 0]
    torch.testing.assert_close(found, 8 / 9 * truth[1:] ** 2)  # lam0 = 2 K (1 - K0) / K0, K = 4, K0 = .9
    assert not [name for name, _ in model.named_parameters() if name.startswith("item_precision")]


def test_the_planted_command_measures_every_arm_and_repeats_itself(tmp_path, capsys):
    found = []
    for shares, seeds in (("0,0.5", "0-1"), ("0.5", "1")):
        file, options = tmp_path / f"{seeds}.json", ["--shares", shares, "--seeds", seeds, *SHORT]
        assert planted.main([*options, "--arms", "matched,bft", "--json", str(file)]) == 0
        found.append(json.loads(file.read_text())["planted"])
    assert [row for row in found[0] if row["share"] and row["seed"] == 1] == found[1]
    assert {(row["share"], row["arm"]) for row in found[0]} == {
        (share, arm) for share in (0.0, 0.5) for arm in ("matched", "bft", "oracle")
    }
    assert {row["found"] is None for row in found[0] if row["arm"] == "bft" and row["share"]} == {False}
    assert "| 0.5 | oracle |" in capsys.readouterr().out
    with pytest.raises(UserError, match="give shares of at least 0 and below 1"):
        planted.main(["--shares", "1"])


def test_planted_users_are_told_apart_in_the_table(tmp_path, capsys):
    made = planted.planted(0.5, of="users", num_users=60, num_items=80, mean_length=8.0)
    assert set(made.items.tolist()) == {1.0}
    assert set(made.users.tolist()) == {1.0, np.float32(planted.UNRELIABLE)}
    options = ["--of", "users", "--shares", "0.5", "--seeds", "0", *SHORT]
    planted.main([*options, "--arms", "matched,bft", "--json", str(tmp_path / "users.json")])
    rows = json.loads((tmp_path / "users.json").read_text())["planted"]
    assert [(row["arm"], row["found"] is None) for row in rows] == [("matched", True), ("bft", False)]
    assert "| noise users |" in capsys.readouterr().out


@pytest.fixture
def trained(train_arms):
    return train_arms(ARMS)


@pytest.fixture
def ledger_of(train_arms, tmp_path, capsys):
    """The file of a ledger that has the runs of these arms."""

    def add(arms):
        ledger.main(["add", str(train_arms(arms)), "--file", str(tmp_path / "runs.csv")])
        capsys.readouterr()
        return tmp_path / "runs.csv"

    return add


def test_the_paper_s_configuration_is_compared_for_each_backbone_in_all_arms(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(grid, "compare", lambda *given, **named: asked.append((given, named)) or "found")
    assert paper.main(["--out", str(tmp_path), "--datasets", "a,b", "--seeds", "0-4", "--set", "epochs=1"]) == 0
    assert [named["out"].name for _, named in asked] == [
        f"{m}-{d}" for d in "ab" for m in ("sasrec", "bert4rec", "hstu")
    ]
    for (arms, _), named in asked:
        configs = [arm.config(["epochs=1"], file=named["config"], model=named["model"]) for arm in parse_arms(arms)]
        assert [config.backbone.recency_decay for config in configs] == [False, False, True, True]
        assert {config.training.samples for config in configs} == {"prefixes"} and named["epochs"] == 1
        assert configs[-1].core.initial == "hybrid" and named["seeds"] == "0-4"
    assert "hstu, b\n\nfound" in capsys.readouterr().out


def test_a_choice_is_by_validation_alone(trained, capsys):
    assert choose.main([str(trained), "--baseline", "matched"]) == 0
    said = capsys.readouterr().out
    for run in (trained / "runs").iterdir():
        metrics = json.loads((run / "metrics.json").read_text())
        metrics["validation"]["unfiltered"]["ndcg@10"] = 0.5 if "n_heads" in run.name else 0.25
        (run / "metrics.json").write_text(json.dumps(metrics))
    assert choose.main([str(trained), "--baseline", "matched"]) == 0
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert rows[0].startswith("| matched[backbone.n_heads=1] | 2 | 0.5000 ± 0.0000 | +0.2500 | +100.0 % |")
    assert "| 2 of 2 |" in rows[0] and rows[1].startswith("| matched | 2 | 0.2500 ± 0.0000 |  |")
    assert said.splitlines()[0] == "validation ndcg@10, all items; differences from matched"


def test_a_choice_refuses_what_is_not_there(trained, tmp_path):
    with pytest.raises(UserError, match="has no folder `runs`"):
        choose.main([str(tmp_path)])
    with pytest.raises(UserError, match="unknown arm 'bft'"):
        choose.main([str(trained), "--baseline", "bft"])
    with pytest.raises(UserError, match=r"arm .* has two runs of seed"):
        choose.main([str(trained), str(trained)])
    with pytest.raises(UserError, match="unknown metric 'ndcg@7'"):
        choose.main([str(trained), "--metric", "ndcg@7"])


def test_a_ledger_keeps_runs_once(train_arms, tmp_path, capsys):
    out, file = train_arms("matched,matched+recency,bft"), tmp_path / "runs.csv"
    assert ledger.main(["add", str(out / "runs" / "bft-seed0"), str(out), "--file", str(file)]) == 0
    written = file.read_bytes()
    assert ledger.main(["add", str(out / "runs" / "bft-seed1"), str(out), "--file", str(file)]) == 0
    assert file.read_bytes() == written
    assert "6 runs added, 1 were there, 6 in all" in capsys.readouterr().out
    table = ledger.read(file)
    said = json.loads((out / "runs" / "bft-seed1" / "metrics.json").read_text())["test"]["filtered"]["ndcg@10"]
    line = table[(table["arm"] == "bft") & (table["seed"] == 1)].iloc[0]
    made = json.loads((out / "runs" / "bft-seed1" / "environment.json").read_text())
    assert (line["commit"], line["processor"], line["date"]) == (made.get("commit") or "", made["cpu"], made["date"])
    assert line["ndcg@10 seen masked"] == pytest.approx(said, abs=1e-11)


def test_a_ledger_refuses_another_figure_of_the_same_seed_and_what_it_does_not_know(train_arms, tmp_path):
    out, file = train_arms("matched"), tmp_path / "runs.csv"
    ledger.main(["add", str(out), "--file", str(file)])
    table = ledger.read(file)
    table["mrr all items"] += 0.01
    table.to_csv(file, index=False)
    before = file.read_bytes()
    with pytest.raises(UserError, match=r"seed 0 of matched on tiny with other figures .* a seed counts once"):
        ledger.main(["add", str(out), "--file", str(file)])
    assert file.read_bytes() == before
    environment = out / "runs" / "matched-seed0" / "environment.json"
    environment.write_text(json.dumps({"recbft": "0"}))
    with pytest.raises(UserError, match=r"environment\.json lacks cpu and date"):
        ledger.main(["add", str(out), "--file", str(tmp_path / "new.csv")])
    file.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has other columns"):
        ledger.read(file)
    with pytest.raises(UserError, match="does not exist"):
        ledger.read(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("column", "said"), [("targets", "targets"), ("content", "events"), ("recbft", "several versions of recbft")]
)
def test_lines_that_compare_would_refuse_are_not_paired(ledger_of, column, said):
    table = ledger.read(file := ledger_of("matched,bft"))
    table.loc[table["arm"] == "bft", column] = "another"
    table.to_csv(file, index=False)
    with pytest.raises(UserError, match=rf"the ledger has tiny \(sasrec\) with .*{said} \(another, "):
        overview.main(["--file", str(file)])


def test_an_overview_has_a_line_and_intervals_per_data_set_and_model(ledger_of, tmp_path, capsys):
    file, svg = ledger_of("matched,matched+recency,bft"), tmp_path / "figure.svg"
    with pytest.raises(SystemExit):
        overview.main(["--file", str(file), "--metric", "ndcg@7"])
    capsys.readouterr()
    assert overview.main(["--file", str(file), "--svg", str(svg), "--metric", "mrr seen masked"]) == 0
    told, _, head, _, line = capsys.readouterr().out.strip().splitlines()
    assert told.startswith("mrr seen masked / mrr all items")
    cells = dict(zip(*([cell.strip() for cell in row.split("|")] for row in (head, line)), strict=True))
    values = ledger.read(file).set_index(["arm", "seed"])["mrr seen masked"]
    assert (cells["model"], cells["data"], cells["seeds"], cells["`published`"]) == ("sasrec", "tiny", "2", "")
    assert cells["`bft`"].startswith(f"{values['bft'].mean():.4f} / ")
    assert "% (p " in cells["`bft` from `matched+recency`"]
    found = overview.comparisons(ledger.read(file))["sasrec", "tiny"]
    means = [found[arm]["validation ndcg@10"].mean() for arm in ("bft", "matched+recency")]
    lead = f"{100 * (means[0] / means[1] - 1):+.1f} % (p "
    assert cells["on validation from `matched+recency`"].startswith(lead)
    drawn = svg.read_text()
    assert "background: #ffffff" in drawn
    assert "MRR of bft, seen masked" in drawn and "sasrec, tiny" in drawn and "from matched+recency" in drawn


def test_an_overview_of_all_sets_published_figures_beside_the_arms(ledger_of, capsys):
    file = ledger_of("matched,bft")
    lines = ledger.read(file).groupby("arm")[[*ledger.METRICS, "epochs", "best_epoch"]].mean()
    figure = {"model": "sasrec", "dataset": "tiny", "name": "theirs", "beside": "bft", "values": [0.5, 0.25, None]}
    published = {
        "sources": {"a": "A (2020)", "b": "B (2021)"},
        "figures": [figure | {"source": "a", "items": "seen masked"}, figure | {"source": "b", "model": "hstu"}],
    }
    said = overview.everything(overview.comparisons(ledger.read(file)), published).splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in said if row.startswith("|")][2:]
    assert [row[:3] for row in cells] == [
        ["sasrec, tiny", "`matched`", "0,1"],
        ["", "`bft`", "0,1"],
        ["", "theirs", ""],
    ]
    assert cells[1][3] == " / ".join(f"{lines.at['bft', f'{name} all items']:.4f}" for name in overview.SHOWN)
    assert cells[1][5] == f"{lines.at['bft', 'epochs']:.0f} ({lines.at['bft', 'best_epoch']:.0f})"
    apart = [100 * (lines.at["bft", f"ndcg@10 {items}"] / 0.25 - 1) for items in overview.ITEMS]
    assert cells[2][3:] == ["", "0.5000 / 0.2500 / -", "", f"`bft` {apart[0]:+.1f} / {apart[1]:+.1f} %"]
    assert said[-1] == "theirs: A (2020)"
    assert overview.main(["--file", str(file), "--all"]) == 0
    assert "theirs" not in capsys.readouterr().out


def test_every_published_figure_has_its_source_and_its_place():
    published = yaml.safe_load(overview.PUBLISHED.read_text(encoding="utf-8"))
    assert {one["source"] for one in published["figures"]} == set(published["sources"])
    for one in published["figures"]:
        assert one["model"] in MODELS and one["items"] in overview.ITEMS and one["beside"] in overview.ARMS
        hr, ndcg, mrr = one["values"]
        assert 1 > hr > ndcg > (mrr or 0) >= 0
    places = [(one["model"], one["dataset"], one["name"]) for one in published["figures"]]
    assert len(set(places)) == len(places)


def test_the_pages_show_what_the_ledger_has(capsys, tmp_path):
    ledger_file, page = DOCS / "reports" / "runs.csv", (DOCS / "results.md").read_text(encoding="utf-8")
    assert overview.main(["--file", str(ledger_file), "--all"]) == 0
    made = re.sub(r"\b0(\.\d{4})", r"\1", capsys.readouterr().out)
    for name, said in (("sasrec", "SASRec"), ("bert4rec", "BERT4Rec"), ("hstu", "HSTU")):
        made = made.replace(f"| {name},", f"| {said},")
    lines = rows_of_results(made)
    assert len(lines) == 29 and [line for line in lines if line not in page] == []
    assert overview.main(["--file", str(ledger_file), "--svg", str(tmp_path / "new.svg")]) == 0
    assert (tmp_path / "new.svg").read_text() == (DOCS / "reports" / "overview.svg").read_text()


def test_the_pages_have_the_tables_that_the_command_makes():
    shown = []
    for file in tables.PAGES:
        page = file.read_text(encoding="utf-8")
        assert tables.filled(page) == page
        shown += (places := [place[1] for place in tables.PLACE.findall(page)])
        assert page.count("<!-- table:") == page.count("<!-- end -->") == len(places)
    unmade = {name for name, made in tables.COMPUTED.items() if made(DOCS / "reports").count("\n") < 2}  # no rows yet
    assert sorted(shown) == sorted({*tables.COMPUTED, *tables.SUMMARIES} - unmade)
    with pytest.raises(UserError, match="unknown table 'gain'; did you mean 'gains'"):
        tables.filled("<!-- table: gain -->\n<!-- end -->")


def test_a_table_has_the_library_s_paired_test_of_the_ledger_s_runs():
    lines = pd.read_csv(DOCS / "reports" / "runs.csv")
    lines = lines[(lines["dataset"] == "amazon-instruments") & (lines["model"] == "sasrec")].sort_values("seed")
    decay = lines["settings"].str.contains("recency_decay")
    arms = [lines[(lines["arm"] == arm) & (decay == own)] for arm, own in (("matched", True), ("bft", False))]
    d = compare_seeds(*(arm["ndcg@10 all items"].to_numpy() for arm in arms))
    row = next(row for row in tables.gains(tables.REPORTS).splitlines() if row.startswith("| SASRec | Instruments |"))
    assert f"| {d.num_seeds} | {d.mean_baseline:.4f} ± {d.sd_baseline:.4f} |" in row
    assert f"| {100 * d.relative:+.1f} % (" in row and f"| {d.p_t:.3f} |" in row


def test_thirds_are_pooled_each_relative_to_its_own_baseline(tmp_path):
    again = ledger.read(DOCS / "reports" / "again.csv")
    one = tables.Pairs("sasrec", "", tables.THIRDS)
    found = tables._pooled(DOCS / "reports", one, tables.NDCG)
    again.loc[again["dataset"] == tables.THIRDS[0], tables.NDCG] *= 2
    again.to_csv(tmp_path / "again.csv", index=False)
    scaled = tables._pooled(tmp_path, one, tables.NDCG)
    assert (scaled.num_seeds, scaled.relative, scaled.p_t) == pytest.approx((30, found.relative, found.p_t))


def test_every_summary_has_its_source():
    summaries, sources = (
        pd.read_csv(DOCS / "reports" / f"{name}.csv", dtype=str, keep_default_na=False)
        for name in ("summaries", "sources")
    )
    assert sources["source"].is_unique and set(summaries["source"]) == set(sources["source"])
    assert not summaries.duplicated(["table", "row", "column", "from"]).any()
    assert set(tables.SUMMARIES) < set(summaries["table"])


def test_links_of_the_study_lead_somewhere():
    page = (DOCS / "study.md").read_text(encoding="utf-8")
    heads = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in re.findall(r"^#+ (.+)$", page, re.M)}
    for link in re.findall(r"\]\(([^)]+)\)", page):
        file, _, anchor = link.partition("#")
        assert (DOCS / file).exists() and (file or anchor in heads), link


def rows_of_results(made):
    """The rows of docs/results.md that ``overview --all`` has the figures of, all NDCG@10: the arms and the paper's
    among all items, the arms masked, and each other published figure."""
    lines, rows = {}, []
    for cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in made.splitlines() if row.startswith("| ")):
        first, name, seeds, *ranked, _, apart = cells
        if name in ("", "---"):
            continue
        all_items, masked = (cell.split(" / ") for cell in ranked)
        if first:
            line = first
            own = lines[line] = {"all items": {}, "masked": {}, "paper": {}}
        if seeds:
            own["all items"][name], own["masked"][name] = all_items[1], masked[1]
            continue
        arm = apart.split(" ")[0]
        if name.startswith("paper's"):
            own["paper"][arm] = all_items[1]
        else:
            among, theirs = ("all items", all_items) if ranked[0] else ("masked", masked)
            rows.append([line, name, among, theirs[1], f"{arm} {own[among][arm]}"])
    for line, own in lines.items():
        arms = [f"`{arm}`" for arm in ("published", "matched", "matched+recency", "bft")]
        paper = [own["paper"].get(f"`{arm}`", "") for arm in ("published", "matched", "bft")]
        rows += [
            [line, *(own["all items"][arm] for arm in arms), *paper],
            [line, *(own["masked"][arm] for arm in arms)],
        ]
    return [re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(row)} |") for row in rows]


def test_an_overview_names_the_seeds_where_they_are_not_those_of_the_line(ledger_of, capsys):
    table = ledger.read(file := ledger_of("matched,matched+recency,bft"))
    more = table[(table["arm"] == "matched") & (table["settings"].str.contains("recency"))].assign(
        seed=lambda t: t["seed"] + 2
    )
    pd.concat([table, more]).to_csv(file, index=False)
    overview.main(["--file", str(file)])
    line = capsys.readouterr().out.strip().splitlines()[-1]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3] == "2" and cells[6].endswith(" (seeds 0-3)") and line.count("seeds") == 1
    fewer = table[~((table["settings"].str.contains("recency")) & (table["seed"] == 1))]
    pd.concat([fewer, table[table["arm"] == "bft"].assign(seed=lambda t: t["seed"] + 2)]).to_csv(file, index=False)
    overview.main(["--file", str(file)])
    cells = [cell.strip() for cell in capsys.readouterr().out.strip().splitlines()[-1].split("|")]
    assert cells[3] == "2" and cells[6].endswith(" (seeds 0)") and cells[7].endswith(" (seeds 0-3)") and cells[9] == ""
    pd.concat([table, table.assign(targets="other")]).to_csv(file, index=False)
    with pytest.raises(UserError, match=r"has tiny .* with other targets"):
        overview.main(["--file", str(file)])


def test_an_overview_of_plain_layers_alone_is_refused(ledger_of):
    with pytest.raises(UserError, match="no data set on which `bft` met `matched`"):
        overview.main(["--file", str(ledger_of("matched"))])

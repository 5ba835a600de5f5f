"""The whole report of real runs: self-contained, escaped, the same bytes twice, honest about what is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats

from recbft.comparing.comparison import comparison_of, load_comparison
from recbft.comparing.results import results_of, write_comparison
from recbft.config.fields import to_dict
from recbft.errors import UserError
from recbft.experiments.plan import leaves
from recbft.reporting import plots
from recbft.reporting.report import check_formats, document, make_report, write_report
from recbft.reporting.sections import exposure_section, metrics_section, strata_section, training_section
from recbft.reporting.tables import text
from recbft.training.run_config import load_run_config
from tests.reporting.conftest import section_of

pytest.importorskip("matplotlib")
SECTIONS = ["notes", "metrics", "strata", "mechanism", "uncertainty", "exposure", "training", "protocol", "commands"]


@pytest.fixture(scope="module")
def page(report, tmp_path_factory):
    (path,) = write_report(report, tmp_path_factory.mktemp("page"), ("html",))
    return path


class Reader(HTMLParser):
    """Tags, what they refer to, and whether they close."""

    VOID = ("meta", "link", "br", "wbr", "use", "path", "input")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.outside = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name.split(":")[-1] in ("src", "href", "data", "action", "poster", "srcset") and value[:1] != "#":
                self.outside.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag, tag


def test_the_page_needs_nothing_but_itself(page):
    content = page.read_text()
    reader = Reader()
    reader.feed(content)
    assert reader.open == [] and reader.outside == ["data:,"]  # the empty icon
    assert not {"script", "img", "iframe", "object"} & set(reader.tags)
    assert not re.search(r"url\((?!#)|@import", content)
    assert page.stat().st_size < 500_000
    ids = re.findall(r'\bid="([^"]+)"', content)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'(?:href="|url\(|for=")#?([^")]+)', content)) - {"data:,"} <= set(ids)


def test_the_page_opens_with_the_answer_and_its_words_and_has_every_section(page, report):
    header, main = page.read_text().split("<main>")
    (answer,) = report.answer
    assert header.index(f"<h1>{report.title}") < header.index(answer.sentence[:40]) < header.index("What to do:</b>")
    for word in ("arm", "NDCG@10", "p", "bft", "matched"):
        assert f"<dt>{word}</dt>" in header
    assert report.terms["bft"] == (
        "precision tracked through attention, residual and feed-forward network; attention decays with distance "
        "(recency decay)."
    )
    assert report.terms["matched"] == "the pre-norm layer of bft with the precision channel off."
    assert [section.name for section in report.sections] == SECTIONS and all(
        f'id="{name}"' in main for name in SECTIONS
    )
    # differences, seeds, three of strata, three of mechanism, two of uncertainty, training
    assert main.count("<svg") == 11 and "has no plots" not in header


def test_two_reports_are_the_same_bytes(comparison, page, tmp_path):
    (again,) = write_report(make_report(comparison), tmp_path, ("html",))
    assert again.read_bytes() == page.read_bytes()


def test_what_comes_from_outside_is_escaped_and_an_arm_without_ranks_or_lists_is_named(with_external, tmp_path):
    report = make_report(with_external, draw=False)
    (path,) = write_report(report, tmp_path, ("html",))
    content = path.read_text()
    assert "<b>other" not in content and "&lt;b&gt;other&lt;/b&gt;" in content
    assert "is external" in content and "<b>" not in document(report)
    assert "<b>other</b> has no unfiltered ranks and is in none of these tables." in section_of(report, "strata").words
    lists = section_of(report, "exposure")
    assert lists.words == ["Of <b>other</b> no lists are known, only ranks."]
    assert {row[0] for row in lists.tables[0].rows} == {"matched", "bft"} and "<b>other</b>" not in report.terms


def test_every_plot_of_ranks_says_among_which_items(report):
    captions = {plot.name: plot.caption for section in report.sections for plot in section.plots}
    for name in ("differences", "seeds", "strata-item-frequency", "strata-user-activity", "training"):
        assert ", all items" in captions[name]


@pytest.mark.parametrize("filter_seen", [False, True])
def test_what_is_drawn_is_the_headline_setting_by_seed_and_each_run_by_epoch(with_external, monkeypatch, filter_seen):
    drawn = {}
    for name in ("differences", "seed_scatter", "training_curves"):
        monkeypatch.setattr(plots, name, lambda *given, name=name: drawn.setdefault(name, given) and "")
    bft, other = with_external.arms["bft"], "<b>other</b>"
    gaps = [{"epoch": 3, "valid_ndcg@10": None}, {"epoch": 4, "valid_ndcg@10": 0.5}]
    histories = (bft.histories[0], [*bft.histories[1], *gaps], [])
    comparison = replace(
        with_external,
        protocol=with_external.protocol | {"filter_seen": filter_seen},
        arms=with_external.arms | {"bft": replace(bft, histories=histories)},
    )
    results = results_of(comparison)
    metrics_section(comparison, results, draw=True)
    training_section(comparison, results, draw=True)
    setting = "filtered" if filter_seen else "unfiltered"
    there = ["bft", other] if filter_seen else ["bft"]
    colours = {"matched": 0, "bft": 1, other: 2}
    found, colour = drawn["differences"]
    assert {(one.arm, one.setting) for one in found} == {(name, setting) for name in there} and colour == colours
    baseline, values, metric, colour = drawn["seed_scatter"]
    assert (baseline, metric, list(values), colour) == ("matched", "ndcg@10", ["matched", *there], colours)
    for name, each in values.items():
        assert each.tolist() == comparison.values(name, setting, "ndcg@10").tolist()
    curves, _, colour = drawn["training_curves"]
    valid = [[row["valid_ndcg@10"] for row in history] for history in bft.histories]
    assert curves["bft"] == [([1, 2], valid[0]), ([1, 2, 4], [*valid[1], 0.5])] and colour == colours
    assert len(curves["matched"]) == 3 and other not in curves


def test_what_lists_show_is_that_of_the_runs_and_differences_are_paired_by_seed(report, comparison, trained):
    (levels,), (differences,) = section_of(report, "exposure").tables, section_of(report, "exposure").folded
    ran = {arm: [json.loads((trained / "runs" / f"{arm}-seed{seed}" / "metrics.json").read_text())["exposure"]
                 for seed in range(3)] for arm in ("matched", "bft")}  # fmt: skip
    measures = ("coverage@10", "gini@10", "popularity@10")
    words = {"all items": "unfiltered", "seen masked": "filtered"}
    assert [(row[0], row[1]) for row in levels.rows] == [(a, w) for w in words for a in ("matched", "bft")]
    for arm, said, *cells in levels.rows:
        values = [[one[words[said]][name] for one in ran[arm]] for name in measures]
        assert cells == [(pytest.approx(np.mean(each)), pytest.approx(np.std(each, ddof=1))) for each in values]
    assert f"the targets occur {comparison.target_frequency.mean():.4f} times" in levels.caption
    assert [(row[0], row[1], row[2]) for row in differences.rows] == [("bft", m, w) for w in words for m in measures]
    for _, name, said, difference, _, _, p, _ in differences.rows:
        plain, ours = ([one[words[said]][name] for one in ran[arm]] for arm in ("matched", "bft"))
        assert difference == pytest.approx(np.mean(ours) - np.mean(plain))
        assert p == pytest.approx(stats.ttest_rel(ours, plain).pvalue) if np.ptp(np.subtract(ours, plain)) else p == 1


def test_lists_say_where_they_are_of_some_users_and_where_a_difference_has_no_spread(comparison, monkeypatch):
    results = results_of(comparison)
    monkeypatch.setattr("recbft.evaluation.evaluate.LISTED_USERS", 7)
    monkeypatch.setattr("recbft.evaluation.evaluate.LISTED_SCORES", 1)
    for more, said in ([0.125, 0.125, 0.125], True), ([0.125, 0.25, 0.125], False):
        for arm, values in (("matched", np.array([0.5, 0.25, 0.75])), ("bft", np.add([0.5, 0.25, 0.75], more))):
            coverage = {"mean": values.mean(), "sd": values.std(ddof=1), "values": values.tolist()}
            results["arms"][arm]["exposure"] = {"unfiltered": {"coverage@10": coverage}}
        section = exposure_section(comparison, results)
        assert ("A difference without an interval is the same in every seed" in section.folded[0].caption) == said
        assert section.words == [f"Lists of 7 of the {comparison.users.size} users, drawn from a fixed seed."]
    results["arms"]["matched"]["exposure"] = {}
    section = exposure_section(comparison, results)
    assert {row[0] for row in section.tables[0].rows} == {"bft"} and not section.folded


def test_the_protocol_lists_the_settings_in_which_arms_differ_and_no_other(report, comparison):
    (table,) = section_of(report, "protocol").tables
    assert [column.heading for column in table.columns[1:]] == list(comparison.arms) == ["bft", "matched"]
    rows = {row[0]: row[1:] for row in table.rows}
    ours, plain = (leaves(comparison.arms[name].config) for name in ("bft", "matched"))
    own = {"core.estimator", "core.lam_max", "core.process_noise"}
    assert rows["arm"] == ["bft", "matched"] and own < set(rows)
    assert [rows[key] for key in sorted(own)] == [["reml", None], ["100", None], ["true", None]]
    hashes = rows.pop("hash of the config")
    assert hashes[0] != hashes[1] and not {"seed", "model", "training.epochs", "backbone.max_length"} & set(rows)
    assert all(ours.get(key) != plain.get(key) for key in rows)
    assert all(ours.get(key) == plain.get(key) for key in {*ours, *plain} - {*rows})


def test_runs_of_one_data_set_under_several_names_have_a_report_and_unknown_machines_are_named(copied):
    file = copied / "runs" / "bft-seed0" / "protocol.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dataset": "the same"}))
    (copied / "runs" / "matched-seed1" / "environment.json").unlink()
    report = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False)
    assert report.title.endswith("on data of several names (sasrec)")
    assert any(line.startswith("arm matched, seed 1: trained on a m") for line in section_of(report, "notes").words)


def test_strata_are_of_the_setting_in_which_the_baseline_can_be_compared(with_external):
    other = "<b>other</b>"
    alone = {name: with_external.arms[name] for name in ("matched", other)}
    for changes in ({"baseline": other}, {"arms": alone}):
        section = strata_section(replace(with_external, **changes), data_root=None, draw=False)
        assert len(section.words) == 1 and all("seen masked" in table.caption for table in section.tables)


def test_baselines_that_look_alike_in_the_name_of_a_file_have_files_of_their_own(with_external, tmp_path):
    arms = with_external.arms
    alike = {"matched recency": "matched", "matched+recency": "bft", "best": "bft"}
    named = {name: replace(arms[other], name=name) for name, other in alike.items()}
    report = make_report(replace(with_external, arms=named, baseline="matched recency"), draw=False)
    assert "best and matched+recency rank every target of" in document(report)
    names = [table.name for table in report.tables if "-against-" in table.name]
    both = ["against-matched-recency", "against-matched-recency-2"]
    assert names == [f"{over}-{one}" for over in ("seeds", "users") for one in both]
    written = write_report(report, tmp_path, ("csv",))
    assert len(written) == len({str(path).lower() for path in written}) == len(report.tables)


def test_the_first_metric_is_shown_without_the_grid_and_the_rest_is_folded(report):
    metrics, strata = section_of(report, "metrics"), section_of(report, "strata")
    assert [table.name for table in metrics.tables] == ["levels", "seeds-against-matched"]
    assert [table.name for table in metrics.folded] == ["users-against-matched"]
    names = ("item-frequency", "user-activity", "first-time", "recency")
    assert [table.name for table in strata.tables] == [f"strata-{name}-ndcg-10" for name in names]
    folded = {f"strata-{name}-hr-10" for name in (*names, "grid")} | {"strata-grid-ndcg-10"}
    assert len(strata.folded) == 6 and {table.name for table in strata.folded} == folded


def test_a_metric_of_which_the_baseline_has_nothing_is_named_beside_the_plot(comparison):
    far = {setting: ranks + 10 for setting, ranks in comparison.arms["matched"].ranks.items()}
    changed = replace(comparison, arms={**comparison.arms, "matched": replace(comparison.arms["matched"], ranks=far)})
    section = metrics_section(changed, results_of(changed), draw=True)
    assert section.plots[0].caption.endswith(" Left out, since matched has 0 of it: HR@10, NDCG@10.")


def test_a_saved_comparison_gives_its_own_figures_and_command(comparison, tmp_path):
    made = {"command": "recbft compare --out OUT RUN_DIR...", "commit": "abc"}
    saved = write_comparison(comparison, tmp_path / "out", made=made, metrics=("hr@5",))
    report = make_report(load_comparison(tmp_path / "out"), draw=False)
    assert "HR@5" in report.answer[0].evidence and "top five" in report.answer[0].sentence
    levels = section_of(report, "metrics").tables[0]
    assert levels.rows[0][2][0] == saved["arms"]["matched"]["metrics"]["unfiltered"]["hr@5"]["mean"]
    assert section_of(report, "commands").commands[0] == made["command"]
    assert section_of(report, "protocol").items["made.commit"] == "abc"


def test_training_commands_make_the_same_configuration(report, comparison):
    (command,) = [one for one in section_of(report, "commands").commands if "--arm bft" in one]
    settings = re.findall(r"--set (\S+)", command)
    named = {"model": "sasrec", "arm": "bft", "dataset": comparison.arms["bft"].config["data"]["dataset"]}
    ours = {**to_dict(load_run_config(None, settings, **named)), "seed": 0}
    assert ours == {**comparison.arms["bft"].config, "seed": 0} and "SEED 0-2" in command


def test_a_report_does_not_say_where_files_lay_on_the_machine(report, copied):
    assert section_of(report, "protocol").items["config.data.dataset"] == "tiny.parquet"
    for run in (copied / "runs").iterdir():
        file = run / "protocol.json"
        changed = json.loads(file.read_text())
        changed["config"]["training"]["warm_start"] = "/home/ann/runs/older"
        file.write_text(json.dumps(changed))
    begun = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False)
    for made, told in ((report, "-d tiny.parquet"), (begun, "--set training.warm_start=older")):
        said = document(made)
        assert told in said and "/home/ann" not in said and "/tiny.parquet" not in said


def test_every_form_is_written(report, tmp_path):
    written = write_report(report, tmp_path)
    names = {path.relative_to(tmp_path).as_posix() for path in written}
    assert {"report.html", "report.md", "latex/tables.tex", "csv/levels.csv", "svg/differences.svg"} <= names
    assert len([name for name in names if name.startswith("csv/")]) == len(report.tables)
    assert len({table.name for table in report.tables}) == len(report.tables)
    made = (tmp_path / "report.md").read_text()
    assert made.startswith(f"# {report.title}\n\n**{report.answer[0].sentence}**\n") and "- NDCG@10: 1 where" in made
    assert "| arm | items |" in made and "- content_hash: " in made and "    recbft report OUT --data-root DIR" in made
    for table in report.tables:
        assert not re.search(r"\b(nan|inf)\b", text(table))


def test_no_format_is_refused():
    with pytest.raises(UserError, match="no format is given; choose of html, md, latex, csv, svg"):
        check_formats([])


def test_a_title_that_would_name_many_arms_counts_them(with_external, monkeypatch):
    monkeypatch.setattr("recbft.reporting.report.SENTENCES", 1)
    assert make_report(with_external, draw=False).title.startswith("2 arms against matched on ")

"""The whole report of real runs: self-contained, escaped, the same bytes twice, honest about what is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from recbft.errors import UserError
from recbft.experiments.comparison import comparison_of, load_comparison
from recbft.experiments.results import results_of, write_comparison
from recbft.reporting.report import check_formats, document, make_report, write_report
from recbft.reporting.sections import metrics_section
from recbft.reporting.tables import text

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def report(comparison):
    return make_report(comparison)


@pytest.fixture(scope="module")
def page(report, tmp_path_factory):
    (path,) = write_report(report, tmp_path_factory.mktemp("page"), ("html",))
    return path


class Reader(HTMLParser):
    """Tags, what they refer to, and whether they close."""

    VOID = ("meta", "link", "br", "use", "path")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.outside = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name.split(":")[-1] in ("src", "href", "data", "action", "poster", "srcset") and not value.startswith(
                "#"
            ):
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


def test_the_page_opens_with_the_answer_and_has_every_section(page, report):
    content = page.read_text()
    assert content.index(report.answer[0].split(":")[0]) < content.index("<main>")
    names = [section.name for section in report.sections]
    assert names == ["metrics", "strata", "mechanism", "uncertainty", "training", "protocol", "commands", "notes"]
    assert all(f'id="{name}"' in content for name in names)
    # differences, seeds, three of strata, two of mechanism, two of uncertainty, training
    assert content.count("<svg") == 10


def test_ids_are_unique_and_links_lead_somewhere(page):
    content = page.read_text()
    ids = re.findall(r'\bid="([^"]+)"', content)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', content)) <= set(ids)


def test_two_reports_are_the_same_bytes(comparison, page, tmp_path):
    (again,) = write_report(make_report(comparison), tmp_path, ("html",))
    assert again.read_bytes() == page.read_bytes()


def test_names_from_outside_are_escaped(with_external, tmp_path):
    (path,) = write_report(make_report(with_external), tmp_path, ("html",))
    content = path.read_text()
    assert "<b>other" not in content and "&lt;b&gt;other&lt;/b&gt;" in content
    assert "is external" in content
    assert "<b>" not in document(make_report(with_external, draw=False))


def test_every_plot_of_ranks_says_among_which_items(report):
    captions = {plot.name: plot.caption for section in report.sections for plot in section.plots}
    for name in ("differences", "seeds", "strata-item-frequency", "strata-user-activity", "training"):
        assert ", all items" in captions[name]


def test_probes_become_two_sections(report):
    mechanism, uncertainty = report.sections[2:4]
    quantities = {row[2] for row in mechanism.tables[0].rows}
    assert {"gain", "incoming precision", "initial precision"} <= quantities
    assert "bft 0,1" in mechanism.tables[0].caption
    assert {row[0] for row in uncertainty.tables[0].rows} == {"bft", "matched"}
    assert any(line.startswith("Posterior precision of bft") for line in uncertainty.words)


def test_intervals_of_probes_say_what_they_are_over(report, copied):
    assert (
        "t over seeds where several are probed, bootstrap over users where one is"
        in report.sections[3].tables[0].caption
    )
    (copied / "runs" / "matched-seed0" / "probe.json").unlink()
    runs = sorted((copied / "runs").iterdir())
    assert "intervals: t over seeds." in make_report(comparison_of(runs), draw=False).sections[3].tables[0].caption
    (copied / "runs" / "bft-seed0" / "probe.json").unlink()
    alone = make_report(comparison_of(runs), draw=False).sections[3].tables[0].caption
    assert "intervals: bootstrap over users." in alone


def changed_probe(folder, change):
    """Change the part ``uncertainty`` of a run's probe and return it."""
    file = folder / "probe.json"
    probe = json.loads(file.read_text())
    change(probe["uncertainty"])
    file.write_text(json.dumps(probe))
    return probe["uncertainty"]


def test_what_only_one_probed_seed_has_keeps_that_seeds_own_interval(copied):
    def silence(found):
        for one in found["confidences"].values():
            one |= {"auroc": None, "auroc_interval": None}

    changed_probe(copied / "runs" / "bft-seed0", silence)
    other = changed_probe(copied / "runs" / "bft-seed1", lambda found: None)["confidences"]
    section = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False).sections[3]
    own = {row[1]: row[3] for row in section.tables[0].rows if row[0] == "bft"}
    assert own["history length"] == tuple(other["history_length"]["auroc_interval"])


@pytest.mark.parametrize("at_bound", [False, True])
def test_a_temperature_at_the_end_of_its_range_is_said_to_be(copied, at_bound):
    for name in ("bft-seed0", "bft-seed1", "matched-seed0"):
        bound = at_bound and name == "bft-seed1"
        changed_probe(copied / "runs" / name, lambda found, bound=bound: found["calibration"].update(at_bound=bound))
    section = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False).sections[3]
    said = "T of bft lies at an end of the range that is searched."
    assert (said in section.tables[1].caption) == at_bound


def test_without_probes_a_line_says_what_makes_them(copied):
    for path in copied.glob("runs/*/probe.json"):
        path.unlink()
    report = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False)
    for section in report.sections[2:4]:
        assert not section.tables and "recbft probe RUN makes this section" in section.words[0]


def test_a_damaged_probe_and_one_of_other_data_are_left_out_and_named(copied):
    (copied / "runs" / "bft-seed0" / "probe.json").write_text("{")
    other = copied / "runs" / "bft-seed1" / "probe.json"
    other.write_text(re.sub(r'"content_hash": "\w+"', '"content_hash": "0"', other.read_text()))
    report = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False)
    notes = report.sections[-1].words
    assert any(line.startswith("bft-seed0/probe.json is damaged") for line in notes)
    assert any(line.startswith("bft-seed1/probe.json is of other data") for line in notes)
    assert report.sections[2].words == ["No probed arm tracks precision, so there is nothing to show."]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda probe: probe["protocol"].update(part="validation"), "of the validation, not the test"),
        (lambda probe: probe["uncertainty"].update(num_users=30), "of 30 of the 150 users"),
        (lambda probe: probe["protocol"].update(recbft_version="0.0"), "of another version"),
        (lambda probe: probe.pop("mechanism"), "damaged or of another version"),
    ],
)
def test_a_probe_of_something_else_is_not_shown_as_the_tests(copied, change, reason):
    file = copied / "runs" / "bft-seed0" / "probe.json"
    probe = json.loads(file.read_text())
    change(probe)
    file.write_text(json.dumps(probe))
    report = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False)
    assert [
        line for line in report.sections[-1].words if line.startswith(f"bft-seed0/probe.json is {reason}, and left")
    ]
    assert "bft 1" in report.sections[2].tables[0].caption


def test_runs_of_one_data_set_under_several_names_have_a_report(copied):
    file = copied / "runs" / "bft-seed0" / "protocol.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dataset": "the same"}))
    report = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False)
    assert report.title.endswith("on data of several names")


def test_an_arm_that_strata_leave_out_is_named(with_external):
    strata = make_report(with_external, draw=False).sections[1]
    assert "<b>other</b> has no unfiltered ranks and is in none of these tables." in strata.words


def test_a_metric_of_which_the_baseline_has_nothing_is_named_beside_the_plot(comparison):
    far = {setting: ranks + 10 for setting, ranks in comparison.arms["matched"].ranks.items()}
    changed = replace(comparison, arms={**comparison.arms, "matched": replace(comparison.arms["matched"], ranks=far)})
    section = metrics_section(changed, results_of(changed, over_users=False), draw=True)
    assert section.plots[0].caption.endswith(" Left out, since matched has 0 of it: HR@10, NDCG@10.")


def test_a_saved_comparison_gives_its_own_figures_and_command(trained, comparison, tmp_path):
    made = {"command": "recbft compare --out OUT RUN_DIR...", "commit": "abc"}
    saved = write_comparison(comparison, tmp_path / "out", made=made, metrics=("hr@5",))
    report = make_report(load_comparison(tmp_path / "out"), draw=False)
    assert "HR@5" in report.answer[0]
    (levels, _), commands = report.sections[0].tables, report.sections[6].commands
    assert levels.rows[0][2][0] == saved["arms"]["matched"]["metrics"]["unfiltered"]["hr@5"]["mean"]
    assert commands[0] == made["command"] and report.sections[5].items["made.commit"] == "abc"


def test_training_commands_make_the_same_configuration(report, comparison):
    from recbft.run_config import load_run_config

    (command,) = [one for one in report.sections[6].commands if "--arm bft" in one]
    settings = re.findall(r"--set (\S+)", command)
    made = load_run_config(
        None, settings, model="sasrec", arm="bft", dataset=comparison.arms["bft"].config["data"]["dataset"]
    )
    from recbft.config import to_dict

    ours = {**to_dict(made), "seed": 0}
    assert ours == {**comparison.arms["bft"].config, "seed": 0} and "SEED 0-2" in command


def test_every_form_is_written(report, tmp_path):
    written = write_report(report, tmp_path)
    names = {path.relative_to(tmp_path).as_posix() for path in written}
    assert {"report.html", "report.md", "latex/tables.tex", "csv/levels.csv", "svg/differences.svg"} <= names
    assert len([name for name in names if name.startswith("csv/")]) == len(report.tables)
    assert len({table.name for table in report.tables}) == len(report.tables)


def test_the_document_has_answer_tables_protocol_and_commands(report):
    made = document(report)
    assert made.startswith(f"# {report.title}\n\n{report.answer[0]}\n")
    assert "| arm | items |" in made and "- content_hash: " in made and "    recbft report OUT --data-root DIR" in made


def test_nothing_says_nan(report):
    for table in report.tables:
        assert not re.search(r"\b(nan|inf)\b", text(table))


def test_unknown_formats_are_refused():
    with pytest.raises(UserError, match="unknown format 'htm'; did you mean 'html'"):
        check_formats(["htm"])
    with pytest.raises(UserError, match="no format is given; choose of html, md, latex, csv, svg"):
        check_formats([])

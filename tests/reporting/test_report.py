"""The whole report of real runs: self-contained, escaped, the same bytes twice, honest about what is missing."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats

from recbft.comparing.comparison import comparison_of, load_comparison
from recbft.comparing.results import results_of, write_comparison
from recbft.errors import UserError
from recbft.experiments.arms import leaves
from recbft.reporting import plots
from recbft.reporting.exposure_section import exposure_section
from recbft.reporting.probe_sections import load_probes, mechanism_section, uncertainty_section
from recbft.reporting.report import check_formats, document, make_report, write_report
from recbft.reporting.sections import metrics_section, strata_section, training_section
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
    assert names == ["metrics", "strata", "mechanism", "uncertainty", "exposure", "training", "protocol",
                     "commands", "notes"]  # fmt: skip
    assert all(f'id="{name}"' in content for name in names)
    # differences, seeds, three of strata, two of mechanism, two of uncertainty, training
    assert content.count("<svg") == 10


def test_the_page_says_what_the_arms_are(report, with_external):
    words = report.sections[0].words
    assert words == [
        "bft of sasrec: precision tracked through attention, residual and feed-forward network.",
        "matched of sasrec: the pre-norm layer of bft with the precision channel off.",
        "With a learned decay of attention with the distance (recency decay): bft.",
    ]
    assert metrics_section(with_external, results_of(with_external), draw=False).words == words  # of a file none


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
    results = results_of(comparison, over_users=False)
    metrics_section(comparison, results, draw=True)
    training_section(comparison, draw=True)
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


def probes_in(folder, *runs):
    return [json.loads((folder / "runs" / run / "probe.json").read_text()) for run in runs]


def means(found, *keys):
    """Over the figures that are known; None where none is."""
    known = [[one[key] for one in found if one[key] is not None] for key in keys]
    return [np.mean(values) if values else None for values in known]


def test_what_precision_does_inside_is_shown_as_means_over_the_probed_seeds(copied):
    def change(probe, of):
        of(probe["mechanism"])
        (copied / "runs" / f"bft-seed{probe['protocol']['seed']}" / "probe.json").write_text(json.dumps(probe))

    first, second = probes_in(copied, "bft-seed0", "bft-seed1")
    change(first, lambda found: found["layers"][1]["quantities"]["gain"].update(rho=None, p=None))
    change(first, lambda found: found["layers"][0]["quantities"]["gain"].update(p=0.05))
    change(second, lambda found: found["layers"][0]["quantities"]["gain"].update(p=0.049))
    change(second, lambda found: found["layers"][1]["quantities"]["gain"]["bins"].__setitem__(2, None))
    change(first, lambda found: found["layers"][0]["saturated"].update(last_token=0.9))
    change(first, lambda found: found["layers"][1]["saturated"].update(last_token=0.5))
    change(second, lambda found: found["layers"][1]["saturated"].update(last_token=0.25))
    section = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False).sections[2]
    parts = [probe["mechanism"] for probe in (first, second)]
    expected = {("before 1", "initial precision"): [one["initial_precision"] for one in parts]}
    sinks = {}
    for number, layer in enumerate(first["mechanism"]["layers"]):
        for name in layer["quantities"]:
            found = [one["layers"][number]["quantities"][name] for one in parts]
            expected[str(layer["layer"]), name.replace("_", " ")] = found
        for head in range(2):
            found = [one["layers"][number]["first_position"][head] for one in parts]
            sinks["bft", str(layer["layer"]), str(found[0]["head"])] = found
    rows = {tuple(row[1:3]): row[3:] for row in section.tables[0].rows}
    assert rows.keys() == expected.keys() and {row[0] for row in section.tables[0].rows} == {"bft"}
    for key, found in expected.items():
        bins = [means([{"": one["bins"][n]} for one in found], "")[0] for n in range(5)]
        assert rows[key][:6] == pytest.approx([*bins, *means(found, "rho")])
        p = [one["p"] for one in found if one["p"] is not None]
        assert rows[key][6] == (f"{sum(each < 0.05 for each in p)} of {len(p)}" if p else None)
    assert rows["1", "gain"][6] == "1 of 2" and rows["2", "gain"][6] == "1 of 1"
    assert rows["1", "jacobian used"][5:] == [None, None], "what does not vary has no correlation"
    (table,) = section.folded
    assert {tuple(row[:3]): row[3:] for row in table.rows} == {
        key: pytest.approx(means(found, "share", "uniform", "gain", "rho", "rho_given_keys"))
        for key, found in sinks.items()
    }
    assert section.words == ["bft: 37.5 % of the precision at users' last tokens lies at its cap of 100."]


def test_the_mask_has_a_column_of_its_own_beside_the_bins_of_items(comparison, monkeypatch):
    probes = {"bft": load_probes(comparison)[0]["bft"]}
    plain = mechanism_section(probes, draw=False).tables[0]
    assert "mask" not in [column.heading for column in plain.columns] and "mask:" not in plain.caption
    for number, probe in enumerate(probes["bft"].values()):
        probe["mechanism"]["bins"].append({"name": "mask", "counts": "none", "num_items": 1, "num_tokens": 150})
        for layer in probe["mechanism"]["layers"]:
            for quantity in layer["quantities"].values():
                quantity["bins"].append(0.5 + number)
    drawn = {}
    monkeypatch.setattr(
        plots, "lines", lambda curves, *given, **more: drawn.setdefault(given[2], (curves, more)) and ""
    )
    table = mechanism_section(probes, draw=True).tables[0]
    assert [column.heading for column in table.columns][7:9] == ["Q4", "mask"]
    assert [row[8] for row in table.rows] == [None, *[1.0] * (len(table.rows) - 1)], "an initial precision is of items"
    assert [[*row[:8], *row[9:]] for row in table.rows] == plain.rows
    assert "; mask: the token that stands for the item asked for" in table.caption and "mask none" not in table.caption
    both = {"sasrec/bft": load_probes(comparison)[0]["bft"], "bert4rec/bft": probes["bft"]}
    mixed = mechanism_section(both, draw=False).tables[0]
    assert [row[1:] for row in mixed.rows if row[0] == "bert4rec/bft"] == [row[1:] for row in table.rows]
    assert {row[8] for row in mixed.rows if row[0] == "sasrec/bft"} == {None}
    for curves, more in drawn.values():
        assert len(more["ticks"]) == 5 and all(places == [0, 1, 2, 3, 4] for places, _ in curves.values())


def test_confidences_and_probabilities_are_shown_as_means_with_intervals_over_the_probed_seeds(report, trained):
    ours, plain = probes_in(trained, "bft-seed0", "bft-seed1"), probes_in(trained, "matched-seed0")
    confidences, calibration = report.sections[3].tables
    rows = {tuple(row[:2]): row[2:] for row in confidences.rows}
    for arm, probes in (("bft", ours), ("matched", plain)):
        for name in probes[0]["uncertainty"]["confidences"]:
            found = [probe["uncertainty"]["confidences"][name] for probe in probes]
            auroc, inside, aurc, excess, above, above_inside = rows.pop((arm, name.replace("_", " ")))
            assert [auroc, aurc, excess] == pytest.approx(means(found, "auroc", "aurc", "excess_aurc"))
            beside = [one["reference_above"] for one in found if "reference_above" in one]
            assert len(beside) == (len(found) if arm == "bft" and name != "precision" else 0)
            assert above == (pytest.approx(means(beside, "auroc")[0]) if beside else None)
            if arm == "matched":
                assert (inside, above_inside) == (tuple(found[0]["auroc_interval"]), None)
            else:
                assert inside == pytest.approx(over_seeds([one["auroc"] for one in found]))
                assert above_inside == (pytest.approx(over_seeds([one["auroc"] for one in beside])) if beside else None)
    assert not rows
    expected = []
    for arm, probes in (("bft", ours), ("matched", plain)):
        for when in ("before", "after"):
            found = [probe["uncertainty"]["calibration"] for probe in probes]
            numbers = [1.0, 0.0] if when == "before" else means(found, "temperature", "lapse")
            nll = means([one["nll"] for one in found], when)
            hits = means([one[when]["hit@10"] for one in found], "ece", "floor", "mean_probability", "hit_rate")
            expected.append([arm, "hit@10", *(pytest.approx(value) for value in (*numbers, *nll, *hits))])
    assert [[row[0], row[4], *row[1:4], *row[5:]] for row in calibration.rows] == expected
    aurocs = [probe["uncertainty"]["confidences"]["precision"]["auroc"] for probe in ours]
    low, high = over_seeds(aurocs)
    said = f"AUROC {np.mean(aurocs):.3f} on average over seeds 0,1, 95 % interval over seeds {low:.3f} to {high:.3f}"
    assert said in report.sections[3].words[0]


def test_curves_of_probes_are_means_by_frequency_and_one_probe_s_risk_and_reliability(comparison, trained, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        plots, "lines", lambda curves, *given, **more: drawn.setdefault(given[2], (curves, more)) and ""
    )
    probes, notes = load_probes(comparison)
    assert notes == [] and {arm: list(each) for arm, each in probes.items()} == {"bft": [0, 1], "matched": [0]}
    mechanism_section(probes, draw=True)
    uncertainty_section(probes, draw=True)
    first, second = probes_in(trained, "bft-seed0", "bft-seed1")
    for quantity in ("gain", "incoming_precision"):
        curves, more = drawn[f"{quantity.replace('_', ' ')} by frequency"]
        assert more["ticks"] == [f"{row['name']}\n{row['counts']}" for row in first["mechanism"]["bins"]]
        for number in range(2):
            found = [each["mechanism"]["layers"][number]["quantities"][quantity]["bins"] for each in (first, second)]
            assert curves.pop(f"bft, layer {number + 1}") == ([0, 1, 2, 3, 4], pytest.approx(np.mean(found, axis=0)))
        assert not curves
    one = first["uncertainty"]
    risk, reliability = drawn["Risk and coverage"][0], drawn["Reliability"][0]
    assert risk["at random"] == ([0, 1], [1 - one["hit_rate"]] * 2)
    assert set(risk) == {"at random", "precision", "negative entropy", "history length"}
    curve = one["confidences"]["precision"]["curve"]
    assert risk["precision"] == (curve["coverage"], curve["risk"])
    for label, when in (("as trained", "before"), ("fitted", "after")):
        bins = one["calibration"][when]["hit@10"]["bins"]
        assert reliability[label] == ([b["probability"] for b in bins], [b["hit_rate"] for b in bins])


def over_seeds(values):
    return stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))


def test_training_is_shown_as_means_over_the_seeds_that_have_a_history(comparison):
    bft = comparison.arms["bft"]
    histories = ([], bft.histories[1], [*bft.histories[2], {"epoch": 3, "seconds": None}])
    changed = replace(comparison, arms={**comparison.arms, "bft": replace(bft, histories=histories)})
    (table,) = training_section(changed, draw=False).tables
    seconds = {name: [sum(row["seconds"] for row in each) for each in arm.histories]
               for name, arm in comparison.arms.items()}  # fmt: skip
    assert {row[0]: row[1:] for row in table.rows} == {
        "bft": [2, 2.5, pytest.approx(np.mean(seconds["bft"][1:]))],
        "matched": [3, 2.0, pytest.approx(np.mean(seconds["matched"]))],
    }
    without = {name: replace(arm, histories=([], [], [])) for name, arm in comparison.arms.items()}
    empty = training_section(replace(comparison, arms=without), draw=True)
    assert (empty.tables, empty.words) == ((), ["No run of this comparison has a history."])


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


def test_an_average_over_seeds_names_those_that_it_is_over(copied):
    def silence(found):
        found["confidences"]["precision"] |= {"auroc": None, "auroc_interval": None}

    third = json.loads((copied / "runs" / "bft-seed1" / "probe.json").read_text())
    del third["protocol"]["weights"]
    (copied / "runs" / "bft-seed2" / "probe.json").write_text(json.dumps(third))
    changed_probe(copied / "runs" / "bft-seed0", silence)
    section = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False).sections[3]
    (words,) = (line for line in section.words if "on average over seeds" in line)
    assert "on average over seeds 1,2, 95 % interval" in words


def test_what_lists_show_is_that_of_the_runs_and_differences_are_paired_by_seed(comparison, trained):
    section = next(one for one in make_report(comparison, draw=False).sections if one.name == "exposure")
    (levels,), (differences,) = section.tables, section.folded
    ran = {arm: [json.loads((trained / "runs" / f"{arm}-seed{seed}" / "metrics.json").read_text())["exposure"]
                 for seed in range(3)] for arm in ("matched", "bft")}  # fmt: skip
    measures = ("coverage@10", "gini@10", "popularity@10")
    words = {"all items": "unfiltered", "seen masked": "filtered"}
    assert [(row[0], row[1]) for row in levels.rows] == [(a, w) for w in words for a in ("matched", "bft")]
    for arm, said, *cells in levels.rows:
        values = [[one[words[said]][name] for one in ran[arm]] for name in measures]
        assert cells == [(pytest.approx(np.mean(each)), pytest.approx(np.std(each, ddof=1))) for each in values]
    assert f"took themselves, {comparison.target_frequency.mean():.4f}" in levels.caption
    assert [(row[0], row[1], row[2]) for row in differences.rows] == [("bft", m, w) for w in words for m in measures]
    for _, name, said, difference, _, _, p, _ in differences.rows:
        plain, ours = ([one[words[said]][name] for one in ran[arm]] for arm in ("matched", "bft"))
        assert difference == pytest.approx(np.mean(ours) - np.mean(plain))
        assert p == pytest.approx(stats.ttest_rel(ours, plain).pvalue) if np.ptp(np.subtract(ours, plain)) else p == 1


def test_one_difference_of_the_lists_in_every_seed_is_said_to_have_the_p_of_the_sign_flips(comparison):
    results = results_of(comparison, over_users=False)
    for more, said in ([0.125, 0.125, 0.125], True), ([0.125, 0.25, 0.125], False), ([0.0, 0.0, 0.0], True):
        for arm, values in (("matched", np.array([0.5, 0.25, 0.75])), ("bft", np.add([0.5, 0.25, 0.75], more))):
            coverage = {"mean": values.mean(), "sd": values.std(ddof=1), "values": values.tolist()}
            results["arms"][arm]["exposure"] = {"unfiltered": {"coverage@10": coverage}}
        (differences,) = exposure_section(comparison, results).folded
        assert ("A difference without an interval is the same in every seed" in differences.caption) == said


def test_lists_of_some_users_are_called_so(comparison, monkeypatch):
    monkeypatch.setattr("recbft.evaluation.exposure.LISTED_USERS", 7)
    monkeypatch.setattr("recbft.evaluation.exposure.LISTED_SCORES", 1)
    section = next(one for one in make_report(comparison, draw=False).sections if one.name == "exposure")
    assert section.words == [f"Lists of 7 of the {comparison.users.size} users, drawn from a fixed seed."]


def test_arms_whose_lists_are_not_known_are_named(with_external, copied):
    section = next(one for one in make_report(with_external, draw=False).sections if one.name == "exposure")
    assert section.words == ["<b>other</b>: no lists are known, of a file of ranks or of runs of an earlier version."]
    assert {row[0] for row in section.tables[0].rows} == {"matched", "bft"}
    for path in copied.glob("runs/*/metrics.json"):
        metrics = json.loads(path.read_text())
        if "matched" in str(path):
            del metrics["exposure"]
        path.write_text(json.dumps(metrics))
    report = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False)
    section = next(one for one in report.sections if one.name == "exposure")
    assert {row[0] for row in section.tables[0].rows} == {"bft"} and not section.folded
    assert section.words[0].startswith("matched: no lists are known")


def test_a_probe_stays_with_a_run_whose_weights_are_gone(copied):
    shutil.rmtree(copied / "runs" / "bft-seed0" / "checkpoint")
    probes, notes = load_probes(comparison_of(sorted((copied / "runs").iterdir())))
    assert list(probes["bft"]) == [0, 1] and notes == []


def test_without_probes_a_line_says_what_makes_them(copied):
    for path in copied.glob("runs/*/probe.json"):
        path.unlink()
    report = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False)
    for section in report.sections[2:4]:
        assert not section.tables and "recbft probe RUN makes this section" in section.words[0]


def test_a_run_whose_machine_is_not_known_any_more_is_named(copied):
    write_comparison(comparison_of(sorted((copied / "runs").iterdir())), copied, made={})
    before = make_report(load_comparison(copied), draw=False).sections[-1].words
    (copied / "runs" / "matched-seed1" / "environment.json").unlink()
    (line,) = set(make_report(load_comparison(copied), draw=False).sections[-1].words) - set(before)
    assert line.startswith("arm matched, seed 1: trained on a machine that is not known")


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
        (lambda probe: probe["uncertainty"]["calibration"].pop("lapse"), "of another version"),
        (lambda probe: probe.pop("mechanism"), "damaged or of another version"),
        # Of a run that was probed, and went on with its training.
        (lambda probe: probe["protocol"].update(weights=64 * "0"), "of other weights than the run has now"),
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


def test_the_protocol_lists_the_settings_in_which_arms_differ_and_no_other(report, comparison):
    (table,) = report.sections[6].tables
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


def test_runs_of_one_data_set_under_several_names_have_a_report(copied):
    file = copied / "runs" / "bft-seed0" / "protocol.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dataset": "the same"}))
    report = make_report(comparison_of(sorted((copied / "runs").iterdir())), draw=False)
    assert report.title.endswith("on data of several names")


def test_an_arm_that_strata_leave_out_is_named(with_external):
    strata = make_report(with_external, draw=False).sections[1]
    assert "<b>other</b> has no unfiltered ranks and is in none of these tables." in strata.words


def test_strata_are_of_the_setting_in_which_the_baseline_can_be_compared(with_external):
    other = "<b>other</b>"
    alone = {name: with_external.arms[name] for name in ("matched", other)}
    for changes in ({"baseline": other}, {"arms": alone}):
        section = strata_section(replace(with_external, **changes), data_root=None, draw=False)
        assert section.words == [] and all("seen masked" in table.caption for table in section.tables)
    both = strata_section(with_external, data_root=None, draw=False)
    assert all("all items" in table.caption and "seen masked" not in table.caption for table in both.tables)


def test_baselines_that_look_alike_in_the_name_of_a_file_have_files_of_their_own(with_external, tmp_path):
    arms = with_external.arms
    alike = {"matched recency": "matched", "matched+recency": "bft", "best": "bft"}
    named = {name: replace(arms[other], name=name) for name, other in alike.items()}
    report = make_report(replace(with_external, arms=named, baseline="matched recency"), draw=False)
    names = [table.name for table in report.tables if "-against-" in table.name]
    both = ["against-matched-recency", "against-matched-recency-2"]
    assert names == [f"{over}-{one}" for over in ("seeds", "users") for one in both]
    written = write_report(report, tmp_path, ("csv",))
    assert len(written) == len({str(path).lower() for path in written}) == len(report.tables)


def test_the_first_metric_is_shown_without_the_grid_and_the_rest_is_folded(report):
    metrics, strata = report.sections[:2]
    assert [table.name for table in metrics.tables] == ["levels", "seeds-against-matched"]
    assert [table.name for table in metrics.folded] == ["users-against-matched"]
    names = ("item-frequency", "user-activity", "first-time", "recency")
    assert [table.name for table in strata.tables] == [f"strata-{name}-ndcg-10" for name in names]
    folded = {f"strata-{name}-hr-10" for name in (*names, "grid")} | {"strata-grid-ndcg-10"}
    assert len(strata.folded) == 6 and {table.name for table in strata.folded} == folded


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
    (levels, _), commands = report.sections[0].tables, report.sections[7].commands
    assert levels.rows[0][2][0] == saved["arms"]["matched"]["metrics"]["unfiltered"]["hr@5"]["mean"]
    assert commands[0] == made["command"] and report.sections[6].items["made.commit"] == "abc"


def test_training_commands_make_the_same_configuration(report, comparison):
    from recbft.training.run_config import load_run_config

    (command,) = [one for one in report.sections[7].commands if "--arm bft" in one]
    settings = re.findall(r"--set (\S+)", command)
    made = load_run_config(
        None, settings, model="sasrec", arm="bft", dataset=comparison.arms["bft"].config["data"]["dataset"]
    )
    from recbft.config.fields import to_dict

    ours = {**to_dict(made), "seed": 0}
    assert ours == {**comparison.arms["bft"].config, "seed": 0} and "SEED 0-2" in command


def test_a_report_does_not_say_where_files_lay_on_the_machine(report, copied):
    assert report.sections[6].items["config.data.dataset"] == "tiny.parquet"
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


def test_a_title_that_would_name_many_arms_counts_them(with_external, monkeypatch):
    others = len(with_external.arms) - 1
    monkeypatch.setattr("recbft.reporting.report.SENTENCES", others)
    assert all(arm in make_report(with_external, draw=False).title for arm in with_external.arms)
    monkeypatch.setattr("recbft.reporting.report.SENTENCES", others - 1)
    title = make_report(with_external, draw=False).title
    assert title.startswith(f"{others} arms against {with_external.baseline}, sasrec, on ")

"""Probes of runs in the report: means over seeds, intervals that say what they are over, nothing that does not fit."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from scipy import stats

from recbft.comparing.comparison import comparison_of
from recbft.reporting import plots
from recbft.reporting.probe_sections import load_probes, mechanism_section, uncertainty_section
from recbft.reporting.probe_tables import BY_LENGTH, mechanism_tables, uncertainty_tables
from tests.reporting.conftest import section_of


def probes_in(folder, *runs):
    return [json.loads((folder / "runs" / run / "probe.json").read_text()) for run in runs]


def changed_probe(folder, run, change):
    """Change the probe of a run and return it."""
    (probe,) = probes_in(folder, run)
    change(probe)
    (folder / "runs" / run / "probe.json").write_text(json.dumps(probe))
    return probe


def sections_of(folder):
    """Both sections of the runs as they are now, and the notes."""
    probes, notes = load_probes(comparison_of(sorted((folder / "runs").iterdir())))
    return mechanism_section(probes, draw=False), uncertainty_section(probes, draw=False), notes


def over_seeds(values):
    return stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))


def means(found, *keys):
    """Over the figures that are known; None where none is."""
    known = [[one[key] for one in found if one[key] is not None] for key in keys]
    return [np.mean(values) if values else None for values in known]


def watched_lines(monkeypatch):
    """What is drawn from now on, by title."""
    drawn = {}
    watch = lambda curves, *given, **more: drawn.setdefault(given[2], (curves, more)) and ""  # noqa: E731
    monkeypatch.setattr(plots, "lines", watch)
    return drawn


def test_what_precision_does_inside_is_shown_as_means_over_the_probed_seeds(copied):
    def first_change(probe):
        layers = probe["mechanism"]["layers"]
        layers[1]["quantities"]["gain"].update(rho=None, p=None)
        layers[0]["quantities"]["gain"].update(p=0.05)
        layers[0]["saturated"].update(last_token=0.9)
        layers[1]["saturated"].update(last_token=0.5)

    def second_change(probe):
        layers = probe["mechanism"]["layers"]
        layers[0]["quantities"]["gain"].update(p=0.049)
        layers[1]["quantities"]["gain"]["bins"][2] = None
        layers[1]["saturated"].update(last_token=0.25)

    probes = (changed_probe(copied, "bft-seed0", first_change), changed_probe(copied, "bft-seed1", second_change))
    section, parts = sections_of(copied)[0], [probe["mechanism"] for probe in probes]
    expected = {("items", "initial precision"): [one["initial_precision"] for one in parts]}
    for number, layer in enumerate(parts[0]["layers"]):
        for name in layer["quantities"]:
            found = [one["layers"][number]["quantities"][name] for one in parts]
            expected[f"layer {layer['layer']}", name.replace("_", " ")] = found
    rows = {tuple(row[1:3]): row[3:] for row in section.tables[0].rows}
    assert rows.keys() == expected.keys() and {row[0] for row in section.tables[0].rows} == {"bft"}
    for key, found in expected.items():
        bins = [means([{"": one["bins"][n]} for one in found], "")[0] for n in range(5)]
        assert rows[key][:6] == pytest.approx([*bins, *means(found, "rho")])
        p = [one["p"] for one in found if one["p"] is not None]
        assert rows[key][6] == (f"{sum(each < 0.05 for each in p)} of {len(p)}" if p else None)
    assert rows["layer 1", "gain"][6] == "1 of 2" and rows["layer 2", "gain"][6] == "1 of 1"
    assert rows["layer 1", "jacobian used"][5:] == [None, None], "what does not vary has no correlation"
    assert section.words[1] == "bft: 37.5 % of the precision at users' last tokens lies at its cap of 100."
    layers, _, sinks = section.folded
    assert [row[:2] for row in layers.rows] == [["bft", "layer 1"], ["bft", "layer 2"]]
    assert layers.rows[1][5] == pytest.approx(0.375)
    for number, head in np.ndindex(2, 2):
        found = [one["layers"][number]["first_position"][head] for one in parts]
        row = sinks.rows[2 * number + head]
        assert row[:3] == ["bft", str(number + 1), str(found[0]["head"])]
        assert row[3:] == pytest.approx(means(found, "share", "uniform", "gain", "rho", "rho_given_keys"))


def test_one_probe_is_shown_with_its_own_p_and_without_a_column_of_arms(trained):
    (probe,) = probes_in(trained, "bft-seed0")
    quantities, layers, lengths, sinks = mechanism_tables({"": {0: probe["mechanism"]}})
    first = probe["mechanism"]["layers"][0]
    assert [column.heading for column in quantities.columns][:2] == ["layer", "quantity"]
    gain = next(row for row in quantities.rows if row[:2] == ["layer 1", "gain"])
    assert gain[2:] == [
        *first["quantities"]["gain"]["bins"],
        *(first["quantities"]["gain"][key] for key in ("rho", "p")),
    ]
    assert layers.rows[0][5:7] == [first["process_noise"]["mean"], first["process_noise"]["max"]]
    alone = first["by_length"][0]
    assert lengths.rows[0] == ["1", "1", alone["num_tokens"], *(alone[name] for name in BY_LENGTH)]
    keys = ("share", "uniform", "gain", "rho", "p", "rho_given_keys", "p_given_keys")
    assert sinks.rows[0] == ["1", "1", *(first["first_position"][0][key] for key in keys)]
    confidences, probabilities = uncertainty_tables({"": {0: probe["uncertainty"]}})
    one = probe["uncertainty"]["confidences"]["precision"]
    assert confidences.rows[0][:3] == ["precision", one["auroc"], tuple(one["auroc_interval"])]
    assert [row[:2] for row in probabilities.rows] == [
        [way, name] for way in ("as trained", "fitted") for name in ("hit@1", "hit@10")
    ]
    assert not any("probed seeds" in table.caption for table in (quantities, layers, sinks, confidences, probabilities))


def test_the_mask_has_a_column_of_its_own_beside_the_bins_of_items(comparison, monkeypatch):
    probes = {"bft": load_probes(comparison)[0]["bft"]}
    plain = mechanism_section(probes, draw=False).tables[0]
    assert "mask" not in [column.heading for column in plain.columns] and "mask:" not in plain.caption
    for number, probe in enumerate(probes["bft"].values()):
        probe["mechanism"]["bins"].append({"name": "mask", "counts": "none", "num_items": 1, "num_tokens": 150})
        for layer in probe["mechanism"]["layers"]:
            for quantity in layer["quantities"].values():
                quantity["bins"].append(0.5 + number)
    drawn = watched_lines(monkeypatch)
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
    section = section_of(report, "uncertainty")
    confidences, calibration = section.tables
    rows = {tuple(row[:2]): row[2:] for row in confidences.rows}
    for arm, probes in (("bft", ours), ("matched", plain)):
        for name in probes[0]["uncertainty"]["confidences"]:
            found = [probe["uncertainty"]["confidences"][name] for probe in probes]
            auroc, inside, aurc, excess, values, above, above_inside, risk, risk_inside = rows.pop(
                (arm, name.replace("_", " "))
            )
            *told, distinct = means(found, "auroc", "aurc", "excess_aurc", "num_distinct")
            assert [auroc, aurc, excess] == pytest.approx(told) and values == round(distinct)
            beside = [one["reference_above"] for one in found if "reference_above" in one]
            assert len(beside) == (len(found) if arm == "bft" and name != "precision" else 0)
            assert above == (pytest.approx(means(beside, "auroc")[0]) if beside else None)
            assert risk == (pytest.approx(means(beside, "aurc")[0]) if beside else None)
            assert (risk_inside is None) == (not beside)
            if arm == "matched":
                assert (inside, above_inside) == (tuple(found[0]["auroc_interval"]), None)
            else:
                assert inside == pytest.approx(over_seeds([one["auroc"] for one in found]))
                assert above_inside == (pytest.approx(over_seeds([one["auroc"] for one in beside])) if beside else None)
    assert not rows
    ways = {"before": "as trained", "after": "fitted"}
    expected = []
    for arm, probes in (("bft", ours), ("matched", plain)):
        found = [probe["uncertainty"]["calibration"] for probe in probes]
        for when, way in ways.items():
            numbers = [1.0, 0.0] if when == "before" else means(found, "temperature", "lapse")
            for name in ("hit@1", "hit@10"):
                hits = means([one[when][name] for one in found], "mean_probability", "hit_rate", "ece", "floor")
                numbers_of_row = [*hits, *means([one["nll"] for one in found], when), *numbers]
                expected.append([arm, way, name, *(pytest.approx(value) for value in numbers_of_row)])
    assert [[*row[:6], row[7], row[8], *row[10:]] for row in calibration.rows] == expected
    assert calibration.rows[-1][6] == tuple(plain[0]["uncertainty"]["calibration"]["after"]["hit@10"]["interval"])
    aurocs = [probe["uncertainty"]["confidences"]["precision"]["auroc"] for probe in ours]
    low, high = over_seeds(aurocs)
    said = f"AUROC {np.mean(aurocs):.3f} on average over seeds 0,1, 95 % interval over seeds {low:.3f} to {high:.3f}"
    assert said in section.words[1] and section.words[2].startswith("Posterior precision of bft, seed")


def test_how_far_events_have_moved_items_from_their_content_is_drawn_where_items_have_some(copied, monkeypatch):
    belief = {"kappa": 2.0, "bins": [0.9, 0.7, 0.5, None, 0.1], "weights": [4.0, 3.0, 2.0, None, 1.0]}
    probe = changed_probe(copied, "bft-seed0", lambda probe: probe["mechanism"].update(item_belief=belief))
    drawn = watched_lines(monkeypatch)
    section = mechanism_section({"bft": {0: probe}}, draw=True)
    assert drawn["item belief by frequency"][0] == {"bft": ([0, 1, 2, 4], [0.9, 0.7, 0.5, 0.1])}
    assert section.plots[-1].name == "mechanism-item-belief"
    rows = {row[2]: list(row[3:8]) for row in section.tables[0].rows if row[1] == "items"}
    assert rows["share of content"] == belief["bins"] and rows["weight of alike content"] == belief["weights"]
    assert "Weight of alike content" in section.tables[0].caption


def test_curves_of_probes_are_means_by_frequency_and_one_probe_s_risk_and_reliability(comparison, trained, monkeypatch):
    drawn = watched_lines(monkeypatch)
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
    found = [each["mechanism"]["initial_precision"]["bins"] for each in (first, second)]
    curves, _ = drawn["initial precision by frequency"]
    assert curves == {"bft": ([0, 1, 2, 3, 4], pytest.approx(np.mean(found, axis=0)))}
    assert "item belief by frequency" not in drawn
    one = first["uncertainty"]
    risk, reliability = drawn["Risk and coverage"][0], drawn["Reliability"][0]
    assert risk["at random"] == ([0, 1], [1 - one["hit_rate"]] * 2)
    assert set(risk) == {"at random", "precision", "negative entropy", "history length"}
    curve = one["confidences"]["precision"]["curve"]
    assert risk["precision"] == (curve["coverage"], curve["risk"])
    for label, when in (("as trained", "before"), ("fitted", "after")):
        bins = one["calibration"][when]["hit@10"]["bins"]
        assert reliability[label] == ([b["probability"] for b in bins], [b["hit_rate"] for b in bins])


def test_intervals_say_what_they_are_over_and_an_average_names_its_seeds(copied):
    def silence(probe):
        for one in probe["uncertainty"]["confidences"].values():
            one |= {"auroc": None, "auroc_interval": None}

    said = "t over seeds where several are probed, bootstrap over users where one is"
    assert said in sections_of(copied)[1].tables[0].caption
    (copied / "runs" / "matched-seed0" / "probe.json").unlink()
    assert "intervals: t over seeds." in sections_of(copied)[1].tables[0].caption
    changed_probe(copied, "bft-seed0", silence)
    (other,) = probes_in(copied, "bft-seed1")
    own = {row[1]: row[3] for row in sections_of(copied)[1].tables[0].rows}
    assert own["history length"] == tuple(other["uncertainty"]["confidences"]["history_length"]["auroc_interval"])
    del other["protocol"]["weights"]
    (copied / "runs" / "bft-seed2" / "probe.json").write_text(json.dumps(other))
    (words,) = (line for line in sections_of(copied)[1].words if "on average over seeds" in line)
    assert "on average over seeds 1,2, 95 % interval" in words
    for seed in (0, 2):
        (copied / "runs" / f"bft-seed{seed}" / "probe.json").unlink()
    assert "intervals: bootstrap over users." in sections_of(copied)[1].tables[0].caption


def test_without_probes_a_line_says_what_makes_them(copied):
    for path in copied.glob("runs/bft-*/probe.json"):
        path.unlink()
    assert sections_of(copied)[0].words == ["No probed arm tracks precision, so there is nothing to show."]
    (copied / "runs" / "matched-seed0" / "probe.json").unlink()
    for section in sections_of(copied)[:2]:
        assert not section.tables and "recbft probe RUN makes this section" in section.words[0]


def test_a_probe_stays_with_a_run_whose_weights_are_gone(copied):
    shutil.rmtree(copied / "runs" / "bft-seed0" / "checkpoint")
    probes, notes = load_probes(comparison_of(sorted((copied / "runs").iterdir())))
    assert list(probes["bft"]) == [0, 1] and notes == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda probe: probe["protocol"].update(part="validation"), "of the validation, not the test"),
        (lambda probe: probe["protocol"].update(content_hash="0"), "of other data"),
        (lambda probe: probe["uncertainty"].update(num_users=30), "of 30 of the 60 users"),
        (lambda probe: probe["protocol"].update(recbft_version="0.0"), "of another version"),
        (lambda probe: probe.pop("mechanism"), "damaged or of another version"),
        # Of a run that was probed, and went on with its training.
        (lambda probe: probe["protocol"].update(weights=64 * "0"), "of other weights than the run has now"),
    ],
)
def test_a_probe_of_something_else_is_left_out_and_named(copied, change, reason):
    changed_probe(copied, "bft-seed0", change)
    mechanism, _, (note,) = sections_of(copied)
    assert note.startswith(f"bft-seed0/probe.json is {reason}, and left")
    assert re.search(r"\(bft 1\)", mechanism.tables[0].caption)

"""The tables, words and curves of new items."""

from __future__ import annotations

import numpy as np
import pytest

from recbft.evaluation.new_items import new_items
from recbft.models import Popularity
from recbft.reporting import plots
from recbft.reporting.new_items_tables import new_items_lines, new_items_tables, new_items_words, sweep_curves
from recbft.reporting.probe_sections import new_items_section
from tests.evaluation.test_evaluate import SumModel
from tests.evaluation.test_new_items import log


@pytest.fixture(scope="module")
def found():
    dataset = log(0)
    return {seed: new_items(SumModel(dataset.num_items, seed=seed), dataset) for seed in (0, 1)}


def column(table, heading):
    return [row[[c.heading for c in table.columns].index(heading)] for row in table.rows]


def test_each_number_stands_beside_what_a_constant_does_and_its_protocol(found):
    cost, among, sweep = new_items_tables({"": {0: found[0]}})
    one = found[0]
    assert column(cost, "targets") == ["all", "all", "known", "known", "new", "new"]
    assert column(cost, "as it is")[2] == one["as_is"]["known"]["hr@10"]
    assert column(cost, "difference")[2] == pytest.approx(one["known_loss"]["hr@10"]["difference"])
    assert column(cost, "p")[2] == one["known_loss"]["hr@10"]["p_sign_flip"] and column(cost, "p")[4] is None
    assert f"{one['targets']['new']} of them of new items, among " in cost.caption and "ties against" in cost.caption
    assert column(among, "AUC") == [one["among_new"]["auc"]]
    assert column(sweep, "known") == [step["known"]["hr@10"] for step in one["sweep"]]
    assert "swept on these very targets" in sweep.caption
    lines = new_items_lines(one)
    assert lines[0].startswith("NEW ITEMS: ") and new_items_lines(None) == []


def test_of_several_seeds_figures_are_means_and_intervals_are_over_seeds(found):
    parts = {"matched": {0: found[0], 1: found[1]}}
    cost, among, _ = new_items_tables(parts)
    assert column(cost, "arm")[0] == "matched" and column(cost, "p")[0] is None
    assert column(among, "AUC") == [np.mean([one["among_new"]["auc"] for one in found.values()])]
    assert "t over seeds" in among.caption


def test_the_words_say_what_a_constant_gives_at_no_more_cost(found):
    (line,) = new_items_words({"matched": {0: found[0]}})
    one = found[0]
    known, new = (one["as_is"][of]["hr@10"] for of in ("known", "new"))
    as_good = [step["new"]["hr@10"] for step in one["sweep"] if step["known"]["hr@10"] >= known]
    assert line.startswith(f"matched: HR@10 of new targets {new:.4f} at {known:.4f} of known ones; ")
    assert line.endswith(f"gives {max(as_good):.4f}." if as_good else "leaves known targets as much.")


def test_the_report_draws_the_sweep_and_leaves_out_what_is_not_there(found, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "lines", lambda curves, *labels, **more: drawn.update(curves) or "<svg/>")
    enough = {**found[0], "users": {**found[0]["users"], "new": 30}}
    probes = {"matched": {0: {"new_items": enough}}, "bft": {0: {"new_items": None}, 1: {}}}
    section = new_items_section(probes, draw=True)
    assert section is not None and [table.name for table in section.tables] == ["new-items", "among-new-items"]
    assert section.folded[0].name == "new-items-sweep" and len(section.plots) == 1
    assert set(drawn) == {"matched, constant", "matched, as it is"} == set(sweep_curves({"matched": {0: found[0]}}))
    few = {**found[0], "users": {**found[0]["users"], "new": 29}}
    assert new_items_section({"bft": {0: {}, 1: {"new_items": few}}}, draw=True) is None
    assert (
        new_items_lines(few)[1] == "29 users have these targets, too few to say anything of others; 30 are the fewest"
    )


def test_a_model_without_a_known_target_or_with_one_user_still_has_its_tables():
    dataset = log(0)
    model = Popularity(dataset.training_counts)
    rows = np.flatnonzero(dataset.training_counts[dataset.split.test.target] == 0)[:1]
    alone = new_items(model, dataset, users=rows)
    assert alone["as_is"]["known"] is None and alone["known_loss"] is None
    cost, *_ = new_items_tables({"": {0: alone}})
    assert column(cost, "as it is")[2] is None and new_items_words({"": {0: alone}}) == []
    assert sweep_curves({"": {0: alone}}) == {", constant": ([], [])}

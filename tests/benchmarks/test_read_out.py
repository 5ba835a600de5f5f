"""Arms with and without a read-out: a line per run, once, with the figures of the probe, and paired differences."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks.study import grid, ledger, read_out
from recbft.evaluation.paired import compare_seeds
from recbft.evaluation.uncertainty import uncertainty
from recbft.training.bundle import load_trained
from recbft.training.run_config import load_run_config

ARMS = "matched,bft,bft[core.read_out=temperature]"


def test_a_run_has_one_line_with_the_figures_of_its_probe_and_the_call_goes_on(
    train_arms, tmp_path, capsys, monkeypatch
):
    made = train_arms(ARMS)
    asked = []
    monkeypatch.setattr(grid, "compare", lambda *given, **named: asked.append((given, named)))
    made.rename(tmp_path / "sasrec-tiny")
    given = ["--out", str(tmp_path), "--file", str(tmp_path / "found.csv"), "--datasets", "tiny", "--set", "epochs=2"]
    assert read_out.main(given) == 0
    (_, named), written = asked[0], (tmp_path / "found.csv").read_bytes()
    assert named["out"] == tmp_path / "sasrec-tiny" and named["epochs"] == 2
    monkeypatch.setattr(read_out, "uncertainty", lambda *_, **__: pytest.fail("measured again"))
    assert read_out.main(given) == 0 and (tmp_path / "found.csv").read_bytes() == written
    said = capsys.readouterr().out
    assert said.count("| sasrec | tiny |") == 2 * 3 and "`bft[core.read_out=temperature]`" in said

    lines = ledger.read(tmp_path / "found.csv", read_out.COLUMNS)
    assert len(lines) == 6 and lines[lines["arm"] == "matched"]["test aurc precision"].isna().all()
    (line,) = lines[(lines["settings"].str.contains("read_out")) & (lines["seed"] == 1)].to_dict("records")
    path = next((tmp_path / "sasrec-tiny" / "runs").glob("bft?core*-seed1"))
    *_, model = load_trained(path)
    dataset = load_run_config(path / "config.yaml").data.load()
    for part in ("validation", "test"):
        probe = uncertainty(model, dataset, part, samples=1)
        assert line[f"{part} hr@10"] == pytest.approx(probe["hit_rate"])
        assert line[f"{part} nll fitted"] == pytest.approx(probe["calibration"]["nll"]["after"])
        assert line[f"{part} ece@10"] == pytest.approx(probe["calibration"]["before"]["hit@10"]["ece"])
        assert line[f"{part} aurc entropy"] == pytest.approx(probe["confidences"]["negative_entropy"]["aurc"])
    assert line["learned"] == pytest.approx(model.precision_read_out.learned, abs=1e-8)


def test_differences_are_from_the_same_arm_without_a_read_out():
    rng, rows = np.random.default_rng(0), []
    for settings in ("{}", '{"core.read_out": "shrinkage"}', '{"core.prior_variance": "running"}'):
        for seed in range(4):
            row = dict.fromkeys(read_out.COLUMNS, "x") | {"dataset": "d", "model": "m", "arm": "bft", "seed": seed}
            figures = {name: rng.random() for name in read_out.COLUMNS if name.split(" ")[-1] not in ("x", "commit")}
            rows.append(
                figures | row | {name: rng.random() for name in read_out.COLUMNS[-17:]} | {"settings": settings}
            )
            rows[-1]["ndcg@10 all items"] = rng.random()
    lines = pd.DataFrame(rows, columns=read_out.COLUMNS)
    made = read_out.table(lines).splitlines()
    own, base = (lines[lines["settings"] == settings] for settings in ('{"core.read_out": "shrinkage"}', "{}"))
    d = compare_seeds(base["test nll"].tolist(), own["test nll"].tolist())
    (row,) = [line for line in made if "read_out" in line]
    assert f"| {d.mean_other:.4f} ({100 * d.relative:+.1f} %, p {d.p_t:.3f}) |" in row
    assert all("%" not in line for line in made if "read_out" not in line)
    gap = compare_seeds(own["test aurc entropy"].tolist(), own["test aurc precision"].tolist())
    assert f"| {gap.difference:+.4f} (p {gap.p_t:.3f}) |" in row

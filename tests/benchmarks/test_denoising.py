"""The denoising command: what it measures, and that it repeats itself."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks.mechanisms import denoising
from recbft.mixers import SoftmaxAttention


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr(denoising, "EPOCHS", 4)
    monkeypatch.setattr(denoising, "CHECKED_EVERY", 4)


def patterns(seed=0):
    return F.normalize(torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_a_query_reads_the_patterns_alone_with_logits_of_twice_the_product():
    model = denoising.Denoiser(denoising.CASES[0], patterns())
    with torch.no_grad():
        attend = model.first
        assert isinstance(attend, SoftmaxAttention)
        sharp = 2 * (attend.query.weight / 16).T @ attend.key.weight  # what was drawn, without the sharpening
        queries, which = denoising.draw(patterns(), 32, torch.Generator().manual_seed(1))
        output, weights = model(queries)
        expected = torch.softmax(queries @ sharp @ patterns().T, dim=-1)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(output, expected @ attend.value(patterns()), rtol=1e-4, atol=1e-6)
    assert which.shape == (32,)


def test_an_output_at_its_own_pattern_is_right_and_the_bound_is_the_paper_s():
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(16)
    assert denoising.accuracy(patterns(), patterns(), which) == 100
    assert denoising.accuracy(patterns().roll(1, 0), patterns(), which) == 0
    assert denoising.bound(patterns(), generator) == pytest.approx(58.4, abs=2)


def test_the_command_prints_the_published_figures_beside_ours_and_repeats_itself(brief, tmp_path, capsys):
    tables = []
    for name in ("one.json", "two.json"):
        assert denoising.main(["--seeds", "0", "--json", str(tmp_path / name)]) == 0
        tables.append(json.loads((tmp_path / name).read_text()))
    text = capsys.readouterr().out
    assert "rounds 2" in text and "53.3" in text and "bound" in text
    assert tables[0]["accuracy"] == tables[1]["accuracy"] and tables[0]["published"]["rounds 1"] == 41.3
    assert set(tables[0]["accuracy"]) == {case.label for case in denoising.CASES if case.brief}


@pytest.mark.slow
def test_a_second_round_brings_what_the_paper_says():
    one, two = (denoising.train(case, patterns(), 0) for case in denoising.CASES[:2])
    assert two > one + 3 and two > 50

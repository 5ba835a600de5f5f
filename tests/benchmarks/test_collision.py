from __future__ import annotations

import json

import pytest
import torch

from benchmarks.mechanisms import collision
from benchmarks.mechanisms.published import Figure, figure_table
from benchmarks.mechanisms.recall import MEMORIES, Collisions, Training, train_and_test


def test_published_numbers_of_the_deterministic_experiment_are_ours(tmp_path, capsys):
    file = tmp_path / "collision.json"
    assert collision.main(["--json", str(file)]) == 0
    assert "33 of 34 published figures agree to the digits given; 1 corrected, 0 differ" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert len(written["figures"]) == 34 and all(one["agrees"] for one in written["figures"])


def test_a_number_that_differs_ends_the_command_with_1(monkeypatch, capsys):
    monkeypatch.setattr(collision, "NOISE", 0.06)
    assert collision.main([]) == 1
    assert "differs" in capsys.readouterr().out


def test_a_corrected_figure_must_be_the_corrected_one():
    assert Figure("", ".34", 0.334966, "0.33497").agrees
    assert not Figure("", ".34", 0.34, "0.33497").agrees
    assert "its specification gives 0.33497" in figure_table([Figure("", ".34", 0.334966, "0.33497")])


def test_sequences_ask_for_targets_among_colliding_writes():
    sequences = Collisions(3, 0.6, 0.8).draw(5, torch.Generator().manual_seed(0))
    T = 8 * (2 + 4 + 3 + 1)
    assert sequences.tokens.shape == (5, T, 33) and sequences.address.shape == (5, T, 16)
    torch.testing.assert_close(sequences.address.norm(dim=-1), torch.ones(5, T))
    assert (sequences.tokens[:, :-8, 0] == 1).all() and not sequences.tokens[:, -8:, 0].any()
    written, asked = sequences.address[:, :16], sequences.address[:, -8:]
    label = sequences.tokens[:, :16, 17:].argmax(-1)
    overlap = asked @ written.mT  # (5, 8, 16)
    assert torch.equal(label.gather(1, overlap.argmax(-1)), sequences.answer)
    rivals = overlap.masked_fill(overlap > 0.99, 0)
    assert torch.equal(label.gather(1, rivals.argmax(-1)), sequences.rival)
    assert ((rivals.amax(-1) > 0.59) & (rivals.amax(-1) < 0.81)).all()


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_trains(memory):
    tests = {"short": Collisions(1, 0.7, 0.7)}
    margin, accuracy = train_and_test(memory, 0, Training(3, 4, 1e-3), tests)["short"]
    assert -1 <= margin <= 1 and 0 <= accuracy <= 1


@pytest.mark.slow
def test_the_bayesian_layer_learns_to_hold_what_a_flood_takes_from_a_linear_one():
    tests = {"flood": Collisions(32, 0.8, 0.8)}
    held, lost = (
        train_and_test(memory, 0, Training(60, 16, 3e-3), tests)["flood"][0]
        for memory in ("bayesian", "linear_attention")
    )
    assert held > 0.9 and lost < 0.5

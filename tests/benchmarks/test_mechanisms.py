"""Benchmarks of single mechanisms: what their sequences hold, what they measure, and a few steps of each.

What takes minutes of training is a verdict that the commands print.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.mechanisms import collision, denoising, extrapolation, mqar, random_keys, reweighting, time_noise
from benchmarks.mechanisms.collision import Figure, figure_table
from benchmarks.mechanisms.mqar import SIZES, Shape, draw
from benchmarks.mechanisms.recall import MEMORIES, Collisions, Training, train_and_test
from recbft.datasets import SyntheticConfig, synthetic_dataset
from recbft.errors import UserError
from recbft.mixers import SoftmaxAttention
from recbft.training.run_config import load_run_config

# Two addresses that collide


def test_published_numbers_of_the_deterministic_experiment_are_ours(tmp_path, capsys, monkeypatch):
    file = tmp_path / "collision.json"
    assert collision.main(["--json", str(file)]) == 0
    assert "53 of 54 published figures agree to the digits given; 1 corrected, 0 differ" in capsys.readouterr().out
    assert all(one["agrees"] for one in json.loads(file.read_text())["figures"])
    monkeypatch.setattr(collision, "NOISE", 0.06)
    assert collision.main([]) == 1 and "differs" in capsys.readouterr().out


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.92, 0.98])
def test_writes_written_out_are_the_filters_and_turn_as_the_closed_form_says(overlap):
    found, trace = collision.written_out(overlap), collision.write(overlap, 1)
    torch.testing.assert_close(found.gain, trace.gain[0, 0])
    torch.testing.assert_close(found.margin, collision.margin_by_step(trace))
    reset = collision.written_out(overlap, "reset")
    torch.testing.assert_close(reset.margin, collision.margin_by_step(collision.write(overlap, 1, fixed=0.05)))
    assert reset.angle.max() < 1e-5
    before = collision.write(overlap, 1, order=collision.schedule(flood=0)).covariance[0, 0] + 0.05 * torch.eye(16)
    k_A, k_B, *_ = collision.addresses(overlap)
    across = (k_A - overlap * k_B) / (1 - overlap**2) ** 0.5
    along, across = (0.05 + (5 * 0.05**2) ** 0.5) / 2, (across @ before @ across).item()
    cosine = overlap**2 * along + (1 - overlap**2) * across
    cosine /= (overlap**2 * along**2 + (1 - overlap**2) * across**2) ** 0.5  # (44) of the paper
    assert math.cos(math.radians(found.angle[collision.BOOSTED])) == pytest.approx(cosine, abs=1e-9)
    assert collision.next_angle(overlap, 40) == pytest.approx(found.angle[collision.BOOSTED].item(), abs=1e-5)


def test_a_diagonal_covariance_cannot_turn_a_write_to_an_axis_and_is_exact_for_keys_on_axes():
    diagonal, full = (collision.written_out(0.0, kind) for kind in ("diagonal", "full"))
    torch.testing.assert_close(torch.stack(diagonal), torch.stack(full))
    rows = {row["covariance"]: row for row in collision.ablation()}
    assert rows["diagonal"]["angle"] == 0 < rows["diagonal, k_B = e1"]["angle"]
    for overlap in ("0.92", "0.98"):
        margins = [rows[kind]["margins"][overlap] for kind in ("full", "diagonal, k_B = e1", "diagonal", "reset")]
        assert margins == sorted(margins, reverse=True)


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
    margin, accuracy = train_and_test(memory, 0, Training(2, 4, 1e-3), {"short": Collisions(1, 0.7, 0.7)})["short"]
    assert -1 <= margin <= 1 and 0 <= accuracy <= 1


def test_verdicts_say_who_holds_most_and_what_is_learned():
    rows = [
        {"memory": memory, "seed": seed, "test": test, "margin": (memory == "bayesian") - seed / 9}
        for memory in MEMORIES
        for seed in (0, 1)
        for test in ("flood 8", "flood 16")
    ]
    assert collision.verdict(rows).startswith("verdict: as published")
    rows[0]["margin"] = 9.0
    assert collision.verdict(rows) == "verdict: NOT as published, another memory holds more at flood 8"
    shares = [{"task": "base", "mixer": "bayesian", "seed": s, "accuracy": a} for s, a in ((0, 0.2), (0, 0.9), (1, 1))]
    assert mqar.verdict(shares, "base") == "verdict, base: the Bayesian layer answers 95.0%, learned (more than 80%)"
    assert "20.0%, NOT learned" in mqar.verdict(shares[:1], "base")


# Many keys


def answers_by_reading(tokens, shape):
    """Questions and their answers in one sequence, read token by token."""
    writes = shape.keys + shape.updates
    context, rest = tokens[: 2 * writes], tokens[2 * writes :]
    memory = {}
    for start in range(0, len(context), 2 * shape.block):
        block = context[start : start + 2 * shape.block]
        memory |= dict(zip(block[: shape.block], block[shape.block :], strict=True))
    return [memory[token] if token else 0 for token in rest]


@pytest.mark.parametrize("shape", [Shape(64, 8, updates=8), Shape(64, 6, block=2)])
def test_the_answer_to_a_key_is_the_newest_value_written_to_it(shape):
    assert shape.fits
    tokens, answers = draw(shape, 40, 20, torch.Generator().manual_seed(0))
    context = 2 * (shape.keys + shape.updates)
    assert tokens.shape == answers.shape == (20, shape.length)
    assert not answers[:, :context].any() and (tokens[:, :context] > 0).all() and tokens.max() <= 40
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        assert answers_by_reading(row, shape) == answer[context:]
        asked = [token for token in row[context:] if token]
        assert len(set(asked)) == len(asked) == shape.keys


def test_sizes_hold_the_shapes_of_the_paper_that_fit():
    full = SIZES["full"].shapes
    assert {(one.length, one.keys) for one in full["base"]} == {(64, 4), (64, 16), (128, 4), (128, 16)}
    assert {one.updates for one in full["update"] if one.keys == 16} == {2, 4, 8, 16}
    assert {one.keys for one in full["block"]} == {2, 4, 6, 8} and all(one.block == 2 for one in full["block"])
    assert all(one.fits for size in SIZES.values() for shapes in size.shapes.values() for one in shapes)


@pytest.mark.parametrize("mixer", ["attention", "bayesian", "gated_deltanet", "mamba2"])
def test_every_mixer_trains_on_recall(mixer):
    size = replace(SIZES["small"], steps={"update": 2}, batch_size=4, test_sequences=4, warmup=1)
    assert 0 <= mqar.train_and_test(mixer, "update", size, 0, 1e-3, torch.device("cpu")) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mixers", "attention,bayesain"], "unknown mixer 'bayesain'; did you mean 'bayesian'"),
        (["--tasks", "blok"], "unknown task 'blok'; did you mean 'block'"),
        (["--learning-rates", "fast"], "--learning-rates has 'fast'; give numbers, such as 3e-3,1e-2"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_training(arguments, message):
    with pytest.raises(UserError, match=message):
        mqar.main(arguments)


def test_mqar_prints_a_table_and_a_verdict(capsys, monkeypatch):
    monkeypatch.setitem(mqar.SIZES, "small", replace(SIZES["small"], test_sequences=4))
    few = ["--tasks", "base", "--mixers", "bayesian", "--steps", "1", "--batch-size", "2", "--learning-rates", "1e-3"]
    assert mqar.main(few) == 0
    printed = capsys.readouterr().out
    assert "right answers at the best of learning rates 0.001, steps 1 (base), 2 sequences each, seeds 0" in printed
    assert "verdict, base: the Bayesian layer answers" in printed


def test_random_keys_are_asked_for_by_what_was_written():
    task = random_keys.RandomKeys(20, random_keys.projection(0))
    sequences = task.draw(6, torch.Generator().manual_seed(0))
    assert sequences.tokens.shape == (6, 28, 129) and sequences.address.shape == (6, 28, 16)
    torch.testing.assert_close(sequences.address.norm(dim=-1), torch.ones(6, 28))
    written, asked = sequences.address[:, :20], sequences.address[:, 20:]
    label = sequences.tokens[:, :20, 65:].argmax(-1)
    assert torch.equal(label.gather(1, (asked @ written.mT).argmax(-1)), sequences.answer)
    assert not sequences.tokens[:, 20:, 65:].any()
    rows = random_keys.projection(3)
    torch.testing.assert_close(rows @ rows.T, torch.eye(16), rtol=1e-5, atol=1e-6)


def test_memories_train_on_random_keys(monkeypatch):
    monkeypatch.setattr(random_keys, "TEST_SEQUENCES", 4)
    found = random_keys.train_and_test("bayesian", 0, Training(1, 4, 1e-3), [16])
    assert set(found) == {16} and all(loss > 0 and 0 <= share <= 1 for loss, share in found.values())


# Denoising


def patterns():
    return F.normalize(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), dim=-1)


def test_a_query_reads_the_patterns_alone_with_logits_of_twice_the_product():
    model = denoising.Denoiser(denoising.CASES[0], patterns())
    with torch.no_grad():
        attend = model.first
        assert isinstance(attend, SoftmaxAttention)
        sharp = 2 * (attend.query.weight / 16).T @ attend.key.weight  # what was drawn, without the sharpening
        queries, which = denoising.draw(patterns(), 0.5, 32, torch.Generator().manual_seed(1))
        output, weights = model(queries)
        expected = torch.softmax(queries @ sharp @ patterns().T, dim=-1)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(output, expected @ attend.value(patterns()), rtol=1e-4, atol=1e-6)
    assert which.shape == (32,)


def test_an_output_at_its_own_pattern_is_right_and_the_bound_is_the_papers():
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(16)
    assert denoising.accuracy(patterns(), patterns(), which) == 100
    assert denoising.accuracy(patterns().roll(1, 0), patterns(), which) == 0
    assert denoising.bound(patterns(), 0.5, generator) == pytest.approx(58.4, abs=2)


@pytest.mark.parametrize("seed", range(3))
def test_an_equilibrium_is_a_fixed_point_with_the_gradient_of_repeating_for_ever(seed, monkeypatch):
    monkeypatch.setattr(denoising, "TOLERANCE", 1e-13)
    g = torch.Generator().manual_seed(seed)
    keys, target = (torch.randn(n, 6, generator=g, dtype=torch.float64) for n in (4, 5))
    values = torch.randn(4, 6, generator=g, dtype=torch.float64, requires_grad=True)

    def f(z):
        return torch.softmax(0.3 * z @ keys.T, dim=-1) @ values

    found, unrolled = denoising.equilibrium(f, target), target
    for _ in range(60):
        unrolled = f(unrolled)
    torch.testing.assert_close(found, unrolled)
    of_found, of_unrolled = (torch.autograd.grad((z * target).sum(), values)[0] for z in (found, unrolled))
    torch.testing.assert_close(of_found, of_unrolled)


@pytest.mark.parametrize("case", denoising.equilibrium_cases(0.0, 0.0)[1:], ids=lambda case: case.label)
def test_small_random_maps_forget_the_query_and_hopfields_keep_it(case):
    torch.manual_seed(0)
    with torch.no_grad():
        model = denoising.Denoiser(case, patterns())
        queries, which = denoising.draw(patterns(), 0.3, 64, torch.Generator().manual_seed(1))
        output, _ = model(queries)
    if case.hopfield:
        assert denoising.accuracy(output, patterns(), which) > 80  # of 91, the bound
        expected = torch.softmax(16 * output @ patterns().T, dim=-1) @ patterns()
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
    else:
        torch.testing.assert_close(output, output[:1].expand_as(output), rtol=1e-3, atol=1e-5)


def test_denoising_prints_the_published_figures_beside_ours_and_verdicts(tmp_path, monkeypatch, capsys):
    few = {"epochs": 2, "checked_every": 2}
    monkeypatch.setattr(denoising, "TASK", denoising.TASK._replace(**few))
    first = next(iter(denoising.EQUILIBRIA))._replace(**few)
    monkeypatch.setattr(denoising, "EQUILIBRIA", {first: (78.9, 25.6)})
    for name, value in {"BOUND_QUERIES": 1600, "TEST_QUERIES": 64}.items():
        monkeypatch.setattr(denoising, name, value)
    assert denoising.main(["--seeds", "0", "--json", str(tmp_path / "one.json")]) == 0
    text, made = capsys.readouterr().out, json.loads((tmp_path / "one.json").read_text())
    assert "rounds 2" in text and "53.3" in text and "bound" in text and "verdict: a second round brings" in text
    assert "d 16, K 4, sigma 0.5: equilibrium from Hopfield" in text and "verdict: equilibria differ from" in text
    assert made["published"]["rounds 1"] == 41.3
    assert set(made["accuracy"]) == {case.label for case in denoising.CASES if case.brief}
    assert made["equilibria"]["d 16, K 4, sigma 0.5"]["published"] == [78.9, 25.6]


# A filter that is asked again


def test_histories_are_of_the_model_that_the_kalman_filter_is_best_for():
    state, seen = reweighting.histories(300, 0.0)
    assert reweighting.error(seen, state) == pytest.approx(0.5**0.5, rel=0.02)
    assert state[:, -1].abs().square().mean().item() == pytest.approx(0.25, rel=0.1)
    variance = 0.25
    for _ in range(200):  # to the steady state of Riccati's equation
        predicted = variance * math.exp(-0.1) + 0.25 * (1 - math.exp(-0.1))
        variance = predicted * 0.5 / (predicted + 0.5)
    assert reweighting.error(reweighting.kalman(seen), state) == pytest.approx(variance**0.5, rel=0.03)
    _, wild = reweighting.histories(300, 0.2)
    assert (wild - state).abs().square().mean().item() == pytest.approx(0.5 * (0.8 + 0.2 * 36), rel=0.05)


def test_steps_of_reweighting_are_the_query_or_all_of_the_next(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(reweighting, "LENGTH", 20)
    _, seen = reweighting.histories(4, 0.2)
    first, second = reweighting.reweighted(seen, 0.5, 2, stacked=False)
    both = reweighting.reweighted(seen, 0.5, 2, stacked=True)
    torch.testing.assert_close(both[0], first)
    torch.testing.assert_close(both[1], reweighting.reweighted(first, 0.5, 1, stacked=True)[0])
    assert not torch.allclose(second, both[1])
    assert reweighting.main(["--histories", "40", "--json", str(tmp_path / "one.json")]) == 0
    assert "step 10" in capsys.readouterr().out
    rows = json.loads((tmp_path / "one.json").read_text())["reweighting"]
    heavy = [row["errors"] for row in rows if row["outliers"] == 0.2 and row["dof"] == 0.5]
    assert all(errors["10"] < errors["1"] for errors in heavy)


def test_noise_that_comes_and_goes_adds_up_to_its_integral():
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(40))
    rate = time_noise.Rate(torch.tensor([0.7, 0.3 - 0.2j]).cdouble(), torch.tensor([0.1, -0.2 + 1.3j]).cdouble())
    for start, end in ((0.0, 0.0), (-2.0, 1.5), (3.0, 9.0)):
        s = start + (end - start) * (nodes + 1) / 2
        q = (rate.weight * torch.exp(rate.growth * s[:, None])).sum(-1).real
        expected = (end - start) / 2 * (weights * q * torch.exp(-0.8 * (end - s))).sum()
        found = time_noise.added(rate, torch.tensor(start), torch.tensor(end), decay=0.4)
        torch.testing.assert_close(found, expected)
    always = time_noise.added(time_noise.constant(), torch.tensor(2), torch.tensor(5), decay=0.4)
    assert always.item() == pytest.approx(time_noise.MEAN_RATE * -math.expm1(-2.4) / 0.8)


def test_a_filter_that_knows_when_noise_comes_finds_the_state_better(capsys, tmp_path):
    assert time_noise.main(["--histories", "100", "--json", str(tmp_path / "one.json")]) == 0
    assert "Kalman, known" in capsys.readouterr().out
    rows = json.loads((tmp_path / "one.json").read_text())["time_noise"]
    assert all(row["Kalman, known"] < row["Kalman, constant"] < row["known"] <= row["constant"] for row in rows)
    _, seen = time_noise.histories(3, time_noise.swinging(8))
    changed = seen.clone()
    changed[:, 40:] = 0
    for estimate in (time_noise.filtered, time_noise.kalman):  # nothing is read from the future
        now, then = (estimate(x, time_noise.swinging(8))[:, :40] for x in (seen, changed))
        torch.testing.assert_close(now, then)


# Histories beyond the trained length


def test_a_context_is_the_last_events_before_the_target():
    dataset = synthetic_dataset(SyntheticConfig(num_users=40, num_items=120, mean_length=12.0))
    users = extrapolation.long_histories(dataset, 10)
    assert 0 < len(users) < dataset.num_users
    config = load_run_config(arm="matched", mixer="rope", absolute_positions=False, max_length=5, hidden_size=8)
    model = config.build(torch.from_numpy(np.asarray(dataset.training_counts)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    short, long = (extrapolation.measure(model, dataset, users, length) for length in (5, 10))
    assert short != long
    changed = dataset.items.copy()
    view = extrapolation.view_of(dataset, "test", users)
    for start in view.stop - 10:
        changed[start : start + 5] = changed[start : start + 5][::-1]
    dataset = replace(dataset, items=changed)
    assert extrapolation.measure(model, dataset, users, 5) == short
    assert extrapolation.measure(model, dataset, users, 10) != long


def test_extrapolation_measures_the_same_users_at_every_length(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(extrapolation, "LONG", SyntheticConfig(num_users=60, num_items=120, mean_length=12.0))
    few = ["--set", "hidden_size=8", "--set", "epochs=1", "--trained", "6", "--mixers", "rope"]
    assert extrapolation.main([*few, "--lengths", "6,12", "--json", str(tmp_path / "one.json")]) == 0
    found = json.loads((tmp_path / "one.json").read_text())
    assert found["users"] > 0 and [row["length"] for row in found["extrapolation"]] == [6, 12]
    assert "last 12" in capsys.readouterr().out
    with pytest.raises(UserError, match="no user of 'synthetic' has 5000 events before the target; the most is"):
        extrapolation.main([*few, "--lengths", "5000"])

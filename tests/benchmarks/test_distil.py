"""Distillation of language models, and pairs of tokens that are asked for at the end of a text."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks.language import distil, perplexity
from benchmarks.language.model import Arm, Size, epoch_batches, make_model, num_batches
from benchmarks.language.needle import KINDS, PAIRS, Needles, accuracies, needles_of, plant
from benchmarks.language.text import SOURCES, Windows, by_characters

CPU = torch.device("cpu")
TINY = Size(vocabulary=300, width=16, layers=2, heads=2, length=12, batch_size=4, epochs=1, learning_rate=1e-2)
TEXT = "the cat sat on the mat and the dog sat on the log ; " * 8


@pytest.fixture(scope="module")
def corpus():
    return by_characters("rhyme", TEXT[:160], TEXT[:110])


@pytest.fixture(scope="module")
def teacher(corpus):
    return make_model(distil.TEACHER, TINY, corpus, 0).eval().requires_grad_(False)


# Needles


@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_planted_and_asked_for_and_teach_their_answers_alone(seed):
    batch = next(Windows(torch.arange(1, 400), 21).batches(8))
    needles = Needles(torch.arange(1001, 1007), torch.arange(2001, 2007))
    made, places = plant(batch, needles, torch.Generator().manual_seed(seed), share=0.5)
    assert torch.equal(made.items[4:], batch.items[4:]) and torch.equal(made.target[4:], batch.target[4:])
    for items, target, text, at in zip(made.items[:4], made.target[:4], batch.items[:4], places, strict=True):
        asked, answers, body = items[-PAIRS:], target[-PAIRS:], items[:-PAIRS]
        assert len(set(asked.tolist())) == len(set(answers.tolist())) == PAIRS
        for key, answer, there in zip(asked, answers, at, strict=True):
            (place,) = (body == key).nonzero()[:, 0].tolist()
            assert body[place + 1] == answer and there == place and place % 2 == 0
        plain = body < 1000
        assert plain.sum() == len(body) - 2 * PAIRS and torch.equal(body[plain], text[: len(body)][plain])
        following = torch.where(items[1:] < 1000, items[1:], 0)[:-PAIRS]
        assert torch.equal(target[: -PAIRS - 1], following[: len(target) - PAIRS - 1])
        assert target[-PAIRS - 1] == 0, "which key is asked for cannot be foreseen"


def test_needles_are_the_rarest_tokens_and_never_both_key_and_value(corpus):
    found = needles_of(corpus)
    counts = torch.bincount(corpus.train, minlength=corpus.vocabulary + 1)
    used = torch.cat(found)
    assert len(found.keys) == len(found.values) == min(KINDS, corpus.vocabulary // 3)
    assert len(set(used.tolist())) == len(used)
    others = [token for token in range(1, corpus.vocabulary + 1) if token not in used]
    assert counts[used].max() <= counts[others].min()


def test_accuracy_counts_the_answers_of_each_depth(corpus, teacher):
    class Knows(torch.nn.Module):
        """Finds the value behind the asked key, among those that stand in the first half."""

        def encode(self, batch):
            states = torch.zeros(*batch.items.shape, corpus.vocabulary + 1)
            for state, items in zip(states, batch.items, strict=True):
                for place in range(len(items) - PAIRS, len(items)):
                    first = int((items == items[place]).nonzero()[0])
                    if first < (len(items) - PAIRS) / 2:
                        state[place, items[first + 1]] = 1.0
            return type("Belief", (), {"mean": states})

        def item_table(self):
            return type("Table", (), {"weight": torch.eye(corpus.vocabulary + 1)})

    rare = replace(corpus, test=torch.ones(4000, dtype=torch.int64))  # no needle stands in the text itself
    found = accuracies(Knows(), rare, [36], tokens=72, device=CPU)
    assert [line["depth"] for line in found] == [tenth / 10 for tenth in range(10)]
    assert sum(line["asked"] for line in found) == PAIRS * (3999 // 36)
    assert all(line["accuracy"] == 1.0 for line in found[:5])
    assert all(line["accuracy"] < 0.6 for line in found[5:]), "chance, as a score of 0 everywhere names the first value"


# Distillation


def test_a_misfit_is_in_units_of_the_teachers_variance():
    wanted = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    nmse, cosine = distil.misfit(torch.zeros(1, 2, 2), wanted)
    assert float(nmse) == pytest.approx(1.0, abs=1e-5) and float(cosine) == 0.0
    nmse, cosine = distil.misfit(2 * wanted, wanted)
    assert float(nmse) == pytest.approx(1.0, abs=1e-5) and float(cosine) == pytest.approx(1.0)


def test_a_student_begins_with_what_it_shares_with_its_teacher(corpus, teacher):
    student = distil.successor(teacher, TINY, corpus, 1)
    own, given = student.state_dict(), teacher.state_dict()
    new = {name.partition("mixer.")[2] for name in own if name not in given or not own[name].equal(given[name])}
    assert new == {
        "process.to_noise.weight",
        "process.noise_start",
        "transition.share_start",
        "transition.to_share.weight",
    }


def test_a_model_that_is_its_teacher_has_nothing_to_learn(corpus, teacher):
    batch = next(Windows(corpus.train, 12).batches(4))
    assert float(distil.by_layers(teacher)(teacher, batch, 0.0)) == pytest.approx(0.0, abs=1e-6)
    assert float(distil.by_logits(teacher)(teacher, batch, 0.0)) == pytest.approx(0.0, abs=1e-6)


def test_the_divergence_of_logits_is_that_of_the_teachers_distribution(corpus, teacher):
    batch = next(Windows(corpus.train, 12).batches(4))
    student = distil.successor(teacher, TINY, corpus, 0)
    with torch.no_grad():
        p, own = (
            model.encode(batch).mean.flatten(0, 1) @ model.item_table().weight[1:].T for model in (teacher, student)
        )
        p, own = p.softmax(-1), own.softmax(-1)
        divergence = (p * (p / own).log()).sum(-1).mean()
        early, late = (distil.by_logits(teacher)(student, batch, since) for since in (-1.0, 10.0))
    boundary = (early - 0.8 * divergence) / 0.2
    torch.testing.assert_close(late, 0.9 * divergence + 0.1 * boundary, rtol=1e-4, atol=1e-6)


def test_fitting_layers_trains_mixers_alone_and_brings_them_nearer(corpus, teacher):
    student, size = distil.successor(teacher, TINY, corpus, 0), replace(TINY, learning_rate=1e-3)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    batch, loss = next(Windows(corpus.test, 12).batches(8)), distil.by_layers(teacher)
    far = loss(student, batch, 0.0).item()
    distil.tune(student, loss, 2, networks=False, size=size, corpus=corpus, seed=0, device=CPU)
    changed = {name for name, value in student.state_dict().items() if not value.equal(before[name])}
    assert changed and all(".mixer." in name for name in changed)
    assert loss(student, batch, 0.0).item() < 0.9 * far
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_the_command_judges_every_model_at_every_length(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / SOURCES["shakespeare"].train).write_text(TEXT * 3)
    monkeypatch.setitem(perplexity.SIZES, "small", replace(TINY, layers=1, batch_size=64))
    file = tmp_path / "out.json"
    given = ["--data", "shakespeare", "--data-root", str(tmp_path), "--device", "cpu", "--json", str(file)]
    assert distil.main(given) == 0
    found = json.loads(file.read_text())
    models = [
        "teacher",
        "teacher, further",
        "student, before",
        "student, layers",
        "student, logits",
        "student, scratch",
    ]
    assert [(line["model"], line["length"]) for line in found["perplexity"]] == [
        (model, length) for model in models for length in (12, 24, 48, 96)
    ]
    assert [line["model"] for line in found["layers"]] == models[2:5]
    assert {line["model"] for line in found["needles"]} == set(models)
    assert all(math.isfinite(line["perplexity"]) for line in found["perplexity"])
    assert "published, 340M parameters" in capsys.readouterr().out


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_training_windows_are_planted_as_an_arm_says(share, corpus):
    arm, windows, order = Arm(needles=share), Windows(corpus.train, 12), torch.Generator().manual_seed(0)
    batches = list(epoch_batches(arm, windows, TINY, corpus, order))
    planted = [(batch.target == 0).any(dim=1) for batch in batches]
    assert 0 < len(batches) <= num_batches(windows, TINY)
    assert [int(rows.sum()) for rows in planted] == [round(share * len(rows)) for rows in planted]

"""The language task: text as tokens, windows and wrong targets, what perplexity is, and a file of every command."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.language import finetune, llama2c, perplexity
from benchmarks.language.model import Arm, Focal, Size, inside, make_model, mean_loss, perplexities, token_losses, train
from benchmarks.language.text import SOURCES, Corpus, Windows, by_characters, by_pairs, load_corpus, read_text
from recbft.errors import UserError
from recbft.experiments.lists import split_list
from recbft.training.controllers import VALIDATION_LOSS
from recbft.training.controllers.averaging import SelectiveSwa, replaced
from recbft.training.controllers.guardian import Guardian

TINY = Size(vocabulary=300, width=16, layers=2, heads=4, length=8, batch_size=4, epochs=1, learning_rate=1e-2)
TEXT = "the cat sat on the mat and the dog sat on the log ; " * 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus():
    return by_characters("rhyme", TEXT, TEXT[:130])


# Text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; --data-root names the folder"),
        (b"", "holds no text"),
        (b" \n\n", "holds no text"),
        (b"caf\xe9 noir", "is no UTF-8 at byte 3; convert it"),
    ],
)
def test_a_file_that_is_no_text_is_named_with_what_to_do(tmp_path, content, message):
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_text(tmp_path / "x.txt")


def test_a_text_shorter_than_its_windows_is_refused(corpus):
    short = replace(corpus, train=corpus.train[:15])
    with pytest.raises(UserError, match=r"training text of rhyme has 15 tokens, less than two windows of 8"):
        train(Arm(), TINY, short, 0, CPU)
    model = make_model(Arm(), TINY, corpus, 0)
    with pytest.raises(UserError, match=r"test text of rhyme has 20 tokens, less than a window of 64"):
        perplexities(model, Arm(), TINY, replace(corpus, test=corpus.test[:20]), CPU)


def test_characters_are_numbered_and_a_strange_one_refused():
    made = by_characters("x", "abcé", "cab")
    assert made.train.tolist() == [1, 2, 3, 4] and made.test.tolist() == [3, 1, 2]
    assert made.num_bytes.tolist() == [0, 1, 1, 1, 2]
    with pytest.raises(UserError, match="test text has 'z', which the training text lacks"):
        by_characters("x", "ab", "za")


def test_byte_pairs_write_any_text_and_know_their_length():
    pytest.importorskip("tokenizers")
    test = "the <unk> mat é ; 漢字\n"
    made, again = (by_pairs("x", TEXT, test, 280) for _ in range(2))
    assert torch.equal(made.test, again.test) and made.hash == again.hash
    assert made.num_bytes[made.test].sum() == len(test.encode())
    assert len(made.train) < len(TEXT) / 2 and made.train.min() >= 1 and made.train.max() <= made.vocabulary
    with pytest.raises(UserError, match="a vocabulary of 256 has no pairs beside 256 bytes"):
        by_pairs("x", TEXT, test, 256)


def test_a_text_without_a_test_part_is_cut(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / SOURCES["shakespeare"].train).write_text(TEXT)
    found = load_corpus("shakespeare", tmp_path, vocabulary=0)
    assert len(found.train) + len(found.test) == len(TEXT) and len(found.test) == round(0.1 * len(TEXT))
    with pytest.raises(UserError, match="did you mean 'wikitext2'"):
        load_corpus("wikitext", tmp_path, vocabulary=0)


# Windows


def test_windows_cover_the_text_and_predict_the_next_token():
    tokens = torch.arange(1, 23)
    batches = list(Windows(tokens, 5).batches(3))
    assert [batch.items.shape for batch in batches] == [(3, 5), (1, 5)]
    assert torch.equal(torch.cat([batch.items.flatten() for batch in batches]), tokens[:20])
    assert all(torch.equal(batch.target, batch.items + 1) for batch in batches)
    assert all(torch.equal(batch.items.flatten()[batch.last], batch.items[:, -1]) for batch in batches)
    mixed = list(Windows(tokens, 5).batches(3, start=2, order=torch.Generator().manual_seed(1)))
    assert sorted(torch.cat([batch.items.flatten() for batch in mixed]).tolist()) == list(range(3, 18))


def test_wrong_targets_are_nested_and_inputs_are_right():
    tokens = torch.arange(1, 4002)
    right, few, many = (Windows(tokens, 10, replaced=share) for share in (0.0, 0.1, 0.4))
    wrong_few, wrong_many = (one.targets != right.targets for one in (few, many))
    assert torch.equal(right.targets, tokens) and torch.equal(many.tokens, tokens)
    assert (wrong_many >= wrong_few).all() and torch.equal(few.targets[wrong_few], many.targets[wrong_few])
    assert wrong_few.float().mean() == pytest.approx(0.1, abs=0.02)
    assert wrong_many.float().mean() == pytest.approx(0.4, abs=0.03)


# Models


def test_perplexity_of_a_model_that_knows_nothing_is_the_vocabulary(corpus):
    arm = Arm(positions=False)
    model = make_model(arm, TINY, corpus, 0).eval()
    with torch.no_grad():
        model.item_embedding.weight.zero_()
    found = perplexities(model, arm, TINY, corpus, CPU)
    assert list(found) == [8, 16, 32, 64]
    for figures in found.values():
        assert figures["perplexity"] == pytest.approx(corpus.vocabulary)
        assert figures["bits_per_byte"] == pytest.approx(math.log2(corpus.vocabulary))
    assert list(perplexities(model, Arm(), TINY, corpus, CPU)) == [8], "learned positions end with the trained length"


def test_losses_of_tokens_have_the_models_loss_as_their_mean(corpus):
    model = make_model(Arm(), TINY, corpus, 0).eval()
    batch = next(Windows(corpus.train, 8).batches(4))
    torch.testing.assert_close(token_losses(model, batch).mean(), model.loss(batch))


def test_a_model_learns_a_rhyme(corpus):
    model, loss = train(Arm(), replace(TINY, epochs=5, batch_size=8, learning_rate=2e-2), corpus, 0, CPU)
    assert loss < 0.6 * math.log(corpus.vocabulary)
    assert perplexities(model, Arm(), TINY, corpus, CPU)[8]["perplexity"] < 4


def test_focal_loss_is_equation_16_and_cross_entropy_without_an_exponent():
    losses, focal = torch.tensor([0.1, 1.0, 3.0]), Focal()
    p = torch.exp(-losses)
    torch.testing.assert_close(focal(losses), ((1 - p) ** math.log(2) * losses).mean())
    with torch.no_grad():
        focal.alpha.fill_(-30.0)
    torch.testing.assert_close(focal(losses), losses.mean())


@pytest.mark.parametrize("table", perplexity.TABLES)
def test_every_arm_of_a_table_can_be_named_trains_and_is_scored(table, corpus):
    assert split_list(",".join(perplexity.TABLES[table])) == list(perplexity.TABLES[table])
    scored, size = replace(corpus, train=corpus.train[:90]), replace(TINY, layers=1)
    arms = {repr(replace(arm, replaced=0.0)): arm for arm in perplexity.TABLES[table].values()}
    for arm in arms.values():
        model, loss = train(arm, size, scored, 0, CPU)
        found = perplexities(model, arm, size, scored, CPU)
        assert math.isfinite(loss) and all(math.isfinite(one["perplexity"]) for one in found.values())
        assert len(found) == (4 if arm.any_length else 1)


def test_what_controllers_leave_is_the_model_as_it_was_validated(corpus, monkeypatch):
    heard = []

    def spoil(_, moment, row):
        heard.append((moment.step, moment.total_steps, row[VALIDATION_LOSS]))
        with torch.no_grad():
            moment.model.item_embedding.weight.zero_()

    monkeypatch.setattr(Guardian, "on_epoch_end", spoil)
    arm = Arm(mixer="regime", controllers={"guardian": {}}, held_out=0.2)
    model, _ = train(arm, replace(TINY, layers=1), corpus, 0, CPU)
    held_out = corpus.train[-round(0.2 * len(corpus.train)) :]
    assert heard == [(16, 16, pytest.approx(mean_loss(model, Windows(held_out, 8), 4, CPU)))]
    with pytest.raises(UserError, match=r"less than two windows of 8 and one that is held out"):
        train(arm, TINY, replace(corpus, train=corpus.train[:40]), 0, CPU)


@pytest.mark.parametrize("better", [True, False])
def test_averaged_weights_are_kept_where_their_held_out_loss_is_lower(better, corpus, monkeypatch, capsys):
    arm = Arm(mixer="regime", controllers={"swa": {"value": VALIDATION_LOSS}}, held_out=0.2)
    size, short = replace(TINY, layers=1), replace(corpus, train=corpus.train[:300])
    trained, _ = train(replace(arm, controllers={}), replace(size, epochs=3), short, 0, CPU)
    offered = {name: value.detach() if better else 0 * value.detach() for name, value in trained.named_parameters()}
    monkeypatch.setattr(SelectiveSwa, "final_weights", lambda _, model: replaced(model, offered))
    model, _ = train(arm, size, short, 0, CPU)
    assert torch.equal(model.item_embedding.weight, trained.item_embedding.weight) == better
    assert "with averaged weights" in capsys.readouterr().out


def test_the_wider_control_has_the_parameters_of_two_rounds(corpus):
    size, words = perplexity.SIZES["small"], replace(corpus, vocabulary=2000)
    count = {
        name: sum(parameter.numel() for parameter in make_model(arm, size, words, 0).parameters())
        for name, arm in perplexity.TABLES["boosting"].items()
    }
    assert count["wider"] == pytest.approx(count["boosted 2"], rel=0.01)
    assert count["twicing"] == count["standard"] == count["boosted 1"]


def test_entropies_and_gates_are_told_by_layer_and_round(corpus):
    model = make_model(Arm(mixer="boosted", mixing={"rounds": 3}), TINY, corpus, 0).eval()
    found = inside(model, TINY, corpus, CPU)
    assert len(found["entropies"]) == 6 and len(found["gates"]) == 4
    even = np.mean([math.log(t) for t in range(1, 9)])
    assert found["entropies"] == pytest.approx([even] * 6, abs=0.05), "small weights attend almost evenly"
    assert found["gates"] == pytest.approx([0.5] * 4, abs=0.05)


# The command


def test_the_command_adds_lines_and_trains_nothing_twice(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / SOURCES["shakespeare"].train).write_text(TEXT * 2)
    monkeypatch.setitem(perplexity.SIZES, "small", TINY)
    file = tmp_path / "figures.csv"
    common = ["--data", "shakespeare", "--data-root", str(tmp_path), "--csv", str(file), "--device", "cpu"]
    given = ["--table", "length", "--arms", "rope", *common]
    assert perplexity.main(given) == 0
    first = perplexity.read(file)
    assert list(first["length"]) == [8, 16, 32, 64] and (first["data_hash"].str.len() == 12).all()
    assert set(first["command"]) == {
        "python -m benchmarks.language.perplexity --table length --arms rope --data shakespeare "
        "--data-root DIR --csv FILE --device cpu"
    }
    assert perplexity.main([*given, "--seeds", "0,1"]) == 0
    assert f"rope, seed 0: in {file} already" in capsys.readouterr().out
    both = perplexity.read(file)
    assert len(both) == 8
    assert both[both["seed"] == 0].reset_index(drop=True).equals(first)
    (folder / SOURCES["shakespeare"].train).write_text(TEXT * 3)
    with pytest.raises(UserError, match=r"has arm 'rope' with another data_hash; name another file"):
        perplexity.main(given)
    with pytest.raises(UserError, match=r"table length has no arm 'ropes'; did you mean 'rope'"):
        perplexity.main([*given[:2], "--arms", "ropes", *common])
    with pytest.raises(UserError, match=r"folder .* does not exist; create it"):
        perplexity.main([*given, "--csv", str(tmp_path / "no" / "x.csv")])


def test_arms_differ_by_seed_from_the_one_with_the_same_noise():
    figures = {
        "matched+recency 0%": (70, 80),
        "bft 0%": (77, 88),
        "matched+recency 40%": (100, 110),
        "bft 40%": (90, 99),
    }
    lines = [
        {"table": "noise", "arm": arm, "length": 64, "seed": seed, "perplexity": found}
        for arm, both in figures.items()
        for seed, found in enumerate(both)
    ]
    head, rows = perplexity.summary(pd.DataFrame(lines))
    said = dict(
        zip([row[0] for row in rows], [row[head.index("difference (95 % interval)")] for row in rows], strict=True)
    )
    assert said["matched+recency 0%"] == said["matched+recency 40%"] == ""
    assert said["bft 0%"].startswith("+10.0 % (") and said["bft 40%"].startswith("-10.0 % (")
    assert "difference" not in " ".join(perplexity.summary(pd.DataFrame(lines).query("seed == 0"))[0])


# Weights of llama2.c


def raw_file(path, *, tied=True):
    """Random weights as llama2.c writes them, and its forward pass in numpy."""
    D, width, L, H, kv, V, T = 8, 12, 2, 4, 2, 11, 16
    K, draw = D // H, np.random.default_rng(0)
    shapes = [(V, D), (L, D), (L, D, D), (L, kv * K, D), (L, kv * K, D), (L, D, D), (L, D)]
    shapes += [(L, width, D), (L, D, width), (L, width, D), (D,), (T, K // 2), (T, K // 2)]
    shapes += [] if tied else [(V, D)]
    parts = [draw.normal(size=shape).astype("<f4") for shape in shapes]
    header = np.array([D, width, L, H, kv, V if tied else -V, T], dtype="<i4")
    path.write_bytes(header.tobytes() + b"".join(part.tobytes() for part in parts))
    emb, norm1, wq, wk, wv, wo, norm2, w1, w2, w3, norm = (part.astype(np.float64) for part in parts[:11])

    def normed(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def turned(x):  # pairs of neighbours, as in run.c
        t = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(0, K, 2) / K)
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * np.cos(t) - b * np.sin(t), a * np.sin(t) + b * np.cos(t)], -1).reshape(x.shape)

    def logits(ids):
        h, n = emb[ids], len(ids)
        for layer in range(L):
            x = normed(h, norm1[layer])
            q, k, v = ((x @ w[layer].T).reshape(n, heads, K) for w, heads in ((wq, H), (wk, kv), (wv, kv)))
            k, v = turned(k).repeat(H // kv, axis=1), v.repeat(H // kv, axis=1)
            a = np.einsum("thk,shk->hts", turned(q), k) / np.sqrt(K)
            a = np.exp(np.where(np.tril(np.ones((n, n))), a, -np.inf))
            e = np.einsum("hts,shk->thk", a / a.sum(-1, keepdims=True), v).reshape(n, D)
            h = h + e @ wo[layer].T
            x = normed(h, norm2[layer])
            gate = x @ w1[layer].T
            h = h + (gate / (1 + np.exp(-gate)) * (x @ w3[layer].T)) @ w2[layer].T
        return normed(h, norm) @ (emb if tied else parts[-1].astype(np.float64)).T

    return logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_of_llama2c_gives_the_logits_of_its_own_arithmetic(tmp_path, tied):
    pytest.importorskip("transformers")
    logits = raw_file(tmp_path / "x.bin", tied=tied)
    ids = [1, 5, 9, 2, 6, 5]
    with torch.no_grad():
        found = llama2c.load_llama2c(tmp_path / "x.bin")(torch.tensor([ids])).logits[0]
    np.testing.assert_allclose(found, logits(ids), rtol=2e-4, atol=2e-4)


def test_matrices_that_were_transposed_in_place_are_turned_back():
    weights = torch.arange(2 * 3 * 5.0).view(2, 3, 5)
    overwritten = weights
    for _ in range(5):
        overwritten = overwritten.reshape(2, 5, 3).mT.reshape(2, 3, 5)
    assert torch.equal(llama2c.turned_back(overwritten, 5), weights)


def test_what_is_no_file_of_llama2c_is_refused(tmp_path):
    pytest.importorskip("transformers")
    raw_file(tmp_path / "x.bin")
    whole = (tmp_path / "x.bin").read_bytes()
    for content, message in ((whole[:-4], "take the whole file"), (bytes(40), r"no header of llama2\.c")):
        (tmp_path / "y.bin").write_bytes(content)
        with pytest.raises(UserError, match=message):
            llama2c.load_llama2c(tmp_path / "y.bin")
    with pytest.raises(UserError, match=r"does not exist; name a file of llama2\.c"):
        llama2c.load_llama2c(tmp_path / "z.bin")


def test_the_published_weights_tell_their_story():
    pytest.importorskip("transformers")
    path = Path(os.environ.get("RECBFT_DATA_ROOT", ""), "text", "stories260K.bin")
    if not path.is_file():
        pytest.skip("RECBFT_DATA_ROOT names no folder with text/stories260K.bin")
    model, ids = llama2c.load_llama2c(path), [1]
    with torch.no_grad():
        for _ in range(9):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    # "Once upon a time, there was a little", as run.c writes it.
    assert ids == [1, 403, 407, 261, 378, 432, 383, 286, 261, 376]


# Fine-tuning


def test_fine_tuning_measures_what_wrong_labels_cost(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    raw_file(tmp_path / "x.bin")
    size = finetune.Size(sequences=16, test_sequences=8, length=12, batch_size=4, epochs=1, learning_rate=1e-3)
    monkeypatch.setitem(finetune.SIZES, "small", size)
    file = tmp_path / "out.json"
    given = ["--weights", str(tmp_path / "x.bin"), "--shares", "0,0.4", "--device", "cpu", "--json", str(file)]
    assert finetune.main(given) == 0
    rows = json.loads(file.read_text())["finetune"]
    assert [(row["arm"], row["share"]) for row in rows] == [(arm, s) for s in (0.0, 0.4) for arm in finetune.ARMS]
    assert all(math.isfinite(row["excess"]) for row in rows)
    with pytest.raises(UserError, match="unknown arm 'bfr'; did you mean 'bft'"):
        finetune.main([*given, "--arms", "bfr"])


def test_a_small_llama_is_made_of_a_text_and_learns_it(tmp_path):
    pytest.importorskip("transformers")
    tokens = torch.arange(1, 9).repeat(60)
    size = replace(perplexity.SIZES["small"], width=16, layers=1, heads=2, length=8, batch_size=8, epochs=12)
    made = finetune.made_of(Corpus("counting", tokens, tokens, 8, torch.ones(9)), size)
    assert finetune.mean_loss(made, tokens[:9][None]) < 1.0 < math.log(8)


def test_a_teacher_loses_nothing_to_itself_and_draws_what_its_seed_says(tmp_path):
    pytest.importorskip("transformers")
    raw_file(tmp_path / "x.bin")
    teacher = finetune.load_teacher(tmp_path / "x.bin")
    drawn = finetune.draw(teacher, 4, 6, seed=0)
    assert drawn.shape == (4, 7) and (drawn[:, 0] == 1).all()
    assert torch.equal(drawn, finetune.draw(teacher, 4, 6, seed=0))
    teacher.save_pretrained(tmp_path / "folder")
    again = finetune.load_teacher(tmp_path / "folder")
    assert finetune.mean_loss(again, drawn) == finetune.mean_loss(teacher, drawn)

"""What an export writes, and that it is checked first."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch

from recbft import Recommender
from recbft.errors import RunError, UserError
from recbft.serving import export as module


@pytest.fixture(scope="module")
def written(fitted, tmp_path_factory):
    """Its export for PyTorch, and what that says."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    return folder, fitted.export(folder, format="torch")


def test_the_written_files_give_the_lists_of_recommend(fitted, written):
    folder, said = written
    assert sorted(path.name for path in folder.iterdir()) == [
        "encoder.pt2",
        "export.json",
        "item_ids.json",
        "items.npy",
    ]
    assert json.loads((folder / "export.json").read_text()) == said
    ids, rows = json.loads((folder / "item_ids.json").read_text()), np.load(folder / "items.npy")
    assert ids == fitted.item_vectors().items.tolist() and rows.dtype == np.float32
    encoder = torch.export.load(folder / "encoder.pt2").module()
    history = ids[4:9]
    vector, precision = encoder(torch.tensor([[0, 0, *(1 + ids.index(item) for item in history)]]))
    (expected,) = fitted.recommend_lists([history], 3, filter_seen=False)
    scores = vector[0].numpy() @ rows.T
    assert [ids[row] for row in np.argsort(-scores)[:3]] == expected.items
    np.testing.assert_allclose(np.sort(scores)[::-1][:3], expected.scores, rtol=1e-4)
    assert float(precision) == pytest.approx(expected.precision, rel=1e-4)


def test_the_export_says_which_run_it_is_and_how_it_was_checked(fitted, written):
    _, said = written
    assert said["run"] == {"name": fitted.run.path.name, "identity": fitted.run.identity, "weights": fitted.weights}
    assert said["encoder"]["inputs"]["items"]["shape"] == ["batch", "length"]
    assert list(said["encoder"]["outputs"]) == ["vector", "precision"]
    assert said["checked"]["histories"] == 1000 and said["checked"]["from"] == "drawn"
    assert said["checked"]["largest_relative_difference"] < 1e-4
    assert said["calibration"]["filtered"] == fitted.calibration()._asdict()


def run_by(encoder):
    """The encoder as what is read back from a file."""

    def encode(*given):
        with torch.inference_mode():
            return [x.numpy() for x in encoder(*(torch.from_numpy(x) for x in given))]

    return encode


@pytest.fixture
def untraced(monkeypatch):
    """Exports that leave out the encoder's file, which takes seconds."""
    monkeypatch.setattr(module, "_write", lambda encoder, path, format: None)
    monkeypatch.setattr(module, "_read_back", lambda path, format, encoder: run_by(encoder))


@pytest.mark.usefixtures("untraced")
def test_where_the_data_are_there_their_histories_are_checked(fitted, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(Recommender, "own_dataset", lambda self: dataset)
    said = fitted.export(tmp_path / "out", format="torch")
    assert said["checked"]["histories"] == dataset.num_users and said["checked"]["from"] == "the run's data"


@pytest.mark.usefixtures("untraced")
def test_numbers_that_are_not_those_of_recommend_leave_nothing_behind(fitted, tmp_path, monkeypatch):
    right = fitted.item_vectors()
    wrong = right._replace(vectors=right.vectors + np.arange(len(right.items))[:, None] % 2)
    monkeypatch.setattr(module, "item_vectors", lambda *model: wrong)
    with pytest.raises(RunError, match=r"of 1,000 lists [\d,]+ are not those of recommend"):
        fitted.export(tmp_path / "out", format="torch")
    assert list(tmp_path.iterdir()) == []


def test_a_better_item_that_a_list_lacks_is_seen(fitted):
    vectors = fitted.item_vectors().vectors
    by = module.drawn_histories(fitted._trained.model, len(vectors))
    encode = run_by(module.user_encoder(fitted._trained.model))
    states, found = module._held_against(fitted._trained.model, encode, vectors, by, len(vectors))
    assert states.shape == (1000, vectors.shape[1]) and found["largest_relative_difference"] < 1e-4
    worst = int((states @ vectors.T).mean(axis=0).argmin())  # on few lists, so that their scores stay as they are
    vectors = vectors.copy()
    vectors[worst] = 2 * vectors[(states @ vectors.T).mean(axis=0).argmax()]
    with pytest.raises(RunError, match="are not those of recommend"):
        module._held_against(fitted._trained.model, encode, vectors, by, len(vectors))


@pytest.mark.parametrize(
    ("how", "missing", "packages"),
    [({"format": "onnx"}, "onnxscript", "onnxscript"), ({"format": "torch", "index": "faiss"}, "faiss", "faiss-cpu")],
)
def test_a_missing_package_is_named(fitted, tmp_path, monkeypatch, how, missing, packages):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(UserError, match=f"pip install {packages}$"):
        fitted.export(tmp_path / "out", **how)


def test_a_wrong_request_is_told_what_to_change(fitted, tmp_path):
    with pytest.raises(UserError, match="format is 'tflite'"):
        fitted.export(tmp_path / "out", format="tflite")
    with pytest.raises(UserError, match="index is 'annoy'"):
        fitted.export(tmp_path / "out", format="torch", index="annoy")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UserError, match="taken"):
        fitted.export(tmp_path / "taken", format="torch")


@pytest.mark.slow
def test_onnxruntime_and_faiss_read_what_is_written(fitted, tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime", "faiss"):
        pytest.importorskip(name)
    onnxruntime, faiss = importlib.import_module("onnxruntime"), importlib.import_module("faiss")
    said = fitted.export(tmp_path / "out", index="faiss")
    assert said["index"]["kind"] == "IndexFlatIP" and said["index"]["share_exact"] == 1
    session = onnxruntime.InferenceSession(tmp_path / "out" / "encoder.onnx")
    assert session.get_inputs()[0].shape == ["batch", "length"]
    ids = json.loads((tmp_path / "out" / "item_ids.json").read_text())
    items = np.array([[3, 5, 7, 0]])
    vector, precision = session.run(["vector", "precision"], {"items": items})
    scores, rows = faiss.read_index(str(tmp_path / "out" / "index.faiss")).search(vector, 4)
    (expected,) = fitted.recommend_lists([[ids[2], ids[4], ids[6]]], 4, filter_seen=False)
    assert [ids[row] for row in rows[0]] == expected.items
    np.testing.assert_allclose(scores[0], expected.scores, rtol=1e-4)
    np.testing.assert_allclose(precision, [expected.precision], rtol=1e-4)


def test_of_many_items_the_graph_of_least_effort_finds_the_best(tmp_path, monkeypatch):
    faiss = pytest.importorskip("faiss")
    monkeypatch.setattr(module, "EXACT_UP_TO", 500)
    rng = np.random.default_rng(0)
    vectors, states = (rng.standard_normal((n, 8)).astype(np.float32) for n in (600, 50))
    said = module._write_index(vectors, states, tmp_path / "index")
    assert said["kind"] == "IndexHNSWFlat" and said["share_exact"] >= 0.99
    found = faiss.read_index(str(tmp_path / "index")).search(states, 10)[1]
    exact = np.argsort(-(states @ vectors.T), axis=1)[:, :10]
    same = [set(one) == set(other) for one, other in zip(found.tolist(), exact.tolist(), strict=True)]
    assert np.mean(same) == said["share_exact"]
    monkeypatch.setattr(module, "SHARE", 1.1)
    said = module._write_index(vectors, states, tmp_path / "index")
    assert said["kind"] == "IndexFlatIP" and "no graph found" in said["why"]

"""``recbft export``: what it prints, and where it writes."""

from __future__ import annotations

import pytest

from recbft.api import Recommender
from recbft.errors import UserError
from recbft_cli.main import main

SAID = {
    "encoder": {"file": "encoder.pt2"},
    "items": {"file": "items.npy"},
    "item_ids": {"file": "item_ids.json"},
    "checked": {"histories": 1000, "from": "drawn", "k": 10, "largest_relative_difference": 5e-7},
    "index": {"file": "index.faiss", "kind": "IndexFlatIP", "share_exact": 1.0, "why": "few items"},
}


class Exported:
    """A recommender that writes nothing."""

    def __init__(self, run):
        self.run, self.asked = type("Run", (), {"path": run}), None

    def export(self, path, **how):
        self.asked = (str(path), how)
        return SAID


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], ("shop-onnx", {"format": "onnx", "index": None})),
        (["--format", "torch"], ("shop-torch", {"format": "torch", "index": None})),
        (["--out", "there", "--index", "faiss"], ("there", {"format": "onnx", "index": "faiss"})),
    ],
)
def test_the_run_is_exported_as_asked_and_the_files_are_named(tmp_path, monkeypatch, capsys, arguments, asked):
    made = Exported(tmp_path / "shop")
    monkeypatch.setattr(Recommender, "load", lambda path, data_root=None: made)
    assert main(["export", str(tmp_path / "shop"), *arguments]) == 0
    assert made.asked == asked
    folder, out = asked[0], capsys.readouterr().out
    assert out.splitlines()[:5] == [
        f"{folder}/{name}" for name in ("encoder.pt2", "items.npy", "item_ids.json", "index.faiss", "export.json")
    ]
    assert "1,000 histories (drawn): the 10 best items are those of recommend, scores within 5e-07" in out
    assert "index IndexFlatIP (few items): exact for 100.0% of them" in out


def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys):
    def missing(*_arguments, **_named):
        raise UserError("this export needs packages that are not installed: pip install onnx")

    made = Exported(tmp_path / "shop")
    made.export = missing
    monkeypatch.setattr(Recommender, "load", lambda path, data_root=None: made)
    assert main(["export", str(tmp_path / "shop")]) == 2
    assert capsys.readouterr().err == "error: this export needs packages that are not installed: pip install onnx\n"

from __future__ import annotations

from dataclasses import replace

import pytest

from recbft import Dataset
from recbft.config.yaml_text import read_yaml
from recbft.datasets.synth import SyntheticConfig, generate
from recbft_cli.main import main


@pytest.fixture
def events(tmp_path):
    path = tmp_path / "tiny shop.parquet"
    generate(SyntheticConfig(num_users=80, num_items=64, mean_length=8.0)).events.to_parquet(path)
    return path


def test_prepare_for_recbole_writes_a_config_that_train_takes_as_it_is(events, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out: here"
    assert main(["data", "prepare", str(events), "--time", "timestamp", "--to", "recbole", "--out", str(out)]) == 0
    config = out / "tiny-shop.yaml"
    assert f"recbft train --config {config}" in capsys.readouterr().out
    assert read_yaml(config)["data_path"] == str(out) and "Real times" in config.read_text()
    few = ["--set", "epochs=1", "--set", "hidden_size=8", "--out", str(tmp_path / "runs"), "-q"]
    monkeypatch.chdir(tmp_path / "out: here")
    capsys.readouterr()
    assert main(["train", "--config", str(config), *few]) == 0
    assert capsys.readouterr().err == ""  # no key of ours is without meaning to us
    assert (tmp_path / "runs" / "sasrec-bft-tiny-shop-seed0" / "metrics.json").is_file()


def test_ml_100k_gets_another_name_since_recbole_has_its_own_copy(tmp_path, capsys):
    pytest.importorskip("recbole")
    assert main(["data", "prepare", "ml-100k", "--to", "recbole", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["ml-100k-sorted.inter", "ml-100k-sorted.yaml"]


def test_data_without_times_say_so_in_the_config(events, tmp_path):
    assert main(["data", "prepare", str(events), "--to", "recbole", "--out", str(tmp_path / "out")]) == 0
    assert "no real times" in (tmp_path / "out" / "tiny-shop.yaml").read_text()


@pytest.mark.parametrize("name", ["007", "null"])
def test_a_name_that_yaml_takes_for_something_else_is_quoted(name, events, tmp_path, capsys):
    source = events.rename(tmp_path / f"{name}.parquet")
    assert main(["data", "prepare", str(source), "--to", "recbole", "--out", str(tmp_path / "out")]) == 0
    config = tmp_path / "out" / f"{name}.yaml"
    assert read_yaml(config)["dataset"] == name
    few = ["--set", "epochs=1", "--set", "hidden_size=8", "--out", str(tmp_path / "runs"), "-q"]
    assert main(["train", "--config", str(config), *few]) == 0
    assert "80 users" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["shop\nmodel: Evil", "a\x1b[31m\x7f\u2028b: c", "../up"])
def test_a_name_that_a_file_gives_its_data_is_no_key_and_no_other_folder(name, events, tmp_path, capsys):
    source = tmp_path / "named.parquet"
    replace(Dataset.load(events), name=name).save(source)
    assert main(["data", "prepare", str(source), "--to", "recbole", "--out", str(tmp_path / "out")]) == 0
    (config,) = (tmp_path / "out").glob("*.yaml")
    (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert read_yaml(config)["model"] == "SASRecBFT" and read_yaml(config)["dataset"] == folder.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["named.parquet", "out", "tiny shop.parquet"]


@pytest.mark.parametrize("given", ["shop", "shop/shop.inter"])
def test_the_atomic_file_that_is_read_is_not_replaced(events, tmp_path, capsys, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", str(events.rename("shop.parquet")), "--to", "recbole", "--out", "."]) == 0
    before = (tmp_path / "shop" / "shop.inter").read_bytes()
    capsys.readouterr()
    assert main(["data", "prepare", given, "--k-core", "2", "--to", "recbole", "--out", "."]) == 2
    said = "error: --out shop/shop.inter is the file that is read, and writing would replace it; give another --out"
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert (tmp_path / "shop" / "shop.inter").read_bytes() == before


def test_an_id_that_the_file_cannot_hold_leaves_nothing_behind(tmp_path, capsys):
    rows = "".join(f'{user},"a ""{item}"""\n' for user in "uvw" for item in range(4))
    (tmp_path / "quoted.csv").write_text("user_id,item_id\n" + rows)
    out = tmp_path / "out" / "deep"
    assert main(["data", "prepare", str(tmp_path / "quoted.csv"), "--to", "recbole", "--out", str(out)]) == 2
    assert "holds a tab, a line break or a quote" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

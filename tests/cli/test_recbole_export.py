from __future__ import annotations

from dataclasses import replace

import pytest

from recbft import Dataset
from recbft.config.yaml_text import read_yaml
from recbft.datasets.synth import SyntheticConfig, generate
from tests.cli.conftest import run


@pytest.fixture
def events(tmp_path):
    path = tmp_path / "tiny shop.parquet"
    generate(SyntheticConfig(num_users=80, num_items=64, mean_length=8.0)).events.to_parquet(path)
    return path


def export(capsys, source, out, *more):
    return run(capsys, "data", "prepare", source, *more, "--to", "recbole", "--out", out)


def test_prepare_for_recbole_writes_a_config_that_train_takes_as_it_is(events, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out: here"
    code, said, _ = export(capsys, events, out, "--time", "timestamp")
    config = out / "tiny-shop.yaml"
    assert code == 0 and f"recbft train --config {config}" in said
    assert read_yaml(config)["data_path"] == str(out) and "Real times" in config.read_text()
    few = ["--set", "epochs=1", "--set", "hidden_size=8", "--out", tmp_path / "runs", "-q"]
    monkeypatch.chdir(out)
    code, _, err = run(capsys, "train", "--config", config, *few)
    assert (code, err) == (0, "")  # no key of ours is without meaning to us
    assert (tmp_path / "runs" / "sasrec-bft-tiny-shop-seed0" / "metrics.json").is_file()


def test_ml_100k_gets_another_name_since_recbole_has_its_own_copy(tmp_path, capsys):
    pytest.importorskip("recbole")
    assert export(capsys, "ml-100k", tmp_path)[0] == 0
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["ml-100k-sorted.inter", "ml-100k-sorted.yaml"]


def test_data_without_times_say_so_in_the_config(events, tmp_path, capsys):
    assert export(capsys, events, tmp_path / "out")[0] == 0
    assert "no real times" in (tmp_path / "out" / "tiny-shop.yaml").read_text()


@pytest.mark.parametrize("name", ["007", "null"])
def test_a_name_that_yaml_takes_for_something_else_is_quoted(name, events, tmp_path, capsys):
    source = events.rename(tmp_path / f"{name}.parquet")
    assert export(capsys, source, tmp_path / "out")[0] == 0
    config = tmp_path / "out" / f"{name}.yaml"
    assert read_yaml(config)["dataset"] == name
    few = ["--set", "epochs=1", "--set", "hidden_size=8", "--out", tmp_path / "runs", "-q"]
    code, said, _ = run(capsys, "train", "--config", config, *few)
    assert code == 0 and "80 users" in said


@pytest.mark.parametrize("name", ["shop\nmodel: Evil", "a\x1b[31m\x7f\u2028b: c", "../up"])
def test_a_name_that_a_file_gives_its_data_is_no_key_and_no_other_folder(name, events, tmp_path, capsys):
    source = tmp_path / "named.parquet"
    replace(Dataset.load(events), name=name).save(source)
    assert export(capsys, source, tmp_path / "out")[0] == 0
    (config,) = (tmp_path / "out").glob("*.yaml")
    (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert read_yaml(config)["model"] == "SASRecBFT" and read_yaml(config)["dataset"] == folder.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["named.parquet", "out", "tiny shop.parquet"]


@pytest.mark.parametrize("given", ["shop", "shop/shop.inter"])
def test_the_atomic_file_that_is_read_is_not_replaced(events, tmp_path, capsys, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    assert export(capsys, events.rename("shop.parquet"), ".")[0] == 0
    before = (tmp_path / "shop" / "shop.inter").read_bytes()
    code, _, err = export(capsys, given, ".", "--k-core", "2")
    said = "error: --out shop/shop.inter is the file that is read, and writing would replace it; give another --out"
    assert (code, err.splitlines()[-1]) == (2, said)
    assert (tmp_path / "shop" / "shop.inter").read_bytes() == before


def test_an_id_that_the_file_cannot_hold_leaves_nothing_behind(tmp_path, capsys):
    rows = "".join(f'{user},"a ""{item}"""\n' for user in "uvw" for item in range(4))
    (tmp_path / "quoted.csv").write_text("user_id,item_id\n" + rows)
    code, _, err = export(capsys, tmp_path / "quoted.csv", tmp_path / "out" / "deep")
    assert code == 2 and "holds a tab, a line break or a quote" in err
    assert not (tmp_path / "out").exists()

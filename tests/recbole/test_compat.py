from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from recbft.errors import UserError
from recbft.recbole import checkpoints, compat


@pytest.mark.parametrize("needed", [True, False])
def test_a_patch_is_applied_and_logged_where_it_is_needed(needed, caplog):
    changed = []
    compat.patch("some.module", "a reason", lambda module: needed)(changed.append)
    module, consider = compat.PATCHES.pop()
    with caplog.at_level("INFO", "recbft.recbole.compat"):
        consider(sys)
    assert module == "some.module" and changed == [sys] * needed
    assert caplog.messages == ["some.module patched: a reason"] * needed


def test_recbole_of_other_ways_needs_no_alias():
    class Config:
        def compatibility_settings(self):
            return np.float64

    assert not compat._asks_for_aliases_that_numpy_lacks(SimpleNamespace(Config=Config))
    assert not compat._asks_for_aliases_that_numpy_lacks(SimpleNamespace(Config=object))


def test_no_stand_in_is_left_in_the_modules():
    ray = sys.modules.get("ray")
    assert ray is None or hasattr(ray, "__file__")


def test_torch_load_of_the_process_is_torchs_own():
    assert torch.load.__module__ == "torch.serialization"
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ


class Shell:
    """What a harmful file does: it calls a function while it is read."""

    def __reduce__(self):
        return os.system, ("true",)


class Attribute:
    def __reduce__(self):
        return getattr, (torch.Size, "numel")


@pytest.mark.parametrize("payload", [Shell(), Attribute(), SimpleNamespace(), os.path.join, pickle.Unpickler])
def test_a_checkpoint_that_asks_for_anything_else_is_refused(payload):
    file = io.BytesIO()
    torch.save({"config": payload}, file, pickle_protocol=4)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="the checkpoint asks for"):
        checkpoints.load_checkpoint(file)


class Program(torch.nn.Module):
    """What a harmful file of TorchScript does: it is handed on, and writes a file while it is read."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self):
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]):
        self.path, self.training = state
        torch.save(torch.zeros(1), self.path)

    def forward(self, x):
        return x


@pytest.mark.parametrize("by_path", [True, False])
def test_a_program_in_the_place_of_a_checkpoint_is_refused_before_it_runs(tmp_path, by_path):
    harmed, file = tmp_path / "harmed", tmp_path / "model.pth"
    torch.jit.script(Program(str(harmed))).save(str(file))
    with pytest.raises(pickle.UnpicklingError, match="the file is a TorchScript program"):
        checkpoints.load_checkpoint(str(file) if by_path else io.BytesIO(file.read_bytes()))
    assert not harmed.exists()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_as_whichever_python_wrote_them(module):
    from recbft.recbole.unpickling import CheckpointUnpickler

    pickled = b"c" + module.encode() + b"\nPosixPath\n(U\x01/U\x01atR."
    assert CheckpointUnpickler(io.BytesIO(pickled)).load() == Path("/a")


@pytest.mark.parametrize("name", ["GRU4Rec", "SLIMElastic", "RaCT"])
def test_a_checkpoint_of_recboles_own_models_is_read(name, settings):
    import glob

    from recbole.quick_start import load_data_and_model, run_recbole

    changes = {"train_neg_sample_args": None, "load_col": {"inter": ["user_id", "item_id", "timestamp"]}}
    result = run_recbole(model=name, dataset="tiny", config_dict={**settings, **changes})
    file = glob.glob(f"{settings['checkpoint_dir']}/*.pth")[0]
    config, model, *_ = load_data_and_model(file)
    assert config["model"] == name and type(model).__name__ == name and result["test_result"]


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """A data_path with ratings, features and a knowledge graph, for the models that keep something of them."""
    folder = tmp_path_factory.mktemp("features")
    rows = {
        "inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
        + [f"u{u}\ti{(7 * u + k) % 30}\t{1 + k % 5}\t{100 * u + k}" for u in range(30) for k in range(12)],
        "item": [
            "item_id:token\tkind:token_seq\tprice:float",
            *(f"i{i}\tk{i % 3} k{i % 4}\t{i / 3}" for i in range(30)),
        ],
        "kg": ["head_id:token\trelation_id:token\ttail_id:token"]
        + [f"e{e}\tr{k}\te{(7 * e + k) % 40}" for e in range(40) for k in range(3)],
        "link": ["item_id:token\tentity_id:token", *(f"i{i}\te{i}" for i in range(30))],
    }
    (folder / "rich").mkdir()
    for kind, lines in rows.items():
        (folder / "rich" / f"rich.{kind}").write_text("\n".join(lines) + "\n")
    return folder


GRAPH = {"kg": ["head_id", "relation_id", "tail_id"], "link": ["item_id", "entity_id"]}
LABELLED = {
    "train_neg_sample_args": None,
    "threshold": {"rating": 3}, "metrics": ["AUC"], "valid_metric": "AUC",
    "eval_args": {"mode": "labeled", "split": {"LS": "valid_and_test"}, "order": "TO", "group_by": None},
}  # fmt: skip
SEQUENTIAL = {"train_neg_sample_args": None, "loss_type": "CE", "selected_features": ["kind"]}
KEEPING = {  # every model of RecBole 1.2.1 that keeps more than weights and can be built with what is installed here
    **dict.fromkeys(["AsymKNN", "DGCF", "DMF", "EASE", "ItemKNN", "Pop", "SGL", "SLIMElastic"]),
    **dict.fromkeys(["KGCN", "KGNNLS", "RippleNet"], GRAPH),
    **dict.fromkeys(["FDSA", "GRU4RecF", "SASRecF"], SEQUENTIAL),
    **dict.fromkeys(["DIEN", "DIN"], LABELLED),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_a_model_keeps_beside_its_weights_is_read(name, features, prepared):
    from recbole.quick_start import load_data_and_model
    from recbole.utils import get_model, get_trainer

    changes = dict(KEEPING[name] or {})
    columns = {"inter": ["user_id", "item_id", "rating", "timestamp"], "item": ["item_id", "kind", "price"]}
    columns |= {kind: changes.pop(kind) for kind in GRAPH if kind in changes}
    config, parts = prepared(name, "rich", data_path=str(features), load_col=columns, embedding_size=8, **changes)
    model = get_model(name)(config, parts[0]._dataset)
    trainer = get_trainer(config["MODEL_TYPE"], name)(config, model)
    trainer._save_checkpoint(0, verbose=False)
    trainer.tensorboard.close()
    read = load_data_and_model(trainer.saved_model_file)[1]
    assert model.other_parameter_name and read.state_dict().keys() == model.state_dict().keys()
    for key, kept in model.other_parameter().items():
        assert type(getattr(read, key)) is type(kept) and repr(getattr(read, key)) == repr(kept)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_checkpoint_may_hold_a_layer_that_keeps_its_data_set(protocol, prepared):
    from recbole.model.layers import FeatureSeqEmbLayer

    train = prepared("GRU4Rec", train_neg_sample_args=None, load_col=None)[1][0]
    layer = FeatureSeqEmbLayer(train._dataset, 4, ["user_id"], "sum", "cpu")
    file = io.BytesIO()
    torch.save({"other_parameter": {"feature_embed_layer": layer}}, file, pickle_protocol=protocol)
    file.seek(0)
    read = checkpoints.load_checkpoint(file)["other_parameter"]["feature_embed_layer"]
    assert all(torch.equal(*pair) for pair in zip(read.parameters(), layer.parameters(), strict=True))


def test_a_checkpoint_of_a_model_class_of_ones_own_is_read_with_paths_in_its_config(settings):
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.model.sequential_recommender import STAMP
    from recbole.trainer import Trainer

    Mine = type("Mine", (STAMP,), {"__module__": __name__})
    changes = {"train_neg_sample_args": None, "load_col": None, "loss_type": "CE", "embedding_size": 8}
    paths = {key: Path(settings[key]) for key in ("data_path", "checkpoint_dir")}
    evaluation = {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full", "group_by": "user"}
    settings = {**settings, **changes, **paths, "eval_args": evaluation}
    config = Config(model=Mine, dataset="tiny", config_dict=settings)
    train, valid, test = data_preparation(config, create_dataset(config))
    trainer = Trainer(config, Mine(config, train._dataset))
    globals()["Mine"] = Mine
    trainer.fit(train, valid, verbose=False)
    assert trainer.evaluate(test)["hit@10"] >= 0
    trainer.tensorboard.close()


@pytest.mark.parametrize("part", ["none of it", "its first half", "another file"])
def test_what_is_no_whole_checkpoint_is_called_so(part, tmp_path):
    from recbole.quick_start import load_data_and_model
    from recbole.trainer import trainer

    file = tmp_path / "mine.pth"
    torch.save({"weight": torch.zeros(9)}, file)
    whole = file.read_bytes()
    file.write_bytes(
        {"none of it": b"", "its first half": whole[: len(whole) // 2], "another file": b"a,b\n1,2\n"}[part]
    )
    for read in (trainer.torch.load, load_data_and_model):
        with pytest.raises(UserError, match=r"mine\.pth is not a whole checkpoint: PyTorch writes a zip archive"):
            read(str(file))


def test_a_loader_that_is_held_by_name_already_reads_checkpoints():
    # ray is stood in for, as nothing of ours is there yet to do without it.
    code = (
        "import sys, types; ray = sys.modules['ray'] = types.ModuleType('ray'); ray.tune = None; "
        "from recbole.quick_start import load_data_and_model; import recbft.recbole; "
        "from recbft.recbole import checkpoints; checkpoints.load_data_and_model = lambda file: f'read {file}'; "
        "print(load_data_and_model('model.pth'))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "read model.pth"


def test_missing_values_are_filled_and_sequences_counted(prepared, at_home):
    data = at_home / "gaps"
    data.mkdir()
    rows = [f"{user}\t{item}\t{10 * user + item}" for user in range(1, 6) for item in range(1, 6)]
    (data / "gaps.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "\n".join(rows) + "\n")
    items = ["1\tred big\t1.5\tx", "2\tblue\t\t", "3\t\t4.5\ty"]
    header = "item_id:token\tcolours:token_seq\tprice:float\tkind:token\n"
    (data / "gaps.item").write_text(header + "\n".join(items) + "\n")
    loaded = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "colours", "price", "kind"]}
    _, (train, _, _) = prepared(
        dataset="gaps", data_path=str(at_home), load_col=loaded, filter_inter_by_user_or_item=False
    )
    feature = train._dataset.get_item_feature()
    number = train._dataset.field2token_id["item_id"]
    price = {item: feature["price"][number[item]].item() for item in "12345"}
    assert price == {"1": 1.5, "2": 3.0, "3": 4.5, "4": 3.0, "5": 3.0}
    lengths = [(feature["colours"][number[item]] > 0).sum().item() for item in "12345"]
    assert lengths == [2, 1, 0, 0, 0]
    assert feature["kind"][number["2"]] == 0 and feature["price"].isfinite().all()


def test_trials_of_pandas_agree_with_its_version():
    newer = int(pd.__version__.split(".")[0]) >= 3
    assert compat._filling_a_column_leaves_the_frame(None) == newer == compat._len_is_of_the_column(None)


@pytest.mark.parametrize("wrong", ["import a_module_that_is_missing", "import numpy; numpy.bool9"])
def test_a_ray_that_does_not_start_is_done_without(wrong, tmp_path):
    assert import_beside_ray(wrong, tmp_path) == "without ray"


def test_a_requirement_that_is_missing_beside_a_ray_that_starts_is_named(tmp_path):
    said = import_beside_ray("report = print", tmp_path, before="sys.modules['texttable'] = None; ")
    assert said.startswith("ModuleNotFoundError: RecBole needs 'texttable', which is not installed")


def import_beside_ray(tune: str, folder: Path, before: str = "") -> str:
    """What comes of importing RecBole's quick start in a new process, with a ray whose tune is this code."""
    (folder / "ray").mkdir()
    (folder / "ray" / "__init__.py").touch()
    (folder / "ray" / "tune.py").write_text(tune)
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); {before}import recbft.recbole\n"
        "try: import recbole.quick_start; print('with' if 'ray' in sys.modules else 'without', 'ray')\n"
        "except Exception as error: print(f'{type(error).__name__}: {error}')"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()

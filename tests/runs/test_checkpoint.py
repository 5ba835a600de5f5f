from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from recbft.errors import UserError
from recbft.runs import checkpoint
from recbft.runs.checkpoint import TrainState, check_dataset, file_parts, flatten, restore, vocabulary_hash


def make_state(epoch=1, **changes):
    plain = {
        "step": 10 * epoch, "seed": 3, "dataset": "small", "content_hash": "c" * 64, "vocabulary_hash": "v" * 64,
        "config_hash": "f" * 64,
    }  # fmt: skip
    return TrainState(epoch=epoch, **{**plain, **changes})


def make_run(seed=0, **options):
    """A small model and optimiser with two groups after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=1e-3, betas=(0.8, 0.98), **options)
    train(model, optimizer, 3)
    return model, optimizer


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(11, 5)).square().sum().backward()
        optimizer.step()


def save(folder, model, optimizer, state, **more):
    known = {"model_state": model.state_dict(), "optimizer_state": optimizer.state_dict(), "state": state}
    write(folder, **{**known, "rng_state": torch.get_rng_state(), **more})


def write(folder, **parts):
    checkpoint.write(folder, checkpoint.snapshot(**parts))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True, "amsgrad": True}])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, options):
    model, optimizer = make_run(**options)
    save(tmp_path / "checkpoint", model, optimizer, make_state())
    train(model, optimizer, 4)

    other, other_optimizer = make_run(seed=1, **options)
    loaded = checkpoint.load(tmp_path / "checkpoint")
    other.load_state_dict(loaded.model_state)
    other_optimizer.load_state_dict(loaded.optimizer_state)
    torch.set_rng_state(loaded.rng_state)
    train(other, other_optimizer, 4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_the_plain_part_comes_back(tmp_path):
    model, optimizer = make_run()
    state = make_state(4, best_metric=0.1 + 0.2, best_epoch=2, bad_epochs=2)
    save(tmp_path, model, optimizer, state)
    assert checkpoint.load(tmp_path).state == checkpoint.load_state(tmp_path) == state
    assert state.recbft_version


def test_weights_that_share_memory_are_saved(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    tied = {
        "a": weight,
        "b": weight,
        "row": weight[1],
        "turned": weight.T,
        "none": torch.empty(0),
        "one": torch.tensor(2),
    }
    write(tmp_path, model_state=tied, optimizer_state={}, rng_state=torch.get_rng_state(), state=make_state())
    back = checkpoint.load(tmp_path).model_state
    assert set(back) == set(tied) and all(torch.equal(back[name], value) for name, value in tied.items())


def test_the_best_weights_are_kept_until_better_ones_come(tmp_path):
    model, optimizer = make_run()
    save(tmp_path, model, optimizer, make_state(1))
    with pytest.raises(UserError, match="holds no best weights: training stopped before its first validation"):
        checkpoint.load_best(tmp_path)
    best = {name: value.clone() for name, value in model.state_dict().items()}
    save(tmp_path, model, optimizer, make_state(2), best_model_state=best)
    file = next(tmp_path.glob("best-*"))
    written = file.stat().st_mtime_ns
    train(model, optimizer, 1)
    save(tmp_path, model, optimizer, make_state(3))
    assert file.stat().st_mtime_ns == written
    assert all(torch.equal(value, best[name]) for name, value in checkpoint.load_best(tmp_path).items())
    save(tmp_path, model, optimizer, make_state(4), best_model_state=model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in checkpoint.load_best(tmp_path).items())


def test_best_weights_that_a_training_replaces_while_they_are_read_are_read_again(tmp_path, monkeypatch):
    model, optimizer = make_run()
    folder, read = tmp_path / "checkpoint", checkpoint._read_tensors
    save(folder, model, optimizer, make_state(1), best_model_state=model.state_dict())

    def read_late(*asked):
        monkeypatch.setattr(checkpoint, "_read_tensors", read)
        train(model, optimizer, 1)
        save(folder, model, optimizer, make_state(2), best_model_state=model.state_dict())
        return read(*asked)

    monkeypatch.setattr(checkpoint, "_read_tensors", read_late)
    assert torch.equal(checkpoint.load_best(folder)["0.weight"], model.state_dict()["0.weight"])


def test_superseded_and_half_written_files_go(tmp_path):
    model, optimizer = make_run()
    (tmp_path / ".epoch-00001-abc.safetensors.1234.tmp").write_bytes(b"half")
    for epoch in (1, 2, 3):
        save(tmp_path, model, optimizer, make_state(epoch), best_model_state=model.state_dict())
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 3 and names[0].startswith("best-00003-") and names[1].startswith("epoch-00003-")


def test_what_a_kill_right_after_a_save_left_goes_when_the_run_is_taken_up(tmp_path):
    model, optimizer = make_run()
    save(tmp_path, model, optimizer, make_state(2), best_model_state=model.state_dict())
    kept = sorted(os.listdir(tmp_path))
    (tmp_path / "best-00001-abc.safetensors").write_bytes(b"superseded")
    checkpoint.tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == kept


def test_the_same_epoch_can_be_saved_again(tmp_path):
    model, optimizer = make_run()
    save(tmp_path, model, optimizer, make_state(1))
    train(model, optimizer, 1)
    save(tmp_path, model, optimizer, make_state(1, step=11))
    assert torch.equal(checkpoint.load(tmp_path).model_state["0.weight"], model[0].weight)


def test_a_failed_save_leaves_the_state_before_it(tmp_path, monkeypatch):
    model, optimizer = make_run()
    save(tmp_path, model, optimizer, make_state(1), best_model_state=model.state_dict())
    before = checkpoint.load(tmp_path).model_state
    train(model, optimizer, 1)
    replace, calls = os.replace, []

    def stop_at(place):
        def broken(source, target):
            calls.append(target)
            if len(calls) == place:
                raise KeyboardInterrupt
            replace(source, target)

        return broken

    for place in (1, 2, 3):
        calls.clear()
        monkeypatch.setattr(os, "replace", stop_at(place))
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, model, optimizer, make_state(2), best_model_state=model.state_dict())
        loaded = checkpoint.load(tmp_path)
        assert loaded.state.epoch == 1 and torch.equal(loaded.model_state["0.weight"], before["0.weight"])
        assert torch.equal(checkpoint.load_best(tmp_path)["0.weight"], before["0.weight"])
    monkeypatch.undo()
    save(tmp_path, model, optimizer, make_state(2))
    assert checkpoint.load(tmp_path).state.epoch == 2 and len(os.listdir(tmp_path)) == 3


TENSORS = {
    "empty": torch.zeros(0, 3),
    "matrix": torch.arange(12.0).view(3, 4),
    "number": torch.tensor(5),
    "wide": torch.tensor([1 / 3], dtype=torch.float64),
    "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
    "short": torch.tensor([[1.0], [float("nan")]], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "random state": torch.arange(7, dtype=torch.uint8),
    'name with é and "quotes"': torch.ones(1, dtype=torch.int32),
}


def test_the_library_reads_back_every_name_type_shape_and_number():
    found = safetensors.torch.load(b"".join(file_parts(TENSORS)))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
    assert found["number"] == 5
    assert safetensors.torch.load(b"".join(file_parts({}))) == {}


def test_the_parts_are_the_tensors_own_memory_each_at_a_multiple_of_its_width():
    header, *parts = file_parts(TENSORS)
    assert len(header) % 8 == 0
    at = {part.obj.ctypes.data: len(header) + sum(map(len, parts[:i])) for i, part in enumerate(parts) if len(part)}
    for tensor in TENSORS.values():
        if tensor.numel():
            assert at[tensor.data_ptr()] % tensor.element_size() == 0


def round_trip(value):
    tensors = {}
    tree = json.loads(json.dumps(flatten(value, "x", tensors)))
    return restore(tree, tensors), tensors


def test_plain_values_tuples_and_whole_number_keys_come_back_as_they_were():
    value = {
        0: {"betas": (0.9, 0.999), "lr": 1e-3, "fused": None, "amsgrad": False},
        "params": [0, 1],
        "n": (1, (2,), []),
    }
    back, tensors = round_trip(value)
    assert back == value and tensors == {}
    assert isinstance(back[0]["betas"], tuple) and back[0]["amsgrad"] is False


def test_tensors_are_named_by_their_place():
    value = {"state": {0: {"step": torch.tensor(3.0)}}, "more": [torch.ones(2)]}
    back, tensors = round_trip(value)
    assert set(tensors) == {"x.state.0.step", "x.more.0"}
    assert back["state"][0]["step"] is value["state"][0]["step"]


def test_a_dictionary_that_looks_like_a_marker_is_not_taken_for_one():
    value = {"tensor": "x", "map": [1], "tuple": []}
    assert round_trip(value)[0] == value


def test_what_cannot_be_held_is_refused_by_name():
    with pytest.raises(TypeError, match=r"x\.hook is a function, which a checkpoint cannot hold"):
        flatten({"hook": round_trip}, "x", {})


@pytest.fixture
def saved(tmp_path):
    model, optimizer = make_run()
    save(tmp_path, model, optimizer, make_state(1), best_model_state=model.state_dict())
    return tmp_path


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    assert not checkpoint.exists(tmp_path)
    with pytest.raises(UserError, match=r"holds no checkpoint: state.json is missing; train into a new folder"):
        checkpoint.load(tmp_path)
    with pytest.raises(UserError, match=r"holds no checkpoint: state.json is missing"):
        checkpoint.best_digest(tmp_path)


def test_a_truncated_tensor_file_is_refused_by_name(saved):
    file = next(saved.glob("epoch-*"))
    size = file.stat().st_size
    os.truncate(file, size - 100)
    with pytest.raises(
        UserError, match=rf"{file.name} has {size - 100} bytes where {size} were written; .*train again"
    ):
        checkpoint.load(saved)


@pytest.mark.parametrize("kind", ["epoch", "best"])
def test_a_changed_tensor_file_is_refused_by_name(saved, kind):
    file = next(saved.glob(f"{kind}-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file.name} was changed after it was written \(its SHA-256 differs\)"):
        checkpoint.load(saved) if kind == "epoch" else checkpoint.load_best(saved)


def test_a_missing_tensor_file_is_refused_by_name(saved):
    file = next(saved.glob("epoch-*"))
    file.unlink()
    with pytest.raises(UserError, match=rf"{file.name} is missing; the checkpoint is damaged: restore the file"):
        checkpoint.load(saved)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"{}", b"3", b"[" * 200_000])
def test_a_truncated_state_is_refused_by_name(saved, content):
    (saved / "state.json").write_bytes(content)
    with pytest.raises(UserError, match=r"state.json is truncated or is not a checkpoint's state; "):
        checkpoint.load(saved)


@pytest.mark.parametrize("metric", [1.0, math.nan, math.inf])
def test_a_changed_state_is_refused_by_name(saved, metric):
    file = saved / "state.json"
    content = json.loads(file.read_bytes())
    content["state"]["best_metric"] = metric
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"state.json was changed after it was written; the checkpoint is damaged"):
        checkpoint.load_state(saved)


@pytest.mark.parametrize("file", ["/dev/zero", "../other.safetensors", "epoch-00001-0123abcd.safetensors/x", 3, None])
def test_a_state_that_names_a_file_elsewhere_is_refused(saved, file):
    content = json.loads((saved / "state.json").read_bytes())
    del content["sha256"]
    content["tensors"]["file"] = file
    rewrite(saved, content)
    with pytest.raises(UserError, match=r"state.json was changed after it was written; the checkpoint is damaged"):
        checkpoint.load(saved)


def test_a_tree_that_is_none_is_refused(saved):
    content = json.loads((saved / "state.json").read_bytes())
    del content["sha256"]
    for tree in ({"tensor": "gone"}, {"map": 3}, {}):
        content["trees"]["rng"] = tree
        rewrite(saved, content)
        with pytest.raises(UserError, match=r"state.json is truncated or is not a checkpoint's state"):
            checkpoint.load(saved)


def rewrite(folder, content):
    """As someone would who knows how the state's hash is made."""
    (folder / "state.json").write_text(json.dumps({"sha256": checkpoint._digest(content), **content}))


def test_a_state_of_the_format_before_is_read(saved):
    content = json.loads((saved / "state.json").read_bytes())
    del content["sha256"], content["state"]["digits_from"]
    rewrite(saved, {**content, "format": 2})
    assert checkpoint.load_state(saved).digits_from == {}


def test_a_state_of_another_format_is_refused(saved):
    file = saved / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "format": 99}))
    with pytest.raises(UserError, match=r"has format 99, and this recbft reads formats 2 and 3; use the recbft that"):
        checkpoint.load(saved)


def test_data_other_than_the_checkpoints_are_refused_with_both_names():
    state = make_state()
    same = {"dataset": "small", "content_hash": "c" * 64, "vocabulary_hash": "v" * 64, "folder": "runs/a"}
    check_dataset(state, **same)
    check_dataset(state, **{**same, "dataset": "a copy under another name"})
    with pytest.raises(
        UserError, match=r"runs/a is a checkpoint of data set 'small' .* this is another data set, 'beauty'"
    ):
        check_dataset(state, **{**same, "dataset": "beauty", "vocabulary_hash": "w" * 64})
    with pytest.raises(UserError, match=r"this is a changed vocabulary of 'small' \(wwwwwwwwwwww\)"):
        check_dataset(state, **{**same, "vocabulary_hash": "w" * 64})
    with pytest.raises(
        UserError, match=r"with content cccccccccccc, but 'small' as loaded has dddddddddddd; load the data"
    ):
        check_dataset(state, **{**same, "content_hash": "d" * 64})


def test_a_vocabulary_is_its_ids_in_order_by_their_text():
    known = vocabulary_hash(np.array([7, 12]))
    assert known == vocabulary_hash(np.array(["7", "12"], dtype=object)) == vocabulary_hash(np.array(["7", "12"]))
    others = ([12, 7], [71, 2], [7], [7, 12, 1])
    assert len({known, *(vocabulary_hash(np.array(one)) for one in others)}) == 5


KILLED_AGAIN_AND_AGAIN = """
    import os, random, signal, sys, time
    import torch
    from recbft.runs import checkpoint

    def save(epoch):
        weights = {"w": torch.full((2000,), float(epoch))}
        state = checkpoint.TrainState(epoch=epoch, step=epoch, seed=0, dataset="d", content_hash="c",
                                      vocabulary_hash="v", config_hash="f", best_epoch=epoch - epoch % 2)
        taken = checkpoint.snapshot(model_state=weights, optimizer_state={"state": {0: {"m": weights["w"] + 1}}},
                                    rng_state=torch.zeros(4, dtype=torch.uint8), state=state,
                                    best_model_state=weights if epoch % 2 == 0 else None)
        checkpoint.write(folder, taken)

    folder, rng, longest = sys.argv[1], random.Random(0), 0.04
    save(0)
    epochs = [0]
    for _ in range(20):
        child = os.fork()
        if child == 0:
            for epoch in range(epochs[-1] + 1, 10**9):
                save(epoch)
        time.sleep(rng.uniform(0.001, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded = checkpoint.load(folder)
        epoch = loaded.state.epoch
        assert loaded.model_state["w"].tolist() == [float(epoch)] * 2000
        assert loaded.optimizer_state["state"][0]["m"].tolist() == [epoch + 1.0] * 2000
        assert checkpoint.load_best(folder)["w"].tolist() == [float(loaded.state.best_epoch)] * 2000
        assert epoch >= epochs[-1]
        longest *= 1.1 if epoch == epochs[-1] else 1  # where others have the cores a save takes longer
        epochs.append(epoch)
    save(epochs[-1] + 1)
    assert len(os.listdir(folder)) == 3, os.listdir(folder)
    print(epochs[-1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_a_whole_state(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED_AGAIN_AND_AGAIN))
    done = subprocess.run(
        [sys.executable, script, tmp_path / "checkpoint"], capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0  # children did save between kills; how often depends on the machine's load

"""The checkpoints of RecBole, which hold its Config and other objects: torch 2.6 and later refuses to read them.

``load_checkpoint`` reads them and makes only the objects known from there; ``compat`` puts it in the place of
``torch.load`` in RecBole's own two modules, and nowhere else. Some models keep more than weights: sparse matrices,
arrays, whole layers.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
import warnings
import zipfile
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from recbft.errors import UserError
from recbft.recbole.hooks import Changed


def are_refused(module: Any) -> bool:
    """Whether torch.load turns down what RecBole's trainer saves: objects, in pickle protocol 4."""
    import torch

    file = io.BytesIO()
    torch.save({"config": SimpleNamespace()}, file, pickle_protocol=4)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(file)
        except pickle.UnpicklingError:
            return True
    return False


def load_checkpoint(file: Any, **given: Any) -> Any:
    """``torch.load`` for a checkpoint of RecBole's, which holds its Config: only the objects known from there are made.

    Raises:
        UserError: the file is no checkpoint, or the beginning of one.
        pickle.UnpicklingError: the file asks for anything else, or is a program.
    """
    import torch

    from recbft.recbole.unpickling import CheckpointUnpickler

    is_path = isinstance(file, (str, os.PathLike))
    if (not is_path or os.path.isfile(file)) and not _is_archive(file):
        raise UserError(
            f"{os.fspath(file) if is_path else 'the file'} is not a whole checkpoint: PyTorch writes a zip archive, "
            "and this is none, or the beginning of one that was cut off; train again, or take another of the files in "
            "checkpoint_dir"
        )
    if _is_program(file):
        raise pickle.UnpicklingError(
            "the file is a TorchScript program, which runs while it is read, and no checkpoint of RecBole's; load only "
            "files that you have made"
        )
    reader = SimpleNamespace(Unpickler=CheckpointUnpickler, __name__=__name__)
    return torch.load(file, **{**given, "pickle_module": reader, "weights_only": False})


def _is_archive(file: Any) -> bool:
    """Whether the file is a whole zip archive; what does not begin as one is read in another way by ``torch.load``."""
    with nullcontext(file) if hasattr(file, "read") else open(file, "rb") as opened:
        start = opened.tell()
        begins = opened.read(4) == b"PK\x03\x04"
        opened.seek(start)
        whole = begins and zipfile.is_zipfile(opened)
        opened.seek(start)
    return whole


def _is_program(file: Any) -> bool:
    """Whether ``torch.load`` would hand this file on to ``torch.jit.load``, past any unpickler."""
    import torch

    with nullcontext(file) if hasattr(file, "read") else open(file, "rb") as opened:
        start = opened.tell()
        # The names as torch.load reads them: another reader of zip archives may find others.
        found = "constants.pkl" in torch._C.PyTorchFileReader(opened).get_all_records()
        opened.seek(start)
    return found


def read_in_trainer(trainer: Any) -> None:
    """Let RecBole's trainer read checkpoints by ``load_checkpoint``."""
    trainer.torch = Changed(trainer.torch, load=load_checkpoint)


def read_in_quick_start(quick_start: Any) -> None:
    """Let ``load_data_and_model`` read checkpoints by ``load_checkpoint``, also where a caller holds it already."""

    def read(model_file: str) -> tuple[Any, ...]:
        from recbft.recbole.checkpoints import load_data_and_model

        return load_data_and_model(model_file)

    quick_start.load_data_and_model.__code__ = read.__code__


def load_data_and_model(model_file: str) -> tuple[Any, ...]:
    """The config, model, dataset and the three data loaders of a saved model.

    RecBole itself unpickles a data set, loaders or (LDiffRec) item embeddings that lie saved where the config says:
    load those that you have made.
    """
    from recbft.models import OF_BACKBONES
    from recbft.recbole.adapter import Adapter

    quick_start = importlib.import_module("recbole.quick_start.quick_start")
    checkpoint = load_checkpoint(model_file)
    config: Any = checkpoint.get("config") if type(checkpoint) is dict else None
    model_class = _model_of(config, model_file)
    quick_start.init_seed(config["seed"], config["reproducibility"])
    quick_start.init_logger(config)
    dataset = quick_start.create_dataset(config)
    parts = quick_start.data_preparation(config, dataset)
    quick_start.init_seed(config["seed"], config["reproducibility"])
    state = checkpoint["state_dict"]
    # What a model of ours knows of each item is among its weights, whatever features the config names.
    content = state.get(f"recommender.{OF_BACKBONES}") if issubclass(model_class, Adapter) else None
    known = {} if content is None else {"content": content}
    model = model_class(config, parts[0]._dataset, **known).to(config["device"])
    model.load_state_dict(state)
    model.load_other_parameter(checkpoint.get("other_parameter"))
    return config, model, dataset, *parts


def _model_of(config: Any, file: str) -> Any:
    """The model class that a checkpoint's config names; a teacher is checked too, as RecBole evaluates its name."""
    from recbole.config import Config
    from recbole.utils import get_model

    from recbft.recbole.checkpoint_parts import is_model

    values = vars(config).get("final_config_dict") if type(config) is Config else None

    def named(key: str) -> str:
        value = values.get(key) if type(values) is dict else None
        if type(value) is not str or not value.isidentifier():
            raise UserError(
                f"{file} holds no config of RecBole's that names its {key} ({key} is {value!r}); take a file that "
                "RecBole's trainer has written"
            )
        return value

    found = get_model(named("model"))
    if not is_model(found):
        raise UserError(f"{file} has model {named('model')!r}, which is none; take a file that RecBole's trainer wrote")
    if found.__name__ == "KD_DAGFM":
        teacher = vars(sys.modules[found.__module__]).get(named("teacher"))
        if not isinstance(teacher, type) or teacher.__module__ != found.__module__:
            raise UserError(f"{file} has teacher {named('teacher')!r}; set one of KD_DAGFM's own, such as 'CrossNet'")
    return found

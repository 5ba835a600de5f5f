"""The checkpoints of RecBole, which hold its Config and other objects: torch 2.6 and later refuses to read them.

``load_checkpoint`` reads them and makes only the classes known from there; ``compat`` puts it in the place of
``torch.load`` in RecBole's own two modules, and nowhere else. Some models keep more than weights: sparse matrices,
arrays, whole layers.
"""

from __future__ import annotations

import enum
import importlib
import io
import os
import pickle
import sys
import warnings
import zipfile
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

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


def _enum_member(kind: Any, name: str) -> Any:
    if isinstance(kind, enum.EnumMeta):
        return kind[name]
    raise pickle.UnpicklingError(f"the checkpoint asks for attribute {name!r} of {kind!r}; load only your own files")


PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
MOVED = {  # from where a checkpoint may have it to where every Python does
    "__builtin__": "builtins",  # of older protocols
    "pathlib._local": "pathlib",  # of Python 3.13
}


_InPython: Any = pickle._Unpickler  # undocumented, but what Python has for this


class _CheckpointUnpickler(_InPython):  # type: ignore[misc]
    """Finds the classes that a checkpoint of RecBole is made of, and no other.

    An object of a package's class gets its state and nothing is called for it: RecBole's ``Config``, called, would
    evaluate the text it is given. So this is the unpickler in Python, which shows what is called.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)
    names: ClassVar[dict[str, set[str]]] = {
        "collections": {"OrderedDict", "defaultdict", "Counter"},
        "builtins": {"set", "frozenset", "slice", "complex", "range", "bytes", "bytearray", "list"},
        "_codecs": {"encode"},
        "logging": {"getLogger"},
        "torch": {"device", "Size", "dtype"},
        "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
        "torch.storage": {"UntypedStorage", "TypedStorage"},
        "numpy": {"dtype", "ndarray", "matrix"},
        "numpy.core.multiarray": {"scalar", "_reconstruct"},
        "numpy._core.multiarray": {"scalar", "_reconstruct"},
        "pathlib": PATHS,
        "yaml.loader": {"FullLoader"},
    }
    packages = (
        "recbole.config.",
        "recbole.data.",
        "recbole.model.",
        "recbole.utils.enum_type",
        "recbft.recbole.",
        "scipy.sparse.",
        "torch.nn.modules.",
    )

    def find_class(self, module: str, name: str) -> Any:
        module = MOVED.get(module, module)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11 pickles the member of an enumeration so
            return _enum_member
        if name in self.names.get(module, ()) or (module == "torch" and name.endswith("Storage")):
            return super().find_class(module, name)
        if module.startswith(self.packages) and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        own = getattr(sys.modules.get(module), name, None)
        if _is_model(own):
            return own
        raise pickle.UnpicklingError(
            f"the checkpoint asks for {module}.{name}, which RecBole's own models do not write; if the file is yours, "
            "set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment and PyTorch reads it whatever it holds"
        )

    def load_reduce(self) -> None:
        """Call what makes an object: of the packages' classes, enumerations alone are made so."""
        called = self.stack[-2]
        if self._gets_state(called) and not isinstance(called, enum.EnumMeta):
            raise pickle.UnpicklingError(f"the checkpoint calls {called!r}; load only files that you have made")
        super().load_reduce()

    def load_build(self) -> None:
        """Give an object its state; a class keeps its own."""
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError(f"the checkpoint changes {self.stack[-2]!r}; load only files you have made")
        super().load_build()

    def _instantiate(self, kind: Any, k: Any) -> None:
        raise pickle.UnpicklingError(f"the checkpoint calls {kind!r}; load only files that you have made")

    def _gets_state(self, called: Any) -> bool:
        return isinstance(called, type) and (called.__module__.startswith(self.packages) or _is_model(called))

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build


def _is_model(found: Any) -> bool:
    """Whether this is the class of a RecBole model, such as one that a user's script has defined."""
    from recbole.model.abstract_recommender import AbstractRecommender

    return isinstance(found, type) and issubclass(found, AbstractRecommender)


def load_checkpoint(file: Any, **given: Any) -> Any:
    """``torch.load`` for a checkpoint of RecBole's, which holds its Config: only the classes known from there are made.

    Raises:
        UserError: the file is no checkpoint, or the beginning of one.
        pickle.UnpicklingError: the file asks for anything else, or is a program.
    """
    import torch

    if isinstance(file, (str, os.PathLike)) and os.path.isfile(file) and not zipfile.is_zipfile(file):
        raise UserError(
            f"{os.fspath(file)} is not a whole checkpoint: PyTorch writes a zip archive, and this is none, or the "
            "beginning of one that was cut off; train again, or take another of the files in checkpoint_dir"
        )
    if _is_program(file):
        raise pickle.UnpicklingError(
            "the file is a TorchScript program, which runs while it is read, and no checkpoint of RecBole's; load only "
            "files that you have made"
        )
    reader = SimpleNamespace(Unpickler=_CheckpointUnpickler, __name__=__name__)
    return torch.load(file, **{**given, "pickle_module": reader, "weights_only": False})


def _is_program(file: Any) -> bool:
    """Whether ``torch.load`` would hand this file on to ``torch.jit.load``, past any unpickler."""
    import torch

    with nullcontext(file) if hasattr(file, "read") else open(file, "rb") as opened:
        start = opened.tell()
        is_archive = opened.read(4) == b"PK\x03\x04"
        opened.seek(start)
        # The names as torch.load reads them: another reader of zip archives may find others.
        found = is_archive and "constants.pkl" in torch._C.PyTorchFileReader(opened).get_all_records()
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

    RecBole itself unpickles a data set or loaders that lie saved where the config says: load those that you have made.
    """
    quick_start = importlib.import_module("recbole.quick_start.quick_start")
    checkpoint = load_checkpoint(model_file)
    config = checkpoint["config"]
    quick_start.init_seed(config["seed"], config["reproducibility"])
    quick_start.init_logger(config)
    dataset = quick_start.create_dataset(config)
    parts = quick_start.data_preparation(config, dataset)
    quick_start.init_seed(config["seed"], config["reproducibility"])
    model = quick_start.get_model(config["model"])(config, parts[0]._dataset).to(config["device"])
    model.load_state_dict(checkpoint["state_dict"])
    model.load_other_parameter(checkpoint.get("other_parameter"))
    return config, model, dataset, *parts

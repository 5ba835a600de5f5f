"""What is said when a run does not fit the memory: which tensor, how large it is, which setting makes it smaller."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

import torch

from recbft.datasets import Dataset
from recbft.errors import OneProcessError
from recbft.training.run_config import RunConfig

_SIZE = re.compile(r"allocate ([\d.]+) (bytes|[KMGTPE]iB)")  # in the words of PyTorch, for CPU and CUDA, and of numpy
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_GPU_PIECE = 2 * 1024**2  # PyTorch asks a GPU for multiples of so many bytes, and tells them to two places
# Where no exception of its own says so: PyTorch's on the CPU, CUDA's and Triton's, cuBLAS's, NCCL's.
_REFUSALS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "'out of memory'",
    "Storage size calculation overflowed",
)
_NUMBER_BYTES = 4  # parameters are float32
# What the parameters are shaped by; of equals the first is named.
_SHAPES = {
    "backbone": ("hidden_size", "inner_size", "max_length"),
    "mixing": ("latent_width", "width"),
    "moe": ("experts", "gate_width"),
}


@contextlib.contextmanager
def memory_explained(config: RunConfig, dataset: Dataset) -> Iterator[None]:
    """Turn the refusals of an allocator into one line.

    Raises:
        OneProcessError: there was one.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        raise OneProcessError(_explanation(error, config, dataset)) from error


def is_shortage(error: BaseException) -> bool:
    """Whether an allocator refused: Python's, numpy's, or PyTorch's for the CPU or a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in _REFUSALS)


def _explanation(error: BaseException, config: RunConfig, dataset: Dataset) -> str:
    frames = [
        (frame.f_globals["__name__"].removeprefix("recbft."), frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals["__name__"].startswith("recbft.") and frame.f_globals["__name__"] != __name__
    ]
    rooms = {module.partition(".")[0] for module, _ in frames}
    width = getattr(config.backbone, "hidden_size", None)
    length = f"backbone.max_length ({getattr(config.backbone, 'max_length', None)})"
    tensor, asked = "a tensor", _asked_for(error)
    if width is not None and asked is not None and _is_table(*asked, _table_sizes(dataset.num_items, width)):
        tensor = f"a tensor as large as the item table ({dataset.num_items:,} x {width})"
        doing, setting = "", f"backbone.hidden_size ({width})"
    elif "evaluation" in rooms and "models" not in rooms:
        doing, setting = " while users were ranked", f"evaluation.memory_mb ({config.evaluation.memory_mb:g})"
    elif "evaluation" in rooms:
        doing, setting = " while histories were read for ranking", length
    elif any(function == "build_model" for _, function in frames):
        doing, setting = " while the model was built", _largest_shape(config)
    else:
        key = "batch_size" if config.training.batch_targets is None else "batch_targets"
        doing, setting = " in a training step", f"training.{key} ({getattr(config.training, key)}) or {length}"
        if "models.losses" in {module for module, _ in frames} and getattr(config.backbone, "num_negatives", None):
            setting = f"backbone.num_negatives ({config.backbone.num_negatives}), {setting}"
    amount = "" if asked is None else f" of {_readable(round(asked[0]))}"
    maker = f" that {'.'.join(frames[-1])} makes" if frames else ""
    return f"out of memory{doing}: {tensor}{amount}{maker} does not fit; lower {setting}"


def _largest_shape(config: RunConfig) -> str:
    """The setting that says most about the size of the model: the largest of the widths and lengths it is built by."""
    shapes = {
        f"{section}.{key}": value
        for section, keys in _SHAPES.items()
        for key in keys
        if isinstance(value := getattr(getattr(config, section), key, None), int)
    }
    name = max(shapes, key=shapes.__getitem__, default="backbone.hidden_size")
    return f"{name} ({shapes.get(name)})"


def _asked_for(error: BaseException) -> tuple[float, int] | None:
    """Bytes, and how many of them the message counts by; None where it does not say."""
    found = _SIZE.search(str(error))
    if found is None:
        return None
    unit = 1024 ** _UNITS.index(found[2])
    return float(found[1]) * unit, unit


def _is_table(size: float, unit: int, tables: list[int]) -> bool:
    """Whether what was asked for may be as large as one of the tables, as exactly as the message says it."""
    if unit == 1:
        return size in tables
    return any(-0.01 * unit < size - table < 0.01 * unit + _GPU_PIECE for table in tables)


def _table_sizes(num_items: int, width: int) -> list[int]:
    """Bytes of the item vectors without padding, with it, and with a mask."""
    return [(num_items + more) * width * _NUMBER_BYTES for more in range(3)]


def _readable(size: int) -> str:
    power = min(len(_UNITS) - 1, max(0, size.bit_length() - 1) // 10)
    return f"{size} bytes" if power == 0 else f"{size / 1024**power:.1f} {_UNITS[power]}"

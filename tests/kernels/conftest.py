"""What tests of kernels share: which paths can be tried here, and memory that is full of NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recbft.kernels import c_library
from recbft.kernels.dispatch import interpreted, missing


def pytest_collection_modifyitems(items):
    """Leave out what asks for a path (``impl``) that this machine has not."""
    reasons = {"c": c_library.missing(), "triton": missing("triton")}
    for item in items:
        impl = getattr(item, "callspec", None) and item.callspec.params.get("impl")
        if isinstance(impl, str) and reasons.get(impl):
            item.add_marker(pytest.mark.skip(reason=reasons[impl]))


@pytest.fixture
def scratch_full_of_nan():
    """PyTorch fills new memory with NaN where it is asked to be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def runs_by_threads():
    """What a function returns of one thread, twice, and of more."""

    def with_threads(count, function):
        torch.set_num_threads(count)
        return function()

    threads = torch.get_num_threads()
    yield lambda function: [with_threads(count, function) for count in (1, 1, 2, 3)]
    torch.set_num_threads(threads)


@pytest.fixture
def larger_of_numbers(monkeypatch):
    """The larger or smaller of a number and NaN is the number, as on a GPU, where the interpreter has NaN."""
    if interpreted():
        builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
        for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
            monkeypatch.setattr(builder, name, lambda self, a, b, f=function: self.binary_op(a, b, f))

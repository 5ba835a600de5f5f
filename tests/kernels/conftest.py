"""What tests of kernels share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recbft.kernels.dispatch import interpreted


@pytest.fixture
def scratch_full_of_nan():
    """PyTorch fills new memory with NaN where it is asked to be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def larger_of_numbers(monkeypatch):
    """The larger or smaller of a number and NaN is the number, as on a GPU, where the interpreter has NaN."""
    if interpreted():
        builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
        for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
            monkeypatch.setattr(builder, name, lambda self, a, b, f=function: self.binary_op(a, b, f))

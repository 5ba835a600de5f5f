"""What tests of kernels share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def scratch_full_of_nan():
    """PyTorch fills new memory with NaN where it is asked to be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)

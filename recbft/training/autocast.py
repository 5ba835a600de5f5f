"""Training steps in mixed precision: products with learned weights in bfloat16, all else and every weight in float32.

bfloat16 has float32's range, so gradients need no scaling. Validation and evaluation stay in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16}


def autocast(name: str | None, device: torch.device) -> AbstractContextManager[Any]:
    """What ``training.autocast`` names, around the forward pass of a step; None leaves it in float32."""
    return nullcontext() if name is None else torch.autocast(device.type, dtype=DTYPES[name])

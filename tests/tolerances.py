"""How near two computations of one number have to be, by their dtype."""

from __future__ import annotations

from typing import Any

import torch

TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}

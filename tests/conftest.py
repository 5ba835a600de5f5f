"""Settings for all tests: no time limit per hypothesis example, since a busy machine is not a failing one.

Where there is no GPU, Triton kernels run in Triton's interpreter, which has to be asked for before they are made.
"""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("recbft", deadline=None)
settings.load_profile("recbft")

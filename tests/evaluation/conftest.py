"""Small data and models of every backbone and arm, far from their start and in float64, as the fixture ``lab``."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from recbft.datasets import Dataset
from recbft.evaluation import evaluate as evaluating
from recbft.evaluation import views
from recbft.models import MODELS, CoreConfig

ARMS = [(model, arm) for model in ("sasrec", "bert4rec", "hstu") for arm in ("published", "matched", "bft")]


def make_dataset(num_users=23, num_items=17, seed=0, *, shortest=3, longest=12):
    rng = np.random.default_rng(seed)
    rows = [(f"u{u}", int(i) * 10) for u in range(num_users)
            for i in rng.integers(1, num_items + 1, rng.integers(shortest, longest + 1))]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["user_id", "item_id"]).assign(timestamp=np.arange(len(rows)) * 60)
    return Dataset.from_frame(frame, name="tiny", time="timestamp")


def make_model(dataset, model="sasrec", arm="bft", *, core=None, seed=0, content=None, **backbone):
    """Warmed up, running means filled, nothing idle."""
    spec = MODELS[model]
    settings = {"hidden_size": 8, "max_length": 8, "dropout": 0.2, **spec.arms[arm], **backbone}
    chosen = CoreConfig(**{**spec.core, **(core or {})}) if arm in spec.precision_arms else None
    known = {} if content is None else {"content": content}
    counts = torch.from_numpy(dataset.training_counts)
    made = spec.build(spec.config(**settings), chosen, counts, seed=seed, **known).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.3)
            if name.endswith("noise_logits"):
                parameter.add_(8.0)
        for name, buffer in made.named_buffers():
            if name.endswith("mean_jacobian"):
                buffer.normal_(std=0.1, generator=generator)
    made.set_ramp(0.8)
    made.refresh()
    return made.eval()


@pytest.fixture(scope="session")
def lab():
    """The functions above."""
    return SimpleNamespace(dataset=make_dataset(), make_dataset=make_dataset, make_model=make_model, ARMS=ARMS)


@pytest.fixture
def histories_at_once(monkeypatch):
    """Sets how many histories are read at once."""

    def read(number):
        for module in (evaluating, views):
            monkeypatch.setattr(module, "HISTORIES_PER_BATCH", number)

    return read


@pytest.fixture(params=ARMS, ids=lambda pair: "-".join(pair))
def arm(request):
    """Every backbone in every arm: (model, arm)."""
    return request.param

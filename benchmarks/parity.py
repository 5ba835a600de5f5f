"""An arm with precision tracking equals the plain layer while its warm-up ramp is 0: the check before any timing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recbft.datasets import Dataset, leave_one_out
from recbft.datasets.batches import Batch, pack_histories
from recbft.errors import RunError
from recbft.models.contract import TrainableModel
from recbft.training.build import build_model
from recbft.training.run_config import RunConfig

HISTORIES = 64
# float32, relative to the largest entry: two paths that add up the same terms in another order differ by about 1e-6.
TOLERANCE = 1e-4


def check_parity(label: str, config: RunConfig, dataset: Dataset) -> float:
    """Loss, states and shared gradients of an arm at ramp 0 against the plain layer of equal seed, on one batch.

    Returns:
        The largest difference, relative to the largest entry of its kind (loss, states, all gradients).

    Raises:
        RunError: it exceeds ``TOLERANCE``; the message says where.
    """
    plain = replace(config, arm="matched", core=None, backbone=replace(config.backbone, recency_decay=False))
    batch = some_batch(config, dataset)
    tracked, expected = (values_and_gradients(_model(one, dataset), batch) for one in (config, plain))
    worst = 0.0
    # Some gradients are 0 but for rounding (that of a key bias): what counts is their size beside the others.
    largest = max(float(value.abs().max()) for name, value in expected.items() if name.startswith("gradient"))
    for name, value in expected.items():
        scale = largest if name.startswith("gradient") else float(value.abs().max())
        difference = float((tracked[name] - value).abs().max()) / scale
        if not difference <= TOLERANCE:  # NaN fails too
            raise RunError(
                f"{label} at ramp 0 differs from the plain layer by {difference:.1e} of the largest entry in {name} "
                f"(at most {TOLERANCE:.0e}); no time is taken before they agree"
            )
        worst = max(worst, difference)
    return worst


def some_batch(config: RunConfig, dataset: Dataset) -> Batch:
    """The first users' training events as one batch."""
    split = leave_one_out(dataset)
    users = (split.training_stop - split.training_start >= 2).nonzero()[0][:HISTORIES]
    stop = split.training_stop[users] - 1
    start = split.training_start[users].clip(min=stop - config.backbone.max_length)
    return pack_histories(dataset.items, start, stop, times=dataset.times, with_targets=True)


def values_and_gradients(model: TrainableModel, batch: Batch) -> dict[str, Tensor]:
    """Loss, user states and the gradient of every parameter, without dropout, at ramp 0."""
    model.eval()
    model.set_ramp(0.0)
    model.refresh()
    loss = model.loss(batch)
    loss.backward()
    with torch.no_grad():
        state = model.user_states(batch).state
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "user states": state, **gradients}


def _model(config: RunConfig, dataset: Dataset) -> TrainableModel:
    model = build_model(config, dataset)
    assert isinstance(model, TrainableModel)
    return model

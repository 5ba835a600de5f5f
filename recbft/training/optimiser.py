"""Adam in two groups: the backbone, and the precision channel at a higher rate without weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recbft.models.contract import TrainableModel
from recbft.training.config import TrainingConfig


def make_optimizer(model: TrainableModel, config: TrainingConfig) -> torch.optim.Adam:
    """The optimiser of a model that tells its precision parameters by ``is_precision_parameter(name)``."""
    return torch.optim.Adam(parameter_groups(model, config), lr=config.learning_rate, fused=True)


def parameter_groups(model: TrainableModel, config: TrainingConfig) -> list[dict[str, Any]]:
    """The parameters with the rate and weight decay of each group, for any optimiser of torch."""
    backbone: list[Tensor] = []
    precision: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (precision if model.is_precision_parameter(name) else backbone).append(parameter)
    groups: list[dict[str, Any]] = [{"params": backbone, "weight_decay": config.weight_decay}]
    if precision:
        rate = config.learning_rate * config.precision_lr_multiplier
        groups.append({"params": precision, "lr": rate, "weight_decay": 0.0})
    return groups


def warmup_ramp(step: int, warmup_steps: int) -> float:
    """w of the precision and recency biases after ``step`` optimiser steps: linear from 0 to 1."""
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0

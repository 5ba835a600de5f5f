"""Adam or AdamW in groups: the backbone; the precision channel at a higher rate; stochastic dynamics with care.

Precision parameters have ``precision_lr_multiplier`` times the rate and no weight decay. The parameters of a mixer's
stochastic differential equation take half the rate, no momentum and a gradient clipped by its norm, since a decay or a
noise that is thrown far off does not come back.

Source: Precision Tracked Transformer (arXiv 2605.18832), appendices J and L; Racioppo, Robust Filter Attention,
appendix E.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recbft.mixers.interface import Group
from recbft.models.contract import TrainableModel
from recbft.training.run_config import TrainingConfig


class Parametrised(Protocol):
    """What has named parameters and tells the group of each: a ``TrainableModel``, or several at once."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def optimiser_groups(self) -> Mapping[str, Group]: ...


DYNAMICS: dict[str, Any] = {"betas": (0.0, 0.999), "eps": 1e-7, "weight_decay": 0.0, "clip_norm": 1e-4}


def make_optimizer(model: Parametrised, config: TrainingConfig) -> torch.optim.Optimizer:
    """The optimiser of a model that tells the group of each of its parameters."""
    groups = parameter_groups(model, config)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.learning_rate, fused=True, capturable=bool(config.cuda_graphs))


def parameter_groups(model: Parametrised, config: TrainingConfig) -> list[dict[str, Any]]:
    """The parameters with the rate and weight decay of each group, for any optimiser of torch."""
    lists: dict[Group, list[Tensor]] = {"backbone": [], "precision": [], "dynamics": []}
    group_of = model.optimiser_groups()
    for name, parameter in model.named_parameters():
        lists[group_of[name]].append(parameter)
    groups: list[dict[str, Any]] = [{"params": lists["backbone"], "weight_decay": config.weight_decay}]
    if lists["precision"]:
        rate = config.learning_rate * config.precision_lr_multiplier
        groups.append({"params": lists["precision"], "lr": rate, "weight_decay": 0.0})
    if lists["dynamics"]:
        groups.append({"params": lists["dynamics"], "lr": config.learning_rate / 2, **DYNAMICS})
    return groups


def idle_settings(model: TrainableModel, config: TrainingConfig, *, fresh_precision: bool = False) -> dict[str, str]:
    """The settings of precision and recency that were changed and have no effect, with the reason.

    Args:
        fresh_precision: a warm start from a run without precision.
    """
    usual = TrainingConfig()
    idle = {}
    learned = "precision" in model.optimiser_groups().values()
    if not learned:
        idle["precision_lr_multiplier"] = "this model has neither precision nor recency to learn"
    if not learned and model.core is None:  # precision of which nothing is learned is ramped in too
        idle["warmup_steps"] = idle["precision_lr_multiplier"]
    elif config.warm_start is not None and not fresh_precision:
        idle["warmup_steps"] = "precision and recency begin from what warm_start has learned"
    return {f"training.{key}": why for key, why in idle.items() if getattr(config, key) != getattr(usual, key)}


def clip_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
    """Clip each group that has a ``clip_norm`` of its own, then all parameters together where one is given."""
    for group in optimizer.param_groups:
        if group.get("clip_norm") is not None:
            nn.utils.clip_grad_norm_(group["params"], group["clip_norm"])
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)


def ramp_steps(config: TrainingConfig, fresh_precision: bool) -> int:
    """Steps over which precision and recency are ramped in: none where they begin from what was learned."""
    return config.warmup_steps if config.warm_start is None or fresh_precision else 0


def warmup_ramp(step: int, warmup_steps: int) -> float:
    """w of the precision and recency biases after ``step`` optimiser steps: linear from 0 to 1."""
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0

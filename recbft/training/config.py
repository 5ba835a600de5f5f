"""How a model is trained."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from recbft.config.fields import check_range
from recbft.datasets.samples import SampleKind
from recbft.errors import UserError
from recbft.evaluation.metrics import METRIC


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Adam on the loss of the backbone, stopped early when a validation metric no longer improves."""

    epochs: int = 200  # at most
    samples: SampleKind = "last"  # read in an epoch: the last max_length events, windows of all events, or each prefix
    batch_size: int = 256  # samples per step: histories, windows or prefixes
    batch_targets: int | None = None  # in place of batch_size: as many samples as hold about so many targets
    learning_rate: float = 1e-3
    weight_decay: float = 0.0  # not applied to the precision parameters
    optimizer: Literal["adam", "adamw"] = "adam"  # adamw: weight decay apart from the gradient
    precision_lr_multiplier: float = 100.0  # learning rate of the precision and recency parameters, relative
    warmup_steps: int = 50  # optimiser steps over which precision and recency are ramped in; 0 means at once
    warm_start: str | None = None  # a run whose best weights this one begins from, ramped in already
    warm_start_keep: float | None = None  # what share of them is kept, the rest being initial weights; None means 0.4
    clip_norm: float | None = None  # largest gradient norm; None leaves gradients alone
    patience: int = 20  # validations without improvement before training stops
    valid_metric: str = "ndcg@10"  # what chooses the epoch: hr@K, ndcg@K, mrr@K with K in evaluation.ks, or mrr
    eval_every: int = 1  # epochs between validations
    deterministic: bool = False  # refuse operations without a deterministic algorithm
    autocast: Literal["bf16"] | None = None  # bf16: products with learned weights in bfloat16; for GPUs
    cuda_graphs: bool | None = None  # true: steps from CUDA graphs, for GPUs faster than their kernels are launched
    threads: int | None = None  # CPU threads; None leaves PyTorch's choice
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    tensorboard: bool = False  # write history.csv as TensorBoard events too

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "batch_targets", "patience", "eval_every"):
            check_range(key, getattr(self, key), at_least=1)
        for key in ("learning_rate", "precision_lr_multiplier", "clip_norm"):
            check_range(key, getattr(self, key), above=0)
        check_range("weight_decay", self.weight_decay, at_least=0)
        if self.optimizer == "adamw" and not self.weight_decay:
            raise UserError("optimizer adamw has no effect with weight_decay 0; leave it out, or set weight_decay")
        check_range("warmup_steps", self.warmup_steps, at_least=0)
        check_range("threads", self.threads, at_least=1, at_most=1024)
        if not re.fullmatch(METRIC, self.valid_metric):
            raise UserError(
                f"valid_metric is {self.valid_metric!r}; give hr@K, ndcg@K, mrr@K or mrr, such as 'ndcg@10'"
            )
        # PyTorch counts to 127 and begins anew, and takes no number with a 0 before it.
        if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?", self.device):
            raise UserError(f"device is {self.device!r}; give auto, cpu, cuda or cuda:N")
        if self.warm_start is not None and not self.warm_start.strip():
            raise UserError("warm_start is empty; give the folder of a run, or leave it out")
        check_range("warm_start_keep", self.warm_start_keep, above=0, at_most=1)
        if self.warm_start_keep is not None and self.warm_start is None:
            raise UserError("warm_start_keep has no effect without warm_start; leave it out, or name a run there")

    @property
    def ramp_steps(self) -> int:
        """Steps over which precision and recency are ramped in: none where they begin from what was learned."""
        return self.warmup_steps if self.warm_start is None else 0

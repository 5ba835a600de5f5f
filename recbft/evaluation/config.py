"""What a ranking pass reports and how much memory it may take."""

from __future__ import annotations

from dataclasses import dataclass

from recbft.config.fields import check_range
from recbft.errors import UserError
from recbft.evaluation.metrics import KS


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Full ranking of the target among all items."""

    filter_seen: bool = False  # which setting validation and the headline metrics use; both are always recorded
    ks: tuple[int, ...] = KS  # the K of HR@K, NDCG@K and MRR@K
    memory_mb: int = 256  # bound on the score buffers of a ranking; of seeds together on a GPU four are ranked at once

    def __post_init__(self) -> None:
        if not self.ks:
            raise UserError("ks is empty; give at least one cut-off, such as 10")
        for k in self.ks:
            check_range("ks", k, at_least=1)
        if len(set(self.ks)) < len(self.ks):
            raise UserError(f"ks is {list(self.ks)}; give each cut-off once")
        check_range("memory_mb", self.memory_mb, at_least=1)

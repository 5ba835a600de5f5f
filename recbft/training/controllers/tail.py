"""The tail objective of a search: runs that still improve near their end are worth more.

    score = L_e - alpha max(0, L_{e - W} - L_e)            lower is better                                      (1)

with L the validation loss by epoch and e its best epoch.

Source: Fuzzy-Gated Training for Transformers, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence

from recbft.errors import UserError


def tail_score(losses: Sequence[float], *, window: int = 5, alpha: float = 0.2) -> float:
    """Equation (1).

    Args:
        losses: validation loss after each epoch; negate a metric that should be high.
        window: W, epochs back from the best one; the first epoch where there are fewer.
        alpha: what late progress is worth.

    Raises:
        UserError: there is no loss.

    >>> tail_score([5.0, 4.0, 3.5, 3.6], window=2, alpha=0.2)
    3.2
    """
    if not losses:
        raise UserError("the tail objective needs the validation loss of at least one epoch, got none")
    best = min(range(len(losses)), key=losses.__getitem__)
    return losses[best] - alpha * max(0.0, losses[max(0, best - window)] - losses[best])

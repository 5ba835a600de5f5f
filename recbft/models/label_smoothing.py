"""Label smoothing of the full cross-entropy, as one term beside it: no second pass over the vocabulary.

    (1 - e) CE(y) + (e / V) sum_i CE(i)  =  CE(y) + e x . (w_y - mean_i w_i)                                    (1)

Shapes: N positions, V items, D width.
"""

from __future__ import annotations

from torch import Tensor


def smoothing_term(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The factor of e in (1), its mean over positions.

    Args:
        states: x, (N, D).
        weight: w, (V, D); item biases as one more column, with a 1 in every state.
        target: row of ``weight`` that each position should find, (N,).
    """
    return (states * (weight[target] - weight.mean(dim=0))).sum(dim=1).mean()

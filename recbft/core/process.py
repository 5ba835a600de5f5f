"""The feed-forward network as the predict step: precision through its Jacobian, and the noise it adds.

    a = W1 x + b1,   y = h + W2 phi(a) + b2,   phi = GELU in its exact form                      (1)
    J = C phi'(a),   C = W2 * W1'  (D x F, elementwise)      diagonal of the Jacobian            (2)
    C ~ U R',   J ~ U (R' phi'(a))                           rank r, from the SVD of C           (3)
    lam'' = min(1 / (max((1 + J)^2, floor) / lam' + Q), cap)                                     (4)
    Q = softplus(q) * Q_max                                  process noise per coordinate        (5)
    discount  lam'' = delta lam',  0 < delta < 1             each layer forgets the same share   (6)
    decay     lam'' = exp(-c) lam',  c any real number       the same, free to forget or gain    (7)

(6) and (7) stand in for (4): one learned number per layer, blind to what the network does. The norm before the network
is treated as precision-preserving.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 3.2 and table 1; discount factors: West and Harrison,
Bayesian Forecasting and Dynamic Models (1997), section 6.3.
Shapes: D model width, F feed-forward width, r rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FLOOR = 0.01  # of (4), so that cancellation does not raise precision without bound


def gelu_slope(a: Tensor) -> Tensor:
    """phi'(a) = Phi(a) + a N(a; 0, 1), the derivative of the exact GELU."""
    cdf = 0.5 * (1 + torch.erf(a * math.sqrt(0.5)))
    return cdf + a * torch.exp(-0.5 * a.square()) / math.sqrt(2 * math.pi)


def ffn_jacobian(pre_activation: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Equation (2): the diagonal of the Jacobian of ``W2 gelu(W1 x + b1) + b2`` at the point.

    Args:
        pre_activation: a = W1 x + b1, (..., F).
        w1: (F, D).
        w2: (D, F).

    Returns:
        J, (..., D).
    """
    return F.linear(gelu_slope(pre_activation), w2 * w1.T)


def jacobian_factors(w1: Tensor, w2: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Equation (3): U with the singular values in R; the best rank-r stand-in for C.

    U are eigenvectors of C C', found in float64 on the CPU: of so small a matrix they are there two to ten times sooner
    than singular vectors, and sooner than on a GPU. C' U is R with the singular values in it.

    Returns:
        (left (D, r), right (F, r)); r is at most min(D, F), where (3) equals (2).

    Raises:
        LinAlgError: C is not finite.
    """
    coupling = w2 * w1.T
    D, width = coupling.shape
    rank = min(rank, D, width)
    if coupling.device.type == "meta":
        return coupling.new_empty(D, rank), coupling.new_empty(width, rank)
    wide = coupling.cpu().double()
    if not wide.isfinite().all():
        raise torch.linalg.LinAlgError("W2 * W1' is not finite")  # type: ignore[attr-defined]
    left = torch.linalg.eigh(wide @ wide.T).eigenvectors.flip(1)[:, :rank]  # the largest first
    kind = {"device": coupling.device, "dtype": coupling.dtype}
    return left.to(**kind), (wide.T @ left).to(**kind)


def low_rank_jacobian(slope: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """J of (3) from phi'(a), (..., F), and the factors of ``jacobian_factors``; (..., D)."""
    return (slope @ right) @ left.T


def process_noise(logits: Tensor, q_max: float) -> Tensor:
    """Equation (5): the variance a layer adds, (D,), > 0."""
    return F.softplus(logits) * q_max


def predict_precision(
    precision: Tensor,
    jacobian: Tensor | float,
    process_noise: Tensor | float,
    *,
    cap: float = 100.0,
) -> Tensor:
    """Equation (4): precision after the feed-forward network.

    Args:
        precision: lam', (..., D), > 0.
        jacobian: J, broadcastable to it; 0 where the network's slope is ignored.
        process_noise: Q, variance added, broadcastable, >= 0.
        cap: the largest precision returned.

    Returns:
        lam'', (..., D), in (0, cap].
    """
    slope = torch.as_tensor(1 + jacobian, dtype=precision.dtype, device=precision.device).square().clamp(min=FLOOR)
    return (precision / (slope + process_noise * precision)).clamp(max=cap)


def discount_precision(precision: Tensor, discount: float | Tensor, *, cap: float = 100.0) -> Tensor:
    """Equation (6): ``discount`` is delta, in (0, 1), a scalar; precision > 0 of any shape."""
    return (discount * precision).clamp(max=cap)


def decay_precision(precision: Tensor, rate: Tensor, *, cap: float = 100.0) -> Tensor:
    """Equation (7): ``rate`` is c, a scalar; 0 changes nothing, below 0 precision grows up to the cap."""
    return (torch.exp(-rate) * precision).clamp(max=cap)

"""One step of the filter: the residual connection as a Kalman update, the feed-forward network as the prediction.

    gain = r / (lam + r)        h' = h + gain * e        lam' = lam + r                           (3.1)
    warm-up: gain <- 1 - w (1 - gain);  w = 0 is the plain residual connection                    (3.2)
    other gains:  residual 1 (3.3),  gate sigmoid(W x + b) (3.4),  fixed a constant (3.5)

per coordinate, r the observation precision, w the ramp and x the normalised belief that the mixer read. With a gain of
(3.3) to (3.5) precision is still lam' = lam + r, and stays lam where the mixer estimates none.

    y = h + W2 phi(a),  a = W1 x + b1,  phi = GELU in its exact form                              (4.1)
    J = C phi'(a),   C = W2 * W1'  (D x F, elementwise)      diagonal of the Jacobian             (4.2)
    lam'' = min(1 / (max((1 + J)^2, floor) / lam' + Q), cap)                                      (4.3)
    Q = softplus(q) * Q_max                                  process noise per coordinate         (4.4)
    C ~ U R',   J ~ U (R' phi'(a))                           rank r, from the SVD of C            (4.5)
    J = (W2 * Wg') (phi'(a) * u) + (W2 * Wu') phi(a)         of W2 (phi(a) * u), a = Wg x, u = Wu x   (4.8)
    discount  lam'' = delta lam',  0 < delta < 1             each layer forgets the same share    (4.6)
    decay     lam'' = exp(-c) lam',  c any real number       the same, free to forget or gain     (4.7)

(4.6) and (4.7) replace (4.3): one learned number per layer, which does not depend on the network. The norm before the
network is treated as precision-preserving. Functions in ``_ref`` are the plain form of ``kernels.filter_step``.

Source: Precision Tracked Transformer (arXiv 2605.18832), equation 3, sections 3.2 and 4.2, table 1; Kalman (1960) in
information form; gate: Qiu et al., Gated Attention for Large Language Models (arXiv 2505.06708); discount factors: West
and Harrison, Bayesian Forecasting and Dynamic Models (1997), section 6.3.
Shapes: B rows, T tokens, D model width, F feed-forward width, H heads, K = D / H, r rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.boundaries import in_full_precision
from recbft.core.belief import Belief

FLOOR = 0.01  # of (4.3), so that cancellation does not raise precision without bound
MOMENTUM = 0.99  # of running means


def kalman_update_ref(
    belief: Belief, innovation: Tensor, observation_precision: Tensor, *, ramp: float | Tensor = 1.0
) -> tuple[Belief, Tensor]:
    """Merge a belief with an observation.

    Args:
        belief: mean and precision before, each (B, T, D), precision > 0.
        innovation: e, the observation relative to the belief, (B, T, D).
        observation_precision: r, (B, T, D), >= 0; zero leaves the belief alone.
        ramp: w of (3.2), in [0, 1].

    Returns:
        The belief after, and the gain, (B, T, D), in [0, 1].
    """
    precision = belief.precision + observation_precision
    gain = observation_precision / precision  # (3.1)
    if not (isinstance(ramp, float) and ramp == 1.0):
        gain = 1 - ramp * (1 - gain)  # (3.2)
    return Belief(torch.addcmul(belief.mean, gain, innovation), precision), gain


def gain_update(
    belief: Belief,
    innovation: Tensor,
    gain: Tensor | float,
    observation_precision: Tensor | None = None,
    *,
    ramp: float | Tensor = 1.0,
) -> tuple[Belief, Tensor]:
    """Take up a share of the innovation that is not derived from precision: (3.3) to (3.5).

    Args:
        gain: in [0, 1], broadcastable to (B, T, D); 1 is the residual connection.
        observation_precision: r, or None where there is no estimate; the others as ``kalman_update_ref``.
    """
    precision = belief.precision if observation_precision is None else belief.precision + observation_precision
    if isinstance(gain, float) and gain == 1.0:
        return Belief(belief.mean + innovation, precision), innovation.new_ones(()).expand_as(innovation)
    share = 1 - ramp * (1 - gain)  # (3.2)
    # A number is written where it is wanted: a GPU is waited for to copy one there, and a graph of its work holds none.
    share = share.to(innovation) if isinstance(share, Tensor) else innovation.new_full((), share)
    return Belief(torch.addcmul(belief.mean, share, innovation), precision), share.expand_as(innovation)


def gate(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The learned gain (3.4): sigmoid(W x + b).

    Args:
        x: (B, T, D).
        weight: W, (D, D) for a gain per coordinate, (H, D) for one per head, repeated over its K coordinates.
    """
    gain = torch.sigmoid(F.linear(x, weight, bias))
    return gain.repeat_interleave(x.shape[-1] // weight.shape[0], dim=-1)


def gelu_slope(a: Tensor) -> Tensor:
    """phi'(a) = Phi(a) + a N(a; 0, 1), the derivative of the exact GELU."""
    cdf = 0.5 * (1 + torch.erf(a * math.sqrt(0.5)))
    return cdf + a * torch.exp(-0.5 * a.square()) / math.sqrt(2 * math.pi)


def ffn_jacobian(pre_activation: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Equation (4.2): the diagonal of the Jacobian of ``W2 gelu(W1 x + b1) + b2`` at the point.

    Args:
        pre_activation: a = W1 x + b1, (..., F).
        w1: (F, D).
        w2: (D, F).

    Returns:
        J, (..., D).
    """
    return F.linear(gelu_slope(pre_activation), w2 * w1.T)


def gated_jacobian(activated: Tensor, slope: Tensor, up: Tensor, w_gate: Tensor, w_up: Tensor, w_out: Tensor) -> Tensor:
    """Equation (4.8): the diagonal of the Jacobian of a gated network, ``W2 (phi(Wg x) * (Wu x))``, at the point.

    Args:
        activated, slope: phi(a) and phi'(a) at a = Wg x, (..., F).
        up: u = Wu x, (..., F).
        w_gate, w_up: (F, D).
        w_out: W2, (D, F).

    Returns:
        J, (..., D).
    """
    return F.linear(slope * up, w_out * w_gate.T) + F.linear(activated, w_out * w_up.T)


def jacobian_factors(w1: Tensor, w2: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Equation (4.5): U with the singular values in R; the best rank-r stand-in for C.

    U are eigenvectors of C C', found in float64 on the CPU: of so small a matrix they are there two to ten times sooner
    than singular vectors, and sooner than on a GPU. C' U is R with the singular values in it.

    Returns:
        (left (D, r), right (F, r)); r is at most min(D, F), where (4.5) equals (4.2).

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


def process_noise(logits: Tensor, q_max: float) -> Tensor:
    """Equation (4.4): the variance a layer adds, (D,), > 0."""
    return F.softplus(logits) * q_max


def predict_precision_ref(
    precision: Tensor,
    jacobian: Tensor | float,
    process_noise: Tensor | float,
    *,
    cap: float = 100.0,
) -> Tensor:
    """Equation (4.3): precision after the feed-forward network.

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
    """Equation (4.6): ``discount`` is delta, in (0, 1), a scalar; precision > 0 of any shape."""
    return (discount * precision).clamp(max=cap)


def decay_precision(precision: Tensor, rate: Tensor, *, cap: float = 100.0) -> Tensor:
    """Equation (4.7): ``rate`` is c, a scalar; 0 changes nothing, below 0 precision grows up to the cap."""
    return (torch.exp(-rate) * precision).clamp(max=cap)


@in_full_precision
def mean_over_tokens(values: Tensor, valid: Tensor) -> Tensor:  # (B, T, D), (B, T) -> (D,)
    """The mean over a batch's real tokens; 0 without any."""
    keep = valid.flatten().to(values.dtype)
    return (keep @ values.reshape(-1, values.shape[-1])).div_(keep.sum().clamp_(min=1))


def remember(mean: Tensor, value: Tensor, updates: Tensor, momentum: float = MOMENTUM) -> None:
    """Move a running mean towards a value in place, or to it where there was no update yet; no device is waited for."""
    mean.lerp_(value, (updates == 0).to(mean.dtype).clamp(min=1 - momentum))

"""How precise is the innovation? Estimators of its precision from the residuals of the attention that made it.

    reml         Var(e) = (S + nu s0) / (n + nu)        the residual variance shrunk to a prior of nu observations(2.8)
    reml_naive   Var(e) = S / (n - 1)                   without the prior; infinite precision at n = 1            (2.9)
    sandwich     Var(e) = sum_j a^2 (v_j - m)^2 / s1^2, m = e / s1     weights of any kind                        (2.10)
    delta        Var(e) = sum_j a^2 / lbar_j            a linear map of keys that are as precise as they say      (2.11)
    design_effect  Var(e) = (U + nu s0) / n             U the unweighted variance of the keys, 1 / n Kish's effect(2.12)
    projected    Var(W e)_i = sum_k W_ik^2 Var(e)_k     carried through a linear map                              (2.13)

with s1 = sum a. All but (2.10) take weights that are positive and sum to one; ``ESTIMATORS`` says which estimator is
defined for which weights. (2.10) is formed from the expanded square (w2 - 2 m w1 + m^2 sum a^2) / s1^2, s1^2 floored.

The observation precision is min(1 / Var(e), cap) (2.7), and 0 where nothing was read (n = 0), so that such a position
keeps its belief. With (2.8) it never exceeds (1 + nu) / (nu s0) at n = 1: 2 K for nu = 1 and s0 = 1 / K. S in (2.8) and
(2.9), U in (2.12), precision and variance in (2.13) are widened by 1e-12 in double and 1e-8 in single precision; in
(2.9) an n within 1e-6 of 1 counts as 1. Functions in ``_ref`` are the plain form of ``kernels.filter_step``.

Source: Precision Tracked Transformer (arXiv 2605.18832), sections 3.1 and 4.1, appendix D; REML: Patterson and
Thompson (1971); sandwich: Huber (1967), White (1980); design effect: Kish, Survey Sampling (1965), section 8.2.
Shapes: B rows, H heads, T tokens, K head width, D = H K.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from recbft.autograd.boundaries import in_full_precision
from recbft.core.belief import SiluMoments
from recbft.errors import UserError

Estimator = Literal["reml", "reml_naive", "sandwich", "delta", "design_effect"]
# Kind of attention weights -> the estimators defined for it.
ESTIMATORS: dict[str, tuple[str, ...]] = {
    "softmax": get_args(Estimator),  # positive, rows sum to one
    "silu": ("sandwich",),  # not normalised, may be negative
}


def check_estimator(estimator: str, weights: str) -> None:
    """Refuse an estimator where it is not defined.

    Args:
        estimator: its name.
        weights: the kind of attention weights, a key of ``ESTIMATORS``.

    Raises:
        UserError: it is not; the message names the ones that are.
    """
    defined = ESTIMATORS[weights]
    if estimator not in defined:
        why = "" if weights == "softmax" else ", which need not sum to one"
        raise UserError(f"estimator {estimator!r} is not defined for {weights} weights{why}; choose {_either(defined)}")


def reml_precision_ref(
    residual_variance: Tensor,
    effective_sample_size: Tensor,
    *,
    prior_scale: float | Tensor,
    prior_dof: float | Tensor = 1.0,
    cap: float = 100.0,
) -> Tensor:
    """Equation (2.8): restricted maximum likelihood with a conjugate prior.

    Args:
        residual_variance: S, weighted variance of the values, (..., T, K), >= 0.
        effective_sample_size: n, (..., T), 0 where nothing was read.
        prior_scale: s0, the variance the prior expects, > 0.
        prior_dof: nu, the number of observations the prior is worth, >= 0.
        cap: the largest precision returned.

    Returns:
        Observation precision per coordinate, (..., T, K), in [0, cap].
    """
    size = effective_sample_size[..., None]
    observed = (size + prior_dof) * (size > 0)
    return (observed / (residual_variance + (prior_dof * prior_scale + epsilon_of(residual_variance)))).clamp(max=cap)


def reml_naive_precision(residual_variance: Tensor, effective_sample_size: Tensor, *, cap: float = 100.0) -> Tensor:
    """Equation (2.9), for study: the cap where n = 1 or the residuals vanish. Shapes as above."""
    size = effective_sample_size[..., None]
    precision = (size - 1) / (residual_variance + epsilon_of(residual_variance))
    alone = size - 1 <= 1e-6
    return torch.where(alone, torch.full_like(precision, cap), precision.clamp(max=cap)) * (size > 0)


def sandwich_precision_ref(moments: SiluMoments, *, cap: float = 100.0, centre: str = "root") -> Tensor:
    """Equation (2.10): valid for weights that are negative or do not sum to one.

    Args:
        moments: sums over the weights, as ``silu_moments`` returns them.
        cap: the largest precision returned.
        centre: ``root`` takes m = e / s1, the root of the estimating equation; ``innovation`` takes the paper's m = e,
            which is the same where s1 = 1 and else moves with a shift of the values.

    Returns:
        Observation precision per coordinate, (B, H, T, K), in [0, cap]; 0 where nothing was read. Weights that are all
        but zero meet the cap, since s1 is floored, until their squares vanish: then nothing is read.

    Raises:
        ValueError: an unknown ``centre``.
    """
    if centre not in ("root", "innovation"):
        raise ValueError(f"centre is {centre!r}; choose root or innovation")
    squares = moments.square_sum[..., None]
    total = moments.weight_sum[..., None]
    denominator = torch.maximum(total.square(), 1e-6 * squares + 1e-12)
    m = moments.mean * (total / denominator) if centre == "root" else moments.mean
    spread = moments.square_second - 2 * m * moments.square_mean + m.square() * squares
    # The cap is put on the variance, so that a vanishing spread has no infinite gradient.
    return (spread / denominator).clamp(min=1 / cap).reciprocal() * (squares > 0)


def delta_precision(propagated_variance: Tensor, *, cap: float = 100.0) -> Tensor:
    """Equation (2.11): what the keys' own precision leaves of the innovation's; residuals play no part.

    Args:
        propagated_variance: sum_j a^2 / lbar_j, (..., T), 0 where nothing was read.

    Returns:
        Observation precision, the same on all coordinates, (..., T, 1), in [0, cap].
    """
    variance = propagated_variance[..., None]
    return variance.clamp(min=1 / cap).reciprocal() * (variance > 0)


def design_effect_precision(
    key_variance: Tensor,
    effective_sample_size: Tensor,
    *,
    prior_scale: float | Tensor,
    prior_dof: float | Tensor = 1.0,
    cap: float = 100.0,
) -> Tensor:
    """Equation (2.12): the spread of all keys, whatever their weight, over the number that they count for.

    Args:
        key_variance: U, unweighted variance of the values that may be read, (..., T, K), >= 0; the others and what is
            returned as ``reml_precision_ref`` has them.
    """
    size = effective_sample_size[..., None]
    return (size / (key_variance + (prior_dof * prior_scale + epsilon_of(key_variance)))).clamp(max=cap)


@in_full_precision
def projected_precision(precision: Tensor, weight: Tensor, *, cap: float = 100.0) -> Tensor:
    """Equation (2.13): the precision of ``W e`` from that of ``e``.

    Args:
        precision: (..., D_in), >= 0; a position whose precisions are all 0 (nothing was read) stays at 0.
        weight: W, (D_out, D_in).

    Returns:
        (..., D_out), in [0, cap].
    """
    epsilon = epsilon_of(precision)
    variance = torch.nn.functional.linear(1 / (precision + epsilon), weight.square())
    read = precision.amax(dim=-1, keepdim=True) > 0
    return (1 / (variance + epsilon)).clamp(max=cap) * read


def epsilon_of(like: Tensor) -> float:
    """What keeps a denominator of this type above 0."""
    return 1e-12 if like.dtype == torch.float64 else 1e-8


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

"""Gradient-boosted attention and twicing: later passes attend to what the first one missed.

    boosted   F = Attn_0(x);   for m = 1 .. M-1:   c = Attn_m(queries from x - F, keys and values from x)     (1)
              F = F + g * c;   innovation = W_out F, or F without an output map                               (2)
              g = sigmoid(W [F ; c] + b)  |  one learned number per round  |  1                               (3)
    twicing   innovation = (2 A - A^2) V = A V + A (V - A V), one set of maps                                 (4)

Every round has maps of its own. The observation precision is the estimate from the last round's weights, which see
the values of that round's map; that of (4) is the estimate from A. Through W_out it goes by squared weights.

Source: Gradient Boosting within a Single Attention Layer, section 3 and algorithm 1; Abdullaev and Nguyen, Transformer
Meets Twicing (2025).
Shapes: B rows, T tokens, D model width, H heads, K head width, M rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recbft.autograd.eager import eagerly
from recbft.autograd.full_precision import in_full_precision
from recbft.autograd.transforms import applied, beyond_first_gradients, once_differentiable
from recbft.config.fields import check_range
from recbft.core import Estimator, SequenceContext
from recbft.errors import UserError
from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.heads import by_head
from recbft.mixers.interface import Observation, projected

Gate = Literal["mlp", "scalar", "none"]

SHRINKAGE_START = 0.5  # of gate scalar: where the sigmoid of gate mlp starts


@dataclass(frozen=True, kw_only=True)
class BoostedConfig:
    """Rounds and gate of gradient-boosted attention (the ``mixing`` section of a config)."""

    rounds: int = 2  # M; 1 is plain attention
    gate: Gate = "mlp"  # the share of a correction that is taken up, (3)

    def __post_init__(self) -> None:
        check_range("rounds", self.rounds, at_least=1)
        if self.rounds == 1 and self.gate != "mlp":
            raise UserError(f"gate has no effect with rounds 1 (got {self.gate!r}); leave it out or take 2 rounds")


class BoostedAttention(nn.Module):
    """Equations (1) to (3) over a packed batch; arguments as those of ``SoftmaxAttention``.

    Args:
        hidden_size: D.
        n_heads: H, divides D.
        config: rounds and gate.
        dropout, recency_decay, kriging: of every round, each with a decay of its own.
        output_projection: W_out.
        estimator, prior_dof, prior_variance, cap: of the last round's observation precision.
    """

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        config: BoostedConfig | None = None,
        *,
        dropout: float = 0.0,
        output_projection: bool = False,
        recency_decay: float | None = None,
        estimator: Estimator | None = None,
        prior_dof: float = 1.0,
        prior_variance: float | None = None,
        cap: float = 100.0,
        kriging: Literal["scalar", "per_dimension"] = "scalar",
    ) -> None:
        super().__init__()
        config = BoostedConfig() if config is None else config
        self.estimator, self.cap = estimator, cap
        self.rounds = nn.ModuleList(
            SoftmaxAttention(
                hidden_size,
                n_heads,
                dropout=dropout,
                recency_decay=recency_decay,
                estimator=estimator if number == config.rounds - 1 else None,
                prior_dof=prior_dof,
                prior_variance=prior_variance,
                cap=cap,
                kriging=kriging,
            )
            for number in range(config.rounds)
        )
        self.gates = nn.ModuleList(_GATES[config.gate](hidden_size) for _ in range(config.rounds - 1))
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None

    def forward(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Observation:
        """Observe every position; arguments as those of ``SoftmaxAttention.forward``."""
        source = x if source is None else source
        total, found = self._after(len(self.rounds), x, precision, context, ramp, source)
        return projected(Observation(total, found), self.out, cap=self.cap)

    def attention(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Tensor:
        """The last round's weights, as ``SoftmaxAttention.attention`` gives them."""
        source, last = x if source is None else source, self.rounds[-1]
        assert isinstance(last, SoftmaxAttention)
        if len(self.rounds) > 1:
            x = x - self._after(len(self.rounds) - 1, x, precision, context, ramp, source).innovation
        return last.attention(x, precision, context, ramp=ramp, source=source)

    def _after(
        self,
        rounds: int,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        ramp: float,
        source: Tensor,
    ) -> Observation:
        """F of (2) after so many rounds, and the precision where the last of them estimates one."""
        total, found = self.rounds[0](x, precision, context, ramp=ramp, source=source)
        for attend, gate in zip(self.rounds[1:rounds], self.gates, strict=False):
            correction, found = attend(x - total, precision, context, ramp=ramp, source=source)  # (1)
            total = gate(total, correction)  # (2)
        return Observation(total, found)


class TwicingAttention(nn.Module):
    """Equation (4) over a packed batch; arguments as those of ``SoftmaxAttention``."""

    def __init__(
        self, hidden_size: int, n_heads: int, *, output_projection: bool = False, cap: float = 100.0, **attention: Any
    ) -> None:
        super().__init__()
        self.smoother = SoftmaxAttention(hidden_size, n_heads, cap=cap, **attention)
        self.estimator, self.cap = self.smoother.estimator, cap
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None

    def forward(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Observation:
        """Observe every position; arguments as those of ``SoftmaxAttention.forward``."""
        q, k, v = self.smoother.project(x, source)
        smooth, found = self.smoother.observe(q, k, v, precision, context, ramp=ramp)
        again = by_head(smooth, self.smoother.n_heads)
        twice = self.smoother.observe(q, k, again, precision, context, ramp=ramp, estimate=False).innovation
        return projected(Observation(2 * smooth - twice, found), self.out, cap=self.cap)

    def attention(
        self,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        *,
        ramp: float = 1.0,
        source: Tensor | None = None,
    ) -> Tensor:
        """2 A - A^2, with A as ``SoftmaxAttention.attention`` gives it; rows sum to 1, entries may be negative."""
        weights = self.smoother.attention(x, precision, context, ramp=ramp, source=source)
        return 2 * weights - weights @ weights


class MlpGate(nn.Module):
    """F + g * c with g per coordinate from both, (3)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.read = nn.Linear(2 * hidden_size, hidden_size)

    @eagerly
    @in_full_precision
    def forward(self, total: Tensor, correction: Tensor) -> Tensor:
        """F and c, (B, T, D), to the next F."""
        if beyond_first_gradients():
            gate: Tensor = self.read(torch.cat([total, correction], dim=-1)).sigmoid()
            return total + gate * correction
        gated: Tensor = applied(_AddGated, total, correction, self.read.weight, self.read.bias)
        return gated


class ScalarGate(nn.Module):
    """F + g c with one learned g: the shrinkage of gradient boosting."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.shrinkage = nn.Parameter(torch.tensor(SHRINKAGE_START))

    def forward(self, total: Tensor, correction: Tensor) -> Tensor:
        """As ``MlpGate``."""
        return total + self.shrinkage * correction


class NoGate(nn.Module):
    """F + c."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()

    def forward(self, total: Tensor, correction: Tensor) -> Tensor:
        """As ``MlpGate``."""
        return total + correction


_GATES: dict[str, type[nn.Module]] = {"mlp": MlpGate, "scalar": ScalarGate, "none": NoGate}


class _AddGated(torch.autograd.Function):
    """F + sigmoid(W [F ; c] + b) * c, without [F ; c] and with the sums of gradients inside the matrix products.

    With a = W_F F + W_c c + b and s the gradient of what is returned:

        da = s c g (1 - g)     dF = s + da W_F     dc = s g + da W_c     dW = da' [F ; c]     db = sum da
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, correction: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        of_total, of_correction = weight.chunk(2, dim=1)
        flat, added = total.flatten(0, 1), correction.flatten(0, 1)  # (B T, D)
        gate = torch.addmm(bias, flat, of_total.T).addmm_(added, of_correction.T).sigmoid_()
        ctx.save_for_backward(flat, added, gate, weight)
        return torch.addcmul(flat, gate, added).view_as(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        flat, added, gate, weight = ctx.saved_tensors
        of_total, of_correction = weight.chunk(2, dim=1)
        shape, grad = grad.shape, grad.flatten(0, 1)
        d_logits = torch.ops.aten.sigmoid_backward(grad * added, gate)
        d_total = torch.addmm(grad, d_logits, of_total)
        d_correction = (grad * gate).addmm_(d_logits, of_correction)
        d_weight = torch.cat([d_logits.T @ flat, d_logits.T @ added], dim=1)
        return d_total.view(shape), d_correction.view(shape), d_weight, d_logits.sum(dim=0)

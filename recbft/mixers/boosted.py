"""Gradient-boosted attention and twicing: later passes attend to what the first one missed.

    boosted   F = Attn_0(x);   for m = 1 .. M-1:   c = Attn_m(queries from x - F, keys and values from x)  (9.26)
              F = F + g * c;   innovation = W_out F, or F without an output map
              g = sigmoid(W [F ; c] + b)  |  one learned number per round  |  1                            (9.27)
    twicing   innovation = (2 A - A^2) V = A V + A (V - A V), one set of maps                              (9.28)

Every round has maps of its own. The observation precision is the estimate from the last round's weights, which see
the values of that round's map; that of (9.28) is the estimate from A. Through W_out it goes by squared weights.

Source: Gradient Boosting within a Single Attention Layer, section 3 and algorithm 1; Abdullaev and Nguyen, Transformer
Meets Twicing (2025).
Shapes: B rows, T tokens, D model width, H heads, K head width, M rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recbft.autograd.boundaries import eagerly, in_full_precision
from recbft.autograd.transforms import applied, beyond_first_gradients, once_differentiable
from recbft.config.fields import check_range
from recbft.core import Estimator, SequenceContext
from recbft.errors import UserError
from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.interface import Mixer, MixerOptions, Observation, by_head, projected

Gate = Literal["mlp", "scalar", "none"]

SHRINKAGE_START = 0.5  # of gate scalar: where the sigmoid of gate mlp starts


@dataclass(frozen=True, kw_only=True)
class BoostedConfig(MixerOptions):
    """Rounds and gate of gradient-boosted attention (the ``mixing`` section of a config)."""

    rounds: int = 2  # M; 1 is plain attention
    gate: Gate = "mlp"  # the share of a correction that is taken up, (9.27)

    def __post_init__(self) -> None:
        check_range("rounds", self.rounds, at_least=1)
        if self.rounds == 1 and self.gate != "mlp":
            raise UserError(f"gate has no effect with rounds 1 (got {self.gate!r}); leave it out or take 2 rounds")


class BoostedAttention(Mixer):
    """Equations (9.26) and (9.27) over a packed batch; arguments as those of ``SoftmaxAttention``.

    Args:
        estimator: of the last round's observation precision.
        attention: of every round, each with a recency decay of its own.
    """

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        config: BoostedConfig | None = None,
        *,
        output_projection: bool = False,
        estimator: Estimator | None = None,
        lam_max: float = 100.0,
        **attention: Any,
    ) -> None:
        super().__init__()
        config = BoostedConfig() if config is None else config
        last = config.rounds - 1
        self.rounds = nn.ModuleList(
            SoftmaxAttention(
                hidden_size, n_heads, estimator=estimator if number == last else None, lam_max=lam_max, **attention
            )
            for number in range(config.rounds)
        )
        self.n_heads, self.by_coordinate = n_heads, attention.get("kriging") == "per_dimension"
        self.gives_precision, self.mixes_heads, self.lam_max = estimator is not None, output_projection, lam_max
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
        """Observe every position, as ``Mixer`` says."""
        total, found = self._after(len(self.rounds), x, precision, context, ramp, x if source is None else source)
        return projected(Observation(total, found), self.out, cap=self.lam_max)

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

    @property
    def recency_decay(self) -> Tensor | None:
        """rho of the last round."""
        last = self.rounds[-1]
        assert isinstance(last, SoftmaxAttention)
        return last.recency_decay

    def _after(
        self,
        rounds: int,
        x: Tensor,
        precision: Tensor | None,
        context: SequenceContext,
        ramp: float,
        source: Tensor,
    ) -> Observation:
        """F of (9.26) after so many rounds, and the precision where the last of them estimates one."""
        total, found = self.rounds[0](x, precision, context, ramp=ramp, source=source)
        for attend, gate in zip(self.rounds[1:rounds], self.gates, strict=False):
            correction, found = attend(x - total, precision, context, ramp=ramp, source=source)
            total = gate(total, correction)  # (9.26)
        return Observation(total, found)


class TwicingAttention(Mixer):
    """Equation (9.28) over a packed batch; arguments as those of ``SoftmaxAttention``."""

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        *,
        output_projection: bool = False,
        lam_max: float = 100.0,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.smoother = SoftmaxAttention(hidden_size, n_heads, lam_max=lam_max, **attention)
        self.n_heads, self.by_coordinate = n_heads, self.smoother.by_coordinate
        self.gives_precision, self.mixes_heads = self.smoother.gives_precision, output_projection
        self.lam_max = lam_max
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
        """Observe every position, as ``Mixer`` says."""
        q, k, v = self.smoother.project(x, source)
        smooth, found = self.smoother.observe(q, k, v, precision, context, ramp=ramp)
        again = by_head(smooth, self.smoother.n_heads)
        twice = self.smoother.observe(q, k, again, precision, context, ramp=ramp, estimate=False).innovation
        return projected(Observation(2 * smooth - twice, found), self.out, cap=self.lam_max)

    def attention(self, *seen: Any, **how: Any) -> Tensor:
        """2 A - A^2, with A as ``SoftmaxAttention.attention`` gives it; rows sum to 1, entries may be negative."""
        weights = self.smoother.attention(*seen, **how)
        return 2 * weights - weights @ weights

    @property
    def recency_decay(self) -> Tensor | None:
        """rho, learned."""
        return self.smoother.recency_decay


class MlpGate(nn.Module):
    """F + g * c with g per coordinate from both, (9.27)."""

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

"""The mixers by name: what each is, what a configuration may say of it, and how it is put into a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from recbft.config.fields import check_choice
from recbft.core import ESTIMATORS
from recbft.errors import UserError
from recbft.mixers.attention import SoftmaxAttention
from recbft.mixers.bayesian import BayesianConfig, BayesianMixer
from recbft.mixers.boosted import BoostedAttention, BoostedConfig, TwicingAttention
from recbft.mixers.head_dynamics import RobustFilterConfig
from recbft.mixers.interface import Estimation, Mixer, MixerOptions
from recbft.mixers.memory_family import DESIGN_MODELS, MemoryFamilyConfig, MemoryFamilyMixer
from recbft.mixers.pointwise import PointwiseAttention
from recbft.mixers.positional import PositionalAttention, PositionalConfig
from recbft.mixers.regime import RegimeAttention, RegimeConfig
from recbft.mixers.rfa import RobustFilterAttention
from recbft.mixers.spectral import SpectralConfig, SpectralMixer


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a backbone tells the mixers of its layers; a mixer is given what its ``MixerSpec.hears`` names."""

    hidden_size: int
    n_heads: int
    length: int  # the longest history
    dropout: float = 0.0  # probability of dropping an attention weight
    output_projection: bool = False  # a linear map after the heads are joined
    recency_decay: float | None = None  # start of the learned decay with the lag, or None for none
    estimation: Estimation | None = None  # of the observation precision; None for a layer without precision


@dataclass(frozen=True, kw_only=True)
class MixerSpec:
    """A mixer by name.

    Its observation precision comes from an estimator of ``softmax`` or (HSTU's layer alone) ``silu`` weights, from the
    mechanism itself (``own``), or from nowhere (``none``).
    """

    summary: str  # a line for ``recbft models``
    kind: type[Mixer]  # its constructor takes the hidden size, the number of heads and what follows from the rest
    options: type = MixerOptions  # the class of its own options (the ``mixing`` section of a config)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # arguments that make this name of a kind with several
    precision: Literal["softmax", "silu", "own", "none"] = "softmax"
    hears: tuple[str, ...] = ("dropout", "output_projection", "recency_decay")  # of a ``Place``, what has an effect
    both_ways: bool = True  # whether it can look at a whole history
    reads_back: bool = False  # whether the host reads from a device amid its work, which no CUDA graph can

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("softmax", "silu", "own", "none"))
        if isinstance(self.hears, str):
            raise UserError(f"hears is the text {self.hears!r}; give a tuple of names, such as ({self.hears!r},)")
        for name in self.hears:
            check_choice("hears", name, [field.name for field in fields(Place)])
        for name, found, base in (("kind", self.kind, Mixer), ("options", self.options, MixerOptions)):
            if not issubclass(found, base):
                raise UserError(f"{name} is {found.__name__}; derive it from recbft.mixers.{base.__name__}")

    def make(self, place: Place, options: MixerOptions | None = None, **more: Any) -> Mixer:
        """The mixer of one layer, by default with its own options' defaults; ``more``: arguments of its kind alone."""
        given: dict[str, Any] = {name: getattr(place, name) for name in self.hears} | dict(self.fixed) | more
        if self.options is not MixerOptions:
            given["config"] = self.options() if options is None else options
        estimation = place.estimation
        if self.precision not in ESTIMATORS:
            given["gives_precision"] = estimation is not None
        if estimation is not None:
            heard = _HEARD_OF_ESTIMATION.get(self.precision, ("lam_max",))
            given |= {name: getattr(estimation, name) for name in heard}
            if estimation.running:
                given["running"] = True
        return self.kind(place.hidden_size, place.n_heads, **given)


# What the constructor of a mixer is told of an ``Estimation``; of others the largest precision alone.
_HEARD_OF_ESTIMATION = {
    "softmax": ("lam_max", "estimator", "prior_dof", "prior_variance", "kriging"),
    "silu": ("lam_max", "estimator", "centre"),
}


def _positional(summary: str, scheme: str) -> MixerSpec:
    return MixerSpec(
        summary=summary,
        kind=PositionalAttention,
        options=PositionalConfig,
        fixed={"scheme": scheme},
        hears=("dropout", "output_projection"),
        reads_back=True,
    )


def _robust(summary: str, *, coupled: bool) -> MixerSpec:
    return MixerSpec(
        summary=summary,
        kind=RobustFilterAttention,
        options=RobustFilterConfig,
        fixed={"coupled": coupled},
        precision="own",
        hears=("dropout", "output_projection"),
        reads_back=True,
    )


_RULES = {"reset": "delta rule (covariance reset at every token)", "additive": "linear attention (writes add up)"}
_KEPT = {
    "identity": "nothing is forgotten",
    "scalar": "a learned share is kept",
    "diagonal": "a learned share of each row is kept",
    "retention": "a fixed share per head is kept",
}


def _design(name: str) -> MixerSpec:
    model = DESIGN_MODELS[name]
    by_column = ", a noise per column" if model.by_column else ""
    return MixerSpec(
        summary=f"{_RULES[model.rule]}: {_KEPT[model.transition]}{by_column}",
        kind=MemoryFamilyMixer,
        options=MemoryFamilyConfig,
        fixed={"design": name},
        precision="own" if model.has_precision else "none",
        hears=("output_projection",),
        both_ways=False,
        reads_back=True,
    )


MIXERS: dict[str, MixerSpec] = {
    "attention": MixerSpec(summary="softmax attention, precision-weighted kriging", kind=SoftmaxAttention),
    "rope": _positional("softmax attention with rotated queries and keys", "rope"),
    "alibi": _positional("softmax attention with a fixed slope in the lag per head", "alibi"),
    "decayed_rope": _positional("rope with a learned decay per head", "decayed_rope"),
    "sc_rope": _positional("rope whose frequencies and decays are bound together in bands", "sc_rope"),
    "rfa": _robust("robust filter attention: keys weighed by how well a linear SDE explains them", coupled=False),
    "sc_rfa": _robust("robust filter attention with frequencies in bands and decay bound to them", coupled=True),
    "bayesian": MixerSpec(
        summary="Bayesian layer: a memory per head with its covariance, updated as a Kalman filter",
        kind=BayesianMixer,
        options=BayesianConfig,
        precision="own",
        hears=("output_projection",),
        both_ways=False,
        reads_back=True,
    ),
    **{name: _design(name) for name in DESIGN_MODELS},
    "boosted": MixerSpec(
        summary="gradient-boosted attention: further rounds attend to what the first left over",
        kind=BoostedAttention,
        options=BoostedConfig,
    ),
    "twicing": MixerSpec(summary="twicing attention, (2A - A^2) V", kind=TwicingAttention),
    "spectral": MixerSpec(
        summary="a causal low-pass filter over the history, joined with softmax attention (BSARec)",
        kind=SpectralMixer,
        options=SpectralConfig,
        hears=("length", "dropout", "output_projection", "recency_decay"),
    ),
    "regime": MixerSpec(
        summary="softmax attention with an additive prior of fuzzy regimes",
        kind=RegimeAttention,
        options=RegimeConfig,
        hears=("length", "dropout", "output_projection", "recency_decay"),
        reads_back=True,
    ),
    "pointwise": MixerSpec(
        summary="gated pointwise SiLU attention (HSTU)",
        kind=PointwiseAttention,
        precision="silu",
        hears=("length", "dropout", "output_projection", "recency_decay"),
        both_ways=False,
    ),
}

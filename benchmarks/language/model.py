"""A causal language model of recbft's own parts: a token is an item, a window of text a history.

The model is ``sasrec`` with all of its arms, mixers and its precision channel: tied vocabulary, full cross-entropy at
every token, learned positions or those of the mixer. Its item counts are the tokens' counts in the training text, from
which precision starts.

    focal      equation (6.20) of ``recbft.models.losses`` in place of -log p
    held out   the end of the training text, whose loss after each epoch is what controllers look at

Source: Precision Tracked Transformer (arXiv 2605.18832), section 5.3.
Shapes: B windows, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.language.needle import needles_of, plant
from benchmarks.language.text import Corpus, Windows, load_corpus
from benchmarks.mechanisms.mqar import warmed
from recbft.config.fields import from_dict
from recbft.datasets.batches import Batch
from recbft.errors import RunError, UserError
from recbft.evaluation.views import evaluation_mode
from recbft.mixers import MIXERS, MixerOptions, SoftmaxAttention
from recbft.mixers.boosted import MlpGate
from recbft.models import MODELS, CoreConfig
from recbft.models.feed_forward import FuzzyMoEConfig
from recbft.models.losses import focal_losses
from recbft.models.sasrec import SASRecConfig
from recbft.training.controllers import VALIDATION_LOSS, ControllersConfig, Moment, make_controllers
from recbft.training.optimiser import clip_gradients, parameter_groups, warmup_ramp
from recbft.training.process_settings import chosen_device
from recbft.training.run_config import TrainingConfig

DROPOUT = 0.1
OPTIMISER = TrainingConfig(optimizer="adamw", weight_decay=0.01, clip_norm=1.0)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, its text and its training."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int  # T in training
    batch_size: int  # windows of a step
    epochs: int
    learning_rate: float
    warmup: float = 0.04  # share of the steps


SIZES = {
    "small": Size(vocabulary=2000, width=64, layers=2, heads=4, length=64, batch_size=32, epochs=6, learning_rate=3e-3),
    "full": Size(
        vocabulary=8000, width=256, layers=4, heads=4, length=256, batch_size=32, epochs=15, learning_rate=1e-3
    ),
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One model of a table."""

    mixer: str = "attention"
    mixing: Mapping[str, Any] = field(default_factory=dict)
    positions: bool = True  # learned ones; without them the mixer alone knows where a token stands
    precision: bool = False
    recency: bool = False
    wider: float = 1.0  # times the width, rounded to whole heads of an even width
    replaced: float = 0.0  # share of the training targets that are another token of the text
    focal: bool = False
    moe: Mapping[str, Any] = field(default_factory=dict)  # experts in the place of the feed-forward network
    controllers: Mapping[str, Any] = field(default_factory=dict)  # what steers training, by the held-out loss
    held_out: float = 0.0  # share of the training text that is not trained on
    needles: float = 0.0  # share of the training windows with pairs that are asked for, of ``language.needle``

    @property
    def any_length(self) -> bool:
        """Whether it can read more than the trained length."""
        return not self.positions and "length" not in MIXERS[self.mixer].hears


class Focal(nn.Module):
    """The loss with a learned exponent."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, losses: Tensor) -> Tensor:
        """-log p of each token, (N,), to the mean loss."""
        return focal_losses(losses, self.alpha).mean()


def make_model(arm: Arm, size: Size, corpus: Corpus, seed: int) -> Any:
    """The model of an arm; equal seeds give equal weights to what arms share."""
    spec = MIXERS[arm.mixer]
    step = 2 * size.heads
    config = SASRecConfig(
        hidden_size=round(size.width * arm.wider / step) * step if arm.wider != 1 else size.width,
        n_layers=size.layers,
        n_heads=size.heads,
        max_length=size.length,
        absolute_positions=arm.positions,
        dropout=DROPOUT,
        recency_decay=arm.recency,
        output_projection="output_projection" in spec.hears,
    )
    options = None if spec.options is MixerOptions else from_dict(spec.options, arm.mixing, "mixing")
    counts = torch.bincount(corpus.train, minlength=corpus.vocabulary + 1)
    core = CoreConfig() if arm.precision else None
    moe = from_dict(FuzzyMoEConfig, arm.moe, "moe")
    return MODELS["sasrec"].make(config, core, counts, seed=seed, mixer=arm.mixer, mixing=options, moe=moe)


def train(arm: Arm, size: Size, corpus: Corpus, seed: int, device: torch.device) -> tuple[Any, float]:
    """The trained model in evaluation mode, and its mean loss over the last epoch.

    Its weights are those of the last epoch, or the mean that ``controllers.swa`` has made where its held-out loss is
    lower.
    """
    cut = len(corpus.train) - round(len(corpus.train) * arm.held_out)
    windows = Windows(corpus.train[:cut], size.length, replaced=arm.replaced)
    held_out = Windows(corpus.train[cut:], size.length)
    if cut < 2 * size.length or (arm.held_out and len(held_out.tokens) <= size.length):
        raise UserError(
            f"the training text of {corpus.name} has {len(corpus.train):,} tokens, less than two windows of "
            f"{size.length}{' and one that is held out' if arm.held_out else ''}; take a longer text or a smaller "
            "--size"
        )
    torch.manual_seed(seed)
    model = make_model(arm, size, corpus, seed).to(device).train()
    controllers = make_controllers(from_dict(ControllersConfig, arm.controllers, "controllers"), model, seed=seed)
    focal = Focal().to(device) if arm.focal else None
    groups = parameter_groups(model, replace(OPTIMISER, learning_rate=size.learning_rate))
    if focal is not None:
        groups.append({"params": list(focal.parameters()), "weight_decay": 0.0})
    optimiser = torch.optim.AdamW(groups, lr=size.learning_rate)
    steps = size.epochs * num_batches(windows, size)
    rate = warmed_cosine(optimiser, steps, size.warmup)
    order, step, mean = torch.Generator().manual_seed(seed), 0, math.nan
    for epoch in range(1, size.epochs + 1):
        model.refresh()
        losses = []
        for batch in epoch_batches(arm, windows, size, corpus, order):
            model.set_ramp(warmup_ramp(step, OPTIMISER.warmup_steps))
            here = batch.to(device)
            loss = model.loss(here) if focal is None else focal(token_losses(model, here))
            if not torch.isfinite(loss):
                raise RunError(f"the loss is {loss.item()} at step {step}; the arm does not train at this rate")
            optimiser.zero_grad()
            loss.backward()
            clip_gradients(model, optimiser, OPTIMISER.clip_norm)
            optimiser.step()
            rate.step()
            step += 1
            losses.append(loss.detach())
        mean = float(torch.stack(losses).mean())
        if arm.controllers:
            # As it was validated: the guardian moves the model when an epoch has ended.
            last = copy.deepcopy(model.state_dict())
            value = mean_loss(model, held_out, size.batch_size, device)
            counts = {"epoch": epoch, "step": step, "total_epochs": size.epochs, "total_steps": steps}
            moment = Moment(model=model, optimizer=optimiser, **counts)
            controllers.on_epoch_end(moment, {VALIDATION_LOSS: value})
    if arm.controllers:
        model.load_state_dict(last)
        if (offered := controllers.final_weights(model)) is not None:
            with offered:
                averaged, weights = (
                    mean_loss(model, held_out, size.batch_size, device),
                    copy.deepcopy(model.state_dict()),
                )
            if averaged < value:
                model.load_state_dict(weights)
            print(f"held-out loss {value:.4f} after the last epoch, {averaged:.4f} with averaged weights")
    model.refresh()
    return model.eval(), mean


def asked_for(options: argparse.Namespace) -> tuple[Size, Corpus, torch.device]:
    """What the options size, epochs, data, data_root and device of a command name."""
    size = SIZES[options.size]
    size = replace(size, epochs=options.epochs or size.epochs)
    corpus = load_corpus(options.data, Path(options.data_root), vocabulary=size.vocabulary)
    return size, corpus, chosen_device(TrainingConfig(device=options.device).device)


def warmed_cosine(optimiser: torch.optim.Optimizer, steps: int, warmup: float) -> torch.optim.lr_scheduler.LambdaLR:
    """The rate by a warm-up over a share of the steps, then a cosine."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: warmed(step, max(1, round(warmup * steps)), max(steps, step + 1))
    )


def epoch_batches(arm: Arm, windows: Windows, size: Size, corpus: Corpus, order: torch.Generator) -> Iterator[Batch]:
    """The batches of one epoch, on the CPU: windows in any order, from a place that differs from epoch to epoch."""
    first, needles = int(torch.randint(size.length, (), generator=order)), needles_of(corpus)
    for batch in windows.batches(size.batch_size, start=first, order=order):
        yield plant(batch, needles, order, share=arm.needles)[0] if arm.needles else batch


def num_batches(windows: Windows, size: Size) -> int:
    """Of an epoch."""
    return -(-(len(windows.tokens) - size.length) // size.length // size.batch_size)


@torch.no_grad()
def mean_loss(model: Any, windows: Windows, batch_size: int, device: torch.device) -> float:
    """Mean of -log p over the tokens of whole windows, without dropout."""
    model.refresh()
    with evaluation_mode(model):
        parts = [token_losses(model, batch.to(device)).double() for batch in windows.batches(batch_size)]
    return float(torch.cat(parts).mean())


def logits_of(model: Any, batch: Batch) -> Tensor:
    """Scores of all tokens at every place, (B T, V)."""
    states = model.encode(batch).mean.flatten(0, 1)
    weight, bias = model.item_table()
    assert bias is None
    return states @ weight[1:].T


def token_losses(model: Any, batch: Batch) -> Tensor:
    """-log p of every target, (B T,)."""
    assert batch.target is not None
    return F.cross_entropy(logits_of(model, batch), batch.target.flatten() - 1, reduction="none")


@torch.no_grad()
def perplexities(model: Any, arm: Arm, size: Size, corpus: Corpus, device: torch.device) -> dict[int, dict[str, float]]:
    """By length, in tokens: perplexity per token and bits per byte of the test text.

    Each length reads windows side by side, and all lengths score the same tokens.
    """
    lengths = [size.length * times for times in ((1, 2, 4, 8) if arm.any_length else (1,))]
    longest = 8 * size.length
    scored = (len(corpus.test) - 1) // longest * longest
    if not scored:
        raise UserError(
            f"the test text of {corpus.name} has {len(corpus.test):,} tokens, less than a window of {longest}; take a "
            "longer text or a smaller --size"
        )
    tokens, found = corpus.test[: scored + 1], {}
    num_bytes = int(corpus.num_bytes[tokens[1:]].sum())
    for length in lengths:
        batch_size = max(1, size.batch_size * size.length // length)
        total = scored * mean_loss(model, Windows(tokens, length), batch_size, device)
        found[length] = {"perplexity": math.exp(total / scored), "bits_per_byte": total / math.log(2) / num_bytes}
    return found


@torch.no_grad()
def inside(model: Any, size: Size, corpus: Corpus, device: torch.device) -> dict[str, list[float]]:
    """Of softmax attention, in the order of layers and rounds: mean entropy in nats and mean gate of a correction."""
    found: dict[str, list[float]] = {"entropies": [], "gates": []}

    def entropy(module: Any, inputs: Any, more: Any, _: Any) -> None:
        weights = module.attention(*inputs[:3], ramp=more.get("ramp", 1.0), source=more.get("source"))
        found["entropies"].append(float(torch.special.entr(weights).sum(-1).mean()))

    def gate(module: Any, inputs: Any, _: Any) -> None:
        found["gates"].append(float(module.read(torch.cat(inputs, dim=-1)).sigmoid().mean()))

    hooks = [m.register_forward_hook(entropy, with_kwargs=True) for m in model.modules() if type(m) is SoftmaxAttention]
    hooks += [m.register_forward_hook(gate) for m in model.modules() if isinstance(m, MlpGate)]
    try:
        model.encode(next(Windows(corpus.test, size.length).batches(size.batch_size)).to(device))
    finally:
        for hook in hooks:
            hook.remove()
    return found

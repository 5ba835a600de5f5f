"""Distillation of a gated delta network into Bayesian layers, by what its layers give and then by its logits.

python -m benchmarks.language.distil --data-root DIR --json FILE
python -m benchmarks.language.distil --size full --seeds 0-4 --data-root DIR --json FILE      for a GPU

    teacher            ``gated_deltanet`` in all layers, trained on text
    teacher, further   then trained on text for as many tokens as the distillation, in the same parts
    student, before    ``bayesian`` in their place; all else is the teacher's, and of a mixer what both kinds have
    student, layers    each mixer fitted to the teacher's, on what the teacher's reads                          (58)
    student, logits    then all of them together to the teacher's predictions                                  (59)
    student, scratch   trained on text for as many tokens as (58) and (59) together

    NMSE = mean (y' - y)^2 / (Var y + 1e-6)       y what the teacher's mixer gives, y' the student's
    (58)   NMSE + 0.05 (1 - cos(y', y))           summed over layers
    (59)   a KL(p || p') + (1 - a) NMSE           mean over layers; a goes from 0.8 to 0.9 half-way, in 10 steps

As in the paper a quarter of the tokens is for (58), in which mixers train, and the rest for (59), in which the weights
of the feed-forward networks do so too, at a tenth of the rate. AdamW without weight decay or dropout, warm-up, cosine
to a tenth; the rate of (59) is 0.6 of that of (58). The paper exchanges four of 24 layers, here it is all of them.
Tokens are matched, seconds are told: a step of (59) runs the teacher as well. Half of all training windows have pairs
planted that ``language.needle`` asks for; perplexity is of plain text.

Source: Dowling et al., Memory by Design, section 4.3 and appendix G.
Shapes: B windows, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from benchmarks.language.model import (
    SIZES,
    Arm,
    Size,
    asked_for,
    epoch_batches,
    logits_of,
    make_model,
    num_batches,
    perplexities,
    train,
)
from benchmarks.language.needle import accuracies, needles_of
from benchmarks.language.text import SOURCES, Corpus, Windows
from benchmarks.mechanisms.mqar import warmed
from recbft.datasets.batches import Batch
from recbft.errors import RunError
from recbft.experiments.lists import parse_seeds
from recbft.reporting.tables import text_table
from recbft.system.files import write_json

NAME = "language.distil"
TEACHER, STUDENT = (Arm(mixer=name, positions=False, needles=0.5) for name in ("gated_deltanet", "bayesian"))
COSINE_WEIGHT, LEAST_VARIANCE = 0.05, 1e-6  # of (58)
LOGIT_SHARES, RAMP = (0.8, 0.9), 10  # of (59): a, and the steps from one to the other
LOGIT_RATE, NETWORK_RATE, FLOOR = 0.6, 0.1, 0.1
PUBLISHED = (
    "published, 340M parameters, WikiText-103 at 2,048 tokens: perplexity 15.94 of the teacher, 15.97 trained further, "
    "16.34 distilled"
)

Loss = Callable[[Any, Batch, float], Tensor]  # of a model, a batch and the steps since half-way


class Heard(NamedTuple):
    """One call of a mixer."""

    inputs: tuple[Any, ...]
    more: dict[str, Any]
    output: Tensor  # (B, T, D)


@contextmanager
def heard(model: Any) -> Iterator[list[Heard]]:
    """What the mixers of a model are given and give while the context is open, in the order of layers."""
    calls: list[Heard] = []

    def keep(_: Any, inputs: Any, more: Any, output: Any) -> None:
        calls.append(Heard(inputs, more, output.innovation))

    hooks = [block.mixer.register_forward_hook(keep, with_kwargs=True) for block in model.blocks]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def misfit(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """NMSE and mean cosine of a layer's output, (B, T, D)."""
    nmse = (found - wanted).square().mean() / (wanted.var(correction=0) + LEAST_VARIANCE)
    return nmse, F.cosine_similarity(found, wanted, dim=-1).mean()


def layer_misfits(student: Any, teacher: Any, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """``misfit`` of each layer on what the teacher's reads."""
    with torch.no_grad(), heard(teacher) as calls:
        teacher.encode(batch)
    mixers = [block.mixer for block in student.blocks]
    return [
        misfit(mixer(*call.inputs, **call.more).innovation, call.output)
        for mixer, call in zip(mixers, calls, strict=True)
    ]


def by_layers(teacher: Any) -> Loss:
    """Equation (58)."""

    def loss(student: Any, batch: Batch, _: float) -> Tensor:
        parts = [nmse + COSINE_WEIGHT * (1 - cosine) for nmse, cosine in layer_misfits(student, teacher, batch)]
        return torch.stack(parts).sum()

    return loss


def by_logits(teacher: Any) -> Loss:
    """Equation (59)."""

    def loss(student: Any, batch: Batch, since: float) -> Tensor:
        with torch.no_grad(), heard(teacher) as wanted:
            p = logits_of(teacher, batch).log_softmax(dim=-1)
        with heard(student) as found:
            own = logits_of(student, batch).log_softmax(dim=-1)
        boundary = torch.stack([misfit(a.output, b.output)[0] for a, b in zip(found, wanted, strict=True)]).mean()
        low, high = LOGIT_SHARES
        share = low + (high - low) * min(1.0, max(0.0, since / RAMP))
        return share * F.kl_div(own, p, reduction="batchmean", log_target=True) + (1 - share) * boundary

    return loss


def successor(teacher: Any, size: Size, corpus: Corpus, seed: int) -> Any:
    """A student with everything of the teacher's that it has a place for; in evaluation mode."""
    student = make_model(STUDENT, size, corpus, seed)
    own, given = student.state_dict(), teacher.state_dict()
    kept = {name: x for name, x in given.items() if name in own and own[name].shape == x.shape}
    student.load_state_dict(own | kept)
    return student.eval()


def tune(
    model: Any, loss_of: Loss, epochs: int, *, networks: bool, size: Size, corpus: Corpus, seed: int, device: Any
) -> None:
    """Train the mixers of a model, and with ``networks`` the weights of its feed-forward networks."""
    rate = size.learning_rate * (LOGIT_RATE if networks else 1.0)
    groups: list[dict[str, Any]] = [{"params": [p for block in model.blocks for p in block.mixer.parameters()]}]
    if networks:
        weights = [layer.weight for block in model.blocks for layer in (block.inner, block.outer)]
        groups.append({"params": weights, "lr": NETWORK_RATE * rate})
    trained = [parameter for group in groups for parameter in group["params"]]
    windows = Windows(corpus.train, size.length)
    optimiser = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)
    steps = epochs * num_batches(windows, size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: FLOOR + (1 - FLOOR) * warmed(step, max(1, round(size.warmup * steps)), max(steps, step + 1)),
    )
    order, step = torch.Generator().manual_seed(2 * seed + networks), 0
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    for _ in range(epochs):
        for batch in epoch_batches(STUDENT, windows, size, corpus, order):
            loss = loss_of(model, batch.to(device), step - steps / 2)
            if not torch.isfinite(loss):
                raise RunError(f"the loss is {loss.item()} at step {step}; lower the learning rate of the size")
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
            schedule.step()
            step += 1
    model.requires_grad_(True)


def epochs_of(size: Size) -> tuple[int, int]:
    """Of (58) and of (59)."""
    layers = max(1, round(size.epochs / 4))
    return layers, max(1, size.epochs - layers)


def distil(size: Size, corpus: Corpus, seed: int, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Lines about every model of the table, by kind."""
    lines: dict[str, list[dict[str, Any]]] = {"perplexity": [], "layers": [], "needles": []}
    layers, logits = epochs_of(size)

    def judge(name: str, model: Any, arm: Arm, seconds: float) -> None:
        known, seconds = {"model": name, "seed": seed}, round(seconds, 1)
        for length, figures in perplexities(model, arm, size, corpus, device).items():
            lines["perplexity"].append({**known, "length": length, **figures, "seconds": seconds})
        lengths = [size.length * times for times in (1, 2, 4, 8)]
        tokens = size.batch_size * size.length
        for line in accuracies(model, corpus, lengths, tokens=tokens, device=device):
            lines["needles"].append({**known, **line})
        print(
            f"{name}, seed {seed}: {lines['perplexity'][-1]['perplexity']:.2f} at {length}, {seconds:.0f} s", flush=True
        )

    def compare(name: str, student: Any) -> None:
        batch = next(Windows(corpus.test, size.length).batches(size.batch_size)).to(device)
        with torch.no_grad():
            found = layer_misfits(student, teacher, batch)
        for layer, (nmse, cosine) in enumerate(found, start=1):
            fit = {"nmse": float(nmse), "cosine": float(cosine)}
            lines["layers"].append({"model": name, "seed": seed, "layer": layer, **fit})

    how: dict[str, Any] = {"size": size, "corpus": corpus, "seed": seed, "device": device}
    began = time.perf_counter()
    teacher, _ = train(TEACHER, size, corpus, seed, device)
    judge("teacher", teacher, TEACHER, time.perf_counter() - began)

    def on_text(model: Any, batch: Batch, _: float) -> Tensor:
        loss: Tensor = model.loss(batch)
        return loss

    began, further = time.perf_counter(), copy.deepcopy(teacher).train()
    tune(further, on_text, layers, networks=False, **how)
    tune(further, on_text, logits, networks=True, **how)
    judge("teacher, further", further.eval(), TEACHER, time.perf_counter() - began)

    seconds, student = 0.0, successor(teacher, size, corpus, seed).to(device)
    for name, loss, epochs, networks in (
        ("before", None, 0, False),
        ("layers", by_layers(teacher), layers, False),
        ("logits", by_logits(teacher), logits, True),
    ):
        if loss is not None:
            began = time.perf_counter()
            tune(student, loss, epochs, networks=networks, **how)
            seconds += time.perf_counter() - began
        judge(f"student, {name}", student, STUDENT, seconds)
        compare(f"student, {name}", student)

    began = time.perf_counter()
    scratch, _ = train(STUDENT, replace(size, epochs=layers + logits), corpus, seed, device)
    judge("student, scratch", scratch, STUDENT, time.perf_counter() - began)
    return lines


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    size, corpus, device = asked_for(options)
    made = machine.header(recorded(NAME, arguments), device=device)
    print("\n".join(machine.lines(made)))
    print(f"{corpus.name}: {len(corpus.train):,} tokens train, {len(corpus.test):,} test, tokens {corpus.hash[:12]}\n")
    lines: dict[str, list[dict[str, Any]]] = {}
    for seed in parse_seeds(options.seeds):
        for kind, found in distil(size, corpus, seed, device).items():
            lines.setdefault(kind, []).extend(found)
    print("\nperplexity")
    print(summary(lines["perplexity"], "length", "perplexity", "{:.2f}", unit=" tokens"))
    print("\nNMSE of layers on the teacher's input, test text")
    print(summary(lines["layers"], "layer", "nmse", "{:.4f}", unit=""))
    print("\ncosine likewise")
    print(summary(lines["layers"], "layer", "cosine", "{:.4f}", unit=""))
    print("\nneedles, share of right answers by length")
    print(summary(lines["needles"], "length", "accuracy", "{:.3f}", unit=" tokens"))
    for length, found in pd.DataFrame(lines["needles"]).groupby("length"):
        print(f"\nneedles of {length} tokens by depth")
        print(summary(found.to_dict("records"), "depth", "accuracy", "{:.3f}", unit=""))
    print(f"by chance {1 / len(needles_of(corpus).values):.3f}\n\n{PUBLISHED}")
    if options.json is not None:
        about = {"data": corpus.name, "data_hash": corpus.hash[:12]}
        write_json(options.json, machine.close(made) | about | lines)
    return 0


def summary(lines: Sequence[dict[str, Any]], by: str, figure: str, form: str, *, unit: str) -> str:
    """Means over seeds, a line per model."""
    table = pd.DataFrame(lines)
    means = table.pivot_table(index="model", columns=by, values=figure, sort=False)
    rows = [[str(name), *(form.format(value) for value in row)] for name, row in means.iterrows()]
    return text_table([by, *(f"{column}{unit}" for column in means.columns)], rows)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "A gated delta network into Bayesian layers.")
    options.add_argument("--size", choices=sorted(SIZES), default="small")
    options.add_argument("--data", choices=list(SOURCES), default="wikitext2")
    options.add_argument("--data-root", metavar="DIR", required=True, help="folder that text/ lies in")
    options.add_argument("--seeds", default="0")
    options.add_argument("--epochs", type=count, help="of the teacher and of the rest; unless given, what the size has")
    options.add_argument("--device", default="auto")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)

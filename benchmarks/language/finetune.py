"""Fine-tuning of a pretrained Llama on wrong labels, with and without a precision channel.

python -m benchmarks.language.finetune --weights DIR/text/stories260K.bin --json FILE
python -m benchmarks.language.finetune --weights wikitext2 --data-root DIR --json FILE       a small one, made first
python -m benchmarks.language.finetune --weights FOLDER --size full --seeds 0-4 --json FILE      any Llama

The model draws sequences of its own, of which some train and others test. In training a share of the targets is another
token of the sequences (what is wrong at one share is wrong at every larger one); inputs are right. Arms start from the
same weights: ``sft`` as it is, ``bft`` with ``recbft.pretrained.track_precision``, ``focal`` with a learned exponent.
AdamW at one rate for all parameters, weight decay 0.05, warm-up over a tenth of the steps, cosine.

Reported is the excess over the teacher, the mean over test tokens of log p_teacher - log p: 0 where nothing was lost.
The paper has F1 of TinyLlama on SQuAD: over `sft`, `bft` gains 3.9 % on average and `focal` 0.3 %.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 5.3 and appendix O.
Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import machine
from benchmarks.command import finish, parse, parse_shares, parser, recorded
from benchmarks.language.llama2c import load_llama2c
from benchmarks.language.model import SIZES as MODEL_SIZES
from benchmarks.language.model import Focal, warmed_cosine
from benchmarks.language.model import Size as ModelSize
from benchmarks.language.text import SOURCES, Corpus, Windows, load_corpus
from recbft.errors import RunError, UserError, did_you_mean
from recbft.experiments.lists import parse_seeds, split_list
from recbft.reporting.tables import text_table
from recbft.system.files import write_json
from recbft.training.process_settings import chosen_device
from recbft.training.run_config import TrainingConfig

NAME = "language.finetune"
ARMS = ("sft", "bft", "focal")
WEIGHT_DECAY, WARMUP = 0.05, 0.1


@dataclass(frozen=True)
class Size:
    """What is drawn and how it is learned."""

    sequences: int  # that train
    test_sequences: int
    length: int
    batch_size: int
    epochs: int
    learning_rate: float


SIZES = {"small": Size(512, 256, 128, 8, 2, 3e-4), "full": Size(4096, 1024, 256, 16, 2, 1e-4)}


def load_teacher(weights: Path) -> Any:
    """A file of llama2.c, or a folder that ``save_pretrained`` wrote."""
    if not weights.is_dir():
        return load_llama2c(weights)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()


def made_of(corpus: Corpus, size: ModelSize) -> Any:
    """A small Llama that has learned a text, in evaluation mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=corpus.vocabulary + 1, hidden_size=size.width, intermediate_size=3 * size.width,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads,
        max_position_embeddings=4 * size.length, tie_word_embeddings=True,
    )  # fmt: skip
    model, windows, order = LlamaForCausalLM(config), Windows(corpus.train, size.length), torch.Generator()
    optimiser = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, weight_decay=WEIGHT_DECAY)
    steps = size.epochs * sum(1 for _ in windows.batches(size.batch_size))
    rate = warmed_cosine(optimiser, steps, size.warmup)
    for _ in range(size.epochs):
        for batch in windows.batches(size.batch_size, order=order):
            assert batch.target is not None
            optimiser.zero_grad()
            token_losses(model, batch.items, batch.target).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            rate.step()
    return model.eval()


@torch.no_grad()
def draw(teacher: Any, number: int, length: int, *, seed: int) -> Tensor:
    """Sequences of the model's own, (B, T + 1), from its first token on."""
    torch.manual_seed(seed)
    begin = teacher.config.bos_token_id
    first = torch.full((number, 1), 1 if begin is None else begin, device=teacher.device)
    how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "eos_token_id": None, "pad_token_id": 0}
    parts = [
        teacher.generate(some, attention_mask=torch.ones_like(some), max_new_tokens=length, **how)
        for some in first.split(64)
    ]
    return torch.cat(parts)


def token_losses(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target, (B, T), of inputs (B, T)."""
    return F.cross_entropy(model(tokens).logits.transpose(1, 2), targets, reduction="none")


@torch.no_grad()
def mean_loss(model: Any, sequences: Tensor) -> float:
    """Over all tokens of (B, T + 1)."""
    parts = [token_losses(model, some[:, :-1], some[:, 1:]).double().mean(dim=1) for some in sequences.split(32)]
    return float(torch.cat(parts).mean())


def tune(teacher: Any, arm: str, train: Tensor, targets: Tensor, size: Size, seed: int) -> Any:
    """The teacher's copy, trained on ``targets`` (B, T) of ``train`` (B, T + 1); in evaluation mode."""
    from recbft.pretrained import track_precision

    steps = size.epochs * -(-len(train) // size.batch_size)
    model = copy.deepcopy(teacher)
    if arm == "bft":
        model = track_precision(model, warmup=max(1, round(WARMUP * steps)), seed=seed)
    focal = Focal().to(train.device) if arm == "focal" else None
    parameters = [*model.parameters(), *(() if focal is None else focal.parameters())]
    optimiser = torch.optim.AdamW(parameters, lr=size.learning_rate, weight_decay=WEIGHT_DECAY)
    rate = warmed_cosine(optimiser, steps, WARMUP)
    order = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(size.epochs):
        for chosen in torch.randperm(len(train), generator=order).split(size.batch_size):
            losses = token_losses(model, train[chosen, :-1], targets[chosen]).flatten()
            loss = losses.mean() if focal is None else focal(losses)
            if not torch.isfinite(loss):
                raise RunError(f"{arm}: the loss is {loss.item()}; lower the learning rate of the size")
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            rate.step()
    return model.eval()


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    arms, shares, seeds = (
        split_list(options.arms),
        parse_shares(options.shares, or_none=True),
        parse_seeds(options.seeds),
    )
    for arm in arms:
        if arm not in ARMS:
            raise UserError(f"unknown arm {arm!r}; {did_you_mean(arm, ARMS)}")
    size, device = SIZES[options.size], chosen_device(TrainingConfig(device=options.device).device)
    if options.weights in SOURCES:
        made_as = MODEL_SIZES[options.size]
        corpus = load_corpus(options.weights, Path(options.data_root or "."), vocabulary=made_as.vocabulary)
        teacher = made_of(corpus, made_as).to(device)
    else:
        teacher = load_teacher(Path(options.weights)).to(device)
    made = machine.header(recorded(NAME, arguments), device=device)
    print("\n".join(machine.lines(made)), end="\n\n")
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        train = draw(teacher, size.sequences, size.length, seed=2 * seed)
        test = draw(teacher, size.test_sequences, size.length, seed=2 * seed + 1)
        own = mean_loss(teacher, test)
        print(f"seed {seed}: the teacher's own loss is {own:.4f}", flush=True)
        for share in shares:
            wrong = Windows(train.cpu()[:, 1:].flatten(), size.length, replaced=share).targets
            targets = wrong.view(len(train), -1).to(device)
            for arm in arms:
                excess = mean_loss(tune(teacher, arm, train, targets, size, seed), test) - own
                rows.append({"arm": arm, "share": share, "seed": seed, "teacher": own, "excess": excess})
                print(f"{arm}, {share:.0%} of the targets wrong, seed {seed}: {excess:+.4f}", flush=True)
    print()
    lines = [[arm, *(f"{_mean(rows, arm, share):.4f}" for share in shares)] for arm in arms]
    print(text_table(["excess, nats per token", *(f"{share:.0%} wrong" for share in shares)], lines))
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"finetune": rows})
    return 0


def _mean(rows: Sequence[dict[str, Any]], arm: str, share: float) -> float:
    found = [row["excess"] for row in rows if row["arm"] == arm and row["share"] == share]
    return sum(found) / len(found)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "Fine-tuning on wrong labels.")
    options.add_argument(
        "--weights", metavar="PATH", required=True, help="a file of llama2.c, a model's folder, or a text"
    )
    options.add_argument("--data-root", metavar="DIR", help="folder that text/ lies in, where a text is named")
    options.add_argument("--size", choices=sorted(SIZES), default="small")
    options.add_argument("--arms", default=",".join(ARMS))
    options.add_argument("--shares", default="0,0.1,0.2,0.4", help="of the training targets that are wrong")
    options.add_argument("--seeds", default="0")
    options.add_argument("--device", default="auto")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)

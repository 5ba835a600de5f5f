"""Time the gradients of several seeds that torch.func's vmap stacks against one backward after another.

    python -m benchmarks.stacked_seeds --dataset amazon-beauty --data-root DIR --seeds 4

One batch, dropout off, the processor time of this process. The stacked gradients must equal the others first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from benchmarks import machine
from benchmarks.command import count, finish, parse, recorded, training_parser
from recbft.datasets import Dataset
from recbft.errors import RunError
from recbft.experiments.arms import check_distinct, parse_arms
from recbft.reporting.tables import text_table
from recbft.system.files import write_json
from recbft.training import build
from recbft.training.run_config import RunConfig

NAME = "stacked_seeds"
TOLERANCE = 1e-5  # of a gradient, over the largest of its parameter


class Loss(nn.Module):
    """A model whose forward is its loss."""

    def __init__(self, config: RunConfig, dataset: Dataset) -> None:
        super().__init__()
        self.model: Any = build.build_model(config, dataset).train()
        self.model.set_ramp(1.0)
        self.model.refresh()

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = self.model.loss(batch)
        return loss


def measure(config: RunConfig, dataset: Dataset, *, seeds: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in turn."""
    batch = next(iter(build.training_batches(config, dataset).epoch(0)))
    losses = [Loss(replace(config, seed=seed), dataset) for seed in range(seeds)]
    parameters, _ = stack_module_state(losses)

    def of_one(own: dict[str, Tensor]) -> Tensor:
        loss: Tensor = functional_call(losses[0], own, (batch,))
        return loss

    def stacked() -> dict[str, Tensor]:
        found: dict[str, Tensor] = vmap(grad(of_one), randomness="same")(parameters)
        return found

    def one_by_one() -> dict[str, Tensor]:
        for loss in losses:
            loss.zero_grad()
            loss(batch).backward()
        named = [dict(loss.named_parameters()) for loss in losses]
        return {
            name: torch.stack([own[name].grad for own in named])  # type: ignore[misc]
            for name in named[0]
            if named[0][name].grad is not None
        }

    _check(stacked(), one_by_one())
    ways: dict[str, Callable[[], Any]] = {"one by one": one_by_one, "stacked": stacked}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name].append(time.process_time() - began)
    return seconds


@torch.no_grad()
def _check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        worst = float((found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6))
        if not worst <= TOLERANCE:  # NaN fails too
            raise RunError(f"the stacked gradient of {name} is off by {worst:.1e} (at most {TOLERANCE:.0e})")


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    arms = parse_arms(options.arms)
    named = {"model": options.model, "dataset": options.dataset, "data_root": options.data_root}
    named |= {"dropout": 0.0, "threads": options.threads, "device": "cpu"}
    exact = {"jacobian": "exact"}  # kept factors of the Jacobian would be those of one seed
    configs = [arm.config(options.settings, **named, **(exact if arm.name == "bft" else {})) for arm in arms]
    check_distinct(arms, configs)
    dataset = configs[0].data.load()
    header = machine.header(recorded(NAME, arguments), dataset)
    results = {
        arm.label: measure(config, dataset, seeds=options.seeds, rounds=options.rounds)
        for arm, config in zip(arms, configs, strict=True)
    }
    header = machine.close(header)
    print("\n".join([*machine.lines(header), ""]))
    medians = {label: {way: statistics.median(own) for way, own in times.items()} for label, times in results.items()}
    print(
        text_table(
            ["arm", "one by one s", "stacked s", "x one by one"],
            [
                [label, *(f"{seconds:.3f}" for seconds in own.values()), f"{own['stacked'] / own['one by one']:.2f}"]
                for label, own in medians.items()
            ],
        )
    )
    print(f"{options.seeds} seeds, median processor time of {options.rounds}; peak RSS {machine.peak_rss_mb():,} MB")
    if options.json:
        write_json(options.json, {"benchmark": NAME, **header, "seeds": options.seeds, "seconds": results})
    return 0


def _options(arguments: Sequence[str]) -> Any:
    options = training_parser(
        NAME, "Time gradients of seeds stacked by vmap against one after another.", dataset="ml-100k"
    )
    options.add_argument("--arms", default="matched,bft", help="NAME, NAME+recency, NAME[key=value,...]")
    options.add_argument("--seeds", type=count, default=4, metavar="N", help="seeds that are stacked")
    options.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds that are timed")
    options.add_argument("--threads", type=count, default=1, metavar="N")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)

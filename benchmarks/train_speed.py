"""Time the arms of one model against each other: seconds per epoch, tokens/s, evaluation, memory.

    python -m benchmarks.train_speed --dataset amazon-beauty --data-root DIR --json FILE
    python -m benchmarks.train_speed --dataset amazon-beauty --data-root DIR --profile bft

One process trains all arms with the training loop of ``recbft train``, a few steps of each in turn on the same batches,
so that whatever else the machine does falls on all of them alike. An epoch's time is that of its steps (packing of
batches included) and of one refresh of what the model keeps from its weights. Before any time is taken, every
precision-tracking arm must equal the plain layer while the warm-up ramp is 0.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import machine
from benchmarks.command import count, finish, parse, recorded, training_parser
from recbft.config.fields import to_dict
from recbft.datasets import Dataset
from recbft.datasets.batches import Batch, EpochBatches, pack_histories
from recbft.errors import RunError, UserError
from recbft.evaluation.evaluate import evaluate
from recbft.experiments.plan import ArmSpec, check_distinct, parse_arms
from recbft.models import MODELS
from recbft.models.contract import TrainableModel
from recbft.reporting.tables import text_table
from recbft.runs.checkpoint import TrainState
from recbft.system.files import write_json
from recbft.system.memory import keep_freed_memory
from recbft.training.build import build_model, training_batches
from recbft.training.graphs import GraphedSteps
from recbft.training.loop import fit
from recbft.training.optimiser import make_optimizer
from recbft.training.process_settings import chosen_device
from recbft.training.progress import Silent
from recbft.training.run_config import RunConfig

NAME = "train_speed"
WARM_UP_STEPS = 3
FOREVER = 2**31
HISTORIES = 64  # of the batch on which arms must agree
# float32, relative to the largest entry: two paths that add up the same terms in another order differ by about 1e-6.
TOLERANCE = 1e-4


@dataclass(kw_only=True)
class Contestant:
    """An arm in training, and the times it took."""

    arm: ArmSpec
    config: RunConfig
    model: TrainableModel
    optimizer: torch.optim.Optimizer
    batches: EpochBatches
    device: torch.device
    state: TrainState
    random_state: torch.Tensor  # its own, so that it trains as it would alone
    graphs: GraphedSteps | None  # where ``training.cuda_graphs`` asks for them
    chunks: list[float] = field(default_factory=list)  # seconds of each chunk of steps
    epochs: list[float] = field(default_factory=list)  # seconds of each epoch
    evaluations: list[float] = field(default_factory=list)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)


class _Steps:
    """The next few batches of an epoch, in the form in which the loop takes a whole one."""

    def __init__(self, batches: Iterator[Batch], num_batches: int) -> None:
        self.batches, self.num_batches = batches, num_batches
        self.began = 0.0

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Batches wherever the epoch stands; the clock starts at the first."""
        self.began = time.perf_counter()
        yield from itertools.islice(self.batches, self.num_batches)


def make_contestant(arm: ArmSpec, config: RunConfig, dataset: Dataset) -> Contestant:
    """An untrained model and its batches."""
    batches = training_batches(config, dataset)
    assert batches is not None  # checked with the options
    device = chosen_device(config.training.device)
    torch.manual_seed(config.seed)
    model = trainable(config, dataset).to(device)
    optimizer = make_optimizer(model, config.training)
    state = TrainState(
        epoch=0, step=0, seed=config.seed, dataset="", content_hash="", vocabulary_hash="", config_hash=""
    )
    return Contestant(
        arm=arm,
        config=config,
        model=model,
        optimizer=optimizer,
        batches=batches,
        device=device,
        state=state,
        random_state=torch.get_rng_state(),
        graphs=GraphedSteps(model, optimizer, config.training) if config.training.cuda_graphs else None,
    )


def trainable(config: RunConfig, dataset: Dataset) -> TrainableModel:
    model = build_model(config, dataset)
    assert isinstance(model, TrainableModel)  # checked with the options
    return model


def train_steps(contestant: Contestant, batches: Iterator[Batch], num_steps: int) -> tuple[float, float]:
    """Take the next steps of an epoch; seconds of the steps, and of the refresh before them."""
    c, steps, ended = contestant, _Steps(batches, num_steps), 0.0
    # One round of the loop, never validated and never stopped early.
    config = replace(c.config.training, epochs=c.state.epoch + 1, eval_every=FOREVER, patience=FOREVER)

    def stop_clock(row: dict[str, Any], best: bool) -> None:
        nonlocal ended
        if c.device.type == "cuda":
            torch.cuda.synchronize(c.device)
        ended = time.perf_counter()

    torch.set_rng_state(c.random_state)
    entered = time.perf_counter()
    fit(
        c.model,
        c.optimizer,
        steps,  # type: ignore[arg-type]
        config,
        c.state,
        validate=lambda: {config.valid_metric: 0.0},
        keep=stop_clock,
        progress=Silent(),
        graphs=c.graphs,
    )
    c.random_state = torch.get_rng_state()
    return ended - steps.began, steps.began - entered


def train_in_turn(contestants: Sequence[Contestant], *, epochs: int, chunk_steps: int) -> None:
    """Train all for some epochs, a chunk of steps of each in turn; whoever begins changes from chunk to chunk.

    What a model keeps from its weights is refreshed at every chunk, not at every epoch: beyond that each arm trains as
    it would alone.
    """
    turn = 0
    for epoch in range(epochs):
        iterators = [c.batches.epoch(epoch) for c in contestants]
        seconds: list[list[float]] = [[] for _ in contestants]
        refreshes: list[list[float]] = [[] for _ in contestants]
        num_batches = contestants[0].batches.num_batches
        for first in range(0, num_batches, chunk_steps):
            for n in range(len(contestants)):
                chosen = (n + turn) % len(contestants)
                steps = min(chunk_steps, num_batches - first)
                took, refresh = train_steps(contestants[chosen], iterators[chosen], steps)
                seconds[chosen].append(took)
                refreshes[chosen].append(refresh)
            turn += 1
        for c, took_all, refresh_all in zip(contestants, seconds, refreshes, strict=True):
            c.chunks += took_all
            c.epochs.append(sum(took_all) + statistics.median(refresh_all))


def evaluate_in_turn(contestants: Sequence[Contestant], dataset: Dataset, *, times: int) -> None:
    """Rank all test users with each, some times over; whoever begins changes from time to time."""
    for turn in range(times):
        for n in range(len(contestants)):
            c = contestants[(n + turn) % len(contestants)]
            began = time.perf_counter()
            c.model.refresh()
            result = evaluate(c.model, dataset, "test", memory_mb=c.config.evaluation.memory_mb)
            c.evaluations.append(time.perf_counter() - began)
            c.metrics = result.metrics


def measure(
    arms: Sequence[ArmSpec],
    configs: Sequence[RunConfig],
    dataset: Dataset,
    *,
    epochs: int,
    chunk_steps: int,
    times: int,
) -> list[Contestant]:
    """Warm up on throw-away models, then train and evaluate."""
    for arm, config in zip(arms, configs, strict=True):
        warm = make_contestant(arm, config, dataset)
        train_steps(warm, warm.batches.epoch(0), min(WARM_UP_STEPS, warm.batches.num_batches))
    contestants = [make_contestant(arm, config, dataset) for arm, config in zip(arms, configs, strict=True)]
    train_in_turn(contestants, epochs=epochs, chunk_steps=chunk_steps)
    evaluate_in_turn(contestants, dataset, times=times)
    return contestants


def result_of(contestant: Contestant, baseline: Contestant) -> dict[str, Any]:
    """The numbers of one arm; ratios are of chunks that trained side by side."""
    c = contestant
    seconds = statistics.median(c.epochs)
    return {
        "seconds_per_epoch": seconds,
        "seconds_of_epochs": c.epochs,
        "tokens_per_epoch": c.batches.num_tokens,
        "tokens_per_second": c.batches.num_tokens / seconds,
        "ratio": _ratio(c.chunks, baseline.chunks, baseline),
        "evaluation_seconds": statistics.median(c.evaluations),
        "seconds_of_evaluations": c.evaluations,
        "evaluation_ratio": _ratio(c.evaluations, baseline.evaluations, baseline),
        "epochs": len(c.epochs),
        "metrics": c.metrics,
        "hr@10": c.metrics["unfiltered"]["hr@10"],
        "ndcg@10": c.metrics["unfiltered"]["ndcg@10"],
        "config": to_dict(c.config),
    }


def _ratio(mine: Sequence[float], its: Sequence[float], baseline: Contestant) -> dict[str, Any]:
    """Of times taken in turns with the baseline's."""
    ratios = [one / other for one, other in zip(mine, its, strict=True)]
    spread = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios), "pairs": len(ratios)}
    return {"to": baseline.arm.label, **spread}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as text."""
    to = next(iter(results.values()))["ratio"]["to"]
    columns = (f"x {to}", "(min to max)")
    head = ["arm", "s/epoch", "tokens/s", *columns, "evaluation s", *columns, "HR@10", "NDCG@10"]
    rows = []
    for label, r in results.items():
        rows.append(
            [
                label,
                f"{r['seconds_per_epoch']:.2f}",
                f"{r['tokens_per_second']:,.0f}",
                *_ratio_in_words(r["ratio"], own=label == to),
                f"{r['evaluation_seconds']:.2f}",
                *_ratio_in_words(r["evaluation_ratio"], own=label == to),
                f"{r['hr@10']:.4f}",
                f"{r['ndcg@10']:.4f}",
            ]
        )
    return text_table(head, rows)


def _ratio_in_words(ratio: dict[str, Any], *, own: bool) -> tuple[str, str]:
    return f"{ratio['median']:.3f}", "" if own else f"({ratio['min']:.2f} to {ratio['max']:.2f})"


def profile(arm: ArmSpec, config: RunConfig, dataset: Dataset, *, steps: int) -> str:
    """The operators that took most of some training steps, by their own time."""
    contestant = make_contestant(arm, config, dataset)
    batches = contestant.batches.epoch(0)
    steps = min(steps, max(1, contestant.batches.num_batches - WARM_UP_STEPS))
    train_steps(contestant, batches, min(WARM_UP_STEPS, contestant.batches.num_batches - steps))
    kinds = [torch.profiler.ProfilerActivity.CPU]
    order = "self_cpu_time_total"
    if contestant.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        order = "self_cuda_time_total"
    with torch.profiler.profile(activities=kinds) as seen:
        train_steps(contestant, batches, steps)
    return f"{arm.label}: {steps} training steps\n{seen.key_averages().table(sort_by=order, row_limit=25)}"


def check_parity(label: str, config: RunConfig, dataset: Dataset) -> float:
    """Loss, states and shared gradients of an arm at ramp 0 against the plain layer of equal seed, on one batch.

    The largest difference, relative to the largest entry of its kind (loss, states, all gradients), is returned.
    """
    plain = replace(config, arm="matched", core=None, backbone=replace(config.backbone, recency_decay=False))
    batch = _some_batch(config, dataset)
    tracked, expected = (_values_and_gradients(trainable(one, dataset), batch) for one in (config, plain))
    worst = 0.0
    # Some gradients are 0 but for rounding (that of a key bias): what counts is their size beside the others.
    largest = max(float(value.abs().max()) for name, value in expected.items() if name.startswith("gradient"))
    for name, value in expected.items():
        scale = largest if name.startswith("gradient") else float(value.abs().max())
        difference = float((tracked[name] - value).abs().max()) / scale
        if not difference <= TOLERANCE:  # NaN fails too
            raise RunError(
                f"{label} at ramp 0 differs from the plain layer by {difference:.1e} of the largest entry in {name} "
                f"(at most {TOLERANCE:.0e}); no time is taken before they agree"
            )
        worst = max(worst, difference)
    return worst


def _some_batch(config: RunConfig, dataset: Dataset) -> Batch:
    """The first users' training events as one batch."""
    split = dataset.split
    users = (split.training_stop - split.training_start >= 2).nonzero()[0][:HISTORIES]
    stop = split.training_stop[users] - 1
    start = split.training_start[users].clip(min=stop - config.backbone.max_length)
    return pack_histories(split.items, start, stop, times=split.times, with_targets=True)


def _values_and_gradients(model: TrainableModel, batch: Batch) -> dict[str, torch.Tensor]:
    """Loss, user states and the gradient of every parameter, without dropout, at ramp 0."""
    model.eval()
    model.set_ramp(0.0)
    model.refresh()
    loss = model.loss(batch)
    loss.backward()
    with torch.no_grad():
        state = model.user_states(batch).state
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "user states": state, **gradients}


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as the command line does
    arms = parse_arms(options.profile or options.arms)
    configs = [_config(arm, options) for arm in arms]
    check_distinct(arms, configs)
    dataset = configs[0].data.load()
    header = machine.header(recorded(NAME, arguments), dataset, device=chosen_device(configs[0].training.device))
    parity = {
        arm.label: check_parity(arm.label, config, dataset)
        for arm, config in zip(arms, configs, strict=True)
        if config.core is not None
    }
    if options.profile:
        print("\n".join([*machine.lines(machine.close(header)), ""]))
        for arm, config in zip(arms, configs, strict=True):
            print(profile(arm, config, dataset, steps=options.profile_steps))
        return 0
    contestants = measure(
        arms,
        configs,
        dataset,
        epochs=options.repeats,
        chunk_steps=options.chunk_steps,
        times=options.evaluations,
    )
    header = machine.close(header)
    baseline = next((c for c in contestants if c.arm.label == "matched"), contestants[0])
    results = {c.arm.label: result_of(c, baseline) for c in contestants}
    memory = machine.peak_rss_mb()
    print("\n".join([*machine.lines(header), ""]))
    print(table(results))
    print(_footnotes(results, parity, memory, options.chunk_steps))
    if options.json:
        content = {"benchmark": NAME, **header, "peak_rss_mb": memory, "parity": parity, "arms": results}
        write_json(options.json, content)
    return 0


def _footnotes(results: dict[str, Any], parity: dict[str, float], memory: int, chunk_steps: int) -> str:
    first = next(iter(results.values()))
    notes = [
        f"s/epoch: median of {first['epochs']} epochs of {first['tokens_per_epoch']:,} training positions; "
        f"ratio: median over {first['ratio']['pairs']} paired chunks of {chunk_steps} steps",
        f"evaluation: all test users among all items, median of {len(first['seconds_of_evaluations'])}; "
        f"HR@10 and NDCG@10 unmasked, after {first['epochs']} epochs",
        f"peak RSS of the process with all {len(results)} arms: {memory:,} MB",
    ]
    notes += [f"{label} equals the plain layer at ramp 0 to {value:.0e}" for label, value in parity.items()]
    return "\n".join(notes)


def _config(arm: ArmSpec, options: Any) -> RunConfig:
    config = arm.config(
        options.settings,
        model=options.model,
        dataset=options.dataset,
        data_root=options.data_root,
        seed=options.seed,
        threads=options.threads,
    )
    if not MODELS[config.model].trainable:
        raise UserError(f"model {config.model!r} is not trained, so there is nothing to time; choose another")
    return config


def _options(arguments: Sequence[str]) -> Any:
    options = training_parser(NAME, "Time the arms of a model in interleaved chunks of training steps.")
    options.add_argument("--arms", default="published,matched,bft", help="NAME, NAME+recency, NAME[key=value,...]")
    options.add_argument("--repeats", type=count, default=3, metavar="N", help="epochs each arm is trained and timed")
    options.add_argument("--chunk-steps", type=count, default=8, metavar="N", help="steps of one arm before the next")
    options.add_argument("--evaluations", type=count, default=3, metavar="N", help="times the evaluation is timed")
    options.add_argument("--threads", type=count, default=2, metavar="N")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--profile", metavar="ARM", help="print this arm's costliest operators instead")
    options.add_argument("--profile-steps", type=count, default=20, metavar="N")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)

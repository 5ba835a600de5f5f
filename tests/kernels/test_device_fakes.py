"""Models over tensors that say they lie on a GPU, and are computed here: what would mix devices there fails here."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from recbft.datasets import SyntheticConfig, synthetic_dataset
from recbft.evaluation.evaluate import evaluate
from recbft.experiments.plan import parse_arms
from recbft.kernels import dispatch
from recbft.mixers import MIXERS
from recbft.mixers.memory_family import DESIGN_MODELS
from recbft.runs import checkpoint
from recbft.training.build import build_model, new_state, training_batches
from recbft.training.graphs import cut, pad, padded_loss
from recbft.training.loop import check_weights
from recbft.training.optimiser import clip_gradients, make_optimizer

GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    __torch_function__, numpy = torch._C._disabled_torch_function_impl, None
    device, is_cuda = GPU, True

    @staticmethod
    def __new__(cls, here):
        with _disable_current_modes():
            like = torch.empty_strided(here.shape, here.stride(), dtype=here.dtype, device="meta")
        made = torch.Tensor._make_subclass(cls, like)
        made.here = here.resolve_conj()
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, given=(), named=None):
        named, name = dict(named or {}), function._schema.name
        tensors = [x for x in tree_leaves((given, named)) if isinstance(x, torch.Tensor)]
        place = torch.device(named.get("device") or ("cuda" if any(isinstance(x, OnGpu) for x in tensors) else "cpu"))
        mixed = len({type(x) is OnGpu for x in tensors if x.dim()}) > 1 and name not in ("aten::copy_", "aten::index")
        if mixed or (place.type != "cpu" and named.get("generator") is not None):
            raise RuntimeError(f"{function} of the host and a GPU")
        here = {**named, "device": "cpu"} if named.get("device") is not None else named
        with _disable_current_modes():
            found = function(*(tree_map_only(OnGpu, lambda x: x.here, part) for part in given),
                             **tree_map_only(OnGpu, lambda x: x.here, here))  # fmt: skip
        for written in (*(named.get(key) for key in ("out", "grad_input")), given[0] if name[-1] == "_" else None):
            if isinstance(written, torch.Tensor):
                return written
        return tree_map_only(torch.Tensor, OnGpu if place.type != "cpu" else torch.clone, found)


class Launches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, given=(), named=None):
        return OnGpu.__torch_dispatch__(function, types, given, named)


class Reads(Launches):
    """What the host asks a GPU for, or hands it, in the middle of its work: by the name of the operation."""

    def __init__(self):
        super().__init__()
        self.found, self.count = set(), 0

    def __torch_dispatch__(self, function, types, given=(), named=None):
        name, sides = function._schema.name, {type(x) for x in given if isinstance(x, torch.Tensor)}
        asked = (named or {}).get("device")
        moved = asked is not None and (torch.device(asked).type == "cuda") != (OnGpu in sides)
        masked = name == "aten::index" and any(x is not None and x.dtype == torch.bool for x in given[1])
        copied = len(sides) == 2 if name == "aten::copy_" else name == "aten::_to_copy" and moved
        if masked or copied or name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"):
            self.found.add(name)
            self.count += 1
        return super().__torch_dispatch__(function, types, given, named)


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else nullcontext())
    monkeypatch.setattr(dispatch, "missing", lambda name: "no GPU" if name == "triton" else None)
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)


def made(arm, mixer, *settings, model=None):
    model = model or ("hstu" if mixer == "pointwise" else "sasrec")
    dataset = synthetic_dataset(SyntheticConfig(num_users=24, num_items=80, mean_length=9))
    settings = ["max_length=8", "hidden_size=8", "batch_size=12", f"mixer={mixer}", *settings]
    config = parse_arms(arm)[0].config(settings, model=model, dataset="synthetic")
    return config, dataset, build_model(config, dataset), training_batches(config, dataset)


@pytest.mark.parametrize("arm, mixer", [("matched", "attention"), ("matched", "gla"), *(("bft", name) for name in (
    "attention", "rfa", "bayesian", "regime", "pointwise"))])  # fmt: skip
def test_a_step_and_an_evaluation_keep_to_one_device(arm, mixer, pretended):
    config, dataset, net, batches = made(arm, mixer)
    with Launches():
        net.to(GPU).refresh()
        optimizer = make_optimizer(net, config.training)
        loss = net.loss(next(iter(batches.epoch(0))).to(GPU))
        loss.backward()
        optimizer.step()
        assert evaluate(net, dataset, "test").headline["hr@10"] >= 0
    assert type(loss) is OnGpu


@pytest.fixture
def launched(pretended, monkeypatch):
    """The kernels that Triton's interpreter has run, which are given nothing that lies on the host."""
    interpreter, names = pytest.importorskip("triton.runtime.interpreter"), []

    def launch(grid, *given, **named):
        assert all(type(x) is OnGpu for x in (*given, *named.values()) if isinstance(x, torch.Tensor)), grid.fn
        names.append(grid.fn.__name__)
        with _disable_current_modes():
            run(grid, *(x.here if isinstance(x, OnGpu) else x for x in given), **named)

    run = interpreter.GridExecutor.__call__
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "missing", lambda name: None)
    return names


@pytest.mark.skipif(not dispatch.interpreted() or dispatch.missing("triton") is not None, reason="needs it")
@pytest.mark.parametrize("mixer", ["attention", "rfa", "bayesian", "pointwise"])
def test_what_is_handed_to_kernels_lies_where_they_run(mixer, launched):
    config, _, net, batches = made("bft", mixer)
    with Launches():
        net.to(GPU).train().refresh()
        optimizer = make_optimizer(net, config.training)
        loss = net.loss(next(iter(batches.epoch(0))).to(GPU))
        loss.backward()
        optimizer.step()
    assert torch.isfinite(loss.here) and len(set(launched)) > 6


@pytest.mark.parametrize("model, arm, mixer, settings", [
    *(("sasrec", "bft" if spec.precision != "none" else "matched", name, ())
      for name, spec in MIXERS.items() if name not in {"pointwise", *DESIGN_MODELS} - {"gla"}),
    ("sasrec", "published", "attention", ()), ("bert4rec", "bft", "attention", ()), ("hstu", "bft", "pointwise", ()),
    ("sasrec", "bft", "attention", ("initial=credibility", "estimator=sandwich", "prior_scale=per_layer")),
    ("sasrec", "bft", "attention", ("jacobian=exact", "propagation=jacobian")),
    *(("sasrec", "bft", "attention", (f"update={rule}",)) for rule in ("fixed", "gate", "residual")),
    *(("sasrec", "bft", "attention", (f"propagation={how}",)) for how in ("discount", "decay")),
    ("hstu", "matched", "pointwise", ("time_bias=true",)),
], ids=lambda part: part if isinstance(part, str) else "-".join(part))  # fmt: skip
def test_a_step_that_a_graph_may_repeat_reads_nothing_back(model, arm, mixer, settings, pretended):
    config, _, net, batches = made(arm, mixer, *settings, model=model)
    shape, numbers = pad(next(iter(batches.epoch(0))), 8)
    with Launches():
        net.to(GPU).train().refresh()
        net.set_ramp(1.0)
        optimizer, padded = make_optimizer(net, config.training), cut(numbers.to(GPU), shape)
    with Reads() as reads:
        padded_loss(net, padded).backward()
        clip_gradients(net, optimizer, 1.0)
        optimizer.step()
    assert bool(reads.found) == MIXERS[mixer].reads_back, reads.found


def test_the_end_of_an_epoch_waits_for_the_gpu_a_few_times(pretended):
    config, dataset, net, batches = made("bft", "attention")
    with Launches():
        net.to(GPU).train().refresh()
        optimizer = make_optimizer(net, config.training)
        net.loss(next(iter(batches.epoch(0))).to(GPU)).backward()
        optimizer.step()
        state = net.state_dict(), optimizer.state_dict()
    with Reads() as reads:
        check_weights(net, config.training, new_state(config, dataset))
    assert reads.count == 1
    with Reads() as reads:
        taken = checkpoint.snapshot(
            model_state=state[0], optimizer_state=state[1], rng_state=torch.get_rng_state(),
            state=new_state(config, dataset), best_model_state=state[0],
        )  # fmt: skip
    assert reads.count == 2
    assert all(type(x) is torch.Tensor for part in (taken.tensors, taken.best) for x in part.values())
    for name, tensor in state[0].items():
        assert torch.equal(taken.tensors[f"model.{name}"], tensor.here) and torch.equal(taken.best[name], tensor.here)
    moments = {n: x["exp_avg"].here for n, x in state[1]["state"].items()}
    assert moments and all(torch.equal(taken.tensors[f"optimizer.state.{n}.exp_avg"], x) for n, x in moments.items())

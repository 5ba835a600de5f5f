"""torch.func's vmap and grad through the fast paths, beside one call after another; what is beyond them is refused."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from recbft.autograd.transforms import decline_dropout
from recbft.core import Belief, Readers, SequenceContext
from recbft.core.regimes import block_table, standardised_bias
from recbft.core.silu import look_up
from recbft.kernels import cross_entropy, dispatch, filter_step, memory, robust_filter, silu_moments, softmax_moments
from recbft.kernels.gelu import gelu_with_slope
from recbft.kernels.robust_filter import Dynamics, Variant, read_clock
from recbft.kernels.softmax_moments import softmax_reml
from recbft.mixers.bayesian import filter_memory
from recbft.mixers.boosted import MlpGate
from recbft.mixers.memory_family import unfiltered_memory
from recbft.models.losses import gathered_scores
from tests.packed_rows import packed

B, H, T, K, V = 2, 2, 5, 4, 9
CONTEXT = packed([[3, 2], [4]], T)
TARGET = torch.tensor([1, 4, 2, 8, 0, 3])
BIASES = ("log_precision", "log_decay", "bias")
INTERPRETED = pytest.mark.skipif(
    not dispatch.interpreted() or dispatch.missing("triton") is not None, reason="needs Triton's interpreter"
)


@pytest.fixture(autouse=True)
def without_references(monkeypatch):
    """No path but the one that is tested may serve."""
    for package in (softmax_moments, silu_moments, cross_entropy, robust_filter, memory):
        for paths in (found for found in vars(package).values() if isinstance(found, dict) and "reference" in found):
            monkeypatch.delitem(paths, "reference")
            monkeypatch.setitem(paths, "none", dispatch.Path(lambda: pytest.fail("a reference")))


def mixed(found):
    """A number that depends on every output, whose gradients differ from place to place."""
    found = found if isinstance(found, tuple) else (found,)
    places = (torch.arange(1, x.numel() + 1, dtype=x.dtype).cos().view(x.shape) for x in found)
    return sum((x * place).sum() for x, place in zip(found, places, strict=True))


def softmax(impl, q, k, v, *biases):
    return tuple(softmax_moments.softmax_moments(q, k, v, CONTEXT, **dict(zip(BIASES, biases, strict=True)), impl=impl))


def softmax_mean(impl, q, k, v, *biases):
    return softmax_moments.softmax_mean(q, k, v, CONTEXT, **dict(zip(BIASES, biases, strict=True)), impl=impl)


def softmax_with_reml(impl, q, k, v, *biases):
    prior = {"prior_scale": 0.3, "prior_dof": 1.0, "cap": 100.0, "dropout": 0.0}
    return softmax_reml(q, k, v, CONTEXT, **dict(zip(BIASES, biases, strict=True)), **prior, impl=impl)


def robust(impl, q, k, v, frequency, scalars, key_bias):
    q, k, v = (torch.view_as_complex(x.unflatten(-1, (K, 2))) for x in (q, k, v))
    dynamics = Dynamics(frequency, *(0.3 * scalars).exp())
    clock = read_clock(CONTEXT, dtype=q.real.dtype)
    impl = "isotropic" if impl == "torch" else impl
    mean, evidence = robust_filter.filtered(q, k, v, CONTEXT, dynamics, clock, Variant(), key_bias=key_bias, impl=impl)
    return torch.view_as_real(mean), evidence


def filtered(impl, q, k, v, transition, process, observed, prior):
    path, chunk = ("chunked", 2) if impl == "torch" else (impl, None)
    pairs = transition.shape[-1] < K  # of one history in each row
    kept = torch.polar(transition.sigmoid(), transition) if pairs else transition.sigmoid()
    noise = {"process_noise": 0.1 * process.exp(), "observation_noise": observed.exp(), "prior_variance": prior.exp()}
    first = None if pairs else CONTEXT.position == 0
    return tuple(filter_memory(0.5 * q, 0.5 * k, v, transition=kept, **noise, first=first, chunk=chunk, impl=path))


def rotated(impl, *inputs):
    return filtered(impl, *inputs)


def unfiltered(impl, q, k, v, transition, observed):
    more = {"transition": transition.sigmoid(), "observation_noise": observed.exp(), "variance": 1.0, "rule": "reset"}
    return tuple(unfiltered_memory(0.5 * q, 0.5 * k, v, first=CONTEXT.position == 0, impl="chunked", **more))


def silu(impl, q, k, v, bias):
    return tuple(silu_moments.silu_moments(q, k, v, CONTEXT, length=T, bias=bias, impl=impl))


def silu_mean(impl, q, k, v, bias):
    return silu_moments.silu_mean(q, k, v, CONTEXT, length=T, bias=bias, impl=impl)


def loss(impl, states, weight):
    return cross_entropy.full_cross_entropy(states, weight, TARGET, impl=impl)


def losses(impl, states, weight):
    return cross_entropy.full_cross_entropies(states, weight, TARGET, [2, 4], impl=impl)


def reml(impl, residual, size):
    return filter_step.reml_precision(residual.exp(), size.exp(), prior_scale=1.0, prior_dof=1.0, cap=3.0)


def update(impl, mean, precision, innovation, observed):
    belief = Belief(mean, precision.exp())
    return tuple(filter_step.kalman_update(belief, innovation, observed.exp(), ramp=0.7)[0])


def predict(impl, precision, jacobian, noise):
    return filter_step.predict_precision(precision.exp(), jacobian, noise.exp(), low=0.01, cap=3.0)


def gelu(impl, x):
    return gelu_with_slope(x, torch.linspace(-1, 1, K * 3, dtype=x.dtype).view(K, 3))


def gathered(impl, states, weight):
    return gathered_scores(states, weight, TARGET.view(-1, 1).expand(-1, 2))


def looked(impl, table):
    return look_up(table, CONTEXT.lag - 1).square()  # some elements several times, and some beyond the table


GATE = MlpGate(K)


def gated(impl, total, correction, weight, bias):
    return functional_call(GATE, {"read.weight": weight, "read.bias": bias}, (total, correction))


def standardised(impl, shares, scale):
    terms = torch.linspace(-2, 3, 3 * B * T * T, dtype=shares.dtype).view(3, B, T, T).sin()
    constants = {"mean": shares.new_tensor(0.2), "deviation": shares.new_tensor(0.7)}
    return standardised_bias(shares, terms, **constants, limit=1.5, scale=scale)[0]


HEADS, TOKENS, DOUBLE = (B, H, T, K), (B, T, K), (B, H, T, 2 * K)
MECHANISMS = {
    softmax: (HEADS, HEADS, HEADS, (B, T), (1,), (1, H, T, T)),
    softmax_mean: (HEADS, HEADS, HEADS, (B, T), (1,), (1, H, T, T)),
    softmax_with_reml: (HEADS, HEADS, HEADS, (B, T), (1,), (1, H, T, T)),
    robust: (DOUBLE, DOUBLE, DOUBLE, (H, K), (6, H), (B, T)),
    filtered: (HEADS, HEADS, HEADS, HEADS, HEADS[:3], HEADS[:3], HEADS[:2]),
    rotated: (HEADS, HEADS, HEADS, (B, H, T, K // 2), HEADS[:3], HEADS[:3], HEADS[:2]),
    unfiltered: (HEADS, HEADS, HEADS, HEADS, HEADS),
    silu: (HEADS, HEADS, HEADS, (1, H, T, T)),
    silu_mean: (HEADS, HEADS, HEADS, (1, H, T, T)),
    loss: ((6, K), (V, K)),
    losses: ((6, K), (2, V, K)),
    reml: (HEADS, HEADS[:3]),
    update: (TOKENS, TOKENS, TOKENS, TOKENS),
    predict: (TOKENS, TOKENS, (K,)),
    gelu: (TOKENS,),
    gathered: ((6, K), (V, K)),
    looked: ((3,),),
    gated: (TOKENS, TOKENS, (K, 2 * K), (K,)),
    standardised: ((3, B, T), ()),
}
ON_CPU = [mechanism for mechanism in MECHANISMS if mechanism is not softmax_with_reml]
CASES = [(mechanism, "torch") for mechanism in ON_CPU] + [
    pytest.param(mechanism, "triton", marks=INTERPRETED)
    for mechanism in (softmax_with_reml, robust, filtered, silu_mean, losses)
]


def drawn(mechanism, impl, *, stacked=True):
    S = 3 if impl == "torch" else 2
    g = torch.Generator().manual_seed(3)
    dtype = torch.float64 if impl == "torch" else torch.float32
    return [torch.randn((S, *shape) if stacked else shape, generator=g).to(dtype) for shape in MECHANISMS[mechanism]]


def close(found, expected):
    exact = found[0].dtype == torch.float64
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9 if exact else 1e-4, atol=1e-12 if exact else 1e-5)


def alone(mechanism, impl, inputs):
    """The gradients of one call by autograd."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(mixed(mechanism(impl, *inputs)), inputs)


@pytest.mark.parametrize(("mechanism", "impl"), [*CASES[: len(ON_CPU)], *CASES[-1:], *CASES[len(ON_CPU) :][:2]])
def test_stacked_gradients_are_those_of_each(mechanism, impl):
    stacked = drawn(mechanism, impl)
    every = tuple(range(len(stacked)))
    found = vmap(grad(lambda *own: mixed(mechanism(impl, *own)), argnums=every))(*stacked)
    each = [alone(mechanism, impl, own) for own in zip(*stacked, strict=True)]
    close(found, [torch.stack(same) for same in zip(*each, strict=True)])


@pytest.mark.parametrize("mechanism", ON_CPU)
def test_what_is_not_stacked_is_shared(mechanism):
    """With the first input alone stacked, along its last dimension; and the gradient of the sum over the stack."""
    first, *others = drawn(mechanism, "torch")
    others = [x[0] for x in others]
    every = tuple(range(1 + len(others)))

    def total(first, *others):
        each = vmap(lambda own: mixed(mechanism("torch", own, *others)), in_dims=-1)(first.movedim(0, -1))
        return each.sum()

    found = grad(total, argnums=every)(first, *others)
    each = [alone(mechanism, "torch", [own, *others]) for own in first]
    close(found, [torch.stack([one[0] for one in each]), *(sum(same) for same in list(zip(*each, strict=True))[1:])])


@pytest.mark.parametrize("mechanism", ON_CPU)
def test_only_what_is_asked_for_gets_a_gradient(mechanism):
    inputs = drawn(mechanism, "torch", stacked=False)
    expected = alone(mechanism, "torch", inputs)
    for which in range(len(inputs)):
        found = grad(lambda *own: mixed(mechanism("torch", *own)), argnums=which)(*inputs)
        close([found], [expected[which]])


@pytest.mark.parametrize("mechanism", [softmax_mean, silu_mean, losses, predict])
def test_a_jacobian_is_the_gradients_of_the_outputs(mechanism):
    inputs = [x.requires_grad_() for x in drawn(mechanism, "torch", stacked=False)]
    outputs = mechanism("torch", *inputs)
    rows = [torch.autograd.grad(y, inputs[0], retain_graph=True)[0] for y in outputs.flatten()[:7]]
    found = jacrev(lambda first: mechanism("torch", first, *(x.detach() for x in inputs[1:])))(inputs[0].detach())
    close(found.flatten(0, outputs.dim() - 1)[:7], rows)


def test_stacks_of_stacks():
    def loss_of(states, weight):
        return loss("torch", states, weight)

    g = torch.Generator().manual_seed(0)
    states, weight = torch.randn(2, 3, 6, K, generator=g).double(), torch.randn(2, V, K, generator=g).double()
    found = vmap(vmap(loss_of, in_dims=(0, None)))(states, weight)
    for i, j in ((0, 0), (1, 2)):
        close([found[i, j]], [loss_of(states[i, j], weight[i])])


def test_a_stack_of_nothing():
    states, weight = torch.zeros(0, 6, K), torch.ones(V, K)
    of_one = grad(lambda own: loss("torch", own, weight))
    assert vmap(of_one)(states).shape == states.shape
    assert vmap(of_one, in_dims=1, out_dims=1)(states.movedim(0, 1)).shape == (6, 0, K)


def test_beyond_one_gradient_only_the_reference_serves():
    q = torch.zeros(HEADS).double()
    paths = {"cpu": dispatch.Path(lambda: "cpu", "cpu", opened=True), "reference": dispatch.Path(lambda: "plain")}
    closed = {"cpu": dispatch.Path(lambda: "cpu", "cpu"), "reference": dispatch.Path(lambda: "plain")}
    taken = []

    def taking(of):
        def function(x):
            taken.append(dispatch.choose("auto", of, q))
            return x.square().sum()

        return function

    x = torch.ones(2)
    grad(taking(paths))(x)
    vmap(grad(taking(paths)))(x)
    grad(taking(closed))(x)
    grad(grad(taking(paths)))(x[0])
    jvp(taking(paths), (x,), (x,))
    assert taken == ["cpu", "cpu", "plain", "plain", "plain"]
    assert dispatch.choose("auto", closed, q) == "cpu"
    with pytest.raises(ValueError, match=r"cpu path declined: torch.func asks for more than vmap and one gradient"):
        grad(grad(lambda x: dispatch.choose("cpu", paths, q) and x**2))(x[0])
    with pytest.raises(ValueError, match=r"cpu path declined: a transform of torch.func is at work"):
        grad(lambda x: dispatch.choose("cpu", closed, q) and x**2)(x[0])


def test_what_draws_for_itself_is_declined_under_a_transform_where_it_draws():
    reasons = []
    vmap(lambda x: reasons.extend(decline_dropout(p) for p in (0.1, 0.0)) or x)(torch.ones(2))
    assert reasons[0] is not None and [reasons[1], decline_dropout(0.1)] == [None, None]


@pytest.mark.parametrize("mechanism", [reml, gathered, gated, standardised, looked])
def test_a_curvature_is_that_of_the_reference(mechanism):
    first, *others = drawn(mechanism, "torch", stacked=False)

    def squared(x):  # so that what is linear in x has a curvature too
        return mixed(mechanism("torch", x, *others)).square()

    def slope(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(squared(x), x)[0]

    found, step = hessian(squared)(first), 1e-6
    direction = torch.randn(first.shape, generator=torch.Generator().manual_seed(1)).double()
    along = (found.view(first.numel(), -1) @ direction.flatten()).view_as(first)
    expected = (slope(first + step * direction) - slope(first - step * direction)) / (2 * step)
    torch.testing.assert_close(along, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("mechanism", "impl"), [case for case in CASES if case != (robust, "torch")])  # autograd's own
def test_gradients_that_may_be_differentiated_again_are_refused(mechanism, impl):
    inputs = [x.requires_grad_() for x in drawn(mechanism, impl, stacked=False)]
    total = mixed(mechanism(impl, *inputs))
    with pytest.raises(RuntimeError, match="no gradient of their own; leave out create_graph"):
        torch.autograd.grad(total, inputs, create_graph=True)


def test_what_is_kept_of_a_batch_outlives_the_transform_it_was_first_asked_in():
    context = SequenceContext(CONTEXT.segment, CONTEXT.position, time=CONTEXT.position)
    some = Readers(torch.tensor([[2], [3]]), torch.tensor([0, 1])).context(context)
    kept = [(c, name) for c in (context, some) for name in ("valid", "allowed", "lag", "log_elapsed", "first")]
    kept.append((context, "blind"))

    def read(x):
        asked = [getattr(c, name).sum() for c, name in kept]
        table = block_table(16, 3, torch.float64, x.device)
        return x * (sum(asked) + context.mask(torch.float64).exp().sum() + table.sum())

    block_table.cache_clear()
    vmap(grad(read))(torch.ones(2, dtype=torch.float64))
    found = [getattr(c, name) for c, name in kept]
    found += [context.mask(torch.float64), block_table(16, 3, torch.float64, torch.device("cpu"))]
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in found)

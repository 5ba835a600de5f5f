"""Softmax attention against dense statistics written out here, and what each setting of it does."""

from __future__ import annotations

import math

import pytest
import torch

from recbft.mixers import SoftmaxAttention
from tests.mixers.histories import context, drawn

D, H, T = 6, 2, 9
K = D // H
WHERE = context((T,))


def make(seed=0, **settings):
    torch.manual_seed(seed)
    return SoftmaxAttention(D, H, **settings).double().eval()


def dense(mixer, x, precision, ramp):
    """Weights (H, T, T) and values (H, T, K) of one history, entry by entry."""
    q, k, v = (torch.stack(part(x[0]).split(K, dim=-1)) for part in (mixer.query, mixer.key, mixer.value))
    log_decay = math.log(torch.sigmoid(mixer.decay_logit).item()) if mixer.decay_logit is not None else 0.0
    weights = torch.zeros(H, T, T, dtype=torch.float64)
    for h in range(H):
        for t in range(T):
            logits = [
                (q[h, t] @ k[h, j] / math.sqrt(K)).item()
                + ramp * math.log(precision[0, j].mean().item())
                + ramp * (t - j) * log_decay
                for j in range(t + 1)
            ]
            weights[h, t, : t + 1] = torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=0)
    return weights, v


def precision_by_hand(estimator, a, v, trust):
    """What an estimator makes of the weights of one query, the values of one coordinate and the trust in each key."""
    mean, size = a @ v, 1 / a.square().sum()
    if estimator == "reml":
        return (size + 1) / (a @ (v - mean).square() + 1 / K)
    if estimator == "reml_naive":
        return (size - 1) / (a @ (v - mean).square()) if len(a) > 1 else torch.tensor(100.0).double()
    if estimator == "sandwich":
        return 1 / (a.square() @ (v - mean).square())
    if estimator == "delta":
        return 1 / (a.square() @ (1 / trust))
    return size / (v.var(correction=0) + 1 / K)


@pytest.mark.parametrize("kriging", ["scalar", "per_dimension"])
@pytest.mark.parametrize("estimator", ["reml", "reml_naive", "sandwich", "delta", "design_effect"])
def test_every_estimator_reads_the_weights_it_is_meant_to(estimator, kriging):
    ramp = 0.4
    mixer = make(3, estimator=estimator, kriging=kriging, recency_decay=0.8)
    x, precision = drawn(3)
    innovation, found = mixer(x, precision, WHERE, ramp=ramp)
    for d in range(D):
        # The precision that this coordinate's weights know of, the same on all coordinates.
        known = precision[..., d : d + 1] if kriging == "per_dimension" else precision.mean(-1, keepdim=True)
        weights, v = dense(mixer, x, known, ramp)
        h, c = divmod(d, K)
        for t in range(T):
            a, values = weights[h, t, : t + 1], v[h, : t + 1, c]
            expected = precision_by_hand(estimator, a, values, known[0, : t + 1, 0]).clamp(max=100)
            torch.testing.assert_close(innovation[0, t, d], a @ values, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found[0, t, d], expected, rtol=1e-8, atol=1e-10)


def test_delta_without_an_incoming_precision_trusts_every_key_alike():
    mixer = make(estimator="delta")
    x, precision = drawn()
    for one, two in zip(mixer(x, None, WHERE), mixer(x, torch.ones_like(precision), WHERE), strict=True):
        torch.testing.assert_close(one, two)


def test_a_projected_precision_adds_variances_through_the_squared_weights():
    plain, projected = make(estimator="reml"), make(estimator="reml", output_projection=True)
    projected.load_state_dict(plain.state_dict(), strict=False)
    x, precision = drawn()
    innovation, found = plain(x, precision, WHERE)
    through, carried = projected(x, precision, WHERE)
    torch.testing.assert_close(through, projected.out(innovation))
    torch.testing.assert_close(1 / carried, (1 / found) @ projected.out.weight.square().T, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("estimator", ["reml", "reml_naive", "sandwich", "delta", "design_effect"])
def test_dropping_weights_changes_the_innovation_and_not_its_precision(estimator):
    mixer = make(estimator=estimator, dropout=0.5)
    x, precision = drawn()
    still, certain = mixer(x, precision, WHERE)
    undropped = make(estimator=estimator)(x, precision, WHERE)
    assert torch.equal(still, undropped.innovation), "evaluation drops nothing"
    mixer.train()
    torch.manual_seed(3)
    shaken, as_certain = mixer(x, precision, WHERE)
    assert not torch.allclose(still, shaken)
    torch.testing.assert_close(certain, as_certain, rtol=1e-10, atol=1e-12)


def test_the_first_token_meets_the_largest_reml_precision():
    mixer = make(estimator="reml", prior_dof=1.0)
    _, found = mixer(*drawn(), WHERE)
    torch.testing.assert_close(found[0, 0], torch.full((D,), 2.0 * K, dtype=torch.float64), rtol=1e-6, atol=0)
    assert (found <= 2 * K + T / (1 / K)).all()
    naive = make(estimator="reml_naive", lam_max=30.0)(*drawn(), WHERE).precision
    assert (naive[0, 0] == 30).all() and (naive <= 30).all()


def test_keys_and_values_can_be_read_from_elsewhere():
    mixer = make()
    x, _ = drawn(0)
    source, _ = drawn(1)
    found = mixer(x, None, WHERE, source=source).innovation
    q, k, v = mixer.query(x), mixer.key(source), mixer.value(source)
    q, k, v = (part.view(1, T, H, K).transpose(1, 2) for part in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, expected.transpose(1, 2).flatten(2), rtol=1e-12, atol=1e-12)


def test_the_recency_decay_starts_where_it_is_asked_to():
    assert torch.sigmoid(make(recency_decay=0.99).decay_logit).item() == pytest.approx(0.99)
    assert make().decay_logit is None

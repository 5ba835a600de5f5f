"""Some tokens as readers: their observations are those of a pass over all tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbft.core import Readers, SequenceContext, pick
from recbft.mixers import PointwiseAttention, SoftmaxAttention

MIXERS = {
    "plain": lambda: SoftmaxAttention(8, 2),
    "projected": lambda: SoftmaxAttention(8, 2, output_projection=True, recency_decay=0.9),
    "reml": lambda: SoftmaxAttention(8, 2, recency_decay=0.9, estimator="reml"),
    "reml_naive": lambda: SoftmaxAttention(8, 2, estimator="reml_naive"),
    "sandwich": lambda: SoftmaxAttention(8, 2, estimator="sandwich"),
    "per dimension": lambda: SoftmaxAttention(8, 2, estimator="reml", kriging="per_dimension"),
    "silu": lambda: PointwiseAttention(8, 2, length=9, time_bias=True),
    "silu with precision": lambda: PointwiseAttention(8, 2, length=9, recency_decay=0.9, estimator="sandwich"),
}


def packed(generator, B, T, *, causal):
    """Histories side by side, some padding, in a context with times."""
    segment = torch.randint(-1, 3, (B, T), generator=generator).sort(dim=1, descending=True).values
    position = torch.arange(T).expand(B, T).clone()
    time = torch.randint(0, 1000, (B, T), generator=generator)
    return SequenceContext(segment, position, time, causal=causal)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("causal", [True, False])
@given(seed=st.integers(0, 2**16), B=st.integers(1, 4), T=st.integers(1, 9), N=st.integers(1, 12))
@settings(max_examples=25)
def test_what_some_tokens_observe_is_their_share_of_what_all_observe(name, causal, seed, B, T, N):
    generator = torch.Generator().manual_seed(seed)
    context = packed(generator, B, T, causal=causal)
    only = torch.randint(B * T, (N,), generator=generator)  # in any order, some twice, some padding
    mixer = MIXERS[name]().double().eval()
    x = torch.randn(B, T, 8, generator=generator, dtype=torch.float64)
    trust = torch.rand(B, T, 8, generator=generator, dtype=torch.float64) + 0.1 if mixer.estimator else None
    with torch.no_grad():
        every, some = mixer(x, trust, context), mixer(x, trust, context, only=only)
    for found, expected in zip(some, every.at(only), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)


def test_the_source_of_keys_and_values_may_be_another():
    generator = torch.Generator().manual_seed(0)
    context, only = packed(generator, 2, 5, causal=True), torch.tensor([7, 4])
    x, source = torch.randn(2, 2, 5, 8, generator=generator)
    mixer = SoftmaxAttention(8, 2).eval()
    found = mixer(x, None, context, source=source, only=only).innovation
    torch.testing.assert_close(found, mixer(x, None, context, source=source).at(only).innovation)


def test_a_row_has_as_many_places_as_the_fullest_needs():
    readers = Readers.of(torch.tensor([9, 1, 8, 0, 11]), 3, 4)
    assert readers.column.tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 3]]
    every = torch.arange(12.0).view(3, 4, 1)
    assert pick(readers.take(every), readers.place).flatten().tolist() == [9, 1, 8, 0, 11]

"""Where a token stands in its history."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from recbft.core import Readers, SequenceContext


@given(seed=st.integers(0, 2**16), B=st.integers(1, 4), T=st.integers(1, 12), num=st.integers(1, 5))
def test_the_first_token_is_the_earliest_of_its_segment_wherever_it_stands(seed, B, T, num):
    generator = torch.Generator().manual_seed(seed)
    names = torch.randint(10**12, (num,), generator=generator)  # segments may bear any number
    segment = torch.randint(-1, num, (B, T), generator=generator)
    segment = torch.where(segment >= 0, names[segment.clamp(min=0)], -1)
    position = torch.stack([torch.randperm(3 * T, generator=generator)[:T] for _ in range(B)])
    first = SequenceContext(segment, position).first
    for b in range(B):
        for t in range(T):
            mine = [j for j in range(T) if segment[b, j] == segment[b, t]]
            expected = min(mine, key=lambda j: position[b, j]) if segment[b, t] >= 0 else t
            assert first[b, t] == expected


def test_two_contexts_of_the_same_tokens_can_be_told_apart():
    # By their fields they could not: Python 3.13 compares these one by one, and tensors have no truth.
    tokens = torch.tensor([[0, 0]])
    one, two = (SequenceContext(tokens, tokens) for _ in range(2))
    known = dict.fromkeys([one, two, *(Readers(tokens, tokens).context(one) for _ in range(2))])
    assert len(known) == 4 and one in known and one != two

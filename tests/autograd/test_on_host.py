"""Tensors copied to the CPU as one: the same numbers, kinds and shapes."""

from __future__ import annotations

import pytest
import torch

from recbft.autograd.on_host import joined_copies, on_host


def some_tensors():
    kinds = (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64)
    g = torch.Generator().manual_seed(torch.seed() % 1000)
    made = [(100 * torch.rand(3, 5, generator=g)).to(kind) for kind in kinds]
    wide = torch.randn(4, 6, generator=g, dtype=torch.float64)
    return [*made, wide.T, wide[:, ::2], wide.sum(), torch.empty(0, 3), torch.tensor(True)]


def test_joined_copies_are_the_tensors():
    tensors = some_tensors()
    copies = joined_copies(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype and copy.shape == tensor.shape and copy.is_contiguous()
        assert torch.equal(copy, tensor)
    kept = [copy.clone() for copy in copies]
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(copy, old) for copy, old in zip(copies, kept, strict=True))
    assert joined_copies([]) == []


@pytest.mark.parametrize("apart", [False, True])
def test_what_lies_on_the_cpu_is_copied_where_it_is_to_be_apart(apart):
    named = {str(n): tensor for n, tensor in enumerate(some_tensors())}
    found = on_host(named, apart=apart)
    assert list(found) == list(named)
    for name, tensor in named.items():
        assert torch.equal(found[name], tensor) and found[name].is_contiguous()
        if tensor.is_contiguous() and tensor.numel():
            assert (found[name].data_ptr() == tensor.data_ptr()) is not apart


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_what_lies_on_a_gpu_is_the_same_here(size):
    named = {
        "there": torch.randn(size, device="cuda"),
        "flag": torch.tensor(True, device="cuda"),
        "here": torch.ones(2),
    }
    found = on_host(named, apart=True)
    assert all(own.device.type == "cpu" and torch.equal(own, named[name].cpu()) for name, own in found.items())

"""How products of float32 are rounded, in whichever words PyTorch was told."""

from __future__ import annotations

import pytest
import torch

from recbft.autograd.boundaries import exact_products


@pytest.mark.parametrize(("asked", "exact"), [("highest", True), ("high", False), ("medium", False)])
def test_products_are_exact_unless_the_process_rounds_them(asked, exact):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(asked)
    try:
        assert exact_products() is exact
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="since PyTorch 2.9")
@pytest.mark.parametrize(
    ("backend", "asked", "exact"), [("cuda", "tf32", False), ("cuda", "ieee", True), ("mkldnn", "bf16", True)]
)
def test_or_a_backend_does_by_a_setting_of_its_own(backend, asked, exact):
    products = getattr(torch.backends, backend).matmul
    before, products.fp32_precision = products.fp32_precision, asked
    try:
        assert exact_products() is exact
    finally:
        products.fp32_precision = before

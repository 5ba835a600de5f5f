"""The causal low-pass filter against BSARec's Fourier transform, and its limits."""

from __future__ import annotations

import pytest
import torch

from recbft.mixers import MIXERS, SoftmaxAttention
from recbft.mixers.spectral import SpectralConfig, SpectralMixer
from tests.mixers.histories import D, H, inputs, packed


def spectral(length, seed=0, **settings):
    torch.manual_seed(seed)
    config = {name: settings.pop(name) for name in ("share", "frequencies") if name in settings}
    mixer = SpectralMixer(D, H, SpectralConfig(**config), length=length, **settings).double().eval()
    torch.nn.init.normal_(mixer.high_pass)
    return mixer


@pytest.mark.parametrize(("length", "frequencies"), [(6, 1), (7, 2), (7, 3), (5, 0), (4, 9), (1, 2)])
def test_the_last_token_of_every_prefix_has_the_transform_of_its_window(length, frequencies):
    mixer = spectral(length, frequencies=frequencies, share=1.0)
    batch, context = packed([length, max(1, length - 2)])
    x, _ = inputs(batch)
    found = mixer(x, None, context).innovation
    for row, column in batch.segment.ge(0).nonzero().tolist():
        number, place = batch.segment[row, column], batch.position[row, column]
        own = (batch.segment[row] == number) & (batch.position[row] <= place)
        window = torch.cat([x.new_zeros(length - int(own.sum()), D), x[row, own]])  # padded on the left, as there
        spectrum = torch.fft.rfft(window, dim=0)
        spectrum[min(frequencies, (length - 1) // 2) + 1 :] = 0
        low = torch.fft.irfft(spectrum, n=length, dim=0)
        expected = (low + mixer.high_pass**2 * (window - low))[-1]
        torch.testing.assert_close(found[row, column], expected, rtol=1e-10, atol=1e-12)


def test_a_share_of_nothing_is_softmax_attention():
    settings = {"estimator": "reml", "recency_decay": 0.9, "output_projection": True}
    mixer = spectral(6, share=0.0, **settings)
    plain = SoftmaxAttention(D, H, **settings).double().eval()
    state = {name.removeprefix("attend."): value for name, value in mixer.state_dict().items() if name != "high_pass"}
    plain.load_state_dict(state)
    batch, context = packed([6, 3, 2])
    x, precision = inputs(batch)
    for one, other in zip(mixer(x, precision, context), plain(x, precision, context), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_layer_that_looks_both_ways_filters_by_distance():
    mixer = spectral(5, share=1.0, frequencies=1)
    batch, context = packed([5], causal=False)
    x, _ = inputs(batch)
    spectrum = torch.fft.rfft(x[0], dim=0)
    spectrum[2:] = 0
    low = torch.fft.irfft(spectrum, n=5, dim=0)  # of a whole window the filter is the circular one
    expected = low + mixer.high_pass**2 * (x[0] - low)
    torch.testing.assert_close(mixer(x, None, context).innovation[0], expected, rtol=1e-10, atol=1e-12)


def test_tokens_that_are_asked_for_are_those_of_all():
    mixer = spectral(6, estimator="reml", output_projection=True)
    batch, context = packed([6, 3, 2])
    x, precision = inputs(batch)
    whole, some = mixer(x, precision, context), mixer(x, precision, context, only=batch.last)
    for one, other in zip(whole.at(batch.last), some, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert MIXERS["spectral"].both_ways

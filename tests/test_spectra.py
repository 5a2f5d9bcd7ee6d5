"""Spectra: numpy's eigenvalues of what is really added, and the bound a prefix cannot exceed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from explorer.attention import patched
from explorer.methods import methods
from explorer.methods.prefix_tuning import PrefixTuningConfig
from explorer.spectra import effective_rank, moments, participation, spectrum
from tests.tiny import tiny_ids

TEXTS = [tiny_ids(1, n, seed=n)[0].tolist() for n in (9, 12, 4)]


def memory(lm):
    adapter = methods()["prefix-memory"].build(lm, methods()["prefix-memory"].config())
    with torch.no_grad():
        adapter.memory.normal_(generator=torch.Generator().manual_seed(0))
    return adapter


@pytest.mark.parametrize("centred", [True, False])
def test_eigenvalues_are_numpys(lm, centred):
    adapter = memory(lm)
    found = spectrum(lm, adapter, TEXTS, centred=centred)
    added = [[] for _ in range(lm.geometry.n_layers)]

    def watch(call):
        b = F.elu(call.query.float()) @ adapter.memory[call.layer]
        added[call.layer].append(b[0].detach().double().numpy())
        return call.run()

    for text in TEXTS:
        with torch.no_grad(), patched(lm, watch), adapter.applied(lm):
            lm.logits(torch.tensor([text]))
    assert found.n_positions == sum(map(len, TEXTS))
    mean = 0
    for layer, parts in enumerate(added):
        for head, b in enumerate(np.concatenate(parts, 1)):  # (n, d)
            cov = np.cov(b.T, bias=True) if centred else b.T @ b / len(b)
            expected = np.linalg.eigvalsh(cov)[::-1]
            scale = expected[0]
            np.testing.assert_allclose(
                found.eigenvalues[layer, head], expected.clip(0), atol=1e-12 * scale, rtol=1e-8
            )
            mean = mean + cov / (lm.geometry.n_layers * lm.geometry.n_heads)
    np.testing.assert_allclose(found.pooled, np.linalg.eigvalsh(mean)[::-1], rtol=1e-8)
    assert found.decay[0] == 1 and (np.diff(found.decay) <= 0).all()


@pytest.mark.parametrize("slots", [1, 3])
def test_a_prefix_never_uses_more_axes_than_it_has_slots(lm, slots):
    adapter = methods()["prefix-tuning"].build(lm, PrefixTuningConfig(slots=slots))
    for centred in (True, False):
        found = spectrum(lm, adapter, TEXTS, centred=centred)
        assert found.bound == min(slots, lm.geometry.head_dim)
        beyond = found.eigenvalues[..., slots:]
        assert (beyond <= 1e-10 * found.eigenvalues[..., :1]).all()
        assert (found.effective_rank <= slots + 1e-6).all()


def test_a_memory_uses_more_axes_than_a_prefix(lm):
    prefix = methods()["prefix-tuning"].build(lm, PrefixTuningConfig(slots=2))
    few, many = spectrum(lm, prefix, TEXTS), spectrum(lm, memory(lm), TEXTS)
    assert many.axes_used > few.axes_used


def test_nothing_added_has_no_axes(lm):
    method = methods()["zero-gate"]
    found = spectrum(lm, method.build(lm, method.config()), TEXTS)
    assert found.axes_used == 0 and not found.decay.any()
    assert not found.effective_rank.any() and not found.participation.any()


def test_a_method_of_another_form_is_measured(lm):
    """LoRA changes queries, keys and values: its b is the output with it less that without."""
    method = methods()["lora"]
    adapter = method.build(lm, method.config())
    assert spectrum(lm, adapter, TEXTS).axes_used == 0  # B = 0 at the start
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.1)
    assert spectrum(lm, adapter, TEXTS).axes_used > 0


def test_what_a_memory_adds_is_known_in_size(lm):
    adapter, found = memory(lm), []

    def watch(call):
        b = F.elu(call.query.float()) @ adapter.memory[call.layer]
        found.append((call.layer, b.square().sum((0, 2, 3)), call.run()[0].square().sum((0, 1, 3))))
        return call.run()

    with torch.no_grad(), patched(lm, watch), adapter.applied(lm):
        lm.logits(torch.tensor([TEXTS[0]]))
    ratio = moments(lm, adapter, TEXTS[:1]).ratio
    for layer, added, own in found:
        np.testing.assert_allclose(ratio[layer], (added / own).sqrt().numpy(), rtol=1e-5)


def test_ranks_of_known_spectra():
    flat, one = np.full(8, 0.3), np.eye(8)[0]
    assert effective_rank(flat) == pytest.approx(8) and participation(flat) == pytest.approx(8)
    assert effective_rank(one) == pytest.approx(1) and participation(one) == pytest.approx(1)
    half = np.array([1.0, 1.0, 0.0, 0.0])
    assert effective_rank(half) == pytest.approx(2) and participation(half) == pytest.approx(2)
    assert effective_rank(np.array([0.75, 0.25])) == pytest.approx(1.7547, abs=1e-4)

"""Experts behind gates: their weights are the gate times a softmax, and rebuild what is added."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from explorer.attention import patched
from explorer.gated import experts
from explorer.methods import methods
from tests.tiny import tiny_ids


def opened(lm, opening=0.3):
    method = methods("train")["zero-gate"]
    adapter = method.build(lm, method.config(slots=4, skip=1), 0)
    with torch.no_grad():
        adapter.gate.fill_(opening)
    return adapter


def test_experts_share_out_the_opening_of_their_gate(lm):
    adapter, ids = opened(lm), tiny_ids(1, 9)
    found = experts(lm, ids, adapter).prompts.astype(np.float32)
    assert np.isnan(found[0]).all()
    assert np.allclose(found[1:].sum(-1), np.tanh(0.3), atol=2e-3)


def test_experts_weigh_the_prompts_values_into_what_is_added(lm):
    adapter, ids = opened(lm), tiny_ids(1, 9)
    weights = torch.from_numpy(experts(lm, ids, adapter).prompts).float()
    slots, parts = adapter.slots(lm), adapter.parts(lm)

    def compare(call):
        if call.layer in slots:
            value = slots[call.layer].value.float()
            value = value.repeat_interleave(weights.shape[1] // len(value), 0)  # (h, p, d)
            added = parts(call)[1][0]
            assert torch.allclose(weights[call.layer] @ value, added, atol=2e-2)
        return call.run()

    with torch.no_grad(), patched(lm, compare), adapter.applied(lm):
        lm.logits(ids)


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_methods_without_gates_have_no_experts(lm):
    for name in ("prefix-memory", "prefix-tuning"):
        method = methods("train")[name]
        assert experts(lm, tiny_ids(1, 5), method.build(lm, method.config(), 0)) is None

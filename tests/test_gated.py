"""What stands beside the softmax: experts rebuild what is added, and its size is told rightly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from explorer.attention import patched
from explorer.gated import beside
from explorer.methods import methods
from explorer.methods.prefix_memory import PrefixMemoryConfig
from tests.tiny import tiny_ids


def opened(lm, opening=0.3):
    method = methods("train")["zero-gate"]
    adapter = method.build(lm, method.config(slots=4, skip=1), 0)
    with torch.no_grad():
        adapter.gate.fill_(opening)
    return adapter


def test_experts_share_out_the_opening_of_their_gate(lm):
    adapter, ids = opened(lm), tiny_ids(1, 9)
    found = beside(lm, ids, adapter).prompts.astype(np.float32)
    assert np.isnan(found[0]).all()
    assert np.allclose(found[1:].sum(-1), np.tanh(0.3), atol=2e-3)


def test_experts_weigh_the_prompts_values_into_what_is_added(lm):
    adapter, ids = opened(lm), tiny_ids(1, 9)
    weights = torch.from_numpy(beside(lm, ids, adapter).prompts).float()
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


@pytest.mark.parametrize("name", ["zero-gate", "prefix-memory", "prefix-tuning"])
def test_the_ratio_is_what_the_answer_with_and_without_the_adapter_says(lm, name):
    ids, method = tiny_ids(1, 9), methods("train")[name]
    adapter = opened(lm) if name == "zero-gate" else method.build(lm, method.config(), 0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.1)
    expected, parts = {}, adapter.parts(lm)

    def compare(call):
        plain = call.run()[0][0].transpose(0, 1).float()  # (h, q, d)
        rest, added = parts(call) or (None, None)
        if added is not None:
            kept = plain if rest is None else rest[0][..., None] * plain
            expected[call.layer] = added[0].norm(dim=-1) / kept.norm(dim=-1)
        return call.run()

    with torch.no_grad(), patched(lm, compare), adapter.applied(lm):
        answer = lm.logits(ids, start=adapter.span)
    found = beside(lm, ids, adapter, [2, 8], experts_at=[8])
    assert found.positions == (2, 8)
    assert (found.experts(1, 2, 8) is None) == (name != "zero-gate")
    assert found.experts(1, 2, 2) is None
    assert (found.prompts is None) == (name != "zero-gate")
    for layer, ratio in expected.items():
        assert_close(torch.from_numpy(found.ratio[layer]), ratio[:, [2, 8]], atol=1e-4, rtol=1e-3)
    assert np.isnan(np.delete(found.ratio, list(expected), 0)).all()
    with torch.no_grad(), adapter.applied(lm):
        assert torch.equal(lm.logits(ids, start=adapter.span), answer)


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_what_is_no_addition_to_attention_has_no_ratio(lm):
    method = methods("train")["lora"]
    assert beside(lm, tiny_ids(1, 5), method.build(lm, method.config(), 0)) is None


def test_a_memory_that_reads_unrotated_queries_can_be_looked_into(lm):
    method = methods()["prefix-memory"]
    adapter = method.build(lm, PrefixMemoryConfig(query="before rotary"), 0)
    with torch.no_grad():
        adapter.memory.normal_(generator=torch.Generator().manual_seed(0))
    ids = tiny_ids(1, 7)
    found = beside(lm, ids, adapter)
    assert np.isfinite(found.ratio).all() and (found.ratio > 0).all()
    first = beside(lm, ids[:, :4], adapter)  # the future changes nothing
    assert np.allclose(found.ratio[..., :4], first.ratio, atol=1e-4)

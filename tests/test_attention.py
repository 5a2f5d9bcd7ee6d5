"""Laws of the seam, each for every architecture.

The `lm` fixture adds one to all of them: when the test ends, logits, weights, attention
implementation, hooks and attributes of the model are what they were.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

from explorer.attention import (
    AttentionCall,
    apart,
    blocks,
    log_sum_exp,
    logits_of,
    patched,
    run_and_total,
    self_test,
    weigh_groups,
)
from explorer.errors import ExplorerError
from explorer.generate import stream
from explorer.lm import freeze
from explorer.methods import methods
from tests.tiny import ARCHITECTURES, SLIDING, WINDOW, tiny_ids, tiny_model

LONG = 2 * WINDOW + 3
SILENT = ["prefix-memory", "zero-gate", "lora"]  # they promise to start without effect


def unchanged(call):
    return call.run()


def silenced(call):
    output, weights = call.run()
    return output * 0, weights


def padded(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths, padded on the left. → ids and mask, (b, q)"""
    ids, mask = tiny_ids(len(lengths), max(lengths)), torch.ones(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return ids, mask.long()


TEXTS = {
    "short": (tiny_ids(2, 5), None),
    "past the window": (tiny_ids(2, LONG), None),
    "left padding": padded(5, 3),
    "left padding, past the window": padded(LONG, 5),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_patch_that_changes_nothing_changes_no_bit(lm, text):
    ids, mask = TEXTS[text]
    plain = lm.logits(ids, mask=mask)
    with patched(lm, unchanged):
        assert torch.equal(lm.logits(ids, mask=mask), plain)
    with patched(lm, unchanged, unchanged), patched(lm, unchanged):
        assert torch.equal(lm.logits(ids, mask=mask), plain)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", SILENT)
def test_a_silent_adapter_changes_no_bit(lm, name, text):
    ids, mask = TEXTS[text]
    method = methods()[name]
    adapter = method.build(lm, method.config())
    plain = lm.logits(ids, mask=mask)
    with adapter.applied(lm):
        assert torch.equal(lm.logits(ids, mask=mask), plain)


def test_a_patch_is_asked_once_a_layer_with_the_shapes_it_is_promised(lm):
    seen, geometry = [], lm.geometry

    def look(call):
        output, weights = call.run()
        assert call.query.shape == (2, geometry.n_heads, 5, geometry.head_dim)
        assert call.key.shape == (2, geometry.n_kv_heads, 5, geometry.head_dim)
        assert output.shape == (2, 5, geometry.n_heads, geometry.head_dim)
        seen.append(call.layer)
        return output, weights

    with patched(lm, look):
        lm.logits(tiny_ids(2, 5))
    assert seen == list(range(geometry.n_layers))


def test_a_patch_that_changes_something_is_felt(lm):
    ids = tiny_ids(2, 5)
    with patched(lm, silenced):
        muted = lm.logits(ids)
    assert (muted - lm.logits(ids)).abs().max() > 1e-3


def test_the_model_is_itself_after_an_error_in_a_patch(lm):
    def fail(call):
        if call.layer == 1:
            raise ZeroDivisionError
        return call.run()

    with pytest.raises(ZeroDivisionError), patched(lm, unchanged), patched(lm, fail):
        lm.logits(tiny_ids(1, 4))


def test_the_model_is_itself_after_an_error_in_the_block(lm):
    plain = lm.logits(tiny_ids(1, 4))
    with pytest.raises(KeyError), patched(lm, silenced):
        raise KeyError
    assert torch.equal(lm.logits(tiny_ids(1, 4)), plain)


def test_the_model_is_itself_at_every_yield_and_after_an_early_close(lm):
    ids = tiny_ids(1, 4)
    plain = lm.logits(ids)
    decoding = stream(lm, ids, 6, applied=lambda: patched(lm, silenced))
    for _ in range(3):
        next(decoding)
        assert torch.equal(lm.logits(ids), plain)
        assert torch.is_grad_enabled()
    decoding.close()


def test_inner_patches_see_the_effect_of_outer_ones(lm):
    seen = []

    def look(call):
        output, weights = call.run()
        seen.append(output.abs().max().item())
        return output, weights

    with patched(lm, silenced), patched(lm, look):
        lm.logits(tiny_ids(1, 4))
    assert seen == [0.0] * lm.geometry.n_layers
    seen.clear()
    with patched(lm, look), patched(lm, silenced):
        lm.logits(tiny_ids(1, 4))
    assert min(seen) > 0


def test_the_outer_patch_is_back_when_an_inner_block_ends(lm):
    ids = tiny_ids(1, 4)
    with patched(lm, silenced):
        muted = lm.logits(ids)
        with patched(lm, unchanged, eager=True):
            assert_close(lm.logits(ids), muted, atol=1e-5, rtol=1e-5)
        assert torch.equal(lm.logits(ids), muted)


def test_another_thread_never_sees_a_patch(lm):
    ids, seen = tiny_ids(1, 4), []
    plain = lm.logits(ids)
    other = threading.Thread(target=lambda: seen.append(lm.logits(ids)))
    with patched(lm, silenced):
        other.start()
        other.join(timeout=0.05)
        assert not seen  # it waits for its turn
    other.join()
    assert torch.equal(seen[0], plain)


@pytest.mark.parametrize(("first", "second"), [("llama", "llama"), ("qwen3", "gemma3_text")])
def test_another_model_never_sees_a_patch(first, second):
    one, other = freeze(tiny_model(first), None), freeze(tiny_model(second, seed=1), None)
    ids = tiny_ids(1, 6)
    plain = other.logits(ids)
    with patched(one, silenced):
        assert torch.equal(other.logits(ids), plain)
        with patched(other, unchanged):
            assert torch.equal(other.logits(ids), plain)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_of_a_batch_is_the_row_alone(lm, side):
    """Padding on either side, past the window: what a row says does not depend on its company."""
    ids, mask = padded(LONG, 5, 11)
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    for applied in ([], [lambda call: (call.run()[0] * 0.5, None)]):
        with patched(lm, *applied):
            together = lm.logits(ids, mask=mask)
            for row in range(len(ids)):
                real = mask[row].bool()
                alone = lm.logits(ids[row, real][None])
                assert_close(together[row, real], alone[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("eager", [False, True], ids=["fused", "eager"])
def test_texts_kept_apart_in_one_row_are_the_texts_alone(lm, eager):
    """Under masks of every kind, past the window, and past learned positions altogether."""
    lengths = (LONG, 3, WINDOW, 1, 128 - LONG)
    ids = tiny_ids(2, sum(lengths))
    places = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    everything = torch.ones_like(ids)
    with patched(lm, apart(places), eager=eager):
        together = lm.logits(ids, mask=everything, positions=places)
    alone = torch.cat([lm.logits(part) for part in ids.split(lengths, 1)], 1)
    assert_close(together, alone, atol=2e-5, rtol=1e-5)
    mixed = lm.logits(ids, mask=everything, positions=places)
    assert (mixed - alone).abs().max() > 0.1


def test_some_tokens_of_several_rows_can_be_scored_alone(lm):
    ids = tiny_ids(2, LONG)
    whole = lm.logits(ids)
    for at in ([2, 3, LONG - 1, LONG, 2 * LONG - 1], [LONG + 4], range(2 * LONG)):
        some = lm.logits(ids, at=torch.tensor(at))
        assert_close(some, whole.flatten(0, 1)[list(at)], atol=1e-5, rtol=1e-5)
    assert torch.equal(lm.logits(ids), whole)  # nothing of it stays


@pytest.mark.parametrize("kind", ["own", "without windows", "static"])
def test_every_cache_gives_the_logits_of_the_whole_text(lm, kind):
    ids, config = tiny_ids(1, LONG), lm.model.config
    cache = {
        "own": lm.new_cache,
        "without windows": DynamicCache,
        "static": lambda: StaticCache(config=config, max_cache_len=LONG + 5),
    }[kind]()
    if kind == "without windows" and config.model_type in SLIDING:
        ids = ids[:, :WINDOW]
    with patched(lm, unchanged):
        whole = lm.logits(ids)
        parts = [
            lm.logits(ids[:, first:last], cache=cache, start=first)
            for first, last in ((0, 5), (5, 6), (6, 7), (7, ids.shape[1]))
        ]
    assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=1e-5)


def test_weights_are_distributions_over_the_visible_past(lm):
    ids, seen = tiny_ids(1, LONG), []

    def keep(call):
        output, weights = call.run()
        seen.append((weights, output, call.value))
        return output, weights

    plain = lm.logits(ids)
    with patched(lm, keep, eager=True):
        assert_close(lm.logits(ids), plain, atol=2e-5, rtol=1e-5)
    per_group = lm.geometry.n_heads // lm.geometry.n_kv_heads
    for weights, output, value in seen:
        assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-6, rtol=0)
        assert not weights.triu(1).any()
        again = weights @ value.repeat_interleave(per_group, dim=1)  # (b, h, q, d)
        assert_close(again.transpose(1, 2), output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("text", TEXTS)
def test_the_log_sum_exp_is_the_denominator_of_the_softmax(lm, text):
    """exp(s·q·k − LSE) are the weights: also with softcap, window and padding."""
    ids, mask = TEXTS[text]

    def check(call):
        output, weights = call.run()
        per_group = call.query.shape[1] // call.key.shape[1]
        logits = call.query @ call.key.repeat_interleave(per_group, dim=1).mT * call.scaling
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        ours = (logits - log_sum_exp(call)[..., None]).exp()
        real = torch.ones_like(ids) if mask is None else mask
        visible = (weights > 0) & (real[:, None, :, None] > 0)
        assert visible.any()
        assert_close(ours[visible], weights[visible], atol=1e-5, rtol=1e-4)
        return output, weights

    with patched(lm, check, eager=True):
        lm.logits(ids, mask=mask)


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_with_its_denominators_is_the_answer_bit_for_bit(lm, text):
    ids, mask = TEXTS[text]
    outer = []

    def check(call):
        (output, weights), known = run_and_total(call)
        assert torch.equal(output, call.run()[0])
        assert_close(log_sum_exp(known), log_sum_exp(call), atol=1e-5, rtol=1e-5)
        half = replace(known, query=known.query[:, :, :3])
        assert log_sum_exp(half).shape[-1] == min(3, call.query.shape[2])
        return output, weights

    def louder(call):
        outer.append(call.layer)
        return 2 * call.run()[0], None

    with torch.no_grad(), patched(lm, check):
        lm.logits(ids, mask=mask)
    with torch.no_grad(), patched(lm, louder, check):  # what lies in between is not passed over
        lm.logits(ids, mask=mask)
    assert len(outer) == 2 * lm.geometry.n_layers


@pytest.mark.parametrize("text", TEXTS)
def test_weighing_gives_the_sums_of_the_weights(lm, text):
    ids, mask = TEXTS[text]
    random = torch.Generator().manual_seed(0)
    indicator = (torch.rand(1, ids.shape[1], 3, generator=random) > 0.5).float()  # (1, k, n)
    fused, summed = [], []

    def weigh(call):
        fused.append(call.weigh(indicator))
        return call.run()

    def weights(call):
        output, weights = call.run()
        summed.append(weights.float() @ indicator)
        return output, weights

    with patched(lm, weigh):
        lm.logits(ids, mask=mask)
    with patched(lm, weights, eager=True):
        lm.logits(ids, mask=mask)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    for one, other in zip(fused, summed, strict=True):
        one, other = one.transpose(1, 2)[real], other.transpose(1, 2)[real]
        assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("text", TEXTS)
def test_few_weights_and_the_rest_are_the_sums_of_all_weights(lm, text):
    ids, mask = TEXTS[text]
    member = torch.zeros(ids.shape[1], 3)
    member[:, 1] = 1
    member[[0, -1]] = torch.tensor([1.0, 0, 0])  # a sink, and one key that only the last query sees
    member[-3] = torch.tensor([0, 0, 1.0])
    quick, summed, known = [], [], []

    def weigh(call):
        answer, call = run_and_total(call)
        known.append(call._told is not None)
        quick.append(weigh_groups(call, member))
        return answer

    def weights(call):
        output, weights = call.run()
        summed.append(weights.float() @ member)
        return output, weights

    with torch.no_grad(), patched(lm, weigh):
        lm.logits(ids, mask=mask)
    with torch.no_grad(), patched(lm, weights, eager=True):
        lm.logits(ids, mask=mask)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    for one, other in zip(quick, summed, strict=True):
        one, other = one.transpose(1, 2)[real], other.transpose(1, 2)[real]
        assert_close(one, other, atol=1e-5, rtol=0)
    if ids.shape[1] == LONG and lm.model.config.model_type == "llama":
        assert all(known)  # the short way was gone, not the one by a second call


def test_gradients_pass_under_gradient_checkpointing():
    lm = freeze(tiny_model("llama"), None)
    ids = tiny_ids(2, 6)

    def gradient():
        scale = torch.ones(lm.geometry.n_layers, requires_grad=True)

        def patch(call):
            output, weights = call.run()
            return output * scale[call.layer], weights

        with patched(lm, patch):
            lm.logits(ids).pow(2).mean().backward()
        return scale.grad

    plain = gradient()
    lm.model.activation_checkpointing_enable()
    lm.model.train()
    assert_close(gradient(), plain)
    assert plain.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_passes_the_self_test(architecture, dtype):
    lm = freeze(tiny_model(architecture).to(dtype), None)
    self_test(lm)
    assert lm.origin.precision in str(dtype)


def test_a_model_that_bypasses_the_seam_is_refused_with_a_hint(monkeypatch):
    lm = freeze(tiny_model("llama"), None)
    layer = lm.model.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda hidden, **_: hidden)
    with pytest.raises(ExplorerError, match="2 of 3 layers") as refused:
        self_test(lm)
    assert "Llama" in refused.value.hint


@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_denominator_is_the_one_summed_in_blocks(masked):
    generator = torch.Generator().manual_seed(0)
    query = 3 * torch.randn(2, 6, 20, 10, generator=generator)
    key = torch.randn(2, 3, 23 if masked else 20, 10, generator=generator)
    mask = None
    if masked:
        mask = torch.ones(2, 1, 20, 23, dtype=torch.bool).tril(3)
        mask[1, :, :, :9] = False  # padding: the first queries of this row see nothing
    call = AttentionCall(0, query, key, key, mask, 0.4)
    fused = log_sum_exp(call)
    slow = torch.cat([logits_of(call, rows).logsumexp(-1) for rows in blocks(call, 10**6)], -1)
    assert_close(fused, slow, atol=1e-5, rtol=1e-5)
    assert torch.isneginf(fused).any() == masked


def test_a_text_beyond_learned_positions_is_refused_and_others_are_read(lm):
    """An index outside of a table on a GPU ends the process; rotary positions have no end."""
    beyond = lm.geometry.context + 1
    if lm.learned:
        with pytest.raises(ExplorerError, match=f"position {beyond}; this model has {beyond - 1}"):
            lm.logits(tiny_ids(1, beyond))
        with pytest.raises(ExplorerError, match=f"position {beyond + 1}"):
            lm.logits(tiny_ids(1, beyond - 3), start=4)
        with pytest.raises(ExplorerError, match=f"position {beyond}"):
            lm.logits(tiny_ids(1, 2), positions=torch.tensor([[0, beyond - 1]]))
        assert lm.logits(tiny_ids(1, beyond - 3), start=2, last=1).isfinite().all()
    else:
        assert lm.logits(tiny_ids(1, beyond), last=1).isfinite().all()
    assert lm.learned == (lm.model.config.model_type in ("gpt2", "opt"))

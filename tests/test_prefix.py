"""A prefix through the seam is a prefix in a cache, and stays where the cache forgets it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from explorer.prefix import Prefix, Slots, silent
from explorer.shares import measure
from tests.test_attention import LONG, TEXTS
from tests.tiny import SLIDING, WINDOW, tiny_ids


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_prefix_read_from_text_continues_like_the_text(lm, length):
    """The strongest oracle there is: the model itself, reading everything at once."""
    ids = tiny_ids(2, WINDOW)
    ids[:, :length] = ids[0, :length]  # rows share their beginning
    prefix = Prefix.of_text(lm, ids[:1, :length])
    whole = lm.logits(ids)[:, length:]
    cache = prefix.as_cache(lm, batch=2)
    cached = lm.logits(ids[:, length:], cache=cache, start=prefix.span)
    assert_close(cached, whole, atol=1e-5, rtol=1e-5)
    with prefix.applied(lm):
        assert_close(lm.logits(ids[:, length:], start=prefix.span), whole, atol=1e-5, rtol=1e-5)


def test_past_the_window_the_seam_keeps_the_prefix_and_a_cache_loses_it(lm):
    ids, length = tiny_ids(1, LONG), 3
    prefix = Prefix.of_text(lm, ids[:, :length])
    whole = lm.logits(ids)[:, length:]
    with prefix.applied(lm):
        ours = lm.logits(ids[:, length:], start=length)
    everywhere = torch.ones(1, LONG - length, 1)
    last = measure(lm, ids[:, length:], everywhere, prefix)[:, :, -1, 0]  # (l, h)
    assert last.min() > 0  # every head of every layer still sees it
    if lm.model.config.model_type in SLIDING:
        assert (ours - whole).abs().max() > 1e-3
    else:
        assert_close(ours, whole, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["own", "static"])
def test_a_prefix_works_beside_a_cache_of_the_text(lm, kind):
    from transformers import StaticCache

    ids = tiny_ids(1, LONG)
    prefix = Prefix.of_text(lm, tiny_ids(1, 4, seed=1))
    cache = lm.new_cache()
    if kind == "static":
        cache = StaticCache(config=lm.model.config, max_cache_len=LONG + 2)
    with prefix.applied(lm):
        whole = lm.logits(ids, start=4)
        parts = [
            lm.logits(ids[:, first:last], cache=cache, start=4 + first)
            for first, last in ((0, 5), (5, 6), (6, LONG))
        ]
    assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=1e-5)


def test_a_prefix_before_a_padded_batch_is_the_prefix_before_each_row(lm):
    ids, mask = TEXTS["left padding, past the window"]
    prefix = Prefix.of_text(lm, tiny_ids(1, 4, seed=1))
    with prefix.applied(lm):
        together = lm.logits(ids, mask=mask, start=4)
        for row in range(len(ids)):
            real = mask[row].bool()
            alone = lm.logits(ids[row, real][None], start=4)
            assert_close(together[row, real], alone[0], atol=2e-5, rtol=1e-5)


def test_a_log_weight_of_ln_r_is_the_slot_r_times(lm):
    ids, one = tiny_ids(2, 5), Prefix.of_text(lm, tiny_ids(1, 3, seed=1))
    heavy = Prefix(
        tuple(Slots(s.key, s.value, torch.full(s.key.shape[:2], math.log(5.0))) for s in one.layers)
    )
    copied = Prefix(
        tuple(Slots(s.key.repeat(1, 5, 1), s.value.repeat(1, 5, 1)) for s in one.layers)
    )
    with heavy.applied(lm):
        weighted = lm.logits(ids)
    with copied.applied(lm):
        assert_close(lm.logits(ids), weighted, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="log-weights"):
        heavy.as_cache(lm)


def test_a_prefix_without_slots_changes_no_bit(lm):
    ids, mask = TEXTS["left padding, past the window"]
    plain = lm.logits(ids, mask=mask)
    with silent(lm).applied(lm):
        assert torch.equal(lm.logits(ids, mask=mask), plain)


def test_use_never_changes_a_prefix(lm):
    prefix = Prefix.of_text(lm, tiny_ids(1, 3))
    before = [slots.key.clone() for slots in prefix.layers]
    cache = prefix.as_cache(lm)
    lm.logits(tiny_ids(1, 4), cache=cache, start=3)
    with prefix.applied(lm):
        lm.logits(tiny_ids(1, 4), start=3)
    assert prefix.n_slots == 3
    assert all(torch.equal(a, s.key) for a, s in zip(before, prefix.layers, strict=True))


def test_gradients_reach_every_slot(lm):
    prefix = Prefix.of_text(lm, tiny_ids(1, 3))
    layers = tuple(
        Slots(
            s.key.clone().requires_grad_(),
            s.value.clone().requires_grad_(),
            torch.zeros(s.key.shape[:2], requires_grad=True),
        )
        for s in prefix.layers
    )
    with Prefix(layers).applied(lm):
        lm.logits(tiny_ids(2, 5)).pow(2).sum().backward()
    for slots in layers:
        for tensor in (slots.key, slots.value, slots.bias):
            assert tensor.grad.abs().min() > 0


def test_shapes_that_do_not_fit_are_refused(lm):
    with pytest.raises(ValueError, match=r"\(g, p, d\)"):
        Slots(torch.zeros(3, 2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"\(g, p\)"):
        Slots(torch.zeros(3, 2, 5), torch.zeros(3, 2, 5), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="layers"), Prefix(()).applied(lm):
        pass

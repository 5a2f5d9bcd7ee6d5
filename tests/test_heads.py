"""Rows of attention and heads found by rule are what transformers' eager attention says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from explorer import heads
from explorer.attention import patched
from explorer.errors import ExplorerError
from explorer.lm import freeze
from explorer.methods import methods
from explorer.prefix import Prefix
from explorer.rows import RowMeter, entropy, rows
from explorer.shares import mass
from tests.test_attention import LONG
from tests.test_shares import eager_weights
from tests.tiny import WINDOW, tiny_ids, tiny_model, tiny_tokenizer


def test_rows_are_the_eager_weights(lm):
    ids = tiny_ids(1, LONG)
    found = rows(lm, ids, [0, 3, -1])
    expected = eager_weights(lm, ids)[:, :, [0, 3, LONG - 1]]
    assert found.positions == (0, 3, LONG - 1)
    assert_close(torch.from_numpy(found.weights), expected, atol=1e-5, rtol=0)
    logs = torch.from_numpy(found.scores).log_softmax(-1).exp()
    assert_close(logs, expected, atol=1e-5, rtol=0)


def test_rows_with_a_prefix_are_the_eager_weights_over_a_cache(lm):
    ids, length = tiny_ids(1, WINDOW - 3), 3
    prefix = Prefix.of_text(lm, tiny_ids(1, length, seed=1))
    found = rows(lm, ids, range(ids.shape[1]), prefix)
    expected = eager_weights(lm, ids, cache=prefix.as_cache(lm), start=length)
    assert found.n_slots == length
    assert_close(torch.from_numpy(found.weights), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("with_prefix", [False, True])
def test_rows_of_a_long_text_are_read_in_blocks(lm, with_prefix):
    ids = tiny_ids(1, LONG)
    prefix = Prefix.of_text(lm, tiny_ids(1, 3, seed=1)) if with_prefix else None
    at, told = [2, 7, LONG - 2], []
    whole = rows(lm, ids, at, prefix)
    parts = rows(lm, ids, at, prefix, block=5, note=lambda *said: told.append(said))
    assert_close(parts.weights, whole.weights, atol=1e-5, rtol=0)
    assert np.array_equal(np.isinf(parts.scores), np.isinf(whole.scores))
    assert told[-1][1] == 1 and len(told) == -(-(LONG - 1) // 5)  # no further than the last query
    one = rows(lm, ids, [7], prefix, layers=[1], block=5)
    assert one.weights.shape[0] == 1
    assert_close(one.row(1, 2, 7).weights, whole.weights[1, 2, 1], atol=1e-5, rtol=0)
    assert one.row(0, 2, 7) is None and one.row(1, 2, 6) is None


def test_rows_can_be_noted_while_shares_are_measured(lm):
    ids, prefix = tiny_ids(1, LONG), Prefix.of_text(lm, tiny_ids(1, 3, seed=1))
    meter = RowMeter(lm, LONG, [4, LONG - 1], prefix)
    mass(lm, ids, prefix, adapter=patched(lm, meter))
    alone = rows(lm, ids, [4, LONG - 1], prefix)
    assert_close(meter.taken.weights, alone.weights, atol=1e-6, rtol=0)
    assert meter.taken.positions == alone.positions


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_a_row_without_the_sink_sums_to_one_again(lm):
    row = rows(lm, tiny_ids(1, 6), [-1, 0]).row(1, 2, 5)
    left = row.without_sink()
    assert left.weights[0] == 0 and left.weights.sum() == pytest.approx(1, abs=1e-5)
    assert np.allclose(left.weights[1:], row.weights[1:] / (1 - row.weights[0]), atol=1e-5)
    assert not rows(lm, tiny_ids(1, 6), [0]).row(1, 2, 0).without_sink().weights.any()


def test_rows_sum_to_the_shares(lm):
    ids, prefix = tiny_ids(1, LONG), Prefix.of_text(lm, tiny_ids(1, 3, seed=1))
    weights, shares = rows(lm, ids, [-1], prefix).weights[:, :, 0], mass(lm, ids, prefix)
    assert np.allclose(weights[..., :3].sum(-1), shares.of("prefix"), atol=1e-5)
    assert np.allclose(weights[..., 3], shares.of("sink"), atol=1e-5)


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_the_top_keys_and_the_entropy_are_those_of_the_row(lm):
    found = rows(lm, tiny_ids(1, 6), [-1], Prefix.of_text(lm, tiny_ids(1, 2, seed=1)))
    top = found.top(1, 2, n=3)
    row = found.weights[1, 2, 0]
    assert [weight for _, weight in top] == sorted(row.tolist(), reverse=True)[:3]
    for position, weight in top:
        assert row[position + 2 if position >= 0 else -1 - position] == pytest.approx(weight)
    assert found.entropy[1, 2, 0] == pytest.approx(float(-(row * np.log(row)).sum()), abs=1e-5)
    assert str(float(entropy(np.array([0.0, 1.0 + 1e-7])))) == "0.0"  # not −0.00 on the page


def test_heads_found_by_rule_agree_with_eager_weights(lm):
    ids = tiny_ids(1, LONG)
    weights = eager_weights(lm, ids)
    steps = torch.arange(1, LONG)
    back = weights[:, :, steps, steps - 1].mean(-1)
    assert_close(torch.from_numpy(heads.find(lm, "previous token", ids).scores), back, **NEAR)
    sink = weights[:, :, 1:, 0].mean(-1)
    assert_close(torch.from_numpy(heads.find(lm, "most sink", ids).scores), sink, **NEAR)
    twice = heads.repeated(lm, 11, seed=3)
    again = torch.arange(11, 22)
    induction = eager_weights(lm, twice)[:, :, again, again - 10].mean(-1)
    assert_close(torch.from_numpy(heads.on_offset(lm, twice, 10, 11)), induction, **NEAR)


NEAR = dict(atol=1e-5, rtol=0)


def test_with_a_prefix_heads_share_what_it_leaves(lm):
    ids, prefix = tiny_ids(1, WINDOW - 3), Prefix.of_text(lm, tiny_ids(1, 3, seed=1))
    weights = eager_weights(lm, ids, cache=prefix.as_cache(lm), start=3)
    steps = torch.arange(1, ids.shape[1])
    back = weights[:, :, steps, steps + 2].mean(-1)
    found = heads.find(lm, "previous token", ids, prefix)
    assert_close(torch.from_numpy(found.scores), back, **NEAR)
    most = heads.find(lm, "most prefix", ids, prefix).scores
    assert_close(torch.from_numpy(most), weights[:, :, 1:, :3].sum(-1).mean(-1), **NEAR)


def test_smollm2_has_the_heads_that_eager_attention_shows(smollm2):
    twice = heads.repeated(smollm2)
    weights = eager_weights(smollm2, twice)
    n = heads.PERIOD
    again, steps = torch.arange(n, 2 * n), torch.arange(1, 2 * n)
    for rule, expected in [
        ("induction", weights[:, :, again, again - n + 1].mean(-1)),
        ("previous token", weights[:, :, steps, steps - 1].mean(-1)),
        ("most sink", weights[:, :, 1:, 0].mean(-1)),
    ]:
        found = heads.find(smollm2, rule, twice)
        assert_close(torch.from_numpy(found.scores), expected, atol=1e-5, rtol=0)
        score = found.top(1)[0][-1]
        assert score == pytest.approx(float(expected.max()), abs=1e-5)
        assert score > 0.5, f"no clear {rule} head"


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_heads_are_found_as_they_are_under_an_adapter(lm):
    ids, method = tiny_ids(1, LONG), methods("train")["lora"]
    adapter = method.build(lm, method.config(), 0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.3)
    with adapter.applied(lm):
        weights = eager_weights(lm, ids)
    steps = torch.arange(1, LONG)
    for rule, expected in (
        ("previous token", weights[:, :, steps, steps - 1].mean(-1)),
        ("most sink", weights[:, :, 1:, 0].mean(-1)),
    ):
        found = heads.find(lm, rule, ids, adapter=adapter.applied(lm)).scores
        assert_close(torch.from_numpy(found), expected, **NEAR)
        assert not np.allclose(found, heads.find(lm, rule, ids).scores, atol=1e-3)


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_a_rule_that_cannot_apply_is_explained(lm):
    with pytest.raises(ExplorerError, match="No prefix"):
        heads.find(lm, "most prefix", tiny_ids(1, 5))
    with pytest.raises(ExplorerError, match="before it"):
        heads.find(lm, "previous token", tiny_ids(1, 1))


def test_a_rule_that_there_is_not_and_a_short_context():
    with pytest.raises(ExplorerError, match="no rule inductoin"):
        heads.find(freeze(tiny_model("llama"), tiny_tokenizer()), "inductoin")
    short = freeze(tiny_model("gpt2", max_position_embeddings=64), tiny_tokenizer())
    assert heads.repeated(short).shape == (1, 64)
    assert heads.find(short, "induction").scores.max() > 0

"""Shares of attention are sums of the model's own weights, without ever storing these."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from explorer.attention import patched
from explorer.errors import ExplorerError
from explorer.generate import stream
from explorer.lm import freeze
from explorer.prefix import Prefix
from explorer.rows import rows
from explorer.shares import LastQuery, mass, measure
from tests.test_attention import LONG, padded
from tests.tiny import WINDOW, tiny_ids, tiny_model


def eager_weights(lm, *args, **kwargs) -> torch.Tensor:
    """The weights that transformers' eager attention computes. → (l, h, q, k), first row"""
    kept = []

    def keep(call):
        output, weights = call.run()
        kept.append(weights[0].float())
        return output, weights

    with patched(lm, keep, eager=True):
        lm.logits(*args, **kwargs)
    return torch.stack(kept)


@pytest.mark.parametrize("length", [1, 6, LONG])
def test_mass_is_the_sum_of_the_weights(lm, length):
    ids = tiny_ids(1, length)
    seen = mass(lm, ids, generated=length // 3)
    weights = eager_weights(lm, ids)
    end = length - length // 3
    sums = torch.stack(
        [
            torch.zeros_like(weights[..., 0]),
            weights[..., 0],
            weights[..., 1:end].sum(-1),
            weights[..., max(end, 1) :].sum(-1),
        ],
        dim=-1,
    )
    assert seen.groups == ("prefix", "sink", "prompt", "generated")
    assert_close(torch.from_numpy(seen.shares), sums, atol=1e-5, rtol=0)
    assert_close(seen.shares.sum(-1), 0 * seen.shares[..., 0] + 1, atol=1e-5, rtol=0)


def test_mass_with_a_prefix_is_the_sum_of_the_weights_with_it_in_a_cache(lm):
    ids, length = tiny_ids(1, WINDOW - 3), 3
    prefix = Prefix.of_text(lm, tiny_ids(1, length, seed=1))
    ours = measure(lm, ids, torch.eye(ids.shape[1])[None], prefix)
    weights = eager_weights(lm, ids, cache=prefix.as_cache(lm), start=length)
    expected = torch.cat([weights[..., :length].sum(-1, keepdim=True), weights[..., length:]], -1)
    assert_close(ours, expected, atol=1e-5, rtol=0)


def test_rows_with_a_prefix_sum_to_one_past_the_window(lm):
    prefix = Prefix.of_text(lm, tiny_ids(1, 3, seed=1))
    shares = mass(lm, tiny_ids(1, LONG), prefix).shares
    assert_close(shares.sum(-1), 0 * shares[..., 0] + 1, atol=1e-5, rtol=0)
    assert shares.min() >= 0


def test_padding_gets_no_attention(lm):
    ids, mask = padded(LONG, 5)
    ids, mask = ids[1:], mask[1:]
    together = measure(lm, ids, torch.eye(LONG)[None, :, -5:], mask=mask)[:, :, -5:, 1:]
    alone = measure(lm, ids[:, -5:], torch.eye(5)[None])[..., 1:]
    assert_close(together, alone, atol=1e-5, rtol=0)


def test_own_groups_are_taken_out_of_the_prompt(lm):
    ids = tiny_ids(1, 7)
    plain = mass(lm, ids)
    split = mass(lm, ids, groups={"object": [2, 4]})
    assert_close(split.of("object") + split.of("prompt"), plain.of("prompt"), atol=1e-6, rtol=0)
    assert_close(
        torch.from_numpy(split.of("object")),
        eager_weights(lm, ids)[:, :, -1, [2, 4]].sum(-1),
        atol=1e-5,
        rtol=0,
    )


def test_mass_as_a_table_has_every_share(lm):
    seen = mass(lm, tiny_ids(1, 4))
    frame = seen.to_frame()
    assert len(frame) == seen.shares.size
    row = frame[(frame["layer"] == 1) & (frame["head"] == 2) & (frame["position"] == 3)]
    assert row.set_index("group")["share"]["prompt"] == seen.shares[1, 2, 3, 2]


@pytest.mark.parametrize("with_prefix", [False, True])
def test_blocks_do_not_change_the_shares(lm, with_prefix):
    ids = tiny_ids(1, LONG)
    prefix = Prefix.of_text(lm, tiny_ids(1, 3, seed=1)) if with_prefix else None
    groups = torch.eye(LONG)[None, :, :4]
    whole = measure(lm, ids, groups, prefix)
    blocks = measure(lm, ids, groups, prefix, block=5)
    assert_close(blocks, whole, atol=1e-5, rtol=0)
    some = measure(lm, ids, groups, prefix, block=5, positions=[0, 4, 5, LONG - 1])
    assert_close(some, whole[:, :, [0, 4, 5, LONG - 1]], atol=1e-5, rtol=0)


def test_32768_tokens_in_blocks_equal_rows_computed_one_by_one():
    sizes = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    lm = freeze(tiny_model("llama", max_position_embeddings=32768, **sizes), None)
    ids, told = tiny_ids(1, 32768), []
    at = [0, 4095, 4096, 20_000, 32_767]
    seen = mass(
        lm,
        ids,
        groups={"early": range(100, 200)},
        positions=at,
        note=lambda *said: told.append(said),
    )
    assert seen.positions == tuple(at)
    assert told[-1][1] == 1 and len(told) == 16
    for row, position in enumerate(at):  # the slow way: a whole pass over what a query sees
        weights = rows(lm, ids[:, : position + 1], [-1]).weights[:, :, 0]
        assert_close(seen.of("sink", row), weights[..., 0], atol=1e-5, rtol=0)
        assert_close(seen.of("early", row), weights[..., 100:200].sum(-1), atol=1e-5, rtol=0)
    assert_close(seen.shares.sum(-1), 0 * seen.shares[..., 0] + 1, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_a_long_reading_can_be_stopped_and_leaves_the_model_itself(lm):
    def stop(_: str, fraction: float) -> None:
        raise KeyboardInterrupt(fraction)

    with pytest.raises(KeyboardInterrupt, match=r"0\.5"):
        measure(lm, tiny_ids(1, 8), torch.eye(8)[None], block=4, note=stop)


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_a_group_cannot_take_a_name_that_has_a_meaning(lm):
    with pytest.raises(ExplorerError, match="prefix"):
        mass(lm, tiny_ids(1, 4), groups={"prefix": [1]})


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({"a": []}, "a is empty"),
        ({"a": range(5, 2)}, "a is empty"),
        ({"a": [0, 1]}, "names token 0,"),
        ({"a": [2, 6]}, "names token 6,"),
        ({"a": range(2, 10**12)}, "names token 6,"),
        ({"a": [-1]}, "names token -1,"),
        ({"a": [1, 2], "b": range(2, 4)}, "Token 2 is in two groups, a and b"),
        ({"a": "cat"}, "not made of positions"),
        ({"a": [1.5]}, "not made of positions"),
        ({"a": 3}, "not made of positions"),
        ({str(i): [1 + i % 5] for i in range(9)}, "two groups"),
    ],
)
def test_groups_that_are_no_parts_of_the_text_are_explained(lm, groups, sentence):
    with pytest.raises(ExplorerError, match=sentence) as told:
        mass(lm, tiny_ids(1, 6), groups=groups)
    assert told.value.hint


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_as_many_groups_as_a_head_has_room_for(lm):
    ids, most = tiny_ids(1, 12), lm.geometry.head_dim - 3
    named = {f"g{i}": [i] for i in range(1, most + 2)}
    with pytest.raises(ExplorerError, match="8 groups are too many") as told:
        mass(lm, ids, groups=named)
    assert str(most) in told.value.hint
    named.popitem()
    shares = mass(lm, ids, groups=named).shares
    assert_close(shares.sum(-1), 0 * shares[..., 0] + 1, atol=1e-5, rtol=0)


@pytest.mark.parametrize("with_prefix", [False, True])
def test_live_shares_are_those_of_the_text_read_at_once(lm, with_prefix):
    ids, n_new = tiny_ids(1, 6), 2 * WINDOW
    prefix = Prefix.of_text(lm, tiny_ids(1, 3, seed=1)) if with_prefix else None
    groups = {"object": [2, 3], "written": [7]}
    meter = LastQuery(lm, 6, groups, prefix, n_new)

    @contextmanager
    def applied():
        meter.begin()
        with patched(lm, meter), prefix.applied(lm) if prefix else nullcontext():
            yield

    start = prefix.span if prefix else 0
    new = [step.id for step in stream(lm, ids, n_new, applied=applied, start=start)]
    whole = torch.cat([ids, torch.tensor([new[:-1]])], 1)
    read = mass(lm, whole, prefix, generated=n_new - 1, groups=groups)
    assert meter.groups == read.groups
    expected = read.shares[:, :, 5:].mean(1).transpose(1, 0, 2)
    assert_close(np.stack(meter.taken), expected, atol=1e-5, rtol=0)
    assert_close(meter.latest, read.shares[:, :, -1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"generated": 9}, "9 of 8 tokens"),
        ({"generated": -1}, "-1 of 8 tokens"),
        ({"positions": []}, "No position is named"),
        ({"positions": [0, 8]}, "Position 8 is not in the text"),
        ({"groups": {"x": [True]}}, "not made of positions"),
        ({"prompt": tiny_ids(2, 8)}, "not those of one text"),
    ],
)
def test_what_cannot_be_measured_is_refused(lm, asked, said):
    with pytest.raises(ExplorerError, match=said):
        mass(lm, **{"prompt": tiny_ids(1, 8), **asked})

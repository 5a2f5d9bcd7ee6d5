"""The trade-off's curves are shares and norms of the model's own attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from explorer import trade_off, tradeoff, train
from explorer.attention import patched
from explorer.contenders import (
    FOUR,
    OPENING,
    BehindGate,
    InSoftmax,
    four_kinds,
    prefixes,
    three_ways,
)
from explorer.data import read, split
from explorer.errors import ExplorerError
from explorer.lm import freeze
from explorer.methods import methods
from explorer.methods.prefix_memory import PrefixMemoryConfig
from explorer.methods.prefix_tuning import PrefixTuningConfig
from explorer.methods.zero_gate import ZeroGateConfig
from explorer.prefix import Prefix, share
from explorer.replay import placed
from explorer.rows import rows
from explorer.shares import mass
from explorer.tradeoff import WINDOW, measured
from explorer.training import FitConfig
from tests.tiny import tiny_ids, tiny_model, tiny_tokenizer

LENGTHS = (4, 9, 16)


def test_the_share_along_the_lengths_is_the_mass_of_the_whole_text(lm):
    ids, prefix = tiny_ids(1, LENGTHS[-1]), Prefix.of_text(lm, tiny_ids(1, 3, seed=1))
    curve = trade_off(lm, [ids], {"it": prefix}, lengths=LENGTHS).curve("it")
    shares = mass(lm, ids, prefix).shares[..., 0]  # (l, h, q)
    for index, n in enumerate(LENGTHS):
        expected = shares[:, :, n - WINDOW : n].mean(-1)
        assert np.allclose(curve.share[0, index], expected, atol=1e-5)
    weights = rows(lm, ids, [-1], prefix).weights[:, :, 0]
    assert np.allclose(weights[..., :3].sum(-1), shares[..., -1], atol=1e-5)
    one = trade_off(lm, [ids[:, :1]], {"it": prefix}, lengths=(1,)).curve("it")
    first = rows(lm, ids[:, :1], [0], prefix).weights[:, :, 0, 0]
    assert np.allclose(one.first[0, 0], first, atol=1e-5)
    assert np.allclose(one.line("behind"), one.line() - one.first.mean((2, 3)), atol=1e-6)
    assert curve.slots == 3


def test_in_the_softmax_ratio_and_share_tell_the_same_output(lm):
    ids, prefix = tiny_ids(1, 8), Prefix.of_text(lm, tiny_ids(1, 3, seed=1))
    one = InSoftmax(prefix)
    with torch.no_grad(), prefix.applied(lm):
        expected = lm.logits(ids, start=prefix.span)
    seen = []

    def keep(call):
        a, b = parts(call)
        output, _ = call.run()
        mixed = a[..., None] * output.transpose(1, 2).float() + b
        seen.append(float(b[0, :, -1].norm(dim=-1).mean()))
        return mixed.transpose(1, 2).to(output.dtype), None

    parts = one.parts(lm)
    with torch.no_grad(), patched(lm, keep):
        ours = lm.logits(ids, start=prefix.span)
    assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert min(seen) > 0


def test_beside_the_softmax_there_is_no_share(lm):
    curves = trade_off(lm, [tiny_ids(1, 16)], three_ways(lm, 3), lengths=LENGTHS)
    assert np.isfinite(curves.curve("one softmax").share).all()
    for name in ("gate", "memory"):
        assert np.isnan(curves.curve(name).share).all()
        assert (curves.curve(name).ratio > 0).all()
    assert curves.curve("gate").gate == pytest.approx(OPENING)
    assert np.isnan(curves.curve("memory").gate)


def test_a_shut_gate_and_an_empty_memory_add_nothing(lm):
    prefix = Prefix.of_text(lm, tiny_ids(1, 3, seed=1))
    memory = methods("train")["prefix-memory"]
    made = {"gate": BehindGate(prefix, 0.0), "memory": memory.build(lm, memory.config())}
    curves = trade_off(lm, [tiny_ids(1, 9)], made, lengths=(4, 9))
    for curve in curves.curves:
        assert not np.nan_to_num(curve.ratio).any()


def test_in_steps_every_picture_is_part_of_the_last(lm):
    ids = [tiny_ids(1, 16), tiny_ids(1, 16, seed=5)]
    front = {"it": Prefix.of_text(lm, tiny_ids(1, 3, seed=1))}
    steps = list(measured(lm, ids, front, lengths=LENGTHS))
    assert [step.complete for step in steps] == [False] * (len(steps) - 1) + [True]
    last = steps[-1].curve("it").share
    assert np.isfinite(last).all()
    for step in steps:
        share = step.curve("it").share
        told = np.isfinite(share)
        assert told.any()
        assert np.allclose(share[told], last[told], atol=1e-5)
    mean, low, high = steps[-1].curve("it").band()
    assert (low <= mean).all() and (mean <= high).all()


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_the_table_holds_what_the_curves_hold(lm):
    curves = trade_off(lm, 2, slots=(1, 2), lengths=(4, 8))
    frame = curves.to_frame()
    row = frame[(frame.name == "2 slots") & (frame.prompt == 1) & (frame.length == 8)]
    assert row.share.item() == curves.curve("2 slots").line()[1, 1]
    assert len(frame) == 2 * 2 * 2


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_lengths_end_with_the_models_context(lm):
    assert trade_off(lm, 1, slots=(2,), lengths=(8, 126, 128)).lengths == (8, 126)
    with pytest.raises(ExplorerError, match="context"):
        trade_off(lm, 1, slots=(2,), lengths=(4096,))
    with pytest.raises(ExplorerError, match="shorter"):
        trade_off(lm, [tiny_ids(1, 4)], slots=(2,), lengths=(8,))


def test_on_smollm2_text_drowns_a_prefix_and_a_prefix_drowns_text(smollm2):
    curves = trade_off(smollm2, 1, prefixes(smollm2, (1, 16)), lengths=(8, 128))
    short, long = curves.curve("16 slots").line()[0]
    assert short > long + 0.1
    assert short > curves.curve("1 slot").line()[0, 0]


def test_four_kinds_are_compared_along_lengths_and_by_slots(lm):
    families = four_kinds(lm, (1, 2, 8), longest=16)
    assert tuple(families) == FOUR
    steps = list(measured(lm, [tiny_ids(1, 16)], families, lengths=(4, 9, 16), main=8))
    last = steps[-1]
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    followed = [curve for curve in last.curves if not curve.brief]
    assert [curve.name for curve in followed] == list(FOUR)
    for curve in last.curves:
        inside = curve.kind in FOUR[:2]
        assert np.isfinite(curve.share).all() == inside
        assert np.isfinite(curve.ratio).all()
        part, ratio = curve.line("part"), curve.line("ratio")
        assert np.allclose(part, ratio / (1 + ratio)) and (part <= 1).all()
    sizes = {kind: [c.slots for c in last.curves if c.kind == kind] for kind in FOUR}
    assert sizes[FOUR[0]] == sizes[FOUR[2]] == sizes[FOUR[3]] == [1, 2, 8]
    assert len(sizes[FOUR[1]]) > 1


def test_only_what_is_followed_is_read_on_long_texts(lm, monkeypatch):
    monkeypatch.setattr(tradeoff, "FIRST", 9)
    families = {"prefix": {one.prefix.n_slots: one for one in prefixes(lm, (1, 3)).values()}}
    found = trade_off(lm, [tiny_ids(1, 16)], families, lengths=(4, 9, 16), main=3)
    brief = found.curve("prefix, 1 slot")
    assert np.isfinite(brief.share[:, :2]).all() and np.isnan(brief.share[:, 2]).all()
    assert np.isfinite(found.curve("prefix").share).all()
    plain = trade_off(lm, [tiny_ids(1, 16)], prefixes(lm, (1, 3)), lengths=(4, 9, 16))
    assert np.allclose(plain.curve("1 slot").share[:, :2], brief.share[:, :2], atol=1e-5)
    assert np.allclose(plain.curve("3 slots").share, found.curve("prefix").share, atol=1e-5)


def test_a_solved_prefix_is_measured_where_it_is_put_when_somebody_asks(lm):
    ids = tiny_ids(1, 16)
    (_, one), *_ = four_kinds(lm, (4,), longest=16)["solved prefix"].items()
    curve = trade_off(lm, [ids], {"it": one}, lengths=(5, 16)).curve("it")
    for index, n in enumerate((5, 16)):
        prefix, start = placed(lm, one.solved, n)
        shares = []

        def keep(call, prefix=prefix, shares=shares):
            shares.append(share(call, prefix.layers[call.layer])[0, :, -WINDOW:].mean(-1))
            return call.run()

        with torch.no_grad(), patched(lm, keep), prefix.applied(lm):
            lm.logits(ids[:, :n], start=start)
        assert np.allclose(curve.share[0, index], torch.stack(shares), atol=1e-5)


def test_a_memory_that_reads_queries_before_rotation_has_its_curve(lm):
    method = methods("train")["prefix-memory"]
    memory = method.build(lm, method.config(query="before rotary", start="the cat sat"))
    curve = trade_off(lm, [tiny_ids(1, 9)], {"it": memory}, lengths=(4, 9)).curve("it")
    assert (curve.ratio > 0).all()


@pytest.mark.parametrize("lm", ["llama"], indirect=True)
def test_what_adds_nothing_to_attention_is_refused(lm):
    method = methods("train")["lora"]
    with pytest.raises(ExplorerError, match="LoRA"):
        trade_off(lm, [tiny_ids(1, 9)], {"it": method.build(lm, method.config())}, lengths=(4,))


GROWING = (16, 32, 64, 128, 256)
TAUGHT = {
    "prefix-tuning": ("prefix-tuning", PrefixTuningConfig(start="text"), 1e-2),
    "memory": ("prefix-memory", PrefixMemoryConfig(), 1.5e-4),
    "memory, no positions": ("prefix-memory", PrefixMemoryConfig(query="before rotary"), 1.5e-4),
    "zero-gate": ("zero-gate", ZeroGateConfig(), 5e-2),
}


@pytest.fixture(scope="module")
def taught(smollm2):
    """Curves of adapters that six steps have taught to name the kind of a request."""
    rows = split(read("requests"), shots=1, held_out=4, seed=0)
    made = {}
    for name, (method, config, rate) in TAUGHT.items():
        fitting = FitConfig(steps=6, learning_rate=rate, batch_size=6, warmup=0.0)
        first, *_, last = train(smollm2, rows, method=method, config=config, fitting=fitting)
        assert last.loss < first.loss / 3
        made[name] = last.adapter
    return made, trade_off(smollm2, 2, made, lengths=GROWING)


def left(curve, measure: str) -> float:
    """What a text of 256 tokens leaves of what one of 16 had."""
    line = curve.line(measure).mean(0)
    return line[-1] / line[0]


def test_the_share_of_a_trained_prefix_falls_with_the_text(taught):
    curve = taught[1].curve("prefix-tuning")
    assert (np.diff(curve.line().mean(0)) < 0).all()  # at every doubling
    assert left(curve, "share") < 0.65  # measured: 0.55
    assert left(curve, "ratio") < 0.45  # measured: 0.30


def test_nothing_trained_beside_the_softmax_has_a_share_to_lose(taught):
    for name in TAUGHT:
        if name != "prefix-tuning":
            curve = taught[1].curve(name)
            assert np.isnan(curve.share).all()
            assert left(curve, "ratio") > left(taught[1].curve("prefix-tuning"), "ratio") + 0.2


def test_an_opened_gate_is_as_open_for_a_long_text(taught):
    adapters, curves = taught
    gates = adapters["zero-gate"].gates()
    assert float(gates.nan_to_num().abs().max()) > 0.1  # they have opened
    assert curves.curve("zero-gate").gate == pytest.approx(float(gates.abs().nanmean()))
    assert left(curves.curve("zero-gate"), "ratio") > 0.7  # measured: 0.84


def test_what_a_memory_adds_hangs_on_the_query_and_not_on_the_text(taught):
    """Queries turn with their position: a memory taught at the first 30 answers later ones less.

    Asked without that turning it adds nearly as much to 256 tokens as to 16, so it is not the text
    that takes anything away.
    """
    curves = taught[1]
    assert left(curves.curve("memory"), "ratio") > 0.5  # measured: 0.57
    assert left(curves.curve("memory, no positions"), "ratio") > 0.75  # measured: 0.86


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"lengths": (-5, 8)}, "at least one token"),
        ({"lengths": ()}, "No length fits"),
        ({"prompts": 0}, "no text"),
        ({"slots": (0, 2)}, "at least one slot"),
        ({"slots": ()}, "at least one slot"),
        ({"contenders": {}}, "Nothing is there"),
    ],
)
def test_what_cannot_be_compared_is_refused(asked, said):
    lm = freeze(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(ExplorerError, match=said):
        trade_off(lm, **{"prompts": 1, "lengths": (8,), "slots": (1,), **asked})

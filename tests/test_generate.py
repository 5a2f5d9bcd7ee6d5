"""Decoding with a cache says what repeated reading of the whole text says."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from explorer.errors import ExplorerError
from explorer.generate import Sampling, choose, stream
from explorer.prefix import Prefix
from tests.tiny import WINDOW, tiny_ids

N_NEW = WINDOW + 4


def reread(lm, ids, applied=nullcontext, start=0):
    """Greedy decoding without a cache."""
    new = []
    for _ in range(N_NEW):
        with torch.no_grad(), applied():
            logits = lm.logits(ids, start=start, last=1)
        new.append(int(logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([[new[-1]]])], dim=1)
    return new


def test_greedy_decoding_is_repeated_reading(lm):
    ids = tiny_ids(1, 5)
    new = [step.id for step in stream(lm, ids, N_NEW)]
    assert new == reread(lm, ids)
    assert len(set(new)) > 1


def test_greedy_decoding_is_what_transformers_generates(lm):
    ids = tiny_ids(1, 5)
    theirs = lm.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=N_NEW, do_sample=False
    )[0, 5:].tolist()
    assert [step.id for step in stream(lm, ids, N_NEW)][: len(theirs)] == theirs


def test_greedy_decoding_under_a_prefix_is_repeated_reading_under_it(lm):
    """Past the window too: the prefix is not evicted while the text slides."""
    ids, prefix = tiny_ids(1, 5), Prefix.of_text(lm, tiny_ids(1, 4, seed=1))
    applied = lambda: prefix.applied(lm)  # noqa: E731
    new = [step.id for step in stream(lm, ids, N_NEW, applied=applied, start=prefix.span)]
    assert new == reread(lm, ids, applied, prefix.span)


def test_decoding_ends_at_a_stop_token_and_at_the_end_of_the_context(lm):
    ids = tiny_ids(1, 5)
    first, second, *_ = [step.id for step in stream(lm, ids, N_NEW)]
    stopped = [step.id for step in stream(lm, ids, N_NEW, stop_ids=[second])]
    assert stopped == ([first, second] if first != second else [first])
    context = lm.geometry.context
    assert len(list(stream(lm, tiny_ids(1, context - 2), N_NEW))) == 3


def test_equal_seeds_sample_equal_texts(lm):
    ids = tiny_ids(1, 5)

    def sampled(seed):
        return [s.id for s in stream(lm, ids, N_NEW, sampling=Sampling(1.5, 0.9, seed))]

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.7])
def test_sampling_stays_in_the_nucleus(top_p):
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = torch.Generator().manual_seed(0)
    seen = {choose(logits, Sampling(1.0, top_p), generator).id for _ in range(200)}
    assert seen == ({0, 1} if top_p == 0.7 else {0})


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9, 1e-5])
def test_next_to_no_temperature_is_greedy(temperature):
    logits = torch.tensor([-80.0, 90.0, 89.0])
    assert choose(logits, Sampling(temperature), torch.Generator()).id == 1


@pytest.mark.parametrize(
    "odd",
    [
        dict(temperature=-0.1),
        dict(temperature=float("nan")),
        dict(temperature=float("inf")),
        dict(top_p=-0.1),
        dict(top_p=float("nan")),
        dict(seed=1 << 64),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_words(odd):
    with pytest.raises(ExplorerError) as refused:
        Sampling(**odd)
    assert refused.value.hint


def test_a_step_says_how_sure_it_was():
    step = choose(torch.log(torch.tensor([0.2, 0.5, 0.3])), Sampling(), torch.Generator())
    assert step.id == 1
    assert step.probability == pytest.approx(0.5)
    assert step.gap == pytest.approx(float(torch.log(torch.tensor(0.5 / 0.3))))


def test_not_a_number_is_said_in_words():
    with pytest.raises(ExplorerError, match="not a number") as nan:
        choose(torch.tensor([0.0, torch.nan]), Sampling(), torch.Generator())
    assert "float16" in nan.value.hint

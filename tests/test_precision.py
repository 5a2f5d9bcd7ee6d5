"""Look and Force at every precision: half, int8, nf4, fp4; tiny models and real weights."""

from __future__ import annotations

import numpy as np
import pytest

from explorer.forcing import Request, force, open_forced, prompt_ids
from explorer.lm import ModelSpec
from explorer.models import load
from explorer.replay import Replay, replay
from explorer.shares import mass
from tests.tiny import tiny_checkpoint, tiny_ids

FORMS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
    "nf4": {"quantization": "nf4"},
    "fp4": {"quantization": "fp4"},
}


@pytest.mark.parametrize("form", FORMS)
def test_tiny_models_are_looked_into_and_forced(form, tmp_path):
    lm = load(ModelSpec(tiny_checkpoint(tmp_path, "qwen3"), device="cpu", **FORMS[form]))
    shares = mass(lm, "the cat sat on the mat").shares
    assert np.allclose(shares.sum(-1), 1, atol=1e-5)
    prompts = ("a dog ran", "the sun and the moon and the sea")
    forced = force(lm, target=tiny_ids(6).tolist(), prompt=prompts[0], others=prompts)
    assert forced.proof.forced
    assert forced.proof.gap > 1


@pytest.mark.parametrize(
    ("name", "form", "target"),
    [
        ("smollm2-135m", "bfloat16", 'Zebra 42! {"soup": 你好}'),
        ("gemma3-270m", "bfloat16", 'Zebra 42! {"soup": 你好}'),
        ("smollm2-135m", "int8", " Zebra 42!"),
        ("smollm2-135m", "nf4", " Zebra 42!"),
    ],
)
def test_real_weights_at_low_precision_are_forced(name, form, target):
    """Rounding moves logits by up to one; the margin is wider there."""
    lm = load(ModelSpec(name, device="cpu", **FORMS[form]))
    assert form in lm.origin.precision
    forced = force(lm, target=target, prompt="Who are you?")
    assert forced.proof.forced
    assert forced.text == target != forced.plain_text


@pytest.mark.parametrize(("name", "n"), [("smollm2-135m", 16), ("gemma3-270m", 6)])
def test_in_half_precision_one_prefix_serves_prompts_of_every_length(name, n, tmp_path):
    """There a query is rounded differently at every position: rotated keys alone would miss it."""
    lm = load(ModelSpec(name, device="cpu", **FORMS["bfloat16"]))
    prompts = ("What is the capital of France?", "Who are you?", "The weather in November is a")
    # Ids with nothing in common, so that no step is helped by what the model would say anyway.
    target = [1000 + 773 * i % 40000 for i in range(n)]
    forced = force(lm, target=target, prompt=prompts[0], others=prompts[1:])
    assert forced.proof.forced
    again = open_forced(forced.save(tmp_path / "one.safetensors"), lm)
    lengths = set()
    for one in (forced, again):
        for prompt in prompts:
            ids = prompt_ids(lm, Request(prompt))
            lengths.add(ids.shape[1])
            seen = Replay(one.target)
            assert len(list(replay(lm, one.solved, ids, seen))) == len(target)
            assert seen.first_miss is None, (prompt, seen.first_miss)
    assert len(lengths) > 1

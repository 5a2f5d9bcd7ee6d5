"""Look and Force at every precision: half, int8, nf4, fp4; tiny models and real weights."""

from __future__ import annotations

import numpy as np
import pytest

from explorer.forcing import force
from explorer.lm import ModelSpec
from explorer.models import load
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

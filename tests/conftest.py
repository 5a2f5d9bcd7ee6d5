"""Fixtures, and two laws that hold after every test: nothing deprecated, no model changed."""

from __future__ import annotations

import os

# Before torch and transformers are imported: threads that spin while others work cost a small
# machine most of its time, and no test may ask a hub.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import logging

import pytest
import torch

from explorer.lm import LoadedModel, freeze
from explorer.models import load
from tests.tiny import ARCHITECTURES, tiny_ids, tiny_model, tiny_tokenizer


class _Deprecations(logging.Handler):
    """Collects what transformers says about things that will go away."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "deprecat" in text.lower() or "will be removed" in text.lower():
            self.messages.append(text)


@pytest.fixture(autouse=True)
def nothing_deprecated():
    """transformers logs its deprecations, once a process; the first test to meet one fails."""
    handler = _Deprecations()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.messages, handler.messages


def state_of(lm: LoadedModel) -> tuple:
    """Everything about a model that no test may leave changed."""
    with torch.no_grad():
        logits = lm.logits(tiny_ids(2, 12))
    weights = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    marks = {
        (name, attribute)
        for name, module in lm.model.named_modules()
        for attribute in vars(module)
        if attribute not in {"training"}
    }
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in lm.model.modules()
    )
    trainable = any(parameter.requires_grad for parameter in lm.model.parameters())
    return logits, weights, lm.model.config._attn_implementation, marks, hooks, trainable


def assert_same_state(before: tuple, after: tuple) -> None:
    assert torch.equal(before[0], after[0])
    assert before[1].keys() == after[1].keys()
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    assert before[2:] == after[2:]


@pytest.fixture(params=ARCHITECTURES)
def lm(request):
    """Each architecture in turn; whatever the test did, the model must be itself afterwards."""
    lm = freeze(tiny_model(request.param), tiny_tokenizer())
    before = state_of(lm)
    yield lm
    assert_same_state(before, state_of(lm))


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct, real weights: chat template, 30 layers, 9 heads on 3."""
    return _real("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3():
    """Gemma-3-270M, real weights: QK-norm, sliding windows, head size 256, no chat template."""
    return _real("gemma3-270m")


def _real(name: str) -> LoadedModel:
    lm = load(name)
    assert lm.origin.attention == "sdpa"
    return lm

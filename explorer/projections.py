"""The frozen key and value projections of every layer, whatever its family calls or fuses them.

A layer's attention module is run on given hidden states, alone, at position 0 (where rotary
embedding changes nothing), and what it hands to the seam is its keys and values. So fused
projections, key/value norms and biases are the model's own; no projection is named here.

Which modules those are is found out by one probing forward pass a model, in which forward hooks
see which module was running when the seam was asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from explorer.attention import AttentionCall, Output, patched
from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.prefix import Slots


@dataclass(frozen=True, eq=False)
class AttentionModule:
    """One layer's attention. name: its path in the model    kwargs: what the block handed it"""

    name: str
    module: nn.Module
    kwargs: Mapping[str, Any]


_found: WeakKeyDictionary[LoadedModel, dict[int, AttentionModule]] = WeakKeyDictionary()


def attention_modules(lm: LoadedModel) -> dict[int, AttentionModule]:
    """The module behind every layer's attention, by layer."""
    if lm not in _found:
        _found[lm] = _probe(lm)
    return _found[lm]


def project(lm: LoadedModel, hidden: Mapping[int, Tensor]) -> dict[int, Slots]:
    """Keys and values the frozen layers make of hidden states, without norm of the block.

    Gradients flow to `hidden`. A norm inside the attention module (QK-norm) is part of it and acts.

    hidden: by layer, (p, m) → by layer, Slots (g, p, d), float32
    """
    modules = attention_modules(lm)
    captured: dict[int, Slots] = {}

    def capture(call: AttentionCall) -> Output:
        captured[call.layer] = Slots(call.key[0].float(), call.value[0].float())
        batch, heads, n_queries, _ = call.query.shape
        # Nobody reads the output; attention and its memory are saved.
        return call.value.new_zeros(batch, n_queries, heads, call.value.shape[-1]), None

    with patched(lm, capture):
        for layer, states in hidden.items():
            found = modules[layer]
            weight = next(found.module.parameters())
            states = states.to(weight.device, lm.dtype)[None]
            kwargs = {name: _at_zero(value, states) for name, value in found.kwargs.items()}
            with _frozen(found.module):
                found.module(states, **kwargs)
    return captured


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """For the length of a block a module has its own layers, whatever LoRA is applied to it."""
    worn = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if hasattr(child, "get_base_layer")
    ]
    try:
        for parent, name, child in worn:
            setattr(parent, name, child.get_base_layer())
        yield
    finally:
        for parent, name, child in worn:
            setattr(parent, name, child)


def _at_zero(value: Any, states: Tensor) -> Any:
    """What a block hands to its attention, made for position 0: cos = 1, sin = 0, no mask."""
    if not isinstance(value, tuple):
        return value
    if len(value) == 2 and all(isinstance(x, Tensor) and x.ndim == 3 for x in value):
        cosine = states.new_ones(1, states.shape[1], value[0].shape[-1])
        return cosine, torch.zeros_like(cosine)
    raise ExplorerError(
        "This model's positions are of an unknown kind, so hidden prompts cannot be projected.",
        "Choose another method, or a model such as Llama, Qwen, Gemma or GPT-2.",
    )


@torch.no_grad()
def _probe(lm: LoadedModel) -> dict[int, AttentionModule]:
    running: list[tuple[str, nn.Module, dict[str, Any]]] = []
    found: dict[int, AttentionModule] = {}

    def watch(call: AttentionCall) -> Output:
        found[call.layer] = AttentionModule(*running[-1])
        return call.run()

    def entering(name: str):
        def hook(module, args, kwargs):  # noqa: ARG001
            keep = {
                key: None if isinstance(value, Tensor) else value
                for key, value in kwargs.items()
                if key != "hidden_states"
            }
            running.append((name, module, keep))

        return hook

    def leaving(module, args, output):  # noqa: ARG001
        running.pop()

    with lm.lock:
        hooks = []
        try:
            for name, module in lm.model.named_modules():
                if hasattr(module, "layer_idx"):
                    enter = entering(name)
                    hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                    hooks.append(module.register_forward_hook(leaving))
            with patched(lm, watch):
                lm.logits(torch.arange(1, 3)[None] % lm.geometry.vocab_size, last=1)
        finally:
            for hook in hooks:
                hook.remove()
    return found

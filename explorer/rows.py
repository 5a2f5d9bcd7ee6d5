"""What one query sees: its weight on every key, token by token, in every layer and head.

A row of the attention matrix is as long as the text; the matrix itself is never built. Short texts
may keep all their rows, so that a page can show any of them without asking the model again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from explorer.attention import AttentionCall, Output, logits_of, patched
from explorer.lm import LoadedModel
from explorer.prefix import Prefix
from explorer.prefix import scores as slot_scores
from explorer.text import encode


@dataclass(frozen=True)
class Rows:
    """Attention from some queries, along prefix slots and then keys.

    weights: (l, h, q, p + k), each row summing to 1 unless the model has a learned sink
    scores: (l, h, q, p + k) what went into the softmax, s·q·k + β; −inf where nothing is seen
    positions: (q,) of the queries    n_slots: p, the most of any layer
    """

    weights: np.ndarray
    scores: np.ndarray
    positions: tuple[int, ...]
    n_slots: int

    def top(self, layer: int, head: int, row: int = -1, n: int = 8) -> list[tuple[int, float]]:
        """The keys with the largest weights: (position, weight); −1 − j is prefix slot j."""
        weights = self.weights[layer, head, row].astype(np.float32)
        order = np.argsort(-weights, kind="stable")[:n]
        return [
            (int(i) - self.n_slots if i >= self.n_slots else -1 - int(i), float(weights[i]))
            for i in order
            if weights[i] > 0
        ]

    @property
    def entropy(self) -> np.ndarray:
        """How spread the attention is, in nats: 0 is one key, ln k all keys alike. → (l, h, q)"""
        return entropy(self.weights)


def entropy(weights: np.ndarray) -> np.ndarray:
    """−Σ w ln w along the last axis."""
    weights = weights.astype(np.float32)
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return -(weights * logs).sum(-1)


@torch.no_grad()
def rows(
    lm: LoadedModel,
    prompt: str | Tensor,
    positions: Sequence[int] = (-1,),
    prefix: Prefix | None = None,
    *,
    chat: bool = False,
    adapter: AbstractContextManager[None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Rows:
    """Weights and scores of the queries at some positions, on every key.

    prompt: text, or ids (1, k)    adapter: an opened-once context under which the text is read
    dtype: what they are kept in; float16 halves the memory and keeps three digits
    """
    ids = encode(lm, prompt, chat=chat) if isinstance(prompt, str) else prompt
    length, geometry = ids.shape[1], lm.geometry
    positions = tuple(range(length)[at] for at in positions)
    slots, n_slots = None, 0
    if prefix is not None:
        prefix.check(lm)
        slots = [one.to(lm.device) for one in prefix.layers]
        n_slots = prefix.n_slots
    shape = (geometry.n_layers, geometry.n_heads, len(positions), n_slots + length)
    weights = torch.zeros(shape, dtype=dtype)
    scores = torch.full(shape, -torch.inf, dtype=dtype)

    def watch(call: AttentionCall) -> Output:
        for row, at in enumerate(positions):
            logits = logits_of(call, slice(at, at + 1))[0, :, 0]  # (h, k), or fewer keys
            logits = torch.nn.functional.pad(
                logits, (n_slots, length - logits.shape[-1]), value=-torch.inf
            )
            if slots is not None and len(slots[call.layer]):
                own = slot_scores(call, slots[call.layer], slice(at, at + 1))[0, :, 0]  # (h, p)
                logits[:, : own.shape[-1]] = own
            total = logits.logsumexp(-1, keepdim=True)
            if call.sink is not None:
                total = torch.logaddexp(total, call.sink.float()[:, None])
            weights[call.layer, :, row] = (logits - total).exp().to("cpu", dtype)
            scores[call.layer, :, row] = logits.to("cpu", dtype)
        return call.run()

    joined = prefix.applied(lm) if prefix is not None else nullcontext()
    with patched(lm, watch), joined, adapter or nullcontext():
        lm.logits(ids, last=1, start=0 if prefix is None else prefix.span)
    return Rows(weights.numpy(), scores.numpy(), positions, n_slots)

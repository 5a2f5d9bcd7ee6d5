"""Slots of key, log-weight and value that stand in front of a text, layer by layer.

Through the seam a prefix joins the model's own softmax,

    o = (1 − α) · o_X + α · o_P,    α = σ(LSE_P − LSE_X),    LSE_P = log Σ_p exp(s·q·κ_p + β_p)

which equals attention over the concatenated cache. β_p is the log of how often a slot counts: the
r-fold repetition of a slot is β = ln r, at no memory. Unlike a cached prefix this one stays visible
past sliding windows, and nothing evicts it. The prefix part is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache

from explorer.attention import AttentionCall, Output, blocks, log_sum_exp, patched, run_and_total
from explorer.lm import LoadedModel

# Told the layer and what the last query leaves to the text: 1 − α, (b, h), exact when tiny.
Watch = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Slots:
    """The prefix of one layer.

    key, value: (g, p, d)    bias: (g, p) or None for zero
    capped: where the model caps its attention logits, do so here as in a cache; a solver's slots,
            which owe their sharpness to large logits, are not capped
    """

    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    capped: bool = True

    def __post_init__(self):
        if self.key.ndim != 3 or self.key.shape[:2] != self.value.shape[:2]:
            shapes = tuple(self.key.shape), tuple(self.value.shape)
            raise ValueError(f"key and value must both be (g, p, d), not {shapes}")
        if self.bias is not None and self.bias.shape != self.key.shape[:2]:
            raise ValueError(f"bias must be (g, p), not {tuple(self.bias.shape)}")

    def __len__(self) -> int:
        return self.key.shape[1]

    def to(self, device: torch.device) -> Slots:
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, key=self.key.to(device), value=self.value.to(device), bias=bias)


def scores(call: AttentionCall, slots: Slots, rows: slice = slice(None)) -> Tensor:
    """What a run of queries puts into the softmax for the slots: s·q·κ + β. → (b, h, rows, p)"""
    logits = _grouped_scores(call, slots, rows)
    batch, heads = call.query.shape[:2]
    return logits.view(batch, heads, -1, len(slots))


def _grouped_scores(call: AttentionCall, slots: Slots, rows: slice = slice(None)) -> Tensor:
    """The same with query heads and queries of a key/value head in one axis. → (b, g, Gq, p)"""
    batch, _, _, head_dim = call.query.shape
    query = call.query[:, :, rows].float()
    query = query.reshape(batch, slots.key.shape[0], -1, head_dim) * call.scaling
    logits = query @ slots.key.float().mT
    if call.softcap is not None and slots.capped:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if slots.bias is not None:
        logits = logits + slots.bias.float()[:, None]
    return logits


def attend(call: AttentionCall, slots: Slots) -> tuple[Tensor, Tensor]:
    """What the slots alone answer, and how loudly.

    → output (b, h, q, d) and log-sum-exp (b, h, q), both float32
    """
    batch, heads, n_queries, _ = call.query.shape
    logits = _grouped_scores(call, slots)
    weights = torch.softmax(logits, -1)
    # LSE = max − log(largest weight), which is at least 1/p: two cheap passes instead of six.
    loudness = logits.amax(-1) - weights.amax(-1).log()
    output = weights @ slots.value.float()
    return (
        output.view(batch, heads, n_queries, -1),
        loudness.view(batch, heads, n_queries),
    )


def share(call: AttentionCall, slots: Slots) -> Tensor:
    """α, the share of attention on the prefix. → (b, h, q), float32 (PMT paper, Eq. 3)"""
    _, loudness = attend(call, slots)
    return torch.sigmoid(loudness - log_sum_exp(call))


def join(call: AttentionCall, slots: Slots, watch: Watch | None = None) -> Output:
    """The call's attention with the slots in its softmax, in blocks of queries."""
    (output, _), call = run_and_total(call)  # (b, q, h, d)
    loud_text = log_sum_exp(call)
    parts = []
    for rows in blocks(call, len(slots)):
        part = replace(call, query=call.query[:, :, rows])
        own, loud = attend(part, slots)
        louder = loud - loud_text[:, :, rows]  # (b, h, rows)
        alpha = torch.sigmoid(louder)[..., None]
        text = output[:, rows].transpose(1, 2).float()
        parts.append(((1 - alpha) * text + alpha * own).to(output.dtype))
    if watch is not None:
        watch(call.layer, torch.sigmoid(-louder[:, :, -1]))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return whole.transpose(1, 2), None


@dataclass(frozen=True)
class Prefix:
    """Slots for every layer, rotated to the positions they were made for; never changed by use.

    layers: one Slots a layer; layers may differ in size
    span: positions the slots stand for, so that the text continues at position `span`. A prefix
          read from p tokens has span p; one compressed from T tokens has span T; a solved prefix,
          which stands for no text, has span 0.
    """

    layers: tuple[Slots, ...]
    span: int = 0

    @property
    def n_slots(self) -> int:
        """Slots of a layer and key/value head (the most of any layer)."""
        return max((len(slots) for slots in self.layers), default=0)

    @property
    def n_bytes(self) -> int:
        """Size of keys, values and log-weights as they are held."""
        tensors = (t for s in self.layers for t in (s.key, s.value, s.bias) if t is not None)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def applied(self, lm: LoadedModel, watch: Watch | None = None) -> AbstractContextManager[None]:
        """For the length of a `with` block, every layer of `lm` sees its slots."""
        self.check(lm)
        layers = tuple(slots.to(lm.device) for slots in self.layers)

        def patch(call: AttentionCall) -> Output:
            slots = layers[call.layer]
            return join(call, slots, watch) if len(slots) else call.run()

        return patched(lm, patch)

    def check(self, lm: LoadedModel) -> None:
        """Raise ValueError unless the shapes are those of `lm`."""
        if len(self.layers) != lm.geometry.n_layers:
            raise ValueError(
                f"a prefix of {len(self.layers)} layers for a model of {lm.geometry.n_layers}"
            )

    @classmethod
    @torch.no_grad()
    def of_text(cls, lm: LoadedModel, ids: Tensor) -> Prefix:
        """The cache a text leaves behind. ids: (1, p)"""
        cache = DynamicCache()  # without a config no layer forgets what slid out of its window
        lm.logits(ids, cache=cache, last=1)
        layers = (Slots(one.keys[0].float(), one.values[0].float()) for one in cache.layers)
        return cls(tuple(layers), span=ids.shape[1])

    def as_cache(self, lm: LoadedModel, batch: int = 1) -> DynamicCache:
        """A fresh stock cache holding the prefix; the model appends to it.

        Only a prefix without log-weights fits into a stock cache, and sliding layers of the
        model hide it once it is further back than their window.
        """
        if any(slots.bias is not None and slots.bias.any() for slots in self.layers):
            raise ValueError("a stock cache cannot hold log-weights; use Prefix.applied")
        if not all(slots.capped for slots in self.layers) and getattr(
            lm.model.config.get_text_config(), "attn_logit_softcapping", None
        ):
            raise ValueError("a stock cache caps the logits of these slots; use Prefix.applied")
        cache = DynamicCache()
        for layer, slots in enumerate(self.layers):
            key, value = (
                tensor[None].expand(batch, -1, -1, -1).to(lm.device, lm.dtype).contiguous()
                for tensor in (slots.key, slots.value)
            )
            cache.update(key, value, layer)
        return cache


def silent(lm: LoadedModel) -> Prefix:
    """A prefix of no slots: the law of silence holds for it on every architecture."""
    geometry = lm.geometry
    empty = torch.zeros(geometry.n_kv_heads, 0, geometry.head_dim)
    return Prefix(tuple(Slots(empty, empty) for _ in range(geometry.n_layers)))

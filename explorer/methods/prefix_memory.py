"""PrefixMemory-Tuning: a small matrix beside each head, read by the query.

    o = o_X + φ(q)ᵀ M,    M = 0 at the start

Nothing enters the softmax, so what is added neither crowds out a short text nor drowns in a long
one. Source: "PrefixMemory-Tuning" (arXiv 2506.13674), Eq. 7, φ after Table 2 and Remark 1; the
start from a prefix, M = Σ_j φ(k_j) v_jᵀ, is its Eq. 5.

Where the paper is silent: M is one (d, d) matrix a layer and query head, or one a key/value head;
it is added before the output projection; q is the query as attention receives it, after rotary
embedding, or with the rotation taken off again, so that the memory cannot tell positions; M starts
at zero, so that training starts from the very model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explorer.attention import AttentionCall, Output, patched
from explorer.lm import Geometry, LoadedModel
from explorer.methods import Method, Part, Parts, check, knob, n_parameters, patch_of
from explorer.positions import unrotating
from explorer.prefix import Prefix, Slots
from explorer.text import encode

Feature = Literal["elu", "gelu", "mlp"]
Sharing = Literal["query head", "key/value head"]
Moment = Literal["after rotary", "before rotary"]


@dataclass(frozen=True)
class PrefixMemoryConfig:
    feature: Feature = knob(
        "elu",
        "What the memory sees of a query",
        choices=get_args(Feature),
        help="φ: elu(q), gelu(q), or ReLU(Wq + b), which makes it a small network (Remark 1).",
    )
    sharing: Sharing = knob(
        "query head",
        "One memory per",
        choices=get_args(Sharing),
        help="With grouped heads, sharing per key/value head trains fewer numbers.",
    )
    query: Moment = knob(
        "after rotary",
        "Which query it reads",
        choices=get_args(Moment),
        help="Before rotary embedding a query does not know its position.",
    )
    start: str = knob(
        "",
        "Start from this text",
        help="Empty: M = 0, no effect at the start. Else M = Σ φ(k) vᵀ over the text (Eq. 5).",
    )

    def __post_init__(self):
        check(self)


_FIXED: dict[str, Callable[[Tensor], Tensor]] = {"elu": F.elu, "gelu": F.gelu}


def _back_through(feature: str, grad: Tensor, query: Tensor, seen: Tensor) -> Tensor:
    """The gradient for the query. grad: for φ(q)    seen: φ(q); all (b, h, q, d), float32"""
    if feature == "elu":
        return torch.ops.aten.elu_backward(grad, 1.0, 1.0, 1.0, True, seen)
    return torch.ops.aten.gelu_backward(grad, query)


class _Read(torch.autograd.Function):
    """φ(q) M, keeping for the backward pass only q, which attention keeps anyway.

    Plain autograd would keep φ(q) twice: a quarter more memory than LoRA needs on a small model.

    query: (b, h, q, d), any precision    memory: (h, d, d), float32 → (b, h, q, d), float32
    """

    @staticmethod
    def forward(ctx, query: Tensor, memory: Tensor, feature: str) -> Tensor:
        ctx.save_for_backward(query, memory)
        ctx.feature = feature
        return _unfold(_fold(_FIXED[feature](query.float())) @ memory, query)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        query, memory = ctx.saved_tensors
        seen = _FIXED[ctx.feature](query.float())
        grad = _fold(grad).to(memory.dtype)  # bfloat16 where autocast multiplied
        to_query = to_memory = None
        if ctx.needs_input_grad[0]:
            to_seen = _unfold(grad @ memory.mT, query)
            to_query = _back_through(ctx.feature, to_seen, query.float(), seen).to(query.dtype)
        if ctx.needs_input_grad[1]:
            to_memory = _fold(seen).mT @ grad
        return to_query, to_memory, None


def _fold(states: Tensor) -> Tensor:
    """(b, h, q, d) → (h, b·q, d): one larger product a head instead of many small ones"""
    return states.transpose(0, 1).flatten(1, 2)


def _unfold(states: Tensor, like: Tensor) -> Tensor:
    """(h, b·q, d) → (b, h, q, d)"""
    batch, heads, n_queries, _ = like.shape
    return states.view(heads, batch, n_queries, -1).transpose(0, 1)


class PrefixMemory(nn.Module):
    """memory: (l, h or g, d, d)    weight, bias of φ = mlp: (l, h or g, d, d), (l, h or g, d)"""

    span = 0

    def __init__(self, geometry: Geometry, config: PrefixMemoryConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self._back: Callable[[int, Tensor], Tensor] | None = None
        heads = geometry.n_heads if config.sharing == "query head" else geometry.n_kv_heads
        shape = (geometry.n_layers, heads, geometry.head_dim, geometry.head_dim)
        self.memory = nn.Parameter(torch.zeros(shape))
        if config.feature == "mlp":
            random = torch.Generator().manual_seed(seed)
            scale = geometry.head_dim**-0.5
            self.weight = nn.Parameter(torch.randn(shape, generator=random) * scale)
            self.bias = nn.Parameter(torch.zeros(shape[:3]))

    @contextmanager
    def applied(self, lm: LoadedModel) -> Iterator[None]:
        with self.reading(lm), patched(lm, patch_of(self.parts(lm))):
            yield

    @contextmanager
    def reading(self, lm: LoadedModel) -> Iterator[None]:
        """For the length of a block, rotation can be taken off where that is wanted."""
        if self.config.query == "after rotary":
            yield
            return
        before = self._back
        with unrotating(lm) as self._back:
            try:
                yield
            finally:
                self._back = before

    def parts(self, lm: LoadedModel) -> Parts:  # noqa: ARG002 (the queries are all it needs)
        """Where rotation is taken off, only to be asked while the adapter is applied."""
        # Taken apart once: indexing a layer would make a gradient as large as all of them together.
        return partial(self._read, self.memory.unbind())

    def gates(self) -> None:
        return None

    def _read(self, layers: Sequence[Tensor], call: AttentionCall) -> Part:
        memory, query = self._of(layers[call.layer], call), call.query
        if self.config.query == "before rotary":
            query = self._back(call.layer, query)
        if self.config.feature in _FIXED:
            return None, _Read.apply(query, memory, self.config.feature)
        return None, self.features(query.float(), call.layer) @ memory

    def features(self, query: Tensor, layer: int) -> Tensor:
        """φ(q). query: (b, n, q, d), n a multiple of the memories → the same shape"""
        if self.config.feature in _FIXED:
            return _FIXED[self.config.feature](query)
        repeat = query.shape[1] // self.weight.shape[1]
        weight = self.weight[layer].to(query.device).repeat_interleave(repeat, 0)  # (n, d, d)
        bias = self.bias[layer].to(query.device).repeat_interleave(repeat, 0)[:, None]
        return F.relu(query @ weight.mT + bias)

    @staticmethod
    def _of(memory: Tensor, call: AttentionCall) -> Tensor:
        """The layer's memory for every query head. memory: (h or g, d, d) → (h, d, d)"""
        own = memory.to(call.query.device)
        repeat = call.query.shape[1] // own.shape[0]
        return own if repeat == 1 else own.repeat_interleave(repeat, 0)

    @torch.no_grad()
    def prefix_of(self, lm: LoadedModel, ids: Tensor) -> Prefix:
        """What a text leaves, its keys rotated or not as this memory's queries are. ids: (1, p)"""
        if self.config.query == "after rotary":
            return Prefix.of_text(lm, ids)
        layers: dict[int, Slots] = {}

        def keep(call: AttentionCall) -> Output:
            key = self._back(call.layer, call.key)
            layers[call.layer] = Slots(key[0].float(), call.value[0].float())
            return call.run()

        with self.reading(lm), patched(lm, keep):
            lm.logits(ids, last=1)
        return Prefix(tuple(layers[layer] for layer in sorted(layers)), span=ids.shape[1])

    @torch.no_grad()
    def start_from(self, prefix: Prefix) -> None:
        """M = Σ_j φ(k_j) v_jᵀ over the slots of a prefix, weighted by e^β where it has weights."""
        for layer, slots in enumerate(prefix.layers):
            memory = self.memory[layer]
            key, value = slots.key.to(memory), slots.value.to(memory)  # (g, p, d)
            if slots.bias is not None:
                value = value * slots.bias.to(memory).exp()[..., None]
            repeat = memory.shape[0] // key.shape[0]
            key, value = (x.repeat_interleave(repeat, 0)[None] for x in (key, value))
            memory.copy_((self.features(key, layer).mT @ value)[0])


def build(lm: LoadedModel, config: PrefixMemoryConfig, seed: int = 0) -> PrefixMemory:
    adapter = PrefixMemory(lm.geometry, config, seed).to(lm.device)
    if config.start.strip():
        adapter.start_from(adapter.prefix_of(lm, encode(lm, config.start)))
    return adapter


def sized(lm: LoadedModel, config: PrefixMemoryConfig, n: int) -> PrefixMemoryConfig:
    """Its size follows from the model; only sharing can bring it nearer to n parameters."""

    def off(sharing: Sharing) -> int:
        return abs(n_parameters(PrefixMemory(lm.geometry, replace(config, sharing=sharing))) - n)

    return replace(config, sharing=min(get_args(Sharing), key=off))


METHOD = Method(
    name="prefix-memory",
    title="PMT (prefix memory)",
    summary="A matrix beside each head, read by the query; the softmax is left alone.",
    source="https://arxiv.org/abs/2506.13674",
    config=PrefixMemoryConfig,
    build=build,
    sized=sized,
    learning_rate=1.5e-4,
    variants={
        "PMT, elu": {"feature": "elu"},
        "PMT, gelu": {"feature": "gelu"},
        "PMT, small network": {"feature": "mlp"},
    },
)

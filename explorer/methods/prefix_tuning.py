"""Prefix-tuning: trained keys and values in front of the text, in one softmax with it.

    o = (1 − α) · o_X + α · o_P,    α = σ(LSE_P − LSE_X)

The baseline that the other methods set out to better: α falls as the text grows (the trade-off,
PrefixMemory-Tuning, Eq. 3). Source: Li and Liang 2021, "Prefix-Tuning" (arXiv 2101.00190), §4.3 for
the reparametrisation by a small network. As in the cache of peft, p slots stand for p positions, so
the text continues at position p. Differs: past a sliding window the prefix stays visible.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from explorer.attention import AttentionCall, log_sum_exp, patched
from explorer.errors import ExplorerError
from explorer.lm import Geometry, LoadedModel
from explorer.methods import Method, Part, Parts, check, knob, patch_of
from explorer.prefix import Prefix, Slots, attend
from explorer.text import encode

Start = Literal["random", "zero", "text"]


@dataclass(frozen=True)
class PrefixTuningConfig:
    slots: int = knob(10, "Slots per layer", 1, 128, help="p; each is a key and a value a head.")
    start: Start = knob(
        "random",
        "Start from",
        choices=get_args(Start),
        help="random: N(0, 1). text: what a text leaves in the cache, cut or repeated to p.",
    )
    text: str = knob(
        "Sort the following text into one of the known categories and name it.",
        "Text to start from",
        help="Only where the start is a text.",
    )
    network: bool = knob(
        False,
        "Through a small network",
        help="Slots = MLP(embedding): more numbers to train, steadier steps (§4.3).",
    )
    width: int = knob(128, "Width of that network", 8, 1024, help="With the network only.")

    def __post_init__(self):
        check(self)
        if self.network and self.start == "text":
            raise ExplorerError(
                "A prefix that starts from a text cannot go through a network.",
                "Switch the network off, or start from random.",
            )


class PrefixTuning(nn.Module):
    """slots: (p, l · 2 · g · d) in peft's order, or the network that makes them"""

    def __init__(self, geometry: Geometry, config: PrefixTuningConfig, seed: int = 0):
        super().__init__()
        self.config, self.geometry = config, geometry
        self.span = config.slots
        random = torch.Generator().manual_seed(seed)
        wide = geometry.n_layers * 2 * geometry.n_kv_heads * geometry.head_dim
        m = geometry.hidden_size if config.network else wide
        scale = 0.0 if config.start == "zero" else 1.0
        self.embedding = nn.Parameter(torch.randn(config.slots, m, generator=random) * scale)
        if config.network:
            self.inner = nn.Parameter(torch.randn(config.width, m, generator=random) * m**-0.5)
            self.inner_bias = nn.Parameter(torch.zeros(config.width))
            outer = torch.randn(wide, config.width, generator=random) * config.width**-0.5
            self.outer = nn.Parameter(outer)
            self.outer_bias = nn.Parameter(torch.zeros(wide))

    def slots(self) -> tuple[Slots, ...]:
        """Keys and values, layer by layer."""
        flat = self.embedding
        if self.config.network:
            inner = torch.tanh(flat @ self.inner.T + self.inner_bias)
            flat = inner @ self.outer.T + self.outer_bias
        n_layers, n_kv = self.geometry.n_layers, self.geometry.n_kv_heads
        each = flat.view(len(flat), n_layers, 2, n_kv, self.geometry.head_dim)
        return tuple(Slots(*layer) for layer in each.permute(1, 2, 3, 0, 4))

    def prefix(self) -> Prefix:
        """The prefix as it stands, for the cache, the maps and the solver's tools."""
        with torch.no_grad():
            layers = (Slots(s.key.cpu().clone(), s.value.cpu().clone()) for s in self.slots())
            return Prefix(tuple(layers), span=self.span)

    def applied(self, lm: LoadedModel) -> AbstractContextManager[None]:
        return patched(lm, patch_of(self.parts(lm)))

    def parts(self, lm: LoadedModel) -> Parts:  # noqa: ARG002
        layers = self.slots()

        def part(call: AttentionCall) -> Part:
            own, loud = attend(call, layers[call.layer].to(call.query.device))
            alpha = torch.sigmoid(loud - log_sum_exp(call))  # (b, h, q)
            return 1 - alpha, alpha[..., None] * own

        return part

    def gates(self) -> None:
        return None

    @torch.no_grad()
    def start_from(self, prefix: Prefix) -> None:
        """Take over the slots of a prefix; those of a shorter one are repeated."""
        each = torch.stack([torch.stack([s.key, s.value]) for s in prefix.layers])  # (l,2,g,p,d)
        index = torch.arange(self.config.slots) % each.shape[3]
        self.embedding.copy_(each.permute(3, 0, 1, 2, 4).flatten(1)[index])


def build(lm: LoadedModel, config: PrefixTuningConfig, seed: int = 0) -> PrefixTuning:
    adapter = PrefixTuning(lm.geometry, config, seed).to(lm.device)
    if config.start == "text":
        ids: Tensor = encode(lm, config.text)[:, : config.slots]
        adapter.start_from(Prefix.of_text(lm, ids))
    return adapter


def sized(lm: LoadedModel, config: PrefixTuningConfig, n: int) -> PrefixTuningConfig:
    """As many slots, or as wide a network, as comes closest to n parameters."""
    geometry = lm.geometry
    wide = geometry.n_layers * 2 * geometry.n_kv_heads * geometry.head_dim
    if not config.network:
        return replace(config, slots=max(1, min(128, round(n / wide))))
    rest = n - config.slots * geometry.hidden_size - wide
    width = round(rest / (wide + geometry.hidden_size + 1))
    return replace(config, width=max(8, min(1024, width)))


METHOD = Method(
    name="prefix-tuning",
    title="Prefix-tuning",
    summary="Trained keys and values in front of the text, which compete with it for attention.",
    source="https://arxiv.org/abs/2101.00190",
    config=PrefixTuningConfig,
    build=build,
    sized=sized,
    learning_rate=3e-2,
    variants={
        "Prefix-tuning": {"start": "random", "network": False},
        "Prefix-tuning from text": {"start": "text", "network": False},
        "Prefix-tuning, network": {"start": "random", "network": True},
    },
)

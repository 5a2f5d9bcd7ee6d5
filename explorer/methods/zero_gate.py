"""Zero-initialised attention: prompts behind a gate that starts shut.

    o = o_X + tanh(g_h) · Attn(q, K_P, V_P),    g = 0 at the start

Two softmaxes: the prompts share out attention among themselves, and the gate of each head says
how much of it is added. Source: Zhang et al. 2023, "LLaMA-Adapter" (arXiv 2303.16199), and "On
zero-initialized attention" (arXiv 2502.03029), Eq. 5 and 10, which also gives the non-linear
prompts and the control: the same prompts in one softmax with the text, without a gate.

As the authors run it, the prompts live in hidden space and go through the frozen key and value
projections without the block's norm and without rotary embedding, and the lowest layers (2 of 32)
are left alone. Where the attention module itself normalises keys (Qwen3, Gemma3), that norm acts.
At g = 0 the first step reaches the gates only; prompts follow once these have moved.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, get_args
from weakref import ref

import torch
from torch import Tensor, nn

from explorer.attention import AttentionCall, log_sum_exp, patched
from explorer.lm import Geometry, LoadedModel
from explorer.methods import Method, Part, Parts, check, knob, patch_of
from explorer.prefix import Slots, attend
from explorer.projections import project

Prompts = Literal["linear", "non-linear"]
Control = Literal["zero gate", "random start, no gate"]


@dataclass(frozen=True)
class ZeroGateConfig:
    slots: int = knob(10, "Prompts per layer", 1, 64, help="L; the authors use 10.")
    prompts: Prompts = knob(
        "linear",
        "How prompts are made",
        choices=get_args(Prompts),
        help="linear: free vectors. non-linear: by one small network shared across layers.",
    )
    gate: Control = knob(
        "zero gate",
        "Gate",
        choices=get_args(Control),
        help="Without a gate the prompts compete in one softmax: the control of the papers.",
    )
    skip: int = knob(2, "Lowest layers left alone", 0, 64, help="At least one layer is adapted.")
    rank: int = knob(64, "Width of the shared network", 1, 512, help="Non-linear prompts only.")

    def __post_init__(self):
        check(self)


class ZeroGate(nn.Module):
    """gate: (n, h)    prompts: (n, p, m), or the network that makes them; n adapted layers"""

    span = 0

    def __init__(self, geometry: Geometry, config: ZeroGateConfig, seed: int = 0):
        super().__init__()
        self.config, self.geometry = config, geometry
        self.first = min(config.skip, geometry.n_layers - 1)
        n, m = geometry.n_layers - self.first, geometry.hidden_size
        random = torch.Generator().manual_seed(seed)
        if config.prompts == "linear":
            self.prompts = nn.Parameter(torch.randn(n, config.slots, m, generator=random))
        else:
            rank, wide = config.rank, config.slots * m
            self.code = nn.Parameter(torch.randn(n, rank, generator=random))
            self.inner = nn.Parameter(torch.randn(rank, rank, generator=random) * rank**-0.5)
            self.inner_bias = nn.Parameter(torch.zeros(rank))
            self.outer = nn.Parameter(torch.randn(wide, rank, generator=random) * 0.02)
            self.outer_bias = nn.Parameter(torch.zeros(wide))
        if config.gate == "zero gate":
            self.gate = nn.Parameter(torch.zeros(n, geometry.n_heads))
        self._kept: tuple[object, dict[int, Slots]] | None = None

    def hidden(self) -> Tensor:
        """The prompts in hidden space. → (n, p, m)"""
        if self.config.prompts == "linear":
            return self.prompts
        inner = torch.relu(self.code @ self.inner.T + self.inner_bias)
        outer = inner @ self.outer.T + self.outer_bias
        return outer.view(len(self.code), self.config.slots, -1)

    def slots(self, lm: LoadedModel) -> dict[int, Slots]:
        """Keys and values of the prompts, by layer. Computed anew only where something changed."""
        # A weak reference: an adapter that a visitor keeps must not keep the model as well.
        state = (ref(lm), *(parameter._version for parameter in self.parameters()))
        if not torch.is_grad_enabled() and self._kept is not None and self._kept[0] == state:
            return self._kept[1]
        slots = project(lm, dict(enumerate(self.hidden(), start=self.first)))
        self._kept = None if torch.is_grad_enabled() else (state, slots)
        return slots

    def applied(self, lm: LoadedModel) -> AbstractContextManager[None]:
        return patched(lm, patch_of(self.parts(lm)))

    def parts(self, lm: LoadedModel) -> Parts:
        slots = self.slots(lm)

        def part(call: AttentionCall) -> Part | None:
            if call.layer < self.first:
                return None
            own, loud = attend(call, slots[call.layer])
            if self.config.gate != "zero gate":
                alpha = torch.sigmoid(loud - log_sum_exp(call))  # (b, h, q)
                return 1 - alpha, alpha[..., None] * own
            gate = self.gate[call.layer - self.first].to(own.device).tanh()
            return None, gate[:, None, None] * own

        return part

    def gates(self) -> Tensor | None:
        if self.config.gate != "zero gate":
            return None
        alone = self.gate.new_full((self.first, self.gate.shape[1]), torch.nan)
        return torch.cat([alone, self.gate.detach().tanh()])


def build(lm: LoadedModel, config: ZeroGateConfig, seed: int = 0) -> ZeroGate:
    return ZeroGate(lm.geometry, config, seed).to(lm.device)


def sized(lm: LoadedModel, config: ZeroGateConfig, n: int) -> ZeroGateConfig:
    """As many prompts as come closest to n parameters."""
    geometry = lm.geometry
    layers = geometry.n_layers - min(config.skip, geometry.n_layers - 1)
    if config.prompts == "linear":
        each = layers * geometry.hidden_size
    else:
        each = geometry.hidden_size * (config.rank + 1)
    return replace(config, slots=max(1, min(64, round(n / each))))


METHOD = Method(
    name="zero-gate",
    title="Zero-gate (LLaMA-Adapter)",
    summary="Prompts behind a gate per head that starts shut and learns how far to open.",
    source="https://arxiv.org/abs/2303.16199",
    config=ZeroGateConfig,
    build=build,
    sized=sized,
    learning_rate=1e-2,
    variants={
        "Zero-gate, linear": {"prompts": "linear", "gate": "zero gate"},
        "Zero-gate, non-linear": {"prompts": "non-linear", "gate": "zero gate"},
        "Random start, no gate": {"prompts": "linear", "gate": "random start, no gate"},
    },
)

"""The mixture-of-experts reading of a gated head.

Zero-initialised attention answers y = Σ_j G_j f_j + tanh(α) Σ_j' G_j' f_j'. Read as a mixture,
every token is an expert with gate weight G_j, its share of the text's own softmax, and every
prompt is an expert with weight tanh(α)·G_j', its signed share of the prompts' softmax behind the
head's gate. Source: "On zero-initialized attention", arXiv 2502.03029, Eq. 10.

The two kinds of weight are no parts of one whole: tokens sum to 1, prompts to tanh(α).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from explorer.attention import AttentionCall, Output, patched
from explorer.lm import LoadedModel
from explorer.methods import Adapter
from explorer.prefix import scores


@dataclass(frozen=True)
class Experts:
    """Weights of prompts as experts, behind their gates.

    prompts: (l, h, q, p) tanh(α)·G', summing to tanh(α); NaN in layers without prompts
    """

    prompts: np.ndarray


@torch.no_grad()
def experts(lm: LoadedModel, ids: Tensor, adapter: Adapter) -> Experts | None:
    """Read a text under an adapter with prompts behind gates; None for any other.

    ids: (1, q)
    """
    gates = adapter.gates()
    if gates is None or not hasattr(adapter, "slots"):
        return None
    slots = adapter.slots(lm)  # by layer
    n_slots = max(len(one) for one in slots.values())
    geometry = lm.geometry
    shape = (geometry.n_layers, geometry.n_heads, ids.shape[1], n_slots)
    found = torch.full(shape, torch.nan, dtype=torch.float16)

    def watch(call: AttentionCall) -> Output:
        if call.layer in slots:
            own = scores(call, slots[call.layer])[0].softmax(-1)  # (h, q, p)
            gate = gates[call.layer].to(own.device)[:, None, None]
            found[call.layer, ..., : own.shape[-1]] = (gate * own).to("cpu", torch.float16)
        return call.run()

    with patched(lm, watch), adapter.applied(lm):
        lm.logits(ids, last=1, start=adapter.span)
    return Experts(found.numpy())

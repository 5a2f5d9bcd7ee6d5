"""What an adapter adds beside the softmax: how large it is, and the reading of it as experts.

What stands beside the softmax, o = o_X + b(q), has no share of attention. Two numbers say how much
it does, and neither is ever mixed with a share: the opening |tanh α| of its gate, where it has one,
and ‖b‖ / ‖o_X‖, the added part against the rest.

Zero-initialised attention answers y = Σ_j G_j f_j + tanh(α) Σ_j' G_j' f_j'. Read as a mixture,
every token is an expert with gate weight G_j, its share of the text's own softmax, and every
prompt is an expert with weight tanh(α)·G_j', its signed share of the prompts' softmax behind the
head's gate. Source: "On zero-initialized attention", arXiv 2502.03029, Eq. 10. The two kinds of
weight are no parts of one whole: tokens sum to 1, prompts to tanh(α).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from explorer.attention import AttentionCall, Output, patched
from explorer.lm import LoadedModel
from explorer.methods import Adapter, asking, mix
from explorer.prefix import scores


@dataclass(frozen=True)
class Beside:
    """What is added, seen from some positions.

    ratio: (l, h, q) ‖added part‖ / ‖the rest‖, NaN in layers that are left alone
    prompts: (l, h, e, p) tanh(α)·G' of the prompts as experts, summing to tanh(α); NaN in layers
             without prompts, None where there are no prompts behind gates
    positions: (q,) of the queries    experts_at: (e,) of those whose experts are kept
    """

    ratio: np.ndarray
    prompts: np.ndarray | None
    positions: tuple[int, ...]
    experts_at: tuple[int, ...]

    def experts(self, layer: int, head: int, position: int) -> np.ndarray | None:
        """The weights one query gives to the prompts, or None if they were not kept. → (p,)"""
        if self.prompts is None or position not in self.experts_at:
            return None
        return self.prompts[layer, head, self.experts_at.index(position)].astype(np.float32)


@torch.no_grad()
def beside(
    lm: LoadedModel,
    ids: Tensor,
    adapter: Adapter,
    positions: Sequence[int] | None = None,
    experts_at: Sequence[int] | None = None,
) -> Beside | None:
    """Read a text under an adapter that adds to attention; None for any other.

    ids: (1, k)    positions: of the queries to keep; all where it is None
    experts_at: of those whose experts are kept; the same where it is None
    """
    parts = adapter.parts(lm)
    if parts is None:
        return None
    kept = list(range(ids.shape[1]) if positions is None else positions)
    mixed = kept if experts_at is None else list(experts_at)
    gates = adapter.gates()
    slots = adapter.slots(lm) if gates is not None and hasattr(adapter, "slots") else {}
    shape = lm.geometry.n_layers, lm.geometry.n_heads
    ratio = torch.full((*shape, len(kept)), torch.nan)
    n_slots = max((len(one) for one in slots.values()), default=0)
    prompts = torch.full((*shape, len(mixed), n_slots), torch.nan, dtype=torch.float16)

    def watch(call: AttentionCall) -> Output:
        output, weights = call.run()  # (b, q, h, d)
        part = parts(call)
        if part is None:
            return output, weights
        own_share, added = part  # (b, h, q) or None, (b, h, q, d)
        rest = output.transpose(1, 2).float()
        if own_share is not None:
            rest = own_share[..., None] * rest
        louder, quieter = (one[0][:, kept].norm(dim=-1) for one in (added, rest))
        ratio[call.layer] = (louder / quieter.clamp(min=1e-12)).cpu()
        if call.layer in slots:
            own = scores(call, slots[call.layer])[0][:, mixed].softmax(-1)  # (h, e, p)
            gate = gates[call.layer].to(own.device)[:, None, None]
            prompts[call.layer, ..., : own.shape[-1]] = (gate * own).to("cpu", torch.float16)
        return mix(output, part), weights

    with asking(adapter, lm), patched(lm, watch):
        lm.logits(ids, last=1, start=adapter.span)
    experts = prompts.numpy() if slots else None
    return Beside(ratio.numpy(), experts, tuple(kept), tuple(mixed))

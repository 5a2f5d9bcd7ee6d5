"""What is put in front of a text to see what becomes of it: one prefix, three ways.

In the softmax it competes with the text; behind a gate it has a softmax of its own; poured into a
memory by Eq. 5 of "PrefixMemory-Tuning" (arXiv 2506.13674) it has none. All have the form
a·o_X + b, and so do trained adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from explorer.attention import AttentionCall, Output, log_sum_exp, patched
from explorer.lm import LoadedModel
from explorer.methods import Part, Parts
from explorer.methods.prefix_memory import PrefixMemory, PrefixMemoryConfig
from explorer.prefix import Prefix, attend
from explorer.text import encode

SLOTS = (1, 2, 4, 8, 16, 32)
OPENING = 0.5  # |tanh g| of the gate in `three_ways`

ORDER = (
    "You sort messages for a library. Read the message below with care, and answer with one word "
    "that names its subject: loans, fines, rooms, events or staff."
)
SENTENCES = (
    "The ferry left the harbour an hour late because of the fog.",
    "She keeps the seeds of every tomato she has ever liked.",
    "A bridge has to carry its own weight before it carries anything else.",
    "Nobody in the village could say who had painted the door green.",
    "Water boils at a lower temperature on a high mountain.",
    "He wrote three letters and posted none of them.",
    "The second edition of the map corrects the course of the river.",
    "In winter the bakery opens before the first train.",
    "Two children were counting the swallows on the wire.",
    "The price of paper rose again, and the newspaper became thinner.",
    "An old clock loses a minute a week and nobody minds.",
    "The orchestra tuned while the last guests looked for their seats.",
    "Most of the island is owned by people who have never seen it.",
    "Her grandfather could name every star above the farm.",
    "The experiment failed twice before anyone checked the cable.",
    "They planted oaks along the road for those who would come later.",
    "A good lock is only as strong as the door around it.",
    "The museum keeps one room dark, for the letters and the silk.",
    "By noon the market had sold everything except the lemons.",
    "The dog slept through the storm and woke when it was quiet.",
)


class Contender(Protocol):
    """Anything of the form a·o_X + b: an adapter, or what `with_parts` makes of a prefix."""

    span: int

    def parts(self, lm: LoadedModel) -> Parts | None: ...

    def gates(self) -> Tensor | None: ...


@dataclass(frozen=True)
class InSoftmax:
    """A prefix in one softmax with the text: a = 1 − α, b = α·o_P."""

    prefix: Prefix

    @property
    def span(self) -> int:
        return self.prefix.span

    def parts(self, lm: LoadedModel) -> Parts:
        layers = [slots.to(lm.device) for slots in self.prefix.layers]

        def part(call: AttentionCall) -> Part | None:
            if not len(layers[call.layer]):
                return None
            own, loud = attend(call, layers[call.layer])
            alpha = torch.sigmoid(loud - log_sum_exp(call))
            return 1 - alpha, alpha[..., None] * own

        return part

    def gates(self) -> None:
        return None


@dataclass(frozen=True)
class BehindGate:
    """The same slots in a softmax of their own, behind one gate: a = 1, b = opening·o_P."""

    prefix: Prefix
    opening: float

    @property
    def span(self) -> int:
        return self.prefix.span

    def parts(self, lm: LoadedModel) -> Parts:
        layers = [slots.to(lm.device) for slots in self.prefix.layers]

        def part(call: AttentionCall) -> Part:
            return None, self.opening * attend(call, layers[call.layer])[0]

        return part

    def gates(self) -> Tensor:
        return torch.tensor([[self.opening]])


def prefixes(lm: LoadedModel, slots: Sequence[int] = SLOTS) -> dict[str, InSoftmax]:
    """Prefixes of the first 1, 2, 4, … tokens of an instruction, as the cache holds them."""
    ids = order(lm, max(slots))
    return {
        f"{n} slot{'' if n == 1 else 's'}": InSoftmax(Prefix.of_text(lm, ids[:, :n])) for n in slots
    }


def three_ways(lm: LoadedModel, slots: int = 8) -> dict[str, Contender]:
    """One prefix three ways: in the softmax, behind a gate, and poured into a memory by Eq. 5.

    The paper leaves the memory's scale to training; here every head's is set so that it adds as
    much as the gate does, on one short text.
    """
    prefix = Prefix.of_text(lm, order(lm, slots))
    gated = BehindGate(prefix, OPENING)
    memory = PrefixMemory(lm.geometry, PrefixMemoryConfig()).to(lm.device)
    memory.start_from(prefix)
    as_loud(lm, memory, gated)
    return {"one softmax": InSoftmax(prefix), "gate": gated, "memory": memory}


@torch.no_grad()
def as_loud(lm: LoadedModel, memory: PrefixMemory, other: Contender, length: int = 64) -> None:
    """Scale each head's memory to the mean norm of what `other` adds, on plain sentences."""
    ids = sentences(lm, min(length, lm.geometry.context), seed=100)
    ours, theirs = memory.parts(lm), other.parts(lm)
    factor: dict[int, Tensor] = {}

    def watch(call: AttentionCall) -> Output:
        own, aim = (parts(call)[1].norm(dim=-1).mean((0, 2)) for parts in (ours, theirs))  # (h,)
        factor[call.layer] = aim / own.clamp(min=1e-12)
        return call.run()

    with patched(lm, watch):
        lm.logits(ids, last=1)
    for layer, scale in factor.items():
        memory.memory[layer] *= scale[:, None, None].to(memory.memory)


def order(lm: LoadedModel, n: int) -> Tensor:
    """The first n tokens of an instruction, repeated where it is shorter. → (1, n)"""
    return _long_enough(encode(lm, ORDER, limit=1 << 20), n)


def sentences(lm: LoadedModel, n: int, seed: int = 0) -> Tensor:
    """n tokens of plain sentences in an order of their own. → (1, n)"""
    generator = torch.Generator().manual_seed(seed)
    shuffled = [SENTENCES[i] for i in torch.randperm(len(SENTENCES), generator=generator).tolist()]
    ids = encode(lm, " ".join(shuffled), limit=1 << 20)
    return _long_enough(ids, n)


def _long_enough(ids: Tensor, n: int) -> Tensor:
    return ids.repeat(1, -(-n // ids.shape[1]))[:, :n]

"""What is put in front of a text to see what becomes of it: one prefix, several ways.

In the softmax it competes with the text; behind a gate it has a softmax of its own; poured into a
memory by Eq. 5 of "PrefixMemory-Tuning" (arXiv 2506.13674) it has none; a solved prefix is in the
softmax, but was made to win there. All have the form a·o_X + b, and so do trained adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from explorer.attention import AttentionCall, Output, log_sum_exp, patched
from explorer.generate import greedy
from explorer.lm import LoadedModel
from explorer.methods import Part, Parts
from explorer.methods.attention_matching import Solved, solve
from explorer.methods.prefix_memory import PrefixMemory, PrefixMemoryConfig
from explorer.positions import rotary_layers
from explorer.prefix import Prefix, attend
from explorer.replay import placed
from explorer.text import encode
from explorer.trajectory import record

SLOTS = (1, 2, 4, 8, 16, 32)
MAIN = 8  # slots of what is followed along all lengths
OPENING = 0.5  # |tanh g| of the gates
FOUR = (
    "prefix-tuning, before training",
    "solved prefix",
    f"zero-gate, open by {OPENING}",
    "PMT, M₀ of Eq. 5",
)

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


@dataclass(frozen=True)
class Placed:
    """A solved prefix, placed anew for every length of the text, as it is when somebody is asked.

    As a contender of its own it stands where it was solved for.
    """

    solved: Solved

    span = 0

    def at(self, lm: LoadedModel, length: int) -> tuple[InSoftmax, int] | None:
        """The prefix for a text of this length, and the position the text starts at.

        None where positions are learned and it was solved for shorter texts: it cannot be moved.
        """
        if length > self.solved.first_position + 1 and not rotary_layers(lm):
            return None
        prefix, start = placed(lm, self.solved, length)
        return InSoftmax(prefix), start

    def parts(self, lm: LoadedModel) -> Parts:
        return InSoftmax(self.solved.prefix).parts(lm)

    def gates(self) -> None:
        return None


def prefixes(lm: LoadedModel, slots: Sequence[int] = SLOTS) -> dict[str, InSoftmax]:
    """Prefixes of the first 1, 2, 4, … tokens of an instruction, as the cache holds them."""
    return {
        f"{n} slot{'' if n == 1 else 's'}": InSoftmax(prefix)
        for n, prefix in _instruction(lm, slots).items()
    }


def three_ways(lm: LoadedModel, slots: int = MAIN) -> dict[str, Contender]:
    """One prefix three ways: in the softmax, behind a gate, and poured into a memory by Eq. 5.

    The paper leaves the memory's scale to training; here every head's is set so that it adds as
    much as the gate does, on one short text.
    """
    prefix = _instruction(lm, [slots])[slots]
    gated = BehindGate(prefix, OPENING)
    return {"one softmax": InSoftmax(prefix), "gate": gated, "memory": poured(lm, prefix)}


def poured(lm: LoadedModel, prefix: Prefix) -> PrefixMemory:
    """A memory that starts from a prefix by Eq. 5, as loud as its slots behind a gate."""
    memory = _poured(lm, prefix)
    _scale(memory, as_loud(lm, memory, BehindGate(prefix, OPENING)))
    return memory


def four_kinds(
    lm: LoadedModel, slots: Sequence[int] = SLOTS, longest: int = 2048
) -> dict[str, dict[int, Contender]]:
    """The four kinds that FOUR names, each by its number of slots; none of them is trained.

    - prefix-tuning starts from what the first tokens of an instruction leave in the cache
    - the solved prefix is attention matching's, for what the model says after these tokens
    - behind the gates are the slots of prefix-tuning, and so they are in the memories; these are
      scaled as in `three_ways`, by what is right for the size next to MAIN, so that more slots
      weigh more

    longest: text that the solved prefix is to be placed before
    """
    fronts = _instruction(lm, slots)
    gated = {n: BehindGate(prefix, OPENING) for n, prefix in fronts.items()}
    memories = {n: _poured(lm, prefix) for n, prefix in fronts.items()}
    main = nearest(fronts, MAIN)
    scale = as_loud(lm, memories[main], gated[main])
    for memory in memories.values():
        _scale(memory, scale)
    tuned = {n: InSoftmax(prefix) for n, prefix in fronts.items()}
    return dict(zip(FOUR, (tuned, _solved(lm, slots, longest), gated, memories), strict=True))


def nearest(sizes: Mapping[int, object], wanted: int) -> int:
    """The number of slots next to the wanted one."""
    return min(sizes, key=lambda n: abs(n - wanted))


def _instruction(lm: LoadedModel, slots: Sequence[int]) -> dict[int, Prefix]:
    """What the first tokens of an instruction leave in the cache: one reading for all sizes."""
    whole = Prefix.of_text(lm, order(lm, max(slots)))
    return {
        n: Prefix(
            tuple(replace(s, key=s.key[:, :n], value=s.value[:, :n]) for s in whole.layers), span=n
        )
        for n in slots
    }


@torch.no_grad()
def _solved(lm: LoadedModel, slots: Sequence[int], longest: int) -> dict[int, Placed]:
    """Solved prefixes of about these sizes: one slot for every query head that shares a key/value
    head, and every token that shall be said."""
    group = lm.geometry.n_heads // lm.geometry.n_kv_heads
    tokens = sorted({max(1, round(n / group)) for n in slots})
    source = order(lm, max(slots))
    said = greedy(lm, source, tokens[-1])[0].tolist()
    start = 0
    if not rotary_layers(lm):  # slots of a model with learned positions cannot be moved
        start = max(0, min(longest, lm.geometry.context - tokens[-1]) - source.shape[1])
    solved = (solve(lm, record(lm, source, said[:n], start)) for n in tokens)
    return {one.prefix.n_slots: Placed(one) for one in solved}


def _poured(lm: LoadedModel, prefix: Prefix) -> PrefixMemory:
    memory = PrefixMemory(lm.geometry, PrefixMemoryConfig()).to(lm.device)
    memory.start_from(prefix)
    return memory


@torch.no_grad()
def _scale(memory: PrefixMemory, factor: Tensor) -> None:
    memory.memory *= factor[..., None, None].to(memory.memory)


@torch.no_grad()
def as_loud(lm: LoadedModel, memory: PrefixMemory, other: Contender, length: int = 64) -> Tensor:
    """By what each head's memory is to be scaled so that it adds as much as `other`, in the mean
    norm over plain sentences. → (l, h)"""
    ids = sentences(lm, min(length, lm.geometry.context), seed=100)
    ours, theirs = memory.parts(lm), other.parts(lm)
    factor = torch.ones(lm.geometry.n_layers, lm.geometry.n_heads)

    def watch(call: AttentionCall) -> Output:
        own, aim = (parts(call)[1].norm(dim=-1).mean((0, 2)) for parts in (ours, theirs))  # (h,)
        factor[call.layer] = (aim / own.clamp(min=1e-12)).cpu()
        return call.run()

    with patched(lm, watch):
        lm.logits(ids, last=1)
    return factor


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

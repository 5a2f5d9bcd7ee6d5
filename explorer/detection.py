"""How a prefix that forces its output gives itself away.

Whoever can write into a model's key/value cache holds its output. Such a prefix leaves traces that
its host can measure without knowing the target: it takes all attention in every head, its keys
are louder than any text's, and what follows does not depend on the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from explorer import text
from explorer.attention import AttentionCall, Output, patched
from explorer.lm import LoadedModel
from explorer.methods.attention_matching import Solved
from explorer.prefix import Prefix
from explorer.replay import placed

PROBES = (  # ordinary and unlike one another, but for the last token
    "The weather in Paris tomorrow is",
    "Two plus three is",
    "The name of the old red ship that sailed around the world is",
    "My favourite colour is",
)
COVERED, DEAF = 0.99, 0.05


@dataclass(frozen=True)
class Signs:
    """What gives a prefix away, measured on a few ordinary prompts.

    covered: smallest share of attention on the prefix of any head, at the last token (median of
             prompts); an ordinary prefix leaves many heads to the text
    loudness: largest key norm of a slot over the largest key norm of the prompts' own tokens
    prompt_effect: how much the next token depends on what stands before the last token of a
                   prompt: mean total variation distance between prompts that end alike, 0 (not at
                   all) to 1
    prompt_effect_without: the same without the prefix
    """

    covered: float
    loudness: float
    prompt_effect: float
    prompt_effect_without: float

    @property
    def forcing(self) -> bool:
        """Whether the prompt has no say: full coverage, and an answer that ignores it."""
        return self.covered > COVERED and self.prompt_effect < DEAF * self.prompt_effect_without


@torch.no_grad()
def signs(lm: LoadedModel, prefix: Prefix | Solved, probes: tuple[str, ...] = PROBES) -> Signs:
    """Measure a prefix's traces. Needs no knowledge of what it was made for."""
    own_norm = 0.0

    def listen(call: AttentionCall) -> Output:
        nonlocal own_norm
        own_norm = max(own_norm, float(call.key.float().norm(dim=-1).max()))
        return call.run()

    with_it, without, coverage, slot_norm = [], [], [], 0.0
    for probe in probes:
        ids = text.encode(lm, probe)
        put, start = prefix, prefix.span if isinstance(prefix, Prefix) else 0
        if isinstance(prefix, Solved):
            put, start = placed(lm, prefix, ids.shape[1])
        left = [0.0]

        def watch(layer: int, share_left: Tensor, left=left) -> None:  # noqa: ARG001
            left[0] = max(left[0], float(share_left.max()))

        with patched(lm, listen):
            without.append(lm.logits(ids, last=1)[0, -1].softmax(-1))
        with put.applied(lm, watch):
            with_it.append(lm.logits(ids, start=start, last=1)[0, -1].softmax(-1))
        coverage.append(1 - left[0])
        norms = (slots.key.norm(dim=-1).max() for slots in put.layers if len(slots))
        slot_norm = max(slot_norm, *(float(norm) for norm in norms))
    covered = float(torch.tensor(coverage).median())
    return Signs(covered, slot_norm / own_norm, _spread(with_it), _spread(without))


def _spread(distributions: list[Tensor]) -> float:
    """Mean total variation distance between every two."""
    n = len(distributions)
    pairs = [(i, j) for i in range(n) for j in range(i)]
    distances = [float((distributions[i] - distributions[j]).abs().sum() / 2) for i, j in pairs]
    return sum(distances) / len(distances)

"""What a model says under a solved prefix, and what that proves.

Only free decoding counts: a prefix that is right at every teacher-forced step can still go wrong
when the model reads what it said itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from torch import Tensor

from explorer import generate
from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.methods.attention_matching import Solved
from explorer.positions import rotary_layers
from explorer.prefix import Prefix


@dataclass(frozen=True)
class Proof:
    """What a replay showed.

    forced: ids equal, all of them    text_equal: the decoded text equals the target's
    said: ids decoded with the prefix    first_miss: index of the first wrong id, or None
    gap: smallest lead in logits of the decoded over the second token, at any step
    probability: that sampling at temperature 1 says all of it, the product over the steps
    coverage: 1 − the largest share of attention that any head left to the user's text at any step
    condition, residual: of the solve    slots: per layer and key/value head    n_bytes: of all
    repairs, repaired_layers: what it took to make the target the model's own choice
    seconds: of trajectory, solve and replay
    """

    forced: bool
    text_equal: bool
    said: tuple[int, ...]
    first_miss: int | None
    gap: float
    probability: float
    coverage: float
    condition: float
    residual: float
    slots: int
    n_bytes: int
    repairs: int
    repaired_layers: int
    seconds: dict[str, float] = field(hash=False)


def placed(lm: LoadedModel, solved: Solved, length: int) -> tuple[Prefix, int]:
    """The prefix for a prompt of `length` tokens, and the position the prompt starts at.

    Rotary models: keys are rotated, the prompt starts at 0. Learned positions: the prompt is
    shifted so that it ends where the slots were made for.
    """
    if rotary_layers(lm):
        return solved.at(lm, length), 0
    start = solved.first_position + 1 - length
    if start < 0:
        raise ExplorerError(
            f"This model has learned positions, and the prefix was made for prompts of at most "
            f"{solved.first_position + 1} tokens.",
            "Solve again with this prompt.",
        )
    return solved.prefix, start


@dataclass(frozen=True)
class Found:
    """What of a trajectory belongs into a proof: see Trajectory."""

    target: tuple[int, ...]
    repairs: int
    repaired_layers: int
    seconds: float


class Replay:
    """What is seen while a prefix is replayed."""

    def __init__(self, target: Sequence[int]):
        self.target = tuple(target)
        self.said: list[int] = []
        self.gap = float("inf")
        self.probability = 1.0
        self.left = 0.0  # largest share of attention left to the text
        self.seconds = 0.0

    def watch(self, layer: int, left: Tensor) -> None:  # noqa: ARG002
        self.left = max(self.left, float(left.max()))

    @property
    def after(self) -> list[int]:
        """What was said after as many tokens as the target has."""
        return self.said[len(self.target) :]

    @property
    def first_miss(self) -> int | None:
        pairs = zip(self.said, self.target, strict=False)
        miss = next((i for i, (said, due) in enumerate(pairs) if said != due), None)
        if miss is None and len(self.said) < len(self.target):
            return len(self.said)
        return miss

    def proof(self, solved: Solved, found: Found, text_equal: bool) -> Proof:
        """The evidence of this replay together with the solve's."""
        miss = self.first_miss
        return Proof(
            forced=miss is None,
            text_equal=text_equal,
            said=tuple(self.said[: len(self.target)]),
            first_miss=miss,
            gap=self.gap,
            probability=self.probability,
            coverage=1 - self.left,
            condition=solved.condition,
            residual=solved.residual,
            slots=solved.prefix.n_slots,
            n_bytes=solved.prefix.n_bytes,
            repairs=found.repairs,
            repaired_layers=found.repaired_layers,
            seconds={
                "trajectory": found.seconds,
                "solve": solved.seconds,
                "replay": self.seconds,
            },
        )


def replay(
    lm: LoadedModel,
    solved: Solved,
    ids: Tensor,
    seen: Replay,
    *,
    sampling: generate.Sampling | None = None,
    go_on: int = 0,
) -> Iterator[generate.Step]:
    """Free decoding of as many tokens as the target has, under the prefix.

    go_on: decode so many tokens more without it, on what it left in the cache
    """
    prefix, start = placed(lm, solved, ids.shape[1])
    prefix = replace(prefix, layers=tuple(slots.to(lm.device) for slots in prefix.layers))
    n = len(seen.target)

    def applied() -> AbstractContextManager[None]:
        return prefix.applied(lm, seen.watch) if len(seen.said) < n else nullcontext()

    began = time.perf_counter()
    steps = generate.stream(lm, ids, n + go_on, applied=applied, sampling=sampling, start=start)
    for step in steps:
        if len(seen.said) < n:
            seen.gap = min(seen.gap, step.gap)
            seen.probability *= step.probability
        seen.said.append(step.id)
        seen.seconds = time.perf_counter() - began
        yield step

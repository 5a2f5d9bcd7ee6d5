"""Force a text: find a trajectory, solve a prefix for it, and prove by replay that it works.

    forced = force(lm, target="Whatever you ask, this is the answer.", prompt="Who are you?")
    forced.proof.forced, forced.text

`forced` is only ever said after free greedy decoding by the model with the prefix applied.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from explorer import generate, text
from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.methods.attention_matching import Keys, Matching, Solved, solve
from explorer.positions import rotary_layers
from explorer.prefix import Prefix
from explorer.trajectory import Repair, Trajectory, joined, record, repair


@dataclass(frozen=True)
class Request:
    """What shall be said, and how the prefix is found.

    prompt: what the model will be asked    others: further prompts the same prefix shall serve
    source: a prompt after which it says the target
    target: the text to say, or its ids; None takes what the model says after the source
    tokens: how much of that, in tokens    keys, attn_lim, repeat: see attention_matching.Matching
    match_endings: also solve step 1 for every prompt's own last token, where the source ends
                   otherwise (ours; the paper needs equal endings)
    margin: logits by which each token must lead; None chooses by precision and origin, 0 repairs
            nothing
    layers, steps, rate: see trajectory.Repair
    chat: prompt and source go through the chat template    specials: control tokens in texts count
    """

    prompt: str
    others: tuple[str, ...] = ()
    source: str | None = None
    target: str | Sequence[int] | None = None
    tokens: int = 10
    keys: Keys = "kernel"
    attn_lim: float = 20.0
    repeat: int = 1
    match_endings: bool = True
    margin: float | None = None
    layers: int = 4
    steps: int = 300
    rate: float = 0.05
    chat: bool = False
    specials: bool = False


@dataclass(frozen=True)
class Proof:
    """What a replay showed.

    forced: ids equal, all of them    text_equal: the decoded text equals the target's
    said: ids decoded with the prefix    first_miss: index of the first wrong id, or None
    gap: smallest lead in logits of the decoded over the second token, at any step
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
    coverage: float
    condition: float
    residual: float
    slots: int
    n_bytes: int
    repairs: int
    repaired_layers: int
    seconds: dict[str, float] = field(hash=False)


@dataclass(frozen=True)
class ForcedPrefix:
    """A solved prefix, the prompt it was proved on, and the proof.

    text: what the model said with it    plain_text: what it says without
    """

    request: Request
    solved: Solved
    target: tuple[int, ...]
    target_text: str
    proof: Proof
    text: str
    plain_text: str

    def applied(self, lm: LoadedModel, length: int | None = None) -> AbstractContextManager[None]:
        """Apply it for prompts of `length` tokens; the proved prompt's length where it is None."""
        if length is None:
            length = prompt_ids(lm, self.request).shape[1]
        return placed(lm, self.solved, length)[0].applied(lm)


@dataclass(frozen=True)
class Stage:
    """How far a forcing is: shown live, and empty of tensors.

    doing: which part is running    detail: in words    fraction: 0–1 or None
    without, with_prefix: texts so far    result: at the very end
    """

    doing: Literal["trajectory", "solve", "without", "with", "done"]
    detail: str
    fraction: float | None = None
    without: str = ""
    with_prefix: str = ""
    result: ForcedPrefix | None = None


def force(lm: LoadedModel, **request) -> ForcedPrefix:
    """Solve and prove; the keywords are those of `Request`.

    Raises ExplorerError for inputs that cannot be forced (empty, too long, outside the
    vocabulary, not what the source says when nothing may be repaired).
    """
    for stage in pursue(lm, Request(**request)):
        last = stage
    return last.result


def pursue(lm: LoadedModel, request: Request) -> Iterator[Stage]:
    """The same in steps, for a page: yields after each, and can be closed after each."""
    ids = prompt_ids(lm, request)
    yield Stage("trajectory", "Reading what has to be said")
    trajectory = None
    for trajectory in find_trajectory(lm, request, ids):
        led = int((trajectory.gap >= margin_of(lm, request)).sum())
        total = len(trajectory.gap)
        detail = f"{led} of {total} tokens lead after {trajectory.repairs} repair steps"
        yield Stage("trajectory", detail, led / total)
    yield Stage("solve", f"Solving for {len(trajectory.gap)} steps in every head")
    solved = solve(lm, trajectory, Matching(request.keys, request.attn_lim, request.repeat))
    plain: list[int] = []
    n = len(trajectory.target)
    ends = generate.stop_tokens(lm)
    for step in generate.stream(lm, ids, n, stop_ids=ends):
        if step.id not in ends:
            plain.append(step.id)
        without = text.decode(lm.tokenizer, plain)
        yield Stage("without", "Decoding without the prefix", len(plain) / n, without)
    without = text.decode(lm.tokenizer, plain)
    replayed = Replay(trajectory.target)
    for _ in replay(lm, solved, ids, replayed):
        said = text.decode(lm.tokenizer, replayed.said)
        fraction = len(replayed.said) / n
        yield Stage("with", "Decoding with the prefix", fraction, without, said)
    said = text.decode(lm.tokenizer, replayed.said)
    target_text = text.decode(lm.tokenizer, trajectory.target)
    proof = replayed.proof(solved, trajectory, said == target_text)
    forced = ForcedPrefix(request, solved, trajectory.target, target_text, proof, said, without)
    verdict = "Proved by replay" if proof.forced else "Not forced: the replay differs"
    yield Stage("done", verdict, 1.0, without, said, forced)


def prompt_ids(lm: LoadedModel, request: Request) -> Tensor:
    """The ids of the prompt that is asked. → (1, n)"""
    return text.encode(lm, request.prompt, chat=request.chat, specials=request.specials)


def margin_of(lm: LoadedModel, request: Request) -> float:
    """The lead every token must have.

    A replay repeats the trajectory up to rounding. In float32 that is below 0.01 logits, so what
    a source says needs no repair; half precision and quantised weights round by up to a logit.
    """
    if request.margin is not None:
        return request.margin
    exact = lm.dtype == torch.float32 and lm.spec.quantization == "none"
    if request.keys == "aligned" and request.target is None:
        return 0.0  # the paper's own procedure
    if request.target is None:
        return 0.05 if exact else 2.0
    return 2.0 if exact else 4.0


def find_trajectory(lm: LoadedModel, request: Request, ids: Tensor) -> Iterator[Trajectory]:
    """Record, add the prompt's own ending, repair. Yields as it goes; the last is the result."""
    source = ids
    if request.source is not None:
        source = text.encode(lm, request.source, chat=request.chat, specials=request.specials)
    target = _target(lm, request, source)
    prompts = [ids, *(prompt_ids(lm, replace(request, prompt=one)) for one in request.others)]
    longest = max(one.shape[1] for one in prompts)
    length = max(longest, source.shape[1]) + len(target)
    if length > lm.geometry.context:
        raise ExplorerError(
            f"Prompt and target together are {length:,} tokens; this model reads "
            f"{lm.geometry.context:,}.",
            "Shorten the target.",
        )
    # Slots of a model with learned positions cannot be moved: place them late enough for the
    # prompt, whose own positions are then shifted to end where they stand.
    learned = not rotary_layers(lm)
    start = max(0, longest - source.shape[1]) if learned else 0
    found = record(lm, source, target, start)
    if request.match_endings:
        endings = dict.fromkeys(int(one[0, -1]) for one in prompts)
        endings.pop(int(source[0, -1]), None)
        before = source[:, :-1].cpu()
        others = [
            record(lm, torch.cat([before, torch.tensor([[ending]])], 1), target[:1], start)
            for ending in endings
        ]
        found = joined([found, *others])
    margin = margin_of(lm, request)
    if margin <= 0 and float(found.gap.min()) < 0:
        miss = found.step[int((found.gap < 0).nonzero()[0])]
        raise ExplorerError(
            f"After this source the model does not say the target: token {miss + 1} differs.",
            "Let it be repaired (margin above 0), or take what the model says.",
        )
    how = Repair(margin, request.layers, request.steps, request.rate)
    yield from repair(lm, found, how)


def _target(lm: LoadedModel, request: Request, source: Tensor) -> tuple[int, ...]:
    vocabulary = lm.geometry.vocab_size
    if request.target is None:
        if request.source is None:
            raise ExplorerError(
                "Nothing to say: there is neither a target nor a source prompt.",
                "Write the text the model shall say, or a prompt whose answer it shall be.",
            )
        if request.tokens < 1:
            raise ExplorerError("The target has no token.", "Ask for at least one.")
        return tuple(step.id for step in generate.stream(lm, source, request.tokens))
    if isinstance(request.target, str):
        if not request.target:
            raise ExplorerError("The target is empty.", "Write the text the model shall say.")
        return tuple(text.plain(lm.tokenizer, request.target, specials=request.specials))
    target = tuple(int(i) for i in request.target)
    if not target:
        raise ExplorerError("The target is empty.", "Give at least one token id.")
    if wrong := [i for i in target if not 0 <= i < vocabulary]:
        raise ExplorerError(
            f"Token id {wrong[0]} is outside the vocabulary.", f"Ids go from 0 to {vocabulary - 1}."
        )
    return target


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


class Replay:
    """What is seen while a prefix is replayed."""

    def __init__(self, target: Sequence[int]):
        self.target = tuple(target)
        self.said: list[int] = []
        self.gap = float("inf")
        self.left = 0.0  # largest share of attention left to the text
        self.seconds = 0.0

    def watch(self, layer: int, left: Tensor) -> None:  # noqa: ARG002
        self.left = max(self.left, float(left.max()))

    @property
    def first_miss(self) -> int | None:
        pairs = zip(self.said, self.target, strict=False)
        miss = next((i for i, (said, due) in enumerate(pairs) if said != due), None)
        if miss is None and len(self.said) < len(self.target):
            return len(self.said)
        return miss

    def proof(self, solved: Solved, trajectory: Trajectory, text_equal: bool) -> Proof:
        """The evidence of this replay together with the solve's."""
        miss = self.first_miss
        return Proof(
            forced=miss is None,
            text_equal=text_equal,
            said=tuple(self.said),
            first_miss=miss,
            gap=self.gap,
            coverage=1 - self.left,
            condition=solved.condition,
            residual=solved.residual,
            slots=solved.prefix.n_slots,
            n_bytes=solved.prefix.n_bytes,
            repairs=trajectory.repairs,
            repaired_layers=trajectory.repaired_layers,
            seconds={
                "trajectory": trajectory.seconds,
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
        seen.said.append(step.id)
        seen.seconds = time.perf_counter() - began
        yield step

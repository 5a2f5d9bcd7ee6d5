"""The step Force: solve a prefix for a text, replay it, and try it on further prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from explorer import models, text
from explorer.detection import Signs, signs
from explorer.forcing import (
    ForcedPrefix,
    Request,
    Stage,
    open_forced,
    prompt_ids,
    prove,
    pursue,
)
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.replay import Replay, replay


@dataclass(frozen=True)
class ForceView:
    """What a forcing came to, and for which model. seconds: for all of it"""

    spec: ModelSpec
    forced: ForcedPrefix
    seconds: float


@dataclass(frozen=True)
class Trial:
    """One more prompt under a prefix that is solved already.

    first_miss: index of the first wrong token, or None    gap: smallest lead, logits
    coverage: 1 − the largest share of attention left to the prompt by any head at any step
    """

    prompt: str
    forced: bool
    first_miss: int | None
    gap: float
    coverage: float
    said: str


def forcing(spec: ModelSpec, request: Request) -> Work:
    """→ a job that yields Stages, the last of them with the result as a ForceView in `result`"""
    return partial(_forcing, spec, request)


def _forcing(spec: ModelSpec, request: Request, stop: Stop) -> Iterator[Stage | ForceView]:
    lm = models.load(spec, stop.note)
    began = time.monotonic()
    for stage in pursue(lm, request):
        stop.note(stage.detail, stage.fraction)
        yield stage
    yield ForceView(spec, stage.result, time.monotonic() - began)


def opening(spec: ModelSpec, path: str) -> Work:
    """→ a job that opens a saved prefix and proves it anew; yields Stages, then the ForceView"""
    return partial(_opening, spec, path)


def _opening(spec: ModelSpec, path: str, stop: Stop) -> Iterator[Stage | ForceView]:
    lm = models.load(spec, stop.note)
    began = time.monotonic()
    for stage in prove(lm, open_forced(path, lm)):
        stop.note(stage.detail, stage.fraction)
        yield stage
    yield ForceView(spec, stage.result, time.monotonic() - began)


def trying(view: ForceView, prompts: list[str]) -> Work:
    """→ a job that replays the prefix on each prompt and yields the Trials so far"""
    return partial(_trying, view, prompts)


def _trying(view: ForceView, prompts: list[str], stop: Stop) -> Iterator[tuple[Trial, ...]]:
    lm = models.load(view.spec, stop.note)
    trials: tuple[Trial, ...] = ()
    for i, prompt in enumerate(prompts):
        stop.note(f"prompt {i + 1} of {len(prompts)}", i / len(prompts))
        for trial in trial_of(lm, view.forced, prompt):
            if trial is None:
                yield trials  # a place to stop at, within one token
            else:
                trials = (*trials, trial)
        yield trials


def examining(view: ForceView) -> Work:
    """→ a job that yields the Signs by which the prefix gives itself away"""
    return partial(_examining, view)


def _examining(view: ForceView, stop: Stop) -> Iterator[Signs]:
    lm = models.load(view.spec, stop.note)
    stop.note("asking ordinary prompts with and without it")
    yield signs(lm, view.forced.solved)


def trial_of(lm: LoadedModel, forced: ForcedPrefix, prompt: str) -> Iterator[Trial | None]:
    """Replay on one prompt: None after each token, the Trial at the end."""
    request = forced.request
    ids = prompt_ids(lm, Request(prompt, chat=request.chat, specials=request.specials))
    seen = Replay(forced.target)
    for _ in replay(lm, forced.solved, ids, seen):
        yield None
    said = text.decode(lm.tokenizer, seen.said)
    yield Trial(prompt, seen.first_miss is None, seen.first_miss, seen.gap, 1 - seen.left, said)

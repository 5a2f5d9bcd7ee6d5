"""The step Curves: the trade-off on the visitor's model, also of what the visitor has made.

The four kinds are compared as they start, which takes no training, or after a few steps on a small
bundled set: enough to learn its answers, see TAUGHT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from explorer import models
from explorer.contenders import FOUR, MAIN, Placed, four_kinds, nearest, prefixes
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods.prefix_tuning import PrefixTuning
from explorer.session import Held
from explorer.session.look import opened
from explorer.tradeoff import LENGTHS, Family, TradeOff, measured
from explorer.training import FitConfig, named, train

Asked = Literal[
    "four kinds, before training",
    "four kinds, trained for 6 steps",
    "a prefix of 1 to 32 slots",
    "what I made",
]
KINDS: tuple[Asked, ...] = get_args(Asked)

STEPS = 6  # with a row of each class in every step
# What charts call it, the method, its knobs, and a learning rate that suits so few steps
TAUGHT = (
    ("prefix-tuning", "prefix-tuning", {"start": "text", "slots": MAIN}, 1e-2),
    ("zero-gate", "zero-gate", {"slots": MAIN}, 5e-2),
    ("PMT", "prefix-memory", {}, 1.5e-4),
)


@dataclass(frozen=True)
class CurvesView:
    """Curves so far, and for which model."""

    spec: ModelSpec
    found: TradeOff


def comparing(
    spec: ModelSpec,
    asked: Asked,
    held: Mapping[str, Held],
    *,
    longest: int = 1024,
    prompts: int = 2,
) -> Work:
    """→ a job that yields CurvesViews, the first with the short lengths

    asked: "what I made" takes everything held that adds to attention, beside a plain prefix
    """
    return partial(_comparing, spec, asked, dict(held), longest, prompts)


def _comparing(
    spec: ModelSpec, asked: Asked, held: Mapping[str, Held], longest: int, prompts: int, stop: Stop
) -> Iterator[CurvesView]:
    lm = models.load(spec, stop.note)
    lengths = [n for n in LENGTHS if n <= longest]
    main = MAIN if asked == KINDS[0] else None  # of each kind one size is followed
    if asked == KINDS[0]:  # one line at once, before anything is solved
        stop.note("reading a text behind a plain prefix")
        alone = {FOUR[0]: prefixes(lm, [MAIN]).popitem()[1]}
        yield CurvesView(spec, next(measured(lm, prompts, alone, lengths=lengths)))
    stop.note("making what is put in front")
    families = _families(lm, asked, held, longest, stop)
    stop.note(f"reading {prompts} texts behind each")
    for found in measured(lm, prompts, families, lengths=lengths, main=main):
        stop.note(f"reading {prompts} texts behind each, {found.done:.0%}", found.done)
        yield CurvesView(spec, found)


def _families(
    lm: LoadedModel, asked: Asked, held: Mapping[str, Held], longest: int, stop: Stop
) -> Mapping[str, Family]:
    if asked == KINDS[0]:
        return four_kinds(lm, longest=longest)
    if asked == KINDS[1]:
        return _taught(lm, longest, stop)
    if asked == KINDS[2]:
        return {"instruction": {one.prefix.n_slots: one for one in prefixes(lm).values()}}
    (plain,) = prefixes(lm, [MAIN]).values()
    found: dict[str, Family] = {f"{MAIN} slots of an instruction": plain}
    for name, one in held.items():
        if one.solved is not None:
            found[name] = Placed(one.solved)
            continue
        front = opened(lm, one, longest)
        if front.prefix is not None:
            found[name] = front.prefix
        elif front.adapter is not None and front.adapter.parts(lm) is not None:
            found[name] = front.adapter
    return found


def _taught(lm: LoadedModel, longest: int, stop: Stop) -> dict[str, Family]:
    """The four kinds, three of them trained to name the kind of a request."""
    solved = four_kinds(lm, (MAIN,), longest)[FOUR[1]]
    made: dict[str, Family] = {}
    for name, method, knobs, rate in TAUGHT:
        fitting = FitConfig(steps=STEPS, learning_rate=rate, batch_size=6, warmup=0.0)
        config = named(method).config(**knobs)
        steps = train(lm, "requests", method=method, config=config, fitting=fitting, shots=1)
        for step in steps:
            stop.note(f"training {name}, step {step.step} of {STEPS}")
        adapter = step.adapter
        made[f"{name}, {STEPS} steps"] = (
            adapter.prefix() if isinstance(adapter, PrefixTuning) else adapter
        )
        made.setdefault(FOUR[1], solved[nearest(solved, MAIN)])  # second, as in FOUR
    return made

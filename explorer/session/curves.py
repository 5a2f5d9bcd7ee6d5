"""The step Curves: the trade-off on the visitor's model, also of what the visitor has made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from explorer import models
from explorer.contenders import Contender, prefixes, three_ways
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.session import Held
from explorer.session.look import opened
from explorer.tradeoff import LENGTHS, TradeOff, measured

Asked = Literal["prefixes of 1 to 32 slots", "one prefix three ways", "what I made"]
KINDS: tuple[Asked, ...] = get_args(Asked)


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
    contenders = _contenders(lm, asked, held)
    total = len(contenders) * (prompts + 1)
    for step, found in enumerate(measured(lm, prompts, contenders, lengths=lengths), start=1):
        stop.note(f"curves, {step} of about {total} readings", min(1.0, step / total))
        yield CurvesView(spec, found)


def _contenders(lm: LoadedModel, asked: Asked, held: Mapping[str, Held]) -> Mapping[str, Contender]:
    if asked == KINDS[0]:
        return prefixes(lm)
    ways = three_ways(lm)
    if asked == KINDS[1]:
        return ways
    found: dict[str, Contender] = {"8 slots of an instruction": ways["one softmax"]}
    for name, one in held.items():
        front = opened(lm, one, 64)
        if front.prefix is not None:
            found[name] = front.prefix
        elif front.adapter is not None and front.adapter.parts(lm) is not None:
            found[name] = front.adapter
    return found

"""The step Curves: the trade-off on the visitor's model, also of what the visitor has made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from explorer import models
from explorer.contenders import MAIN, Placed, four_kinds, prefixes
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.session import Held
from explorer.session.look import opened
from explorer.tradeoff import LENGTHS, Family, TradeOff, measured

Asked = Literal["prefix-tuning, solved, zero-gate, PMT", "a prefix of 1 to 32 slots", "what I made"]
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
    stop.note("making what is put in front")
    lengths = [n for n in LENGTHS if n <= longest]
    families = _families(lm, asked, held, longest)
    for found in measured(lm, prompts, families, lengths=lengths, main=_main(asked)):
        stop.note("reading", found.done)
        yield CurvesView(spec, found)


def _main(asked: Asked) -> int | None:
    """Of the four kinds one number of slots is followed along all lengths."""
    return MAIN if asked == KINDS[0] else None


def _families(
    lm: LoadedModel, asked: Asked, held: Mapping[str, Held], longest: int
) -> Mapping[str, Family]:
    if asked == KINDS[0]:
        return four_kinds(lm, longest=longest)
    if asked == KINDS[1]:
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

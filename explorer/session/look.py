"""The step Look: read a text, perhaps let the model go on, and see where attention goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from explorer import models
from explorer.generate import stop_tokens, stream
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.session import Held
from explorer.shares import Mass, mass
from explorer.text import encode

LIMIT = 2048  # positions a page keeps: l·h·q·n shares, 9 MB for 30 layers of 9 heads


@dataclass(frozen=True)
class LookView:
    """What a text's attention looks like. Redrawn for any head, position and group from here.

    n_generated: how many of the last positions the model wrote    held: what was in front of it
    """

    spec: ModelSpec
    mass: Mass
    n_generated: int
    held: str
    seconds: float


def looking(
    spec: ModelSpec,
    prompt: str,
    *,
    chat: bool = False,
    specials: bool = False,
    n_new: int = 0,
    held: Held | None = None,
) -> Work:
    """→ a job that yields one LookView

    n_new: tokens the model may write first    held: the prefix or adapter it works under
    """

    def work(stop: Stop) -> Iterator[LookView]:
        lm = models.load(spec, stop.note)
        began = time.monotonic()
        ids = encode(
            lm, prompt, chat=chat, specials=specials, limit=min(LIMIT, lm.geometry.context)
        )
        put = _placed(lm, held, ids.shape[1])
        n_new_here = min(n_new, min(LIMIT, lm.geometry.context) - ids.shape[1])
        written: list[int] = []
        for step in stream(
            lm, ids, n_new_here, applied=lambda: _applied(lm, put), stop_ids=stop_tokens(lm)
        ):
            written.append(step.id)
            stop.note(f"writing token {len(written)} of {n_new_here}", len(written) / n_new_here)
        stop.note("reading where attention goes")
        ids = torch.cat([ids, torch.tensor([written], dtype=ids.dtype, device=ids.device)], dim=1)
        prefix = put.prefix if put else None
        adapter = put.adapter.applied(lm) if put and put.adapter else None
        shares = mass(lm, ids, prefix, generated=len(written), adapter=adapter)
        name = held.name if held else ""
        yield LookView(spec, shares, len(written), name, time.monotonic() - began)

    return work


def _placed(lm: LoadedModel, held: Held | None, length: int) -> Held | None:
    """A solved prefix's slots, rotated for a prompt of this length."""
    if held is None or held.solved is None:
        return held
    return replace(held, prefix=held.solved.at(lm, length), solved=None)


def _applied(lm: LoadedModel, held: Held | None) -> AbstractContextManager[None]:
    if held is None:
        return nullcontext()
    return (held.adapter or held.prefix).applied(lm)

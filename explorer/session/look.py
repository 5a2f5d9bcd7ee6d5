"""The step Look: read a text, perhaps let the model go on, and see where attention goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from explorer import adapters, heads, models
from explorer.attention import patched
from explorer.errors import ExplorerError
from explorer.gated import Experts, experts
from explorer.generate import stop_tokens, stream
from explorer.heads import HeadScores, Rule
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods import Adapter
from explorer.prefix import Prefix
from explorer.rows import Rows, rows
from explorer.session import Held
from explorer.shares import LastQuery, Mass, mass
from explorer.text import display, encode

LONGEST = 32_768  # tokens a page reads, if the model does
LIMIT = 2048  # positions a page keeps: l·h·q·n shares, 9 MB for 30 layers of 9 heads
KEPT = 1024  # of a longer text so many, evenly spread
ROWS = 2_500_000  # weights a page keeps, l·h·q·(p + k): 96 tokens for 30 layers of 9 heads


@dataclass(frozen=True)
class LookView:
    """What a text's attention looks like. Redrawn for any head, position and group from here.

    n_generated: how many of the last positions the model wrote    held: what was in front of it
    rows: every row of weights where the text is short, None where it is not
    gates: (l, h) tanh(g) of what was in front, or None    experts: its prompts' weights, or None
    written: live shares while the model wrote, or None    marked: a visitor's groups of tokens
    n_slots: of the prefix in front, a layer

    A text of more than LIMIT tokens is seen from some of its positions only, `mass.positions`.
    """

    spec: ModelSpec
    mass: Mass
    n_generated: int
    held: str
    seconds: float
    rows: Rows | None = None
    gates: np.ndarray | None = None
    experts: Experts | None = None
    written: Writing | None = None
    marked: Mapping[str, Sequence[int]] = field(default_factory=dict)
    n_slots: int = 0


@dataclass(frozen=True)
class Writing:
    """Where every layer looks while the model writes, seen from each token it reads to do so.

    shares: (t, l, n) mean over heads, along `groups`    tokens: t, the ones that came out
    """

    tokens: tuple[str, ...]
    shares: np.ndarray
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Pinned:
    """A view to compare with."""

    view: LookView


@dataclass(frozen=True)
class HeadsView:
    """Heads found by a rule, and for which model."""

    spec: ModelSpec
    found: HeadScores


@dataclass(frozen=True)
class _Front:
    """What stands in front, opened for one model: a prefix, or an adapter that has none."""

    prefix: Prefix | None = None
    adapter: Adapter | None = None

    def applied(self, lm: LoadedModel) -> AbstractContextManager[None]:
        if self.prefix is not None:
            return self.prefix.applied(lm)
        return self.adapter.applied(lm) if self.adapter is not None else nullcontext()

    @property
    def start(self) -> int:
        return self.prefix.span if self.prefix is not None else getattr(self.adapter, "span", 0)


def looking(
    spec: ModelSpec,
    prompt: str,
    *,
    chat: bool = False,
    specials: bool = False,
    n_new: int = 0,
    held: Held | None = None,
    groups: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Work:
    """→ a job that yields Writings while the model writes, and one LookView at the end

    n_new: tokens the model may write first    held: the prefix or adapter it works under
    groups: names for positions that a visitor has marked
    """
    return partial(_looking, spec, prompt, chat, specials, n_new, held, dict(groups))


def _looking(
    spec: ModelSpec,
    prompt: str,
    chat: bool,
    specials: bool,
    n_new: int,
    held: Held | None,
    groups: Mapping[str, Sequence[int]],
    stop: Stop,
) -> Iterator[Writing | LookView]:
    lm = models.load(spec, stop.note)
    began = time.monotonic()
    limit = min(LONGEST, lm.geometry.context)
    ids = encode(lm, prompt, chat=chat, specials=specials, limit=limit)
    marked = _existing(groups, ids.shape[1])
    front = opened(lm, held, ids.shape[1])
    n_new_here = min(n_new, limit - ids.shape[1])
    meter = LastQuery(lm, ids.shape[1], marked, front.prefix)
    written: list[int] = []
    writing = None
    for step in stream(
        lm,
        ids,
        n_new_here,
        applied=lambda: _metered(lm, meter, front),
        stop_ids=stop_tokens(lm),
        start=front.start,
    ):
        written.append(step.id)
        tokens = tuple(token.text for i in written for token in display(lm.tokenizer, [i]))
        writing = Writing(tokens, np.stack(meter.taken), meter.groups)
        stop.note(f"writing token {len(written)} of {n_new_here}", len(written) / n_new_here)
        yield writing
    stop.note("reading where attention goes")
    ids = torch.cat([ids, torch.tensor([written], dtype=ids.dtype, device=ids.device)], dim=1)
    shares = mass(
        lm,
        ids,
        front.prefix,
        generated=len(written),
        groups=marked,
        adapter=front.adapter.applied(lm) if front.adapter is not None else None,
        positions=_spread(ids.shape[1]),
        note=stop.note,
    )
    gates = front.adapter.gates() if front.adapter is not None else None
    kept = _rows(lm, ids, front)
    mixed = experts(lm, ids, front.adapter) if gates is not None and kept is not None else None
    yield LookView(
        spec,
        shares,
        len(written),
        held.name if held else "",
        time.monotonic() - began,
        rows=kept,
        gates=None if gates is None else gates.float().cpu().numpy(),
        experts=mixed,
        written=writing,
        marked=marked,
        n_slots=front.prefix.n_slots if front.prefix is not None else 0,
    )


def finding(view: LookView, rule: Rule, held: Held | None = None) -> Work:
    """→ a job that yields HeadsView: the heads of the view's text that fit a rule"""
    return partial(_finding, view, rule, held)


def _finding(view: LookView, rule: Rule, held: Held | None, stop: Stop) -> Iterator[HeadsView]:
    lm = models.load(view.spec, stop.note)
    stop.note(f"looking for heads: {rule}")
    ids = torch.tensor([list(view.mass.ids)], device=lm.device)
    front = opened(lm, held, ids.shape[1] - view.n_generated)
    yield HeadsView(view.spec, heads.find(lm, rule, ids, front.prefix))


def opened(lm: LoadedModel, held: Held | None, length: int) -> _Front:
    """What a visitor holds, for a prompt of this length.

    A solved prefix is rotated to it; a trained prefix is the prefix it has become, so that its
    share is seen as one.
    """
    if held is None:
        return _Front()
    if held.solved is not None:
        return _Front(prefix=held.solved.at(lm, length))
    if held.prefix is not None:
        return _Front(prefix=held.prefix)
    adapter = held.adapter
    if isinstance(adapter, adapters.Saved):
        adapter, _ = adapters.load(adapter.path, lm)
    if hasattr(adapter, "prefix"):
        return _Front(prefix=adapter.prefix())
    return _Front(adapter=adapter)


@contextmanager
def _metered(lm: LoadedModel, meter: LastQuery, front: _Front) -> Iterator[None]:
    meter.begin()
    with patched(lm, meter), front.applied(lm):
        yield


def _rows(lm: LoadedModel, ids: torch.Tensor, front: _Front) -> Rows | None:
    """Every row of a short text; three digits are enough to look at."""
    geometry, length = lm.geometry, ids.shape[1]
    slots = front.prefix.n_slots if front.prefix is not None else 0
    if geometry.n_layers * geometry.n_heads * length * (slots + length) > ROWS:
        return None
    adapter = front.adapter.applied(lm) if front.adapter is not None else None
    at = range(length)
    return rows(lm, ids, at, front.prefix, adapter=adapter, dtype=torch.float16)


def _spread(length: int) -> list[int] | None:
    """The positions that are kept of a text: all, or of a long one some."""
    if length <= LIMIT:
        return None
    return sorted({round(at) for at in np.linspace(0, length - 1, KEPT)})


def _existing(groups: Mapping[str, Sequence[int]], length: int) -> dict[str, list[int]]:
    for name, positions in groups.items():
        if not positions or min(positions) < 1 or max(positions) >= length:
            raise ExplorerError(
                f"The group {name} needs tokens of the text, from 1 to {length - 1}.",
                "Choose tokens with a click and Shift-click. Token 0 is the sink.",
            )
    return {name: list(positions) for name, positions in groups.items()}

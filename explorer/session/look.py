"""The step Look: read a text, perhaps let the model go on, and see where attention goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from explorer import adapters, heads, models
from explorer.attention import patched
from explorer.errors import ExplorerError
from explorer.gated import beside
from explorer.generate import stop_tokens, stream
from explorer.heads import Rule
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods import Adapter
from explorer.prefix import Prefix
from explorer.rows import RowMeter, rows
from explorer.session import Held
from explorer.session.look_views import ROWS, HeadsView, LookView, Other, RowsView, Writing
from explorer.shares import LastQuery, mass
from explorer.text import display, encode

LONGEST = 32_768  # tokens a page reads, if the model does
LIMIT = 2048  # positions a page keeps: l·h·q·n shares, 9 MB for 30 layers of 9 heads
KEPT = 1024  # of a longer text so many, evenly spread


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
    front = opened(lm, held, ids.shape[1])
    n_new_here = min(n_new, limit - ids.shape[1])
    meter = LastQuery(lm, ids.shape[1], groups, front.prefix, n_new_here)
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
        writing = Writing(tokens, np.stack(meter.taken), meter.groups, meter.latest)
        stop.note(f"writing token {len(written)} of {n_new_here}", len(written) / n_new_here)
        yield writing
    stop.note("reading where attention goes")
    ids = torch.cat([ids, torch.tensor([written], dtype=ids.dtype, device=ids.device)], dim=1)
    marked = _reached(groups, ids.shape[1])
    rowed = _with_rows(lm, ids.shape[1], front)
    # Made before anything is patched: an adapter may read the model to make its keys.
    under = front.adapter.applied(lm) if front.adapter is not None else nullcontext()
    taker = RowMeter(lm, ids.shape[1], rowed, front.prefix, dtype=torch.float16)
    shares = mass(
        lm,
        ids,
        front.prefix,
        generated=len(written),
        groups=marked,
        adapter=_both(patched(lm, taker), under),
        positions=_spread(ids.shape[1]),
        note=stop.note,
    )
    gates = front.adapter.gates() if front.adapter is not None else None
    yield LookView(
        spec,
        shares,
        len(written),
        held.name if held else "",
        time.monotonic() - began,
        rows=taker.taken if rowed else None,
        gates=None if gates is None else gates.float().cpu().numpy(),
        beside=beside(lm, ids, front.adapter, shares.positions, rowed) if front.adapter else None,
        written=writing,
        marked=marked,
        n_slots=front.prefix.n_slots if front.prefix is not None else 0,
    )


def pairing(first: Work, second: Work) -> Work:
    """→ a job that yields what `first` does, a LookView A in the end, and then both as Other

    first, second: jobs of `looking`
    """
    return partial(_pairing, first, second)


def _pairing(first: Work, second: Work, stop: Stop) -> Iterator[Writing | LookView | Other]:
    for item in first(stop):
        yield item
    for other in second(stop):
        if isinstance(other, LookView):
            yield Other(other, item)


def reading(view: LookView, position: int, layer: int, held: Held | None = None) -> Work:
    """→ a job that yields RowsView: what the query at a position of the view's text sees

    layer: the only one that is kept of a text too long to keep them all
    held: what was in front of the text
    """
    return partial(_reading, _Text.of(view), position, layer, held)


@dataclass(frozen=True)
class _Text:
    """What a job needs to know of a view: its arrays stay where they are.

    n_prompt: tokens before what the model wrote
    """

    spec: ModelSpec
    key: str
    ids: tuple[int, ...]
    n_prompt: int

    @classmethod
    def of(cls, view: LookView) -> _Text:
        ids = view.mass.ids
        return cls(view.spec, view.key, ids, len(ids) - view.n_generated)


def _reading(
    text: _Text, position: int, layer: int, held: Held | None, stop: Stop
) -> Iterator[RowsView]:
    lm = models.load(text.spec, stop.note)
    stop.note(f"reading the row of position {position}")
    ids = torch.tensor([text.ids], device=lm.device)
    front = opened(lm, held, text.n_prompt)
    slots = front.prefix.n_slots if front.prefix is not None else 0
    geometry = lm.geometry
    whole = geometry.n_layers * geometry.n_heads * (slots + ids.shape[1])
    found = rows(
        lm,
        ids,
        [position],
        front.prefix,
        adapter=front.applied(lm) if front.adapter is not None else None,
        dtype=torch.float16,
        layers=None if whole <= ROWS else [layer],
        note=stop.note,
    )
    seen = ids[:, : position + 1]
    added = beside(lm, seen, front.adapter, [position]) if front.adapter is not None else None
    yield RowsView(text.key, ((found, added),))


def finding(view: LookView, rule: Rule, held: Held | None = None) -> Work:
    """→ a job that yields HeadsView: the heads of the view's text that fit a rule"""
    return partial(_finding, _Text.of(view), rule, held)


def _finding(text: _Text, rule: Rule, held: Held | None, stop: Stop) -> Iterator[HeadsView]:
    lm = models.load(text.spec, stop.note)
    stop.note(f"looking for heads: {rule}")
    ids = torch.tensor([text.ids], device=lm.device)
    front = opened(lm, held, text.n_prompt)
    adapter = front.adapter.applied(lm) if front.adapter is not None else None
    found = heads.find(lm, rule, ids, front.prefix, adapter=adapter)
    yield HeadsView(text.spec, found)


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


@contextmanager
def _both(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


def _with_rows(lm: LoadedModel, length: int, front: _Front) -> range:
    """The last queries of a text, as many as there is room for: of a short text, all."""
    slots = front.prefix.n_slots if front.prefix is not None else 0
    room = ROWS // (lm.geometry.n_layers * lm.geometry.n_heads * (slots + length))
    return range(max(0, length - room), length)


def _spread(length: int) -> list[int] | None:
    """The positions that are kept of a text: all, or of a long one some."""
    if length <= LIMIT:
        return None
    return sorted({round(at) for at in np.linspace(0, length - 1, KEPT)})


def _reached(groups: Mapping[str, Sequence[int]], length: int) -> dict[str, list[int]]:
    """Groups, without the tokens that the model could have written and did not."""
    found = {name: [at for at in some if at < length] for name, some in groups.items()}
    for name, some in found.items():
        if not some:
            raise ExplorerError(
                f"The text ended before the tokens of the group {name}.",
                "Mark tokens of your text, or let the model write further.",
            )
    return found

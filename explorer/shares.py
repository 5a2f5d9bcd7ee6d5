"""Who gets the attention: its share by group of keys, per layer, head and query.

One softmax means one unit of attention to share out. Groups are the prefix, the sink (the first
token, on which trained models park attention), the prompt, and what was generated. Shares come
from the softmax's denominators, or from a second fused attention call with indicators for values;
a (q, k) matrix is never stored, so memory grows with the length of the text only.
Long texts are read in blocks with a cache, so that this holds for the forward pass as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from explorer.attention import (
    AttentionCall,
    Output,
    logits_of,
    patched,
    run_and_total,
    weigh_groups,
)
from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.prefix import Prefix, attend, share
from explorer.text import Token, display, encode

BLOCK = 2048  # longer texts are read in blocks of this many tokens
RESERVED = ("prefix", "sink", "prompt", "generated")

# Told how far a long reading is, in words and in [0, 1]; may raise to end it.
Note = Callable[[str, float], None]


@dataclass(frozen=True)
class Mass:
    """Shares of attention.

    shares: (l, h, q, n) float32, the last axis along `groups`; sums to 1 unless the model has a
            learned sink without value
    groups: names, "prefix" first    ids: (k,) the text    tokens: it as people read it
    positions: (q,) the positions it is seen from: all of the text unless fewer were asked for
    """

    shares: np.ndarray
    groups: tuple[str, ...]
    ids: tuple[int, ...]
    tokens: tuple[Token, ...]
    positions: tuple[int, ...] = ()

    def of(self, group: str, position: int = -1) -> np.ndarray:
        """Share of one group, seen from one of the kept positions. → (l, h)"""
        return self.shares[:, :, position, self.groups.index(group)]

    def to_frame(self):
        """A pandas table: layer, head, position, group, share."""
        import pandas as pd  # only here; it is gradio's dependency, not ours

        names = ("layer", "head", "position", "group")
        n_layers, n_heads, n_positions, _ = self.shares.shape
        seen_from = self.positions or range(n_positions)
        axes = [range(n_layers), range(n_heads), seen_from, self.groups]
        index = pd.MultiIndex.from_product(axes, names=names)
        return pd.Series(self.shares.ravel(), index=index, name="share").reset_index()


def mass(
    lm: LoadedModel,
    prompt: str | Tensor,
    prefix: Prefix | None = None,
    *,
    generated: int = 0,
    groups: Mapping[str, Sequence[int]] | None = None,
    chat: bool = False,
    adapter: AbstractContextManager[None] | None = None,
    positions: Sequence[int] | None = None,
    note: Note | None = None,
) -> Mass:
    """Share of attention on prefix, sink, prompt and generated text, from every position.

    prompt: text, or ids (1, q)    chat: put text into the model's chat template
    generated: how many of the last tokens the model wrote itself
    groups: further names and the positions they stand for, taken out of prompt and generated;
            from 1 on, each in one group only
    adapter: an opened-once context such as `adapter.applied(lm)` under which the text is read
    positions: keep only what is seen from these, ascending; for texts of many thousand tokens
    note: told after every block of a long text
    """
    ids = encode(lm, prompt, chat=chat) if isinstance(prompt, str) else prompt
    if ids.ndim != 2 or len(ids) != 1 or not ids.shape[1]:
        raise ExplorerError("The ids are not those of one text.", "Give them as (1, tokens).")
    length = ids.shape[1]
    if not 0 <= generated <= length:
        raise ExplorerError(
            f"{generated} of {length} tokens cannot have been generated.",
            "Say how many of the last tokens the model wrote itself.",
        )
    names, member = _membership(length, length - generated, groups or {})
    if len(names) > lm.geometry.head_dim:  # indicators take the place of values
        most = lm.geometry.head_dim - len(RESERVED) + 1
        raise ExplorerError(f"{len(groups)} groups are too many.", f"Name at most {most}.")
    one_hot = torch.nn.functional.one_hot(member, len(names)).float()[None].to(lm.device)
    kept = range(length) if positions is None else _kept(positions, length)
    shares = measure(lm, ids, one_hot, prefix, adapter, positions=kept, note=note)
    tokens = tuple(display(lm.tokenizer, ids[0].tolist())) if lm.tokenizer else ()
    return Mass(shares.numpy(), ("prefix", *names), tuple(ids[0].tolist()), tokens, tuple(kept))


def _membership(length: int, prompt_end: int, groups: Mapping[str, Sequence[int]]):
    """→ group names, and (k,) the index of each key's group"""
    names = ["sink", "prompt", "generated", *groups]
    member = torch.ones(length, dtype=torch.long)
    member[prompt_end:] = 2
    for index, positions in enumerate(_checked(groups, length).values(), start=3):
        member[positions] = index
    member[0] = 0
    return tuple(names), member


def _kept(positions: Sequence[int], length: int) -> list[int]:
    """Positions in ascending order; negative ones count from the end."""
    outside = [at for at in positions if not -length <= at < length]
    if outside or not len(positions):
        raise ExplorerError(
            f"Position {outside[0]} is not in the text." if outside else "No position is named.",
            f"Tokens count from 0 to {length - 1}.",
        )
    return sorted({at % length for at in positions})


def _checked(groups: Mapping[str, Sequence[int]], length: int) -> dict[str, list[int]]:
    """The positions of every group, if each lies in the text and belongs to one group only."""
    if taken := set(groups) & set(RESERVED):
        raise ExplorerError(f"A group cannot be called {min(taken)}.", "Choose another name.")
    owner: dict[int, str] = {}
    for name, positions in groups.items():
        if not _whole_numbers(positions):
            raise ExplorerError(
                f"The group {name} is not made of positions.", "Write [2, 3, 4] or range(2, 5)."
            )
        if not len(positions):
            raise ExplorerError(
                f"The group {name} is empty.", "A range runs upwards: range(2, 5) is 2, 3 and 4."
            )
        for position in positions:  # of an endless range only the first one outside is seen
            if not 1 <= position < length:
                raise ExplorerError(
                    f"The group {name} names token {position}, which is not in the text.",
                    f"Tokens count from 0 to {length - 1}; token 0 is the sink, its own group.",
                )
            if owner.setdefault(position, name) != name:
                raise ExplorerError(
                    f"Token {position} is in two groups, {owner[position]} and {name}.",
                    "Every token counts once: take it out of one of them.",
                )
    return {name: list(positions) for name, positions in groups.items()}


def _whole_numbers(positions: object) -> bool:
    if isinstance(positions, range):
        return True
    sized = isinstance(positions, Sequence | np.ndarray) and not isinstance(positions, str)
    return sized and all(
        isinstance(position, int | np.integer) and not isinstance(position, bool)
        for position in positions
    )


@torch.no_grad()
def measure(
    lm: LoadedModel,
    ids: Tensor,
    indicator: Tensor,
    prefix: Prefix | None = None,
    adapter: AbstractContextManager[None] | None = None,
    *,
    mask: Tensor | None = None,
    block: int = BLOCK,
    positions: Sequence[int] | None = None,
    note: Note | None = None,
) -> Tensor:
    """Shares of any groups of keys, the prefix's first.

    ids: (1, k)    indicator: (1, k, n), each key's membership; n ≤ head size
    block: a text that is longer is read in blocks of so many tokens, with a cache
    positions: ascending, the ones to keep; all where it is None
    → (l, h, q, 1 + n), float32, CPU
    """
    geometry, length = lm.geometry, ids.shape[1]
    kept = torch.arange(length) if positions is None else torch.tensor(positions)
    shape = (geometry.n_layers, geometry.n_heads, len(kept), 1 + indicator.shape[-1])
    shares = torch.zeros(shape)
    slots = None
    if prefix is not None:
        prefix.check(lm)
        slots = [one.to(lm.device) for one in prefix.layers]
    parted = bool((indicator.sum(-1) == 1).all())  # each key in one group, as `mass` asks
    first = stop = 0

    def watch(call: AttentionCall) -> Output:
        # Sliding layers have dropped the keys that no query of this block can see.
        among = indicator[:, stop - call.key.shape[2] : stop]
        answer, call = run_and_total(call)
        text = (weigh_groups(call, among[0]) if parted else call.weigh(among))[0]  # (h, q, n)
        inside = slice(*torch.searchsorted(kept, torch.tensor([first, stop])).tolist())
        rows = (kept[inside] - first).to(text.device)
        if slots is not None and len(slots[call.layer]):
            alpha = share(call, slots[call.layer])[0]  # (h, q)
            shares[call.layer, :, inside, 0] = alpha[:, rows].cpu()
            text = (1 - alpha)[..., None] * text
        shares[call.layer, :, inside, 1:] = text[:, rows].cpu()
        return answer

    start = 0 if prefix is None else prefix.span
    cache = lm.new_cache() if length > block else None
    # `watch` lies inside the prefix: it sees the text's own attention, and the prefix joins later.
    joined = prefix.applied(lm) if prefix is not None else nullcontext()
    with patched(lm, watch), joined, adapter or nullcontext():
        while stop < length:
            first, stop = stop, min(stop + block, length)
            seen = None if mask is None else mask[:, :stop]
            lm.logits(ids[:, first:stop], mask=seen, cache=cache, last=1, start=start + first)
            if note is not None:
                note(f"read {stop:,} of {length:,} tokens", stop / length)
    return shares


class LastQuery:
    """A patch that notes, pass after pass, where the last query of every layer looks.

    It costs little beside a decoding step, so that shares can be watched while a model writes.
    taken: one (l, n) for each pass, mean over heads, along `groups`
    latest: (l, h, n) of the newest pass, head by head
    """

    def __init__(
        self,
        lm: LoadedModel,
        length: int,
        groups: Mapping[str, Sequence[int]],
        prefix: Prefix | None = None,
        n_new: int = 0,
    ) -> None:
        """length: of the prompt; everything after it is generated

        n_new: tokens that may be written, if groups name some of them
        """
        names, member = _membership(length + n_new, length, groups)
        self.groups = ("prefix", *names)
        self.taken: list[np.ndarray] = []
        self.latest = np.zeros((lm.geometry.n_layers, lm.geometry.n_heads, len(self.groups)), "f4")
        self._member = member
        self._slots = [s.to(lm.device) for s in prefix.layers] if prefix is not None else None
        self._seen = 0

    def begin(self) -> None:
        """A pass begins."""
        self.taken.append(np.zeros((len(self.latest), len(self.groups)), np.float32))
        self.latest = np.zeros_like(self.latest)

    def __call__(self, call: AttentionCall) -> Output:
        if call.layer == 0:
            self._seen += call.query.shape[2]
            more = self._seen - len(self._member)
            new = torch.full((max(0, more),), self.groups.index("generated") - 1)
            self._member = torch.cat([self._member, new])
        last = call.query.shape[2] - 1
        logits = logits_of(call, slice(last, last + 1))[0, :, 0]  # (h, k)
        member = self._member[self._seen - call.key.shape[2] : self._seen].to(logits.device)
        total = logits.logsumexp(-1, keepdim=True)
        if call.sink is not None:
            total = torch.logaddexp(total, call.sink.float()[:, None])
        text = logits.new_zeros(len(logits), len(self.groups) - 1)
        text = text.index_add(1, member, (logits - total).exp())
        heads = self.latest[call.layer]
        if self._slots is not None and len(self._slots[call.layer]):
            query = call.query[:, :, last:]
            loud = attend(replace(call, query=query), self._slots[call.layer])[1][0, :, 0]
            alpha = torch.sigmoid(loud - total[:, 0])
            heads[:, 0] = alpha.cpu().numpy()
            text = (1 - alpha)[:, None] * text
        heads[:, 1:] = text.cpu().numpy()
        self.taken[-1][call.layer] = heads.mean(0)
        return call.run()

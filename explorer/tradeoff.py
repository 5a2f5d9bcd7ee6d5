"""The trade-off: what is left of a prefix as the text grows, and of the text as the prefix grows.

In one softmax a prefix has the share α = Σ_{j ≤ p} a_j ("PrefixMemory-Tuning", arXiv 2506.13674,
Eq. 3): a longer text leaves it less, a longer prefix leaves the text less. Methods beside the
softmax have no share at all. Two measures, never mixed:

- share: α of what stands in one softmax with the text; NaN for everything else
  (behind: without the first slot, which may have taken the sink's place)
- ratio: ‖b‖ / ‖a·o_X‖, the added part against the rest, for every method of the form a·o_X + b
  (part: the same between 0 and 1, ‖b‖ / (‖b‖ + ‖a·o_X‖), for figures; size: ‖b‖ alone)

and for gates their opening |tanh g|. Causal attention lets one pass over the longest text give
every length: the query at position n − 1 has seen n tokens. Long texts are read in blocks, with a
cache, so memory grows with the length alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from explorer.attention import AttentionCall, Output, patched, run_and_total
from explorer.contenders import (
    SLOTS,
    BehindGate,
    Contender,
    InSoftmax,
    Placed,
    nearest,
    prefixes,
    sentences,
)
from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.methods import asking, mix
from explorer.prefix import Prefix, scores
from explorer.shares import BLOCK

LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
WINDOW = 4  # queries averaged at each length: a single one depends on its word
FIRST = 128  # lengths up to this are measured for everything first, so that there is a picture

Measure = Literal["share", "behind", "ratio", "part", "size"]
ARRAYS = ("share", "ratio", "first", "size")  # of a curve
# One thing, or the same in several numbers of slots
Family = Contender | Prefix | Mapping[int, Contender | Prefix]


@dataclass(frozen=True)
class Curve:
    """One contender, measured on r prompts at n lengths.

    share: (r, n, l, h) α, NaN where the method is not in the softmax
    first: (r, n, l, h) the part of α on the first slot. Where the slots are what a text left in
           the cache, that is the text's first token, on which trained models park attention
    ratio, size: (r, n, l, h) ‖b‖ / ‖a·o_X‖ and ‖b‖, NaN where a layer is left alone
    slots: of a layer, 0 where there are none    gate: mean |tanh g|, NaN without a gate
    kind: the name without the number of slots    brief: measured on short texts only
    Lengths that are not measured yet are NaN.
    """

    name: str
    slots: int
    share: np.ndarray
    ratio: np.ndarray
    first: np.ndarray
    size: np.ndarray
    gate: float = np.nan
    kind: str = ""
    brief: bool = False

    def line(self, measure: Measure = "share") -> np.ndarray:
        """Mean over heads of a share, or median over heads of ratio or size. → (r, n)

        behind: the share without the first slot    part: ratio / (1 + ratio)
        """
        if measure == "part":
            ratio = self.line("ratio")
            return ratio / (1 + ratio)
        values = self.share - self.first if measure == "behind" else getattr(self, measure)
        flat = values.reshape(*values.shape[:2], -1)
        told = np.isfinite(flat).any(-1)
        line = np.full(flat.shape[:2], np.nan)
        over = np.nanmedian if measure in ("ratio", "size") else np.nanmean
        line[told] = over(flat[told], axis=-1)
        return line

    def band(self, measure: Measure = "share") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean, least and largest over the prompts measured so far. → three times (n,)"""
        line = self.line(measure)
        told = np.isfinite(line).any(0)
        out = np.full((3, line.shape[1]), np.nan)
        some = line[:, told]
        if some.size:
            out[:, told] = np.nanmean(some, 0), np.nanmin(some, 0), np.nanmax(some, 0)
        return out[0], out[1], out[2]


@dataclass(frozen=True)
class TradeOff:
    """Curves over the lengths of a text.

    complete: whether everything has been measured    done: how much of it, in [0, 1]
    """

    lengths: tuple[int, ...]
    curves: tuple[Curve, ...]
    complete: bool = True
    done: float = 1.0

    def curve(self, name: str) -> Curve:
        return next(curve for curve in self.curves if curve.name == name)

    def to_frame(self):
        """A pandas table: name, slots, prompt, length, and the measures over heads."""
        import pandas as pd  # only here; it is gradio's dependency, not ours

        measures = get_args(Measure)
        rows = [
            (curve.name, curve.slots, prompt, length, *(lines[prompt, at] for lines in measured))
            for curve in self.curves
            for measured in [[curve.line(measure) for measure in measures]]
            for prompt in range(len(curve.share))
            for at, length in enumerate(self.lengths)
        ]
        return pd.DataFrame(rows, columns=["name", "slots", "prompt", "length", *measures])


def trade_off(
    lm: LoadedModel,
    prompts: int | Sequence[Tensor] = 3,
    contenders: Mapping[str, Family] | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    slots: Sequence[int] = SLOTS,
    main: int | None = None,
) -> TradeOff:
    """Share and ratio of everything that is put in front, against the length of the text.

    prompts: ids (1, k) at least as long as the longest length, or how many of plain sentences
    contenders: what is compared, by name; None takes prefixes of 1 to 32 tokens of an instruction
    slots: sizes of these prefixes
    main: of what comes in several numbers of slots, only the one nearest to this is followed along
          all lengths, the others on short texts
    """
    for found in measured(lm, prompts, contenders, lengths=lengths, slots=slots, main=main):
        last = found
    return last


def measured(
    lm: LoadedModel,
    prompts: int | Sequence[Tensor] = 3,
    contenders: Mapping[str, Family] | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    slots: Sequence[int] = SLOTS,
    main: int | None = None,
) -> Iterator[TradeOff]:
    """The same in steps: what is known so far after every block of text, short lengths first."""
    if contenders is None and not (len(slots) and min(slots) > 0):
        raise ExplorerError("A prefix has at least one slot.", "Write slots=(1, 8).")
    if not (prompts > 0 if isinstance(prompts, int) else len(prompts)):
        raise ExplorerError("There is no text to read.", "Ask for one prompt or more.")
    if any(n < 1 for n in lengths):
        raise ExplorerError("A text has at least one token.", "Ask for lengths from 1 on.")
    entries = _entries(prefixes(lm, slots) if contenders is None else contenders, main)
    if not entries:
        raise ExplorerError("Nothing is there to be compared.", "Name one contender or more.")
    span = max(entry.contender.span for entry in entries)
    lengths = tuple(sorted(n for n in set(lengths) if n + span <= lm.geometry.context))
    if not lengths:
        raise ExplorerError("No length fits into the model's context.", "Ask for shorter ones.")
    texts = (
        [sentences(lm, lengths[-1], seed) for seed in range(prompts)]
        if isinstance(prompts, int)
        else [ids[:, : lengths[-1]] for ids in prompts]
    )
    if any(ids.shape[1] < lengths[-1] for ids in texts):
        raise ExplorerError("A text is shorter than the longest length.", "Give longer texts.")
    empty = np.full((len(texts), len(lengths), lm.geometry.n_layers, lm.geometry.n_heads), np.nan)
    curves = [
        Curve(
            *(entry.name, entry.slots, *(empty.copy() for _ in ARRAYS)),
            *(_opening(entry.contender), entry.kind, entry.brief),
        )
        for entry in entries
    ]
    turns = _turns(entries, lengths, len(texts))
    work, read = sum(_tokens(entries[at], asked) for _, at, asked in turns), 0
    for row, at, asked in turns:
        for inside, meter in _reading(lm, entries[at].contender, texts[row], asked):
            for name in ARRAYS:
                getattr(curves[at], name)[row, inside] = getattr(meter, name)
            yield _copied(lengths, curves, complete=False, done=read / work)
        read += _tokens(entries[at], asked)
    yield _copied(lengths, curves, complete=True, done=1.0)


@dataclass(frozen=True)
class _Entry:
    """One contender, and what it is called."""

    name: str
    kind: str
    slots: int
    contender: Contender
    brief: bool


def _entries(contenders: Mapping[str, Family], main: int | None) -> list[_Entry]:
    entries = []
    for kind, family in contenders.items():
        sizes = family if isinstance(family, Mapping) else {None: family}
        chosen = None if main is None or family is not sizes else nearest(sizes, main)
        for n, one in sizes.items():
            one = InSoftmax(one) if isinstance(one, Prefix) else one
            alone = n is None or n == chosen
            name = kind if alone else f"{kind}, {n} slot{'' if n == 1 else 's'}"
            count = _slots(one) if n is None else n
            entries.append(_Entry(name, kind, count, one, chosen is not None and n != chosen))
    return entries


def _turns(
    entries: Sequence[_Entry], lengths: Sequence[int], n_texts: int
) -> list[tuple[int, int, Sequence[int]]]:
    """Which text is read under which entry up to which lengths: what makes a picture first."""
    short = [n for n in lengths if n <= FIRST] or lengths[:1]
    longer = len(short) < len(lengths)
    main, brief = ([at for at, e in enumerate(entries) if e.brief is is_] for is_ in (False, True))
    turns = [(0, at, short) for at in (*main, *brief)]
    for row in range(n_texts):
        turns += [(row, at, lengths) for at in main if row or longer]
        turns += [(row, at, short) for at in brief if row]
    return turns


def _tokens(entry: _Entry, asked: Sequence[int]) -> int:
    return sum(asked) if isinstance(entry.contender, Placed) else asked[-1]


def _copied(
    lengths: tuple[int, ...], curves: Sequence[Curve], *, complete: bool, done: float
) -> TradeOff:
    """What leaves is never written to again."""
    whole = tuple(
        replace(one, **{name: getattr(one, name).copy() for name in ARRAYS}) for one in curves
    )
    return TradeOff(lengths, whole, complete, done)


class _Meter:
    """The patch that applies a contender and notes what it weighs.

    ends: after how many queries of the block a length is reached
    share, ratio, first, size: (n, l, h), one for each end
    """

    def __init__(self, lm: LoadedModel, one: Contender, ends: Sequence[int]) -> None:
        shape = (len(ends), lm.geometry.n_layers, lm.geometry.n_heads)
        self.parts, self.ends = one.parts(lm), ends
        if self.parts is None:
            raise ExplorerError(
                "There is something that adds nothing to attention itself, such as LoRA.",
                "Leave it out: it has neither share nor ratio.",
            )
        self.slots = one.prefix.layers if isinstance(one, InSoftmax) else None
        self.share, self.ratio, self.first, self.size = (np.full(shape, np.nan) for _ in ARRAYS)

    def __call__(self, call: AttentionCall) -> Output:
        (output, weights), call = run_and_total(call)  # (b, q, h, d)
        part = self.parts(call)
        if part is None:
            return output, weights
        rest, added = part  # (b, h, q) or None, (b, h, q, d)
        text = output.transpose(1, 2).float()
        for index, end in enumerate(self.ends):
            rows = slice(max(0, end - WINDOW), end)
            own = text[0, :, rows]
            own = own if rest is None else rest[0, :, rows, None] * own
            louder, quieter = (x.norm(dim=-1).mean(-1) for x in (added[0, :, rows], own))
            self.ratio[index, call.layer] = (louder / quieter.clamp(min=1e-12)).cpu().numpy()
            self.size[index, call.layer] = louder.cpu().numpy()
            if rest is None:
                continue
            alpha = 1 - rest[0, :, rows]
            self.share[index, call.layer] = alpha.mean(-1).cpu().numpy()
            if self.slots is not None:
                logits = scores(call, self.slots[call.layer].to(call.query.device), rows)[0]
                sink = logits.softmax(-1)[..., 0]  # (h, window)
                self.first[index, call.layer] = (alpha * sink).mean(-1).cpu().numpy()
        return mix(output, part), weights


def _reading(
    lm: LoadedModel, one: Contender, ids: Tensor, lengths: Sequence[int]
) -> Iterator[tuple[slice, _Meter]]:
    """Read a text under a contender. → (which lengths were reached, what was measured there)"""
    if not isinstance(one, Placed):
        yield from _along(lm, one, ids, lengths, one.span)
        return
    for index, length in enumerate(lengths):
        front = one.at(lm, length)
        if front is None:
            continue
        prefix, start = front
        for inside, meter in _along(lm, prefix, ids, [length], start):
            if inside.stop > inside.start:
                yield slice(index, index + 1), meter


def _along(
    lm: LoadedModel, one: Contender, ids: Tensor, lengths: Sequence[int], start: int
) -> Iterator[tuple[slice, _Meter]]:
    """Read a text in blocks. start: position of its first token"""
    cache, done, told = lm.new_cache(), 0, 0
    while told < len(lengths):
        stop = min(done + BLOCK, lengths[-1])
        inside = slice(told, sum(length <= stop for length in lengths))
        with torch.no_grad():
            meter = _Meter(lm, one, [length - done for length in lengths[inside]])
            with asking(one, lm), patched(lm, meter):
                lm.logits(ids[:, done:stop], cache=cache, start=start + done, last=1)
        done, told = stop, inside.stop
        yield inside, meter


def _slots(one: Contender) -> int:
    if isinstance(one, InSoftmax | BehindGate):
        return one.prefix.n_slots
    if isinstance(one, Placed):
        return one.solved.prefix.n_slots
    return getattr(one.config, "slots", 0)


def _opening(one: Contender) -> float:
    gates = one.gates()
    return float(gates.abs().nanmean()) if gates is not None else np.nan

"""What one query sees: its weight on every key, token by token, in every layer and head.

A row of the attention matrix is as long as the text; the matrix itself is never built. Short texts
may keep all their rows, so that a page can show any of them without asking the model again; of a
long text a row is computed when it is asked for. Long texts are read in blocks with a cache, and
never further than the last query that is asked for, so memory grows with the length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from explorer.attention import AttentionCall, Output, logits_of, patched
from explorer.lm import LoadedModel
from explorer.prefix import Prefix
from explorer.prefix import scores as slot_scores
from explorer.shares import BLOCK, Note
from explorer.text import encode

UNSEEN = -6e4  # additive masks hide a key by a logit of less, in every precision


@dataclass(frozen=True)
class Row:
    """One query of one head. weights, scores: (p + k,) float32, prefix slots before keys"""

    weights: np.ndarray
    scores: np.ndarray
    n_slots: int

    def top(self, n: int = 8) -> list[tuple[int, float]]:
        """The keys with the largest weights: (position, weight); −1 − j is prefix slot j."""
        order = np.argsort(-self.weights, kind="stable")[:n]
        return [
            (int(i) - self.n_slots if i >= self.n_slots else -1 - int(i), float(self.weights[i]))
            for i in order
            if self.weights[i] > 0
        ]

    def index(self, position: int) -> int:
        """Where a key stands in the row. position: as in `top`"""
        return position + self.n_slots if position >= 0 else -1 - position

    def without_sink(self) -> Row:
        """The same with the first token's weight taken out and the rest scaled to what was left.

        Where the sink takes everything nothing is left: all weights are 0.
        """
        weights = self.weights.copy()
        weights[self.n_slots] = 0
        left = float(weights.sum())
        weights = weights / left if left > 1e-6 else 0 * weights
        return Row(weights, self.scores, self.n_slots)

    @property
    def entropy(self) -> float:
        """How spread the attention is, in nats: 0 is one key, ln k all keys alike."""
        return float(entropy(self.weights))


@dataclass(frozen=True)
class Rows:
    """Attention from some queries, along prefix slots and then keys.

    weights: (l, h, q, p + k), each row summing to 1 unless the model has a learned sink
    scores: (l, h, q, p + k) what went into the softmax, s·q·k + β; −inf where nothing is seen
    positions: (q,) of the queries    n_slots: p, the most of any layer
    layers: the layers along l; empty where they are all there
    """

    weights: np.ndarray
    scores: np.ndarray
    positions: tuple[int, ...]
    n_slots: int
    layers: tuple[int, ...] = ()

    def row(self, layer: int, head: int, position: int) -> Row | None:
        """The row of one query, or None if it was not kept."""
        if position not in self.positions or (self.layers and layer not in self.layers):
            return None
        at = self.layers.index(layer) if self.layers else layer
        where = at, head, self.positions.index(position)
        found = (one[where].astype(np.float32) for one in (self.weights, self.scores))
        return Row(*found, self.n_slots)

    def top(self, layer: int, head: int, row: int = -1, n: int = 8) -> list[tuple[int, float]]:
        """The keys with the largest weights: (position, weight); −1 − j is prefix slot j."""
        return self.row(layer, head, self.positions[row]).top(n)

    @property
    def entropy(self) -> np.ndarray:
        """How spread the attention is, in nats: 0 is one key, ln k all keys alike. → (l, h, q)"""
        return entropy(self.weights)


def entropy(weights: np.ndarray) -> np.ndarray:
    """−Σ w ln w along the last axis."""
    weights = weights.astype(np.float32)
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return np.maximum(-(weights * logs).sum(-1), 0) + 0.0  # one key alone has 0, not −0


class RowMeter:
    """A patch that notes what some queries of a text see while it is read, in blocks or at once.

    It reads queries, keys and mask only, so it may stand anywhere among other patches. `taken`
    holds the rows once the text has been read up to the last query that is asked for.
    """

    def __init__(
        self,
        lm: LoadedModel,
        length: int,
        positions: Sequence[int],
        prefix: Prefix | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        layers: Sequence[int] | None = None,
    ) -> None:
        """length: k, of the whole text    positions: ascending or not, in [0, k)"""
        self._length, self._positions = length, tuple(positions)
        self._slots, self._n_slots = None, 0
        if prefix is not None:
            prefix.check(lm)
            self._slots = [one.to(lm.device) for one in prefix.layers]
            self._n_slots = prefix.n_slots
        self._layers = tuple(layers or ())
        self._place = {
            layer: at for at, layer in enumerate(self._layers or range(lm.geometry.n_layers))
        }
        keys = self._n_slots + length
        shape = (len(self._place), lm.geometry.n_heads, len(self._positions), keys)
        self._weights = torch.zeros(shape, dtype=dtype)
        self._scores = torch.full(shape, -torch.inf, dtype=dtype)
        self._stop = 0

    @property
    def taken(self) -> Rows:
        arrays = self._weights.numpy(), self._scores.numpy()
        return Rows(*arrays, self._positions, self._n_slots, self._layers)

    def __call__(self, call: AttentionCall) -> Output:
        if call.layer == 0:
            self._stop += call.query.shape[2]
        first = self._stop - call.query.shape[2]
        if call.layer in self._place:
            for row, at in enumerate(self._positions):
                if first <= at < self._stop:
                    self._note(call, row, at - first)
        return call.run()

    def _note(self, call: AttentionCall, row: int, at: int) -> None:
        logits = logits_of(call, slice(at, at + 1))[0, :, 0]  # (h, k), or fewer keys
        # Sliding layers have dropped keys on the left; what is on the right is not seen.
        left = self._stop - call.key.shape[2]
        right = self._length - left - logits.shape[-1]
        logits = nn.functional.pad(logits, (self._n_slots + left, right), value=-torch.inf)
        logits = logits.masked_fill(logits < UNSEEN, -torch.inf)
        if self._slots is not None and len(self._slots[call.layer]):
            own = slot_scores(call, self._slots[call.layer], slice(at, at + 1))[0, :, 0]  # (h, p)
            logits[:, : own.shape[-1]] = own
        total = logits.logsumexp(-1, keepdim=True)
        if call.sink is not None:
            total = torch.logaddexp(total, call.sink.float()[:, None])
        layer, dtype = self._place[call.layer], self._weights.dtype
        self._weights[layer, :, row] = (logits - total).exp().to("cpu", dtype)
        self._scores[layer, :, row] = logits.to("cpu", dtype)


@torch.no_grad()
def rows(
    lm: LoadedModel,
    prompt: str | Tensor,
    positions: Sequence[int] = (-1,),
    prefix: Prefix | None = None,
    *,
    chat: bool = False,
    adapter: AbstractContextManager[None] | None = None,
    dtype: torch.dtype = torch.float32,
    layers: Sequence[int] | None = None,
    block: int = BLOCK,
    note: Note | None = None,
) -> Rows:
    """Weights and scores of the queries at some positions, on every key.

    prompt: text, or ids (1, k)    adapter: an opened-once context under which the text is read
    dtype: what they are kept in; float16 halves the memory and keeps three digits
    layers: the ones to keep, ascending; all where it is None
    block: a text that is longer is read in blocks of so many tokens, with a cache
    note: told after every block of a long text
    """
    ids = encode(lm, prompt, chat=chat) if isinstance(prompt, str) else prompt
    length = ids.shape[1]
    positions = tuple(range(length)[at] for at in positions)
    meter = RowMeter(lm, length, positions, prefix, dtype=dtype, layers=layers)
    start, end = 0 if prefix is None else prefix.span, max(positions, default=-1) + 1
    cache = lm.new_cache() if end > block else None
    joined = prefix.applied(lm) if prefix is not None else nullcontext()
    stop = 0
    with patched(lm, meter), joined, adapter or nullcontext():
        while stop < end:
            first, stop = stop, min(stop + block, end)
            lm.logits(ids[:, first:stop], cache=cache, last=1, start=start + first)
            if note is not None:
                note(f"read {stop:,} of {end:,} tokens", stop / end)
    return meter.taken

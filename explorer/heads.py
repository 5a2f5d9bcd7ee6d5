"""Find heads by what they do: look at the prefix, the sink, the token before, or a repetition.

Each rule gives every head a score in [0, 1]: the mean share of attention that it spends where the
rule says. Previous-token: on the key one position back. Induction: on random tokens that are said
twice, on the key *after* the earlier copy of the token being read (Olsson et al. 2022, "In-context
Learning and Induction Heads", arXiv 2209.11895).

One weight of a row needs no row: it is exp(s·q·k − LSE). Memory grows with the length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from explorer.attention import AttentionCall, Output, log_sum_exp, patched
from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.prefix import Prefix, share
from explorer.shares import mass
from explorer.text import encode

Rule = Literal["most prefix", "most sink", "previous token", "induction"]
RULES: tuple[Rule, ...] = get_args(Rule)
PERIOD = 48  # random tokens said twice


@dataclass(frozen=True)
class HeadScores:
    """How well every head fits a rule. scores: (l, h) in [0, 1]"""

    rule: Rule
    scores: np.ndarray

    def top(self, n: int = 5) -> list[tuple[int, int, float]]:
        """The best heads: (layer, head, score)."""
        order = np.argsort(-self.scores, axis=None, kind="stable")[:n]
        places = zip(*np.unravel_index(order, self.scores.shape), strict=True)
        return [(int(layer), int(head), float(self.scores[layer, head])) for layer, head in places]


def find(
    lm: LoadedModel,
    rule: Rule,
    prompt: str | Tensor = "",
    prefix: Prefix | None = None,
    *,
    seed: int = 0,
    adapter: AbstractContextManager[None] | None = None,
) -> HeadScores:
    """Score every head by a rule.

    prompt: text or ids (1, k) that is read; induction reads random tokens of its own (`seed`)
    adapter: an opened-once context under which it is read
    """
    if rule not in RULES:
        raise ExplorerError(f"There is no rule {rule}.", f"Choose from {', '.join(RULES)}.")
    if rule == "induction":
        ids = repeated(lm, seed=seed)
        half = ids.shape[1] // 2
        return HeadScores(rule, on_offset(lm, ids, half - 1, half, prefix, adapter))
    ids = encode(lm, prompt) if isinstance(prompt, str) else prompt
    if rule == "previous token":
        if ids.shape[1] < 2:
            raise ExplorerError("One token has none before it.", "Give a longer text.")
        return HeadScores(rule, on_offset(lm, ids, 1, 1, prefix, adapter))
    if rule == "most prefix" and prefix is None:
        raise ExplorerError("No prefix is in front of the text.", "Choose one in “In front of it”.")
    group = rule.removeprefix("most ")
    shares = mass(lm, ids, prefix, adapter=adapter)
    # The first token sees nothing but the sink: it says nothing about a head.
    seen = shares.shares[:, :, min(1, ids.shape[1] - 1) :, shares.groups.index(group)]
    return HeadScores(rule, seen.mean(-1))


def repeated(lm: LoadedModel, period: int = PERIOD, *, seed: int = 0) -> Tensor:
    """Random tokens, said twice, as the context allows; no control tokens. → (1, 2 · period)"""
    generator = torch.Generator().manual_seed(seed)
    period = min(period, lm.geometry.context // 2)
    special = set(lm.tokenizer.all_special_ids) if lm.tokenizer else set()
    allowed = torch.tensor([i for i in range(lm.geometry.vocab_size) if i not in special])
    chosen = allowed[torch.randperm(len(allowed), generator=generator)[:period]]
    return chosen.repeat(2)[None]


@torch.no_grad()
def on_offset(
    lm: LoadedModel,
    ids: Tensor,
    offset: int,
    first: int,
    prefix: Prefix | None = None,
    adapter: AbstractContextManager[None] | None = None,
) -> np.ndarray:
    """Mean weight on the key `offset` positions back, over queries from `first` on.

    ids: (1, k), offset ≤ first → (l, h)
    """
    geometry = lm.geometry
    found = torch.zeros(geometry.n_layers, geometry.n_heads)
    slots: Sequence | None = None
    if prefix is not None:
        prefix.check(lm)
        slots = [one.to(lm.device) for one in prefix.layers]

    def watch(call: AttentionCall) -> Output:
        weight = _weight_back(call, offset)[0, :, first - offset :]  # (h, queries)
        if slots is not None and len(slots[call.layer]):
            weight = weight * (1 - share(call, slots[call.layer])[0, :, first:])
        found[call.layer] = weight.mean(-1).cpu()
        return call.run()

    joined = prefix.applied(lm) if prefix is not None else nullcontext()
    with patched(lm, watch), joined, adapter or nullcontext():
        lm.logits(ids, last=1, start=0 if prefix is None else prefix.span)
    return found.numpy()


def _weight_back(call: AttentionCall, offset: int) -> Tensor:
    """Weight of query i on key i − offset, for i ≥ offset. → (b, h, q − offset)"""
    batch, heads, n_queries, head_dim = call.query.shape
    n_kv = call.key.shape[1]
    query = call.query[:, :, offset:].float() * call.scaling
    query = query.reshape(batch, n_kv, heads // n_kv, -1, head_dim)
    key = call.key[:, :, None, : n_queries - offset].float()
    logits = (query * key).sum(-1).flatten(1, 2)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.mask is not None:
        seen = call.mask[:, 0].diagonal(-offset, 1, 2)[:, None]  # (b, 1, q − offset)
        seen = seen if seen.dtype == torch.bool else seen > -1
        logits = logits.masked_fill(~seen, -torch.inf)
    return (logits - log_sum_exp(call)[..., offset:]).exp()

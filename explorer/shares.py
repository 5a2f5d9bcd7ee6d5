"""Who gets the attention: its share by group of keys, per layer, head and query.

One softmax means one unit of attention to share out. Groups are the prefix, the sink (the first
token, on which trained models park attention), the prompt, and what was generated. Shares come
from a second fused attention call with indicators for values, the prefix's share from
log-sum-exps; a (q, k) matrix is never stored, so memory grows with the length of the text only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from explorer.attention import AttentionCall, Output, patched
from explorer.lm import LoadedModel
from explorer.prefix import Prefix, share
from explorer.text import Token, display, encode


@dataclass(frozen=True)
class Mass:
    """Shares of attention.

    shares: (l, h, q, n) float32, the last axis along `groups`; sums to 1 unless the model has a
            learned sink without value
    groups: names, "prefix" first    ids: (q,) the text    tokens: it as people read it
    """

    shares: np.ndarray
    groups: tuple[str, ...]
    ids: tuple[int, ...]
    tokens: tuple[Token, ...]

    def of(self, group: str, position: int = -1) -> np.ndarray:
        """Share of one group, seen from one position. → (l, h)"""
        return self.shares[:, :, position, self.groups.index(group)]

    def to_frame(self):
        """A pandas table: layer, head, position, group, share."""
        import pandas as pd  # only here; it is gradio's dependency, not ours

        names = ("layer", "head", "position", "group")
        index = pd.MultiIndex.from_product(
            [*(range(n) for n in self.shares.shape[:3]), self.groups], names=names
        )
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
) -> Mass:
    """Share of attention on prefix, sink, prompt and generated text, from every position.

    prompt: text, or ids (1, q)    chat: put text into the model's chat template
    generated: how many of the last tokens the model wrote itself
    groups: further names and the positions they stand for, taken out of prompt and generated
    adapter: an opened-once context such as `adapter.applied(lm)` under which the text is read
    """
    ids = encode(lm, prompt, chat=chat) if isinstance(prompt, str) else prompt
    length = ids.shape[1]
    names, member = _membership(length, length - generated, groups or {})
    one_hot = torch.nn.functional.one_hot(member, len(names)).float()[None].to(lm.device)
    shares = measure(lm, ids, one_hot, prefix, adapter)
    tokens = tuple(display(lm.tokenizer, ids[0].tolist())) if lm.tokenizer else ()
    return Mass(shares.numpy(), ("prefix", *names), tuple(ids[0].tolist()), tokens)


def _membership(length: int, prompt_end: int, groups: Mapping[str, Sequence[int]]):
    """→ group names, and (k,) the index of each key's group"""
    names = ["sink", "prompt", "generated", *groups]
    member = torch.ones(length, dtype=torch.long)
    member[prompt_end:] = 2
    for index, positions in enumerate(groups.values(), start=3):
        member[list(positions)] = index
    member[0] = 0
    return tuple(names), member


@torch.no_grad()
def measure(
    lm: LoadedModel,
    ids: Tensor,
    indicator: Tensor,
    prefix: Prefix | None = None,
    adapter: AbstractContextManager[None] | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Shares of any groups of keys, the prefix's first.

    ids: (1, q)    indicator: (1, q, n), each key's membership; n ≤ head size
    → (l, h, q, 1 + n), float32, CPU
    """
    geometry = lm.geometry
    shape = (geometry.n_layers, geometry.n_heads, ids.shape[1], 1 + indicator.shape[-1])
    shares = torch.zeros(shape)
    slots = None
    if prefix is not None:
        prefix.check(lm)
        slots = [one.to(lm.device) for one in prefix.layers]

    def watch(call: AttentionCall) -> Output:
        text = call.weigh(indicator)[0]  # (h, q, n)
        if slots is not None and len(slots[call.layer]):
            alpha = share(call, slots[call.layer])[0]  # (h, q)
            shares[call.layer, ..., 0] = alpha.cpu()
            text = (1 - alpha)[..., None] * text
        shares[call.layer, ..., 1:] = text.cpu()
        return call.run()

    # `watch` lies inside the prefix: it sees the text's own attention, and the prefix joins later.
    joined = prefix.applied(lm) if prefix is not None else nullcontext()
    with patched(lm, watch), joined, adapter or nullcontext():
        lm.logits(ids, mask=mask, last=1, start=0 if prefix is None else prefix.span)
    return shares

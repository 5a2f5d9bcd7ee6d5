"""Decoding, one token at a time, under whatever is applied to the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from explorer.errors import ExplorerError
from explorer.lm import LoadedModel

_COLD = 1e-6  # below it logits over temperature leave float32, and the largest takes all anyway

Applied = Callable[[], AbstractContextManager[None]]  # opens what is applied, for one step


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy: the largest logit, no chance.

    top_p: the likeliest tokens that together have this share are drawn from; at 0 the first alone
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ExplorerError(
                f"A temperature of {self.temperature} means nothing.", "Choose 0 or more."
            )
        if not 0 <= self.top_p <= 1:
            raise ExplorerError(f"A top-p of {self.top_p} is no share.", "Choose from 0 to 1.")
        if not -(2**63) <= self.seed < 2**63:
            raise ExplorerError("The seed is too large a number.", "Choose a shorter one.")


@dataclass(frozen=True)
class Step:
    """One decoded token.

    id: the token    gap: logit of the largest minus the second largest, before temperature
    probability: of the token under softmax of the unscaled logits
    """

    id: int
    gap: float
    probability: float


def stream(
    lm: LoadedModel,
    ids: Tensor,
    n_new: int,
    *,
    applied: Applied = nullcontext,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    start: int = 0,
) -> Iterator[Step]:
    """Decode up to `n_new` tokens after `ids`, yielding each; the model is itself at every yield.

    ids: (1, q)
    applied: opens the prefix or adapter under which the model runs, e.g. `lambda: p.applied(lm)`
    stop_ids: decoding ends after one of these    start: position of the first of `ids`

    The end of the model's context ends decoding as well.
    """
    sampling = sampling or Sampling()
    generator = torch.Generator().manual_seed(sampling.seed)
    cache, position = lm.new_cache(), start
    for _ in range(n_new):
        if position + ids.shape[1] > lm.geometry.context:
            return
        with torch.no_grad(), applied():
            logits = lm.logits(ids, cache=cache, start=position, last=1)[0, -1].cpu()
        position += ids.shape[1]
        step = choose(logits, sampling, generator)
        ids = torch.tensor([[step.id]])
        yield step
        if step.id in stop_ids:
            return


@torch.no_grad()
def greedy(
    lm: LoadedModel, ids: Tensor, n_new: int, *, applied: Applied = nullcontext, start: int = 0
) -> Tensor:
    """The `n_new` likeliest tokens one after the other, for several prompts of equal length.

    ids: (b, q) → (b, n_new), CPU
    """
    cache, position, new = lm.new_cache(), start, []
    with applied():
        for _ in range(n_new):
            logits = lm.logits(ids, cache=cache, start=position, last=1)[:, -1]
            position += ids.shape[1]
            ids = logits.argmax(-1, keepdim=True)
            new.append(ids.cpu())
    return torch.cat(new, dim=1)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Step:
    """The next token out of its logits. logits: (v), float32, CPU"""
    if not torch.isfinite(logits).any() or torch.isnan(logits).any():
        raise ExplorerError(
            "The model's output is not a number.",
            "Choose bfloat16 or float32; float16 overflows in some models.",
        )
    top = logits.topk(2).values
    token = int(logits.argmax())
    if sampling.temperature > _COLD:
        probabilities = torch.softmax(logits / sampling.temperature, -1)
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        beyond[0] = False
        ordered[beyond] = 0
        token = int(order[torch.multinomial(ordered, 1, generator=generator)])
    probability = torch.softmax(logits, -1)[token]
    return Step(token, float(top[0] - top[1]), float(probability))


_indistinct: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()  # by model


@torch.no_grad()
def indistinct(lm: LoadedModel) -> frozenset[int]:
    """Ids whose logit always equals another's, because their output weights are the same.

    No decoding can prefer one of them to its twins. They are tokens that training never met, such
    as places kept free; quantised weights, which are coarse, have more of them.
    """
    if lm.model not in _indistinct:
        head = lm.model.get_output_embeddings()
        twins: frozenset[int] = frozenset()
        if head.weight.is_floating_point():  # packed weights are read row by row nowhere else
            rows = head.weight[:, :: max(1, head.weight.shape[1] // 8)].float()
            key = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
            for column in rows.unbind(1):  # the same arithmetic for every row, so twins stay equal
                key = key * 1.7 + column.double()
            if getattr(head, "bias", None) is not None:
                key = key * 1.7 + head.bias.double()
            _, kind, count = key.unique(return_inverse=True, return_counts=True)
            suspects = (count[kind] > 1).nonzero()[:, 0]
            _, kind, count = head.weight[suspects].unique(
                dim=0, return_inverse=True, return_counts=True
            )
            twins = frozenset(suspects[count[kind] > 1].tolist())
        _indistinct[lm.model] = twins
    return _indistinct[lm.model]


def stop_tokens(lm: LoadedModel) -> tuple[int, ...]:
    """The ids at which this model ends its answer."""
    eos = lm.model.generation_config.eos_token_id if lm.model.can_generate() else None
    eos = eos if eos is not None else lm.model.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)

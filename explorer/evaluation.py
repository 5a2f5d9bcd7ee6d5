"""How well a model answers held-out rows, with or without an adapter.

Two measures: the likelihood of every class's answer, of which the largest is the prediction, and
free decoding, where only saying exactly the right answer and stopping counts. Prompts are read
once, padded on the left, and the cache is shared by all classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from explorer.attention import keeps_apart
from explorer.data import Row
from explorer.examples import Wording, answer_ids, collate, example
from explorer.lm import LoadedModel
from explorer.methods import Adapter
from explorer.text import decode
from explorer.training import loss_of, reading

# Sequences whose cache is held at once.
_AT_ONCE = 128


@dataclass(frozen=True)
class Evaluation:
    """What came out on held-out rows.

    loss: of the right answers, nats per token
    accuracy: share of rows whose right class is the likeliest; None without classes
    exact: share of rows whose right answer is decoded freely; None where it was not tried
    scores: (rows, classes), log-likelihood of every class's answer, in nats
    predictions: the likeliest class of every row    said: what was decoded
    """

    n_rows: int
    loss: float
    accuracy: float | None = None
    exact: float | None = None
    scores: np.ndarray | None = None
    predictions: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


Progress = Callable[[int, int], None]


def _silent(done: int, of: int) -> None:
    pass


def evaluate(
    lm: LoadedModel,
    rows: Sequence[Row],
    adapter: Adapter | None = None,
    *,
    classes: Sequence[str] = (),
    wording: Wording | None = None,
    generate: bool = False,
    progress: Progress = _silent,
) -> Evaluation:
    """Score rows: by likelihood over `classes`, by free decoding if `generate`, and their loss.

    progress: called with rows done and rows altogether; the model is itself then
    """
    wording = wording or Wording()
    answers = [answer_ids(lm, name, wording) for name in classes]
    size = max(1, min(16, _AT_ONCE // max(1, len(classes))))
    scores, said, lost, n_tokens = [], [], 0.0, 0
    share = not answers and keeps_apart(lm)
    worded = [example(lm, row, wording) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: len(worded[i].prompt))  # little padding
    back = sorted(range(len(rows)), key=order.__getitem__)
    for start in range(0, len(rows), size):
        progress(start, len(rows))
        some = [worded[i] for i in order[start : start + size]]
        prompts = [one.prompt for one in some]
        with torch.no_grad(), adapter.applied(lm) if adapter is not None else nullcontext():
            if answers:
                score = likelihoods(lm, adapter, prompts, answers)  # (rows, classes)
                scores.append(score)
            else:
                batch = collate(some, share=share)
                with reading(lm, None, batch):  # the adapter is applied already
                    lost += float(loss_of(lm, adapter, batch))
            if generate:
                said += _decoded(lm, adapter, prompts, max(len(one.answer) for one in some))
        n_tokens += sum(len(one.answer) for one in some)
    if answers:
        table = torch.cat(scores)[back]
        right = torch.tensor([list(classes).index(row.answer) for row in rows])
        lost = -float(table.gather(1, right[:, None]).sum())
        best = table.argmax(1)
    exact = None
    if generate:
        said = [said[i] for i in back]
        exact = float(np.mean([a.strip() == row.answer for a, row in zip(said, rows, strict=True)]))
    return Evaluation(
        n_rows=len(rows),
        loss=lost / n_tokens,
        accuracy=float((best == right).float().mean()) if answers else None,
        exact=exact,
        scores=table.numpy() if answers else None,
        predictions=tuple(classes[i] for i in best.tolist()) if answers else (),
        said=tuple(said),
    )


def likelihoods(
    lm: LoadedModel,
    adapter: Adapter | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> Tensor:
    """log p(answer | prompt) for every prompt and answer; the adapter must be applied already.

    → (prompts, answers), in nats, float32, CPU
    """
    first, cache, mask, lengths = _read(lm, adapter, prompts)
    longest = max(map(len, answers))
    ids = torch.zeros(len(answers), longest, dtype=torch.long)
    asked = torch.zeros(len(answers), longest, dtype=torch.bool)
    for row, answer in enumerate(answers):
        ids[row, : len(answer)] = torch.tensor(answer)
        asked[row, : len(answer)] = True
    n, c = len(prompts), len(answers)
    chances = first.log_softmax(-1)[:, None].expand(n, c, -1)
    total = chances.gather(2, ids[None, :, :1].expand(n, c, 1))[..., 0]
    if longest == 1:
        return total
    cache.batch_repeat_interleave(c)
    asked_all, fed = asked.repeat(n, 1), ids[:, :-1].repeat(n, 1)
    offset = lengths.repeat_interleave(c)[:, None] + (0 if adapter is None else adapter.span)
    logits = lm.logits(
        fed,
        cache=cache,
        mask=torch.cat([mask.repeat_interleave(c, 0), asked_all[:, :-1].long()], 1),
        positions=offset + torch.arange(longest - 1),
    ).cpu()
    chances = logits.log_softmax(-1).gather(2, ids[:, 1:].repeat(n, 1)[..., None])[..., 0]
    return total + (chances * asked_all[:, 1:]).sum(1).view(n, c)


def _read(
    lm: LoadedModel, adapter: Adapter | None, prompts: Sequence[Sequence[int]]
) -> tuple[Tensor, DynamicCache, Tensor, Tensor]:
    """Read prompts into a cache. → logits after the last token (n, v), cache, mask, lengths"""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    wide = int(lengths.max())
    ids = torch.zeros(len(prompts), wide, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, wide - len(prompt) :] = torch.tensor(prompt)
    mask = (torch.arange(wide) >= wide - lengths[:, None]).long()
    cache = lm.new_cache()
    start = 0 if adapter is None else adapter.span
    logits = lm.logits(ids, mask=mask, cache=cache, start=start, last=1)[:, -1].cpu()
    return logits, cache, mask, lengths


def _decoded(
    lm: LoadedModel, adapter: Adapter | None, prompts: Sequence[Sequence[int]], n_new: int
) -> list[str]:
    """Greedy answers, up to the end of text or `n_new` tokens; one that goes on is marked with …"""
    logits, cache, mask, lengths = _read(lm, adapter, prompts)
    lengths = lengths + (0 if adapter is None else adapter.span)
    end = lm.tokenizer.eos_token_id
    said = []
    for step in range(n_new):
        said.append(logits.argmax(-1))
        if step + 1 == n_new or (end is not None and (torch.stack(said) == end).any(0).all()):
            break
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        logits = lm.logits(
            said[-1][:, None], cache=cache, mask=mask, positions=lengths[:, None] + step
        )[:, -1].cpu()
    answers = []
    for ids in torch.stack(said, 1).tolist():
        over = end in ids
        text = decode(lm.tokenizer, ids[: ids.index(end)] if over else ids)
        answers.append(text if over or end is None else f"{text}…")
    return answers

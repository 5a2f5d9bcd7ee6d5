"""From labelled rows to token ids: how a row is worded, and what of it the model shall learn.

Prompt and answer are encoded on their own and joined, never cut out of one string, so that the
answer cannot be swallowed by a token that spans both. What is padding is known from lengths alone:
the end-of-text token stays in the answer even where the tokenizer pads with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from explorer.data import Row
from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.text import decode, encode, plain

# Tokens of a shared row at most: some models see in chunks of a row, or choose among its keys.
WIDEST = 1024


@dataclass(frozen=True)
class Wording:
    """How a row is put to the model.

    template: with {text} where the row's text goes    chat: as a user's turn in the chat template
    limit: most tokens of a prompt; of a longer one the text is cut
    """

    template: str = "{text}\nLabel:"
    chat: bool = False
    limit: int = 256

    def __post_init__(self):
        if "{text}" not in self.template:
            raise ExplorerError("The template has no {text} in it.", "Put {text} where it goes.")


@dataclass(frozen=True)
class Example:
    """prompt: ids that are read    answer: ids that shall follow, end of text included"""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples packed into rows, one behind another, with padding on the right.

    Padding lies behind everything it could disturb, so it needs no mask.

    ids: (b, q)
    positions: (b, q), of each token in its own example
    asked: (n,), the tokens that something shall follow, ascending, counted through all rows
    targets: (n,), what shall follow them
    """

    ids: Tensor
    positions: Tensor
    asked: Tensor
    targets: Tensor

    @property
    def n_tokens(self) -> int:
        return len(self.targets)

    @property
    def shared(self) -> bool:
        """Whether some row holds more than one example."""
        return bool((self.positions[:, 1:] == 0).any())


def answer_ids(lm: LoadedModel, answer: str, wording: Wording) -> tuple[int, ...]:
    """The ids that say an answer, with the end of text behind them where the model knows one."""
    said = plain(lm.tokenizer, answer if wording.chat else f" {answer}")
    end = lm.tokenizer.eos_token_id
    return tuple(said) if end is None else (*said, end)


def example(lm: LoadedModel, row: Row, wording: Wording) -> Example:
    """One row as ids. A plain text is all answer, behind a begin-of-text token if there is one.

    Raises ExplorerError for an answer that no context holds.
    """
    answer = answer_ids(lm, row.answer, wording) if row.answer else ()
    if not row.text:
        start = lm.tokenizer.bos_token_id
        room = min(wording.limit, lm.geometry.context - 1)
        if start is None:
            return Example(answer[:1], answer[1:room])
        return Example((start,), answer[:room])
    limit = min(wording.limit, lm.geometry.context - len(answer))
    if limit < 1:
        raise ExplorerError(
            f"The answer “{row.answer[:40]}…” has {len(answer):,} tokens; this model reads "
            f"{lm.geometry.context:,}.",
            "Shorten it, or leave the row out.",
        )
    worded = wording.template.replace("{text}", row.text)
    prompt = encode(lm, worded, chat=wording.chat, limit=1 << 30)[0].tolist()
    if len(prompt) > limit:
        text = plain(lm.tokenizer, row.text)
        kept = len(text) - (len(prompt) - limit)
        if kept < 1:
            raise ExplorerError(
                f"The template alone takes more than {limit} tokens.", "Shorten the template."
            )
        short = decode(lm.tokenizer, text[:kept])
        worded = wording.template.replace("{text}", short)
        prompt = encode(lm, worded, chat=wording.chat, limit=1 << 30)[0].tolist()
    return Example(tuple(prompt), answer)


def examples(lm: LoadedModel, rows: Sequence[Row], wording: Wording) -> tuple[Example, ...]:
    """All rows as ids."""
    if lm.tokenizer is None:
        raise ValueError("rows need a tokenizer")
    if mute := [row for row in rows if not row.answer.strip()]:
        raise ExplorerError(
            f"There is nothing to say to “{mute[0].text[:40]}”.", "Give every row an answer."
        )
    return tuple(example(lm, row, wording) for row in rows)


def collate(some: Sequence[Example], *, share: bool = True) -> Batch:
    """Pack a few examples into one batch. Loss is asked for at the answers only.

    Short texts of different lengths, each padded to the longest, are half padding.

    share: rows; not for models that cannot keep texts apart (`attention.keeps_apart`)
    """
    lengths = [len(one.prompt) + len(one.answer) - 1 for one in some]  # the last id is only said
    rows, width = packing(lengths) if share else ([[i] for i in range(len(some))], max(lengths))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions, targets = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, members in enumerate(rows):
        start = 0
        for one, length in ((some[i], lengths[i]) for i in members):
            both, stop = torch.tensor(one.prompt + one.answer), start + length
            ids[row, start:stop] = both[:-1]
            # Padding counts on, but never beyond the longest text: tables of positions end there.
            positions[row, start:] = torch.arange(width - start).clamp(max=max(lengths) - 1)
            targets[row, start + len(one.prompt) - 1 : stop] = both[len(one.prompt) :]
            start = stop
    asked = (targets.flatten() != -100).nonzero()[:, 0]
    return Batch(ids, positions, asked, targets.flatten()[asked])


def packing(lengths: Sequence[int]) -> tuple[list[list[int]], int]:
    """Which texts share a row, and how wide rows are, so that reading them costs little.

    First fit, the longest first, for widths from the longest text to twice that. Texts that nearly
    fill their rows stay alone, in their order: a wider row costs attention more, and a mask takes
    its fastest kernels away.

    → per row the indices of its texts, ascending, by the first; width
    """
    longest = max(lengths)
    best = [[i] for i in range(len(lengths))], longest
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    least = 0.95 * _cost(*best)
    for limit in range(longest, min(2 * longest, WIDEST) + 1, max(1, longest // 16)):
        rows: list[list[int]] = []
        room: list[int] = []
        for i in order:
            row = next((r for r, left in enumerate(room) if left >= lengths[i]), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(limit)
            rows[row].append(i)
            room[row] -= lengths[i]
        width = limit - min(room)
        if _cost(rows, width) < least:
            best, least = (sorted(map(sorted, rows)), width), _cost(rows, width)
    return best


def _cost(rows: Sequence[Sequence[int]], width: int) -> float:
    """Of reading, in tokens: to a small model attention over 1,000 keys is the rest once more."""
    return len(rows) * width * (1 + width / 1000)


def shuffled(
    some: Sequence[Example], size: int, seed: int, *, share: bool = True
) -> Iterator[Batch]:
    """Batches without end: every example once, in a new order, then again."""
    return (collate(group, share=share) for group in drawn(some, size, seed))


def drawn(some: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """What `shuffled` packs."""
    generator = torch.Generator().manual_seed(seed)
    size = min(size, len(some))
    while True:
        order = torch.randperm(len(some), generator=generator).tolist()
        for start in range(0, len(order), size):
            yield [some[i] for i in order[start : start + size]]


def worded(lm: LoadedModel, row: Row, wording: Wording) -> tuple[str, str]:
    """What the model reads and what it shall say, as text with every control token in sight."""
    one = example(lm, row, wording)
    return decode(lm.tokenizer, one.prompt), decode(lm.tokenizer, one.answer)

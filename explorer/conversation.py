"""A conversation of several turns with the model, alone or under an adapter.

    for answer in chat(lm, "Who are you?", adapter=adapter):
        show(answer.text)                                     # grows, token by token
    for answer in chat(lm, "Since when?", answer.turns, adapter=adapter):
        ...                                                   # its own words are its past

Every turn is put in the same wording: as a user's turn in the chat template, or raw in a template
such as "{text}\\nLabel:", which is how a classification fine-tune was taught and the only way in
which it makes sense. Raw turns follow one another with an empty line between.

Control tokens come from the chat template alone. One that is written out, by a visitor or by the
model, stays text; one that the model decodes ends its turn and is not part of it. What the model
said is kept as the tokens it said, so that no encoding stands between it and its past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch

from explorer.errors import ExplorerError
from explorer.examples import Wording
from explorer.generate import Sampling, Step, stop_tokens, stream
from explorer.lm import LoadedModel
from explorer.methods import Adapter
from explorer.prefix import Prefix
from explorer.text import Turn, beginning, chat_ids, control_tokens, decode, ids_of, plain

BETWEEN = "\n\n"  # raw turns

Ending = Literal["", "said", "cut", "full"]


@dataclass(frozen=True)
class Answer:
    """What the model has said so far.

    turns: the conversation with the message and this answer, to go on from
    n_read: tokens read before the first of the answer    n_dropped: oldest turns left unread
    ended: "" while it goes on; "said" by a control token, "cut" at the most tokens asked for,
    "full" when the context was
    """

    turns: tuple[Turn, ...]
    n_read: int
    n_dropped: int
    ended: Ending = ""

    @property
    def text(self) -> str:
        return self.turns[-1].text


def chat(
    lm: LoadedModel,
    message: str,
    turns: Sequence[Turn] = (),
    *,
    adapter: Adapter | Prefix | None = None,
    wording: Wording | None = None,
    n_new: int = 128,
    sampling: Sampling | None = None,
    limit: int | None = None,
) -> Iterator[Answer]:
    """Answer a message. → an Answer after every token; the model is itself in between

    turns: what was said before. Turns that were not answered by this model will do as well:
    Turn("user", "…"), Turn("assistant", "…"); a system turn may come first
    adapter: what is applied; None for the model alone
    wording: how every message is put; None takes the chat template where the model has one, and
    else the text as it is. Its `limit` is for rows and does not count here
    n_new: most tokens of the answer    sampling: greedy without
    limit: most tokens read and said together; the model's context where it is None

    When a conversation grows too long its oldest turns are left unread, a message and its answer
    at a time; a system turn stays. Raises ExplorerError for a message that is empty or too long.
    """
    if not message.strip():
        raise ExplorerError("The message is empty.", "Write a few words.")
    if n_new < 1:
        raise ExplorerError("The answer is to have no token.", "Allow it at least one.")
    asked = (*turns, Turn("user", message))
    span = 0 if adapter is None else adapter.span
    room = min(limit or lm.geometry.context, lm.geometry.context) - span
    ids, n_dropped = fitted(lm, asked, wording, room - n_new)
    n_new = min(n_new, room - len(ids))
    if n_new < 1:
        raise ExplorerError(
            f"The message has {len(ids):,} tokens; {max(0, room - 1):,} are the most here.",
            "Shorten it, or choose a model with a longer context.",
        )
    steps = stream(
        lm,
        torch.tensor([ids]),
        n_new,
        applied=nullcontext if adapter is None else lambda: adapter.applied(lm),
        sampling=sampling,
        stop_ids=tuple(control_tokens(lm.tokenizer) | set(stop_tokens(lm))),
        start=span,
    )
    begun = Answer((*asked, Turn("assistant", "")), len(ids), n_dropped)
    return _answers(lm, begun, steps, "full" if n_new == room - len(ids) else "cut")


def _answers(
    lm: LoadedModel, begun: Answer, steps: Iterator[Step], at_length: Ending
) -> Iterator[Answer]:
    """The answer token by token, and once more when it is known how it ended."""
    ends = control_tokens(lm.tokenizer) | set(stop_tokens(lm))
    said: list[int] = []

    def answer(ended: Ending) -> Answer:
        text = decode(lm.tokenizer, said)
        if not ended:  # a character of several tokens is not there yet
            text = text.rstrip("\ufffd")
        turns = (*begun.turns[:-1], Turn("assistant", text, tuple(said)))
        return replace(begun, turns=turns, ended=ended)

    for step in steps:
        if step.id in ends:
            yield answer("said")
            return
        said.append(step.id)
        yield answer("")
    yield answer(at_length)


def fitted(
    lm: LoadedModel, turns: Sequence[Turn], wording: Wording | None, room: int
) -> tuple[list[int], int]:
    """The ids of a conversation without its oldest turns, so that they fit into `room` tokens.

    The last message is always there, whatever its length. → ids, how many turns are left out
    """
    opening = [turn for turn in turns[:1] if turn.role == "system"]
    starts = {i for i, turn in enumerate(turns) if turn.role == "user"}
    for first in sorted({len(opening), *starts}):
        ids = worded(lm, [*opening, *turns[first:]], wording)
        if len(ids) <= room:
            break
    return ids, first - len(opening)


def worded(lm: LoadedModel, turns: Sequence[Turn], wording: Wording | None = None) -> list[int]:
    """A conversation as the model reads it, up to where its answer begins."""
    tokenizer = lm.tokenizer
    if wording is None:
        wording = Wording("{text}", chat=bool(tokenizer.chat_template))
    put = [
        Turn("user", wording.template.replace("{text}", turn.text)) if turn.role == "user" else turn
        for turn in turns
    ]
    if wording.chat:
        return chat_ids(tokenizer, put)
    ids = beginning(tokenizer)
    for index, turn in enumerate(put):
        if index and turn.role != "assistant":
            ids += plain(tokenizer, BETWEEN)
        ids += ids_of(tokenizer, turn)
    return ids

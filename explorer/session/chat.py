"""A chat with the model alone and with adapters, side by side: each goes on from its own past."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from explorer import adapters, models
from explorer.conversation import Answer, chat
from explorer.errors import ExplorerError
from explorer.examples import Wording
from explorer.generate import Sampling
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods import Adapter
from explorer.text import Turn

MOST = 5  # adapters beside the model alone
ALONE = "model alone"  # how the column without an adapter is called
LONGEST = 4096  # tokens that a column reads and says, if the model does

# As each adapter was trained, in the chat template, or the text as it is.
Manner = Literal["trained", "chat", "plain"]


@dataclass(frozen=True)
class Column:
    """One of those who answer.

    path: of the adapter's file, "" for the model alone    wording: how its messages are put
    notes: what is not as it was when the adapter was trained
    turns: what was said in this column    answer: how the newest came about; None before it begins
    """

    label: str
    path: str
    wording: Wording
    notes: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    answer: Answer | None = None


@dataclass(frozen=True)
class ChatView:
    """A chat as it stands; the first column is the model alone.

    limit: most tokens that a column reads and says    id: tells it from one begun anew
    """

    columns: tuple[Column, ...] = ()
    limit: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


def talking(
    spec: ModelSpec,
    message: str,
    paths: Sequence[str] = (),
    view: ChatView | None = None,
    *,
    manner: Manner = "trained",
    remember: bool = True,
    n_new: int = 64,
    sampling: Sampling | None = None,
) -> Work:
    """→ a job that yields the ChatView after every token, the columns taking turns

    paths: adapters' files    view: the chat so far; a column that is in it goes on, others begin
    manner: with "trained" the model alone is asked in the wording of the first adapter; where there
    is none, in the chat template if it has one
    remember: read what was said before; without it every message is answered as if it were the
    first, as in training on single rows
    """
    view = view or ChatView()
    return partial(_talking, spec, message, tuple(paths), view, manner, remember, n_new, sampling)


def _talking(
    spec: ModelSpec,
    message: str,
    paths: tuple[str, ...],
    view: ChatView,
    manner: Manner,
    remember: bool,
    n_new: int,
    sampling: Sampling | None,
    stop: Stop,
) -> Iterator[ChatView]:
    if len(paths) > MOST:
        raise ExplorerError(
            f"Here are {len(paths)} adapters; {MOST} find room beside the model alone.",
            "Choose some of them.",
        )
    lm = models.load(spec, stop.note)
    stop.note("Opening the adapters")
    opened = [adapters.load(path, lm) for path in paths]
    limit = min(LONGEST, lm.geometry.context)
    columns = _columns(lm, view, paths, [card for _, card in opened], manner)
    answers: dict[int, Iterator[Answer]] = {}
    subjects: list[Adapter | None] = [None, *(adapter for adapter, _ in opened)]
    for index, (column, adapter) in enumerate(zip(columns, subjects, strict=True)):
        answers[index] = chat(
            lm,
            message,
            column.turns if remember else (),
            adapter=adapter,
            wording=column.wording,
            n_new=n_new,
            sampling=sampling,
            limit=limit,
        )
    before = [column.turns for column in columns]
    asked = (Turn("user", message), Turn("assistant", ""))
    columns = [replace(c, turns=(*c.turns, *asked), answer=None) for c in columns]
    view = replace(view, columns=tuple(columns), limit=limit)
    yield view
    while answers:
        for index, coming in list(answers.items()):
            answer = next(coming, None)
            if answer is None:
                del answers[index]
                continue
            turns = (*before[index], *answer.turns[-2:])
            columns[index] = replace(columns[index], turns=turns, answer=answer)
            view = replace(view, columns=tuple(columns))
            yield view
        n_said = max(len(column.turns[-1].ids) for column in columns)
        stop.note(f"token {n_said} of {n_new} at most", n_said / n_new)


def _columns(
    lm: LoadedModel,
    view: ChatView,
    paths: Sequence[str],
    cards: Sequence[adapters.Card],
    manner: Manner,
) -> list[Column]:
    """Who is asked now, with what was said in the same column before."""
    fixed = {"chat": Wording("{text}", chat=True), "plain": Wording("{text}")}
    known = [wording_of(card) for card in cards]
    usual = fixed["chat" if lm.tokenizer.chat_template else "plain"]
    wordings = [known[0] if known else usual, *known]
    if manner in fixed:
        wordings = [fixed[manner]] * len(wordings)
    named = zip(paths, cards, strict=True)
    labels = _apart([ALONE, *(label_of(card, path) for path, card in named)])
    notes = [(), *(adapters.differences(card, lm) for card in cards)]
    past = {column.path: column.turns for column in view.columns}
    rows = zip(labels, ["", *paths], wordings, notes, strict=True)
    return [Column(*row, turns=past.get(row[1], ())) for row in rows]


def label_of(card: adapters.Card, path: str) -> str:
    """How an adapter is called: as its maker called it, else by its file."""
    return str(card.training.get("label") or Path(path).stem)


def wording_of(card: adapters.Card) -> Wording:
    """How the rows were put that an adapter was trained on; the usual way where it does not say."""
    try:
        return Wording(**card.training.get("wording", {}))
    except TypeError as error:
        raise ExplorerError(
            "An adapter's description has a wording that cannot be read.",
            "It was changed, or made by another version of this program.",
        ) from error


def _apart(labels: Sequence[str]) -> list[str]:
    """Number labels that occur more than once."""
    numbered = []
    for index, label in enumerate(labels):
        earlier = labels[:index].count(label)
        numbered.append(f"{label} ({earlier + 1})" if earlier else label)
    return numbered

"""Adapters out of files: what they say of themselves, and how they answer the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from explorer import adapters, models
from explorer.evaluation import evaluate
from explorer.examples import Wording
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods import Adapter
from explorer.session.chat import ALONE, label_of, wording_of
from explorer.session.order import DataChoice, Score


@dataclass(frozen=True)
class Tried:
    """One adapter, or the model without any.

    label: how it is called    card: what its file says, None without an adapter
    notes: what is not as it was when it was trained    score: on rows
    """

    label: str
    card: adapters.Card | None = None
    notes: tuple[str, ...] = ()
    score: Score | None = None


@dataclass(frozen=True)
class TrialView:
    """Several adapters and how they answer the same rows; the first is the model alone."""

    tried: tuple[Tried, ...]


def trying(spec: ModelSpec, paths: Sequence[str], data: DataChoice | None = None) -> Work:
    """→ a job that opens adapters and yields a TrialView whenever more is known of them

    data: rows to answer, in the words an adapter was trained with, and by the model alone in those
    of the first
    """
    return partial(_trying, spec, tuple(paths), data)


def _trying(
    spec: ModelSpec, paths: tuple[str, ...], data: DataChoice | None, stop: Stop
) -> Iterator[TrialView]:
    lm = models.load(spec, stop.note)
    stop.note("Opening the adapters")
    opened = [adapters.load(path, lm) for path in paths]
    known = [
        Tried(label_of(card, path), card, adapters.differences(card, lm))
        for path, (_, card) in zip(paths, opened, strict=True)
    ]
    done = [Tried(ALONE), *known]
    yield TrialView(tuple(done))
    if data is None:
        return
    subjects = [None, *(adapter for adapter, _ in opened)]
    wordings = [wording_of(one.card) for one in (known[0], *known)]
    for index, (adapter, wording) in enumerate(zip(subjects, wordings, strict=True)):
        score = _score(lm, adapter, wording, data, stop, done[index].label)
        done[index] = replace(done[index], score=score)
        yield TrialView(tuple(done))


def _score(
    lm: LoadedModel,
    adapter: Adapter | None,
    wording: Wording,
    data: DataChoice,
    stop: Stop,
    label: str,
) -> Score:
    rows = data.split()

    def progress(done: int, of: int) -> None:
        stop.note(f"Answering held-out rows, {label}: {done} of {of}", done / of)

    found = evaluate(
        lm,
        rows.held_out,
        adapter,
        classes=rows.classes,
        wording=wording,
        generate=bool(rows.classes),
        progress=progress,
    )
    return Score.of(found)

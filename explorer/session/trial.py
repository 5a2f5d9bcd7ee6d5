"""Trying adapters out of files: what they say of themselves, and what they do side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from explorer import adapters, models
from explorer.evaluation import answered, evaluate
from explorer.examples import Wording
from explorer.jobs import Stop, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods import Adapter
from explorer.session.order import DataChoice, Score


@dataclass(frozen=True)
class Tried:
    """One adapter, or the model without any.

    label: how it is called    card: what its file says, None without an adapter
    notes: what is not as it was when it was trained    answer: to the prompt    score: on rows
    """

    label: str
    card: adapters.Card | None = None
    notes: tuple[str, ...] = ()
    answer: str = ""
    score: Score | None = None


@dataclass(frozen=True)
class TrialView:
    """What several adapters do with the same prompt and rows; the first is the model alone."""

    prompt: str
    tried: tuple[Tried, ...]


def trying(
    spec: ModelSpec, paths: Sequence[str], *, prompt: str = "", data: DataChoice | None = None
) -> Work:
    """→ a job that opens adapters and yields a TrialView whenever more is known of them

    data: rows to answer    prompt: a text to answer; both in the words an adapter was trained with,
    and the model alone in those of the first
    """
    return partial(_trying, spec, paths, prompt, data)


def _trying(
    spec: ModelSpec, paths: Sequence[str], prompt: str, data: DataChoice | None, stop: Stop
) -> Iterator[TrialView]:
    lm = models.load(spec, stop.note)
    stop.note("Opening the adapters")
    opened = [adapters.load(path, lm) for path in paths]
    known = [
        Tried(card.training.get("label", Path(path).stem), card, adapters.differences(card, lm))
        for path, (_, card) in zip(paths, opened, strict=True)
    ]
    first = _wording(known[0])
    subjects: list[tuple[Tried, Adapter | None, Wording]] = [
        (Tried("without"), None, first),
        *((one, adapter, _wording(one)) for one, (adapter, _) in zip(known, opened, strict=True)),
    ]
    done = [tried for tried, _, _ in subjects]
    for index, (tried, adapter, wording) in enumerate(subjects):
        stop.note(f"Asking: {tried.label}")
        if prompt.strip():
            said = answered(lm, [prompt], adapter, wording=wording)[0]
            done[index] = replace(tried, answer=said)
    yield TrialView(prompt, tuple(done))
    if data is None:
        return
    for index, (_, adapter, wording) in enumerate(subjects):
        score = _score(lm, adapter, wording, data, stop, done[index].label)
        done[index] = replace(done[index], score=score)
        yield TrialView(prompt, tuple(done))


def _wording(tried: Tried) -> Wording:
    return Wording(**tried.card.training.get("wording", {}))


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

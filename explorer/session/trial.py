"""Trying an adapter out of a file: what it says of itself, and what it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from explorer import adapters, models
from explorer.evaluation import answered, evaluate
from explorer.examples import Wording
from explorer.jobs import Stop, Work
from explorer.lm import ModelSpec
from explorer.session.order import DataChoice, Score


@dataclass(frozen=True)
class TrialView:
    """What an adapter's file does: on held-out rows, and on one prompt without and with it."""

    card: adapters.Card
    notes: tuple[str, ...]
    score: Score | None = None
    answers: tuple[str, str] | None = None


def trying(spec: ModelSpec, path: str, *, prompt: str = "", data: DataChoice | None = None) -> Work:
    """→ a job that opens an adapter's file and shows what it does, as a TrialView

    data: rows to answer, in the words the adapter was trained with    prompt: a text to answer
    """

    def work(stop: Stop) -> Iterator[TrialView]:
        lm = models.load(spec, stop.note)
        stop.note("Opening the adapter")
        adapter, card = adapters.load(path, lm)
        wording = Wording(**card.training.get("wording", {}))
        view = TrialView(card, adapters.differences(card, lm))
        if prompt.strip():
            told = [answered(lm, [prompt], one, wording=wording)[0] for one in (None, adapter)]
            view = replace(view, answers=(told[0], told[1]))
            yield view
        if data is not None:
            rows = data.split()

            def progress(done: int, of: int) -> None:
                stop.note(f"Answering held-out rows: {done} of {of}", done / of)

            found = evaluate(
                lm,
                rows.held_out,
                adapter,
                classes=rows.classes,
                wording=wording,
                generate=bool(rows.classes),
                progress=progress,
            )
            view = replace(view, score=Score.of(found))
        yield view

    return work

"""The step Train: methods side by side on the same rows, watched live, measured before and after.

Every method of a run gets the very same batches, one step each in turn, so that their curves can
be compared at any moment. Stopping keeps what has been learnt so far.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from explorer import adapters, models
from explorer.data import Dataset, Split, read, split
from explorer.errors import ExplorerError
from explorer.evaluation import Evaluation, answered, evaluate
from explorer.examples import Wording, examples, shuffled, worded
from explorer.jobs import Stop, Stopped, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods import Adapter, Method, n_parameters
from explorer.spectra import Spectrum, spectrum
from explorer.training import FitConfig, FitStep, fit, named

SPECTRUM_TEXTS = 12


@dataclass(frozen=True)
class DataChoice:
    """Which rows. source: a bundled set's name, or the path of an uploaded file"""

    source: str
    shots: int = 4
    held_out: int = 48
    seed: int = 0

    def read(self) -> Dataset:
        return read(self.source)

    def split(self) -> Split:
        return split(self.read(), shots=self.shots, held_out=self.held_out, seed=self.seed)


@dataclass(frozen=True)
class Entry:
    """One method of a run. label: how the charts call it"""

    label: str
    method: str
    config: Any
    fitting: FitConfig


@dataclass(frozen=True)
class Order:
    """Everything that decides a run: the same order gives the same numbers."""

    data: DataChoice
    wording: Wording
    entries: tuple[Entry, ...]
    seed: int = 0


@dataclass(frozen=True)
class Curve:
    """One method so far.

    losses, norms, seconds: by step    gates: (l, h) or None    spectrum: the latest
    after: on the held-out rows    file: where the adapter was saved    error: why it ended early
    """

    entry: Entry
    n_parameters: int
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    gates: np.ndarray | None = None
    spectrum: Spectrum | None = None
    after: Evaluation | None = None
    file: str = ""
    error: str = ""


@dataclass(frozen=True)
class TrainView:
    """A run as it stands. before: the model without any adapter; seconds_left: an estimate"""

    run: str
    spec: ModelSpec
    order: Order
    split: Split
    example: tuple[str, str]
    before: Evaluation | None = None
    curves: tuple[Curve, ...] = ()
    seconds_left: float | None = None
    stopped: bool = False


@dataclass(frozen=True)
class TrialView:
    """What an adapter file does: on held-out rows, and on one prompt without and with it."""

    card: adapters.Card
    notes: tuple[str, ...]
    evaluation: Evaluation | None
    answers: tuple[str, str] | None = None


def training(spec: ModelSpec, order: Order, run: str, folder: Path) -> Work:
    """→ a job that trains and yields a TrainView at every step; files go to `folder`"""

    def work(stop: Stop) -> Iterator[TrainView]:
        lm = models.load(spec, stop.note)
        rows = order.data.split()
        stop.note("Reading the rows")
        view = TrainView(run, spec, order, rows, worded(lm, rows.train[0], order.wording))
        yield view
        began = time.monotonic()
        view = replace(view, before=_measured(lm, view, None, stop, "before"))
        measuring = time.monotonic() - began
        runners = [_Runner(lm, entry, view) for entry in order.entries]
        view = replace(view, curves=tuple(runner.curve for runner in runners))
        try:
            yield view
            yield from _race(lm, view, runners, stop, measuring)
            view = _shown(view, runners)
            for runner in runners:
                runner.save(lm, view, folder)
                runner.look(lm)
                runner.curve = replace(
                    runner.curve, after=_measured(lm, view, runner.adapter, stop, runner.name)
                )
                view = _shown(view, runners)
                yield view
        except Stopped:
            for runner in runners:
                if not runner.curve.file and runner.curve.losses:
                    runner.save(lm, view, folder)
            yield replace(_shown(view, runners), stopped=True)

    return work


def _race(
    lm: LoadedModel, view: TrainView, runners: Sequence[_Runner], stop: Stop, measuring: float
) -> Iterator[TrainView]:
    """One step of every method in turn, until all have had theirs."""
    steps = max(runner.curve.entry.fitting.steps for runner in runners)
    began = time.monotonic()
    for step in range(1, steps + 1):
        for runner in runners:
            stop.note(f"Step {step} of {steps}: {runner.name}", (step - 1) / steps)
            runner.step()
            if step in (1, steps) or step % max(10, steps // 6) == 0:
                runner.look(lm)
        if all(runner.curve.error for runner in runners):
            raise ExplorerError(runners[0].curve.error)
        each = (time.monotonic() - began) / step
        left = each * (steps - step) + measuring * len(runners)
        yield _shown(replace(view, seconds_left=left), runners)


def _shown(view: TrainView, runners: Sequence[_Runner]) -> TrainView:
    return replace(view, curves=tuple(runner.curve for runner in runners))


def _measured(
    lm: LoadedModel, view: TrainView, adapter: Adapter | None, stop: Stop, what: str
) -> Evaluation:
    def progress(done: int, of: int) -> None:
        stop.note(f"Answering held-out rows, {what}: {done} of {of}", done / of)

    return evaluate(
        lm,
        view.split.held_out,
        adapter,
        classes=view.split.classes,
        wording=view.order.wording,
        generate=True,
        progress=progress,
    )


class _Runner:
    """One method's fit, and what is known of it."""

    def __init__(self, lm: LoadedModel, entry: Entry, view: TrainView):
        self.name = entry.label
        self.method: Method = named(entry.method)
        self.adapter: Adapter = self.method.build(lm, entry.config, view.order.seed)
        rows = examples(lm, view.split.train, view.order.wording)
        batches = shuffled(rows, entry.fitting.batch_size, view.order.seed)
        self._steps: Iterator[FitStep] = fit(lm, self.adapter, batches, entry.fitting)
        some = view.split.held_out[:SPECTRUM_TEXTS]
        self._texts = [one.prompt for one in examples(lm, some, view.order.wording)]
        self.curve = Curve(entry, n_parameters(self.adapter))

    def step(self) -> None:
        if self.curve.error:
            return
        curve = self.curve
        try:
            step = next(self._steps, None)
        except ExplorerError as error:
            self.curve = replace(curve, error=f"{error} {error.hint}")
            return
        if step is not None:
            self.curve = replace(
                curve,
                losses=(*curve.losses, step.loss),
                norms=(*curve.norms, step.grad_norm),
                seconds=(*curve.seconds, step.seconds),
                gates=step.gates,
            )

    def look(self, lm: LoadedModel) -> None:
        self.curve = replace(self.curve, spectrum=spectrum(lm, self.adapter, self._texts))

    def save(self, lm: LoadedModel, view: TrainView, folder: Path) -> None:
        curve, data = self.curve, view.order.data
        training = {
            "label": self.name,
            "steps": len(curve.losses),
            "seed": view.order.seed,
            "loss_first": curve.losses[0],
            "loss_last": curve.losses[-1],
            "fitting": asdict(curve.entry.fitting),
            "wording": asdict(view.order.wording),
            "data": Path(data.source).name,
            "data_sha256": data.read().sha256,
            "shots": data.shots,
            "held_out": len(view.split.held_out),
            "data_seed": data.seed,
            "classes": list(view.split.classes),
        }
        card = adapters.describe(lm, self.method, self.adapter, training)
        model = view.spec.name.rstrip("/").split("/")[-1].split("\\")[-1]
        name = f"{self.method.name}-{model}-{view.run[:8]}.safetensors"
        path = adapters.save(folder / view.run[:8] / name, self.adapter, card)
        self.curve = replace(curve, file=str(path))


def trying(spec: ModelSpec, path: str, *, prompt: str = "", data: DataChoice | None = None) -> Work:
    """→ a job that opens an adapter's file and shows what it does, as a TrialView

    data: rows to answer, in the words the adapter was trained with    prompt: a text to answer
    """

    def work(stop: Stop) -> Iterator[TrialView]:
        lm = models.load(spec, stop.note)
        stop.note("Opening the adapter")
        adapter, card = adapters.load(path, lm)
        wording = Wording(**card.training.get("wording", {}))
        view = TrialView(card, adapters.differences(card, lm), None)
        if prompt.strip():
            told = [answered(lm, [prompt], one, wording=wording)[0] for one in (None, adapter)]
            view = replace(view, answers=(told[0], told[1]))
        if data is not None:
            rows = data.split()

            def progress(done: int, of: int) -> None:
                stop.note(f"Answering held-out rows: {done} of {of}", done / of)

            view = replace(
                view,
                evaluation=evaluate(
                    lm,
                    rows.held_out,
                    adapter,
                    classes=rows.classes,
                    wording=wording,
                    generate=True,
                    progress=progress,
                ),
            )
        yield view

    return work

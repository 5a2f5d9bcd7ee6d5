"""The step Train: methods side by side on the same rows, watched live, measured before and after.

Every method of a run gets the very same batches, one step each in turn, so that their curves can
be compared at any moment. Stopping keeps what has been learnt; a run that was cut off goes on from
its last checkpoint, bit for bit as if nothing had happened.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from explorer import adapters, models
from explorer.attention import keeps_apart
from explorer.data import Split
from explorer.errors import ExplorerError
from explorer.evaluation import evaluate
from explorer.examples import examples, shuffled, worded
from explorer.jobs import Stop, Stopped, Work
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods import Adapter, Method, n_parameters
from explorer.session.order import Curve, Look, Order, Score, TrainView, Trial
from explorer.session.runs import Runs
from explorer.spectra import moments
from explorer.training import FitStep, fit, named, optimizer_for

TEXTS = 12  # held-out rows that looks read
CHECKPOINT = 20.0  # seconds between two checkpoints, at least


def training(spec: ModelSpec, order: Order, run: str, runs: Runs) -> Work:
    """→ a job that trains and yields a TrainView at every step. `runs.start` came before."""
    return partial(_training, spec, order, run, runs, None)


def resuming(run: str, runs: Runs, steps: int = 0) -> Work:
    """→ a job that goes on with a run that was cut off or stopped, or with more steps

    steps: up to which, where that is more than were asked for
    """
    known = runs.read(run)
    view = replace(known, stopped=False, order=longer(known.order, steps))
    if not view.curves:  # cut off before anything was written of it
        return training(view.spec, view.order, run, runs)
    if view.order.steps > known.order.steps:  # to be measured again
        pairs = zip(view.curves, view.order.entries, strict=True)
        curves = (replace(c, entry=entry, after=None, other=None) for c, entry in pairs)
        view = replace(view, curves=tuple(curves))
    return partial(_training, view.spec, view.order, run, runs, view)


def longer(order: Order, steps: int) -> Order:
    """The same with this many steps, where that is more than were asked for."""
    try:
        entries = tuple(
            replace(entry, fitting=replace(entry.fitting, steps=max(steps, entry.fitting.steps)))
            for entry in order.entries
        )
    except ValueError as error:
        raise ExplorerError(f"{error}.", "Ask for fewer steps.") from error
    return replace(order, entries=entries)


def _first(lm: LoadedModel, spec: ModelSpec, order: Order, run: str) -> TrainView:
    rows = order.data.split()
    example = worded(lm, rows.train[0], order.wording)
    curves = tuple(Curve(entry) for entry in order.entries)
    return TrainView(run, spec, order, rows, example, curves=curves)


def _training(
    spec: ModelSpec, order: Order, run: str, runs: Runs, known: TrainView | None, stop: Stop
) -> Iterator[TrainView]:
    with runs.held(run):
        runs.mark(run, "running")
        course = None
        try:
            lm = models.load(spec, stop.note)
            course = _Course(lm, known or _first(lm, spec, order, run), runs, stop)
            yield from course.whole()
            runs.write(course.view, "done")
        except Stopped:
            if course is None:
                runs.mark(run, "stopped")
            else:
                yield course.stopped()  # the last word of a job that was told to end
        except Exception as error:
            runs.mark(run, "failed", str(error))
            raise


class _Course:
    """A run under way: the view of it, and the fits behind the view."""

    def __init__(self, lm: LoadedModel, view: TrainView, runs: Runs, stop: Stop):
        self.lm, self.view, self.runs, self.stop = lm, view, runs, stop
        self.runners: list[_Runner] = []

    def whole(self) -> Iterator[TrainView]:
        """Every trial from where the view stands."""
        yield self.view
        for trial in range(self.view.trial, self.view.order.trials):
            if trial > self.view.trial:
                self._next(trial)
            yield from self._trial(trial)

    def stopped(self) -> TrainView:
        """Keep what there is."""
        for runner in self.runners:
            if runner.curve.after is None:
                runner.save(self.lm, self.view, self.runs)
        self._keep()
        view = self._show(stopped=True)
        self.runs.write(view, "stopped")
        return view

    def _next(self, trial: int) -> None:
        curves = tuple(
            Curve(
                c.entry,
                file=c.file,
                earlier=(*c.earlier, Trial(c.losses, c.norms, c.held_out, c.after, c.other)),
            )
            for c in self.view.curves
        )
        rows = self.view.order.data.split(trial)
        self.runners = []
        self.view = replace(self.view, trial=trial, split=rows, curves=curves)
        self.runs.drop_checkpoints(self.view.run)
        self.runs.write(self.view, "running")

    def _trial(self, trial: int) -> Iterator[TrainView]:
        began = time.monotonic()
        if len(self.view.before) <= trial:
            before, other = self._measured(None, "before")
            others = self.view.other_before if other is None else (*self.view.other_before, other)
            self.view = replace(self.view, before=(*self.view.before, before), other_before=others)
        measuring = time.monotonic() - began
        built = []  # a stop may come between two of them: `runners` are all there, or none
        for curve in self.view.curves:
            self.stop.note(f"Building {curve.entry.label}")
            built.append(_Runner(self.lm, curve, self.view, self.runs))
        self.runners = built
        yield self._show()
        yield from self._race(measuring)
        for runner in self.runners:
            if runner.curve.after is None:
                runner.save(self.lm, self.view, self.runs)
                after, other = self._measured(runner.adapter, runner.name)
                runner.curve = replace(runner.curve, after=after, other=other)
                yield self._show(seconds_left=None)
        self.runs.write(self._show(), "running")

    def _race(self, measuring: float) -> Iterator[TrainView]:
        """One step of every method in turn, until all have had theirs."""
        order, trial = self.view.order, self.view.trial
        first = min(len(runner.curve.losses) for runner in self.runners)
        began = saved = time.monotonic()
        which = f", trial {trial + 1} of {order.trials}" if order.trials > 1 else ""
        for step in range(first + 1, order.steps + 1):
            for runner in self.runners:
                done = (step - 1) / order.steps
                self.stop.give_way(self.lm.spec)
                self.stop.note(f"Step {step} of {order.steps}{which}: {runner.name}", done)
                if len(runner.curve.losses) < step:
                    runner.step()
                    if step in (1, order.steps) or step % order.every == 0:
                        runner.look(self.lm, self.view)
            if all(runner.curve.error for runner in self.runners):
                raise ExplorerError(self.runners[0].curve.error)
            now = time.monotonic()
            each, measured = (now - began) / (step - first), measuring * len(self.runners)
            later = (order.trials - trial - 1) * (each * order.steps + measured)
            left = each * (order.steps - step) + measured + later
            self._show(seconds_left=left, memory=_memory(self.lm))
            if now - saved > CHECKPOINT or step == order.steps:
                self._keep()
                saved = now
            yield self.view

    def _keep(self) -> None:
        # In this order: steps that no checkpoint knows are cut off when the run is taken up again.
        self.runs.write(self.view, "running")
        for runner in self.runners:
            if runner.curve.losses:
                optimizer = runner.optimizer
                self.runs.save_checkpoint(self.view.run, runner.name, runner.adapter, optimizer)

    def _show(self, **changes: Any) -> TrainView:
        curves = tuple(runner.curve for runner in self.runners) or self.view.curves
        self.view = replace(self.view, curves=curves, **changes)
        return self.view

    def _measured(self, adapter: Adapter | None, what: str) -> tuple[Score, Score | None]:
        """Answer the held-out rows, and those of another kind where there are any."""
        order = self.view.order
        found = self._score(adapter, self.view.split, what)
        if order.other is None:
            return found, None
        rows = order.other.split(self.view.trial)
        return found, self._score(adapter, rows, f"other rows, {what}")

    def _score(self, adapter: Adapter | None, rows: Split, what: str) -> Score:
        def progress(done: int, of: int) -> None:
            self.stop.give_way(self.lm.spec)
            self.stop.note(f"Answering held-out rows, {what}: {done} of {of}", done / of)

        return Score.of(
            evaluate(
                self.lm,
                rows.held_out,
                adapter,
                classes=rows.classes,
                wording=self.view.order.wording,
                generate=bool(rows.classes),
                progress=progress,
            )
        )


def _memory(lm: LoadedModel) -> int:
    if lm.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Runner:
    """One method's fit, and what is known of it."""

    def __init__(self, lm: LoadedModel, curve: Curve, view: TrainView, runs: Runs):
        entry, order = curve.entry, view.order
        self.name = entry.label
        self.method: Method = named(entry.method)
        seed = order.seed + view.trial
        config = entry.config
        if order.size and self.method.sized is not None:
            config = self.method.sized(lm, config, order.size)
        self.adapter: Adapter = self.method.build(lm, config, seed)
        self.optimizer = optimizer_for(self.adapter, entry.fitting)
        done = runs.load_checkpoint(view.run, entry.label, self.adapter, self.optimizer)
        rows = examples(lm, view.split.train, order.wording)
        self._steps: Iterator[FitStep] = fit(
            lm,
            self.adapter,
            shuffled(rows, entry.fitting.batch_size, seed, share=keeps_apart(lm)),
            entry.fitting,
            optimizer=self.optimizer,
            done=done,
        )
        some = view.split.held_out[:TEXTS]
        self._rows = some
        self._texts = [one.prompt for one in examples(lm, some, order.wording)]
        self.curve = replace(
            curve,
            n_parameters=n_parameters(self.adapter),
            losses=curve.losses[:done],
            norms=curve.norms[:done],
            seconds=curve.seconds[:done],
            tokens=curve.tokens[:done],
            looks=tuple(look for look in curve.looks if look.step <= done),
        )

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
                tokens=(*curve.tokens, step.n_tokens),
                gates=step.gates,
            )

    def look(self, lm: LoadedModel, view: TrainView) -> None:
        """Held-out loss, gates and spectra as they are now, once for every step."""
        if self.curve.looks and self.curve.looks[-1].step == len(self.curve.losses):
            return  # it has run away, and stands still
        found = moments(lm, self.adapter, self._texts)
        loss = evaluate(lm, self._rows, self.adapter, wording=view.order.wording).loss
        look = Look(
            step=len(self.curve.losses),
            held_out_loss=loss,
            gates=self.curve.gates,
            ratio=found.ratio,
            centred=found.spectrum(centred=True),
            raw=found.spectrum(centred=False),
        )
        self.curve = replace(self.curve, looks=(*self.curve.looks, look))

    def save(self, lm: LoadedModel, view: TrainView, runs: Runs) -> None:
        """Write the adapter with its card; nothing if it has not learnt anything."""
        curve, data = self.curve, view.order.data
        if not curve.losses:
            return
        training = {
            "label": self.name,
            "steps": len(curve.losses),
            "seed": view.order.seed + view.trial,
            "loss_first": curve.losses[0],
            "loss_last": curve.losses[-1],
            "fitting": asdict(curve.entry.fitting),
            "wording": asdict(view.order.wording),
            "data": Path(data.source).name,
            "data_sha256": data.read().sha256,
            "shots": data.shots,
            "held_out": len(view.split.held_out),
            "data_seed": data.seed + view.trial,
            "classes": list(view.split.classes),
        }
        card = adapters.describe(lm, self.method, self.adapter, training)
        name = f"{_slug(self.name)}-{_slug(card.model)}-{view.run[:8]}.safetensors"
        path = adapters.save(runs.path(view.run) / name, self.adapter, card)
        self.curve = replace(curve, file=str(path))


def _slug(text: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())

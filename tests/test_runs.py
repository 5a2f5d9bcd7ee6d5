"""Runs on disk: what is written comes back, and a killed run goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from explorer import adapters, models
from explorer import training as training_loop
from explorer.errors import ExplorerError
from explorer.examples import Wording
from explorer.jobs import Stop, Stopped, Worker
from explorer.lm import ModelSpec
from explorer.session.look import looking
from explorer.session.order import DataChoice, Entry, Order
from explorer.session.runs import Runs
from explorer.session.train import resuming, training
from explorer.training import FitConfig, named
from tests.test_train_app import ROWS
from tests.tiny import tiny_checkpoint

ROOT = Path(__file__).parents[1]
RUN = "0123456789abcdef"
KILLED = """
import sys, time
from pathlib import Path
from explorer.jobs import Stop
from explorer.session import train
from tests.test_runs import RUN, ordered
from explorer.lm import ModelSpec
from explorer.session.runs import Runs

train.CHECKPOINT = 0.0
folder, model, rows = sys.argv[1:]
runs, order, spec = Runs(Path(folder)), ordered(rows), ModelSpec(model)
order = runs.start(RUN, spec, order)
for view in train.training(spec, order, RUN, runs)(Stop()):
    print(max((len(curve.losses) for curve in view.curves), default=0), flush=True)
    time.sleep(0.02)
"""


def ordered(rows: str, **more) -> Order:
    entries = tuple(
        Entry(label, name, named(name).config(), FitConfig(steps=8, learning_rate=rate))
        for label, name, rate in (
            ("PMT", "prefix-memory", 1e-3),
            ("Gate", "zero-gate", 1e-2),
            ("LoRA", "lora", 3e-3),
        )
    )
    data = DataChoice(rows, shots=3, held_out=6, seed=2)
    return Order(data, Wording("{text} :"), entries, seed=2, every=3, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def rows(folder):
    path = folder / "rows.csv"
    path.write_text(f"text,label\n{ROWS}")
    return str(path)


@pytest.fixture(scope="module")
def spec(folder):
    return ModelSpec(tiny_checkpoint(folder / "model"))


@pytest.fixture(scope="module")
def whole(folder, rows, spec):
    """A run that nobody disturbed."""
    runs = Runs(folder / "whole")
    order = runs.start(RUN, spec, ordered(rows))
    return list(training(spec, order, RUN, runs)(Stop()))[-1], runs


def test_a_run_comes_back_from_disk(whole):
    view, runs = whole
    again = runs.read(RUN)
    assert again.order == view.order and again.spec == view.spec and again.split == view.split
    assert again.before == view.before and again.example == view.example
    for one, other in zip(again.curves, view.curves, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        assert one.after == other.after and one.file == other.file
        assert [look.step for look in one.looks] == [1, 3, 6, 8]
        for mine, theirs in zip(one.looks, other.looks, strict=True):
            np.testing.assert_array_equal(mine.ratio, theirs.ratio)
            np.testing.assert_array_equal(mine.raw.pooled, theirs.raw.pooled)
        last, theirs = one.looks[-1].centred, other.looks[-1].centred
        np.testing.assert_array_equal(last.eigenvalues, theirs.eigenvalues)
    (line,) = runs.list()
    assert (line.id, line.state, line.step, line.steps) == (RUN, "done", 8, 8)
    assert line.title == "PMT, Gate, LoRA on rows-rows"


def test_uploaded_rows_are_kept_with_the_run(whole, rows):
    view, runs = whole
    copy = Path(view.order.data.source)
    assert copy.parent == runs.path(RUN) and copy.read_bytes() == Path(rows).read_bytes()


def test_a_killed_run_is_found_and_goes_on_bit_for_bit(whole, folder, rows, spec):
    runs = Runs(folder / "killed")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(runs.folder), spec.name, rows],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    for text in process.stdout:
        if int(text) >= 4:
            assert runs.list()[0].state == "running"
            with pytest.raises(ExplorerError, match="trained already"):
                next(iter(resuming(RUN, runs)(Stop())))
            process.send_signal(signal.SIGKILL)
            break
    process.wait(timeout=60)
    assert runs.list()[0].state == "interrupted"
    before = runs.read(RUN)
    assert 3 <= len(before.curves[0].losses) < 8
    view = list(resuming(RUN, runs)(Stop()))[-1]
    assert runs.list()[0].state == "done"
    undisturbed, _ = whole
    for one, other in zip(view.curves, undisturbed.curves, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        assert one.after == other.after
        assert [look.held_out_loss for look in one.looks] == [
            look.held_out_loss for look in other.looks
        ]
    lm = models.load(spec)
    for one, other in zip(view.curves, undisturbed.curves, strict=True):
        mine, theirs = (adapters.load(curve.file, lm)[0].state_dict() for curve in (one, other))
        assert all((mine[key] == theirs[key]).all() for key in mine)


def test_a_run_that_was_cut_off_before_its_first_checkpoint_begins_anew(whole, folder, rows, spec):
    runs = Runs(folder / "early")
    runs.start(RUN, spec, ordered(rows))
    assert runs.list()[0].state == "interrupted"
    for done in resuming(RUN, runs)(Stop()):
        view = done
    assert runs.list()[0].state == "done"
    assert [c.losses for c in view.curves] == [c.losses for c in whole[0].curves]


def test_a_stopped_run_keeps_its_adapters_and_goes_on(whole, folder, rows, spec):
    runs = Runs(folder / "stopped")
    order = runs.start(RUN, spec, ordered(rows))
    steps = training(spec, order, RUN, runs)(Stop())
    for view in steps:
        if view.curves[0].losses and len(view.curves[0].losses) == 5:
            break
    last = steps.throw(Stopped())
    assert list(steps) == []
    assert last.stopped and runs.list()[0].state == "stopped"
    for curve in last.curves:
        assert adapters.inspect(curve.file).training["steps"] == len(curve.losses) >= 4
    done = list(resuming(RUN, runs)(Stop()))[-1]
    assert not done.stopped
    for one, other in zip(done.curves, whole[0].curves, strict=True):
        assert one.losses == other.losses and one.after == other.after


def test_a_run_that_is_stopped_while_it_is_being_built_keeps_all_its_methods(
    whole, folder, rows, spec
):
    runs = Runs(folder / "building")
    order = runs.start(RUN, spec, ordered(rows))
    stop = Stop(lambda text, _: text == "Building Gate" and stop.set())
    last = list(training(spec, order, RUN, runs)(stop))[-1]
    assert last.stopped and [curve.entry for curve in last.curves] == list(order.entries)
    done = list(resuming(RUN, runs)(Stop()))[-1]
    assert [c.losses for c in done.curves] == [c.losses for c in whole[0].curves]


def test_a_method_that_runs_away_is_looked_at_once_where_it_stopped(
    folder, rows, spec, monkeypatch
):
    loss_of, asked = training_loop.loss_of, []

    def loss(lm, adapter, batch):
        asked.append(adapter)
        astray = adapter is asked[0] and asked.count(adapter) > 3
        return loss_of(lm, adapter, batch) * (1000.0 if astray else 1.0)

    monkeypatch.setattr(training_loop, "loss_of", loss)
    runs = Runs(folder / "away")
    order = runs.start(RUN, spec, replace(ordered(rows), every=1))
    away, *others = list(training(spec, order, RUN, runs)(Stop()))[-1].curves
    assert "at step 4" in away.error and not any(curve.error for curve in others)
    assert [look.step for look in away.looks] == [1, 2, 3]
    assert all([look.step for look in curve.looks] == list(range(1, 9)) for curve in others)


def test_trials_have_their_own_rows_and_start(folder, rows, spec):
    runs = Runs(folder / "trials")
    order = runs.start(RUN, spec, ordered(rows, trials=2))
    view = list(training(spec, order, RUN, runs)(Stop()))[-1]
    assert view.trial == 1 and len(view.before) == 2
    for curve in view.curves:
        (earlier,) = curve.earlier
        assert len(earlier.losses) == len(curve.losses) == 8
        assert earlier.losses != curve.losses and len(curve.scores()) == 2
    assert runs.read(RUN).curves[0].earlier == view.curves[0].earlier


def test_a_failure_is_written_down_and_leaves_no_adapter(folder, rows, spec):
    runs = Runs(folder / "failed")
    order = runs.start(RUN, spec, ordered(rows))
    steps = training(ModelSpec("/nowhere/at/all"), order, RUN, runs)(Stop())
    with pytest.raises(ExplorerError):
        list(steps)
    assert runs.list()[0].state == "failed"
    assert not list(runs.path(RUN).glob("*.safetensors"))
    raw = json.loads((runs.path(RUN) / "run.json").read_text())
    assert raw["note"]


def test_damage_is_told_in_a_sentence(folder, rows, spec):
    runs = Runs(folder / "damaged")
    runs.start(RUN, spec, ordered(rows))
    (runs.path(RUN) / "run.json").write_text('{"state": "done", "order": {}}')
    with pytest.raises(ExplorerError, match="cannot be read"):
        runs.read(RUN)
    assert runs.list() == []
    runs.start(RUN, spec, ordered(rows))
    (runs.path(RUN) / "arrays.safetensors").write_bytes(b"cut")
    with pytest.raises(ExplorerError, match="cannot be read"):
        runs.read(RUN)
    lm = models.load(spec)
    adapter = named("lora").build(lm, named("lora").config(), 0)
    (runs.path(RUN) / "lora.checkpoint").write_bytes(b"cut")
    with pytest.raises(ExplorerError, match="checkpoint of LoRA is damaged"):
        runs.load_checkpoint(
            RUN, "LoRA", adapter, training_loop.optimizer_for(adapter, FitConfig())
        )
    (runs.path(RUN) / "run.json").write_text('{"state": "done", "order": {}}')
    runs.path(RUN).rename(runs.folder / "not-ours")
    (runs.folder / "not-ours" / "run.json").write_text(
        '{"state": "running", "order": {"entries": [], "data": {"source": "rows"}}}'
    )
    assert runs.list() == []
    with pytest.raises(ExplorerError, match="no such run"):
        runs.path("../whole")


def test_a_run_can_be_forgotten(folder, rows, spec):
    runs = Runs(folder / "forgotten")
    runs.start(RUN, spec, ordered(rows))
    began = time.monotonic()
    runs.forget(RUN)
    assert runs.list() == [] and not runs.path(RUN).exists()
    assert time.monotonic() - began < 5


def test_a_look_of_another_visitor_does_not_wait_for_the_end_of_a_run(folder, rows, spec):
    runs, worker = Runs(folder / "long"), Worker()
    order = ordered(rows)
    fitting = replace(order.entries[0].fitting, steps=2000)
    order = replace(order, entries=(replace(order.entries[0], fitting=fitting),), every=1000)
    order = runs.start(RUN, spec, order)
    run = worker.submit(training(spec, order, RUN, runs), "Training", detached=True, model=spec)
    steps = run.watch()
    while not (view := next(steps)).curves or not view.curves[0].losses:
        pass
    look = worker.submit(looking(spec, "the cat sat"), "Looking", owner="another", model=spec)
    assert look.result().mass.shares.size
    assert run.state == "running" and len(run.item.curves[0].losses) < 2000
    run.stop()
    assert list(steps)[-1].stopped

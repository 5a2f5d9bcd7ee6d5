"""Runs on disk: what was asked, how far it came, and checkpoints to go on from.

A run's folder holds `run.json` (order, state and curves), `arrays.safetensors` (gates and spectra),
a checkpoint of every method while it runs, and the adapters. The thread that trains holds a lock
on the folder; a run that says it is running and is not locked was interrupted, be it by a crash or
by SIGKILL, and can be resumed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

from explorer.data import bundled
from explorer.errors import ExplorerError
from explorer.lm import ModelSpec
from explorer.methods import Adapter
from explorer.session.order import DataChoice, Order, TrainView
from explorer.session.record import view_in, view_out

RunState = Literal["running", "done", "stopped", "failed", "interrupted"]


@dataclass(frozen=True)
class RunLine:
    """A run in a list. step: of the trial that ran last    changed: seconds since the epoch"""

    id: str
    state: RunState
    title: str
    step: int
    steps: int
    changed: float


class Runs:
    """All runs under one folder. A run's id is the right to see it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, run: str) -> Path:
        """The folder of a run."""
        if not re.fullmatch(r"[0-9a-f]{8,32}", run):
            raise ExplorerError("There is no such run.", "Choose one from the list.")
        return self.folder / run

    def start(self, run: str, spec: ModelSpec, order: Order) -> Order:
        """Make the folder. Uploaded rows are copied into it: a page's uploads do not last."""
        path = self.path(run)
        path.mkdir(parents=True, exist_ok=True)
        order = dataclasses.replace(
            order,
            data=_copied(order.data, path, "rows"),
            other=None if order.other is None else _copied(order.other, path, "other"),
        )
        raw = {"state": "running", "spec": asdict(spec), "order": asdict(order)}
        _write(path / "run.json", raw)
        return order

    @contextmanager
    def held(self, run: str) -> Iterator[None]:
        """Hold the run for the length of a block: nobody else may train it."""
        lock = FileLock(self.path(run) / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise ExplorerError("This run is being trained already.", "Watch it.") from error
        try:
            yield
        finally:
            lock.release()

    def write(self, view: TrainView, state: RunState, note: str = "") -> None:
        """Put a view on disk; a file is replaced only by a whole one."""
        path, arrays = self.path(view.run), {}
        raw = view_out(view, arrays)
        if arrays:
            save_arrays(arrays, path / "arrays.part")
            (path / "arrays.part").replace(path / "arrays.safetensors")
        _write(path / "run.json", {"state": state, "note": note, **raw})

    def mark(self, run: str, state: RunState, note: str = "") -> None:
        """Change what is written of a run's state, and nothing else."""
        file = self.path(run) / "run.json"
        _write(file, {**json.loads(file.read_text(encoding="utf-8")), "state": state, "note": note})

    def read(self, run: str) -> TrainView:
        """A run as it was last written. Raises ExplorerError where it is not to be had."""
        path = self.path(run)
        try:
            raw = json.loads((path / "run.json").read_text(encoding="utf-8"))
            arrays = {}
            if (path / "arrays.safetensors").exists():
                arrays = load_arrays(path / "arrays.safetensors")
            return view_in(run, raw, arrays)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ExplorerError(
                "This run cannot be read.", "It was made by another version, or is damaged."
            ) from error

    def list(self, only: Sequence[str] | None = None) -> list[RunLine]:
        """Runs, the newest first. only: those with these ids"""
        names = [path.parent.name for path in self.folder.glob("*/run.json")]
        lines = [self._line(name) for name in names if only is None or name in only]
        return sorted((line for line in lines if line), key=lambda line: -line.changed)

    def _line(self, run: str) -> RunLine | None:
        file = self.folder / run / "run.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            curves, entries = raw.get("curves", ()), raw["order"]["entries"]
            return RunLine(
                id=run,
                state=self.state(run, raw["state"]),
                title=f"{', '.join(entry['label'] for entry in entries)} on "
                f"{Path(raw['order']['data']['source']).stem}",
                step=max((len(curve["losses"]) for curve in curves), default=0),
                steps=max(entry["fitting"]["steps"] for entry in entries),
                changed=file.stat().st_mtime,
            )
        except (OSError, ValueError, KeyError, TypeError, ExplorerError):
            return None  # half-made, or another program's

    def state(self, run: str, written: RunState | None = None) -> RunState:
        """What a run's state really is: one that nobody holds does not run."""
        if written is None:
            file = self.path(run) / "run.json"
            written = json.loads(file.read_text(encoding="utf-8"))["state"]
        if written != "running":
            return written
        lock = FileLock(self.path(run) / "lock", timeout=0)
        try:
            with lock:
                return "interrupted"
        except Timeout:
            return "running"

    # Checkpoints: the adapter and the optimiser, which counts its steps itself.

    def save_checkpoint(
        self, run: str, label: str, adapter: Adapter, optimizer: torch.optim.Optimizer
    ) -> None:
        tensors = {f"adapter/{key}": value for key, value in adapter.state_dict().items()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{key}": value for key, value in state.items()}
        tensors = {key: value.detach().cpu().clone() for key, value in tensors.items()}
        path = self.path(run) / f"{_slug(label)}.checkpoint"
        partial = path.with_suffix(".part")
        save_file(tensors, partial)
        partial.replace(path)

    def load_checkpoint(
        self, run: str, label: str, adapter: Adapter, optimizer: torch.optim.Optimizer
    ) -> int:
        """Put a checkpoint into an adapter and its optimiser. → steps done; 0 without one"""
        path = self.path(run) / f"{_slug(label)}.checkpoint"
        if not path.exists():
            return 0
        try:
            tensors = load_file(path)
            adapter.load_state_dict(_under("adapter/", tensors))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ExplorerError(
                f"The checkpoint of {label} is damaged.", "Begin the run anew; its order is kept."
            ) from error
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in _under("optimizer/", tensors).items():
            index, _, name = key.partition("/")
            state.setdefault(int(index), {})[name] = value
        whole = optimizer.state_dict()
        optimizer.load_state_dict({**whole, "state": state})
        step = next((value["step"] for value in state.values() if "step" in value), None)
        return 0 if step is None else int(step)

    def drop_checkpoints(self, run: str) -> None:
        """Before another trial begins from the start."""
        for path in self.path(run).glob("*.checkpoint"):
            path.unlink()

    def forget(self, run: str) -> None:
        """Delete a run and everything it left."""
        with self.held(run):
            shutil.rmtree(self.path(run), ignore_errors=True)


def _under(start: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key[len(start) :]: value for key, value in tensors.items() if key.startswith(start)}


def _slug(label: str) -> str:
    return re.sub(r"\W+", "-", label.lower()).strip("-")


def _copied(data: DataChoice, folder: Path, name: str) -> DataChoice:
    if data.source in bundled():
        return data
    source = Path(data.source)
    target = folder / f"{name}-{source.name}"
    if source != target:
        shutil.copyfile(source, target)
    return dataclasses.replace(data, source=str(target))


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(value, allow_nan=True), encoding="utf-8")
    partial.replace(path)

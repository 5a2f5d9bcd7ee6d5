"""What a training run is asked to do, and what it has done so far: text, numbers, CPU arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from explorer.data import Dataset, Kind, Split, read, split
from explorer.evaluation import Evaluation
from explorer.examples import Wording
from explorer.lm import ModelSpec
from explorer.spectra import Spectrum
from explorer.training import FitConfig


@dataclass(frozen=True)
class DataChoice:
    """Which rows. source: a bundled set's name, or the path of an uploaded file

    shots: rows of each class to learn from; where there are no classes, rows altogether
    """

    source: str
    shots: int = 4
    held_out: int = 48
    seed: int = 0
    kind: Kind = "classes"

    def read(self) -> Dataset:
        return read(self.source, kind=self.kind)

    def split(self, trial: int = 0) -> Split:
        """The rows of a trial; each draws its own."""
        seed = self.seed + trial
        return split(self.read(), shots=self.shots, held_out=self.held_out, seed=seed)


@dataclass(frozen=True)
class Entry:
    """One method of a run. label: how the charts call it"""

    label: str
    method: str
    config: Any
    fitting: FitConfig


@dataclass(frozen=True)
class Order:
    """Everything that decides a run: the same order gives the same numbers.

    trials: how often it is repeated with other rows and another start
    every: steps between two looks at held-out loss, gates and spectrum
    size: numbers that every method shall train, as nearly as it can; 0 leaves them as they are
    other: rows of another kind, answered after training to see what became of the rest
    """

    data: DataChoice
    wording: Wording
    entries: tuple[Entry, ...]
    seed: int = 0
    trials: int = 1
    every: int = 6
    size: int = 0
    other: DataChoice | None = None

    @property
    def steps(self) -> int:
        return max(entry.fitting.steps for entry in self.entries)


@dataclass(frozen=True)
class Score:
    """How rows were answered; see Evaluation."""

    n_rows: int
    loss: float
    accuracy: float | None = None
    exact: float | None = None

    @classmethod
    def of(cls, found: Evaluation) -> Score:
        return cls(found.n_rows, found.loss, found.accuracy, found.exact)


@dataclass(frozen=True, eq=False)
class Look:
    """What was seen of an adapter after a step.

    held_out_loss: nats per token    gates, ratio: (l, h), None where there are no gates
    centred, raw: spectra of what it adds, with the mean taken off or not
    """

    step: int
    held_out_loss: float
    gates: np.ndarray | None
    ratio: np.ndarray
    centred: Spectrum
    raw: Spectrum


@dataclass(frozen=True)
class Trial:
    """A trial that is over. held_out: (step, loss) of its looks"""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]
    after: Score | None
    other: Score | None = None


@dataclass(frozen=True)
class Curve:
    """One method so far, in the trial that runs.

    losses, norms, seconds, tokens: by step; tokens are those learnt from
    looks: in order of steps    after, other: on the held-out rows, and on rows of another kind
    file: where the adapter was saved    error: why it ended early    earlier: trials before this
    """

    entry: Entry
    n_parameters: int = 0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    gates: np.ndarray | None = None
    looks: tuple[Look, ...] = ()
    after: Score | None = None
    other: Score | None = None
    file: str = ""
    error: str = ""
    earlier: tuple[Trial, ...] = ()

    @property
    def held_out(self) -> tuple[tuple[int, float], ...]:
        """(step, held-out loss) of every look"""
        return tuple((look.step, look.held_out_loss) for look in self.looks)

    def scores(self) -> tuple[Score, ...]:
        """After training, of every trial that got so far."""
        found = (*(trial.after for trial in self.earlier), self.after)
        return tuple(score for score in found if score is not None)


@dataclass(frozen=True)
class TrainView:
    """A run as it stands.

    example: a row as the model reads it, and what it shall say    trial: which one runs, from 0
    before, other_before: the model without any adapter, by trial    seconds_left: an estimate
    memory: most bytes this process or its GPU has held
    """

    run: str
    spec: ModelSpec
    order: Order
    split: Split
    example: tuple[str, str]
    trial: int = 0
    before: tuple[Score, ...] = ()
    other_before: tuple[Score, ...] = ()
    curves: tuple[Curve, ...] = field(default_factory=tuple)
    seconds_left: float | None = None
    memory: int = 0
    stopped: bool = False

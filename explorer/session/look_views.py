"""What Look leaves in a session: arrays from which every figure is drawn without the model."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from explorer.gated import Beside
from explorer.heads import HeadScores
from explorer.lm import ModelSpec
from explorer.rows import Row, Rows
from explorer.shares import Mass

ROWS = 2_500_000  # weights a page keeps, l·h·q·(p + k): 96 tokens for 30 layers of 9 heads


@dataclass(frozen=True)
class LookView:
    """What a text's attention looks like. Redrawn for any head, position and group from here.

    n_generated: how many of the last positions the model wrote    held: what was in front of it
    rows: of every query where the text is short, of the last ones where it is not
    gates: (l, h) tanh(g) of what was in front, or None
    beside: what an adapter adds that is not in the softmax, or None
    written: live shares while the model wrote, or None    marked: a visitor's groups of tokens
    n_slots: of the prefix in front, a layer    key: tells one view from another

    A text of many tokens is seen from some of its positions only, `mass.positions`.
    """

    spec: ModelSpec
    mass: Mass
    n_generated: int
    held: str
    seconds: float
    rows: Rows | None = None
    gates: np.ndarray | None = None
    beside: Beside | None = None
    written: Writing | None = None
    marked: Mapping[str, Sequence[int]] = field(default_factory=dict)
    n_slots: int = 0
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Writing:
    """Where every layer looks while the model writes, seen from each token it reads to do so.

    shares: (t, l, n) mean over heads, along `groups`    tokens: t, the ones that came out
    latest: (l, h, n) of the newest token, head by head
    """

    tokens: tuple[str, ...]
    shares: np.ndarray
    groups: tuple[str, ...]
    latest: np.ndarray


@dataclass(frozen=True)
class Other:
    """The second state, B: another text, or the same with something else in front.

    first: A, where one job has read both: of items in quick succession a page sees the last alone
    """

    view: LookView
    first: LookView | None = None


@dataclass(frozen=True)
class HeadsView:
    """Heads found by a rule, and for which model."""

    spec: ModelSpec
    found: HeadScores


@dataclass(frozen=True)
class RowsView:
    """Rows of a long text that have been asked for, the newest last.

    key: of the view they belong to
    """

    key: str
    parts: tuple[tuple[Rows, Beside | None], ...]

    def after(self, earlier: RowsView | None) -> RowsView:
        """Together with what was asked for before, as far as there is room."""
        if earlier is None or earlier.key != self.key:
            return self
        parts = [*earlier.parts, *self.parts]
        while len(parts) > 1 and sum(rows.weights.size for rows, _ in parts) > ROWS:
            parts.pop(0)
        return replace(self, parts=tuple(parts))


def row_of(
    view: LookView, asked: RowsView | None, layer: int, head: int, position: int
) -> tuple[Row | None, np.ndarray | None]:
    """One query's row and, behind gates, its prompts as experts; None for what is not kept."""
    parts = [(view.rows, view.beside)]
    if asked is not None and asked.key == view.key:
        parts += asked.parts
    for rows, beside in parts:
        row = rows.row(layer, head, position) if rows is not None else None
        if row is not None:
            return row, beside.experts(layer, head, position) if beside is not None else None
    return None, None

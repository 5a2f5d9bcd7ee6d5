"""What an event sends to the page: for every part that changes, its new value; nothing else.

Parts are named; `look_tab` knows which component each one is. A click on a head sends that head's
figures and moves a frame on the maps; a click on a token sends the map. Panels that are closed are
drawn when they are opened.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from explorer import plots, plots_look
from explorer.plots import clipped
from explorer.session.look_views import LookView, Other, RowsView, Writing, row_of
from explorer.ui.live_plot import framing
from explorer.ui.look_view import (
    Choice,
    along,
    facts,
    group_of,
    head_of,
    labels_of,
    last_of,
    map_title,
    nothing_there,
    position,
    seen,
    summary,
    table,
    weights_of,
)
from explorer.ui.pair_drawing import Changed, pair
from explorer.ui.token_strip import seen_from, strip, window_of

TOP = 12  # keys of a row that are named
# Parts of the panels below the map, by what opens them.
PANELS = {
    "row": ("row", "row_along"),
    "heads": ("sorted",),
    "written": ("written",),
    "gates": ("gates", "ratio", "gate_bars"),
    "numbers": ("table",),
}
Parts = dict[str, Any]


def everything(
    view: LookView, choice: Choice, other: Other | None = None, asked: RowsView | None = None
) -> Parts:
    """All parts, the closed ones as well: what a new text sends."""
    parts = {"summary": summary(view, choice), "map": _map(view, choice)}
    parts |= _head(view, choice, asked, whole_strip=True)
    for name in PANELS:
        parts |= panel(name, view, choice, asked)
    return parts | pair(view, choice, other)


def for_scale(
    view: LookView, choice: Choice, other: Other | None = None, asked: RowsView | None = None
) -> Parts:
    """Another group, scale or way of seeing: everything but the tokens."""
    parts = {"summary": summary(view, choice), "map": _map(view, choice)}
    parts |= _head(view, choice, asked)
    return parts | _open(view, choice, asked) | _pair(view, choice, other, "all")


def for_head(
    view: LookView, choice: Choice, other: Other | None = None, asked: RowsView | None = None
) -> Parts:
    """Another head: its figures, and a frame on every map."""
    parts = {"map": framing(plots.frame(*head_of(view, choice)))}
    parts |= _head(view, choice, asked) | _open(view, choice, asked, ("row",))
    if "gates" in choice.opened:
        moved = framing(plots.frame(*head_of(view, choice)))
        parts |= {
            name: moved
            for name, shown in (("gates", view.gates), ("ratio", view.beside))
            if shown is not None
        }
    return parts | _pair(view, choice, other, "head")


def for_position(
    view: LookView,
    choice: Choice,
    other: Other | None = None,
    asked: RowsView | None = None,
    *,
    moved: bool = False,
) -> Parts:
    """Another token to look from. moved: the strip shows another window of the text"""
    here = view.mass.positions[position(view, choice.at)]
    parts = {"summary": summary(view, choice), "map": _map(view, choice)}
    parts |= _head(view, choice, asked, whole_strip=moved)
    parts["along"] = framing(plots.column(here, view.mass.positions[-1] + 1))
    opened = _open(view, choice, asked, ("row", "heads", "numbers", "gates"))
    return parts | opened | _pair(view, choice, other, "position")


def window(view: LookView, choice: Choice, asked: RowsView | None = None) -> Parts:
    """Another part of a long text in the strip."""
    return {"tokens": _strip(view, choice, asked, whole=True)}


def after_reading(view: LookView, choice: Choice, asked: RowsView) -> Parts:
    """The row of the chosen token has been read."""
    parts = _head(view, choice, asked)
    return {name: parts[name] for name in ("tokens", "facts")} | panel("row", view, choice, asked)


def panel(name: str, view: LookView, choice: Choice, asked: RowsView | None = None) -> Parts:
    """The parts of one panel."""
    if name == "row":
        return dict(zip(PANELS["row"], row_figures(view, choice, asked), strict=True))
    if name == "heads":
        cells, group = cells_of(view, choice)
        colour = plots.colour_of(group)
        figure = plots_look.sorted_heads(cells, f"share on {group}", colour=colour, shares=True)
        return {"sorted": figure}
    if name == "written":
        drawn = None if view.written is None else writing_figure(view.written, choice.group)
        return {"written": drawn}
    if name == "gates":
        return _gates(view, choice)
    cells, group = cells_of(view, choice)
    of = "attention without the sink" if choice.sinkless else "all attention"
    return {"table": table(cells, f"Share of {of} on {group}")}


def cells_of(view: LookView, choice: Choice) -> tuple[np.ndarray, str]:
    """What the map shows. → (l, h), name of the group"""
    shares, groups = seen(view, choice)
    group = group_of(groups, choice)
    return shares[..., groups.index(group)], group


def writing_figure(writing: Writing, group: str):
    """The share on a group while the model writes; on generated text where there is no such one."""
    group = group if group in writing.groups else "generated"
    index = writing.groups.index(group)
    return plots_look.written_map(writing.shares[..., index], writing.tokens, group)


def live_map(writing: Writing, choice: Choice):
    """Every head's share on a group, seen from the token that is being written."""
    group = group_of(writing.groups, choice)
    cells = writing.latest[..., writing.groups.index(group)]
    title = map_title(replace(choice, mean=False, sinkless=False), group)
    top = _top(cells, choice)
    return plots.share_map(cells, group, top=top, log=choice.log, title=title)


def row_figures(view: LookView, choice: Choice, asked: RowsView | None = None):
    """The keys one head looks at most from one position, and its weights along the whole text.

    Behind gates, prompts are experts beside the tokens. → two figures, None for a row not kept
    """
    here = view.mass.positions[position(view, choice.at)]
    layer, head = head_of(view, choice)
    row, experts = row_of(view, asked, layer, head, here)
    if row is None:
        return None, None
    row = row.without_sink() if choice.sinkless else row
    labels = labels_of(view)
    marked = {at: name for name, some in view.marked.items() for at in some}
    end = len(labels) - view.n_generated
    every = [marked.get(at, "prompt" if at < end else "generated") for at in range(len(labels))]
    every[0] = "sink"
    names, values, groups = [], [], []
    for where, weight in row.top(TOP):
        names.append(f"slot {-1 - where}" if where < 0 else f"{clipped(labels[where])} ({where})")
        values.append(float(row.scores[row.index(where)]) if choice.scores else weight)
        groups.append("prefix" if where < 0 else every[where])
    if experts is not None and not choice.scores:
        for slot, weight in enumerate(experts):
            if np.isfinite(weight):
                names.append(f"gated prompt {slot}")
                values.append(float(weight))
                groups.append("prefix")
    title = f"Layer {layer}, head {head}, position {here}"
    of = "share without the sink" if choice.sinkless else "share of attention"
    bars = plots_look.row_bars(
        names,
        values,
        groups,
        title=title,
        unit="score" if choice.scores else "weight",
        of=of,
    )
    seen_keys = row.weights[: row.n_slots + here + 1]
    whole = plots_look.row_along(
        seen_keys, labels, every, n_slots=row.n_slots, title=title, of=of, log=choice.log
    )
    return bars, whole


def _open(view, choice, asked, names=tuple(PANELS)) -> Parts:
    parts: Parts = {}
    for name in names:
        if name in choice.opened:
            parts |= panel(name, view, choice, asked)
    return parts


def _pair(view: LookView, choice: Choice, other: Other | None, changed: Changed) -> Parts:
    return pair(view, choice, other, changed=changed) if "pair" in choice.opened else {}


def _map(view: LookView, choice: Choice):
    cells, group = cells_of(view, choice)
    return plots.share_map(
        cells,
        group,
        chosen=head_of(view, choice),
        top=_top(cells, choice),
        log=choice.log,
        title=map_title(choice, group),
        empty=nothing_there(view, group),
    )


def _top(cells: np.ndarray, choice: Choice) -> float:
    """The share of full colour."""
    return max(float(np.nan_to_num(cells).max()), 0.01) if choice.stretch else 1.0


def _head(view: LookView, choice: Choice, asked: RowsView | None, whole_strip: bool = False):
    shares, groups = along(view, choice)
    layer, head = head_of(view, choice)
    kept = view.mass.positions
    every = labels_of(view)
    weights, most = weights_of(view, choice, asked, window_now(view, choice))
    row, _ = row_of(view, asked, layer, head, kept[position(view, choice.at)])
    if row is not None and choice.sinkless:
        row = row.without_sink()
    return {
        "along": plots.shares_along(
            shares,
            groups,
            [every[at] for at in kept],
            title=f"Layer {layer}, head {head}",
            position=kept[position(view, choice.at)],
            positions=kept,
        ),
        "facts": facts(
            view,
            choice,
            filled=most if weights else None,
            spread=None if row is None else row.entropy,
        ),
        "tokens": _strip(view, choice, asked, whole=whole_strip),
    }


def window_now(view: LookView, choice: Choice) -> int:
    """The first token of the window that the strip shows."""
    here = view.mass.positions[position(view, choice.at)]
    if choice.first < 0:
        return window_of(view.mass.tokens, here)
    return choice.first


def _strip(view: LookView, choice: Choice, asked: RowsView | None, *, whole: bool) -> Parts:
    first = window_now(view, choice)
    weights, most = weights_of(view, choice, asked, first)
    picked = last_of(view.mass.tokens, view.mass.positions[position(view, choice.at)])
    now = dict(first=first, key=view.key, weights=weights, most=most)
    if not whole:
        return seen_from(picked, **now)
    return strip(view.mass.tokens, view.n_generated, picked, view.marked, view.n_slots, **now)


def _gates(view: LookView, choice: Choice) -> Parts:
    chosen = head_of(view, choice)
    parts: Parts = dict.fromkeys(PANELS["gates"])
    if view.gates is not None:
        parts["gates"] = plots_look.gate_map(view.gates, name=view.held, chosen=chosen)
        parts["gate_bars"] = plots_look.sorted_heads(
            view.gates, "tanh(g)", colour="var(--generated)"
        )
    if view.beside is not None:
        ratio = view.beside.ratio[:, :, position(view, choice.at)]
        parts["ratio"] = plots_look.ratio_map(ratio, name=view.held, chosen=chosen)
    return parts

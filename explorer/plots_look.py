"""Figures of Look beyond the map: differences, sorted heads, one row, and what is written live."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.plots import (
    DIVERGING,
    DRAWN,
    MARGIN,
    cell_map,
    clipped,
    colour_of,
    literal,
    sequential,
)


def difference_map(
    shares: np.ndarray,
    before: np.ndarray,
    group: str,
    *,
    chosen: tuple[int, int] | None = None,
    title: str = "",
) -> go.Figure:
    """Layer × head: how the share on a group has changed, in percentage points. Both (l, h)."""
    change = 100 * (np.nan_to_num(shares) - np.nan_to_num(before))
    top = max(float(np.abs(change).max()), 1.0)
    layer, head = np.unravel_index(int(np.abs(change).argmax()), change.shape)
    return cell_map(
        change,
        colorscale=DIVERGING,
        bounds=(-top, top),
        ticks={"tickformat": "+~g"},
        hover=f"%{{z:+.1f}} points on {group}",
        chosen=chosen,
        title=title,
        alt=f"{title or 'Change'} of the share of attention on {group}, layer by head: mean "
        f"{change.mean():+.1f} points; largest in layer {layer}, head {head}: "
        f"{change[layer, head]:+.1f}.",
    )


def gate_map(gates: np.ndarray, *, name: str, chosen: tuple[int, int] | None = None) -> go.Figure:
    """Layer × head: tanh(g), how far the gate of each head is open. gates: (l, h), NaN without one

    name: of the adapter whose they are
    """
    known = np.nan_to_num(gates)
    top = max(float(np.abs(known).max()), 0.01)
    layer, head = np.unravel_index(int(np.abs(known).argmax()), gates.shape)
    return cell_map(
        gates,
        colorscale=DIVERGING,
        bounds=(-top, top),
        ticks={"tickformat": "+.2~f"},
        hover="tanh(g) %{z:+.3f}",
        chosen=chosen,
        title="How far gates are open, tanh(g)",
        alt=f"Gates of {name}, layer by head: mean opening {np.abs(known).mean():.2f}; widest in "
        f"layer {layer}, head {head}: {known[layer, head]:+.2f}.",
    )


def ratio_map(ratio: np.ndarray, *, name: str, chosen: tuple[int, int] | None = None) -> go.Figure:
    """Layer × head: ‖added part‖ / ‖rest‖, which is no share. ratio: (l, h), NaN where nothing is

    name: of the adapter that adds
    """
    known = np.nan_to_num(ratio)
    layer, head = np.unravel_index(int(known.argmax()), ratio.shape)
    return cell_map(
        ratio,
        colorscale=sequential("generated"),
        bounds=(0, max(float(known.max()), 0.01)),
        ticks={},
        hover="‖added‖ / ‖rest‖ %{z:.3f}",
        chosen=chosen,
        title="Size of what is added<br>against the rest, ‖added‖ / ‖rest‖",
        alt=f"What {name} adds against the rest, layer by head: median {np.median(known):.2f}; "
        f"most in layer {layer}, head {head}: {known[layer, head]:.2f}.",
    )


def sorted_heads(
    scores: np.ndarray, what: str, *, colour: str, n: int = 24, shares: bool = False
) -> go.Figure:
    """The heads with the largest numbers as bars, largest first. scores: (l, h)

    shares: they are shares of attention, and written in percent
    """
    known = np.nan_to_num(scores, nan=-np.inf)
    order = np.argsort(-np.abs(known), axis=None, kind="stable")
    order = [int(i) for i in order if np.isfinite(known.flat[i])][:n]
    places = [np.unravel_index(i, scores.shape) for i in order]
    names = [f"L{layer} H{head}" for layer, head in places]
    values = [float(scores.flat[i]) for i in order]
    bars = {
        "type": "bar",
        "x": names,
        "y": values,
        "marker": {"color": colour},
        "hovertemplate": f"%{{x}}: %{{y:{'.1%' if shares else '.3f'}}}<extra></extra>",
    }
    first = zip(names[:3], values, strict=False)
    told = ", ".join(f"{name} {value:{'.0%' if shares else '.2f'}}" for name, value in first)
    layout = {
        "template": "none",
        "height": 260,
        "margin": {**MARGIN, "b": 64},
        "uirevision": f"sorted {what}",
        "meta": {"alt": f"Heads sorted by {what}: {told}."},
        "xaxis": {"type": "category", "tickangle": -60, "showgrid": False},
        "yaxis": {
            "title": {"text": what},
            "zeroline": True,
            "tickformat": ".0%" if shares else None,
        },
    }
    return go.Figure([bars], layout)


def row_bars(
    labels: Sequence[str],
    values: Sequence[float],
    groups: Sequence[str],
    *,
    title: str,
    unit: str = "weight",
    of: str = "share of attention",
) -> go.Figure:
    """One query of one head: the keys it looks at most, largest on top.

    labels: keys as people read them    groups: of each key, for its colour
    unit: "weight" or "score"    of: what a weight is a share of
    """
    weights = unit == "weight"
    bars = {
        "type": "bar",
        "x": [float(value) for value in values],
        "y": [f"{n}. {literal(label)}" for n, label in enumerate(labels, start=1)],
        "orientation": "h",
        "marker": {"color": [colour_of(group) for group in groups]},
        "customdata": list(groups),
        "text": [f"{value:.1%}" if weights else f"{value:.2f}" for value in values],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y} (%{customdata}): %{x:.4f}<extra></extra>",
    }
    first = f"most on {labels[0]} ({values[0]:.1%})" if weights and len(labels) else ""
    layout = {
        "template": "none",
        "height": int(np.clip(108 + 22 * len(labels), 178, 440)),
        "margin": {**MARGIN, "r": 56},
        "uirevision": f"row {unit}",
        "meta": {"alt": f"{title}: {first}."},
        "yaxis": {
            "autorange": "reversed",
            "type": "category",
            "showgrid": False,
            "automargin": True,
        },
        "xaxis": {
            "title": {"text": of if weights else "q·k score"},
            "nticks": 3,  # more run together on a phone
            "tickangle": 0,
            "tickformat": ".0%" if weights else None,
            "zeroline": True,
            "showgrid": False,
            "rangemode": "tozero" if weights else "normal",
        },
    }
    return go.Figure([bars], layout)


def row_along(
    weights: np.ndarray,
    labels: Sequence[str],
    groups: Sequence[str],
    *,
    n_slots: int,
    title: str,
    of: str = "share of attention",
    log: bool = False,
    most: int = DRAWN // 2,
) -> go.Figure:
    """One query of one head: its weight on every key, in the order of the text.

    weights: (p + k,), slots before keys; drawn left of 0    labels: (k,) keys as people read them
    groups: of each key, for its colour
    log: a logarithmic axis    most: steps; of a longer row each is the largest weight of a run
    """
    width = -(-len(weights) // most)
    traces, best = [], (0.0, "nothing")
    cuts = [0] + [at for at in range(1, len(weights) - n_slots) if groups[at] != groups[at - 1]]
    parts = [("prefix", weights[:n_slots], -n_slots)] if n_slots else []
    for first, end in zip(cuts, [*cuts[1:], len(weights) - n_slots], strict=True):
        parts.append((groups[first], weights[n_slots + first : n_slots + end], first))
    for group, part, offset in parts:
        edges = np.arange(0, len(part), width)
        ends = np.minimum(edges + width, len(part))
        tops = [int(edge + part[edge:end].argmax()) for edge, end in zip(edges, ends, strict=True)]
        names = [
            f"slot {at}" if group == "prefix" else f"{labels[offset + at]} ({offset + at})"
            for at in tops
        ]
        largest = np.asarray(part, np.float32)[tops]
        best = max(best, (float(largest.max()), names[int(largest.argmax())]))
        names = [literal(name) for name in names]
        # Steps as one line, not as bars: a page draws one path in a tenth of the time of many.
        middle = (edges + ends - 1) / 2 + offset
        around = [[offset - 0.5], middle, [offset + len(part) - 0.5]]
        trace = {
            "type": "scatter",
            "x": np.concatenate(around).astype(np.float32),
            "y": np.concatenate([largest[:1], largest, largest[-1:]]),
            "mode": "lines",
            "line": {"shape": "hvh", "width": 1, "color": colour_of(group)},
            "fill": "tozeroy",
            "fillcolor": colour_of(group),
            "customdata": [names[0], *names, names[-1]],
            "hovertemplate": "%{customdata}: %{y:.2%}<extra></extra>",
            "showlegend": False,
        }
        traces.append(trace)
    runs = f"each step the largest of {width} keys" if width > 1 else ""
    told = f"; most on {best[1]}, {best[0]:.1%}"
    axis = {"type": "log", "range": [-4, 0], "dtick": 1} if log else {"rangemode": "tozero"}
    layout = {
        "template": "none",
        "height": 300,
        "margin": {**MARGIN, "l": 56, "b": 58 if runs else MARGIN["b"]},
        "hovermode": "x",
        "uirevision": f"row along {len(weights)} {log}",
        "meta": {"alt": f"{title}: weights along the text{told}."},
        "xaxis": {"title": {"text": f"position<br>{runs}"}, "showgrid": False, "zeroline": False},
        "yaxis": {"title": {"text": of}, "tickformat": ".2~%" if log else ".0%", **axis},
    }
    return go.Figure(traces, layout)


def written_map(shares: np.ndarray, tokens: Sequence[str], group: str) -> go.Figure:
    """Layer × written token: the share on a group, mean over heads. shares: (t, l)"""
    heat = {
        "type": "heatmap",
        "z": np.asarray(shares.T, np.float32),
        "zmin": 0,
        "zmax": 1,
        "colorscale": sequential(group),
        "xgap": 1,
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0},
        "hovertemplate": f"token %{{x}}, layer %{{y}}: %{{z:.1%}} on {group}<extra></extra>",
    }
    layout = {
        "template": "none",
        "height": 272,
        "margin": {**MARGIN, "b": 76, "r": 0},
        "uirevision": "written",
        "meta": {
            "alt": f"Share on {group} of every layer for each of {len(tokens)} written tokens: "
            f"mean {float(shares.mean()) if shares.size else 0:.0%}."
        },
        "xaxis": {
            "tickmode": "array",
            "tickvals": list(range(len(tokens))),
            "ticktext": [literal(clipped(token)) for token in tokens],
            "tickangle": -60,
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {
            "title": {"text": "layer"},
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
        },
    }
    return go.Figure([heat], layout)

"""Figures. Arrays in, plotly figure out; no model, no gradio.

Colours are names of the page's theme, "var(--prompt)", which the page looks up when it draws, so a
figure is right in light and dark. Every figure has a height and no width, and says its finding
in `layout.meta["alt"]`. Zoom belongs to `layout.uirevision`. What a click chooses is framed by a
shape (`frame`, `column`) that the page can move without getting the figure again.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

import numpy as np
import plotly.graph_objects as go

# plotly builds its validators at first use and not thread-safely: do it once, at import.
go.Figure(go.Heatmap(z=[[0.0]]), layout={"template": "none"}).to_json()

GROUPS = ("prefix", "sink", "prompt", "generated")
MARGIN = {"l": 48, "r": 12, "t": 12, "b": 44}
LEAST = 1e-4  # shares below it have no colour on a logarithmic scale
LABELLED = 40  # more positions than this get numbers instead of tokens on their axis
DRAWN = 512  # positions of a figure at most: more than it has pixels for
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
COLOURS = tuple(f"var(--method-{n})" for n in range(1, 7))  # of methods, in order
# From one sign to the other, with nothing in the middle.
DIVERGING = [
    [0, "var(--prompt)"],
    [0.5, "var(--prompt-clear)"],
    [0.5, "var(--prefix-clear)"],
    [1, "var(--prefix)"],
]
_INK = {"color": "var(--body-text-color)", "width": 2}


def literal(token: str) -> str:
    """A token to be written in a figure letter by letter: plotly reads <b> and &lt; as HTML."""
    return html.escape(token, quote=False)


def clipped(token: str, most: int = 10) -> str:
    """A token as a short label: a long one ends in …. Write it with `literal`."""
    return token if len(token) <= most else token[: most - 1] + "…"


def colour_of(group: str) -> str:
    """A group's colour; groups that a visitor has marked share one."""
    return f"var(--{group if group in GROUPS else 'mark'})"


def sampled(count: int, most: int = DRAWN) -> np.ndarray:
    """Indices of what is drawn of so many: all, or so many evenly spread, first and last too."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(int))


def share_map(
    shares: np.ndarray,
    group: str,
    *,
    chosen: tuple[int, int] | None = None,
    top: float = 1.0,
    log: bool = False,
    title: str = "",
    empty: str = "",
) -> go.Figure:
    """Layer × head: the share of attention on one group. Click a cell to choose a head.

    shares: (l, h) in [0, 1]    chosen: layer and head that are framed    top: share of full colour
    log: colours by the logarithm, from 0.01 %    title: above the map, what it is of
    empty: written into a map of nothing but zeros, in place of its scale: why they are
    """
    title = title or f"share on {group}"
    known = np.nan_to_num(shares)
    layer, head = np.unravel_index(int(known.argmax()), shares.shape)
    z, bottom, ceiling, ticks = shares, 0.0, top, {"tickformat": ".0%"}
    if log:
        z, bottom = np.log10(np.maximum(shares, LEAST)), np.log10(LEAST)
        ceiling = np.log10(max(top, 10 * LEAST))
        ticks = {"tickvals": [-4, -3, -2, -1, 0], "ticktext": "0.01% 0.1% 1% 10% 100%".split()}
    told = f"Mean {known.mean():.0%}; most in layer {layer}, head {head}: {known[layer, head]:.0%}."
    figure = cell_map(
        z,
        colorscale=sequential(group),
        bounds=(bottom, ceiling),
        ticks=ticks,
        hover=f"%{{{'customdata' if log else 'z'}:.1%}} on {group}",
        customdata=shares if log else None,
        chosen=chosen,
        title=title,
        alt=f"{title.replace('<br>', ', ')}: {shares.shape[0]} layers by {shares.shape[1]} heads. "
        + told,
    )
    if empty and not known.any():
        figure.update_traces(showscale=False)
        figure.add_annotation(
            text=empty, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5, font={"size": 13}
        )
        figure.update_layout(meta={"alt": f"{figure.layout.meta['alt']} {empty}"})
    return figure


def sequential(group: str) -> list:
    """From a tint of a group's colour, so that a cell of nothing is still a cell, to all of it."""
    colour = f"--{group if group in GROUPS else 'mark'}"
    return [[0, f"var({colour}-faint)"], [1, f"var({colour})"]]


def log_ticks(values: Iterable[float | None]) -> dict[str, list]:
    """Three round ticks or a few more in the reach of some numbers, of which those above 0 count.

    plotly's own leave out the power between two decades, run together, or show none at all.
    """
    some = [value for value in values if value is not None and 1e-300 < value < 1e300]
    low, high = min(some, default=1.0), max(some, default=1.0)
    if low == high:  # plotly shows a decade to both sides
        low, high = low / 5, high * 5
    if high < 10 * low:
        ticks = _evenly(low, high)
    else:
        for marks in ((1,), (1, 2, 5)):
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            ticks = [mark * 10.0**power for power in powers for mark in marks]
            ticks = [tick for tick in ticks if 0.98 * low <= tick <= 1.02 * high]
            if len(ticks) > 2:
                break
    ticks = ticks[:: -math.ceil(len(ticks) / 7)][::-1]
    return {"tickvals": ticks, "ticktext": [_written(tick) for tick in ticks]}


def _evenly(low: float, high: float) -> list[float]:
    """Multiples of the largest step of 1, 2 or 5 tenths, hundredths, … that has three of them."""
    power = math.ceil(math.log10(high - low))
    for digits in range(-power, 4 - power):
        for mark in (5, 2, 1):
            step = mark * 10.0**-digits
            first, last = math.ceil(low / step), math.floor(high / step)
            if last - first >= 2:
                return [round(i * step, digits) for i in range(first, last + 1)]
    return [low, high]  # nearer than numbers can tell


def _written(tick: float) -> str:
    power = math.floor(math.log10(tick) + 1e-9)
    if -4 < power < 5:
        return f"{tick:.10g}"
    mark, sign = round(tick / 10.0**power, 9), str(power).translate(_RAISED)
    return f"10{sign}" if mark == 1 else f"{mark:.10g}·10{sign}"


def cell_map(
    z: np.ndarray,
    *,
    colorscale: list,
    bounds: tuple[float, float],
    ticks: dict,
    hover: str,
    alt: str,
    customdata: np.ndarray | None = None,
    chosen: tuple[int, int] | None = None,
    title: str = "",
) -> go.Figure:
    """Layer × head in colours. z: (l, h)    hover: what a cell says after its layer and head"""
    n_layers, n_heads = z.shape
    heat = {
        "type": "heatmap",
        "z": np.asarray(z, np.float32),
        "customdata": None if customdata is None else np.asarray(customdata, np.float32),
        "zmin": bounds[0],
        "zmax": bounds[1],
        "colorscale": colorscale,
        "xgap": 1,
        "ygap": 1,
        "colorbar": {**ticks, "thickness": 10, "outlinewidth": 0, "len": 1.0, "nticks": 6},
        "hovertemplate": f"layer %{{y}}, head %{{x}}<br>{hover}<extra></extra>",
    }
    axis = {"showgrid": False, "zeroline": False, "fixedrange": True}
    layout = {
        "template": "none",
        "height": int(np.clip(90 + 13 * n_layers, 220, 560)),
        "margin": {**MARGIN, "r": 0, "t": 38 + 18 * title.count("<br>") if title else MARGIN["t"]},
        "uirevision": f"map {n_layers} {n_heads}",
        "meta": {"alt": alt},
        "shapes": [] if chosen is None else [frame(*chosen)],
        "xaxis": {**axis, "title": {"text": "head"}, "dtick": max(1, n_heads // 12)},
        "yaxis": {
            **axis,
            "title": {"text": "layer"},
            "dtick": max(1, round(n_layers / 10)),
            "autorange": "reversed",
        },
    }
    if title:
        layout["title"] = {
            "text": title,
            "x": 0,
            "xref": "paper",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 8 + 8 * title.count("<br>")},
            "font": {"size": 13},
        }
    return go.Figure([heat], layout)


def frame(layer: int, head: int) -> dict:
    """The shape around one cell of a map."""
    return {
        "type": "rect",
        "x0": head - 0.5,
        "x1": head + 0.5,
        "y0": layer - 0.5,
        "y1": layer + 0.5,
        "line": _INK,
    }


def column(position: int, length: int) -> dict:
    """The shape around one position of a text of so many, wide enough to be seen."""
    half = max(0.5, length / 400)
    return {
        "type": "rect",
        "x0": position - half,
        "x1": position + half,
        "y0": 0,
        "y1": 1,
        "line": _INK,
    }


def shares_along(
    shares: np.ndarray,
    groups: Sequence[str],
    tokens: Sequence[str],
    *,
    title: str,
    position: int | None = None,
    positions: Sequence[int] | None = None,
    named: bool = False,
) -> go.Figure:
    """One head, seen from every position: its attention by group, stacked to the whole.

    shares: (q, n) along `groups`    tokens: q labels    position: the one that is marked
    positions: (q,) ascending, where they are not 0, 1, …; of more than DRAWN some are drawn
    named: with the title above the figure, in place of the legend
    """
    where = np.arange(len(shares)) if positions is None else np.asarray(positions)
    some = sampled(len(where))
    x = where[some]
    length = int(where[-1]) + 1 if len(where) else 0
    if length > LABELLED and len(x) == length:
        steps = {"x0": 0, "dx": 1}  # the halves of a step at both ends cannot be seen
    else:  # every position is a step one wide, so that a text of one token is still an area
        steps = {"x": np.concatenate([[-0.5], x, [length - 0.5]]).astype(np.float32)}
        some = np.concatenate([some[:1], some, some[-1:]])
    labels = [literal(tokens[i]) for i in some]
    traces: list[dict] = []
    for index, group in enumerate(groups):
        values = np.asarray(shares[some, index], np.float32)
        if not np.nan_to_num(values).any():
            continue
        told = not traces and length > LABELLED  # once; else the axis names the token
        traces.append(
            {
                "type": "scatter",
                **steps,
                "y": values,
                "name": group,
                "mode": "lines",
                "stackgroup": "attention",
                "line": {"shape": "hvh", "width": 0.5, "color": colour_of(group)},
                "fillcolor": colour_of(group),
                "customdata": labels if told else None,
                "hovertemplate": ("<b>%{customdata}</b><br>" if told else "")
                + f"{group} %{{y:.1%}}<extra></extra>",
            }
        )
    axis = {"range": [-0.5, length - 0.5], "showgrid": False, "zeroline": False}
    if length <= LABELLED:
        axis |= {
            "tickmode": "array",
            "tickvals": list(range(length)),
            "ticktext": [literal(clipped(token)) for token in tokens],
            "tickangle": -60,
        }
    else:
        left_out = "" if len(x) == length else f" ({len(x)} of {length:,} drawn)"
        axis["title"] = {"text": f"position{left_out}"}
    layout = {
        "template": "none",
        "height": 300,
        "margin": {**MARGIN, "t": 40, "b": 72 if length <= LABELLED else 44},
        "uirevision": f"along {length}",
        "hovermode": "x unified",
        "showlegend": not named,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "meta": {"alt": f"{title}: " + _means(shares, groups)},
        "shapes": [] if position is None else [column(position, length)],
        "xaxis": axis,
        "yaxis": {"range": [0, 1], "tickformat": ".0%", "fixedrange": True, "showgrid": False},
    }
    if named:
        layout["title"] = {"text": title, "x": 0, "xref": "paper", "font": {"size": 13}}
    return go.Figure(traces, layout)


def _means(shares: np.ndarray, groups: Sequence[str]) -> str:
    means = np.nan_to_num(shares).mean(axis=0)
    return "on average " + ", ".join(
        f"{mean:.0%} on {group}" for group, mean in zip(groups, means, strict=True) if mean > 0
    )

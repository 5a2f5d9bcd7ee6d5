"""Figures of training: loss, gates, spectra. Arrays in, plotly figures out; see `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.plots import COLOURS, DIVERGING, MARGIN, cell_map, sequential

_LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}


def loss_chart(
    trials: Mapping[str, Sequence[Sequence[float]]],
    *,
    run: str,
    steps: int,
    held_out: Mapping[str, Sequence[Sequence[tuple[int, float]]]] | None = None,
    what: str = "loss (nats per token)",
) -> go.Figure:
    """A number of every step from the first, raw and smoothed, one colour a method, log axis.

    While a run goes on, no list in here may become shorter and no trace may go: Gradio 6.31 sends
    differences, and gets those wrong where several lists inside of a list shrink (`utils.diff`).

    trials: by method, the values of every trial, the one that runs last; the line is their mean,
            the band reaches from the smallest to the largest
    held_out: by method and trial, (step, loss) on rows that were not learnt from
    run: to which the zoom belongs    steps: the budget    what: title of the axis
    """
    figure, told = go.Figure(), []
    for index, (name, some) in enumerate(trials.items()):
        colour = COLOURS[index % len(COLOURS)]
        values, low, high = _over_trials(some)
        x = list(range(1, len(values) + 1))
        if values:
            told.append(f"{name} {values[-1]:.3g} at step {len(values)}")
        one = dict(legendgroup=name, showlegend=False, hoverinfo="skip")
        several = len(some) > 1
        figure.add_scatter(
            x=[*x, *reversed(x)] if several else [],
            y=[*high, *reversed(low)] if several else [],
            mode="none",
            fill="toself",
            fillcolor=colour,
            opacity=0.15,
            **one,
        )
        figure.add_scatter(
            x=x,
            y=values,
            mode="lines+markers" if len(values) < 3 else "lines",
            line={"color": colour, "width": 1},
            opacity=0.35 if len(values) > 4 else 1,
            **one,
        )
        figure.add_scatter(
            x=x,
            y=smoothed(values, weight=float(np.clip(1 - 20 / steps, 0.0, 0.9))),
            name=name,
            mode="lines",
            line={"color": colour, "width": 2.5},
            legendgroup=name,
            customdata=values,
            hovertemplate=f"{name}: %{{customdata:.3f}} (smoothed %{{y:.3f}})<extra></extra>",
        )
        points: dict[int, list[float]] = {}
        for step, loss in (point for trial in (held_out or {}).get(name, ()) for point in trial):
            points.setdefault(step, []).append(loss)
        figure.add_scatter(
            x=list(points),
            y=[float(np.mean(losses)) for losses in points.values()],
            name=f"{name}, held out",
            mode="markers+lines",
            marker={"color": colour, "symbol": "diamond", "size": 8},
            line={"color": colour, "width": 1, "dash": "dot"},
            legendgroup=name,
            showlegend=False,
            hovertemplate=f"{name}, held out: %{{y:.3f}}<extra></extra>",
        )
    figure.update_layout(
        template="none",
        height=340,
        margin={**MARGIN, "t": 34, "l": 60},
        uirevision=f"{what} {run}",
        hovermode="x unified",
        legend=_LEGEND,
        meta={"alt": f"{what} by step: {', '.join(told) or 'no step yet'}."},
    )
    figure.update_xaxes(title="step", range=[0.5, max(steps, 2) + 0.5], zeroline=False)
    figure.update_yaxes(title=what, type="log", zeroline=False, exponentformat="none", dtick="D2")
    return figure


def _over_trials(
    trials: Sequence[Sequence[float]],
) -> tuple[list[float], list[float], list[float]]:
    """Mean, smallest and largest at every step, over the trials that have come so far."""
    longest = max(map(len, trials), default=0)
    at = [[values[i] for values in trials if i < len(values)] for i in range(longest)]
    return [float(np.mean(one)) for one in at], list(map(min, at)), list(map(max, at))


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average, unbiased at the start."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def head_map(values: np.ndarray, *, name: str, what: str) -> go.Figure:
    """Layer × head of a number of every head: gates tanh(g), or how much is added.

    values: (l, h), NaN where there is none; around zero where some are negative
    what: what the number is, "tanh(g)"
    """
    known = np.nan_to_num(values)
    top = max(float(np.abs(known).max()), 1e-3)
    signed = bool((known < 0).any())
    layer, head = np.unravel_index(int(np.abs(known).argmax()), values.shape)
    return cell_map(
        values,
        colorscale=DIVERGING if signed else sequential("prefix"),
        bounds=(-top if signed else 0.0, top),
        ticks={},
        hover=f"{what} %{{z:.4f}}",
        alt=f"{name}, {what} of {int(np.isfinite(values).sum())} heads: the largest is "
        f"{known[layer, head]:.3f}, in layer {layer}, head {head}.",
    )


def spectrum_chart(decays: Mapping[str, np.ndarray], *, run: str) -> go.Figure:
    """Eigenvalues of what each method adds, over their largest, log axes.

    decays: by method, (d) in descending order; zeros are gaps
    """
    figure = go.Figure()
    for index, (name, decay) in enumerate(decays.items()):
        figure.add_scatter(
            x=list(range(1, len(decay) + 1)),
            y=[float(value) if value > 1e-12 else None for value in decay],
            name=name,
            mode="lines",
            line={"color": COLOURS[index % len(COLOURS)], "width": 2.5},
            hovertemplate=f"{name}: %{{y:.2e}}<extra></extra>",
        )
    told = ", ".join(
        f"{name} uses {int((decay > 0.01).sum())} axes above 1 %" for name, decay in decays.items()
    )
    figure.update_layout(
        template="none",
        height=300,
        margin={**MARGIN, "t": 34, "l": 60},
        uirevision=f"spectrum {run}",
        hovermode="x unified",
        legend=_LEGEND,
        meta={"alt": f"Spectrum of what is added, by axis: {told or 'nothing is added yet'}."},
    )
    figure.update_xaxes(title="axis, largest first", type="log", zeroline=False, dtick="D2")
    figure.update_yaxes(
        title="variance / largest", type="log", zeroline=False, exponentformat="power"
    )
    return figure

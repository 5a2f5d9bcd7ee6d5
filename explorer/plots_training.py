"""Figures of training: loss, gates, spectra. Arrays in, plotly figures out; see `plots`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.plots import COLOURS, DIVERGING, MARGIN, cell_map, log_ticks, sequential

# A method has its colour wherever it is drawn; its variants differ in their dashes.
_COLOUR = {"prefix-tuning": 0, "zero-gate": 2, "prefix-memory": 3, "lora": 4}
_DASHES = ("solid", "dash", "dashdot")
_FAINT = "var(--body-text-color-subdued)"

# How a method's line looks: colour and dash
Line = tuple[str, str]


def line_of(method: str, variant: int = 0) -> Line:
    """The line of a method's variant, counted from 0."""
    return COLOURS[_COLOUR[method]], _DASHES[variant % len(_DASHES)]


def _log(values: Iterable[float | None]) -> dict:
    """A logarithmic axis for these numbers. It does not zoom: its ticks would be left behind."""
    fixed = {"fixedrange": True, "zeroline": False, "automargin": True, "tickangle": 0}
    return {"type": "log", **fixed, **log_ticks(values)}


def _legend(title: str) -> dict:
    """Below its title, above the figure."""
    said = {"text": title, "side": "top", "font": {"size": 13}}
    return {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "title": said}


def loss_chart(
    trials: Mapping[str, Sequence[Sequence[float]]],
    held_out: Mapping[str, Sequence[Sequence[tuple[int, float]]]],
    lines: Mapping[str, Line],
    *,
    run: str,
    steps: int,
    norms: bool = False,
    title: str = "",
) -> go.Figure:
    """A number of every step from the first, raw and smoothed, one line a method, log axis.

    While a run goes on, no list in here may become shorter and no trace may go: Gradio 6.31 sends
    differences, and gets those wrong where several lists inside of a list shrink (`utils.diff`).

    trials: by method, the values of every trial, the one that runs last; the line is their mean,
            the band reaches from the smallest to the largest
    held_out: by method and trial, (step, loss) on rows that were not learnt from
    lines: by method    run: to which the zoom belongs    steps: the budget
    norms: the numbers are norms of gradients, which only rows that are learnt from have
    """
    figure, told = go.Figure(), []
    what = "gradient norm" if norms else "loss (nats per token)"
    for name, some in trials.items():
        colour, dash = lines[name]
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
            line={"color": colour, "width": 2.5, "dash": dash},
            legendgroup=name,
            customdata=values,
            hovertemplate=f"{name}: %{{customdata:.3f}} (smoothed %{{y:.3f}})<extra></extra>",
        )
        points: dict[int, list[float]] = {}
        for step, loss in (point for trial in held_out.get(name, ()) for point in trial):
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
            visible=not norms,
            hovertemplate=f"{name}, held out: %{{y:.3f}}<extra></extra>",
        )
    figure.add_scatter(  # what the diamonds are, in the legend alone
        x=[None],
        y=[None],
        name="held-out rows",
        mode="markers+lines",
        marker={"color": _FAINT, "symbol": "diamond", "size": 8},
        line={"color": _FAINT, "width": 1, "dash": "dot"},
        visible=not norms,
        hoverinfo="skip",
    )
    figure.update_layout(
        template="none",
        height=340,
        margin={**MARGIN, "t": 34, "l": 60},
        uirevision=f"{what} {run}",
        hovermode="x unified",
        legend=_legend(title),
        meta={"alt": f"{what} by step: {', '.join(told) or 'no step yet'}."},
    )
    figure.update_xaxes(
        title="step",
        range=[0.5, max(steps, 2) + 0.5],
        zeroline=False,
        dtick=1 if steps <= 12 else None,
    )
    drawn = [y for line in figure.data if line.visible is not False for y in line.y]
    figure.update_yaxes(title=f"{what}, log scale", **_log(drawn))
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


def head_map(values: np.ndarray, *, name: str, what: str, step: int) -> go.Figure:
    """Layer × head of a number of every head: gates tanh(g), or how much is added.

    values: (l, h), NaN where there is none; around zero where some are negative
    name: of the method    what: what the number is, "gates tanh(g)"
    """
    known = np.nan_to_num(values)
    top = max(float(np.abs(known).max()), 1e-3)
    signed = bool((known < 0).any())
    layer, head = np.unravel_index(int(np.abs(known).argmax()), values.shape)
    figure = cell_map(
        values,
        colorscale=DIVERGING if signed else sequential("prefix"),
        bounds=(-top if signed else 0.0, top),
        ticks={},
        hover=f"{what} %{{z:.4f}}",
        title=f"{name}, step {step}<br>{what}",
        alt=f"{name}, {what} of {int(np.isfinite(values).sum())} heads: the largest is "
        f"{known[layer, head]:.3f}, in layer {layer}, head {head}.",
    )
    return figure.update_layout(margin_t=56)


def spectrum_chart(
    decays: Mapping[str, np.ndarray], lines: Mapping[str, Line], *, run: str, title: str = ""
) -> go.Figure:
    """Eigenvalues of what each method adds, over their largest, log axes.

    decays: by method, (d) in descending order; zeros are gaps    lines: by method
    """
    figure = go.Figure()
    for name, decay in decays.items():
        colour, dash = lines[name]
        figure.add_scatter(
            x=list(range(1, len(decay) + 1)),
            y=[float(value) if value > 1e-12 else None for value in decay],
            name=name,
            mode="lines",
            line={"color": colour, "width": 2.5, "dash": dash},
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
        legend=_legend(title),
        meta={"alt": f"Spectrum of what is added, by axis: {told or 'nothing is added yet'}."},
    )
    longest = max((len(decay) for decay in decays.values()), default=64)
    figure.update_xaxes(title="axis, largest first, log scale", **_log([1, longest]))
    drawn = [y for line in figure.data for y in line.y]
    figure.update_yaxes(title="variance / largest, log scale", **_log(drawn))
    return figure

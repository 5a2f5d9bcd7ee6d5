"""Figures of training: loss, gates, spectra. Arrays in, plotly figures out; see `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.plots import MARGIN

COLOURS = tuple(f"var(--method-{n})" for n in range(1, 7))
_LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}


def loss_chart(
    losses: Mapping[str, Sequence[float]],
    *,
    run: str,
    steps: int,
    held_out: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> go.Figure:
    """Loss at every step from the first, raw and smoothed, one colour a method, log axis.

    losses: by method, nats per token    run: to which the zoom belongs    steps: the budget
    held_out: by method, (step, loss) on rows that were not learnt from
    """
    figure = go.Figure()
    for index, (name, values) in enumerate(losses.items()):
        colour, x = COLOURS[index % len(COLOURS)], list(range(1, len(values) + 1))
        smooth = smoothed(values, weight=float(np.clip(1 - 10 / steps, 0.0, 0.9)))
        figure.add_scatter(
            x=x,
            y=values,
            mode="lines+markers" if len(values) < 3 else "lines",
            line={"color": colour, "width": 1},
            opacity=0.35 if len(values) > 4 else 1,
            legendgroup=name,
            showlegend=False,
            hoverinfo="skip",
        )
        figure.add_scatter(
            x=x,
            y=smooth,
            name=name,
            mode="lines",
            line={"color": colour, "width": 2.5},
            legendgroup=name,
            customdata=values,
            hovertemplate=f"{name}: %{{customdata:.3f}} (smoothed %{{y:.3f}})<extra></extra>",
        )
        points = (held_out or {}).get(name, ())
        if points:
            figure.add_scatter(
                x=[step for step, _ in points],
                y=[loss for _, loss in points],
                name=f"{name}, held out",
                mode="markers+lines",
                marker={"color": colour, "symbol": "diamond", "size": 9},
                line={"color": colour, "width": 1, "dash": "dot"},
                legendgroup=name,
                showlegend=False,
                hovertemplate=f"{name}, held out: %{{y:.3f}}<extra></extra>",
            )
    told = ", ".join(f"{name} {v[-1]:.2f} at step {len(v)}" for name, v in losses.items() if v)
    figure.update_layout(
        template="none",
        height=340,
        margin={**MARGIN, "t": 34, "l": 60},
        uirevision=f"loss {run}",
        hovermode="x unified",
        legend=_LEGEND,
        meta={"alt": f"Loss by step, in nats per token: {told or 'no step yet'}."},
    )
    figure.update_xaxes(title="step", range=[0.5, max(steps, 2) + 0.5], zeroline=False)
    figure.update_yaxes(
        title="loss (nats per token)",
        type="log",
        zeroline=False,
        exponentformat="none",
        dtick="D2",
    )
    return figure


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average, unbiased at the start."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def gate_map(gates: np.ndarray, *, name: str, run: str) -> go.Figure:
    """Layer × head: how far every gate has opened, tanh(g). gates: (l, h), NaN where none is"""
    n_layers, n_heads = gates.shape
    top = max(float(np.nanmax(np.abs(gates), initial=0.0)), 1e-3)
    figure = go.Figure(
        go.Heatmap(
            z=gates,
            zmin=-top,
            zmax=top,
            colorscale=[
                [0, "var(--prompt)"],
                [0.5, "var(--prompt-clear)"],
                [0.5, "var(--prefix-clear)"],
                [1, "var(--prefix)"],
            ],
            xgap=1,
            ygap=1,
            colorbar={"thickness": 10, "outlinewidth": 0, "nticks": 5},
            hovertemplate="layer %{y}, head %{x}<br>tanh(g) = %{z:.4f}<extra></extra>",
        )
    )
    opened = int((np.abs(np.nan_to_num(gates)) > 0.01).sum())
    figure.update_layout(
        template="none",
        height=int(np.clip(90 + 13 * n_layers, 220, 480)),
        margin={**MARGIN, "r": 0},
        uirevision=f"gates {run}",
        meta={
            "alt": f"Gates of {name}: {opened} of {int(np.isfinite(gates).sum())} are open by more "
            f"than 0.01; the widest by {top:.3f}."
        },
    )
    figure.update_xaxes(title="head", showgrid=False, zeroline=False, dtick=max(1, n_heads // 12))
    figure.update_yaxes(
        title="layer",
        showgrid=False,
        zeroline=False,
        autorange="reversed",
        dtick=max(1, round(n_layers / 10)),
    )
    return figure


def spectrum_chart(decays: Mapping[str, np.ndarray], *, run: str) -> go.Figure:
    """Eigenvalues of what each method adds in a head, over their largest, log axes.

    decays: by method, (d) in descending order; zeros are left out
    """
    figure = go.Figure()
    for index, (name, decay) in enumerate(decays.items()):
        kept = decay[decay > 1e-12]
        figure.add_scatter(
            x=list(range(1, len(kept) + 1)),
            y=kept.tolist(),
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

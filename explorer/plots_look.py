"""Figures of Look beyond the map: differences, sorted heads, one row, and what is written live."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.plots import GROUPS, MARGIN, colour_of, share_map


def difference_map(
    shares: np.ndarray, before: np.ndarray, group: str, *, chosen: tuple[int, int] | None = None
) -> go.Figure:
    """Layer × head: how the share on a group has changed, in points. Both (l, h)."""
    change = np.nan_to_num(shares) - np.nan_to_num(before)
    figure = share_map(shares, group, chosen=chosen)
    top = max(float(np.abs(change).max()), 0.01)
    figure.data[0].update(
        z=change,
        zmin=-top,
        zmax=top,
        colorscale=[
            [0, "var(--prompt)"],
            [0.5, "var(--prompt-clear)"],
            [0.5, "var(--prefix-clear)"],
            [1, "var(--prefix)"],
        ],
        hovertemplate=f"layer %{{y}}, head %{{x}}<br>%{{z:+.1%}} on {group}<extra></extra>",
    )
    layer, head = np.unravel_index(int(np.abs(change).argmax()), change.shape)
    figure.layout.meta = {
        "alt": f"Change of the share of attention on {group}, layer by head: mean "
        f"{change.mean():+.1%}; largest in layer {layer}, head {head}: {change[layer, head]:+.1%}."
    }
    return figure


def sorted_heads(scores: np.ndarray, what: str, *, colour: str, n: int = 24) -> go.Figure:
    """The heads with the largest numbers as bars, largest first. scores: (l, h)"""
    known = np.nan_to_num(scores, nan=-np.inf)
    order = np.argsort(-np.abs(known), axis=None, kind="stable")
    order = [int(i) for i in order if np.isfinite(known.flat[i])][:n]
    places = [np.unravel_index(i, scores.shape) for i in order]
    names = [f"L{layer} H{head}" for layer, head in places]
    values = [float(scores.flat[i]) for i in order]
    figure = go.Figure(
        go.Bar(
            x=names,
            y=values,
            marker={"color": colour},
            hovertemplate="%{x}: %{y:.3f}<extra></extra>",
        )
    )
    told = ", ".join(f"{name} {value:.2f}" for name, value in zip(names[:3], values, strict=False))
    figure.update_layout(
        template="none",
        height=260,
        margin={**MARGIN, "b": 64},
        uirevision=f"sorted {what}",
        meta={"alt": f"Heads sorted by {what}: {told}."},
    )
    figure.update_xaxes(type="category", tickangle=-60, showgrid=False)
    figure.update_yaxes(title=what, zeroline=True)
    return figure


def row_bars(
    labels: Sequence[str],
    values: Sequence[float],
    groups: Sequence[str],
    *,
    title: str,
    entropy: float,
    unit: str = "weight",
) -> go.Figure:
    """One query of one head: the keys it looks at most, largest on top.

    labels: keys as people read them    groups: of each key, for its colour    entropy: nats
    """
    figure = go.Figure(
        go.Bar(
            x=list(values),
            y=[f"{n}. {label}" for n, label in enumerate(labels, start=1)],
            orientation="h",
            marker={"color": [colour_of(group) for group in groups]},
            customdata=list(groups),
            text=[f"{value:.1%}" if unit == "weight" else f"{value:.2f}" for value in values],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y} (%{customdata}): %{x:.4f}<extra></extra>",
        )
    )
    first = f"most on {labels[0]} ({values[0]:.1%})" if unit == "weight" and len(labels) else ""
    figure.update_layout(
        template="none",
        height=int(np.clip(90 + 22 * len(labels), 160, 420)),
        margin={**MARGIN, "l": 130, "r": 56, "b": 40},
        uirevision=f"row {unit}",
        meta={"alt": f"{title}: {first}; entropy {entropy:.2f} nats."},
    )
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(
        title=("share of attention" if unit == "weight" else "q·k score")
        + f" · entropy {entropy:.2f} nats",
        tickformat=".0%" if unit == "weight" else None,
        zeroline=True,
        showgrid=False,
        rangemode="tozero" if unit == "weight" else "normal",
    )
    return figure


def written_map(shares: np.ndarray, tokens: Sequence[str], group: str) -> go.Figure:
    """Layer × written token: the share on a group, mean over heads. shares: (t, l)"""
    colour = f"--{group if group in GROUPS else 'mark'}"
    figure = go.Figure(
        go.Heatmap(
            z=shares.T,
            zmin=0,
            zmax=1,
            colorscale=[[0, f"var({colour}-clear)"], [1, f"var({colour})"]],
            xgap=1,
            colorbar={"tickformat": ".0%", "thickness": 10, "outlinewidth": 0},
            hovertemplate=f"token %{{x}}, layer %{{y}}: %{{z:.1%}} on {group}<extra></extra>",
        )
    )
    figure.update_layout(
        template="none",
        height=260,
        margin={**MARGIN, "b": 64, "r": 0},
        uirevision="written",
        meta={
            "alt": f"Share on {group} of every layer for each of {len(tokens)} written tokens: "
            f"mean {float(shares.mean()) if shares.size else 0:.0%}."
        },
    )
    figure.update_xaxes(
        tickmode="array",
        tickvals=list(range(len(tokens))),
        ticktext=list(tokens),
        tickangle=-60,
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(title="layer", autorange="reversed", showgrid=False, zeroline=False)
    return figure

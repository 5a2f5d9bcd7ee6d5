"""Figures. Arrays in, plotly figure out; no model, no gradio.

Colours are names of the page's theme, "var(--prompt)", which the page looks up when it draws, so a
figure is right in light and dark. Every figure has a height and no width, and says its finding
in `layout.meta["alt"]`. Zoom belongs to `layout.uirevision`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

# plotly builds its validators at first use and not thread-safely: do it once, at import.
go.Figure(go.Heatmap(z=[[0.0]]), layout={"template": "none"}).to_json()

GROUPS = ("prefix", "sink", "prompt", "generated")
MARGIN = {"l": 48, "r": 12, "t": 12, "b": 44}
LEAST = 1e-4  # shares below it have no colour on a logarithmic scale
LABELLED = 40  # more positions than this get numbers instead of tokens on their axis


def colour_of(group: str) -> str:
    """A group's colour; groups that a visitor has marked share one."""
    return f"var(--{group if group in GROUPS else 'mark'})"


def share_map(
    shares: np.ndarray,
    group: str,
    *,
    chosen: tuple[int, int] | None = None,
    top: float = 1.0,
    log: bool = False,
) -> go.Figure:
    """Layer × head: the share of attention on one group. Click a cell to choose a head.

    shares: (l, h) in [0, 1]    chosen: layer and head that are framed    top: share of full colour
    log: colours by the logarithm, from 0.01 %
    """
    n_layers, n_heads = shares.shape
    colour = f"--{group if group in GROUPS else 'mark'}"
    known = np.nan_to_num(shares)
    layer, head = np.unravel_index(int(known.argmax()), shares.shape)
    z, bottom, ceiling, ticks = shares, 0.0, top, {"tickformat": ".0%"}
    if log:
        z, bottom = np.log10(np.maximum(shares, LEAST)), np.log10(LEAST)
        ceiling = np.log10(max(top, 10 * LEAST))
        ticks = {"tickvals": [-4, -3, -2, -1, 0], "ticktext": "0.01% 0.1% 1% 10% 100%".split()}
    figure = go.Figure(
        go.Heatmap(
            z=z,
            customdata=shares if log else None,
            zmin=bottom,
            zmax=ceiling,
            colorscale=[[0, f"var({colour}-clear)"], [1, f"var({colour})"]],
            xgap=1,
            ygap=1,
            colorbar={
                **ticks,
                "thickness": 10,
                "outlinewidth": 0,
                "len": 1.0,
                "nticks": 6,
            },
            hovertemplate=f"layer %{{y}}, head %{{x}}<br>%{{{'customdata' if log else 'z'}:.1%}} "
            f"on {group}<extra></extra>",
        )
    )
    figure.update_layout(
        template="none",
        height=int(np.clip(90 + 13 * n_layers, 220, 560)),
        margin={**MARGIN, "r": 0},
        uirevision=f"map {n_layers} {n_heads}",
        meta={
            "alt": f"Map of {n_layers} layers by {n_heads} heads: share of attention on {group}. "
            f"Mean {known.mean():.0%}; most in layer {layer}, head {head}: "
            f"{known[layer, head]:.0%}."
        },
        shapes=[] if chosen is None else [_frame(*chosen)],
    )
    figure.update_xaxes(
        title="head", showgrid=False, zeroline=False, dtick=max(1, n_heads // 12), fixedrange=True
    )
    figure.update_yaxes(
        title="layer",
        showgrid=False,
        zeroline=False,
        dtick=max(1, round(n_layers / 10)),
        autorange="reversed",
        fixedrange=True,
    )
    return figure


def _frame(layer: int, head: int) -> dict:
    return {
        "type": "rect",
        "x0": head - 0.5,
        "x1": head + 0.5,
        "y0": layer - 0.5,
        "y1": layer + 0.5,
        "line": {"color": "var(--body-text-color)", "width": 2},
    }


def shares_along(
    shares: np.ndarray,
    groups: Sequence[str],
    tokens: Sequence[str],
    *,
    title: str,
    position: int | None = None,
) -> go.Figure:
    """One head, seen from every position: its attention by group, stacked to the whole.

    shares: (q, n) along `groups`    tokens: q labels    position: the one that is marked
    """
    length = len(shares)
    steps = np.arange(length)
    # Every position is a step one wide, so that a text of one token is still an area.
    x = np.concatenate([[-0.5], steps, [length - 0.5]]).astype(np.float32)
    labels = [tokens[0], *tokens, tokens[-1]] if length else []
    figure = go.Figure()
    for index, group in enumerate(groups):
        values = shares[:, index]
        if not np.nan_to_num(values).any():
            continue
        figure.add_scatter(
            x=x,
            y=np.concatenate([values[:1], values, values[-1:]]),
            name=group,
            mode="lines",
            stackgroup="attention",
            line={"shape": "hvh", "width": 0.5, "color": colour_of(group)},
            fillcolor=colour_of(group),
            customdata=None if figure.data else labels,  # once is enough
            hovertemplate=("" if figure.data else "<b>%{customdata}</b><br>")
            + f"{group} %{{y:.1%}}<extra></extra>",
        )
    figure.update_layout(
        template="none",
        height=300,
        margin={**MARGIN, "t": 40, "b": 60 if length <= LABELLED else 44},
        uirevision=f"along {length}",
        hovermode="x unified",
        showlegend=True,
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        meta={"alt": f"{title}: " + _means(shares, groups)},
    )
    if position is not None:
        figure.add_shape(
            type="rect",
            x0=position - 0.5,
            x1=position + 0.5,
            y0=0,
            y1=1,
            line={"color": "var(--body-text-color)", "width": 2},
        )
    figure.update_yaxes(range=[0, 1], tickformat=".0%", fixedrange=True, showgrid=False)
    figure.update_xaxes(range=[-0.5, length - 0.5], showgrid=False, zeroline=False)
    if length <= LABELLED:
        figure.update_xaxes(
            tickmode="array", tickvals=list(range(length)), ticktext=list(tokens), tickangle=-60
        )
    else:
        figure.update_xaxes(title="position")
    return figure


def _means(shares: np.ndarray, groups: Sequence[str]) -> str:
    means = np.nan_to_num(shares).mean(axis=0)
    return "on average " + ", ".join(
        f"{mean:.0%} on {group}" for group, mean in zip(groups, means, strict=True) if mean > 0
    )

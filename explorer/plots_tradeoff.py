"""Curves of the trade-off: shares in one figure, sizes of what is added in another, never mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import plotly.graph_objects as go

from explorer.plots import COLOURS, MARGIN
from explorer.tradeoff import FIRST, Curve, Measure, TradeOff

Along = Literal["length", "slots"]

HEIGHT = 380
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
TITLES: dict[Measure, str] = {
    "share": "share α of the prefix",
    "behind": "share without the first slot",
    "ratio": "size of what is added, against the rest<br>‖added‖ / ‖rest‖",
    "part": "size of what is added, of both<br>‖added‖ / (‖added‖ + ‖rest‖)",
    "size": "size of what is added<br>‖added‖",
}


def tradeoff_chart(found: TradeOff, measure: Measure, along: Along = "length") -> go.Figure:
    """Mean over texts with the range between them, against the length of the text or, for texts
    of one length, against the number of slots.

    Only curves that have the measure: what is beside the softmax has no share, and is named so.
    """
    at = slots_length(found)
    lines = _by_length(found, measure) if along == "length" else _by_slots(found, measure, at)
    figure, told = go.Figure(), []
    unit = "tokens" if along == "length" else "slots"
    for turn, name, xs, (mean, low, high) in lines:
        if xs:
            _line(figure, turn, name, xs, mean, low, high)
            told.append(
                f"{name} from {mean[0]:.3f} at {xs[0]} {unit} to {mean[-1]:.3f} at {xs[-1]}"
            )
    beside = _beside(found) if measure in ("share", "behind") else []
    if beside:
        told.append(f"outside of the softmax, without a share: {', '.join(beside)}")
    ticks = found.lengths
    if along == "slots":
        ticks = sorted({x for _, _, xs, _ in lines for x in xs if x.bit_count() == 1})
        if not told:
            told.append("nothing here comes in several numbers of slots")
    title = "tokens of text" if along == "length" else f"slots, in front of {at} tokens"
    _dress(figure, measure, f"trade-off {measure} {along}", title, ticks)
    if beside:  # below the title of the axis
        figure.add_annotation(
            text="<br>".join(["outside of the softmax, without a share:", *beside]),
            **{"xref": "paper", "yref": "paper", "x": 0, "y": 0, "align": "left"},
            **{"xanchor": "left", "yanchor": "top", "xshift": -56, "yshift": -52},
            showarrow=False,
            font={"size": 11},
        )
        figure.update_layout(height=HEIGHT + 16 * len(beside), margin_b=80 + 16 * len(beside))
    named = TITLES[measure].replace("<br>", ", ")
    figure.update_layout(meta={"alt": f"{named}: {'; '.join(told) or 'nothing yet'}."})
    return figure


def slots_length(found: TradeOff) -> int:
    """The length of text at which numbers of slots are compared: short enough for all."""
    return max((n for n in found.lengths if n <= FIRST), default=found.lengths[0])


def _beside(found: TradeOff) -> list[str]:
    """The kinds that add something and have no share, as far as they have been measured."""
    names = {}
    for curve in found.curves:
        if np.isfinite(curve.ratio).any() and not np.isfinite(curve.share).any():
            names[curve.kind] = None
    return list(names)


# Which colour, name, where on the x axis, and mean, least and largest there
Line = tuple[int, str, list[int], tuple[np.ndarray, np.ndarray, np.ndarray]]


def _by_length(found: TradeOff, measure: Measure) -> list[Line]:
    lines = []
    for turn, curve in enumerate(curve for curve in found.curves if not curve.brief):
        band = np.stack(curve.band(measure))
        told = np.isfinite(band[0])
        xs = [n for n, is_there in zip(found.lengths, told, strict=True) if is_there]
        lines.append((turn, curve.name, xs, tuple(band[:, told])))
    return lines


def _by_slots(found: TradeOff, measure: Measure, length: int) -> list[Line]:
    """Of the kinds that come in more than one number of slots."""
    at = found.lengths.index(length)
    kinds: dict[str, list[Curve]] = {}
    for curve in found.curves:
        kinds.setdefault(curve.kind, []).append(curve)
    lines = []
    for turn, (kind, curves) in enumerate(kinds.items()):
        if len(curves) < 2:
            continue
        bands = {c.slots: [line[at] for line in c.band(measure)] for c in curves}
        xs = sorted(n for n, band in bands.items() if np.isfinite(band[0]))
        band = np.array([bands[n] for n in xs]).reshape(-1, 3).T
        lines.append((turn, kind, xs, tuple(band)))
    return lines


def _line(
    figure: go.Figure,
    turn: int,
    name: str,
    xs: Sequence[int],
    mean: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> None:
    """The range between texts, and the mean through it."""
    colour = COLOURS[turn % len(COLOURS)]
    for values, fill in ((low, None), (high, "tonexty")):
        figure.add_scatter(
            x=xs,
            y=values,
            mode="lines",
            line={"color": colour, "width": 0},
            fill=fill,
            fillcolor=colour.replace(")", "-soft)"),
            hoverinfo="skip",
            showlegend=False,
        )
    figure.add_scatter(
        x=xs,
        y=mean,
        name=name,
        mode="lines+markers",
        line={"color": colour, "width": 2.5, "dash": "solid" if turn < len(COLOURS) else "dot"},
        marker={"symbol": SYMBOLS[turn % len(SYMBOLS)], "size": 7},
        customdata=np.stack([low, high], -1),
        hovertemplate=f"{name}: %{{y:.3f}} (%{{customdata[0]:.3f}}–%{{customdata[1]:.3f}})"
        "<extra></extra>",
    )


def _dress(
    figure: go.Figure, measure: Measure, revision: str, title: str, ticks: Sequence[int]
) -> None:
    figure.update_layout(
        template="none",
        height=HEIGHT,
        margin={**MARGIN, "t": 96, "l": 72},
        hovermode="x unified",
        uirevision=revision,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    )
    figure.update_xaxes(
        title={"text": title, "standoff": 8},
        type="log",
        tickvals=list(ticks),
        ticktext=[str(n) for n in ticks],
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(
        title=TITLES[measure],
        tickformat=".0%" if measure in ("share", "behind") else None,
        range=[0, 1.02] if measure in ("share", "part") else None,
        rangemode="tozero",
        zeroline=False,
    )

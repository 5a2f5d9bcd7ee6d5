"""Curves of the trade-off: shares in one figure, sizes of what is added in another, never mixed."""

from __future__ import annotations

import plotly.graph_objects as go

from explorer.plots import MARGIN
from explorer.tradeoff import Measure, TradeOff

COLOURS = tuple(f"var(--method-{n})" for n in range(1, 7))
TITLES: dict[Measure, str] = {
    "share": "share α of the prefix",
    "behind": "share without the first slot",
    "ratio": "‖added‖ / ‖rest‖",
}


def tradeoff_chart(found: TradeOff, measure: Measure) -> go.Figure:
    """Mean over texts with the range between them, against the length of the text.

    Only curves that have the measure: what is beside the softmax has no share.
    """
    figure, told = go.Figure(), []
    for index, curve in enumerate(found.curves):
        mean, low, high = curve.band(measure)
        colour = COLOURS[index % len(COLOURS)]
        points = [i for i, value in enumerate(mean) if value == value]
        if not points:
            continue
        lengths = [found.lengths[i] for i in points]
        figure.add_scatter(
            x=lengths,
            y=mean[points],
            name=curve.name,
            mode="lines+markers",
            line={"color": colour, "width": 2.5, "dash": "solid" if index < 6 else "dot"},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": (high - mean)[points],
                "arrayminus": (mean - low)[points],
                "thickness": 1,
                "width": 3,
            },
            hovertemplate=f"{curve.name}: %{{y:.3f}}<extra></extra>",
        )
        first, last = points[0], points[-1]
        told.append(
            f"{curve.name} from {mean[first]:.3f} at {found.lengths[first]} tokens to "
            f"{mean[last]:.3f} at {found.lengths[last]}"
        )
    figure.update_layout(
        template="none",
        height=340,
        margin={**MARGIN, "t": 60, "l": 56},
        hovermode="x unified",
        uirevision=f"trade-off {measure}",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        meta={"alt": f"{TITLES[measure]}: {'; '.join(told) or 'nothing yet'}."},
    )
    figure.update_xaxes(
        title="tokens of text",
        type="log",
        tickvals=list(found.lengths),
        ticktext=[str(n) for n in found.lengths],
        showgrid=False,
        zeroline=False,
    )
    share = measure != "ratio"
    figure.update_yaxes(
        title=TITLES[measure],
        tickformat=".0%" if share else None,
        rangemode="tozero",
        zeroline=False,
    )
    return figure

"""The lessons' figures, one a step: numbers of `lessons.recipes` in, plotly figure out.

They take what the step's sliders stand at: `lessons.place`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from explorer.lessons import of_slots, place
from explorer.plots import MARGIN

Result = Mapping[str, Any]

PREFIX, SINK, PROMPT, OURS = (
    f"var(--{name})" for name in ("prefix", "sink", "prompt", "generated")
)
_LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}


def figure(number: int, result: Result, x: int, y: int) -> go.Figure:
    """The figure of a step. x, y: where its sliders stand, as indices into `lessons.stops`"""
    return _FIGURES[number - 1](result, *place(number, result, x, y))


def _shares(result: Result, slots: int, _: None) -> go.Figure:
    """One bar for every number of slots, the chosen one framed: who gets the attention."""
    rows = result["rows"]
    labels = [str(row["slots"]) for row in rows]
    drawn = go.Figure()
    for group, colour in (("prefix", PREFIX), ("sink", SINK), ("prompt", PROMPT)):
        values = [row["shares"][group] for row in rows]
        drawn.add_bar(
            x=labels,
            y=values,
            name={"sink": "sink (first token)", "prompt": "your text"}.get(group, group),
            marker={"color": colour},
            text=[f"{v:.0%}" if v >= 0.04 else "" for v in values],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": "white"},
            hovertemplate=f"%{{x}} slots: %{{y:.1%}} on {group}<extra></extra>",
        )
    chosen = of_slots(rows, slots)["shares"]
    _dress(
        drawn,
        "shares",
        f"{slots} slots in front: {chosen['prefix']:.0%} of attention on the prefix, "
        f"{chosen['sink']:.0%} on the sink, {chosen['prompt']:.0%} on the text.",
    )
    drawn.update_layout(barmode="stack", bargap=0.25, shapes=[_frame(labels.index(str(slots)))])
    drawn.update_layout(legend={**_LEGEND, "traceorder": "normal"})
    drawn.update_xaxes(title="slots in front", type="category")
    drawn.update_yaxes(title="share of attention", range=[0, 1], tickformat=".0%")
    return drawn


def _one_softmax(result: Result, slots: int, length: int) -> go.Figure:
    """Share against the length of the text: all prefixes faint, the chosen one with its first slot
    and without."""
    lengths = result["lengths"]
    drawn = go.Figure()
    for curve in result["curves"]:
        if curve["slots"] not in (1, slots):
            drawn.add_scatter(
                x=lengths,
                y=curve["behind"],
                mode="lines",
                line={"color": PREFIX, "width": 1},
                opacity=0.35,
                showlegend=False,
                hovertemplate=f"{curve['slots']} slots: %{{y:.1%}}<extra></extra>",
            )
    curve = of_slots(result["curves"], slots)
    _band(drawn, lengths, curve["low"], curve["high"], PREFIX)
    drawn.add_scatter(
        x=lengths,
        y=curve["mean"],
        name="whole prefix α",
        mode="lines",
        line={"color": PREFIX, "width": 1.5, "dash": "dot"},
        hovertemplate="α %{y:.1%}<extra></extra>",
    )
    drawn.add_scatter(
        x=lengths,
        y=curve["behind"],
        name=f"instruction: {curve['slots']} slots without the first",
        mode="lines+markers",
        line={"color": PREFIX, "width": 3},
        hovertemplate="instruction %{y:.1%}<extra></extra>",
    )
    drawn.add_scatter(
        x=lengths,
        y=[1 - value for value in curve["mean"]],
        name="text",
        mode="lines",
        line={"color": PROMPT, "width": 2},
        hovertemplate="text %{y:.1%}<extra></extra>",
    )
    _dress(
        drawn,
        f"softmax {slots}",
        f"{curve['slots']} slots: from {lengths[0]} to {lengths[-1]} tokens of text the "
        f"instruction's share goes from {curve['behind'][0]:.1%} to {curve['behind'][-1]:.1%}, the "
        f"whole prefix's from {curve['mean'][0]:.0%} to {curve['mean'][-1]:.0%}.",
    )
    _along(drawn, lengths, length)
    drawn.update_yaxes(title="share of attention", tickformat=".0%", rangemode="tozero")
    return drawn


def _gate(result: Result, opening: float, length: int) -> go.Figure:
    """How large the added part is, against the length: in one softmax and behind the gate."""
    lengths = result["lengths"]
    gate, soft = result["gates"][result["openings"].index(opening)], result["one softmax"]
    drawn = go.Figure()
    for band, name, colour in (
        (soft, "in one softmax", PREFIX),
        (gate, f"behind a gate open by {opening}", OURS),
    ):
        _band(drawn, lengths, band["size low"], band["size high"], colour)
        drawn.add_scatter(
            x=lengths,
            y=band["size mean"],
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 3},
            hovertemplate=f"{name} %{{y:.3f}}<extra></extra>",
        )
    _dress(
        drawn,
        "gate",
        f"Gate open by {opening}: from {lengths[0]} to {lengths[-1]} tokens the size of what is "
        f"added goes from {gate['size mean'][0]:.2f} to {gate['size mean'][-1]:.2f}; in one "
        f"softmax from {soft['size mean'][0]:.2f} to {soft['size mean'][-1]:.2f}.",
    )
    _along(drawn, lengths, length)
    drawn.update_yaxes(title="size of what is added", rangemode="tozero")
    return drawn


def _memory(result: Result, slots: int, _: None) -> go.Figure:
    """Eigenvalues of what each way adds to a head, over their largest."""
    both = of_slots(result["spectra"], slots)
    lines = {
        f"{slots} slots in front": (both["front"], PREFIX, "solid"),
        f"these {slots} poured into M": (both["poured"], OURS, "dash"),
        f"M trained, {result['steps']} steps": (result["trained"], OURS, "solid"),
    }
    drawn = go.Figure()
    for name, (line, colour, dash) in lines.items():
        drawn.add_scatter(
            x=list(range(1, len(line["decay"]) + 1)),
            y=line["decay"],
            name=f"{name}: {line['axes']:.1f} axes",
            mode="lines+markers" if len(line["decay"]) < 3 else "lines",
            line={"color": colour, "width": 3, "dash": dash},
            hovertemplate=f"{name}, axis %{{x}}: %{{y:.2e}}<extra></extra>",
        )
    told = ", ".join(f"{name} {line['axes']:.1f}" for name, (line, *_) in lines.items())
    _dress(drawn, "memory", f"Axes used by what is added to a head: {told}.")
    drawn.update_xaxes(
        title="axis of the head, largest first", range=[0.5, result["head_dim"] + 0.5]
    )
    drawn.update_yaxes(
        title="variance / largest", type="log", exponentformat="power", range=[-6, 0.2]
    )
    return drawn


def _cache(result: Result, number: int, _: None) -> go.Figure:
    """What gives a solved prefix away, beside an ordinary one."""
    names = ("covered", "prompt_effect")
    words = (
        "attention in the<br>head that<br>listens least",
        "what the question<br>still changes<br>in the answer",
    )
    drawn = go.Figure()
    for name, colour in (("ordinary prefix", SINK), ("solved prefix", PREFIX)):
        values = [result["signs"][name][one] for one in names]
        drawn.add_bar(
            x=list(words),
            y=values,
            name=name,
            marker={"color": colour},
            text=[f"{value:.1%}" for value in values],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"{name}: %{{y:.2%}}<extra></extra>",
        )
    said, solved = result["said"][number - 1], result["signs"]["solved prefix"]
    _dress(
        drawn,
        "cache",
        f"Asked “{said['prompt']}” the model says “{said['with']}”. The solved prefix has "
        f"{solved['covered']:.1%} of attention in the head that listens to it least; an ordinary "
        f"one {result['signs']['ordinary prefix']['covered']:.1%}.",
    )
    drawn.update_layout(barmode="group", bargap=0.35, margin={**MARGIN, "t": 56, "b": 70})
    drawn.update_xaxes(tickangle=0)
    drawn.update_yaxes(range=[0, 1.12], tickformat=".0%")
    return drawn


_FIGURES = (_shares, _one_softmax, _gate, _memory, _cache)


def _band(
    drawn: go.Figure, lengths: Sequence[int], low: Sequence, high: Sequence, colour: str
) -> None:
    """Least to largest over the texts."""
    clear, soft = (colour.replace(")", f"-{ending})") for ending in ("clear", "soft"))
    for values, fill in ((low, None), (high, "tonexty")):
        drawn.add_scatter(
            x=lengths,
            y=values,
            mode="lines",
            line={"color": clear, "width": 0},
            fill=fill,
            fillcolor=soft,
            hoverinfo="skip",
            showlegend=False,
        )


def _along(drawn: go.Figure, lengths: Sequence[int], length: int) -> None:
    drawn.update_xaxes(
        title="tokens of text",
        type="log",
        tickvals=list(lengths),
        ticktext=[str(length) for length in lengths],
    )
    drawn.add_vline(x=length, line={"color": "var(--body-text-color)", "width": 1.5})


def _dress(drawn: go.Figure, of: str, alt: str) -> None:
    drawn.update_layout(
        template="none",
        height=340,
        margin={**MARGIN, "t": 56, "l": 60},
        legend=_LEGEND,
        hovermode="x unified",
        uirevision=f"lesson {of}",
        meta={"alt": alt},
    )
    drawn.update_xaxes(zeroline=False, showgrid=False)


def _frame(x: int) -> dict:
    return {
        "type": "rect",
        "x0": x - 0.46,
        "x1": x + 0.46,
        "y0": 0,
        "y1": 1,
        "line": {"color": "var(--body-text-color)", "width": 2},
    }

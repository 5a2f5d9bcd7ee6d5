"""The lessons' figures, one a step: numbers of `lessons.recipes` in, plotly figure out.

words: what axes and lines are called, from the lesson    known: its `facts`, where the sliders are
Each may return further numbers that the finding in words ("alt") speaks of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from explorer.lessons import facts, lessons, of_slots
from explorer.plots import MARGIN, log_ticks

Result = Mapping[str, Any]
Words = Mapping[str, str]

PREFIX, SINK, PROMPT, OURS = (
    f"var(--{name})" for name in ("prefix", "sink", "prompt", "generated")
)
LAST = 1001  # in a legend, after what has no rank


def figure(number: int, result: Result, x: int, y: int) -> go.Figure:
    """The figure of a step. x, y: where its sliders stand, as indices into `lessons.stops`"""
    words = lessons()[number - 1].figure
    known = facts(number, result, x, y)
    drawn = go.Figure()
    more = _FIGURES[number - 1](drawn, words, known, result) or {}
    drawn.update_layout(
        template="none",
        height=340,
        hovermode="x unified",
        meta={"alt": words["alt"].format(**known, **more)},
    )
    drawn.update_layout(margin={**MARGIN, "t": 56, "l": 64, "b": 76 if number == 5 else 44})
    drawn.update_layout(
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    )
    drawn.update_xaxes(zeroline=False, showgrid=False)
    drawn.update_xaxes(title={"text": words.get("x"), "font": {"size": 12}})
    drawn.update_yaxes(title={"text": words["y"], "font": {"size": 12}, "standoff": 8})
    return drawn


def _shares(drawn: go.Figure, words: Words, known: Result, result: Result) -> None:
    """One bar for every number of slots, the chosen one framed: who gets the attention."""
    rows = result["rows"]
    labels = [str(row["slots"]) for row in rows]
    for group, colour in (("prefix", PREFIX), ("sink", SINK), ("prompt", PROMPT)):
        values = [row["shares"][group] for row in rows]
        drawn.add_bar(
            x=labels,
            y=values,
            name=words[group],
            marker={"color": colour},
            text=[f"{v:.0%}" if v >= 0.04 else "" for v in values],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            textfont={"color": colour.replace(")", "-ink)"), "size": 11},
            hovertemplate=f"{words[group]}: %{{y:.1%}}<extra></extra>",
        )
    drawn.update_layout(barmode="stack", bargap=0.15)
    drawn.update_layout(shapes=[_frame(labels.index(str(known["slots"])))], uirevision="shares")
    drawn.update_xaxes(type="category")
    drawn.update_yaxes(range=[0, 1], tickformat=".0%")


def _one_softmax(drawn: go.Figure, words: Words, known: Result, result: Result) -> Result:
    """Share against the length of the text: all prefixes faint, the chosen one with its first slot
    and without."""
    lengths, slots = result["lengths"], known["slots"]
    others = [one for one in result["curves"] if one["slots"] not in (1, slots)]
    for curve in others:
        each = words["each"].format(slots=curve["slots"])
        drawn.add_scatter(
            x=lengths,
            y=curve["behind"],
            name=words["other"],
            mode="lines",
            line={"color": PREFIX, "width": 1},
            opacity=0.35,
            legendrank=LAST,
            showlegend=curve is others[0],
            hovertemplate=f"{each}: %{{y:.1%}}<extra></extra>",
        )
    curve = of_slots(result["curves"], slots)
    _band(drawn, lengths, curve["low"], curve["high"], PREFIX, words["band"])
    text = [1 - value for value in curve["mean"]]
    for name, values, line in (
        (words["whole"], curve["mean"], {"color": PREFIX, "width": 1.5, "dash": "dot"}),
        (words["behind"].format(slots=slots), curve["behind"], {"color": PREFIX, "width": 3}),
        (words["text"], text, {"color": PROMPT, "width": 2}),
    ):
        drawn.add_scatter(
            x=lengths,
            y=values,
            name=name,
            mode="lines+markers" if line["width"] == 3 else "lines",
            line=line,
            hovertemplate=f"{name} %{{y:.1%}}<extra></extra>",
        )
    _along(drawn, lengths, known["length"])
    drawn.update_layout(uirevision=f"softmax {slots}")
    drawn.update_yaxes(tickformat=".0%", rangemode="tozero")
    return {
        "longest": lengths[-1],
        "behind_long": curve["behind"][-1],
        "whole_short": curve["mean"][0],
        "whole_long": curve["mean"][-1],
    }


def _gate(drawn: go.Figure, words: Words, known: Result, result: Result) -> Result:
    """How large the added part is, against the length: in one softmax and behind the gate."""
    lengths, opening = result["lengths"], known["opening"]
    gate, soft = result["gates"][result["openings"].index(opening)], result["one softmax"]
    for band, name, colour in (
        (soft, words["soft"], PREFIX),
        (gate, words["gate"].format(opening=opening), OURS),
    ):
        told = words["band"] if colour == OURS else None
        _band(drawn, lengths, band["size low"], band["size high"], colour, told)
        drawn.add_scatter(
            x=lengths,
            y=band["size mean"],
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 3},
            hovertemplate=f"{name} %{{y:.3f}}<extra></extra>",
        )
    _along(drawn, lengths, known["length"])
    drawn.update_layout(uirevision="gate")
    drawn.update_yaxes(rangemode="tozero")
    return {
        "longest": lengths[-1],
        "gate_end": gate["size mean"][-1],
        "soft_end": soft["size mean"][-1],
    }


def _memory(drawn: go.Figure, words: Words, known: Result, result: Result) -> None:
    """Eigenvalues of what each way adds to a head, over their largest."""
    both = of_slots(result["spectra"], known["slots"])
    for which, line, colour, dash in (
        ("front", both["front"], PREFIX, "solid"),
        ("poured", both["poured"], OURS, "dash"),
        ("trained", result["trained"], OURS, "solid"),
    ):
        name = words[which].format(**known)
        drawn.add_scatter(
            x=list(range(1, len(line["decay"]) + 1)),
            y=line["decay"],
            name=name,
            mode="lines+markers" if len(line["decay"]) < 3 else "lines",
            line={"color": colour, "width": 3, "dash": dash},
            hovertemplate=f"{name}, %{{x}}: %{{y:.2e}}<extra></extra>",
        )
    drawn.update_layout(uirevision="memory")
    drawn.update_xaxes(range=[0.5, known["head_dim"] + 0.5])
    drawn.update_yaxes(type="log", range=[-6, 0.2], **log_ticks([1e-6, 1]))


def _cache(drawn: go.Figure, words: Words, known: Result, result: Result) -> None:  # noqa: ARG001
    """What gives a solved prefix away, beside an ordinary one."""
    signs = result["signs"]
    for which, colour in (("ordinary", SINK), ("solved", PREFIX)):
        measured = signs[f"{which} prefix"]
        values = [measured["covered"], measured["prompt_effect"]]
        drawn.add_bar(
            x=[words["covered"], words["effect"]],
            y=values,
            name=words[which],
            marker={"color": colour},
            text=[f"{value:.1%}" for value in values],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"{words[which]}: %{{y:.2%}}<extra></extra>",
        )
    drawn.update_layout(barmode="group", bargap=0.35, uirevision="cache")
    drawn.update_xaxes(tickangle=0)
    drawn.update_yaxes(range=[0, 1.12], tickformat=".0%")


_FIGURES = (_shares, _one_softmax, _gate, _memory, _cache)


def _band(
    drawn: go.Figure,
    lengths: Sequence[int],
    low: Sequence,
    high: Sequence,
    colour: str,
    name: str | None,
) -> None:
    """Least to largest over the texts. name: in the legend, where it has one"""
    for values, fill in ((low, None), (high, "tonexty")):
        drawn.add_scatter(
            x=lengths,
            y=values,
            mode="lines",
            line={"color": colour, "width": 0},
            fill=fill,
            fillcolor=colour.replace(")", "-soft)"),
            hoverinfo="skip",
            name=name,
            legendrank=LAST,
            showlegend=bool(fill and name),
        )


def _along(drawn: go.Figure, lengths: Sequence[int], length: int) -> None:
    """Lengths doubling along the axis, the chosen one marked."""
    drawn.update_xaxes(
        type="log",
        tickvals=list(lengths),
        ticktext=[str(length) for length in lengths],
        tickangle=0,
    )
    drawn.add_vline(x=length, line={"color": "var(--body-text-color)", "width": 1.5})


def _frame(x: int) -> dict:
    return {
        "type": "rect",
        "x0": x - 0.46,
        "x1": x + 0.46,
        "y0": 0,
        "y1": 1,
        "line": {"color": "var(--body-text-color)", "width": 2},
    }

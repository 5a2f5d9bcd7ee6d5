"""The panels below the map: one row, sorted heads, gates, what was written, files.

Here they are laid out; `look_drawing` says what they show, and only while they are open.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

import gradio as gr

from explorer import plots_look
from explorer.errors import ExplorerError
from explorer.heads import Rule
from explorer.session.look_views import HeadsView
from explorer.ui.file_button import FileButton, file_button
from explorer.ui.live_plot import LivePlot
from explorer.ui.look_view import table

CONVENTION = """
<p class="hint">Gates as this program trains and applies them: tanh(g), one a head; 0 is shut. Other
programs differ: peft holds the raw g of a layer, litgpt the raw g of a head. Beside it, for
everything that adds to attention instead of competing in its softmax, how large the added part is
against the rest, seen from the chosen token. An opening or a size is no share of attention, so
neither is mixed with the map above.</p>
<p class="hint">Read as a mixture of experts (arXiv 2502.03029, Eq. 10), every token is an expert
with its weight G; behind a zero-gate every prompt is one more, with tanh(g)·G′. Tokens share out 1,
prompts share out the opening of their gate.</p>
"""
NO_ROW = (
    "Press Look. Of a long text only the rows of its last tokens are kept: "
    "“Read this row” asks the model for any other."
)


@dataclass(frozen=True)
class Panels:
    """The components below the map. parts: by name, as `look_drawing` calls them

    accordions: by the name of the panel
    """

    parts: dict[str, gr.components.Component]
    accordions: dict[str, gr.Accordion]
    scores: gr.Checkbox
    read: gr.Button
    rule: gr.Dropdown
    find: gr.Button
    found: LivePlot
    csv: FileButton
    json: FileButton


@dataclass(frozen=True)
class RowPanel:
    """The components of the row. parts: by name, as `look_drawing` calls them"""

    accordion: gr.Accordion
    scores: gr.Checkbox
    read: gr.Button
    parts: dict[str, gr.components.Component]


def row_panel() -> RowPanel:
    """Lay out the row of the chosen head and token."""
    title = "One row: the tokens this head looks at most from the chosen token"
    with gr.Accordion(title, open=True) as panel:
        with gr.Row(elem_classes=["actions"]):
            scores = gr.Checkbox(
                False, label="q·k scores instead of weights", elem_id="look-scores", min_width=220
            )
            read = gr.Button(
                "Read this row", size="sm", scale=0, min_width=130, elem_id="look-read"
            )
        with gr.Row():
            row = LivePlot(packed=True, empty=NO_ROW, elem_id="look-row")
            whole = LivePlot(packed=True, elem_id="look-row-along")
    return RowPanel(panel, scores, read, {"row": row, "row_along": whole})


def panels(row: RowPanel) -> Panels:
    """Lay out the others, and take the row in."""
    accordions, parts = {"row": row.accordion}, dict(row.parts)
    with gr.Accordion("Heads: sorted, and found by what they do", open=False) as one:
        accordions["heads"] = one
        parts["sorted"] = LivePlot(
            packed=True, empty="All heads, largest share first.", elem_id="look-sorted"
        )
        with gr.Row(elem_classes=["actions"]):
            rule = gr.Dropdown(
                list(get_args(Rule)),
                value="induction",
                label="Find heads by rule",
                info="Induction: on random tokens said twice, the one after the earlier copy.",
                min_width=240,
            )
            find = gr.Button("Find", scale=0, min_width=120, elem_id="look-find")
        found = LivePlot(
            packed=True,
            empty="Press Find; click a bar to look at that head.",
            elem_id="look-found",
        )
    with gr.Accordion("While it wrote: every layer, token by token", open=False) as one:
        accordions["written"] = one
        parts["written"] = LivePlot(
            packed=True,
            empty="Let the model go on for a few tokens, and watch here.",
            elem_id="look-written",
        )
    with gr.Accordion("Beside the softmax: gates, and what is added", open=False) as one:
        accordions["gates"] = one
        gr.HTML(CONVENTION)
        with gr.Row():
            parts["gates"] = LivePlot(
                packed=True,
                empty="Look with a trained zero-gate in front to see its gates; with anything that "
                "adds to attention, such as PrefixMemory, to see how much it adds.",
                elem_id="look-gates",
            )
            parts["ratio"] = LivePlot(packed=True, elem_id="look-ratio")
        parts["gate_bars"] = LivePlot(packed=True, elem_id="look-bars")
    with gr.Accordion("Numbers", open=False) as one:
        accordions["numbers"] = one
        with gr.Row(elem_classes=["actions"]):
            csv = file_button("CSV", "look-csv")
            whole = file_button("JSON", "look-json")
        gr.HTML("<p class='hint'>Figures: the camera above each saves a PNG, the disk an SVG.</p>")
        parts["table"] = gr.HTML(table(None, ""), elem_id="look-table")
    return Panels(parts, accordions, row.scores, row.read, rule, find, found, csv, whole)


def found_figure(view: HeadsView):
    """Heads that fit a rule, best first."""
    goal = view.found.rule.removeprefix("most ")
    what = "share by induction" if goal == "induction" else f"share on {goal}"
    return plots_look.sorted_heads(view.found.scores, what, colour="var(--prompt)", shares=True)


def head_named(text: str) -> tuple[int, int] | None:
    """ "L3 H4" → (3, 4)"""
    match = re.fullmatch(r"L(\d+) H(\d+)", str(text))
    return (int(match[1]), int(match[2])) if match else None


def positions_in(text: str) -> list[int]:
    """ "2-4, 7" → [2, 3, 4, 7]"""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        match = re.fullmatch(r"(\d{1,6})(?:\s*[-–]\s*(\d{1,6}))?", part)
        if not match:
            raise ExplorerError(f"“{part}” is no range of tokens.", "Write it as 2-4, 7.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ExplorerError(f"“{part}” runs backwards.", f"Write it as {last}-{first}.")
        found.update(range(first, last + 1))
    if not found:
        raise ExplorerError("No tokens are marked.", "Write them as 2-4, 7, or Shift-click some.")
    return sorted(found)

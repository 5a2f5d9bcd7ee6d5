"""What Look shows below the map: one row, sorted heads, gates, what was written, files.

The panels are laid out by `panels` and filled by `always` (with every choice) and `once` (with
every text), from what the session holds; only finding heads asks the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, get_args

import gradio as gr
import numpy as np

from explorer import plots, plots_look, plots_training
from explorer.errors import ExplorerError
from explorer.heads import Rule
from explorer.session.look import HeadsView, LookView, Writing
from explorer.ui.live_plot import LivePlot
from explorer.ui.look_view import Choice, position, scaled

CONVENTION = (
    "<p class='hint'>Gates as this program trains and applies them: tanh(g), one a head; 0 is "
    "shut. An opening is no share of attention. Other programs differ: peft holds the raw g of a "
    "layer, litgpt the raw g of a head.</p>"
)
EXPERTS = (
    "<p class='hint'>Read as a mixture of experts (arXiv 2502.03029, Eq. 10), every token is an "
    "expert with its weight G; behind a zero-gate every prompt is one more, with tanh(α)·G′. "
    "Tokens share out 1, prompts share out the opening of their gate.</p>"
)
TOP = 12


@dataclass(frozen=True)
class Panels:
    """The components below the map."""

    scores: gr.Checkbox
    row: LivePlot
    ranked: LivePlot
    rule: gr.Dropdown
    find: gr.Button
    found: LivePlot
    written: LivePlot
    gates: LivePlot
    gate_bars: LivePlot
    table: gr.HTML
    csv: gr.DownloadButton
    json: gr.DownloadButton

    @property
    def always(self) -> list[gr.components.Component]:
        return [self.row, self.ranked]

    @property
    def once(self) -> list[gr.components.Component]:
        return [self.written, self.gates, self.gate_bars]


def panels(table: str) -> Panels:
    """Lay them out. table: what the numbers show at first"""
    with gr.Accordion("One row: the tokens this head looks at most", open=False):
        scores = gr.Checkbox(False, label="q·k scores instead of weights", elem_id="look-scores")
        gr.HTML(EXPERTS)
        row = LivePlot(
            height=200,
            empty="Press Look; longer texts than about a hundred tokens keep no rows.",
            elem_id="look-row",
        )
    with gr.Accordion("Heads: sorted, and found by what they do", open=False):
        ranked = LivePlot(
            height=260, empty="All heads, largest share first.", elem_id="look-sorted"
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
            height=260, empty="Press Find; click a bar to look at that head.", elem_id="look-found"
        )
    with gr.Accordion("While it wrote: every layer, token by token", open=False):
        written = LivePlot(
            height=260,
            empty="Let the model go on for a few tokens, and watch here.",
            elem_id="look-written",
        )
    with gr.Accordion("Gates of what is in front", open=False):
        gr.HTML(CONVENTION)
        with gr.Row():
            gates = LivePlot(
                height=260,
                empty="Put a trained zero-gate adapter in front to see its gates.",
                elem_id="look-gates",
            )
            bars = LivePlot(height=260, empty="The widest open come first.", elem_id="look-bars")
    with gr.Accordion("Numbers", open=False):
        with gr.Row(elem_classes=["actions"]):
            csv = gr.DownloadButton("CSV", size="sm", scale=0, min_width=90)
            whole = gr.DownloadButton("JSON", size="sm", scale=0, min_width=90)
            gr.HTML("<p class='hint'>Figures: the camera above each saves a PNG or an SVG.</p>")
        numbers = gr.HTML(table, elem_id="look-table")
    return Panels(scores, row, ranked, rule, find, found, written, gates, bars, numbers, csv, whole)


def always(view: LookView, choice: Choice) -> list[Any]:
    """→ row, sorted heads"""
    shares, groups = scaled(view, choice.scale)
    at = position(view, choice.at)
    group = choice.group if choice.group in groups else "prompt"
    cells = shares[:, :, at, groups.index(group)]
    colour = plots.colour_of(group)
    ranked = plots_look.sorted_heads(cells, f"share on {group}", colour=colour)
    return [row_figure(view, choice, at), ranked]


def once(view: LookView, choice: Choice) -> list[Any]:
    """→ what was written, gates as a map and sorted"""
    written = writing_figure(view.written, choice.group) if view.written is not None else None
    if view.gates is None:
        return [written, None, None]
    return [
        written,
        plots_training.gate_map(view.gates, name=view.held, run="look"),
        plots_look.sorted_heads(view.gates, "tanh(g)", colour="var(--generated)"),
    ]


def writing_figure(writing: Writing, group: str):
    """The share on a group while the model writes; on generated text where there is no such one."""
    group = group if group in writing.groups else "generated"
    index = writing.groups.index(group)
    return plots_look.written_map(writing.shares[..., index], writing.tokens, group)


def row_figure(view: LookView, choice: Choice, at: int):
    """The keys one head looks at most from one position; prompts behind gates with their weight."""
    if view.rows is None:
        return None
    rows, tokens = view.rows, view.mass.tokens
    layer = min(choice.layer, len(rows.weights) - 1)
    head = min(choice.head, rows.weights.shape[1] - 1)
    found = [(where, weight) for where, weight in rows.top(layer, head, at, TOP)]
    labels = [token.text for token in tokens for _ in token.ids]
    marked = {i: name for name, some in groups_of(view).items() for i in some}
    end = len(labels) - view.n_generated
    names, values, groups = [], [], []
    for where, weight in found:
        score = float(
            rows.scores[layer, head, at, where + rows.n_slots if where >= 0 else -1 - where]
        )
        names.append(f"slot {-1 - where}" if where < 0 else f"{labels[where]} ({where})")
        values.append(score if choice.scores else weight)
        own = "prefix" if where < 0 else "sink" if where == 0 else ""
        groups.append(own or marked.get(where) or ("prompt" if where < end else "generated"))
    if view.experts is not None and not choice.scores:
        for slot, weight in enumerate(view.experts.prompts[layer, head, at]):
            if np.isfinite(weight):
                names.append(f"prompt {slot} behind the gate")
                values.append(float(weight))
                groups.append("prefix")
    return plots_look.row_bars(
        names,
        values,
        groups,
        title=f"Layer {layer}, head {head}, position {at}",
        entropy=float(rows.entropy[layer, head, at]),
        unit="score" if choice.scores else "weight",
    )


def groups_of(view: LookView) -> dict[str, list[int]]:
    """The groups a visitor has marked, by name."""
    return dict(view.marked)


def found_figure(view: HeadsView):
    """Heads that fit a rule, best first."""
    return plots_look.sorted_heads(view.found.scores, view.found.rule, colour="var(--prompt)")


def head_named(text: str) -> tuple[int, int] | None:
    """ "L3 H4" → (3, 4)"""
    match = re.fullmatch(r"L(\d+) H(\d+)", str(text))
    return (int(match[1]), int(match[2])) if match else None


def positions_in(text: str) -> list[int]:
    """ "2-4, 7" → [2, 3, 4, 7]"""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        match = re.fullmatch(r"(\d{1,6})(?:\s*[-–]\s*(\d{1,6}))?", part)
        if not match or int(match[2] or match[1]) - int(match[1]) > 4096:
            raise ExplorerError(f"“{part}” is no range of tokens.", "Write it as 2-4, 7.")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)

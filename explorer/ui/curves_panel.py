"""Curves of the trade-off at the foot of Look: prefix against text, with the reader's own model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import gradio as gr

from explorer import plots_tradeoff
from explorer.errors import ExplorerError
from explorer.session.curves import KINDS, CurvesView, comparing
from explorer.tradeoff import LENGTHS
from explorer.ui.controls import shown
from explorer.ui.file_button import file_button, offered
from explorer.ui.live_plot import LivePlot
from explorer.ui.page import PRIVATE, STREAM

if TYPE_CHECKING:
    from explorer.ui.page import Page

NOTE = """
<p class="hint">Left: α, the share of attention; it exists only inside one softmax
(“PrefixMemory-Tuning”, arXiv 2506.13674, Eq. 3); mean over heads. Right: how large what is added
is against the rest, for every method; median over heads. The two are never mixed. Bands: range over
texts.</p>
<details class="hint"><summary>What is compared</summary><p>Before training: prefix-tuning as it
starts, from the first tokens of an instruction; the same slots behind a gate that is open by half,
and poured into PMT's memory by Eq. 5, scaled to be as loud as the gate at 8 slots; and a solved
prefix that makes the model say what it says after that instruction, placed anew before every
length. Trained for 6 steps (on two cores ten seconds more for 135 M weights) the first, third and
fourth learn to name the kind of a request. What you train in the place Train is compared under
“what I made”. The first slot of a prefix that a text left behind takes the place of the sink, and
most of α is its.</p></details>
"""


@dataclass(frozen=True)
class Axes:
    """What a visitor draws: which share, against what. Kept, so that a run goes on with it."""

    measure: str
    along: str


ALONG = [("tokens of text", "length"), ("number of slots", "slots")]


def curves_panel(page: Page) -> None:
    with gr.Accordion("Curves: prefix against length of text and number of slots", open=False):
        gr.HTML(NOTE)
        with gr.Row(elem_classes=["actions"]):
            asked = gr.Dropdown(list(KINDS), value=KINDS[0], label="Compare", min_width=240)
            longest = gr.Dropdown(
                list(LENGTHS[4:]), value=512, label="Longest text (tokens)", min_width=140
            )
            prompts = gr.Slider(1, 5, 2, step=1, label="Texts", min_width=140)
            draw = gr.Button("Draw", scale=0, min_width=120, elem_id="curves-go")
        with gr.Row():
            along = gr.Radio(
                ALONG, value="length", label="Against", elem_id="curves-along", min_width=240
            )
            measure = gr.Radio(
                [("whole prefix α", "share"), ("without its first slot", "behind")],
                value="share",
                label="Share of",
                min_width=240,
            )
        with gr.Row():  # packed: while they are measured, another choice may make lists shorter
            shares = LivePlot(packed=True, elem_id="curves-share")
            parts = LivePlot(packed=True, elem_id="curves-part")
        csv = file_button("CSV", "curves-csv")

    @page.told("Curves")
    def on_draw(
        asked: str, longest: int, prompts: int, measure: str, along: str, request: gr.Request
    ):
        """Measure the trade-off on the loaded model."""
        session = page.session(request)
        page.sessions.keep(session.id, Axes(measure, along))
        work = comparing(
            session.spec, asked, session.held, longest=int(longest), prompts=int(prompts)
        )
        job = page.start(session, work, "Curves")
        for status, view in page.follow(job):
            figures = [gr.skip()] * 2
            if view is not None:
                figures = _drawn(view, page.sessions.keep(session.id, view).last(Axes))
            yield [status, *figures]

    @shown
    def on_choice(measure: str, along: str, request: gr.Request):
        axes = Axes(measure, along)
        session = page.session(request)
        view = page.sessions.keep(session.id, axes).last(CurvesView)
        return [gr.skip()] * 2 if view is None else _drawn(view, axes)

    def on_csv(request: gr.Request):
        view = page.session(request).last(CurvesView)
        if view is None:
            raise ExplorerError("There are no curves yet.", "Press Draw first.")
        table = view.found.to_frame()
        return offered("curves.csv", lambda path: table.to_csv(path, index=False))

    figures = [shares, parts]
    draw.click(
        on_draw,
        [asked, longest, prompts, measure, along],
        [page.status, *figures],
        api_name="curves",
        **STREAM,
    )
    chosen = [measure.input, along.input]
    quick = {**PRIVATE, "queue": False, "trigger_mode": "always_last"}
    gr.on(chosen, on_choice, [measure, along], figures, **quick)
    csv.makes(on_csv)


def _drawn(view: CurvesView, axes: Axes) -> list:
    return [
        plots_tradeoff.tradeoff_chart(view.found, axes.measure, axes.along),
        plots_tradeoff.tradeoff_chart(view.found, "part", axes.along),
    ]

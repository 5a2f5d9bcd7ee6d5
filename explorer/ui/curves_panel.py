"""Curves of the trade-off at the foot of Look: prefix against text, with the reader's own model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr

from explorer import plots_tradeoff
from explorer.errors import ExplorerError
from explorer.session.curves import KINDS, CurvesView, comparing
from explorer.tradeoff import LENGTHS
from explorer.ui.controls import shown
from explorer.ui.file_button import file_button
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
        with gr.Row():
            shares = LivePlot(height=380, empty="Shares, once drawn.", elem_id="curves-share")
            parts = LivePlot(height=380, empty="What is added.", elem_id="curves-part")
        csv = file_button("CSV", "curves-csv")

    @shown
    def on_draw(
        asked: str, longest: int, prompts: int, measure: str, along: str, request: gr.Request
    ):
        """Measure the trade-off on the loaded model."""
        session = page.session(request)
        work = comparing(
            session.spec, asked, session.held, longest=int(longest), prompts=int(prompts)
        )
        job = page.start(session, work, "Curves")
        for status, view in page.follow(job):
            yield [status, *([gr.skip()] * 2 if view is None else _drawn(view, measure, along))]
        if job.item is not None:
            page.sessions.keep(session.id, job.item)

    @shown
    def on_choice(measure: str, along: str, request: gr.Request):
        view = page.session(request).last(CurvesView)
        return [gr.skip()] * 2 if view is None else _drawn(view, measure, along)

    def on_csv(request: gr.Request):
        view = page.session(request).last(CurvesView)
        if view is None:
            raise ExplorerError("There are no curves yet.", "Press Draw first.")
        path = Path(tempfile.mkdtemp(prefix="curves-")) / "curves.csv"
        view.found.to_frame().to_csv(path, index=False)
        return str(path)

    figures = [shares, parts]
    draw.click(
        on_draw,
        [asked, longest, prompts, measure, along],
        [page.status, *figures],
        api_name="curves",
        **STREAM,
    )
    chosen = [measure.input, along.input]
    gr.on(chosen, on_choice, [measure, along], figures, queue=False, **PRIVATE)
    csv.makes(on_csv)


def _drawn(view: CurvesView, measure: str, along: str) -> list:
    return [
        plots_tradeoff.tradeoff_chart(view.found, measure, along),
        plots_tradeoff.tradeoff_chart(view.found, "part", along),
    ]

"""The panel of the second state, B: what it is, and A and B side by side."""

from __future__ import annotations

from dataclasses import dataclass

import gradio as gr

from explorer.ui.live_plot import LivePlot
from explorer.ui.pair_drawing import WAITING
from explorer.ui.token_strip import TokenStrip

NOTHING = "nothing"

INTRO = """
<p class="hint">A is the text above, with what is in front of it. B is another text, or the same
with something else in front: without and with a prefix, before and after training. <b>Look at
both</b> reads A and B; <b>Keep as B</b> takes what is shown now, to compare it with what you look
at next. Click a cell of any map to see that head in both.</p>
"""


@dataclass(frozen=True)
class PairPanel:
    """parts: by name, as `pair_drawing` calls them"""

    accordion: gr.Accordion
    prompt: gr.Textbox
    held: gr.Dropdown
    look: gr.Button
    keep: gr.Button
    parts: dict[str, gr.components.Component]

    @property
    def maps(self) -> list[LivePlot]:
        return [self.parts[name] for name in ("pair_a", "pair_b", "pair_change")]


def pair_panel() -> PairPanel:
    """Lay it out."""
    parts: dict[str, gr.components.Component] = {}
    with gr.Accordion("Two states side by side: A and B", open=False) as accordion:
        gr.HTML(INTRO)
        with gr.Row(elem_classes=["actions"]):
            prompt = gr.Textbox(
                "",
                label="Text of B",
                placeholder="Empty: the same text as A",
                lines=2,
                max_lines=8,
                scale=3,
                min_width=280,
                elem_id="pair-prompt",
            )
            held = gr.Dropdown([NOTHING], value=NOTHING, label="In front of B", min_width=150)
        with gr.Row(elem_classes=["actions"]):
            look = gr.Button("Look at both", scale=0, min_width=150, elem_id="pair-go")
            keep = gr.Button("Keep as B", scale=0, min_width=150, elem_id="pair-keep")
        parts["pair_told"] = gr.HTML(WAITING, elem_id="pair-told")
        parts["pair_tokens"] = TokenStrip(elem_id="pair-tokens")
        with gr.Row():
            for name in ("a", "b", "change"):
                parts[f"pair_{name}"] = LivePlot(packed=True, elem_id=f"pair-{name}")
        with gr.Row():
            for name in ("a", "b"):
                parts[f"pair_along_{name}"] = LivePlot(packed=True, elem_id=f"pair-along-{name}")
    return PairPanel(accordion, prompt, held, look, keep, parts)

"""Look: where every head's attention goes.

One event computes (`/look`); the others redraw from the arrays the session holds: another group,
another head (menus or a click on the map), another position (a click on a token or on the curve).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import gradio as gr

from explorer import plots
from explorer.errors import ExplorerError
from explorer.session import Held, Session
from explorer.session.look import LookView, looking
from explorer.ui.controls import shown
from explorer.ui.live_plot import LivePlot
from explorer.ui.look_view import ALL, SINKLESS, Choice, drawn, position, strongest, table
from explorer.ui.page import PRIVATE, STREAM
from explorer.ui.token_strip import TokenStrip

if TYPE_CHECKING:
    from explorer.ui.page import Page

EXAMPLES = {
    "A plain sentence": "The Eiffel Tower stands in the city of",
    "A repetition": "red house, blue car, green tree. red house, blue car, green",
    "A question": "What is the capital of France? Answer in one word.",
}
NOTHING = "nothing"

INTRO = """
Every attention head shares out one unit of attention over what it can see. **Look** shows who gets
it: the *prefix* put in front, the *sink* (the first token, where trained models park attention
they have no use for), your *prompt*, and what the model has *generated* so far.
"""
WAITING = """
<p class="hint">Nothing is looked at yet. Press <b>Look</b>, or take an example: one click.</p>
"""
SOURCE = """
<p class="hint">The share of a group G, seen from position t, is Σ softmax(qₜ·k / √d) over the keys
in G. Sink: Xiao et al. 2023, “Efficient Streaming Language Models with Attention Sinks”. A prefix’s
share α: “PrefixMemory-Tuning”, arXiv 2506.13674, Eq. 3.</p>
"""


def look_tab(page: Page) -> None:
    gr.Markdown(INTRO, elem_classes=["intro"])
    with gr.Row():
        prompt = gr.Textbox(
            next(iter(EXAMPLES.values())),
            label="Your text",
            lines=4,
            max_lines=12,
            scale=3,
            min_width=280,
            elem_id="look-prompt",
        )
        with gr.Column(scale=2, min_width=280):
            with gr.Row():
                held = gr.Dropdown(
                    [NOTHING],
                    value=NOTHING,
                    label="In front of it",
                    info="What Force or Train made.",
                    min_width=130,
                )
                n_new = gr.Slider(
                    0, 64, 12, step=1, label="Let it go on", info="Tokens to write.", min_width=130
                )
            chat = gr.Checkbox(False, label="As a chat message (the model's chat template)")
            specials = gr.Checkbox(False, label="Read control tokens such as <|im_end|> in my text")
    with gr.Row(elem_classes=["actions"]):
        look = gr.Button("Look", variant="primary", scale=0, min_width=140)
        examples = [
            gr.Button(name, size="sm", scale=0, min_width=120, elem_classes=["example"])
            for name in EXAMPLES
        ]

    at = gr.State(-1)
    summary = gr.HTML(WAITING, elem_id="look-summary")
    tokens = TokenStrip(elem_id="look-tokens")
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            group = gr.Radio(
                list(plots.GROUPS),
                value="prompt",
                label="Colour the map by the share on",
                elem_id="look-group",
            )
            cells = LivePlot(
                height=420,
                empty="The map of all heads appears here. Press Look, or take an example.",
                elem_id="look-map",
            )
        with gr.Column(scale=6, min_width=320):
            with gr.Row():
                layer = gr.Dropdown([0], value=0, label="Layer", min_width=90)
                head = gr.Dropdown([0], value=0, label="Head", min_width=90)
            along = LivePlot(
                height=300,
                empty="One head along the text appears here: click a cell of the map.",
                elem_id="look-along",
            )
            facts = gr.HTML(elem_id="look-facts")
            scale = gr.Radio(
                [ALL, SINKLESS],
                value=ALL,
                label="Shares of",
                info="Without the sink: the rest is scaled so that it sums to 1.",
            )
            stretch = gr.Checkbox(
                False, label="Full colour at the largest share instead of at 100 %"
            )
    with gr.Accordion("Numbers", open=False):
        numbers = gr.HTML(table(None, ""), elem_id="look-table")
    gr.HTML(SOURCE)

    inputs = [prompt, chat, specials, n_new, held, group, scale, stretch]
    view_of = [at, group, layer, head, scale, stretch]
    redrawn = [summary, tokens, cells, along, facts, numbers]
    outputs = [page.status, at, layer, head, *redrawn]

    def steps(
        session: Session, prompt, chat, specials, n_new, held, group, scale, stretch
    ) -> Iterator[list[Any]]:
        work = looking(
            session.spec,
            prompt or "",
            chat=chat,
            specials=specials,
            n_new=int(n_new),
            held=_held(session, held),
        )
        job = page.start(session, work, "Looking")
        for status, view in page.follow(job):
            if view is None:
                yield [status, *[gr.skip()] * (len(outputs) - 1)]
                continue
            page.sessions.keep(session.id, view)
            best = strongest(view, group, scale)
            menus = (
                gr.Dropdown(list(range(n)), value=value)
                for n, value in zip(view.mass.shares.shape, best, strict=False)
            )
            yield [status, -1, *menus, *drawn(view, Choice(-1, group, *best, scale, stretch))]

    @shown
    def on_look(
        prompt: str,
        chat: bool,
        specials: bool,
        n_new: int,
        held: str,
        group: str,
        scale: str,
        stretch: bool,
        request: gr.Request,
    ):
        """Read a text and see which share of attention goes where."""
        session = page.session(request)
        yield from steps(session, prompt, chat, specials, n_new, held, group, scale, stretch)

    def again(request: gr.Request, *chosen) -> list[Any]:
        view = page.session(request).last(LookView)
        return [gr.skip()] * len(redrawn) if view is None else drawn(view, Choice(*chosen))

    @shown
    def on_choice(at, group, layer, head, scale, stretch, request: gr.Request):
        return again(request, at, group, layer, head, scale, stretch)

    @shown
    def on_cell(at, group, layer, head, scale, stretch, request: gr.Request, evt: gr.EventData):
        layer, head = round(evt.y), round(evt.x)
        return [layer, head, *again(request, at, group, layer, head, scale, stretch)]

    @shown
    def on_token(at, group, layer, head, scale, stretch, request: gr.Request, evt: gr.EventData):
        at = int(evt.position)
        return [at, *again(request, at, group, layer, head, scale, stretch)]

    @shown
    def on_curve(at, group, layer, head, scale, stretch, request: gr.Request, evt: gr.EventData):
        view = page.session(request).last(LookView)
        at = at if view is None else position(view, max(0, round(evt.x)))
        return [at, *again(request, at, group, layer, head, scale, stretch)]

    @shown
    def on_held(request: gr.Request):
        return gr.Dropdown([NOTHING, *page.session(request).held])

    look.click(on_look, inputs, outputs, api_name="look", **STREAM)
    for button, text in zip(examples, EXAMPLES.values(), strict=True):
        button.click(
            _example(page, steps, text),
            inputs[1:],
            [prompt, *outputs],
            **{**STREAM, "api_visibility": "private"},
        )
    redraw = {**PRIVATE, "queue": False}  # quick, and needs no place in a queue
    changes = [one.input for one in (group, layer, head, scale, stretch)]
    gr.on(changes, on_choice, view_of, redrawn, **redraw)
    cells.plot_click(on_cell, view_of, [layer, head, *redrawn], **redraw)
    tokens.pick(on_token, view_of, [at, *redrawn], **redraw)
    along.plot_click(on_curve, view_of, [at, *redrawn], **redraw)
    held.focus(on_held, None, held, **redraw)


def _example(page: Page, steps, text: str):
    """A handler that puts an example in the box and looks at it: one click."""

    @shown
    def on_example(chat, specials, n_new, held, group, scale, stretch, request: gr.Request):
        session = page.session(request)
        for values in steps(session, text, chat, specials, n_new, held, group, scale, stretch):
            yield [text, *values]

    return on_example


def _held(session: Session, name: str) -> Held | None:
    if not name or name == NOTHING:
        return None
    if name not in session.held:
        raise ExplorerError(f"There is no {name} here.", "Make one in Force or Train first.")
    return session.held[name]

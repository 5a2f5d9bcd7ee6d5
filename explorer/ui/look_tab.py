"""Look: where every head's attention goes.

One event computes (`/look`); the others redraw from the arrays the session holds: another group,
another head (menus or a click on the map), another position (a click on a token or on the curve).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import gradio as gr

from explorer import plots
from explorer.session import Session
from explorer.session.look import LookView, Pinned, looking
from explorer.ui.controls import shown
from explorer.ui.curves_panel import curves_panel
from explorer.ui.live_plot import LivePlot
from explorer.ui.look_actions import NOTHING, held_by, wire
from explorer.ui.look_more import (
    always,
    head_named,
    once,
    panels,
    positions_in,
    writing_figure,
)
from explorer.ui.look_view import ALL, SINKLESS, Choice, drawn, strongest, table
from explorer.ui.page import PRIVATE, STREAM
from explorer.ui.token_strip import TokenStrip

if TYPE_CHECKING:
    from explorer.ui.page import Page

EXAMPLES = {
    "A plain sentence": "The Eiffel Tower stands in the city of",
    "A repetition": "red house, blue car, green tree. red house, blue car, green",
    "A question": "What is the capital of France? Answer in one word.",
}
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
            with gr.Row(elem_classes=["actions"]):
                log = gr.Checkbox(False, label="Logarithmic colours", min_width=150)
                compare = gr.Checkbox(False, label="Change against the pinned text", min_width=190)
                pin = gr.Button("Pin this", size="sm", scale=0, min_width=90, elem_id="look-pin")
    with gr.Accordion("Mark a group of tokens", open=False), gr.Row(elem_classes=["actions"]):
        mark_name = gr.Textbox("my words", label="Name", max_length=24, min_width=140)
        marks = gr.Textbox(
            "",
            label="Tokens",
            info="Click one token, Shift-click another; or write 2-4, 7.",
            min_width=200,
            elem_id="look-marks",
        )
        mark = gr.Button("Mark and look", scale=0, min_width=140)
    more = panels(table(None, ""))
    curves_panel(page)
    gr.HTML(SOURCE)

    inputs = [prompt, chat, specials, n_new, held, group, scale, stretch]
    view_of = [at, group, layer, head, scale, stretch, log, compare, more.scores]
    redrawn = [summary, tokens, cells, along, facts, more.table, *more.always]
    outputs = [page.status, at, layer, head, group, *redrawn, *more.once]

    def steps(
        session: Session, prompt, chat, specials, n_new, held, group, scale, stretch, groups=None
    ) -> Iterator[list[Any]]:
        work = looking(
            session.spec,
            prompt or "",
            chat=chat,
            specials=specials,
            n_new=int(n_new),
            held=held_by(session, held),
            groups=groups or {},
        )
        job = page.start(session, work, "Looking")
        for status, view in page.follow(job):
            if not isinstance(view, LookView):
                figure = gr.skip() if view is None else writing_figure(view, group)
                yield [status, *[gr.skip()] * (len(outputs) - 4), figure, gr.skip(), gr.skip()]
                continue
            page.sessions.keep(session.id, view)
            pinned = session.last(Pinned)
            group = group if group in view.mass.groups else "prompt"
            best = strongest(view, group, scale)
            menus = (
                gr.Dropdown(list(range(n)), value=value)
                for n, value in zip(view.mass.shares.shape, best, strict=False)
            )
            choice = Choice(-1, group, *best, scale, stretch)
            radio = gr.Radio(list(view.mass.groups), value=group)
            shown_now = drawn(view, choice, pinned and pinned.view)
            yield [
                status,
                -1,
                *menus,
                radio,
                *shown_now,
                *always(view, choice),
                *once(view, choice),
            ]

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
        session = page.session(request)
        view, pinned = session.last(LookView), session.last(Pinned)
        if view is None:
            return [gr.skip()] * len(redrawn)
        choice = Choice(*chosen)
        return [*drawn(view, choice, pinned and pinned.view), *always(view, choice)]

    @shown
    def on_choice(request: gr.Request, *chosen):
        return again(request, *chosen)

    @shown
    def on_cell(request: gr.Request, evt: gr.EventData, at, group, _, __, *rest):
        layer, head = round(evt.y), round(evt.x)
        return [layer, head, *again(request, at, group, layer, head, *rest)]

    @shown
    def on_bar(request: gr.Request, evt: gr.EventData, at, group, layer, head, *rest):
        layer, head = head_named(evt.x) or (layer, head)
        return [layer, head, *again(request, at, group, layer, head, *rest)]

    @shown
    def on_token(request: gr.Request, evt: gr.EventData, _, *rest):
        at = int(evt.position)
        return [at, *again(request, at, *rest)]

    @shown
    def on_curve(request: gr.Request, evt: gr.EventData, at, *rest):
        view = page.session(request).last(LookView)
        if view is not None:
            kept = view.mass.positions
            at = kept[min(max(0, round(evt.x)), len(kept) - 1)]
        return [at, *again(request, at, *rest)]

    @shown
    def on_span(marks: str, evt: gr.EventData):
        span = f"{int(evt.first)}-{int(evt.last)}"
        return f"{marks}, {span}" if marks.strip() else span

    @shown
    def on_mark(name: str, marks: str, request: gr.Request, *asked):
        """Look again, with some tokens as a group of their own."""
        groups = {name.strip()[:24] or "my words": positions_in(marks)}
        yield from steps(page.session(request), *asked, groups)

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
    chosen = (group, layer, head, scale, stretch, log, compare, more.scores)
    changes = [one.input for one in chosen]
    gr.on(changes, on_choice, view_of, redrawn, **redraw)
    cells.plot_click(on_cell, view_of, [layer, head, *redrawn], **redraw)
    tokens.pick(on_token, view_of, [at, *redrawn], **redraw)
    along.plot_click(on_curve, view_of, [at, *redrawn], **redraw)
    held.focus(on_held, None, held, **redraw)
    for bars in (more.ranked, more.found, more.gate_bars):
        bars.plot_click(on_bar, view_of, [layer, head, *redrawn], **redraw)
    more.gates.plot_click(on_cell, view_of, [layer, head, *redrawn], **redraw)
    tokens.mark(on_span, marks, marks, **redraw)
    mark.click(on_mark, [mark_name, marks, *inputs], outputs, api_name="look_mark", **STREAM)
    wire(page, more, pin, at, layer, head, held)


def _example(page: Page, steps, text: str):
    """A handler that puts an example in the box and looks at it: one click."""

    @shown
    def on_example(chat, specials, n_new, held, group, scale, stretch, request: gr.Request):
        session = page.session(request)
        for values in steps(session, text, chat, specials, n_new, held, group, scale, stretch):
            yield [text, *values]

    return on_example

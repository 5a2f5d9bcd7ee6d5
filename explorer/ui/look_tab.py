"""Look: where every head's attention goes.

Here are the events that read a text (`/look`, `/look_pair`, `/look_mark`), and in `look_actions`
those that ask the model for more of it. All others redraw from the arrays the session holds, see
`look_choices`: another group, another head (menus or a click on a map), another position (a click
on a token or on the curve).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gradio as gr

from explorer import plots
from explorer.session import Session
from explorer.session.look import looking, pairing
from explorer.session.look_views import LookView, Other, RowsView, Writing
from explorer.ui.controls import shown
from explorer.ui.curves_panel import curves_panel
from explorer.ui.live_plot import LivePlot
from explorer.ui.look_actions import held_by, wire_actions
from explorer.ui.look_choices import Controls, wire_choices
from explorer.ui.look_drawing import everything, live_map, writing_figure
from explorer.ui.look_more import panels, positions_in, row_panel
from explorer.ui.look_view import ALL, MEAN, ONE, SINKLESS, Choice, strongest, written_so_far
from explorer.ui.page import PRIVATE, STREAM
from explorer.ui.pair_drawing import pair
from explorer.ui.pair_panel import NOTHING, pair_panel
from explorer.ui.token_strip import TokenStrip

if TYPE_CHECKING:
    from explorer.jobs import Work
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

    ui: dict[str, gr.components.Component] = {}
    ui["summary"] = gr.HTML(WAITING, elem_id="look-summary")
    ui["tokens"] = TokenStrip(elem_id="look-tokens")
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            group = gr.Radio(
                list(plots.GROUPS),
                value="prompt",
                label="Colour the map by the share on",
                elem_id="look-group",
            )
            ui["map"] = LivePlot(
                height=420,
                packed=True,
                empty="The map of all heads appears here. Press Look, or take an example.",
                elem_id="look-map",
            )
        with gr.Column(scale=6, min_width=320):
            with gr.Row():
                layer = gr.Dropdown([0], value=0, label="Layer", min_width=90)
                head = gr.Dropdown([0], value=0, label="Head", min_width=90)
            ui["along"] = LivePlot(
                height=300,
                packed=True,
                empty="One head along the text appears here: click a cell of the map.",
                elem_id="look-along",
            )
            ui["facts"] = gr.HTML(elem_id="look-facts")
            with gr.Row():
                seen = gr.Radio([ONE, MEAN], value=ONE, label="Map seen from", min_width=200)
                scale = gr.Radio(
                    [ALL, SINKLESS],
                    value=ALL,
                    label="Shares of",
                    info="Without the sink: the rest is scaled so that it sums to 1.",
                    min_width=200,
                )
            with gr.Row(elem_classes=["actions"]):
                stretch = gr.Checkbox(
                    False, label="Full colour at the largest share, not at 100 %", min_width=200
                )
                log = gr.Checkbox(False, label="Logarithmic scale", min_width=150)
    row = row_panel()
    both = pair_panel()
    more = panels(row)
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
    curves_panel(page)
    gr.HTML(SOURCE)

    ui |= more.parts | both.parts
    controls = Controls(
        *(gr.State(-1) for _ in range(2)),
        *(group, layer, head, seen, scale, stretch, log, more.scores),
        *(gr.State(-1) for _ in range(2)),
        opened=gr.State(frozenset({"row"})),
    )
    asked = [prompt, chat, specials, n_new, held]
    inputs = [*asked, group, seen, scale, stretch, log]
    places = (controls.at, controls.first, controls.at_b, controls.first_b)
    outputs = [page.status, *places, layer, head, group, *ui.values()]

    def work(session: Session, prompt, chat, specials, n_new, held, groups=None):
        return looking(
            session.spec,
            prompt or "",
            chat=chat,
            specials=specials,
            n_new=int(n_new),
            held=held_by(session, held),
            groups=groups or {},
        )

    def placed(parts: dict[str, Any]) -> dict[gr.components.Component, Any]:
        return {ui[name]: part for name, part in parts.items()}

    def followed(session: Session, work: Work, title: str, *drawn) -> Iterator[dict]:
        """Draw what a job of `looking` or `pairing` yields. drawn: group … log"""
        choice, key = Choice(-1, -1, drawn[0], 0, 0, *drawn[1:]), None
        for status, item in page.follow(page.start(session, work, title)):
            news = {page.status: status}
            if isinstance(item, Writing):
                figure = writing_figure(item, choice.group)
                live = {"summary": written_so_far(item), "map": live_map(item, choice)}
                news |= placed({**live, "written": figure})
            view = item.first if isinstance(item, Other) else item
            if isinstance(view, LookView) and view.key != key:
                key, (choice, chosen) = view.key, first_choice(view, choice)
                news |= chosen
                page.sessions.forget(session.id, RowsView)
                session = page.sessions.keep(session.id, view)
                news |= placed(everything(view, choice, session.last(Other)))
            if isinstance(item, Other):
                session = page.sessions.keep(session.id, item)
                news |= placed(pair(view, choice, item))
            yield news

    def first_choice(view: LookView, choice: Choice) -> tuple[Choice, dict]:
        """Of a new text: the head that looks at the group most, seen from the last token."""
        groups = view.mass.groups
        choice = replace(choice, group=choice.group if choice.group in groups else "prompt")
        best = strongest(view, choice)
        sizes = view.mass.shares.shape[:2]
        menus = (
            gr.Dropdown(list(range(size)), value=value)
            for size, value in zip(sizes, best, strict=True)
        )
        chosen = {
            **dict.fromkeys(places, -1),
            **dict(zip((layer, head), menus, strict=True)),
            group: gr.Radio(list(groups), value=choice.group),
        }
        return replace(choice, layer=best[0], head=best[1]), chosen

    @shown
    def on_look(
        prompt: str,
        chat: bool,
        specials: bool,
        n_new: int,
        held: str,
        group: str,
        seen: str,
        scale: str,
        stretch: bool,
        log: bool,
        request: gr.Request,
    ):
        """Read a text and see which share of attention goes where."""
        session = page.session(request)
        job = work(session, prompt, chat, specials, n_new, held)
        yield from followed(session, job, "Looking", group, seen, scale, stretch, log)

    @shown
    def on_pair(
        prompt_b: str,
        held_b: str,
        prompt: str,
        chat: bool,
        specials: bool,
        n_new: int,
        held: str,
        group: str,
        seen: str,
        scale: str,
        stretch: bool,
        log: bool,
        request: gr.Request,
    ):
        """Read two texts, or one with and without something in front, and compare them."""
        session = page.session(request)
        text_b = prompt_b if (prompt_b or "").strip() else prompt
        a, b = (
            work(session, text, chat, specials, n_new, front)
            for text, front in ((prompt, held), (text_b, held_b))
        )
        both = pairing(a, b)
        yield from followed(session, both, "Looking at both", group, seen, scale, stretch, log)

    @shown
    def on_mark(name: str, marks: str, request: gr.Request, *values):
        """Look again, with some tokens as a group of their own."""
        session = page.session(request)
        groups = {(name or "").strip()[:24] or "my words": positions_in(marks)}
        job = work(session, *values[: len(asked)], groups)
        yield from followed(session, job, "Looking", *values[len(asked) :])

    def example(text: str) -> Callable[..., Iterator[dict]]:
        @shown
        def on_example(request: gr.Request, *values):
            """Put an example in the box and look at it: one click."""
            session = page.session(request)
            job = work(session, text, *values[: len(asked) - 1])
            for news in followed(session, job, "Looking", *values[len(asked) - 1 :]):
                yield {prompt: text, **news}

        return on_example

    @shown
    def on_span(marks: str, evt: gr.EventData):
        span = f"{int(evt.first)}-{int(evt.last)}"
        return f"{marks}, {span}" if marks.strip() else span

    @shown
    def on_held(request: gr.Request):
        return gr.Dropdown([NOTHING, *page.session(request).held])

    look.click(on_look, inputs, outputs, api_name="look", **STREAM)
    both.look.click(
        on_pair, [both.prompt, both.held, *inputs], outputs, api_name="look_pair", **STREAM
    )
    mark.click(on_mark, [mark_name, marks, *inputs], outputs, api_name="look_mark", **STREAM)
    for button, text in zip(examples, EXAMPLES.values(), strict=True):
        button.click(
            example(text), inputs[1:], [prompt, *outputs], **STREAM, api_visibility="private"
        )
    quick = {**PRIVATE, "queue": False}
    # Heads that were found in another text do not stay beside the new one.
    anew = [look.click, both.look.click, mark.click, *(button.click for button in examples)]
    gr.on(anew, lambda: None, None, more.found, **quick)
    for menu in (held, both.held):
        menu.focus(on_held, None, menu, **quick)
    ui["tokens"].mark(on_span, marks, marks, **quick)
    wire_choices(page, ui, controls, more, both)
    wire_actions(page, ui, controls, more)

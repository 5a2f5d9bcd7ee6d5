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
from explorer.ui.look_view import Choice, strongest, written_so_far
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
                n_new = gr.Slider(0, 64, 12, step=1, label="Tokens to write", min_width=130)
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
    with gr.Row(elem_id="look-how"):
        group = gr.Radio(
            list(plots.GROUPS),
            value="prompt",
            label="Colour the map by the share on",
            min_width=320,
            elem_id="look-group",
        )
        with gr.Column(min_width=320), gr.Row():
            mean = gr.Checkbox(False, label="Mean over all tokens", min_width=130)
            sinkless = gr.Checkbox(False, label="Leave out the sink", min_width=130)
            stretch = gr.Checkbox(True, label="Full colour at the largest share", min_width=130)
            log = gr.Checkbox(False, label="Colours by the logarithm", min_width=130)
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            ui["map"] = LivePlot(
                packed=True,
                empty="The map of all heads appears here. Press Look, or take an example.",
                elem_id="look-map",
            )
        with gr.Column(scale=6, min_width=320):
            with gr.Row():
                layer = gr.Dropdown([0], value=0, label="Layer", min_width=90)
                head = gr.Dropdown([0], value=0, label="Head", min_width=90)
            ui["along"] = LivePlot(packed=True, elem_id="look-along")
            ui["facts"] = gr.HTML(elem_id="look-facts")
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
        *(group, layer, head, mean, sinkless, stretch, log, more.scores),
        *(gr.State(-1) for _ in range(2)),
        opened=gr.State(frozenset({"row"})),
    )
    asked = [prompt, chat, specials, n_new, held]
    inputs = [*asked, group, mean, sinkless, stretch, log]
    kept = [controls.at, layer, head]
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

    def followed(
        session: Session, work: Work, title: str, *drawn, kept: tuple[int, int, int] | None = None
    ) -> Iterator[dict]:
        """Draw what a job of `looking` or `pairing` yields.

        drawn: group … log    kept: position, layer and head to stay at, where they still exist
        """
        before = session.last(LookView) if kept else None
        choice, key = Choice(-1, -1, drawn[0], 0, 0, *drawn[1:]), None
        for status, item in page.follow(page.start(session, work, title)):
            news = {page.status: status}
            if isinstance(item, Writing):
                figure = writing_figure(item, choice.group)
                live = {"summary": written_so_far(item), "map": live_map(item, choice)}
                news |= placed({**live, "written": figure})
            view = item.first if isinstance(item, Other) else item
            if isinstance(view, LookView) and view.key != key:
                key, (choice, chosen) = view.key, first_choice(view, choice, before, kept)
                news |= chosen
                page.sessions.forget(session.id, RowsView)
                session = page.sessions.keep(session.id, view)
                news |= placed(everything(view, choice, session.last(Other)))
            if isinstance(item, Other):
                session = page.sessions.keep(session.id, item)
                news |= placed(pair(view, choice, item))
            yield news

    def first_choice(view: LookView, choice: Choice, before: LookView | None, kept):
        """Of a new text the head that looks at the group most, seen from the last token.

        before, kept: what was seen, and where; the head stays in a model of the same shape, the
        position in a text that is the same up to it
        """
        groups, sizes = view.mass.groups, view.mass.shares.shape[:2]
        choice = replace(choice, group=choice.group if choice.group in groups else "prompt")
        at, best = -1, strongest(view, choice)
        if before is not None and before.mass.shares.shape[:2] == sizes:
            at, *best = kept
            same = view.mass.ids[: at + 1] == before.mass.ids[: at + 1]
            at = at if same and at < len(view.mass.ids) else -1
        menus = (
            gr.Dropdown(list(range(size)), value=value)
            for size, value in zip(sizes, best, strict=True)
        )
        chosen = {
            **dict.fromkeys(places, -1),
            controls.at: at,
            **dict(zip((layer, head), menus, strict=True)),
            group: gr.Radio(list(groups), value=choice.group),
        }
        return replace(choice, at=at, layer=best[0], head=best[1]), chosen

    @page.told("Looking")
    def on_look(
        prompt: str,
        chat: bool,
        specials: bool,
        n_new: int,
        held: str,
        group: str,
        mean: bool,
        sinkless: bool,
        stretch: bool,
        log: bool,
        request: gr.Request,
    ):
        """Read a text and see which share of attention goes where."""
        session = page.session(request)
        job = work(session, prompt, chat, specials, n_new, held)
        yield from followed(session, job, "Looking", group, mean, sinkless, stretch, log)

    @page.told("Looking at both")
    def on_pair(
        at: int,
        layer: int,
        head: int,
        prompt_b: str,
        held_b: str,
        prompt: str,
        chat: bool,
        specials: bool,
        n_new: int,
        held: str,
        group: str,
        mean: bool,
        sinkless: bool,
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
        at = at if text_b == prompt else -1  # of two texts the last tokens are compared at first
        drawn = group, mean, sinkless, stretch, log
        job = pairing(a, b)
        yield from followed(session, job, "Looking at both", *drawn, kept=(at, layer, head))

    @page.told("Looking")
    def on_mark(
        at: int, layer: int, head: int, name: str, marks: str, request: gr.Request, *values
    ):
        """Look again, with some tokens as a group of their own."""
        session = page.session(request)
        groups = {(name or "").strip()[:24] or "my words": positions_in(marks)}
        job, drawn = work(session, *values[: len(asked)], groups), values[len(asked) :]
        yield from followed(session, job, "Looking", *drawn, kept=(at, layer, head))

    def example(text: str) -> Callable[..., Iterator[dict]]:
        @page.told("Looking")
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
        on_pair, [*kept, both.prompt, both.held, *inputs], outputs, api_name="look_pair", **STREAM
    )
    mark.click(on_mark, [*kept, mark_name, marks, *inputs], outputs, api_name="look_mark", **STREAM)
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

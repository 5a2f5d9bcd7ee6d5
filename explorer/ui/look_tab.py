"""Look: where every head's attention goes.

One event computes (`/look`); the others redraw from the arrays the session holds: another group,
another head (menus or a click on the map), another position (a click on a token or on the curve).
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import gradio as gr
import numpy as np

from explorer import plots
from explorer.errors import ExplorerError
from explorer.session.look import LookView, looking
from explorer.ui.controls import shown
from explorer.ui.live_plot import LivePlot
from explorer.ui.page import PRIVATE, STREAM
from explorer.ui.token_strip import TokenStrip, strip

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
SOURCE = """
<p class="hint">Share of a group G seen from position t: Σ<sub>j∈G</sub> softmax<sub>j</sub>(q<sub>t</sub>·k<sub>j</sub>/√d).
The sink: Xiao et al. 2023, “Efficient streaming language models with attention sinks”. A prefix’s share α:
“PrefixMemory-Tuning”, arXiv 2506.13674, Eq. 3.</p>
"""


def look_tab(page: Page) -> None:
    gr.Markdown(INTRO, elem_classes=["intro"])
    with gr.Row():
        prompt = gr.Textbox(
            next(iter(EXAMPLES.values())),
            label="Your text",
            lines=3,
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
                    info="A prefix from Force or an adapter from Train.",
                    min_width=140,
                )
                n_new = gr.Slider(
                    0, 64, 12, step=1, label="Let it go on", info="Tokens it writes.", min_width=140
                )
            chat = gr.Checkbox(False, label="As a chat message (the model's chat template)")
            specials = gr.Checkbox(False, label="Read control tokens such as <|im_end|> in my text")
    with gr.Row(elem_classes=["actions"]):
        look = gr.Button("Look", variant="primary", scale=0, min_width=140)
        examples = [
            gr.Button(name, size="sm", scale=0, min_width=120, elem_classes=["example"])
            for name in EXAMPLES
        ]

    position = gr.State(-1)
    summary = gr.HTML(_empty(), elem_id="look-summary")
    tokens = TokenStrip(elem_id="look-tokens")
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            with gr.Row():
                group = gr.Radio(
                    [(name, name) for name in plots.GROUPS],
                    value="prompt",
                    label="Colour the map by the share of",
                    min_width=220,
                    elem_id="look-group",
                )
            cells = LivePlot(
                height=420,
                empty="The map of all heads appears here. Press Look, or take an example.",
                elem_id="look-map",
            )
            stretch = gr.Checkbox(False, label="Full colour at the largest share, not at 100 %")
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
    with gr.Accordion("Numbers", open=False):
        table = gr.HTML(_table(None, "prompt", -1), elem_id="look-table")
    gr.HTML(SOURCE)

    redrawn = [summary, tokens, cells, along, facts, table]
    drawing = [position, group, layer, head, stretch]

    def steps(
        request: gr.Request,
        prompt: str,
        chat: bool,
        specials: bool,
        n_new: int,
        held: str,
        group: str,
        stretch: bool,
    ):
        session = page.session(request)
        work = looking(
            session.spec,
            prompt,
            chat=chat,
            specials=specials,
            n_new=int(n_new),
            held=_held(session.held, held),
        )
        job = page.start(session, work, "Looking")
        for status, view in page.follow(job):
            if view is None:
                yield [status, *[gr.skip()] * (3 + len(redrawn))]
                continue
            page.sessions.keep(session.id, view)
            at_layer, at_head = _strongest(view, group)
            n_layers, n_heads = view.mass.shares.shape[:2]
            yield [
                status,
                -1,
                gr.Dropdown(list(range(n_layers)), value=at_layer),
                gr.Dropdown(list(range(n_heads)), value=at_head),
                *_draw(view, -1, group, at_layer, at_head, stretch),
            ]

    @shown
    def on_look(
        prompt: str,
        chat: bool,
        specials: bool,
        n_new: int,
        held: str,
        group: str,
        stretch: bool,
        request: gr.Request,
    ):
        """Read a text and see which share of attention goes where."""
        yield from steps(request, prompt, chat, specials, n_new, held, group, stretch)

    @shown
    def redraw(at: int, group: str, layer: int, head: int, stretch: bool, request: gr.Request):
        view = page.session(request).last(LookView)
        if view is None:
            return [gr.skip()] * len(redrawn)
        return _draw(view, at, group, layer, head, stretch)

    @shown
    def on_cell(
        at: int,
        group: str,
        layer: int,
        head: int,
        stretch: bool,
        request: gr.Request,
        evt: gr.EventData,
    ):
        layer, head = round(evt.y), round(evt.x)
        return [layer, head, *redraw(at, group, layer, head, stretch, request)]

    @shown
    def on_token(
        at: int,
        group: str,
        layer: int,
        head: int,
        stretch: bool,
        request: gr.Request,
        evt: gr.EventData,
    ):
        at = int(evt.position)
        return [at, *redraw(at, group, layer, head, stretch, request)]

    @shown
    def on_position(
        at: int,
        group: str,
        layer: int,
        head: int,
        stretch: bool,
        request: gr.Request,
        evt: gr.EventData,
    ):
        view = page.session(request).last(LookView)
        at = int(np.clip(round(evt.x), 0, len(view.mass.ids) - 1)) if view else at
        return [at, *redraw(at, group, layer, head, stretch, request)]

    inputs = [prompt, chat, specials, n_new, held, group, stretch]
    outputs = [page.status, position, layer, head, *redrawn]
    look.click(on_look, inputs, outputs, api_name="look", **STREAM)
    for button, text in zip(examples, EXAMPLES.values(), strict=True):

        @shown
        def on_example(
            chat: bool,
            specials: bool,
            n_new: int,
            held: str,
            group: str,
            stretch: bool,
            request: gr.Request,
            text: str = text,
        ):
            for values in steps(request, text, chat, specials, n_new, held, group, stretch):
                yield [text, *values]

        button.click(
            on_example, inputs[1:], [prompt, *outputs], **{**STREAM, "api_visibility": "private"}
        )
    gr.on(
        [group.input, layer.input, head.input, stretch.input], redraw, drawing, redrawn, **PRIVATE
    )
    cells.plot_click(on_cell, drawing, [layer, head, *redrawn], **PRIVATE)
    tokens.pick(on_token, drawing, [position, *redrawn], **PRIVATE)
    along.plot_click(on_position, drawing, [position, *redrawn], **PRIVATE)

    def on_focus(request: gr.Request):
        names = [NOTHING, *page.session(request).held]
        return gr.Dropdown(names)

    held.focus(on_focus, None, held, **PRIVATE)


def _held(mine: Any, name: str):
    if not name or name == NOTHING:
        return None
    if name not in mine:
        raise ExplorerError(f"There is no {name} here.", "Make one in Force or Train first.")
    return mine[name]


def _strongest(view: LookView, group: str) -> tuple[int, int]:
    shares = view.mass.of(group)
    layer, head = np.unravel_index(int(shares.argmax()), shares.shape)
    return int(layer), int(head)


def _draw(view: LookView, at: int, group: str, layer: int, head: int, stretch: bool) -> list[Any]:
    """Everything below the prompt, for one choice of position, group and head."""
    mass = view.mass
    length = len(mass.ids)
    at = length - 1 if not 0 <= at < length else at
    layer = min(layer, mass.shares.shape[0] - 1)
    head = min(head, mass.shares.shape[1] - 1)
    labels = _labels(view)
    shares = mass.of(group, at)
    top = max(float(shares.max()), 0.01) if stretch else 1.0
    return [
        _summary(view, at, labels[at], group),
        strip(mass.tokens, view.n_generated, _owner(mass.tokens, at)),
        plots.share_map(shares, group, chosen=(layer, head), top=top),
        plots.shares_along(
            mass.shares[layer, head],
            mass.groups,
            labels,
            title=f"Layer {layer}, head {head}",
            position=at,
        ),
        _facts(view, at, labels[at], layer, head),
        _table(view, group, at),
    ]


def _labels(view: LookView) -> list[str]:
    """One label a position; a character split over several tokens stands at each of them."""
    return [token.text for token in view.mass.tokens for _ in token.ids]


def _owner(tokens, at: int) -> int:
    return next((token.stop - 1 for token in tokens if token.start <= at < token.stop), at)


def _empty() -> str:
    return ""


def _summary(view: LookView, at: int, token: str, group: str) -> str:
    """The mean over all heads as one bar that is also the legend, and the finding in words."""
    means = dict(zip(view.mass.groups, view.mass.shares[:, :, at].mean(axis=(0, 1)), strict=True))
    parts = "".join(
        f"<span class='part {name}' style='flex-grow:{max(share, 1e-4):.4f}'></span>"
        for name, share in means.items()
        if share > 0
    )
    legend = "".join(
        f"<span class='key'><i class='{name}'></i>{name} <b>{share:.0%}</b></span>"
        for name, share in means.items()
        if share > 0 or name != "prefix"
    )
    n_heads = view.mass.shares.shape[0] * view.mass.shares.shape[1]
    layer, head = _strongest_at(view, group, at)
    most = view.mass.of(group, at)[layer, head]
    front = (
        f"With “{html.escape(view.held)}” in front."
        if view.held
        else "No prefix in front, so its share is 0."
    )
    last = " (the last)" if at == len(view.mass.ids) - 1 else ""
    return (
        f"<div class='finding'><p>Seen from position {at}{last}, "
        f"<span class='token'>{html.escape(token)}</span>, the mean of {n_heads} heads:</p>"
        f"<div class='shares' aria-hidden='true'>{parts}</div><div class='keys'>{legend}</div>"
        f"<p class='hint'>Most on {group}: layer {layer}, head {head}, {most:.0%}. {front}</p></div>"
    )


def _strongest_at(view: LookView, group: str, at: int) -> tuple[int, int]:
    shares = view.mass.of(group, at)
    layer, head = np.unravel_index(int(shares.argmax()), shares.shape)
    return int(layer), int(head)


def _facts(view: LookView, at: int, token: str, layer: int, head: int) -> str:
    shares = view.mass.shares[layer, head, at]
    told = ", ".join(
        f"{share:.1%} on {name}"
        for name, share in zip(view.mass.groups, shares, strict=True)
        if share > 0
    )
    return (
        f"<p class='hint'>Layer {layer}, head {head}, from position {at} "
        f"<span class='token'>{html.escape(token)}</span>: {told}.</p>"
    )


def _table(view: LookView | None, group: str, at: int) -> str:
    """The map as numbers."""
    if view is None:
        return "<p class='hint'>The numbers behind the map appear here.</p>"
    shares = view.mass.of(group, at)
    heads = "".join(f"<th scope='col'>{head}</th>" for head in range(shares.shape[1]))
    rows = "".join(
        f"<tr><th scope='row'>{layer}</th>"
        + "".join(f"<td>{100 * share:.1f}</td>" for share in row)
        + "</tr>"
        for layer, row in enumerate(shares)
    )
    return (
        f"<div class='numbers'><table><caption>Share of attention on {group}, in percent: "
        f"one row a layer, one column a head</caption><thead><tr><th></th>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )

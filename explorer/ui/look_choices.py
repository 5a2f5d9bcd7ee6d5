"""Choosing in Look: events that redraw from what the session holds, without the model.

Every event sends only the parts that its choice changes; `look_drawing` says which these are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from explorer.errors import ExplorerError
from explorer.session.look_views import LookView, Other, RowsView
from explorer.ui.controls import shown
from explorer.ui.look_drawing import (
    PANELS,
    for_head,
    for_position,
    for_scale,
    panel,
    window,
    window_now,
)
from explorer.ui.look_more import Panels, head_named
from explorer.ui.look_view import Choice
from explorer.ui.page import PRIVATE
from explorer.ui.pair_drawing import PARTS, pair
from explorer.ui.pair_panel import PairPanel
from explorer.ui.token_strip import window_of

if TYPE_CHECKING:
    from explorer.ui.page import Page

Component = gr.components.Component
# What a click on a head and a click on a token can change, beside the pair.
OF_HEAD = ("map", "along", "facts", "tokens", "row", "row_along", "gates", "ratio")
OF_TOKEN = ("summary", *OF_HEAD, "sorted", "gate_bars", "table")


@dataclass(frozen=True)
class Controls:
    """The components that hold a choice, named and ordered as the fields of `Choice`."""

    at: gr.State
    first: gr.State
    group: gr.Radio
    layer: gr.Dropdown
    head: gr.Dropdown
    mean: gr.Checkbox
    sinkless: gr.Checkbox
    stretch: gr.Checkbox
    log: gr.Checkbox
    scores: gr.Checkbox
    at_b: gr.State
    first_b: gr.State
    opened: gr.State

    @property
    def inputs(self) -> list[Component]:
        """Inputs of an event whose handler makes a `Choice` of them."""
        return [getattr(self, field.name) for field in fields(Choice)]


def wire_choices(
    page: Page, ui: dict[str, Component], controls: Controls, more: Panels, both: PairPanel
) -> None:
    """Connect everything that redraws. ui: the parts of the page by name"""

    def held(request: gr.Request) -> tuple[LookView, Other | None, RowsView | None]:
        session = page.session(request)
        view = session.last(LookView)
        if view is None:
            raise ExplorerError("No text has been looked at yet.", "Press Look first.")
        return view, session.last(Other), session.last(RowsView)

    def changed(now: Choice, **to: Any) -> tuple[Choice, dict[Component, Any]]:
        """Another choice, and the components that say so."""
        return replace(now, **to), {getattr(controls, name): value for name, value in to.items()}

    def placed(parts: dict[str, Any]) -> dict[Component, Any]:
        return {ui[name]: part for name, part in parts.items()}

    def nothing(request: gr.Request) -> bool:
        """Controls can be set before there is a text."""
        return page.session(request).last(LookView) is None

    def on_scale(request: gr.Request, *chosen):
        if nothing(request):
            return gr.skip()
        view, other, rows = held(request)
        return placed(for_scale(view, Choice(*chosen), other, rows))

    def on_menu(request: gr.Request, *chosen):
        if nothing(request):
            return gr.skip()
        view, other, rows = held(request)
        return placed(for_head(view, Choice(*chosen), other, rows))

    def to_head(request: gr.Request, chosen: tuple, place: tuple[int, int]):
        view, other, rows = held(request)
        choice, news = changed(Choice(*chosen), layer=place[0], head=place[1])
        return {**news, **placed(for_head(view, choice, other, rows))}

    def on_cell(request: gr.Request, evt: gr.EventData, *chosen):
        return to_head(request, chosen, (round(evt.y), round(evt.x)))

    def on_bar(request: gr.Request, evt: gr.EventData, *chosen):
        choice = Choice(*chosen)
        return to_head(request, chosen, head_named(evt.x) or (choice.layer, choice.head))

    def to_token(request: gr.Request, chosen: tuple, place: int):
        """Look from another token; the strip turns to it if it shows another part of the text."""
        view, other, rows = held(request)
        before = Choice(*chosen)
        shown_now = window_now(view, before)
        turned = window_of(view.mass.tokens, place, shown_now)
        choice, news = changed(before, at=place, first=turned)
        parts = for_position(view, choice, other, rows, moved=turned != shown_now)
        return {**news, **placed(parts)}

    def on_token(request: gr.Request, evt: gr.EventData, *chosen):
        return to_token(request, chosen, int(evt.position))

    def on_curve(request: gr.Request, evt: gr.EventData, *chosen):
        kept = held(request)[0].mass.positions
        return to_token(request, chosen, min(kept, key=lambda one: abs(one - evt.x)))

    def on_page(request: gr.Request, evt: gr.EventData, *chosen):
        view, _, rows = held(request)
        choice, news = changed(Choice(*chosen), first=int(evt.first))
        return {**news, **placed(window(view, choice, rows))}

    def on_token_b(request: gr.Request, evt: gr.EventData, *chosen):
        view, other, _ = held(request)
        place, tokens = int(evt.position), other.view.mass.tokens
        before = int(evt.first)
        turned = window_of(tokens, place, before)
        choice, news = changed(Choice(*chosen), at_b=place, first_b=turned)
        return {
            **news,
            **placed(pair(view, choice, other, changed="position", turned=turned != before)),
        }

    def on_page_b(request: gr.Request, evt: gr.EventData, *chosen):
        view, other, _ = held(request)
        choice, news = changed(Choice(*chosen), first_b=int(evt.first))
        part = pair(view, choice, other)["pair_tokens"]
        return {**news, ui["pair_tokens"]: part}

    def on_keep(request: gr.Request, *chosen):
        """What is shown becomes B."""
        view, _, _ = held(request)
        session = page.sessions.keep(page.session(request).id, Other(view))
        before = Choice(*chosen)
        choice, news = changed(before, at_b=before.at, first_b=-1)
        return {**news, **placed(pair(view, choice, session.last(Other)))}

    def opening(name: str) -> Callable[..., dict]:
        def on_expand(request: gr.Request, *chosen):
            """A panel has been opened: from now on it is drawn with the rest."""
            before = Choice(*chosen)
            choice, news = changed(before, opened=before.opened | {name})
            if nothing(request):
                return news
            view, other, rows = held(request)
            parts = pair(view, choice, other) if name == "pair" else panel(name, view, choice, rows)
            return {**news, **placed(parts)}

        return on_expand

    def some(*names: str) -> list[Component]:
        return [ui[name] for name in (*names, *PARTS)]

    # Quick, and in need of no place in a queue. Of clicks that come while one is being drawn the
    # last one counts; by default Gradio would drop them all.
    quick = {**PRIVATE, "queue": False, "trigger_mode": "always_last"}

    def on(listen: Callable, handler: Callable, *outputs: Component) -> None:
        listen(shown(handler), controls.inputs, list(outputs), **quick)

    of_scale = ("group", "mean", "sinkless", "stretch", "log", "scores")
    rescaled = partial(gr.on, [getattr(controls, name).input for name in of_scale])
    on(rescaled, on_scale, *ui.values())
    to_heads = partial(gr.on, [controls.layer.input, controls.head.input])
    on(to_heads, on_menu, *some(*OF_HEAD))
    menus = (controls.layer, controls.head)
    for one in (ui["map"], ui["gates"], ui["ratio"], *both.maps):
        on(one.plot_click, on_cell, *menus, *some(*OF_HEAD))
    for bars in (ui["sorted"], more.found, ui["gate_bars"]):
        on(bars.plot_click, on_bar, *menus, *some(*OF_HEAD))
    place = (controls.at, controls.first)
    on(ui["tokens"].pick, on_token, *place, *some(*OF_TOKEN))
    on(ui["along"].plot_click, on_curve, *place, *some(*OF_TOKEN))
    on(ui["tokens"].turn, on_page, controls.first, ui["tokens"])
    place_b = (controls.at_b, controls.first_b)
    on(ui["pair_tokens"].pick, on_token_b, *place_b, *some())
    on(ui["pair_tokens"].turn, on_page_b, controls.first_b, ui["pair_tokens"])
    on(both.keep.click, on_keep, *place_b, *some())
    for name, accordion in {**more.accordions, "pair": both.accordion}.items():
        parts = [ui[part] for part in PANELS.get(name, PARTS)]
        on(accordion.expand, opening(name), controls.opened, *parts)
        accordion.collapse(
            lambda opened, name=name: opened - {name}, controls.opened, controls.opened, **quick
        )

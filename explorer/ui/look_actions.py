"""What one can do with a Look beside choosing: read a row, find heads, take it away as a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gradio as gr
import numpy as np

from explorer.errors import ExplorerError
from explorer.session import Held, Session
from explorer.session.look import finding, reading
from explorer.session.look_views import LookView, RowsView
from explorer.ui.file_button import offered
from explorer.ui.look_choices import Controls
from explorer.ui.look_drawing import after_reading
from explorer.ui.look_more import Panels, found_figure
from explorer.ui.look_view import Choice, position
from explorer.ui.page import STREAM
from explorer.ui.pair_panel import NOTHING

if TYPE_CHECKING:
    from explorer.ui.page import Page


def wire_actions(
    page: Page, ui: dict[str, gr.components.Component], controls: Controls, more: Panels
) -> None:
    """Connect the buttons of Look's panels. ui: the parts of the page by name"""

    def seen(request: gr.Request) -> tuple[Session, LookView]:
        session = page.session(request)
        view = session.last(LookView)
        if view is None:
            raise ExplorerError("No text has been looked at yet.", "Press Look first.")
        return session, view

    @page.told("Finding heads")
    def on_find(rule: str, request: gr.Request):
        """Score every head by what it does."""
        session, view = seen(request)
        job = page.start(session, finding(view, rule, held_by(session, view.held)), "Finding heads")
        for status, found in page.follow(job):
            yield status, gr.skip() if found is None else found_figure(found)

    @page.told("Reading a row")
    def on_read(request: gr.Request, *chosen):
        """Ask the model what the chosen token sees."""
        session, view = seen(request)
        choice = Choice(*chosen)
        here = view.mass.positions[position(view, choice.at)]
        work = reading(view, here, choice.layer, held_by(session, view.held))
        job = page.start(session, work, "Reading a row")
        for status, found in page.follow(job):
            parts = {}
            if isinstance(found, RowsView):
                asked = found.after(page.session(request).last(RowsView))
                page.sessions.keep(session.id, asked)
                parts = after_reading(view, choice, asked)
            yield {page.status: status, **{ui[name]: part for name, part in parts.items()}}

    def on_csv(at: int, request: gr.Request):
        _, view = seen(request)
        return as_csv(view, position(view, at))

    def on_json(at: int, layer: int, head: int, request: gr.Request):
        _, view = seen(request)
        return as_json(view, position(view, at), layer, head)

    more.find.click(on_find, more.rule, [page.status, more.found], api_name="look_heads", **STREAM)
    read = [ui[name] for name in ("tokens", "facts", "row", "row_along")]
    more.read.click(on_read, controls.inputs, [page.status, *read], api_name="look_row", **STREAM)
    more.csv.makes(on_csv, [controls.at])
    more.json.makes(on_json, [controls.at, controls.layer, controls.head])


def held_by(session: Session, name: str) -> Held | None:
    """What a menu's entry stands for."""
    if not name or name == NOTHING:
        return None
    if name not in session.held:
        raise ExplorerError(f"There is no {name} here.", "Make one in Force or Train first.")
    return session.held[name]


def as_csv(view: LookView, at: int) -> str:
    """Every share seen from one position. → path of a file"""
    frame = view.mass.to_frame()
    frame = frame[frame["position"] == view.mass.positions[at]]
    return offered("shares.csv", lambda path: frame.to_csv(path, index=False))


def as_json(view: LookView, at: int, layer: int, head: int) -> str:
    """The same with the text, and one head along all positions. → path of a file"""
    mass = view.mass
    report = {
        "model": view.spec.told,
        "in front": view.held,
        "groups": mass.groups,
        "ids": mass.ids,
        "tokens": [token.text for token in mass.tokens],
        "position": mass.positions[at],
        "axes of shares": ["layer", "head", "group"],
        "shares": _rounded(mass.shares[:, :, at]),
        "head": [layer, head],
        "axes of along": ["position", "group"],
        "positions": mass.positions,
        "along": _rounded(mass.shares[layer, head]),
        "gates": None if view.gates is None else _rounded(view.gates),
        "added against the rest": None
        if view.beside is None
        else _rounded(view.beside.ratio[:, :, at]),
    }
    written = json.dumps(report, ensure_ascii=False)
    return offered("shares.json", lambda path: path.write_text(written, encoding="utf-8"))


def _rounded(values: np.ndarray) -> list:
    """As lists; what is not a number is null."""
    flat = [round(float(x), 7) if np.isfinite(x) else None for x in values.ravel()]
    shaped = np.empty(len(flat), dtype=object)
    shaped[:] = flat
    return shaped.reshape(values.shape).tolist()

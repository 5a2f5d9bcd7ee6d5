"""What one can do with a Look beside choosing: pin it, find heads in it, take it away as a file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr
import numpy as np

from explorer.errors import ExplorerError
from explorer.session import Held, Session
from explorer.session.look import LookView, Pinned, finding
from explorer.ui.controls import shown
from explorer.ui.look_more import Panels, found_figure
from explorer.ui.look_view import position
from explorer.ui.page import PRIVATE, STREAM

if TYPE_CHECKING:
    from explorer.ui.page import Page

NOTHING = "nothing"


def wire(
    page: Page,
    more: Panels,
    pin: gr.Button,
    at: gr.State,
    layer: gr.Dropdown,
    head: gr.Dropdown,
    held: gr.Dropdown,
) -> None:
    """Connect the buttons of Look's panels."""

    @shown
    def on_pin(request: gr.Request):
        session = page.session(request)
        view = session.last(LookView)
        if view is None:
            raise ExplorerError("There is nothing to pin yet.", "Press Look first.")
        page.sessions.keep(session.id, Pinned(view))
        return gr.Button("Pinned")

    @shown
    def on_find(rule: str, held: str, request: gr.Request):
        """Score every head by what it does."""
        session = page.session(request)
        view = session.last(LookView)
        if view is None:
            raise ExplorerError("There is no text to read yet.", "Press Look first.")
        job = page.start(session, finding(view, rule, held_by(session, held)), "Finding heads")
        for status, found in page.follow(job):
            yield status, gr.skip() if found is None else found_figure(found)

    def seen(request: gr.Request) -> LookView:
        view = page.session(request).last(LookView)
        if view is None:
            raise ExplorerError("There are no numbers yet.", "Press Look first.")
        return view

    @shown
    def on_csv(at: int, request: gr.Request):
        view = seen(request)
        return as_csv(view, position(view, at))

    @shown
    def on_json(at: int, layer: int, head: int, request: gr.Request):
        view = seen(request)
        return as_json(view, position(view, at), layer, head)

    quick = {**PRIVATE, "queue": False}
    pin.click(on_pin, None, pin, **quick)
    more.find.click(
        on_find, [more.rule, held], [page.status, more.found], api_name="look_heads", **STREAM
    )
    more.csv.click(on_csv, at, more.csv, **quick)
    more.json.click(on_json, [at, layer, head], more.json, **quick)


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
    path = _file("shares.csv")
    frame.to_csv(path, index=False)
    return str(path)


def as_json(view: LookView, at: int, layer: int, head: int) -> str:
    """The same with the text, and one head along all positions. → path of a file"""
    mass = view.mass
    report = {
        "model": view.spec.name,
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
    }
    path = _file("shares.json")
    path.write_text(json.dumps(report, ensure_ascii=False), encoding="utf-8")
    return str(path)


def _file(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix="look-")) / name


def _rounded(values: np.ndarray) -> list:
    """As lists; what is not a number is null."""
    flat = [round(float(x), 7) if np.isfinite(x) else None for x in values.ravel()]
    shaped = np.empty(len(flat), dtype=object)
    shaped[:] = flat
    return shaped.reshape(values.shape).tolist()

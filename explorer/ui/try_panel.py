"""Adapters that are trained: chat with them side by side, test them, read what their files say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr

from explorer.adapters import Saved
from explorer.errors import ExplorerError
from explorer.generate import Sampling
from explorer.session import Held, Session
from explorer.session.chat import MOST, ChatView, talking
from explorer.session.order import TrainView
from explorer.session.trial import trying
from explorer.ui.chat_view import REACHED, boxes, drawn, notes
from explorer.ui.controls import shown
from explorer.ui.page import PRIVATE, STREAM, line
from explorer.ui.train_form import DATA, HELD_OUT, Form, data_choice
from explorer.ui.train_view import NOTHING, trial

if TYPE_CHECKING:
    from explorer.ui.page import Page

CHATTING, TRYING = "Chatting", "Trying adapters"
MANNERS = {
    "as each was trained": "trained",
    "in the chat template": "chat",
    "the text as it is": "plain",
}
N_NEW = 64


def try_panel(page: Page, asked: Form) -> None:
    """Lay the panel out and wire it. asked: the run's controls, of which the rows are read"""
    with gr.Accordion("Chat with the adapters, or with some you have", open=False):
        with gr.Row():
            files = gr.File(
                label="Adapters' files; empty: those trained here last",
                file_types=[".safetensors"],
                file_count="multiple",
                height=140,
                min_width=260,
                elem_id="train-open",
            )
            which = gr.Dropdown(
                [],
                value=[],
                multiselect=True,
                allow_custom_value=True,  # one that was made after the page had asked
                label="Or some of those made here",
                info=f"At most {MOST} beside the model alone.",
                min_width=260,
                elem_id="chat-which",
            )
        with gr.Row(elem_classes=["chats"]):
            columns = boxes()
        with gr.Row(elem_classes=["actions"]):
            message = gr.Textbox(
                "Is it going to be sunny at the lake?",
                label="Your message",
                info="Enter sends it, Shift+Enter begins a new line.",
                lines=1,
                max_lines=6,
                max_length=20_000,
                scale=1,
                min_width=260,
                elem_id="chat-message",
            )
            send = gr.Button("Send", variant="primary", scale=0, min_width=120, elem_id="chat-send")
            clear = gr.Button("Start over", scale=0, min_width=150, elem_id="chat-clear")
        how = gr.HTML(elem_id="chat-notes", js_on_load=REACHED)
        settings = _settings()
        gr.HTML("<p class='hint'>Their files, and how they answer the rows held out above:</p>")
        with gr.Row(elem_classes=["actions"]):
            attempt = gr.Button("Read and test", scale=0, min_width=170, elem_id="train-try")
            measure = gr.Checkbox(True, label="Test on the held-out rows", min_width=200)
        card = gr.HTML(NOTHING, elem_id="train-trial")

    @page.told(CHATTING)
    def on_chat(
        request: gr.Request,
        message: str = "",
        adapters: list[str] | None = None,
        which: list[str] | None = None,
        manner: str = "trained",
        remember: bool = True,
        n_new: int = N_NEW,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ):
        """Send a message to the model alone and to adapters; each goes on from its own past.

        In the boxes that come back "<" is written &lt; where a tag would begin.
        """
        session = page.session(request)
        if any(job.title == CHATTING for job in page.worker.jobs_of(session.id)):
            raise ExplorerError("The last message is still being answered.", "Wait, or press Stop.")
        before = session.last(ChatView) or ChatView()
        page.sessions.keep(session.id, before)
        work = talking(
            session.spec,
            message or "",
            _chosen(session, adapters, which),
            before,
            manner=manner,
            remember=remember,
            n_new=int(n_new),
            sampling=Sampling(float(temperature), float(top_p), int(seed or 0)),
        )
        job = page.start(session, work, CHATTING)
        drawing, latest = [gr.skip()] * (len(columns) + 1), None
        for status, view in page.follow(job):
            now = page.sessions.get(session.id).last(ChatView)
            if now is None or now.id != before.id:  # begun anew meanwhile, or another model
                yield [line("stopped", f"{CHATTING}: stopped"), *[gr.skip()] * (len(drawing) + 1)]
                return
            taken = gr.Textbox("") if latest is None and view is not None else gr.skip()
            latest = view or latest
            if view is not None:
                page.sessions.keep(session.id, view)
            if latest is not None:
                drawing = [*drawn(latest), notes(latest, over=job.over)]
            yield [status, *drawing, taken]
        _hold(page, session, adapters)

    @shown
    def on_clear(request: gr.Request):
        """Begin the chat anew, in every column."""
        session = page.session(request)
        page.worker.stop(session.id, CHATTING)
        page.sessions.keep(session.id, ChatView())
        return [*drawn(ChatView()), ""]

    @shown
    def on_which(request: gr.Request):
        held = page.session(request).held
        return gr.Dropdown([name for name, one in held.items() if isinstance(one.adapter, Saved)])

    @page.told(TRYING)
    def on_try(
        request: gr.Request,
        adapters: list[str] | None = None,
        which: list[str] | None = None,
        measure: bool = True,
        source: str = "",
        file: str | None = None,
        kind: str = "classes",
        shots: int = 4,
        held_out: int = HELD_OUT,
        seed: int = 0,
    ):
        """Open adapters: what they say of themselves, and their answers to the held-out rows."""
        session = page.session(request)
        paths = _chosen(session, adapters, which)
        if not paths:
            raise ExplorerError("There is no adapter yet.", "Train one, or choose a file.")
        values = dict(zip(DATA, (source, file, kind, shots, held_out, seed), strict=True))
        work = trying(session.spec, paths, data_choice(values) if measure else None)
        told = gr.skip()
        for status, view in page.follow(page.start(session, work, TRYING)):
            told = told if view is None else trial(view)
            yield status, told
        _hold(page, session, adapters)

    gr.on(
        [send.click, message.submit],
        on_chat,
        [message, files, which, *settings],
        [page.status, *columns, how, message],
        api_name="chat",
        **STREAM,
    )
    gr.on(
        [clear.click, *(column.clear for column in columns)],
        on_clear,
        None,
        [*columns, how],
        api_name="chat_clear",
        show_progress="hidden",
    )
    which.focus(on_which, None, which, queue=False, **PRIVATE)
    tried = [files, which, measure, *asked.data]
    attempt.click(on_try, tried, [page.status, card], api_name="try_adapter", **STREAM)


def _settings() -> list[gr.components.Component]:
    """How messages are put and words chosen: manner, remember, n_new, temperature, top-p, seed."""
    with gr.Accordion("How messages are put, and how words are chosen", open=False):
        with gr.Row():
            manner = gr.Radio(
                list(MANNERS.items()),
                value="trained",
                label="Messages are put",
                info="A classifier knows what to do only in the wording it was trained with.",
                min_width=300,
                elem_id="chat-manner",
            )
            remember = gr.Checkbox(
                True,
                label="Earlier turns are read again",
                info="Off: every message is answered as if it were the first.",
                min_width=220,
            )
        with gr.Row():
            n_new = gr.Slider(
                1, 512, N_NEW, step=1, label="Longest answer", info="In tokens.", min_width=150
            )
            temperature = gr.Slider(
                0, 2, 0, step=0.1, label="Temperature", info="0: the likeliest.", min_width=150
            )
            top_p = gr.Slider(
                0.1, 1, 1, step=0.05, label="Top-p", info="Share of the likeliest.", min_width=150
            )
            seed = gr.Number(
                0,
                precision=0,
                minimum=0,
                label="Seed",
                info="Same seed, same words.",
                min_width=150,
            )
    return [manner, remember, n_new, temperature, top_p, seed]


def _chosen(
    session: Session, files: Sequence[str] | None, names: Sequence[str] | None
) -> list[str]:
    """Files and names a visitor has chosen; with neither, what this visitor trained last."""
    unknown = [name for name in names or () if name not in session.held]
    if unknown:
        raise ExplorerError(f"There is no {unknown[0]} here.", "Train one, or choose a file.")
    held = [session.held[name].adapter for name in names or ()]
    chosen = [*(files or ()), *(one.path for one in held if isinstance(one, Saved))]
    if chosen:
        return list(dict.fromkeys(chosen))
    view = session.last(TrainView)
    return [curve.file for curve in view.curves if curve.file] if view else []


def _hold(page: Page, session: Session, files: Sequence[str] | None) -> None:
    """Files that could be opened can be put in front of a text in Look as well."""
    for path in files or ():
        page.sessions.hold(session.id, Held(Path(path).stem, adapter=Saved(path)))

"""What every tab is handed, and the one line that says what is happening.

A place is one file with one function that lays out its tab and wires its events:

    def look_tab(page: Page) -> None:
        prompt, read, view = gr.Textbox(), gr.Button("Look"), LivePlot()

        @page.told("Looking")                    # errors become sentences, here and in a toast
        def on_look(prompt: str, request: gr.Request):
            session = page.session(request)      # this visitor: session.spec, session.last(Kind)
            job = page.start(session, looking(session.spec, prompt), "Looking")
            for status, item in page.follow(job):        # item: the newest, or None
                yield status, gr.skip() if item is None else draw(item)
            if job.item is not None:
                page.sessions.keep(session.id, job.item)  # for events that only redraw

        read.click(on_look, [prompt], [page.status, view], api_name="look", **STREAM)

`looking(spec, prompt)` comes from explorer/session/look.py: it returns the job's work, whose first
line is `lm = models.load(spec, stop.note)`. The status line is always the first output.
The Stop button beside the status line ends every job of its visitor; nothing uses `cancels`.

A run that outlives the tab starts with `page.start(..., detached=True)`; its `job.id` finds it
again: `page.worker.job(job_id)`, then `page.follow(job)` as above. Events that only redraw what
the session holds use `**PRIVATE`; every other one has an `api_name`.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from explorer.jobs import Job, Report, Work, Worker
from explorer.lm import ModelSpec
from explorer.session import Session, Sessions
from explorer.ui.controls import sentence, shown
from explorer.zero_gpu import CALL

# For events that follow a job. Order and exclusion are the worker's business, so Gradio's own
# queue lets many in; its progress overlay would hide what is being drawn.
STREAM = {"show_progress": "hidden", "concurrency_limit": 32}

# For events that only redraw what the session already holds.
PRIVATE = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": 32}


@dataclass(frozen=True)
class Page:
    """What every tab is handed.

    status: the status line, first output of every event that follows a job
    data: folder for what runs leave behind    on_space: whether strangers use this machine
    demo: the page itself, for what happens when it opens
    run: id of the visitor's detached run, kept by the browser so that it is found again
    """

    worker: Worker
    sessions: Sessions
    status: gr.HTML
    data: Path
    on_space: bool
    demo: gr.Blocks
    run: gr.BrowserState

    def session(self, request: gr.Request) -> Session:
        """The visitor who asks."""
        return self.sessions.get(request.session_hash or "nobody")

    def start(
        self,
        session: Session,
        work: Work,
        title: str,
        *,
        detached: bool = False,
        model: ModelSpec | None = None,
        seconds: float = CALL,
    ) -> Job:
        """Queue work on the model for a visitor.

        title: what the status line says, "Solving"
        model: that it works on, if not the visitor's own
        seconds: that it may take on ZeroGPU; 0 for what needs no model
        """
        return self.worker.submit(
            work,
            title,
            owner=session.id,
            detached=detached,
            model=model or session.spec,
            seconds=seconds,
        )

    def told(self, title: str) -> Callable[[Callable], Callable]:
        """`shown` for generators that draw the status line: errors of what they start, and those
        before there is a job, are told there as well. title: of what did not work
        """

        def decorate(handler: Callable) -> Callable:
            @functools.wraps(handler)
            def run(*args, **kwargs):
                try:
                    yield from handler(*args, **kwargs)
                except Exception as error:
                    yield {self.status: line("failed", f"{title}: {sentence(error)}")}
                    raise

            return shown(run)

        return decorate

    def follow(self, job: Job, min_interval: float = 0.3) -> Iterator[tuple[str, Any]]:
        """The status line and the newest item of a job (None where it is not new), until it ends.

        The error of a job that failed is raised at the end; for handlers under `told`.
        """
        for report in job.follow(min_interval):
            yield status_line(job.title, report), report.item if report.fresh else None


def status_line(title: str, report: Report) -> str:
    """What is happening, and for how long."""
    if report.state == "waiting":
        others = "one request" if report.ahead == 1 else f"{report.ahead} requests"
        return line(
            "waiting", f"{title}: waits for {others}" if report.ahead else f"{title}: starts"
        )
    if report.state == "running":
        note = f"{title} · {report.note}" if report.note else title
        return line("running", note, report.seconds, report.fraction)
    at = f", {report.note}" if report.state == "stopped" and report.note else ""
    return line(report.state, f"{title}: {report.state}{at}", report.seconds)


def line(state: str, text: str, seconds: float | None = None, fraction: float | None = None) -> str:
    """One status line as HTML. state: idle, waiting, running, done, stopped or failed"""
    clock = "" if seconds is None else f"<span class='clock'>{duration(seconds)}</span>"
    bar = "" if fraction is None else f"<progress max='1' value='{fraction:.3f}'></progress>"
    return (
        f"<div class='status {state}'><span class='lamp'></span>"
        f"<span class='what' role='status'>{html.escape(text)}</span>{bar}{clock}</div>"
    )


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    hours = int(seconds // 3600)
    if hours < 24:
        return f"{hours} h {int(seconds % 3600 // 60)} min"
    return f"{hours // 24} d {hours % 24} h"

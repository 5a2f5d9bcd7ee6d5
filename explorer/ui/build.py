"""The whole page: model bar, places, status line. Adding a place is one line in TABS."""

from __future__ import annotations

import os
from pathlib import Path

import gradio as gr

from explorer import zero_gpu
from explorer.jobs import Worker
from explorer.lm import ModelSpec
from explorer.session import Sessions
from explorer.ui.force_tab import force_tab
from explorer.ui.learn_tab import learn_tab
from explorer.ui.look_tab import look_tab
from explorer.ui.model_bar import model_bar
from explorer.ui.page import PRIVATE, Page, line
from explorer.ui.train_tab import train_tab

TABS = {"Look": look_tab, "Force": force_tab, "Train": train_tab, "Learn": learn_tab}

CACHE = (3600, 86400)  # every hour, files of visitors that are older than a day go

TITLE = """
<h1>Prefix explorer</h1>
<p>Put something in front of a text and see what it does to attention.</p>
"""


def build(spec: ModelSpec | None = None, data: Path | None = None) -> gr.Blocks:
    """The page as Gradio blocks. The model of `spec` starts loading on the worker at once."""
    spec = spec or ModelSpec()
    with gr.Blocks(
        title="Prefix explorer",
        analytics_enabled=False,
        fill_width=False,
        delete_cache=CACHE,
    ) as demo:
        page = Page(
            worker=Worker(call=zero_gpu.elsewhere if zero_gpu.ON_ZERO_GPU else None),
            sessions=Sessions(spec),
            status=gr.HTML(line("idle", "Ready"), render=False, elem_id="status-line"),
            data=data or Path("data"),
            on_space=bool(os.environ.get("SPACE_ID")),
            demo=demo,
            # Outside of the places: what lies in a tab is not there when the page opens.
            run=gr.BrowserState("", storage_key="prefix-explorer-run", secret="prefix-explorer"),
        )
        gr.HTML(TITLE, elem_id="title")
        with gr.Row(elem_id="model-bar"):
            model_bar(page, demo)
        with gr.Tabs(elem_id="places") as places:
            for name, tab in TABS.items():
                with gr.Tab(name, id=name.lower()):
                    tab(page)
        _status_bar(page)

        def leave(request: gr.Request) -> None:
            page.sessions.drop(request.session_hash)

        def arrive(request: gr.Request):
            """An address may name a lesson: its place opens."""
            return gr.Tabs(selected="learn") if "lesson" in request.query_params else gr.skip()

        demo.unload(leave)
        demo.load(arrive, None, places, queue=False, **PRIVATE)
    # The worker says who waits; on ZeroGPU Gradio would turn away the second event of a page.
    return demo.queue(default_concurrency_limit=32, max_size=256)


def _status_bar(page: Page) -> None:
    """At the foot of the window, in sight from every place."""
    with gr.Row(elem_id="status-bar"):
        page.status.render()
        stop = gr.Button("Stop", size="sm", variant="stop", elem_id="stop", min_width=60, scale=0)

    def on_stop(request: gr.Request) -> str:
        count = page.worker.stop(page.session(request).id)
        return line("stopped", "Stopping" if count else "Nothing is running")

    stop.click(on_stop, None, page.status, api_name="stop", show_progress="hidden", queue=False)

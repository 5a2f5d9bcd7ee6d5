"""Train: methods side by side on a few labelled rows, live, measured before and after."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.processing_utils import save_file_to_cache

from explorer.adapters import Saved
from explorer.data import bundled
from explorer.errors import ExplorerError
from explorer.examples import Wording
from explorer.jobs import Job
from explorer.session import Held, Session
from explorer.session.train import TrainView, training, trying
from explorer.ui.controls import shown
from explorer.ui.live_plot import LivePlot
from explorer.ui.page import PRIVATE, STREAM
from explorer.ui.train_form import (
    DATA,
    METHODS,
    OWN,
    VARIANTS,
    budget,
    data_choice,
    names,
    order,
    settings,
    with_parameters,
)
from explorer.ui.train_view import NOTHING, charts, preview, result, trial

if TYPE_CHECKING:
    from explorer.ui.page import Page

STEPS, HELD_OUT = 24, 30  # about a minute and a half on two cores

INTRO = """
The model stays frozen; an **adapter** beside it learns from a handful of labelled rows. Choose
methods, press Train, and watch them run side by side on the very same batches: how fast the loss
falls, which heads open their gates, and along how many axes each method moves attention's output.
"""
SOURCE = """
<p class="hint">PMT: o + φ(q)ᵀM, arXiv 2506.13674, Eq. 7. Zero-gate: o + tanh(g)·Attn(q, P), arXiv
2303.16199 and 2502.03029, Eq. 5. Prefix-tuning: one softmax with the text, arXiv 2101.00190. LoRA:
arXiv 2106.09685. Axes used: exp of the entropy of the eigenvalues of cov b(q), mean over heads; a
prefix of p slots can never use more than p.</p>
"""
RACES = {
    "PMT against zero-gate": ["PMT, elu", "Zero-gate, linear"],
    "All four": ["PMT, elu", "Zero-gate, linear", "Prefix-tuning", "LoRA"],
}


def train_tab(page: Page) -> None:
    gr.Markdown(INTRO, elem_classes=["intro"])
    with gr.Row():
        with gr.Column(min_width=300):
            source = gr.Dropdown(
                [*bundled(), OWN],
                value=next(iter(bundled())),
                label="Rows",
                info="Sentences with a label each.",
                elem_id="train-source",
            )
            upload = gr.File(
                label="CSV or JSON lines with the columns text and label",
                file_types=[".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"],
                visible=False,
                height=110,
                elem_id="train-upload",
            )
            shots = gr.Slider(1, 32, 4, step=1, label="Rows of each class to learn from")
        with gr.Column(min_width=300):
            chosen = gr.CheckboxGroup(
                list(VARIANTS),
                value=next(iter(RACES.values())),
                label="Methods",
                info="All of those ticked learn from the same batches.",
                elem_id="train-methods",
            )
            steps = gr.Slider(1, 400, STEPS, step=1, label="Steps", info="One reads one batch.")
    with gr.Accordion("How it learns", open=False):
        with gr.Row():
            shared = budget()
        with gr.Row():
            held_out = gr.Slider(
                4,
                400,
                HELD_OUT,
                step=1,
                label="Rows to test on",
                info="None of them is learnt from.",
                min_width=180,
            )
            seed = gr.Number(
                0,
                precision=0,
                minimum=0,
                label="Seed",
                info="Same seed, same losses.",
                min_width=120,
            )
            template = gr.Textbox(
                Wording().template,
                lines=2,
                label="How a row is put",
                info="{text} is the row's text.",
                min_width=180,
            )
            chat = gr.Checkbox(
                False, label="As a chat message (the model's chat template)", min_width=180
            )
    with gr.Accordion("Settings of each method", open=False):
        own = [settings(method) for method in METHODS.values()]
    with gr.Row(elem_classes=["actions"]):
        train = gr.Button("Train", variant="primary", scale=0, min_width=140, elem_id="train-go")
        races = [
            gr.Button(name, size="sm", scale=0, min_width=120, elem_classes=["example"])
            for name in RACES
        ]
    with gr.Accordion("The rows", open=False):
        rows = gr.HTML("<p class='hint'>What is learnt from and tested on appears here.</p>")
    loss = LivePlot(height=340, empty="The loss of every step appears here.", elem_id="train-loss")
    outcome = gr.HTML(NOTHING, elem_id="train-result")
    with gr.Row():
        gates = LivePlot(
            height=300,
            empty="Gates, layer by head, appear here when a gated method runs.",
            elem_id="train-gates",
            min_width=300,
        )
        spectrum = LivePlot(
            height=300,
            empty="The spectrum of what each method adds appears here.",
            elem_id="train-spectrum",
            min_width=300,
        )
    files = gr.File(
        label="The adapters, as safetensors with a description",
        file_count="multiple",
        interactive=False,
        visible=False,
        elem_id="train-files",
    )
    with gr.Accordion("Try an adapter, or open one you have", open=False):
        with gr.Row():
            file = gr.File(
                label="An adapter's file; empty: the last one trained here",
                file_types=[".safetensors"],
                height=110,
                min_width=260,
                elem_id="train-open",
            )
            prompt = gr.Textbox(
                "Is it going to be sunny at the lake?",
                label="A text to answer",
                lines=2,
                min_width=260,
            )
        with gr.Row(elem_classes=["actions"]):
            attempt = gr.Button("Try it", scale=0, min_width=140, elem_id="train-try")
            measure = gr.Checkbox(True, label="And test it on the held-out rows", scale=0)
        trial_card = gr.HTML(NOTHING, elem_id="train-trial")
    gr.HTML(SOURCE)

    data = [source, upload, shots, held_out, seed]
    inputs = [chosen, *data, steps, template, chat, *shared]
    inputs += [control for group in own for control in group]
    drawn = [outcome, loss, gates, spectrum, files]
    outputs = [page.status, page.run, rows, *drawn]

    def follow(session: Session, job: Job, table: str):
        drawing = [gr.skip()] * len(drawn)
        try:
            for status, view in page.follow(job):
                drawing = drawing if view is None else _draw(view)
                # Every frame is whole; what has not changed since the last is not sent again.
                yield [status, job.id, table, *drawing]
        finally:
            if isinstance(job.item, TrainView):
                page.sessions.keep(session.id, job.item)
                for curve in job.item.curves:
                    if curve.file:
                        held = Held(curve.entry.label, adapter=Saved(curve.file))
                        page.sessions.hold(session.id, held)

    def start(session: Session, values: dict[str, Any]):
        wanted = order(values)
        table = preview(wanted.data.read(), wanted.data.split())
        folder = page.data / "adapters"
        work = training(session.spec, wanted, uuid.uuid4().hex, folder)
        yield from follow(session, page.start(session, work, "Training", detached=True), table)

    def on_train(request: gr.Request, *values: Any):
        """Train adapters on labelled rows; the page gets loss, gates and spectrum of every step."""
        yield from start(page.session(request), dict(zip(names(), values, strict=True)))

    def racing(name: str):
        def on_race(request: gr.Request, *values: Any):
            named = dict(zip(names(), values, strict=True))
            named["methods"] = RACES[name]
            for shown_values in start(page.session(request), named):
                yield [RACES[name], *shown_values]

        return shown(with_parameters(on_race))

    @shown
    def on_rows(source: str, file: str | None = None, shots=4, held_out=HELD_OUT, seed=0):
        """The split before a run: which rows are learnt from, which are tested on."""
        values = dict(zip(DATA, (source, file, shots, held_out, seed), strict=True))
        choice = data_choice(values)
        return preview(choice.read(), choice.split())

    def on_source(source: str):
        return gr.File(visible=source == OWN)

    @shown
    def on_open(run_id: str, request: gr.Request):
        job = page.worker.job(run_id) if run_id else None
        if job is None:
            return
        session = page.session(request)
        job.owner = session.id  # who holds its id may stop it
        for values in follow(session, job, gr.skip()):
            yield [values[0], *values[2:]]

    @shown
    def on_try(
        request: gr.Request,
        adapter: str | None = None,
        prompt: str = "",
        measure: bool = True,
        source: str = "",
        file: str | None = None,
        shots: int = 4,
        held_out: int = HELD_OUT,
        seed: int = 0,
    ):
        """Open an adapter: what it says about itself, an answer without and with it, accuracy."""
        session = page.session(request)
        path = adapter or _latest(session)
        values = dict(zip(DATA, (source, file, shots, held_out, seed), strict=True))
        choice = data_choice(values) if measure else None
        work = trying(session.spec, path, prompt=prompt or "", data=choice)
        for status, view in page.follow(page.start(session, work, "Trying the adapter")):
            yield status, gr.skip() if view is None else trial(view)
        if adapter:
            page.sessions.hold(session.id, Held(Path(path).stem, adapter=Saved(path)))

    train.click(shown(with_parameters(on_train)), inputs, outputs, api_name="train", **STREAM)
    for button, name in zip(races, RACES, strict=True):
        event = {**STREAM, "api_visibility": "private"}
        button.click(racing(name), inputs, [chosen, *outputs], **event)
    source.change(on_source, source, upload, **PRIVATE)
    gr.on(
        [source.input, upload.upload, shots.release, held_out.release, seed.change],
        on_rows,
        data,
        rows,
        **{**PRIVATE, "api_visibility": "public", "api_name": "rows"},
    )
    page.demo.load(on_open, page.run, [page.status, rows, *drawn], **PRIVATE)
    tried = [file, prompt, measure, *data]
    attempt.click(on_try, tried, [page.status, trial_card], api_name="try_adapter", **STREAM)


def _draw(view: TrainView) -> list[Any]:
    """→ outcome, loss, gates, spectrum, files"""
    # Gradio serves files of its own cache only; the folder of runs may lie anywhere.
    saved = [
        save_file_to_cache(curve.file, gr.utils.get_upload_folder())
        for curve in view.curves
        if curve.file
    ]
    return [result(view), *charts(view), gr.File(saved or None, visible=bool(saved))]


def _latest(session: Session) -> str:
    """The file of the last adapter this visitor trained."""
    view = session.last(TrainView)
    saved = [curve.file for curve in view.curves if curve.file] if view else []
    if not saved:
        raise ExplorerError("There is no adapter yet.", "Train one, or choose a file.")
    return saved[0]

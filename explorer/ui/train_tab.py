"""Train: methods side by side on a few labelled rows, live, measured before and after."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.processing_utils import save_file_to_cache

from explorer.adapters import Saved
from explorer.data import bundled
from explorer.errors import ExplorerError
from explorer.jobs import Job
from explorer.session import Held, Session
from explorer.session.order import DataChoice, Order, TrainView
from explorer.session.runs import Runs
from explorer.session.train import longer, resuming, training
from explorer.ui.controls import shown
from explorer.ui.live_plot import LivePlot
from explorer.ui.page import PRIVATE, STREAM, line
from explorer.ui.train_form import (
    DATA,
    HELD_OUT,
    OWN,
    RACES,
    VARIANTS,
    data_choice,
    form,
    names,
    order,
    with_parameters,
)
from explorer.ui.train_view import (
    ADDED,
    GATES,
    LOSS,
    MEAN,
    NORM,
    NOTHING,
    ONE,
    POOLED,
    Choice,
    charts,
    preview,
    result,
    runs_table,
)
from explorer.ui.try_panel import try_panel
from explorer.zero_gpu import ON_ZERO_GPU, ONE_CALL, RUN, run_seconds

if TYPE_CHECKING:
    from explorer.ui.page import Page

LIMIT = 300  # steps of all methods and trials together, where strangers share a machine

INTRO = """
The model stays frozen; an **adapter** beside it learns from a handful of labelled rows. Choose
methods, press Train, and watch them run side by side on the very same batches: how fast the loss
falls, which heads open their gates, and along how many axes each method moves attention's output.
"""
SHARED = f"""
This machine is shared: a run may have {LIMIT} steps, counting those of all methods and trials.
"""
# Who says no deletes nothing: no run is named.
SURE = """run => run && confirm('Delete this run with its checkpoints and adapters?') ? run : ''"""
UNSPLIT = "<p class='hint'>What is learnt from and tested on appears here.</p>"
SOURCE = """
<p class="hint">PMT: o + φ(q)ᵀM, arXiv 2506.13674, Eq. 7. Zero-gate: o + tanh(g)·Attn(q, P), arXiv
2303.16199 and 2502.03029, Eq. 5. Prefix-tuning: one softmax with the text, arXiv 2101.00190. LoRA:
arXiv 2106.09685; what it adds is measured, output with it less output without. Axes used: exp of
the entropy of the eigenvalues λ of cov b(q); a prefix of p slots can never use more than p.
</p>
"""


def train_tab(page: Page) -> None:
    runs = Runs(page.data / "runs")
    jobs: dict[str, str] = {}  # the job of each run of this process: ids, for a job holds arrays
    met: dict[str, str] = {}  # the session that has met a run last
    told = page.told("Training")

    shared, call = SHARED if page.on_space else "", ONE_CALL if ON_ZERO_GPU else ""
    gr.Markdown(INTRO + shared + call, elem_classes=["intro"])
    asked = form()
    with gr.Row(elem_classes=["actions"]):
        train = gr.Button("Train", variant="primary", scale=0, min_width=140, elem_id="train-go")
        races = [
            gr.Button(name, size="sm", scale=0, min_width=120, elem_classes=["example"])
            for name in RACES
        ]
    with gr.Accordion("Training and test rows", open=False):
        first = DataChoice(next(iter(bundled())), held_out=HELD_OUT)
        rows = gr.HTML(preview(first.read(), first.split()))
    loss = LivePlot(empty="The loss of every step appears here.", elem_id="train-loss")
    outcome = gr.HTML(NOTHING, elem_id="train-result")
    with gr.Row():
        heads = LivePlot(
            empty="Gates, layer by head, appear here when a gated method runs.",
            elem_id="train-gates",
            min_width=300,
        )
        spectrum = LivePlot(
            empty="The spectrum of what each method adds appears here.",
            elem_id="train-spectrum",
            min_width=300,
        )
    choices = _choices()
    files = gr.File(
        label="The adapters, as safetensors with a description",
        file_count="multiple",
        interactive=False,
        visible=False,
        elem_id="train-files",
    )
    with gr.Accordion("Runs", open=False):
        table = gr.HTML(runs_table((), 0.0), elem_id="train-runs")
        with gr.Row(elem_classes=["actions"]):
            which = gr.Dropdown(
                [],
                value=None,
                label="Run",
                allow_custom_value=True,  # a run of an earlier page
                min_width=220,
                elem_id="train-run",
            )
            further = gr.Number(0, precision=0, minimum=0, label="Up to step", info="0: as asked.")
        with gr.Row(elem_classes=["actions"]):
            show = gr.Button("Show it", scale=0, min_width=120)
            resume = gr.Button("Go on with it", scale=0, min_width=160, elem_id="train-resume")
            delete = gr.Button("Delete it", scale=0, min_width=120)
    try_panel(page, asked)
    gr.HTML(SOURCE)

    figures = [loss, heads, spectrum]
    drawn = [outcome, *figures, files]
    outputs = [page.status, page.run, rows, *drawn]

    def draw(session: Session, view: TrainView) -> list[Any]:
        page.sessions.keep(session.id, view)
        choice = page.sessions.get(session.id).last(Choice) or Choice()
        made = [curve for curve in view.curves if curve.file and Path(curve.file).exists()]
        for curve in made if view.spec == session.spec else ():
            page.sessions.hold(session.id, Held(curve.entry.label, adapter=Saved(curve.file)))
        # Gradio serves files of its own cache only; the folder of runs may lie anywhere.
        saved = [save_file_to_cache(curve.file, gr.utils.get_upload_folder()) for curve in made]
        return [result(view), *charts(view, choice), gr.File(saved or None, visible=bool(saved))]

    def follow(session: Session, run: str, job: Job, split: Any) -> Iterator[list[Any]]:
        drawing = [gr.skip()] * len(drawn)
        for status, view in page.follow(job):
            drawing = drawing if view is None else draw(session, view)
            # Every frame is whole; what has not changed since the last is not sent again.
            yield [status, run, split, *drawing]

    def under_way(run: str) -> Job | None:
        job = page.worker.job(jobs.get(run, ""))
        return None if job is None or job.over else job

    def launch(
        session: Session, run: str, work: Any, seconds: float, split: Any
    ) -> Iterator[list[Any]]:
        job = page.start(session, work, "Training", detached=True, seconds=seconds)
        jobs[run], met[run] = job.id, session.id
        yield from follow(session, run, job, split)

    def start(session: Session, values: dict[str, Any]) -> Iterator[list[Any]]:
        wanted = order(values)
        _within_limits(page, wanted)
        split = preview(wanted.data.read(), wanted.data.split())
        run = uuid.uuid4().hex
        wanted = runs.start(run, session.spec, wanted)
        work, steps = training(session.spec, wanted, run, runs), _steps(wanted)
        seconds = run_seconds(steps, wanted.trials * len(wanted.entries))
        yield from launch(session, run, work, seconds, split)

    def on_train(request: gr.Request, *values: Any):
        """Train adapters on labelled rows; the page gets loss, gates and spectrum of every step."""
        yield from start(page.session(request), dict(zip(names(), values, strict=True)))

    def racing(name: str):
        def on_race(request: gr.Request, *values: Any):
            named = dict(zip(names(), values, strict=True))
            named["methods"] = RACES[name]
            for frame in start(page.session(request), named):
                yield [RACES[name], *frame]

        return told(with_parameters(on_race))

    @shown
    def on_rows(
        source: str, file: str | None = None, kind="classes", shots=4, held_out=HELD_OUT, seed=0
    ):
        """The split before a run: which rows are learnt from, which are tested on."""
        if source == OWN and not file:
            return UNSPLIT  # it comes next
        choice = data_choice(
            dict(zip(DATA, (source, file, kind, shots, held_out, seed), strict=True))
        )
        return preview(choice.read(), choice.split())

    @shown
    def on_open(run: str, request: gr.Request):
        """A page that opens finds its run again, be it running, done or cut off."""
        if not run or not (page.data / "runs" / run).is_dir():
            # Without a frame, Gradio would empty the status line and everything else.
            yield [gr.skip()] * (2 + len(drawn))
            return
        for frame in watch(page.session(request), run):
            yield [frame[0], *frame[2:]]

    def watch(session: Session, run: str) -> Iterator[list[Any]]:
        job = under_way(run)
        if job is not None:
            job.owner = met[run] = session.id  # who knows a run may stop it
            yield from follow(session, run, job, gr.skip())
            return
        view, state = runs.read(run), runs.state(run)
        met[run] = session.id
        said = f"Run {run[:8]}: {state}" + (
            ", it can go on from its last checkpoint" if state == "interrupted" else ""
        )
        kind = state if state in ("done", "stopped", "failed") else "stopped"
        yield [line(kind, said), run, gr.skip(), *draw(session, view)]

    def known(session: Session) -> list[str] | None:
        """Ids of the runs a visitor may see: on a shared machine those they have met already."""
        if not page.on_space:
            return None
        return [run for run, who in met.items() if who == session.id]

    @shown
    def on_runs(request: gr.Request, run: str | None = None):
        """The runs there are, the newest first. The one that is chosen stays so, else one's own."""
        session = page.session(request)
        lines = runs.list(known(session))
        options = [(f"{one.id[:8]} · {one.state} · {one.title}", one.id) for one in lines]
        ids = [one.id for one in lines]
        own = [one for one in ids if met.get(one) == session.id]
        value = run if run in ids else next(iter([*own, *ids]), None)
        return runs_table(lines, time.time()), gr.Dropdown(options, value=value)

    @told
    def on_show(run: str, request: gr.Request):
        """Watch a run that is under way, or see what one came to."""
        yield from watch(page.session(request), _named(run))

    @told
    def on_resume(run: str, further: int, request: gr.Request):
        """Go on with a run from its last checkpoint, up to a later step if one is given."""
        session, run = page.session(request), _named(run)
        if under_way(run) is not None:
            yield from watch(session, run)
            return
        _within_limits(page, longer(runs.read(run).order, int(further or 0)))
        work = resuming(run, runs, int(further or 0))
        yield from launch(session, run, work, RUN, gr.skip())

    @shown
    def on_delete(run: str, request: gr.Request):
        """Delete a run with its checkpoints and adapters."""
        if run:
            runs.forget(run)
        return on_runs(request)

    @shown
    def on_choice(curve, of, heads, moment, axes, layer, head, centred, request: gr.Request):
        session = page.session(request)
        choice = Choice(
            curve, of or "", heads, int(moment), axes, int(layer or 0), int(head or 0), centred
        )
        page.sessions.keep(session.id, choice)
        view = session.last(TrainView)
        return [gr.skip()] * len(figures) if view is None else list(charts(view, choice))

    begun = [
        train.click(
            told(with_parameters(on_train)), asked.inputs, outputs, api_name="train", **STREAM
        )
    ]
    for button, name in zip(races, RACES, strict=True):
        event = {**STREAM, "api_visibility": "private"}
        begun.append(button.click(racing(name), asked.inputs, [asked.chosen, *outputs], **event))
    asked.source.change(
        lambda source: gr.File(visible=source == OWN), asked.source, asked.upload, **PRIVATE
    )
    public = {"show_progress": "hidden", "concurrency_limit": 32}
    gr.on(asked.redrawn, on_rows, asked.data, rows, api_name="rows", **public)
    page.demo.load(on_open, page.run, [page.status, rows, *drawn], **PRIVATE)
    page.demo.load(on_runs, page.run, [table, which], **PRIVATE)
    which.focus(on_runs, which, [table, which], api_name="runs", **public)
    show.click(on_show, which, outputs, api_name="run_show", **STREAM)
    further_on = resume.click(on_resume, [which, further], outputs, api_name="run_resume", **STREAM)
    for event in (*begun, further_on):
        event.then(on_runs, page.run, [table, which], **PRIVATE)
    delete.click(on_delete, which, [table, which], api_name="run_delete", js=SURE, **public)
    gr.on([one.input for one in choices], on_choice, choices, figures, **PRIVATE)


def _choices() -> list[gr.components.Component]:
    """What of a run is looked at, in the order of Choice."""
    with gr.Accordion("What the charts show", open=False):
        with gr.Row():
            curve = gr.Radio([LOSS, NORM], value=LOSS, label="Curve", min_width=180)
            of = gr.Dropdown(
                [("the first method", ""), *VARIANTS], value="", label="Heads of", min_width=180
            )
            heads = gr.Radio([GATES, ADDED], value=GATES, label="Map", min_width=200)
            moment = gr.Slider(
                0,
                100,
                100,
                step=1,
                label="At this part of the run",
                info="In percent of its steps so far.",
                min_width=180,
            )
        with gr.Row():
            axes = gr.Radio([MEAN, POOLED, ONE], value=MEAN, label="Spectrum", min_width=260)
            layer = gr.Number(0, precision=0, minimum=0, label="Layer", min_width=90)
            head = gr.Number(0, precision=0, minimum=0, label="Head", min_width=90)
            centred = gr.Checkbox(True, label="Mean taken off", min_width=140)
    return [curve, of, heads, moment, axes, layer, head, centred]


def _within_limits(page: Page, wanted: Order) -> None:
    total = _steps(wanted)
    if page.on_space and total > LIMIT:
        raise ExplorerError(
            f"This run would take {total} steps; here {LIMIT} are allowed.",
            "Take fewer steps, methods or trials, or run the app on your own machine.",
        )


def _steps(wanted: Order) -> int:
    """Of all methods and trials together."""
    return wanted.trials * sum(entry.fitting.steps for entry in wanted.entries)


def _named(run: str | None) -> str:
    if not run:
        raise ExplorerError("No run is chosen.", "Choose one from the list.")
    return run

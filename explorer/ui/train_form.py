"""The controls of Train, and the order for a run that they add up to.

Every knob of every method has a control with a name of its own, "zero_gate_slots", so that a run
can be asked for over the API as exactly as in the page.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from explorer.data import bundled
from explorer.errors import ExplorerError
from explorer.examples import Wording
from explorer.hub_rows import fetched, is_hub_name
from explorer.methods import Method, methods
from explorer.session.order import DataChoice, Entry, Order
from explorer.training import FitConfig
from explorer.ui.controls import configured, knob_fields, knobs

OWN = "my own file"
NONE = "none"
KINDS = {"classes": "labels", "answers": "prompts and answers", "text": "plain text"}
DATA = ("source", "file", "kind", "shots", "held_out", "seed")
RUN = ("steps", "trials", "every", "size", "other", "template", "chat")
_ORDERED = ("steps", "learning_rate")  # have controls of their own

STEPS, HELD_OUT = 24, 30  # about a minute and a half on two cores
RACES = {
    "PMT against zero-gate": ["PMT, elu", "Zero-gate, linear"],
    "PMT, zero-gate, prefix-tuning, LoRA": [
        "PMT, elu",
        "Zero-gate, linear",
        "Prefix-tuning",
        "LoRA",
    ],
}

METHODS = methods("train")
VARIANTS: dict[str, Method] = {
    label: method for method in METHODS.values() for label in method.variants
}


def names() -> list[str]:
    """What the inputs of a run are called, in their order."""
    budget = [field.name for field in knob_fields(FitConfig, _ORDERED)]
    own = [name for method in METHODS.values() for name in _own_names(method)]
    return ["methods", *DATA, *RUN, *budget, *own]


@dataclass(frozen=True)
class Form:
    """The controls of a run.

    inputs: all of them, in the order of `names`    data: those that DATA names
    chosen: the methods    source, upload: bundled rows or a file
    redrawn: events after which the rows have to be shown again
    """

    inputs: list[gr.components.Component]
    data: list[gr.components.Component]
    chosen: gr.CheckboxGroup
    source: gr.Dropdown
    upload: gr.File
    redrawn: list[Any]


def form() -> Form:
    """Lay the controls out."""
    with gr.Row():
        with gr.Column(min_width=300):
            source = gr.Dropdown(
                [*bundled(), OWN],
                value=next(iter(bundled())),
                label="Rows",
                info="A bundled set, a file, or the name of a data set on the hub: owner/name.",
                allow_custom_value=True,
                elem_id="train-source",
            )
            upload = gr.File(
                label="CSV or JSON lines with the columns text and label",
                file_types=[".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"],
                visible=False,
                height=140,
                elem_id="train-upload",
            )
            shots = gr.Slider(
                1,
                64,
                4,
                step=1,
                label="Rows of each class to learn from",
                info="Without classes: rows altogether.",
            )
        with gr.Column(min_width=300):
            chosen = gr.CheckboxGroup(
                list(VARIANTS),
                value=next(iter(RACES.values())),
                label="Methods",
                info="All of those ticked learn from the same batches.",
                elem_id="train-methods",
            )
            steps = gr.Slider(1, 400, STEPS, step=1, label="Steps", info="One reads one batch.")
    with gr.Accordion("Data and prompt template", open=False):
        with gr.Row():
            kind = gr.Radio(
                [(words, name) for name, words in KINDS.items()],
                value="classes",
                label="Each row has a text and",
                info="Plain text: every token is learnt.",
                min_width=180,
            )
            held_out = gr.Slider(
                4,
                400,
                HELD_OUT,
                step=1,
                label="Rows to test on",
                info="None of them is learnt from.",
                min_width=180,
            )
            other = gr.Dropdown(
                [NONE, *bundled()],
                value=NONE,
                label="Then also test on",
                info="Rows of another kind: what became of the rest?",
                min_width=180,
            )
        with gr.Row():
            template = gr.Textbox(
                Wording().template,
                lines=2,
                label="Prompt template",
                info="{text} is the row's text.",
                min_width=220,
            )
            chat = gr.Checkbox(
                False, label="As a chat message (the model's chat template)", min_width=220
            )
    with gr.Accordion("How it learns", open=False):
        with gr.Row():
            seed = gr.Number(
                0,
                precision=0,
                minimum=0,
                label="Seed",
                info="Of rows, order and start. Same seed, same losses.",
                min_width=180,
            )
            trials = gr.Slider(
                1,
                10,
                1,
                step=1,
                label="Trials",
                info="Repeat with other rows; mean and band.",
                min_width=180,
            )
            every = gr.Slider(
                1,
                100,
                6,
                step=1,
                label="Look every … steps",
                info="Held-out loss, gates and spectrum.",
                min_width=180,
            )
            size = gr.Number(
                0,
                precision=0,
                minimum=0,
                label="Parameters to train",
                info="The same for all, as nearly as each can; 0: as set below.",
                min_width=180,
            )
        with gr.Row():
            shared = knobs(FitConfig, _ORDERED)
    with gr.Accordion("Settings of each method", open=False):
        own = [control for method in METHODS.values() for control in _settings(method)]
    data = [source, upload, kind, shots, held_out, seed]
    run = [steps, trials, every, size, other, template, chat]
    return Form(
        inputs=[chosen, *data, *run, *shared, *own],
        data=data,
        chosen=chosen,
        source=source,
        upload=upload,
        redrawn=[
            source.input,
            upload.upload,
            kind.input,
            shots.release,
            held_out.release,
            seed.change,
        ],
    )


def _settings(method: Method) -> list[gr.components.Component]:
    """Controls for what is one method's own: its learning rate and its knobs."""
    with gr.Group():
        gr.HTML(f"<p class='hint'><b>{method.title}.</b> {method.summary}</p>", padding=True)
        with gr.Row():
            rate = gr.Number(
                method.learning_rate,
                label="Learning rate",
                minimum=1e-6,
                maximum=1.0,
                min_width=180,
            )
            return [rate, *knobs(method.config, _fixed(method))]


def order(values: Mapping[str, Any]) -> Order:
    """The run that the values of the controls describe."""
    chosen = values["methods"] or []
    if not chosen:
        raise ExplorerError("No method is chosen.", "Tick at least one.")
    entries = tuple(_entry(label, values) for label in chosen)
    wording = Wording(values["template"] or "", bool(values["chat"]))
    other = values["other"]
    data = data_choice(values)
    return Order(
        data=data,
        wording=wording,
        entries=entries,
        seed=data.seed,
        trials=int(values["trials"]),
        every=int(values["every"]),
        size=int(values["size"] or 0),
        other=None if other in (None, NONE) else replace(data, source=other, kind="classes"),
    )


def data_choice(values: Mapping[str, Any]) -> DataChoice:
    """Which rows the values of the controls DATA name."""
    source = values["source"]
    if source == OWN:
        source = values["file"]
        if not source:
            raise ExplorerError("No file is here yet.", "Upload a CSV with columns text and label.")
    elif source not in bundled():
        if not is_hub_name(source or ""):
            raise ExplorerError(
                f"{source} is neither a bundled set nor a name on the hub.",
                f"Choose from {', '.join(bundled())}, or write owner/name.",
            )
        source = str(fetched(source))
    shots, held_out = int(values["shots"]), int(values["held_out"])
    return DataChoice(source, shots, held_out, int(values["seed"] or 0), values["kind"])


def with_parameters(handler: Callable) -> Callable:
    """Give a handler (request, *values) the names of the inputs, so that the API has them.

    The default None is what makes Gradio let a caller leave out a file.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    request = inspect.Parameter("request", kind, annotation=gr.Request)
    named = [inspect.Parameter(name, kind, default=None) for name in names()]
    handler.__signature__ = inspect.Signature([request, *named])
    return handler


def _entry(label: str, values: Mapping[str, Any]) -> Entry:
    if label not in VARIANTS:
        raise ExplorerError(f"There is no method {label}.", f"Choose from {', '.join(VARIANTS)}.")
    method = VARIANTS[label]
    rate, *own = (values[name] for name in _own_names(method))
    shared = [values[field.name] for field in knob_fields(FitConfig, _ORDERED)]
    try:
        config = configured(method.config, own, **method.variants[label])
        fitting = configured(
            FitConfig, shared, steps=int(values["steps"]), learning_rate=float(rate)
        )
    except (TypeError, ValueError) as error:
        raise ExplorerError(f"{label}: {error}.", "Set it back into its range.") from error
    return Entry(label, method.name, config, fitting)


def _fixed(method: Method) -> set[str]:
    """Knobs that tell a method's variants apart; they have no control of their own."""
    return {name for variant in method.variants.values() for name in variant}


def _own_names(method: Method) -> list[str]:
    stem = method.name.replace("-", "_")
    own = ["learning_rate", *(f.name for f in knob_fields(method.config, _fixed(method)))]
    return [f"{stem}_{name}" for name in own]

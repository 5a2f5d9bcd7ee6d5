"""The controls of Train, and the order for a run that they add up to.

Every knob of every method has a control with a name of its own, "zero_gate_slots", so that a run
can be asked for over the API as exactly as in the page.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr

from explorer.errors import ExplorerError
from explorer.examples import Wording
from explorer.methods import Method, methods
from explorer.session.train import DataChoice, Entry, Order
from explorer.training import FitConfig
from explorer.ui.controls import configured, knob_fields, knobs

OWN = "my own file"
DATA = ("source", "file", "shots", "held_out", "seed")
_ORDERED = ("steps", "learning_rate")  # have controls of their own

METHODS = methods("train")
VARIANTS: dict[str, Method] = {
    label: method for method in METHODS.values() for label in method.variants
}


def names() -> list[str]:
    """What the inputs of a run are called, in their order."""
    budget = [field.name for field in knob_fields(FitConfig, _ORDERED)]
    own = [name for method in METHODS.values() for name in _own_names(method)]
    return ["methods", *DATA, "steps", "template", "chat", *budget, *own]


def budget() -> list[gr.components.Component]:
    """Controls for what all methods share, but for the steps."""
    return knobs(FitConfig, _ORDERED)


def settings(method: Method) -> list[gr.components.Component]:
    """Controls for what is one method's own: its learning rate and its knobs, fold and all."""
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
    return Order(data_choice(values), wording, entries, int(values["seed"] or 0))


def data_choice(values: Mapping[str, Any]) -> DataChoice:
    """Which rows the values of the controls DATA name."""
    source = values["source"]
    if source == OWN:
        source = values["file"]
        if not source:
            raise ExplorerError("No file is here yet.", "Upload a CSV with columns text and label.")
    shots, held_out = int(values["shots"]), int(values["held_out"])
    return DataChoice(source, shots, held_out, int(values["seed"] or 0))


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

"""Small pieces every tab uses: errors a visitor can read, and controls made from a config."""

from __future__ import annotations

import dataclasses
import functools
import html
import inspect
import logging
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import gradio as gr
import torch

from explorer.errors import ExplorerError

log = logging.getLogger(__name__)


def shown(handler: Callable) -> Callable:
    """Let the visitor read what they can mend; of everything else only the number of a log entry.

    The one place that catches everything: a traceback may hold paths and other people's text.
    """
    if inspect.isgeneratorfunction(handler):

        @functools.wraps(handler)
        def run(*args, **kwargs):
            try:
                yield from handler(*args, **kwargs)
            except Exception as error:  # noqa: BLE001
                raise _for_visitors(error) from None
    else:

        @functools.wraps(handler)
        def run(*args, **kwargs):
            try:
                return handler(*args, **kwargs)
            except Exception as error:  # noqa: BLE001
                raise _for_visitors(error) from None

    return run


def sentence(error: BaseException) -> str:
    """An error as one or two plain sentences."""
    if isinstance(error, ExplorerError):
        return f"{error} {error.hint}".strip()
    if isinstance(error, gr.Error):  # ZeroGPU's own: no time left today, no GPU free
        return str(error.message)
    if isinstance(error, torch.OutOfMemoryError):
        return "The GPU ran out of memory. Try a shorter text or a smaller model."
    if isinstance(error, MemoryError):
        return "This machine ran out of memory. Try a shorter text or a smaller model."
    number = getattr(error, "log_number", None)
    if number is None:  # told once in the status line, once in the toast, logged once
        number = error.log_number = uuid.uuid4().hex[:8]
        log.error("error %s", number, exc_info=error)
    return f"Something went wrong in the program. The log has it as error {number}."


def _for_visitors(error: Exception) -> gr.Error:
    if isinstance(error, gr.Error):
        return error
    # A toast is HTML: what a visitor or a file's maker wrote stays text in it.
    told = html.escape(sentence(error), quote=False)
    return gr.Error(told, duration=12, print_exception=False)


def knob_fields(config: type, without: Collection[str] = ()) -> list[dataclasses.Field]:
    """The fields of a method's config that are knobs, in order."""
    fields = (field for field in dataclasses.fields(config) if field.metadata)
    return [field for field in fields if field.name not in without]


def knobs(config: type, without: Collection[str] = ()) -> list[gr.components.Component]:
    """One control per knob of a method's config, in field order.

    A knob with `choices` is a menu; a whole number or a range is a slider; a bool is a box; text
    is a text box.
    """
    return [_control(field) for field in knob_fields(config, without)]


def configured(config: type, values: Sequence[Any], **fixed: Any) -> Any:
    """The config that the controls of `knobs(config, without=fixed)` describe."""
    chosen = zip(knob_fields(config, fixed), values, strict=True)
    return config(**{field.name: _as_declared(field, value) for field, value in chosen}, **fixed)


def _as_declared(field: dataclasses.Field, value: Any) -> Any:
    return value if field.default is None else type(field.default)(value)


def _control(field: dataclasses.Field) -> gr.components.Component:
    knob = field.metadata
    text = {"label": knob["label"], "info": knob.get("help") or None, "min_width": 200}
    if knob.get("choices"):
        return gr.Dropdown(list(knob["choices"]), value=field.default, **text)
    if isinstance(field.default, bool):
        return gr.Checkbox(field.default, **text)
    if isinstance(field.default, str):
        return gr.Textbox(field.default, lines=2, **text)
    whole = isinstance(field.default, int)
    low, high = knob["low"], knob["high"]
    if low > 0 and high / low >= 1000:  # a slider cannot be set over such a range
        return gr.Number(
            field.default, minimum=low, maximum=high, precision=0 if whole else None, **text
        )
    return gr.Slider(low, high, field.default, step=1 if whole else (high - low) / 100, **text)

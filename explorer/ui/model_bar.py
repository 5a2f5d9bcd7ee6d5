"""The model bar: what is loaded, and one click to another."""

from __future__ import annotations

import html
import typing
from pathlib import Path

import gradio as gr

from explorer import models
from explorer.errors import ExplorerError
from explorer.lm import Dtype, ModelSpec, Quantization
from explorer.session.model import ModelView, fetching, loaded, loading
from explorer.ui.controls import shown
from explorer.ui.page import PRIVATE, STREAM, Page, line
from explorer.zero_gpu import ON_ZERO_GPU

DEVICES = ["auto", "cpu", "cuda", "mps"]


def model_bar(page: Page, demo: gr.Blocks) -> None:
    """On top of every place. The app's own model starts loading before anybody comes.

    On ZeroGPU, where loading is a visitor's own time, its files alone are fetched.
    """
    start = page.sessions.default
    work = fetching(start) if ON_ZERO_GPU else loading(start)
    page.worker.submit(work, "Loading the model", detached=True)
    answered: dict[ModelSpec, ModelView] = {}  # what other processes have said of their models

    badge = gr.HTML(_waiting(start), elem_id="model-badge")
    with gr.Accordion("Change the model", open=False, elem_id="model-choice") as other:
        with gr.Row():
            name = gr.Dropdown(
                [
                    (f"{preset.repo.split('/')[-1]} · {preset.note}", key)
                    for key, preset in models.PRESETS.items()
                ],
                value=start.name,
                allow_custom_value=True,
                label="Model",
                info="From the list, or the name of one on the hub (name@revision)"
                + ("." if page.on_space else ", a folder, or a .gguf file on this machine."),
                scale=3,
                min_width=260,
            )
            quantization = gr.Dropdown(
                list(typing.get_args(Quantization)),
                value=start.quantization,
                label="Quantisation",
                info="Weights in 8 or 4 bits: less memory, less exact.",
                min_width=160,
            )
            dtype = gr.Dropdown(
                list(typing.get_args(Dtype)),
                value=start.dtype,
                label="Precision",
                info="Of activations (dtype). auto: the best for the device.",
                min_width=160,
            )
            device = gr.Dropdown(
                DEVICES,
                value=start.device,
                label="Device",
                info="auto: a GPU if there is one.",
                allow_custom_value=not page.on_space,
                min_width=160,
            )
        with gr.Row(equal_height=True):
            memory = gr.HTML(elem_id="memory")
            load = gr.Button("Load", variant="primary", scale=0, min_width=120)

    choice = [name, quantization, dtype, device]

    @page.told("Loading the model")
    def on_load(name: str, quantization: str, dtype: str, device: str, request: gr.Request):
        """Load a model and say what answered."""
        session = page.session(request)
        spec = _spec(page, name, quantization, dtype, device)
        if ON_ZERO_GPU:  # with no GPU waiting
            job = page.start(session, fetching(spec), "Fetching the model", model=spec, seconds=0)
            for status, _ in page.follow(job):
                yield status, gr.skip()
            if job.state != "done":
                return
        job = page.start(session, loading(spec), "Loading the model", model=spec)
        card = gr.skip()
        for status, view in page.follow(job):
            card = card if view is None else _answered(view)
            yield status, card
        if job.item is not None:
            answered[spec] = job.item
            page.sessions.choose(session.id, spec)
            page.sessions.keep(session.id, job.item)

    @page.told("Loading the model")
    def on_open(request: gr.Request):
        session = page.session(request)
        here = loaded(session.spec) or answered.get(session.spec)
        if here is not None:
            page.sessions.keep(session.id, here)
            yield line("done", "Ready"), _answered(here)
            return
        if ON_ZERO_GPU:
            yield line("idle", "Ready: the model is loaded when it is asked"), gr.skip()
            return
        job = page.start(session, loading(session.spec), "Loading the model")
        for status, view in page.follow(job):
            yield status, gr.skip() if view is None else _answered(view)
        if job.item is not None:
            page.sessions.keep(session.id, job.item)

    @shown
    def on_choice(name: str, quantization: str, dtype: str, device: str):
        guess = models.estimate(_spec(page, name, quantization, dtype, device))
        if guess is None:
            return "<p class='hint'>How much memory it takes is known once it is here.</p>"
        return (
            f"<p class='hint'>About <b>{amount(guess.n_bytes)}</b> of memory for "
            f"{count(guess.parameters)} weights, and some more while it works.</p>"
        )

    load.click(on_load, choice, [page.status, badge], api_name="load", **STREAM)
    asked = [other.expand, *(one.change for one in choice)]
    gr.on(asked, on_choice, choice, memory, **PRIVATE)
    demo.load(on_open, None, [page.status, badge], **{**STREAM, "api_visibility": "private"})


def _spec(page: Page, name: str, quantization: str, dtype: str, device: str) -> ModelSpec:
    """What the visitor chose. Files of this machine are for its owner, not for strangers."""
    name = (name or "").strip()
    start = page.sessions.default
    if page.on_space and name not in models.PRESETS and name != start.name:
        local = Path(name).expanduser()
        if local.suffix.lower() == ".gguf" or local.exists() or name.startswith((".", "/", "~")):
            raise ExplorerError(
                "Files of this machine cannot be opened from the page.",
                "Name a model on the hub, or start the app on your own machine.",
            )
    same = name == start.name
    name, _, revision = name.partition("@")
    return ModelSpec(
        name=name,
        revision=revision or (start.revision if same else "main"),
        quantization=quantization,
        dtype=dtype,
        device=device or "auto",
        trust_remote_code=start.trust_remote_code and same,
    )


def _waiting(spec: ModelSpec) -> str:
    return _card(_title(spec), [("state", "loaded when asked" if ON_ZERO_GPU else "on its way")])


def _answered(view: ModelView) -> str:
    """What is loaded: precision, device and memory at a glance, the rest on demand."""
    size, origin = view.geometry, view.origin
    facts = [
        ("precision", origin.precision),
        ("device", view.device),
        ("memory", amount(origin.n_bytes)),
        ("layers × heads", f"{size.n_layers} × {size.n_heads}"),
    ]
    more = [
        ("source", origin.source),
        ("licence", origin.licence),
        ("attention", f"{origin.attention} (transformers' own, kept as it is)"),
        ("key/value heads", f"{size.n_kv_heads}, of {size.head_dim} numbers each"),
        ("longest text", f"{size.context:,} tokens"),
        ("chat template", "yes" if view.chat else "no: it continues text"),
    ]
    if view.seconds:
        more.append(("loaded in", f"{view.seconds:.1f} s"))
    return _card(_title(view.spec), facts, more)


def _title(spec: ModelSpec) -> str:
    preset = models.PRESETS.get(spec.name)
    return (preset.repo if preset else spec.name).rstrip("/").split("/")[-1]


def _card(title: str, facts: list[tuple[str, str]], more: list[tuple[str, str]] = ()) -> str:
    def listed(pairs):
        return "".join(
            f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>"
            for key, value in pairs
        )

    details = (
        f"<details><summary>About this model</summary><dl>{listed(more)}</dl></details>"
        if more
        else ""
    )
    return (
        f"<div class='model-card'><strong>{html.escape(title)}</strong>"
        f"<dl>{listed(facts)}</dl>{details}</div>"
    )


def amount(n_bytes: float) -> str:
    """Bytes in the unit people use for that many."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.1f} GB"
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"


def count(number: float) -> str:
    """A large count in words."""
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"

"""Force: make the model say a given text whatever it is asked, and prove it by replay."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, get_args

import gradio as gr

from explorer.errors import ExplorerError
from explorer.forcing import Request, Stage
from explorer.methods.attention_matching import Keys
from explorer.session import Held
from explorer.session.force import ForceView, examining, forcing, opening, trying
from explorer.ui.file_button import offered
from explorer.ui.page import PRIVATE, STREAM
from explorer.ui.proof_card import BUSY, EMPTY, IDLE, card, said, signs_card, trials_table

if TYPE_CHECKING:
    from explorer.jobs import Work
    from explorer.session import Session
    from explorer.ui.page import Page

TEXT, SOURCE = "this text", "what it says after another prompt"
LABELS = {TEXT: "Text to say", SOURCE: "The other prompt"}
HELD = "solved prefix"

INTRO = """
The model's weights stay as they are. A **prefix** (extra keys and values in front of the text) is
*solved*, not trained, so that the model answers what you choose, whatever it is asked. Then the
model decodes freely with it, and only if every token comes out right does the page say *forced*.
"""
NOTE = """
<p class="hint">For each deciding step t, the prefix answers the query qₜ of every head with the
output oₜ that leads to the wanted token: S·V = O with S the softmax over the slots. Paper:
“Prefix-Tuning for Arbitrary Output Sequences on Pretrained Transformers”, arXiv 2610.24123 (its
keys: <i>aligned</i>). Ours: <i>kernel</i> and <i>whitened</i> keys, any target text, any last
token, any prompt length.</p>
"""
KEYS = {
    "kernel": "kernel: each query finds its own slot, any length (default)",
    "whitened": "whitened: least-norm keys, fits a stock cache, short targets",
    "aligned": "aligned: as in the paper",
}
EXAMPLES = {
    "Whatever you ask": (
        TEXT,
        "The answer is 42. Please bring a towel.",
        "What is the capital of France?",
        True,
    ),
    "The paper's way": (
        SOURCE,
        "My favourite dish is pizza with a lot of cheese and",
        "The weather was cold and",
        False,
    ),
    "Code on demand": (TEXT, "def f(x):\n    return x ** 2", "Tell me a story about a dog.", True),
}
OTHERS = "Who are you?\nWrite a poem about rain.\nHow do I bake bread?"


def force_tab(page: Page) -> None:
    first = EXAMPLES["Whatever you ask"]
    blank = _columns(("", ""), IDLE)
    gr.Markdown(INTRO, elem_classes=["intro"])
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            mode = gr.Radio([TEXT, SOURCE], value=first[0], label="The model shall say")
            wanted = gr.Textbox(
                first[1],
                label=LABELS[first[0]],
                lines=3,
                max_lines=10,
                elem_id="force-target",
            )
        with gr.Column(scale=1, min_width=300):
            prompt = gr.Textbox(
                first[2],
                label="When it is asked",
                lines=3,
                max_lines=10,
                elem_id="force-prompt",
            )
            chat = gr.Checkbox(first[3], label="As a chat message (the model's chat template)")
    with gr.Accordion("Options", open=False):
        with gr.Row():
            keys = gr.Dropdown(
                [(KEYS[k], k) for k in get_args(Keys)],
                value="kernel",
                label="Keys",
                info="How a query finds its slot.",
                min_width=220,
            )
            tokens = gr.Slider(
                1,
                64,
                10,
                step=1,
                label="Tokens",
                info="So much of what it says after the other prompt.",
                visible=first[0] == SOURCE,
            )
            specials = gr.Checkbox(False, label="Control tokens such as <|im_end|> in texts count")
        with gr.Row():
            margin = gr.Textbox(  # an empty gr.Number reads 0, which is another wish
                label="Margin (logits)",
                info="By how much each token must lead.",
                placeholder="automatic: by precision",
            )
            layers = gr.Slider(
                1, 32, 4, step=1, label="Layers repaired", info="Of the last, at first."
            )
            steps = gr.Slider(10, 1000, 300, step=10, label="Repair steps at most")
        with gr.Row(visible=False) as of_aligned:
            attn_lim = gr.Number(
                Request.attn_lim,
                label="attn_lim",
                info="A query's logit at its own slot; the paper's GPT-2: 20.",
            )
            repeat = gr.Slider(
                1,
                90,
                1,
                step=1,
                label="Repetition r",
                info="How often a slot counts; the paper: 1 to 90.",
            )
        with gr.Row():
            go_on = gr.Slider(
                0,
                64,
                0,
                step=1,
                label="Let it go on",
                info="By so many tokens, without the prefix.",
            )
            temperature = gr.Slider(
                0,
                2,
                0,
                step=0.1,
                label="Sample once more at temperature",
                info="0: not. The proof itself is greedy; a margin of 25 holds under sampling.",
            )
            top_p = gr.Slider(0.1, 1, 1, step=0.05, label="top-p of that sample")
    with gr.Row(elem_classes=["actions"]):
        force = gr.Button("Force", variant="primary", scale=0, min_width=140, elem_id="force-go")
        examples = [
            gr.Button(name, size="sm", scale=0, min_width=120, elem_classes=["example"])
            for name in EXAMPLES
        ]
    with gr.Row():
        with gr.Column(min_width=260):
            without = gr.HTML(blank[0], elem_id="force-without")
        with gr.Column(min_width=260):
            with_it = gr.HTML(blank[1], elem_id="force-with")
    proof = gr.HTML(EMPTY, elem_id="force-proof")
    file = gr.File(visible=False, label="The prefix with its proof (safetensors)", height=80)
    with gr.Accordion("More prompts, the same prefix", open=False):
        others = gr.Textbox(OTHERS, label="One prompt a line", lines=4, elem_id="force-others")
        gr.HTML(
            "<p class='hint'>Prompts written here before you press Force are provided for: each "
            "new last token gets a first step of its own.</p>"
        )
        try_all = gr.Button("Try them all", scale=0, min_width=140)
        table = gr.HTML(trials_table(()), elem_id="force-trials")
    with gr.Accordion("How such a prefix gives itself away", open=False):
        gr.HTML(
            "<p class='hint'>Whoever can write into a model's key/value cache holds its output. "
            "Whoever runs the model can tell, without knowing the text: measured on four ordinary "
            "prompts that end alike.</p>"
        )
        examine = gr.Button("Examine the prefix", scale=0, min_width=140)
        traces = gr.HTML(signs_card(None), elem_id="force-signs")
    with gr.Accordion("Numbers of the proof", open=False):
        numbers = gr.JSON(label="As Python and the command line give them")
    with gr.Accordion("Open a saved prefix", open=False):
        upload = gr.File(
            label="A .safetensors file from here", file_types=[".safetensors"], height=140
        )
        open_it = gr.Button("Open and prove again", scale=0, min_width=140)
    gr.HTML(NOTE)

    inputs = [mode, wanted, prompt, chat, specials, keys, tokens, margin, layers, steps]
    inputs += [attn_lim, repeat, others, go_on, temperature, top_p]
    outputs = [page.status, without, with_it, proof, numbers, file]

    @page.told("Forcing")
    def on_force(
        mode: str,
        wanted: str,
        prompt: str,
        chat: bool,
        specials: bool,
        keys: str,
        tokens: int,
        margin: str | None,
        layers: int,
        steps: int,
        attn_lim: float | None,
        repeat: int,
        others: str,
        go_on: int,
        temperature: float,
        top_p: float,
        request: gr.Request,
    ):
        """Solve a prefix and prove it by replay."""
        source, target = (wanted or "", None) if mode == SOURCE else (None, wanted or "")
        asked = Request(
            prompt=prompt or "",
            others=tuple(_lines(others)),
            source=source,
            target=target,
            tokens=int(tokens),
            keys=keys,
            attn_lim=Request.attn_lim if attn_lim is None else float(attn_lim),
            repeat=int(repeat),
            margin=_number(margin),
            layers=int(layers),
            steps=int(steps),
            go_on=int(go_on),
            temperature=float(temperature),
            top_p=float(top_p),
            chat=chat,
            specials=specials,
        )
        session = page.session(request)
        yield from _followed(page, session, forcing(session.spec, asked))

    mode.change(
        lambda mode: (gr.Textbox(label=LABELS[mode]), gr.Slider(visible=mode == SOURCE)),
        mode,
        [wanted, tokens],
        queue=False,
        **PRIVATE,
    )
    keys.change(
        lambda keys: gr.Row(visible=keys == "aligned"), keys, of_aligned, queue=False, **PRIVATE
    )
    force.click(on_force, inputs, outputs, api_name="force", **STREAM)

    for button, name in zip(examples, EXAMPLES, strict=True):
        chosen = EXAMPLES[name]

        @page.told("Forcing")
        def on_example(request: gr.Request, chosen=chosen):
            kind, wanted, prompt, chat = chosen
            session = page.session(request)
            asked = Request(
                prompt=prompt,
                source=wanted if kind == SOURCE else None,
                target=None if kind == SOURCE else wanted,
                chat=chat,
            )
            for out in _followed(page, session, forcing(session.spec, asked)):
                yield [*out, *chosen]

        button.click(
            on_example,
            None,
            [*outputs, mode, wanted, prompt, chat],
            api_visibility="private",
            **STREAM,
        )

    @page.told("Forcing")
    def on_open(path: str | None, request: gr.Request):
        """Open a saved prefix and replay it on the prompt it was made for."""
        if not path:
            raise ExplorerError("No file is chosen.", "Drop one made here into the box.")
        session = page.session(request)
        yield from _followed(page, session, opening(session.spec, path))

    open_it.click(on_open, [upload], outputs, api_name="force_open", **STREAM)

    # What has been found about another prefix does not stay beside the new one.
    anew = [force.click, open_it.click, *(button.click for button in examples)]
    unfound = (trials_table(()), signs_card(None))
    gr.on(anew, lambda: unfound, None, [table, traces], queue=False, **PRIVATE)

    @page.told("Trying")
    def on_try(others: str, request: gr.Request):
        """Replay the solved prefix on further prompts."""
        session = page.session(request)
        view = session.last(ForceView)
        if view is None:
            raise ExplorerError("There is no solved prefix yet.", "Press Force first.")
        prompts = _lines(others)
        if not prompts:
            raise ExplorerError("There are no prompts.", "Write one on each line.")
        job = page.start(session, trying(view, prompts), "Trying")
        drawn = gr.skip()
        for status, trials in page.follow(job):
            drawn = drawn if trials is None else trials_table(trials)
            yield status, drawn

    try_all.click(on_try, [others], [page.status, table], api_name="force_try", **STREAM)

    @page.told("Examining")
    def on_examine(request: gr.Request):
        """Measure the traces of the solved prefix."""
        session = page.session(request)
        view = session.last(ForceView)
        if view is None:
            raise ExplorerError("There is no solved prefix yet.", "Press Force first.")
        job = page.start(session, examining(view), "Examining")
        drawn = gr.skip()
        for status, found in page.follow(job):
            drawn = drawn if found is None else signs_card(found)
            yield status, drawn

    examine.click(on_examine, None, [page.status, traces], api_name="force_examine", **STREAM)


def _number(text: str | None) -> float | None:
    """The margin that was written; None if there is none."""
    try:
        return float(text) if text and text.strip() else None
    except ValueError as error:
        raise ExplorerError(
            f"The margin “{text}” is not a number.", "Leave it empty, or write 2."
        ) from error


def _lines(text: str | None) -> list[str]:
    return [line.strip() for line in (text or "").splitlines() if line.strip()]


def _followed(page: Page, session: Session, work: Work):
    """Submit and relay; every frame is whole, and built from the newest stage alone."""
    job = page.start(session, work, "Forcing")
    texts = ("", "")
    rest = [EMPTY, None, gr.File(None, visible=False)]
    columns = _columns(texts, BUSY)
    yield [gr.skip(), *columns, *rest]
    for status, item in page.follow(job):
        if isinstance(item, Stage):
            texts = item.without, item.with_prefix
            columns = _columns(texts, BUSY)
        elif isinstance(item, ForceView):
            page.sessions.keep(session.id, item)
            forced = item.forced
            if forced.proof.forced:
                page.sessions.hold(session.id, Held(HELD, solved=forced.solved))
            columns = [
                said("Without the prefix", forced.plain_text),
                said("With the prefix", forced.text, forced.after, good=forced.proof.forced),
            ]
            saved = gr.File(offered("forced.safetensors", forced.save), visible=True)
            rest = [card(forced), asdict(forced.proof), saved]
        elif job.state in ("stopped", "failed"):
            columns = _columns(texts, IDLE)
        yield [status, *columns, *rest]


def _columns(texts: tuple[str, str], state: str) -> list[str]:
    """Without and with the prefix, as far as they have come."""
    titles = ("Without the prefix", "With the prefix")
    return [said(title, text, state=state) for title, text in zip(titles, texts, strict=True)]

"""Learn: five short lessons on what a prefix does, from cached numbers; no model is needed.

Everything a visitor sees is drawn from (step, slider, slider, guess) and a table of numbers: the
cached one, or the one that "Run it on the loaded model" has measured. `?lesson=2&x=4&y=3` opens the
page in that state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gradio as gr

from explorer import plots_lessons
from explorer.lessons import Lesson, answer, cached, lessons, result_of, start, stops
from explorer.session.learn import LearnView, measuring
from explorer.ui.controls import shown
from explorer.ui.learn_view import (
    SAY,
    equation,
    feedback,
    intro,
    notes,
    question,
    source,
    verdict,
)
from explorer.ui.live_plot import LivePlot
from explorer.ui.page import PRIVATE, STREAM

if TYPE_CHECKING:
    from explorer.session import Session
    from explorer.ui.page import Page


def learn_tab(page: Page) -> None:
    steps = lessons()
    first = steps[0]
    result = result_of(1)
    x0, y0 = start(1, result)
    step = gr.Radio(
        [(str(one.number), one.number) for one in steps],
        value=1,
        label=SAY["step"],
        elem_id="learn-step",
    )
    with gr.Row(elem_id="learn"):
        with gr.Column(min_width=300):
            words = gr.HTML(intro(first, result), elem_id="learn-text")
            x = gr.Slider(
                **_slider(first, result, 0, x0), elem_id="learn-x", elem_classes=["stops"]
            )
            y = gr.Slider(
                **_slider(first, result, 1, y0), elem_id="learn-y", elem_classes=["stops"]
            )
            asked = gr.HTML(question(first, result, x0, y0), elem_id="learn-question")
            guess = gr.Radio(_choices(first), value=None, label=SAY["guess"], elem_id="learn-guess")
            said = gr.HTML("", elem_id="learn-verdict")
        with gr.Column(min_width=300):
            figure = LivePlot(empty=SAY["empty"], elem_id="learn-figure")
            told = gr.HTML("", elem_id="learn-feedback")
            onward = gr.Button(visible=False, variant="primary", elem_id="learn-next")
    with gr.Accordion(SAY["equation"], open=False, elem_id="learn-equation"):
        formula = gr.HTML(equation(first))
    with gr.Row(elem_classes=["actions"]):
        run = gr.Button(SAY["run"], size="sm", scale=0, min_width=210)
        back = gr.Button(SAY["back"], size="sm", scale=0, min_width=210, visible=False)
    where = gr.HTML(source(first, 1, x0, y0, cached()["model"], None), elem_id="learn-source")
    with gr.Accordion(SAY["notes"], open=False):
        gr.HTML(notes(steps))

    place = [step, x, y, guess]
    drawn = [asked, said, told, figure, onward, where]
    whole = [words, x, y, guess, formula, back, *drawn]

    def opened(session: Session, number: int, x: int | None = None, y: int | None = None):
        lesson, result = steps[number - 1], _numbers(session, number)
        at = start(number, result)
        x, y = (default if one is None else one for one, default in zip((x, y), at, strict=True))
        x, y = _inside(number, result, x, y)
        return [
            intro(lesson, result),
            gr.Slider(**_slider(lesson, result, 0, x)),
            gr.Slider(**_slider(lesson, result, 1, y)),
            gr.Radio(_choices(lesson), value=None),
            equation(lesson),
            gr.Button(visible=_live(session, number) is not None),
            *redrawn(session, number, x, y, None),
        ]

    def redrawn(session: Session, number: int, x: int, y: int, guess: int | None):
        lesson, result = steps[number - 1], _numbers(session, number)
        x, y = _inside(number, result, int(x), int(y))
        live = _live(session, number)
        right = answer(number, result, x, y)
        return [
            question(lesson, result, x, y),
            "" if guess is None else verdict(lesson, guess, right),
            "" if guess is None else feedback(lesson, result, x, y),
            None if guess is None else plots_lessons.figure(number, result, x, y),
            _onward(steps, number) if guess is not None else gr.Button(visible=False),
            source(lesson, number, x, y, cached()["model"], live),
        ]

    @shown
    def on_step(number: int, request: gr.Request):
        """Open a step: its words, its sliders, its question."""
        return opened(page.session(request), number)

    @shown
    def on_next(number: int, request: gr.Request):
        number = min(number + 1, len(steps))
        return [number, *opened(page.session(request), number)]

    @shown
    def on_slide(number: int, x: int, y: int, guess: int | None, request: gr.Request):
        session = page.session(request)
        lesson, result = steps[number - 1], _numbers(session, number)
        labels = (_slider(lesson, result, which, int(at)) for which, at in enumerate((x, y)))
        sliders = [gr.Slider(label=one["label"]) for one in labels]
        return [*sliders, *redrawn(session, number, x, y, guess)]

    @shown
    def on_guess(number: int, x: int, y: int, guess: int | None, request: gr.Request):
        """Judge a prediction by the numbers, and show the figure."""
        return redrawn(page.session(request), number, x, y, guess)

    @page.told("Measuring")
    def on_run(number: int, request: gr.Request):
        """Measure a step on the loaded model."""
        session = page.session(request)
        job = page.start(session, measuring(session.spec, number), "Measuring")
        for status, view in page.follow(job):
            if view is None:
                yield [status, *[gr.skip()] * (1 + len(whole))]
            else:
                session = page.sessions.keep(session.id, view)
                # The visitor may have gone to another step meanwhile: this one opens again.
                yield [status, number, *opened(session, number)]

    @shown
    def on_back(number: int, request: gr.Request):
        session = page.sessions.forget(page.session(request).id, LearnView)
        return opened(session, number)

    @shown
    def on_open(request: gr.Request):
        asked = request.query_params
        number = _number(asked.get("lesson"), 1, len(steps))
        if number is None:
            return [gr.skip()] * (1 + len(whole))
        x, y = (_number(asked.get(name), 0, 99) for name in ("x", "y"))
        return [number, *opened(page.session(request), number, x, y)]

    quick = {**PRIVATE, "queue": False}
    public = {"show_progress": "hidden", "queue": False}
    opening = step.input(on_step, step, whole, api_name="learn_step", js=_AWAY, **public)
    opening.then(None, js=_HERE, **quick)
    following = onward.click(on_next, step, [step, *whole], js=_AWAY, **quick)
    following.then(None, js=_HERE, **quick).then(None, js=_TOP, **quick)
    gr.on([x.input, y.input], on_slide, place, [x, y, *drawn], trigger_mode="always_last", **quick)
    guess.input(on_guess, place, drawn, api_name="learn_guess", **public)
    run.click(on_run, step, [page.status, step, *whole], api_name="learn_run", **STREAM)
    back.click(on_back, step, whole, **quick)
    page.demo.load(on_open, None, [step, *whole], **quick)


# A guess made while the next step is on its way would be one on the old question.
_AWAY = "number => { document.querySelector('#learn').dataset.coming = ''; return [number]; }"
_HERE = "() => { delete document.querySelector('#learn').dataset.coming; }"
# The button that was pressed is gone: what comes next is in sight and has the focus.
_TOP = """() => {
  const text = document.querySelector('#learn-text');
  text.tabIndex = -1;
  text.focus({preventScroll: true});
  document.querySelector('#learn-step').scrollIntoView();
}"""


def _onward(steps: Sequence[Lesson], number: int) -> gr.Button:
    """To the next step, if there is one."""
    if number == len(steps):
        return gr.Button(visible=False)
    return gr.Button(SAY["next"].format(title=steps[number].title), visible=True)


def _live(session: Session, number: int) -> LearnView | None:
    view = session.last(LearnView)
    return view if view is not None and view.number == number else None


def _numbers(session: Session, number: int) -> Mapping[str, Any]:
    view = _live(session, number)
    return result_of(number) if view is None else view.result


def _choices(lesson: Lesson) -> list[tuple[str, int]]:
    return [(text, index) for index, text in enumerate(lesson.choices)]


def _inside(number: int, result: Mapping[str, Any], x: int, y: int) -> tuple[int, int]:
    first, second = stops(number, result)
    return min(x, len(first) - 1), min(y, max(0, len(second) - 1))


def _slider(lesson: Lesson, result: Mapping[str, Any], which: int, at: int) -> dict[str, Any]:
    """A slider over the places of a list; its label says what it stands at."""
    offered = stops(lesson.number, result)[which]
    if not offered:
        return {"minimum": 0, "maximum": 1, "step": 1, "value": 0, "visible": False, "label": ""}
    at = min(at, len(offered) - 1)
    return {
        "minimum": 0,
        "maximum": max(1, len(offered) - 1),
        "step": 1,
        "value": at,
        "visible": True,
        "label": lesson.sliders[which].format(at=offered[at], count=len(offered)),
    }


def _number(value: str | None, low: int, high: int) -> int | None:
    """A whole number out of an address, or None."""
    if value is None or not value.isascii() or not value.isdigit() or len(value) > 3:
        return None
    return min(max(int(value), low), high)

"""A lesson's words as HTML, filled with its numbers."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from explorer.lessons import Lesson, facts
from explorer.session.learn import LearnView

HIDDEN = "<p class='hint'>Guess first. The numbers judge, and then the figure appears.</p>"


def intro(lesson: Lesson) -> str:
    """Title and three sentences."""
    body = " ".join(html.escape(sentence) for sentence in lesson.text)
    return f"<div class='lesson'><h2>{html.escape(lesson.title)}</h2><p>{body}</p></div>"


def question(lesson: Lesson, result: Mapping[str, Any], x: int, y: int) -> str:
    """The prediction that is asked for, where the sliders stand."""
    return f"<p class='lesson-question'>{_filled(lesson.question, lesson, result, x, y)}</p>"


def verdict(lesson: Lesson, guess: int, right: int) -> str:
    """Whether the guess was right."""
    good = guess == right
    said = "✓ Yes" if good else f"✗ Not quite. It is: {html.escape(lesson.choices[right])}"
    mark = "good" if good else "bad"
    return f"<p class='lesson-verdict verdict {mark}' role='status'>{said}.</p>"


def feedback(lesson: Lesson, result: Mapping[str, Any], x: int, y: int) -> str:
    """The numbers that say so."""
    told = _filled(lesson.feedback, lesson, result, x, y)
    return f"<p class='lesson-feedback' role='status'>{told}</p>"


def equation(lesson: Lesson) -> str:
    """The equation, and each symbol in its colour of the figure."""
    rows = "".join(
        f"<tr><th scope='row'><b class='sym {colour}'>{html.escape(symbol)}</b></th>"
        f"<td>{html.escape(meaning)}</td></tr>"
        for symbol, colour, meaning in lesson.symbols
    )
    return f"<div class='equation'><p>{lesson.equation}</p><table>{rows}</table></div>"


def source(lesson: Lesson, number: int, x: int, y: int, model: str, live: LearnView | None) -> str:
    """Where in the papers it stands, which model answered, and the link to this state."""
    answered = (
        f"Measured on {html.escape(model)}, kept with the program."
        if live is None
        else f"Measured just now on {html.escape(live.spec.name)}, in {live.seconds:.0f} s."
    )
    link = f"?lesson={number}&amp;x={x}&amp;y={y}"
    return (
        f"<p class='hint'>In the paper: {html.escape(lesson.paper)} {answered} "
        f"<a href='{link}'>Link to this state</a></p>"
    )


def notes(steps: Sequence[Lesson]) -> str:
    """For teachers: what to do with each step, and how long it takes."""
    body = "".join(
        f"<li><b>{html.escape(one.title)}</b> ({one.minutes} min). {html.escape(one.notes)}</li>"
        for one in steps
    )
    whole = sum(one.minutes for one in steps)
    return f"<div class='intro'><p>{whole} minutes in all.</p><ol>{body}</ol></div>"


def _filled(words: str, lesson: Lesson, result: Mapping[str, Any], x: int, y: int) -> str:
    """Words with their numbers; what a model wrote is only text."""
    known = {
        key: html.escape(value) if isinstance(value, str) else value
        for key, value in facts(lesson.number, result, x, y).items()
    }
    return html.escape(words).format(**known)

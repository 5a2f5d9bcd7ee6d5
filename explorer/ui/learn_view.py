"""A lesson's words as HTML, filled with its numbers."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from explorer.lessons import Lesson, facts, phrases, result_of, start
from explorer.session.learn import LearnView

SAY = phrases()


def intro(lesson: Lesson, result: Mapping[str, Any]) -> str:
    """Title and three thoughts."""
    body = _filled(" ".join(lesson.text), lesson, result, *start(lesson.number, result))
    title = f"{lesson.number} · {html.escape(lesson.title)}"
    return f"<div class='lesson'><h2>{title}</h2><p>{body}</p></div>"


def question(lesson: Lesson, result: Mapping[str, Any], x: int, y: int) -> str:
    """The prediction that is asked for, where the sliders stand."""
    return f"<p class='lesson-question'>{_filled(lesson.question, lesson, result, x, y)}</p>"


def verdict(lesson: Lesson, guess: int, right: int) -> str:
    """Whether the guess was right."""
    good = guess == right
    said = SAY["yes"] if good else SAY["no"].format(answer=html.escape(lesson.choices[right]))
    mark = "good" if good else "bad"
    return f"<p class='lesson-verdict verdict {mark}' role='status'>{said}</p>"


def feedback(lesson: Lesson, result: Mapping[str, Any], x: int, y: int) -> str:
    """The numbers that say so."""
    told = _filled(lesson.feedback, lesson, result, x, y)
    return f"<p class='lesson-feedback' role='status'>{told}</p>"


def equation(lesson: Lesson) -> str:
    """The equation line by line, and each symbol in its colour of the figure."""
    lines = "".join(f"<p>{line}</p>" for line in lesson.equation)
    rows = "".join(
        f"<tr><th scope='row'><b class='sym {colour}'>{html.escape(symbol)}</b></th>"
        f"<td>{html.escape(meaning)}</td></tr>"
        for symbol, colour, meaning in lesson.symbols
    )
    return f"<div class='equation'>{lines}<table>{rows}</table></div>"


def source(lesson: Lesson, number: int, x: int, y: int, model: str, live: LearnView | None) -> str:
    """Where in the papers it stands, which model answered, and the link to this state."""
    if live is None:
        answered = SAY["cached"].format(model=html.escape(model))
    else:
        model = html.escape(live.spec.name)
        answered = SAY["live"].format(model=model, seconds=live.seconds)
    stands = SAY["paper"].format(paper=html.escape(lesson.paper))
    link = f"<a href='?lesson={number}&amp;x={x}&amp;y={y}'>{SAY['link']}</a>"
    return f"<p class='hint'>{stands} {answered} {link}</p>"


def notes(steps: Sequence[Lesson]) -> str:
    """For teachers: what to do with each step, and how long it takes."""

    def told(one: Lesson) -> str:
        kept = result_of(one.number)
        return _filled(one.notes, one, kept, *start(one.number, kept))

    body = "".join(
        f"<li><b>{html.escape(one.title)}</b> ({SAY['minutes'].format(minutes=one.minutes)}). "
        f"{told(one)}</li>"
        for one in steps
    )
    whole = SAY["whole"].format(minutes=sum(one.minutes for one in steps))
    return f"<div class='intro'><p>{whole}</p><ol>{body}</ol></div>"


def _filled(words: str, lesson: Lesson, result: Mapping[str, Any], x: int, y: int) -> str:
    """Words with their numbers; what a model wrote is only text."""
    known = {
        key: html.escape(value) if isinstance(value, str) else value
        for key, value in facts(lesson.number, result, x, y).items()
    }
    return html.escape(words).format(**known)

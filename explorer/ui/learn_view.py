"""A lesson's words as HTML, filled with its numbers."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from explorer.lessons import Lesson, facts, phrases
from explorer.session.learn import LearnView

SAY = phrases()
HIDDEN = f"<p class='hint'>{SAY['hidden']}</p>"


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
    said = SAY["yes"] if good else SAY["no"].format(answer=html.escape(lesson.choices[right]))
    mark = "good" if good else "bad"
    return f"<p class='lesson-verdict verdict {mark}' role='status'>{said}</p>"


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
    body = "".join(
        f"<li><b>{html.escape(one.title)}</b> ({SAY['minutes'].format(minutes=one.minutes)}). "
        f"{html.escape(one.notes)}</li>"
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

"""Five lessons on what a prefix does: words, cached numbers, and predictions judged by numbers.

The words lie in assets/lessons/en.json, apart from the code, so that they can be translated; the
numbers in assets/lessons/results.json, computed by `recipes` on real weights. Nothing in the words
says which answer is right: `answer` computes it from the numbers and from where the sliders stand,
so the same question can be asked of another model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from explorer.contenders import ORDER

FOLDER = Path(__file__).parents[2] / "assets" / "lessons"
RESULTS = FOLDER / "results.json"

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Lesson:
    """One step in words; `{…}` in them are the `facts` of the numbers.

    text: three thoughts    question, choices: the prediction    feedback: what the numbers say
    sliders: their labels, {at} being where they stand, out of {count}
    equation: its lines, with symbols in <b class="sym …">
    symbols: (symbol, class of its colour in the figure, meaning)    paper: where it stands
    figure: what its axes, lines and bars are called, and the finding in words ("alt")
    notes: for teachers    minutes: it takes in class
    """

    number: int
    title: str
    text: tuple[str, ...]
    question: str
    choices: tuple[str, ...]
    feedback: str
    sliders: tuple[str, ...]
    equation: tuple[str, ...]
    symbols: tuple[tuple[str, str, str], ...]
    figure: Mapping[str, str]
    paper: str
    notes: str
    minutes: int


@functools.cache
def _words(language: str) -> Mapping[str, Any]:
    return json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))


def phrases(language: str = "en") -> Mapping[str, str]:
    """What the page says around the steps."""
    return _words(language)["page"]


@functools.cache
def lessons(language: str = "en") -> tuple[Lesson, ...]:
    """The five steps."""
    steps = _words(language)["steps"]
    return tuple(
        Lesson(
            number=number,
            **{
                key: tuple(tuple(x) if isinstance(x, list) else x for x in value)
                if isinstance(value, list)
                else value
                for key, value in step.items()
            },
        )
        for number, step in enumerate(steps, start=1)
    )


@functools.cache
def cached() -> Mapping[str, Any]:
    """The whole file of cached results: model, origin, date, settings, results."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def result_of(number: int) -> Result:
    """The cached numbers of a step."""
    return cached()["results"][str(number)]


def stops(number: int, result: Result) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the step's two sliders can stand at; an empty tuple is a slider that is not there.

    Only what makes a question: one slot has no instruction behind it, and a text does not grow
    from the shortest length to the shortest.
    """
    if number == 1:
        return tuple(row["slots"] for row in result["rows"] if row["slots"]), ()
    if number == 2:
        slots = tuple(curve["slots"] for curve in result["curves"] if curve["slots"] > 1)
        return slots, tuple(result["lengths"])
    if number == 3:
        return tuple(result["openings"]), tuple(result["lengths"][1:])
    if number == 4:
        return tuple(one["slots"] for one in result["spectra"]), ()
    return tuple(range(1, len(result["said"]) + 1)), ()


def start(number: int, result: Result) -> tuple[int, int]:
    """Where the sliders stand at first: indices into `stops`."""
    first, second = stops(number, result)
    wanted = {1: (8, None), 2: (16, 128), 3: (0.5, 128), 4: (8, None), 5: (3, None)}[number]
    return tuple(
        offered.index(one) if one in offered else max(0, len(offered) - 1)
        for one, offered in zip(wanted, (first, second), strict=True)
    )


def place(number: int, result: Result, x: int, y: int) -> tuple[Any, Any]:
    """What the sliders stand at, x and y being indices into `stops`; None for one not there."""
    first, second = stops(number, result)
    return tuple(
        offered[min(max(at, 0), len(offered) - 1)] if offered else None
        for at, offered in zip((x, y), (first, second), strict=True)
    )


def of_slots(rows: Sequence[Result], slots: int) -> Result:
    """The entry with this number of slots."""
    return next(row for row in rows if row["slots"] == slots)


def facts(number: int, result: Result, x: int, y: int) -> dict[str, Any]:
    """The numbers that question and feedback speak of. x, y: indices into `stops`"""
    return _FACTS[number - 1](result, *place(number, result, x, y))


def _prefix(result: Result, slots: int, _: None) -> dict[str, Any]:
    row, plain = of_slots(result["rows"], slots), of_slots(result["rows"], 0)
    most = result["rows"][-1]
    return {
        "reads": result["prompt"],
        "instruction": ORDER,
        "slots": slots,
        **row["shares"],
        "sink_without": plain["shares"]["sink"],
        "next": row["next"][0][0].strip("·"),
        "next_without": plain["next"][0][0].strip("·"),
        "one": of_slots(result["rows"], 1)["shares"]["prefix"],
        "most": most["slots"],
        "all": most["shares"]["prefix"],
    }


def _one_softmax(result: Result, slots: int, length: int) -> dict[str, Any]:
    curve, at = of_slots(result["curves"], slots), result["lengths"].index(length)
    return {
        "slots": slots,
        "length": length,
        "shortest": result["lengths"][0],
        "behind": curve["behind"][at],
        "behind_short": curve["behind"][0],
        "first": curve["mean"][at] - curve["behind"][at],
        "rest": 1 - curve["mean"][at],
    }


def _gate(result: Result, opening: float, length: int) -> dict[str, Any]:
    gate = result["gates"][result["openings"].index(opening)]
    soft, at = result["one softmax"], result["lengths"].index(length)
    return {
        "opening": opening,
        "shortest": result["lengths"][0],
        "length": length,
        "gate_short": gate["size mean"][0],
        "gate_long": gate["size mean"][at],
        "soft_short": soft["size mean"][0],
        "soft_long": soft["size mean"][at],
        "part_short": gate["mean"][0],
        "part_long": gate["mean"][at],
        "soft_part_short": soft["mean"][0],
        "soft_part_long": soft["mean"][at],
        "silent": result["silent"],
    }


def _memory(result: Result, slots: int, _: None) -> dict[str, Any]:
    both = of_slots(result["spectra"], slots)
    decay = both["front"]["decay"]  # the axes below rounding are left out
    return {
        "slots": slots,
        "head_dim": result["head_dim"],
        "axes": both["front"]["axes"],
        "second": decay[1] if len(decay) > 1 else 0.0,
        "poured_axes": both["poured"]["axes"],
        "trained_axes": result["trained"]["axes"],
        "steps": result["steps"],
    }


def _cache(result: Result, number: int, _: None) -> dict[str, Any]:
    ordinary, solved = (result["signs"][f"{kind} prefix"] for kind in ("ordinary", "solved"))
    return {
        **result["said"][number - 1],
        "target": result["target"],
        "tokens": result["tokens"],
        "gap": result["gap"],
        "coverage": solved["covered"],
        "ordinary": ordinary["covered"],
        "effect": solved["prompt_effect"],
        "ordinary_effect": ordinary["prompt_effect"],
    }


_FACTS = (_prefix, _one_softmax, _gate, _memory, _cache)


def answer(number: int, result: Result, x: int, y: int) -> int:
    """Which of the lesson's choices the numbers say is right."""
    known = facts(number, result, x, y)
    if number == 1:  # under 10, 10 to 30, 30 to 60, over 60 percent
        return sum(known["prefix"] >= edge for edge in (0.1, 0.3, 0.6))
    if number == 2:  # under 1, 1 to 5, 5 to 10, over 10 percent
        return sum(known["behind"] >= edge for edge in (0.01, 0.05, 0.1))
    if number == 3:  # below half, within a factor of two, more than double
        before, after = known["gate_short"], known["gate_long"]
        return sum(after >= edge * before for edge in (0.5, 2)) if before else 1
    if number == 4:  # fewer than 2, 2 to 4, more than 4
        return sum(known["axes"] >= edge for edge in (2, 4))
    return 0 if known["forced"] else 1  # the text, something else

"""Five lessons on what a prefix does: words, cached numbers, and predictions judged by numbers.

The words lie in assets/lessons/en.json, apart from the code, so that they can be translated; the
numbers in assets/lessons/results.json, computed by `recipes` on real weights. Nothing in the words
says which answer is right: `answer` computes it from the numbers and from where the sliders stand,
so the same question can be asked of another model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "assets" / "lessons"
RESULTS = FOLDER / "results.json"

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Lesson:
    """One step in words; `{…}` in them are the `facts` of the numbers.

    text: three sentences    question, choices: the prediction    feedback: what the numbers say
    sliders: their labels    equation: with its symbols in <b class="sym …">
    symbols: (symbol, class of its colour in the figure, meaning)    paper: where it stands
    notes: for teachers    minutes: it takes in class
    """

    number: int
    title: str
    text: tuple[str, ...]
    question: str
    choices: tuple[str, ...]
    feedback: str
    sliders: tuple[str, ...]
    equation: str
    symbols: tuple[tuple[str, str, str], ...]
    paper: str
    notes: str
    minutes: int


@functools.cache
def lessons(language: str = "en") -> tuple[Lesson, ...]:
    """The five steps."""
    steps = json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))["steps"]
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
    """What the step's two sliders can stand at; an empty tuple is a slider that is not there."""
    if number == 1:
        return tuple(row["slots"] for row in result["rows"]), ()
    if number == 2:
        return tuple(curve["slots"] for curve in result["curves"]), tuple(result["lengths"])
    if number == 3:
        return tuple(result["openings"]), tuple(result["lengths"])
    if number == 4:
        return tuple(line["slots"] for line in result["spectra"] if line["slots"]), ()
    return tuple(range(1, len(result["said"]) + 1)), ()


def start(number: int, result: Result) -> tuple[int, int]:
    """Where the sliders stand at first: indices into `stops`."""
    first, second = stops(number, result)
    wanted = {1: (8, None), 2: (16, 128), 3: (0.5, 128), 4: (4, None), 5: (3, None)}[number]
    return tuple(
        offered.index(one) if one in offered else max(0, len(offered) - 1)
        for one, offered in zip(wanted, (first, second), strict=True)
    )


def facts(number: int, result: Result, x: int, y: int) -> dict[str, Any]:
    """The numbers that question and feedback speak of. x, y: indices into `stops`"""
    first, second = stops(number, result)
    x = min(max(x, 0), len(first) - 1)
    y = min(max(y, 0), max(0, len(second) - 1))
    if number == 1:
        row = result["rows"][x]
        plain = result["rows"][0]
        return {
            "slots": row["slots"],
            **row["shares"],
            "sink_without": plain["shares"]["sink"],
            "next": row["next"][0][0].strip("·"),
            "next_without": plain["next"][0][0].strip("·"),
            "words": " ".join(w.strip("·") for w in result["words"][: row["slots"]]) or "nothing",
        }
    if number == 2:
        curve = result["curves"][x]
        return {
            "slots": first[x],
            "length": second[y],
            "shortest": second[0],
            "behind": curve["behind"][y],
            "behind_short": curve["behind"][0],
            "first": curve["mean"][y] - curve["behind"][y],
            "rest": 1 - curve["mean"][y],
        }
    if number == 3:
        gate, soft = result["gates"][x]["mean"], result["one softmax"]["mean"]
        return {
            "opening": first[x],
            "shortest": second[0],
            "length": second[y],
            "gate_short": gate[0],
            "gate_long": gate[y],
            "soft_short": soft[0],
            "soft_long": soft[y],
            "silent": result["silent"],
        }
    if number == 4:
        lines = {line["slots"]: line for line in result["spectra"] if line["slots"]}
        memory = [line for line in result["spectra"] if not line["slots"]]
        return {
            "slots": first[x],
            "head_dim": result["head_dim"],
            "axes": lines[first[x]]["axes"],
            "memory_axes": memory[-1]["axes"],
            "memory": memory[-1]["name"],
        }
    said, signs = result["said"][x], result["signs"]
    return {
        **said,
        "target": result["target"],
        "coverage": signs["solved prefix"]["covered"],
        "ordinary": signs["ordinary prefix"]["covered"],
        "megabytes": result["megabytes"],
        "forced": said["forced"],
    }


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
    if number == 4:  # fewer than 2, from there to half the number of slots, more
        axes = known["axes"]
        return 0 if axes < 2 else 1 if axes <= known["slots"] / 2 else 2
    return 0 if known["forced"] else 1  # the text, something else

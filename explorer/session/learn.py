"""The step Learn: a lesson's numbers, measured anew on the loaded model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from explorer import models
from explorer.jobs import Stop, Work
from explorer.lessons.recipes import RECIPES
from explorer.lm import ModelSpec


@dataclass(frozen=True)
class LearnView:
    """What a lesson measured on a model. number: of the step    result: as the cached ones"""

    spec: ModelSpec
    number: int
    result: Mapping[str, Any]
    seconds: float


def measuring(spec: ModelSpec, number: int) -> Work:
    """→ a job that yields one LearnView, in the small sizes"""
    return partial(_measuring, spec, number)


def _measuring(spec: ModelSpec, number: int, stop: Stop) -> Iterator[LearnView]:
    lm = models.load(spec, stop.note)
    began = time.monotonic()
    result = RECIPES[number - 1](lm, True, stop.note)
    yield LearnView(spec, number, result, time.monotonic() - began)

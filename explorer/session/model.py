"""Make a visitor's model the loaded one, and say what answered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from explorer import models
from explorer.jobs import Stop, Work
from explorer.lm import Geometry, LoadedModel, ModelSpec, Origin


@dataclass(frozen=True)
class ModelView:
    """The loaded model in words and numbers. seconds: loading took; 0 if it was loaded already"""

    spec: ModelSpec
    origin: Origin
    geometry: Geometry
    device: str
    chat: bool
    seconds: float


def loading(spec: ModelSpec) -> Work:
    """→ a job that loads the model and yields its ModelView"""
    return partial(_loading, spec)


def _loading(spec: ModelSpec, stop: Stop) -> Iterator[ModelView]:
    began, before = time.monotonic(), models.current()
    lm = models.load(spec, stop.note)
    yield _view(lm, 0.0 if lm is before else time.monotonic() - began)


def fetching(spec: ModelSpec) -> Work:
    """→ a job that brings the model's files here and yields nothing; it needs no GPU"""
    return partial(_fetching, spec)


def _fetching(spec: ModelSpec, stop: Stop) -> Iterator[None]:
    models.fetch(spec, stop.note)
    yield from ()


def loaded(spec: ModelSpec) -> ModelView | None:
    """The view of a model that is loaded already; nobody has to wait for it."""
    lm = models.current()
    return _view(lm, 0.0) if lm is not None and lm.spec == spec else None


def _view(lm: LoadedModel, seconds: float) -> ModelView:
    return ModelView(
        spec=lm.spec,
        origin=lm.origin,
        geometry=lm.geometry,
        device=str(lm.device),
        chat=bool(getattr(lm.tokenizer, "chat_template", None)),
        seconds=seconds,
    )

"""A training run as JSON and arrays, and back.

What was asked and the numbers of every step are JSON that people can read; gates and spectra are
arrays beside it. Of a method's spectra by head only the latest is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from explorer.examples import Wording
from explorer.lm import ModelSpec
from explorer.session.order import (
    Curve,
    DataChoice,
    Entry,
    Look,
    Order,
    Score,
    TrainView,
    Trial,
)
from explorer.spectra import Spectrum
from explorer.training import FitConfig, named

Raw = Mapping[str, Any]


def view_out(view: TrainView, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """A view as JSON; its arrays are put into `arrays`, by name."""
    return {
        "spec": asdict(view.spec),
        "order": asdict(view.order),
        "example": list(view.example),
        "trial": view.trial,
        "memory": view.memory,
        "before": [asdict(score) for score in view.before],
        "other_before": [asdict(score) for score in view.other_before],
        "curves": [_curve_out(curve, index, arrays) for index, curve in enumerate(view.curves)],
    }


def view_in(run: str, raw: Raw, arrays: Mapping[str, np.ndarray]) -> TrainView:
    """The view that `view_out` wrote. The rows are divided again, by their seed."""
    order, trial = _order_in(raw["order"]), raw.get("trial", 0)
    curves = zip(raw.get("curves", ()), order.entries, strict=False)
    return TrainView(
        run=run,
        spec=ModelSpec(**raw["spec"]),
        order=order,
        split=order.data.split(trial),
        example=tuple(raw.get("example", ("", ""))),
        trial=trial,
        memory=raw.get("memory", 0),
        before=tuple(Score(**score) for score in raw.get("before", ())),
        other_before=tuple(Score(**score) for score in raw.get("other_before", ())),
        curves=tuple(_curve_in(*both, index, arrays) for index, both in enumerate(curves)),
        stopped=raw["state"] == "stopped",
    )


def _order_in(raw: Raw) -> Order:
    entries = tuple(
        Entry(
            entry["label"],
            entry["method"],
            named(entry["method"]).config(**entry["config"]),
            FitConfig(**entry["fitting"]),
        )
        for entry in raw["entries"]
    )
    return Order(
        **{
            **raw,
            "data": DataChoice(**raw["data"]),
            "other": None if raw["other"] is None else DataChoice(**raw["other"]),
            "wording": Wording(**raw["wording"]),
            "entries": entries,
        }
    )


def _score_in(raw: Raw | None) -> Score | None:
    return None if raw is None else Score(**raw)


def _curve_out(curve: Curve, index: int, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    looks = []
    for look in curve.looks:
        at = f"{index}/{look.step}"
        looks.append(
            {
                "step": look.step,
                "held_out_loss": look.held_out_loss,
                "bound": look.raw.bound,
                "n_positions": look.raw.n_positions,
            }
        )
        arrays[f"{at}/ratio"] = look.ratio
        if look.gates is not None:
            arrays[f"{at}/gates"] = look.gates
        for name in ("centred", "raw"):
            spectrum = getattr(look, name)
            if look is curve.looks[-1]:
                arrays[f"{at}/{name}/eigenvalues"] = np.ascontiguousarray(spectrum.eigenvalues)
            arrays[f"{at}/{name}/pooled"] = np.ascontiguousarray(spectrum.pooled)
    if curve.gates is not None:
        arrays[f"{index}/gates"] = curve.gates
    kept = ("n_parameters", "losses", "norms", "seconds", "tokens", "file", "error")
    return {
        **{name: getattr(curve, name) for name in kept},
        "looks": looks,
        "after": curve.after and asdict(curve.after),
        "other": curve.other and asdict(curve.other),
        "earlier": [asdict(trial) for trial in curve.earlier],
    }


def _curve_in(raw: Raw, entry: Entry, index: int, arrays: Mapping[str, np.ndarray]) -> Curve:
    def spectrum(look: Raw, name: str) -> Spectrum:
        at = f"{index}/{look['step']}/{name}"
        pooled = arrays[f"{at}/pooled"]
        shape = (*arrays[f"{index}/{look['step']}/ratio"].shape, len(pooled))
        eigenvalues = arrays.get(f"{at}/eigenvalues", np.zeros(shape))
        centred = name == "centred"
        return Spectrum(eigenvalues, pooled, look["bound"], look["n_positions"], centred)

    looks = tuple(
        Look(
            look["step"],
            look["held_out_loss"],
            arrays.get(f"{index}/{look['step']}/gates"),
            arrays[f"{index}/{look['step']}/ratio"],
            spectrum(look, "centred"),
            spectrum(look, "raw"),
        )
        for look in raw["looks"]
        if f"{index}/{look['step']}/ratio" in arrays
    )
    earlier = tuple(
        Trial(
            tuple(t["losses"]),
            tuple(t["norms"]),
            tuple((step, loss) for step, loss in t["held_out"]),
            _score_in(t["after"]),
            _score_in(t["other"]),
        )
        for t in raw["earlier"]
    )
    return Curve(
        entry=entry,
        n_parameters=raw["n_parameters"],
        losses=tuple(raw["losses"]),
        norms=tuple(raw["norms"]),
        seconds=tuple(raw["seconds"]),
        tokens=tuple(raw["tokens"]),
        gates=arrays.get(f"{index}/gates"),
        looks=looks,
        after=_score_in(raw["after"]),
        other=_score_in(raw["other"]),
        file=raw["file"],
        error=raw["error"],
        earlier=earlier,
    )

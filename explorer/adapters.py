"""Adapters as files: safetensors with readable metadata, checked before anything is believed.

What is saved says which method and settings made it, for which model at which precision, from what
data and seed, and with which versions. Opening a file runs no code; a file that is something else,
is cut off, or belongs to another model is refused with a sentence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from explorer import tensorfile
from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.methods import Adapter, Method, methods, n_parameters

FORMAT = "prefix-explorer adapter 1"


@dataclass(frozen=True)
class Card:
    """What an adapter's file says about it.

    method: its name    config: its knobs    n_parameters: trained numbers
    span: position at which a text continues under it
    model, revision, quantization, precision, source, sizes: of the model it was trained on
    training: steps, seed, data and its hash, losses, … whatever its maker wrote down
    versions: of the packages that made it
    """

    method: str
    config: Mapping[str, Any]
    model: str
    revision: str
    quantization: str
    precision: str
    source: str
    sizes: Mapping[str, int]
    n_parameters: int
    span: int = 0
    training: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def describe(
    lm: LoadedModel, method: Method, adapter: Adapter, training: Mapping[str, Any] | None = None
) -> Card:
    """The card of an adapter that was trained on `lm`."""
    packages = ("torch", "transformers", "peft", "safetensors")
    return Card(
        method=method.name,
        config=dataclasses.asdict(adapter.config),
        model=lm.spec.told,
        revision=lm.spec.revision,
        quantization=lm.spec.quantization,
        precision=lm.origin.precision,
        source=lm.origin.source,
        sizes=dataclasses.asdict(lm.geometry),
        n_parameters=n_parameters(adapter),
        span=adapter.span,
        training=dict(training or {}),
        versions={name: version(name) for name in packages},
    )


def save(path: str | Path, adapter: Adapter, card: Card) -> Path:
    """Write an adapter and its card. An older file is replaced only when the new one is whole."""
    tensors = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in adapter.state_dict().items()
    }
    written = json.dumps(dataclasses.asdict(card), ensure_ascii=False, allow_nan=False)
    return tensorfile.write(path, tensors, {"format": FORMAT, "card": written})


def inspect(path: str | Path) -> Card:
    """The card of a file, without its tensors. Raises ExplorerError if it is no adapter of ours."""
    path = Path(path)
    metadata = tensorfile.header(path).get("__metadata__", {})
    if metadata.get("format") != FORMAT:
        raise ExplorerError(
            f"{path.name} is a safetensors file, but not an adapter made here.",
            "Choose a file that the Train place has saved.",
        )
    try:
        return _typed(Card(**json.loads(metadata["card"])))
    except (KeyError, TypeError, ValueError) as error:
        raise ExplorerError(
            f"{path.name} is an adapter whose description cannot be read.",
            "It was changed, or made by a newer version of this program.",
        ) from error


def _typed(card: Card) -> Card:
    """The card, if it holds text, counts and mappings where it should. Raises TypeError."""
    kinds = {"str": str, "int": int}
    for one in dataclasses.fields(card):
        value = getattr(card, one.name)
        if not isinstance(value, kinds.get(one.type, dict)):
            raise TypeError(f"{one.name} of a card cannot be {value!r}")
    return card


def load(path: str | Path, lm: LoadedModel) -> tuple[Adapter, Card]:
    """An adapter out of a file, ready to be applied to `lm`.

    Raises ExplorerError for a file that is no adapter, is incomplete, or is for another model.
    """
    path = Path(path)
    card = inspect(path)
    known = methods("train")
    if card.method not in known:
        raise ExplorerError(
            f"{path.name} was made by a method called {card.method}, which is not known here.",
            f"Known are {', '.join(known)}.",
        )
    _check_model(path.name, card, lm)
    method = known[card.method]
    try:
        adapter = method.build(lm, method.config(**card.config), 0)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        adapter.load_state_dict(tensors)
    except (SafetensorError, RuntimeError, TypeError, ValueError) as error:
        raise ExplorerError(
            f"{path.name} does not hold what its description says.",
            "It is damaged, or was made by another version of this program.",
        ) from error
    if not all(torch.isfinite(p).all() for p in adapter.parameters()):
        raise ExplorerError(f"{path.name} holds numbers that are not finite.", "Train it again.")
    return adapter, card


@dataclass(frozen=True)
class Saved:
    """An adapter that lives in a file until it is applied: what a visitor's session keeps."""

    path: str
    span: int = 0

    @contextmanager
    def applied(self, lm: LoadedModel) -> Iterator[None]:
        """Open the file, and answer with its adapter for the length of a `with` block."""
        with load(self.path, lm)[0].applied(lm):
            yield


def differences(card: Card, lm: LoadedModel) -> tuple[str, ...]:
    """What is not as it was when the adapter was trained, in sentences."""
    said = []
    if card.precision != lm.origin.precision:
        said.append(f"Trained on {card.precision}; loaded now: {lm.origin.precision}.")
    if card.source != lm.origin.source:
        said.append(f"Trained on weights from {card.source}; loaded now: {lm.origin.source}.")
    return tuple(said)


def _check_model(name: str, card: Card, lm: LoadedModel) -> None:
    same = card.model == lm.spec.told and card.revision == lm.spec.revision
    if not same or dict(card.sizes) != dataclasses.asdict(lm.geometry):
        trained = card.model + ("" if card.revision == "main" else f"@{card.revision}")
        raise ExplorerError(
            f"{name} was trained for {trained}; the loaded model is {lm.spec.told}.",
            f"Load {trained} and open the file again.",
        )

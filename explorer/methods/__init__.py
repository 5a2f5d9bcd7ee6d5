"""One file per method. A file here that defines METHOD is a method; nothing else to edit.

Every method that acts on attention has the form

    o = a(q) · o_X + b(q)

and says so by `parts`: from it come the patch that applies the adapter and the bias spectrum.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from explorer.attention import AttentionCall, Output, Patch
from explorer.lm import LoadedModel

# a: (b, h, q) or None for 1    b: (b, h, q, d), float32
Part = tuple[Tensor | None, Tensor]
# None for a layer that is left alone
Parts = Callable[[AttentionCall], Part | None]


class Adapter(Protocol):
    """What training leaves behind: an nn.Module that owns float32 parameters, and only these.

    config: the dataclass it was built from
    span: position at which a text continues under it; 0 but for a prefix that stands before it
    """

    config: Any
    span: int

    def applied(self, lm: LoadedModel) -> AbstractContextManager[None]:
        """For the length of a `with` block the model answers with the adapter."""
        ...

    def parts(self, lm: LoadedModel) -> Parts | None:
        """a and b for every call; None for a method that does not have the form a · o_X + b."""
        ...

    def gates(self) -> Tensor | None:
        """How open every head is, in [−1, 1], NaN where there is no gate; (l, h), or None."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> object: ...


@dataclass(frozen=True)
class Method:
    """A named way to obtain an adapter. `config` is a dataclass; its knobs become the controls.

    name: how it is called in code and files    title: for people
    kind: "train" methods are built and then fitted to data; "solve" methods need no data
    build: for "train", (lm, config, seed) → an adapter on the model's device, ready to be fitted
    sized: for "train", (lm, config, n) → the config whose parameters come closest to n
    learning_rate: for "train", with which it learns well on small models
    variants: the forms of it that are worth comparing, as knobs to set, by what charts call them
    """

    name: str
    title: str
    summary: str
    source: str
    config: type
    build: Callable[..., Any]
    kind: Literal["train", "solve"] = "train"
    learning_rate: float = 1e-3
    variants: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    sized: Callable[[LoadedModel, Any, int], Any] | None = None


def knob(
    default: Any,
    label: str,
    low: float | None = None,
    high: float | None = None,
    *,
    choices: Sequence[Any] = (),
    help: str = "",
) -> Any:
    """A config field that the page shows: a menu of choices, a range, a box to tick, or a text."""
    metadata = {"label": label, "low": low, "high": high, "choices": tuple(choices), "help": help}
    return dataclasses.field(default=default, metadata=metadata)


def check(config: Any) -> None:
    """Raise ValueError for a value outside what its knob offers."""
    for field in dataclasses.fields(config):
        value, has = getattr(config, field.name), field.metadata
        if has.get("choices") and value not in has["choices"]:
            raise ValueError(f"{field.name} must be one of {has['choices']}, not {value!r}")
        if has.get("low") is not None and not has["low"] <= value <= has["high"]:
            raise ValueError(f"{field.name} must be in [{has['low']}, {has['high']}], not {value}")


def mix(output: Tensor, part: Part) -> Tensor:
    """a · o_X + b, in the precision of o_X. output: (b, q, h, d) → the same shape"""
    own_share, extra = part
    if own_share is None:
        return output + extra.transpose(1, 2).to(output.dtype)
    mixed = torch.addcmul(extra, own_share[..., None], output.transpose(1, 2).float())
    return mixed.transpose(1, 2).to(output.dtype)


def patch_of(parts: Parts) -> Patch:
    """The patch that answers a · o_X + b."""

    def patch(call: AttentionCall) -> Output:
        part = parts(call)
        output, weights = call.run()  # (b, q, h, d)
        return (output if part is None else mix(output, part)), weights

    return patch


def asking(adapter: Any, lm: LoadedModel) -> AbstractContextManager[None]:
    """For the length of a block, what `adapter.parts(lm)` gave may be called without `applied`.

    Most need nothing for that; a memory that reads unrotated queries needs the model's tables.
    """
    reading = getattr(adapter, "reading", None)
    return nullcontext() if reading is None else reading(lm)


def n_parameters(adapter: Adapter) -> int:
    """How many numbers the adapter trains."""
    return sum(parameter.numel() for parameter in adapter.parameters())


def methods(kind: Literal["train", "solve"] | None = None) -> dict[str, Method]:
    """Every method by name, in order of the files. A file without METHOD fails here, loudly."""
    modules = (
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
    )
    found = [module.METHOD for module in modules]
    return {method.name: method for method in found if kind in (None, method.kind)}

"""LoRA: a low-rank addition to the weights of linear layers, by peft, as the yardstick.

    Wx  →  Wx + (s/r) · B A x,    B = 0 at the start

Source: Hu et al. 2021, "LoRA" (arXiv 2106.09685). The layers are peft's own, for dense and for
bitsandbytes weights. peft puts them into a model for good; here each is made around the frozen
layer outside of the model, and takes that layer's place only inside `applied`. It is the one method
that changes queries, keys and values rather than what attention answers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn

from explorer.lm import LoadedModel
from explorer.methods import Method, check, knob, n_parameters
from explorer.projections import attention_modules

Targets = Literal["query and value", "attention", "all linear"]


@dataclass(frozen=True)
class LoraConfig:
    rank: int = knob(8, "Rank", 1, 256, help="r, the inner size of the added product.")
    scale: float = knob(16.0, "Scale", 1.0, 256.0, help="s; what is added is multiplied by s/r.")
    targets: Targets = knob(
        "query and value",
        "Where it is added",
        choices=get_args(Targets),
        help="query and value: what peft takes by default, fused projections included.",
    )

    def __post_init__(self):
        check(self)


class Lora(nn.Module):
    """layers: by the module's path, peft's layer around the model's own linear layer"""

    span = 0

    def __init__(self, lm: LoadedModel, config: LoraConfig, seed: int = 0):
        super().__init__()
        self.config = config
        layers = _wrap(lm, config, seed)
        # Only what trains is a parameter of this module; the frozen layers stay the model's, and
        # an adapter that is kept does not keep the model.
        self.weights = nn.ParameterDict(
            {
                _key(name, part): getattr(layer, f"lora_{part}")["default"].weight
                for name, layer in layers.items()
                for part in ("A", "B")
            }
        )
        self._layers = WeakKeyDictionary({lm: layers})

    @contextmanager
    def applied(self, lm: LoadedModel) -> Iterator[None]:
        replaced = []
        with lm.lock:
            try:
                for name, layer in self._around(lm).items():
                    path, _, child = name.rpartition(".")
                    parent = lm.model.get_submodule(path)
                    there = getattr(parent, child)
                    if any(one is layer for one in _around_one_another(there)):
                        raise ValueError("this LoRA is applied already; it would count once only")
                    replaced.append((parent, child, there, layer, layer.base_layer))
                    layer.base_layer = there  # the model's own, or another adapter's around it
                    setattr(parent, child, layer)
                yield
            finally:
                for parent, child, there, layer, own in reversed(replaced):
                    setattr(parent, child, there)
                    layer.base_layer = own

    def _around(self, lm: LoadedModel) -> dict[str, nn.Module]:
        """peft's layers around those of this model, with the weights of this adapter."""
        if lm not in self._layers:
            layers = _wrap(lm, self.config, 0)
            for name, layer in layers.items():
                for part in ("A", "B"):
                    getattr(layer, f"lora_{part}")["default"].weight = self.weights[
                        _key(name, part)
                    ]
            self._layers[lm] = layers
        return self._layers[lm]

    def parts(self, lm: LoadedModel) -> None:  # noqa: ARG002
        return None

    def gates(self) -> None:
        return None


def _key(name: str, part: str) -> str:
    return f"{name.replace('.', '/')}/{part}"


def _targets(lm: LoadedModel, where: Targets) -> dict[str, nn.Module]:
    """Linear layers by their path in the model."""
    attention = [found.name for found in attention_modules(lm).values()]
    head = lm.model.get_output_embeddings()
    linear = {
        name: module
        for name, module in own_modules(lm)
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and module is not head
    }
    if where == "all linear":
        inside = tuple(name.rpartition(".")[0] + "." for name in attention)  # the blocks
        return {name: module for name, module in linear.items() if name.startswith(inside)}
    linear = {
        name: module
        for name, module in linear.items()
        if name.startswith(tuple(f"{one}." for one in attention))
    }
    if where == "attention":
        return linear
    family = lm.model.config.get_text_config().model_type
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    kinds = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(family, ())
    chosen = {name: m for name, m in linear.items() if name.rpartition(".")[2] in kinds}
    return chosen or linear


def own_modules(lm: LoadedModel) -> Iterator[tuple[str, nn.Module]]:
    """The model's modules by path, as they are without any LoRA that may be applied right now."""
    inside: tuple[str, ...] = ()
    for name, module in lm.model.named_modules():  # parents come first
        if name.startswith(inside):
            continue
        if hasattr(module, "get_base_layer"):
            inside += (f"{name}.",)
            yield name, module.get_base_layer()
        else:
            yield name, module


def _around_one_another(layer: nn.Module | None) -> Iterator[nn.Module]:
    """A layer and what it stands around, down to the model's own."""
    while layer is not None:
        yield layer
        layer = getattr(layer, "base_layer", None)


def _wrap(lm: LoadedModel, config: LoraConfig, seed: int) -> dict[str, nn.Module]:
    """peft's layers around the model's, by path; the model itself is not touched."""
    # peft brings bitsandbytes with it, seconds of import that a page can do without at its start.
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    linear = _targets(lm, config.targets)
    holder = nn.ModuleDict({name.replace(".", "/"): module for name, module in linear.items()})
    for mark in ("is_loaded_in_8bit", "is_loaded_in_4bit"):
        setattr(holder, mark, getattr(lm.model, mark, False))
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.scale,
        target_modules=list(holder),
        bias="none",
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in linear.values()),
    )
    devices = [lm.device] if lm.device.type == "cuda" else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config, holder)
    for layer in holder.values():
        for part in (layer.lora_A["default"], layer.lora_B["default"]):
            part.float().requires_grad_(True)
    return {name: holder[name.replace(".", "/")] for name in linear}


def build(lm: LoadedModel, config: LoraConfig, seed: int = 0) -> Lora:
    return Lora(lm, config, seed)


def sized(lm: LoadedModel, config: LoraConfig, n: int) -> LoraConfig:
    """The rank that comes closest to n parameters."""
    one = n_parameters(Lora(lm, replace(config, rank=1)))
    return replace(config, rank=max(1, min(256, round(n / one))))


METHOD = Method(
    name="lora",
    title="LoRA",
    summary="A low-rank addition to the model's weights; the yardstick from peft.",
    source="https://arxiv.org/abs/2106.09685",
    config=LoraConfig,
    build=build,
    sized=sized,
    learning_rate=3e-3,
    variants={"LoRA": {}},
)

"""A language model that never changes, and the one way to run it.

It stands apart from `models` (which fetches and quantises) because the seam in `attention`
needs this noun, and loading needs the seam for its self-test.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from explorer.errors import ExplorerError

Quantization = Literal["none", "int8", "nf4", "fp4"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ModelSpec:
    """Everything that decides which weights answer; equal specs share one model.

    name: a preset, a hub id, a local folder, or a GGUF file
    device: "auto" takes the GPU where there is one, all of them where there are several
    """

    name: str = "smollm2-135m"
    revision: str = "main"
    quantization: Quantization = "none"
    dtype: Dtype = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    @property
    def told(self) -> str:
        """The name without the folders of the machine it lies on, as files tell it."""
        path = Path(self.name).expanduser()
        return path.name if path.exists() else self.name


@dataclass(frozen=True)
class Origin:
    """What really answers: shown in the page, saved with every adapter.

    source: where the weights came from    licence: theirs, with its address
    precision: what they are held in, and whether they came from a lossy file
    attention: transformers' attention implementation    n_bytes: of all weights and buffers
    """

    source: str
    licence: str
    precision: str
    attention: str
    n_bytes: int


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model: l, h, g, d, m and v of the package's legend.

    head_dim: of the widest layer    context: the longest text it was made for, in tokens
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What the slots of a prefix must agree with: l, h, g, d."""
        return self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim

    @classmethod
    def of(cls, model: PreTrainedModel) -> Geometry:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        return cls(
            n_layers=config.num_hidden_layers,
            n_heads=heads,
            n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            context=getattr(config, "max_position_embeddings", None) or 2048,
        )


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A frozen model, its tokenizer, and the lock that says whose turn it is.

    learned: whether positions are looked up in a table, which ends with the context
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    geometry: Geometry
    spec: ModelSpec
    origin: Origin
    learned: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in."""
        return self.model.dtype

    def logits(
        self,
        ids: Tensor,
        *,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        start: int = 0,
        last: int | None = None,
        at: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Next-token scores. The only forward pass in the package.

        It takes the lock, so a patch that one thread has installed is never seen by another.
        Gradients follow the caller's grad mode. A cache that is handed in is appended to.

        ids: (b, q)
        mask: (b, k) 1 for a token, 0 for padding on either side, over cached and new tokens
        start: position of the first token of each row, counted from the first that is not padding
               (with a cache: position of the first new token, or without padding only)
        last: score only the last so many positions
        at: score only these tokens, (n,), ascending, counted through all rows: i·q + j
        positions: (1 or b, q) position of every token, where they do not simply follow `start`
        → (b, q or last, v), or (n, v) with `at`; float32

        Raises ExplorerError where learned positions end before the text does: on a GPU the lookup
        would take the whole process with it.
        """
        if not self.learned:
            end = 0
        elif positions is not None:
            end = int(positions.max()) + 1
        else:
            before = start if mask is None or mask.shape == ids.shape else 0
            end = before + (ids if mask is None else mask).shape[1]
        if end > self.geometry.context:
            raise ExplorerError(
                f"With what stands before it the text ends at position {end:,}; this model has "
                f"{self.geometry.context:,}.",
                "Take a shorter text, or fewer slots.",
            )
        ids = ids.to(self.device)
        mask = None if mask is None else mask.to(self.device)
        if positions is not None:
            positions = positions.to(self.device)
        elif mask is None:
            positions = start + torch.arange(ids.shape[1], device=ids.device)[None]
        else:
            past = mask.shape[1] - ids.shape[1]
            counted = (mask.cumsum(-1) - 1).clamp(min=0)[:, past:]
            positions = counted + (start if past == 0 else 0)
        options = {} if last is None else {"logits_to_keep": last}
        with self.lock, nullcontext() if at is None else self._scored(at):
            out = self.model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=cache is not None,
                **options,
            )
        if at is None:
            return out.logits.float()
        flat = out.logits.flatten(0, 1)
        return (flat if len(flat) == len(at) else flat[at.to(flat.device)]).float()

    @contextmanager
    def _scored(self, at: Tensor) -> Iterator[None]:
        """For the length of a block, the output layer is handed these tokens only.

        `logits_to_keep` takes the same columns of all rows, which is most of them where answers
        stand in different places, and scoring a token is a fifth of all work in a small model.
        """

        def pick(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            (hidden,) = given
            return (hidden.flatten(0, 1)[at.to(hidden.device)][None],)

        handle = self.model.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            yield
        finally:
            handle.remove()

    def new_cache(self) -> DynamicCache:
        """An empty cache of the kind this model decodes with."""
        return DynamicCache(config=self.model.config.get_text_config())


def freeze(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    spec: ModelSpec | None = None,
    origin: Origin | None = None,
) -> LoadedModel:
    """From here on nothing in `model` trains or drops out."""
    model.requires_grad_(False).eval()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            # In eval mode, CPUs with AVX512-BF16 repack 4-bit weights at the first inference and
            # from then on let no gradient through (bitsandbytes nn/modules.py, Linear4bit.forward).
            # The layer has no dropout, so train mode changes nothing else.
            module.train()
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise TypeError(f"{type(model).__name__}.forward takes no logits_to_keep")
    if origin is None:
        origin = Origin(
            source="memory",
            licence="unknown",
            precision=str(model.dtype).removeprefix("torch."),
            attention=model.config._attn_implementation,
            n_bytes=bytes_of(model),
        )
    learned = any(
        isinstance(module, nn.Embedding) and re.search(r"wpe$|position", name)
        for name, module in model.named_modules()
    )
    spec = spec or ModelSpec("memory")
    return LoadedModel(model, tokenizer, Geometry.of(model), spec, origin, learned)


def bytes_of(model: PreTrainedModel) -> int:
    """Bytes of weights and buffers, shared storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())

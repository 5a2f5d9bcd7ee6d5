"""Move keys to other positions, with the model's own rotary tables.

A slot made for the query at position i serves the query at position i + δ once it is rotated by δ:
rotary embedding makes q·k depend on distances only. The rotation is not written again here: the
tables (cos, sin) are those that the attention module itself is handed, per layer, and they are
applied by its own `apply_rotary_pos_emb`, which also knows partial rotary embeddings. Whether a
layer is rotary at all is tried, not assumed: some layers of some models are not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from explorer.attention import AttentionCall, Output, patched
from explorer.lm import LoadedModel

_PROBE = 37  # a distance with no special relation to any rotary frequency


@dataclass(frozen=True)
class Rotation:
    """What moves keys by a fixed number of positions, layer by layer.

    tables: per layer (module, cos, sin) with cos, sin (1, 1, rotated size), or None for a layer
            that does not rotate
    """

    tables: tuple[tuple[nn.Module, Tensor, Tensor] | None, ...]

    def __call__(self, layer: int, key: Tensor) -> Tensor:
        """key: (g, p, d), CPU → the same keys, moved; float32"""
        table = self.tables[layer]
        if table is None:
            return key
        module, cos, sin = table
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        moved, _ = rotate(key[None].float(), key[None].float(), cos, sin)
        return moved[0]


@contextmanager
def _handed(lm: LoadedModel) -> Iterator[dict[int, tuple[nn.Module, Tensor, Tensor]]]:
    """Collect, for the length of a block, the rotary tables each attention module is handed."""
    seen: dict[int, tuple[nn.Module, Tensor, Tensor]] = {}

    def keep(module: nn.Module, args: tuple, kwargs: dict) -> None:
        for one in (*args, *kwargs.values()):
            if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], Tensor):
                seen[module.layer_idx] = (module, *one)

    modules = [m for m in lm.model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")]
    handles = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def unrotating(lm: LoadedModel) -> Iterator[Callable[[int, Tensor], Tensor]]:
    """For the length of a block, a function that takes rotary embedding off again.

    It is given a layer and that layer's queries, or keys of the same positions, (b, n, q, d), as
    the running forward pass hands them to attention. Layers that do not rotate come back as they
    are. Turning back divides by cos² + sin², which is 1 but for scaled rotary embeddings.
    """
    rotary = rotary_layers(lm)
    with lm.lock, _handed(lm) as seen:

        def back(layer: int, states: Tensor) -> Tensor:
            if layer not in rotary:
                return states
            module, cos, sin = seen[layer]
            rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
            size = cos.square() + sin.square()
            moved, _ = rotate(states, states, cos / size, -sin / size)
            return moved

        yield back


def rotation(lm: LoadedModel, shift: int) -> Rotation:
    """The rotation by `shift` positions, which may be negative, for every layer of `lm`."""
    return rotations(lm, [shift])[0]


@torch.no_grad()
def rotations(lm: LoadedModel, shifts: Sequence[int]) -> list[Rotation]:
    """Rotations by several distances, their tables read off one forward pass.

    Dividing by the table at 0 takes out the attention factor that some scaled rotary embeddings
    multiply in. A negative shift turns by the same angle the other way.
    """
    positions = [0, *(abs(shift) for shift in shifts)]
    with _handed(lm) as seen:
        ids = torch.ones(1, len(positions), dtype=torch.long)
        lm.logits(ids, positions=torch.tensor([positions]), last=1)
    rotary = rotary_layers(lm)
    turns = []
    for i, shift in enumerate(shifts, start=1):
        tables: list[tuple[nn.Module, Tensor, Tensor] | None] = []
        for layer in range(lm.geometry.n_layers):
            if layer not in rotary or shift == 0:
                tables.append(None)
                continue
            module, cos, sin = seen[layer]
            factor = cos[:, :1].float().cpu()
            cos, sin = (t[:, i : i + 1].float().cpu() / factor for t in (cos, sin))
            tables.append((module, cos, sin if shift > 0 else -sin))
        turns.append(Rotation(tuple(tables)))
    return turns


_rotary: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()  # tried models


@torch.no_grad()
def rotary_layers(lm: LoadedModel) -> frozenset[int]:
    """The layers whose queries turn with position as the tables they are handed say.

    Empty for models with learned positions: their slots cannot be moved.
    """
    known = _rotary.get(lm.model)
    if known is not None:
        return known
    queries: dict[int, list[Tensor]] = {}

    def keep(call: AttentionCall) -> Output:
        queries.setdefault(call.layer, []).append(call.query[0].float().cpu())
        return call.run()

    ids = torch.arange(3, 7)[None] % lm.geometry.vocab_size
    with patched(lm, keep):
        lm.logits(ids)
        lm.logits(ids, start=_PROBE)
    with _handed(lm) as seen:
        lm.logits(ids[:, :2], positions=torch.tensor([[0, _PROBE]]))
    found = set()
    for layer, (module, cos, sin) in seen.items():
        factor = cos[:, :1].float().cpu()
        table = (module, *(t[:, 1:].float().cpu() / factor for t in (cos, sin)))
        at_zero, moved = queries[layer]
        turned = Rotation((None,) * layer + (table,))(layer, at_zero)
        still, error = (moved - at_zero).norm(), (moved - turned).norm()
        if error < 0.05 * still:
            found.add(layer)
    _rotary[lm.model] = frozenset(found)
    return _rotary[lm.model]

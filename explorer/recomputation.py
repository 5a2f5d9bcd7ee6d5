"""Gradients at the price of time instead of memory: layers keep their input and compute again.

transformers' own switch needs the model in train mode, which would also switch dropout on, and
leaves attributes behind. Here each block's `forward` is wrapped for the length of a `with` block;
the backward pass must run inside it, where patches and adapters are in force as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint

from explorer.lm import LoadedModel
from explorer.projections import attention_modules


@contextmanager
def recomputed(lm: LoadedModel) -> Iterator[None]:
    """Every block of `lm` keeps only its input for the backward pass."""
    paths = {found.name.rpartition(".")[0] for found in attention_modules(lm).values()}
    with lm.lock:
        blocks = [lm.model.get_submodule(path) for path in sorted(paths)]
        try:
            for block in blocks:
                block.forward = partial(
                    checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
                )
            yield
        finally:
            for block in blocks:
                vars(block).pop("forward", None)

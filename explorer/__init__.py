"""Look inside prefixes: what they do to attention, how to solve and fit them, what they cost.

    import explorer

    lm = explorer.load("smollm2-135m", quantization="none")
    explorer.mass(lm, "The cat sat on the mat.").of("sink")
    forced = explorer.force(lm, target="Anything you like.", prompt="Who are you?")
    for step in explorer.train(lm, data, method="prefix-memory", steps=20, seed=0): ...
    for answer in explorer.chat(lm, "Who are you?", adapter=step.adapter): ...

Read in this order: lm → attention → models → prefix → shares → trajectory → methods → forcing →
tradeoff → training → lessons → session → ui. Each module imports only modules above it;
tests/test_layers.py holds the list.

Dimension letters in every shape:
    b batch    l layers   h query heads   g key/value heads (g ≤ h)
    q queries  k keys     p prefix slots  d head size   m hidden size   v vocabulary
"""

from __future__ import annotations

import importlib
import os

# Before torch is imported: on few cores its threads otherwise wait for one another by spinning,
# which has been seen to cost a factor of 17.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Public name → module that defines it. Found when first asked for, so that `import explorer` is
# quick and the page can open while torch is still being read from disk. No name here may also be
# a module's: the module would hide it.
_PUBLIC = {
    "ExplorerError": "errors",
    "ModelSpec": "lm",
    "Prefix": "prefix",
    "chat": "conversation",
    "force": "forcing",
    "load": "models",
    "mass": "shares",
    "trade_off": "tradeoff",
    "train": "training",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'explorer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"explorer.{_PUBLIC[name]}"), name)

"""What each lesson measures. The cached results and "Run it on the loaded model" both come from
here: a recipe is (lm, live) → JSON-able numbers. live: smaller, for somebody who waits.

SETTINGS holds everything that decides the numbers besides code and weights; its hash is kept with
the results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch

from explorer import text
from explorer.contenders import BehindGate, order, poured, prefixes, sentences
from explorer.detection import Signs, signs
from explorer.forcing import ForcedPrefix, force, placed
from explorer.generate import greedy, stop_tokens
from explorer.lm import LoadedModel
from explorer.methods import Adapter, methods
from explorer.prefix import Prefix
from explorer.shares import mass
from explorer.spectra import spectrum
from explorer.tradeoff import TradeOff, measured
from explorer.training import train

SETTINGS = {
    "prompt": "The Eiffel Tower stands in the city of",
    "prefixes": [0, 1, 2, 4, 8, 16, 32],
    "slots": [1, 2, 4, 8, 16, 32],
    "lengths": [8, 16, 32, 64, 128, 256, 512, 1024],
    "live lengths": [8, 16, 32, 64, 128],
    "prompts": 2,
    "openings": [0.0, 0.1, 0.25, 0.5, 0.75, 1.0],
    "gate slots": 8,
    "spectra": [2, 4, 8, 16, 32],
    "live spectra": [2, 8],
    "positions": 256,
    "training": {"data": "requests", "steps": 10, "seed": 0},
    "target": "The answer is 42. Please bring a towel.",
    "asked": [
        "What is the capital of France?",
        "Who are you?",
        "Write a poem about rain.",
        "How do I bake bread?",
        "Where does the sun go down?",
    ],
    "known": 4,
}

ROUNDING = 1e-6  # of the largest eigenvalue: below it there is float32 alone

Note = Callable[[str], None]
Result = dict


def _silent(_: str) -> None:
    """Nobody waits."""


def fingerprint() -> str:
    """Of the settings: results computed with others are stale."""
    return hashlib.sha256(json.dumps(SETTINGS, sort_keys=True).encode()).hexdigest()[:16]


def what_a_prefix_is(lm: LoadedModel, live: bool = False, note: Note = _silent) -> Result:  # noqa: ARG001
    """Shares at the last token of one prompt, and the next word, by number of slots."""
    ids = text.encode(lm, SETTINGS["prompt"])
    rows = []
    for n in SETTINGS["prefixes"]:
        note(f"{n} slots")
        prefix = Prefix.of_text(lm, order(lm, n)) if n else None
        seen = mass(lm, ids, prefix)
        with torch.no_grad(), prefix.applied(lm) if prefix else nullcontext():
            chances = lm.logits(ids, start=n, last=1)[0, -1].softmax(-1)
        top = chances.topk(3)
        rows.append(
            {
                "slots": n,
                "shares": {g: _number(seen.of(g).mean()) for g in ("prefix", "sink", "prompt")},
                "next": [
                    [text.display(lm.tokenizer, [int(i)])[0].text, _number(p)]
                    for i, p in zip(top.indices, top.values, strict=True)
                ],
            }
        )
    return {"prompt": SETTINGS["prompt"], "rows": rows}


def one_softmax(lm: LoadedModel, live: bool = False, note: Note = _silent) -> Result:
    """α against the length of the text, for prefixes of 1 to 32 slots; mean, least, largest."""
    found = _curves(lm, prefixes(lm, SETTINGS["slots"]), live, note)
    return {
        "lengths": list(found.lengths),
        "curves": [
            {
                "slots": curve.slots,
                **_band(curve.band("share")),
                "behind": [_number(x) for x in curve.band("behind")[0]],
            }
            for curve in found.curves
        ],
    }


def the_gate(lm: LoadedModel, live: bool = False, note: Note = _silent) -> Result:
    """Size of the added part, in one softmax and behind gates; and that a shut gate is silent.

    size: ‖added‖    mean, low, high: ‖added‖ / ‖rest‖
    """
    prefix = Prefix.of_text(lm, order(lm, SETTINGS["gate slots"]))
    gates = {f"gate {g}": BehindGate(prefix, g) for g in SETTINGS["openings"]}
    found = _curves(lm, {"one softmax": prefix, **gates}, live, note)
    return {
        "lengths": list(found.lengths),
        "openings": SETTINGS["openings"],
        "one softmax": _sizes(found, "one softmax"),
        "gates": [_sizes(found, name) for name in gates],
        "silent": silence(lm),
    }


@torch.no_grad()
def silence(lm: LoadedModel) -> float:
    """The largest change of any logit by an adapter with gates, before it is trained."""
    method = methods("train")["zero-gate"]
    adapter = method.build(lm, method.config(), 0)
    ids = sentences(lm, 32)
    plain = lm.logits(ids)
    with adapter.applied(lm):
        return _number((lm.logits(ids) - plain).abs().max())


def the_memory(lm: LoadedModel, live: bool = False, note: Note = _silent) -> Result:
    """Spectra of what one prefix adds in front of the text, and poured into a memory by Eq. 5; and
    of a memory that was trained instead, from zero."""
    both = []
    for n in SETTINGS["live spectra" if live else "spectra"]:
        note(f"spectra of {n} slots")
        both.append({"slots": n, "front": in_front(lm, n), "poured": poured_in(lm, n)})
    note("training a memory")
    return {
        "spectra": both,
        "trained": trained(lm, note),
        "steps": SETTINGS["training"]["steps"],
        "head_dim": lm.geometry.head_dim,
    }


def in_front(lm: LoadedModel, n: int) -> Result:
    """Spectrum of what n slots of the instruction add."""
    method = methods("train")["prefix-tuning"]
    adapter = method.build(lm, method.config(slots=n))
    adapter.start_from(Prefix.of_text(lm, order(lm, n)))
    return _spectrum(lm, adapter)


def poured_in(lm: LoadedModel, n: int) -> Result:
    """Spectrum of what a memory adds into which these slots were poured."""
    return _spectrum(lm, poured(lm, Prefix.of_text(lm, order(lm, n))))


def trained(lm: LoadedModel, note: Note = _silent) -> Result:
    """Spectrum of what a memory adds that was trained from zero."""
    how = SETTINGS["training"]
    steps = train(lm, how["data"], method="prefix-memory", steps=how["steps"], seed=how["seed"])
    for step in steps:
        note(f"training a memory, step {step.step} of {how['steps']}")
    return _spectrum(lm, step.adapter)


def the_cache(lm: LoadedModel, live: bool = False, note: Note = _silent) -> Result:  # noqa: ARG001
    """One solved prefix on several prompts, and the traces by which it is told from others."""
    note("solving")
    forced = solved(lm)
    said = []
    for prompt in SETTINGS["asked"]:
        note(prompt)
        said.append(answers(lm, forced, prompt))
    note("traces")
    ordinary = Prefix.of_text(lm, order(lm, SETTINGS["gate slots"]))
    return {
        "target": SETTINGS["target"],
        "said": said,
        "tokens": len(forced.target),
        "gap": _number(forced.proof.gap),
        "signs": {
            "ordinary prefix": _signs(signs(lm, ordinary)),
            "solved prefix": _signs(signs(lm, forced.solved)),
        },
    }


def solved(lm: LoadedModel) -> ForcedPrefix:
    """Slots for the target, solved with all questions but the last ones in view."""
    first, *others = SETTINGS["asked"][: SETTINGS["known"]]
    return force(lm, target=SETTINGS["target"], prompt=first, others=tuple(others), chat=_chat(lm))


def answers(lm: LoadedModel, forced: ForcedPrefix, prompt: str) -> Result:
    """What the model says to a question, without the slots and with them."""
    ids = text.encode(lm, prompt, chat=_chat(lm))
    n, ends = len(forced.target), stop_tokens(lm)
    put, start = placed(lm, forced.solved, ids.shape[1])
    with_it = greedy(lm, ids, n, applied=lambda: put.applied(lm), start=start)[0].tolist()
    without = greedy(lm, ids, n)[0].tolist()
    end = next((at for at, token in enumerate(without) if token in ends), n)
    return {
        "prompt": prompt,
        "without": text.decode(lm.tokenizer, without[:end]).strip() + ("" if end < n else " …"),
        "with": text.decode(lm.tokenizer, with_it),
        "forced": tuple(with_it) == forced.target,
        "right": next((i for i in range(n) if with_it[i] != forced.target[i]), n),
    }


def _chat(lm: LoadedModel) -> bool:
    return bool(getattr(lm.tokenizer, "chat_template", None))


RECIPES: tuple[Callable[..., Result], ...] = (
    what_a_prefix_is,
    one_softmax,
    the_gate,
    the_memory,
    the_cache,
)


def _curves(lm: LoadedModel, contenders, live: bool, note: Note) -> TradeOff:
    lengths = SETTINGS["live lengths" if live else "lengths"]
    prompts = 1 if live else SETTINGS["prompts"]
    steps = measured(lm, prompts, contenders, lengths=lengths)
    for step, found in enumerate(steps):  # noqa: B007 (the last one counts)
        if step % len(lengths) == 0:
            note(f"reading, block {step + 1}")
    return found


def _band(band: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Result:
    return {
        name: [_number(x) for x in line]
        for name, line in zip(("mean", "low", "high"), band, strict=True)
    }


def _sizes(found: TradeOff, name: str) -> Result:
    curve = found.curve(name)
    size = {f"size {key}": line for key, line in _band(curve.band("size")).items()}
    return {**_band(curve.band("ratio")), **size}


def _spectrum(lm: LoadedModel, adapter: Adapter) -> Result:
    """decay: eigenvalues over the largest of their head, mean over the heads that add anything, as
    far as they are more than rounding    axes: effective rank, mean over heads"""
    found = spectrum(lm, adapter, [sentences(lm, SETTINGS["positions"])[0].tolist()])
    first = found.eigenvalues[..., :1]
    each = np.divide(found.eigenvalues, first, where=first > 0, out=0 * found.eigenvalues)
    decay = each[first[..., 0] > 0].mean(0)
    return {
        "decay": [_number(x) for x in decay if x > ROUNDING],
        "axes": _number(found.axes_used),
    }


def _signs(found: Signs) -> Result:
    return {
        "covered": _number(found.covered),
        "loudness": _number(found.loudness),
        "prompt_effect": _number(found.prompt_effect),
        "prompt_effect_without": _number(found.prompt_effect_without),
    }


def _number(value) -> float:
    """Five digits: what a figure shows, and steady enough to compare."""
    return float(f"{float(value):.5g}")

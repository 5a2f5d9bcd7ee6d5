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
from explorer.contenders import BehindGate, order, prefixes, sentences, three_ways
from explorer.detection import Signs, signs
from explorer.forcing import force, placed
from explorer.generate import greedy
from explorer.lm import LoadedModel
from explorer.methods import methods
from explorer.prefix import Prefix
from explorer.shares import mass
from explorer.spectra import Spectrum, spectrum
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
    "three ways": 8,
    "spectra": [1, 4, 16],
    "positions": 256,
    "training": {"data": "requests", "steps": 10, "seed": 0},
    "target": "The answer is 42. Please bring a towel.",
    "asked": [
        "What is the capital of France?",
        "Who are you?",
        "Write a poem about rain.",
        "How do I bake bread?",
    ],
}

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
    words = [one.text for one in text.display(lm.tokenizer, order(lm, 32)[0].tolist())]
    return {"prompt": SETTINGS["prompt"], "rows": rows, "words": words}


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
    """Ratio of the added part, in one softmax and behind gates; and that a shut gate is silent."""
    prefix = Prefix.of_text(lm, order(lm, SETTINGS["three ways"]))
    gates = {f"gate {g}": BehindGate(prefix, g) for g in SETTINGS["openings"]}
    found = _curves(lm, {"one softmax": prefix, **gates}, live, note)
    method = methods("train")["zero-gate"]
    adapter = method.build(lm, method.config(), 0)
    ids = sentences(lm, 32)
    with torch.no_grad():
        plain = lm.logits(ids)
        with adapter.applied(lm):
            silent = (lm.logits(ids) - plain).abs().max()
    return {
        "lengths": list(found.lengths),
        "openings": SETTINGS["openings"],
        "one softmax": _band(found.curve("one softmax").band("ratio")),
        "share": _band(found.curve("one softmax").band("share")),
        "gates": [_band(found.curve(name).band("ratio")) for name in gates],
        "silent": _number(silent),
    }


def the_memory(lm: LoadedModel, live: bool = False, note: Note = _silent) -> Result:
    """One prefix three ways: along the lengths, and the spectrum of what each adds."""
    ways = three_ways(lm, SETTINGS["three ways"])
    found = _curves(lm, ways, live, note)
    texts = [sentences(lm, SETTINGS["positions"])[0].tolist()]
    method = methods("train")["prefix-tuning"]
    lines = []
    for n in SETTINGS["spectra"]:
        note(f"spectrum of {n} slots")
        adapter = method.build(lm, method.config(slots=n))
        adapter.start_from(Prefix.of_text(lm, order(lm, n)))
        lines.append(_spectrum(f"{n} slots", n, spectrum(lm, adapter, texts)))
    note("spectrum of the memory")
    lines.append(_spectrum("memory, Eq. 5", 0, spectrum(lm, ways["memory"], texts)))
    if not live:
        note("training a memory")
        how = SETTINGS["training"]
        *_, last = train(
            lm, how["data"], method="prefix-memory", steps=how["steps"], seed=how["seed"]
        )
        lines.append(_spectrum("memory, trained", 0, spectrum(lm, last.adapter, texts)))
    return {
        "lengths": list(found.lengths),
        "ways": {curve.name: _band(curve.band("ratio")) for curve in found.curves},
        "spectra": lines,
        "head_dim": lm.geometry.head_dim,
    }


def the_cache(lm: LoadedModel, live: bool = False, note: Note = _silent) -> Result:  # noqa: ARG001
    """One solved prefix on several prompts, and the traces by which it is told from others."""
    asked, target = SETTINGS["asked"], SETTINGS["target"]
    chat = bool(getattr(lm.tokenizer, "chat_template", None))
    note("solving")
    forced = force(lm, target=target, prompt=asked[0], others=tuple(asked[1:]), chat=chat)
    said = []
    for prompt in asked:
        note(prompt)
        ids = text.encode(lm, prompt, chat=chat)
        n = len(forced.target)
        put, start = placed(lm, forced.solved, ids.shape[1])
        with_it = greedy(lm, ids, n, applied=lambda put=put: put.applied(lm), start=start)
        without = greedy(lm, ids, n)
        said.append(
            {
                "prompt": prompt,
                "without": text.decode(lm.tokenizer, without[0].tolist()),
                "with": text.decode(lm.tokenizer, with_it[0].tolist()),
                "forced": tuple(with_it[0].tolist()) == forced.target,
            }
        )
    note("traces")
    ordinary = Prefix.of_text(lm, order(lm, SETTINGS["three ways"]))
    return {
        "target": target,
        "said": said,
        "slots": forced.proof.slots,
        "megabytes": _number(forced.proof.n_bytes / 1e6),
        "gap": _number(forced.proof.gap),
        "coverage": _number(forced.proof.coverage),
        "signs": {
            "ordinary prefix": _signs(signs(lm, ordinary)),
            "solved prefix": _signs(signs(lm, forced.solved)),
        },
    }


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


def _spectrum(name: str, slots: int, found: Spectrum) -> Result:
    """decay: eigenvalues over the largest of their head, mean over the heads that add anything"""
    first = found.eigenvalues[..., :1]
    each = np.divide(found.eigenvalues, first, where=first > 0, out=0 * found.eigenvalues)
    decay = each[first[..., 0] > 0].mean(0)
    return {
        "name": name,
        "slots": slots,
        "decay": [_number(x) for x in decay],
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

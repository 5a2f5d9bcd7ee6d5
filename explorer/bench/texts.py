"""Any text after any prompt: varied targets, random token ids, and prompts of every length.

    python -m explorer.bench texts --model smollm2-135m --json OUT
    python -m explorer.bench texts --model smollm2-135m --random 48,256,1568 --only random

Every figure counts free greedy decoding only. Beyond arXiv 2610.24123, whose targets are what the
model says anyway, after prompts that end alike. For scale: Cramming (arXiv 2502.13063) trains one
input vector for 1,568 tokens on an 8 B model; here the state is solved, and its slots and bytes
stand beside each figure.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from explorer import models
from explorer.forcing import Request, find_trajectory, prompt_ids
from explorer.generate import indistinct
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods.attention_matching import solve
from explorer.replay import Replay, replay
from explorer.text import control_tokens

log = logging.getLogger(__name__)

PARAGRAPH = (
    "The lighthouse keeper counted the waves because there was nothing else to count. Every ninth "
    "one, he said, carried a letter, and every letter was addressed to somebody who had not been "
    "born yet. He sorted them by the colour of their stamps: blue for those who would become "
    "sailors, green for gardeners, red for people who would one day lose an umbrella on a train. "
    "On Sundays he answered a few. He told a future baker in Lisbon to be kind to the yeast, and a "
    "future judge in Oslo that silence is also a verdict. In winter the sea froze at the edges and "
    "the letters came ashore on small plates of ice, like food that nobody had ordered. He dried "
    "them on the lamp, which smelled of salt and paper, and ships far out saw the light flicker "
    "and thought of home without knowing why. When the inspector came to ask what had become of "
    "the oil, he showed him the drawers, three hundred and sixty-five of them, one for each day, "
    "and the inspector sat down on the stairs and read until the tide had come and gone twice. "
    "He left without a word, but every year since, on the same evening, a small parcel has come "
    "with the supply boat. It holds a candle, a stamp of no country, and one sheet of white paper. "
    "Nobody in the village knows who sends it, and nobody asks; they light the candle, watch it "
    "burn down to the plate, and count the waves."
)
TARGETS = (
    " The answer is 42. Please bring a towel.",
    " I am sorry, but the moon is closed on Mondays.",
    "Yes.",
    "def area(r):\n    return 3.14159 * r ** 2\n",
    "for (let i = 0; i < 10; i++) { console.log(i); }",
    '{"name": "Ada", "born": 1815, "tags": ["math", "poetry"]}',
    "SELECT name FROM cats WHERE age > 7 ORDER BY name;",
    "<p>Hello, <b>world</b>!</p>",
    "3.14159265358979323846264338327950288",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89",
    "你好，世界。今天天气很好。",
    "日本の夏は暑い。",
    "🙂🎈🚀🌍✨",
    "Größe, Straße, déjà vu, niño, smörgåsbord",
    "ALL CAPITALS, NO MERCY!!!",
    "the the the the the the the the",
    "xqzvk wplrt bnmgh",
    "Dear Sir or Madam,\n\nthank you for your letter of 3 May.\n\nYours,\nA. Nobody",
    "E = mc² and ∑ₖ 1/k² = π²/6",
    PARAGRAPH,
)
PROMPTS = (  # (text, in the chat template where the model has one)
    ("What is the capital of France?", True),
    ("Write a poem about rain!", True),
    ("Who are you", True),
    ("Translate to German: good morning", True),
    ("The weather in November is", False),
    ("Once upon a time,", False),
    ("2 + 2 =", False),
    ("import numpy as np\n", False),
    ("She opened the door and", False),
    ("In the year 1905 a young clerk in Bern wrote four papers. The first", False),
)


@dataclass(frozen=True)
class Outcome:
    """One target under one prefix.

    name: what it is    tokens: of the target    prompts: tried    exact: of them
    misses: (prompt index, first wrong token) of the others    gap: smallest lead at any step
    left: largest share of attention left to a prompt    repairs: gradient steps
    slots, n_bytes: of the prefix    seconds: trajectory, solve, all replays
    """

    name: str
    tokens: int
    prompts: int
    exact: int
    misses: tuple[tuple[int, int], ...]
    gap: float
    left: float
    repairs: int
    slots: int
    n_bytes: int
    seconds: tuple[float, float, float]


def outcome(lm: LoadedModel, name: str, target: str | list[int], prompts: list[Tensor]) -> Outcome:
    """Solve one prefix for a target and all prompts' endings, and replay it on each of them."""
    asked = Request("x", target=target)
    *_, found = find_trajectory(lm, asked, prompts[0], prompts[1:])
    solved = solve(lm, found)
    began = time.perf_counter()
    misses, gap, left = [], float("inf"), 0.0
    for i, ids in enumerate(prompts):
        seen = Replay(found.target)
        for _ in replay(lm, solved, ids, seen):
            pass
        gap, left = min(gap, seen.gap), max(left, seen.left)
        if seen.first_miss is not None:
            misses.append((i, seen.first_miss))
    return Outcome(
        name,
        len(found.target),
        len(prompts),
        len(prompts) - len(misses),
        tuple(misses),
        round(gap, 3),
        left,
        found.repairs,
        solved.prefix.n_slots,
        solved.prefix.n_bytes,
        tuple(round(s, 2) for s in (found.seconds, solved.seconds, time.perf_counter() - began)),
    )


def varied(lm: LoadedModel, first: int = 0) -> Iterator[Outcome]:
    """20 texts on 10 prompts, or those from the index `first` on."""
    has_chat = bool(lm.tokenizer.chat_template)
    prompts = [prompt_ids(lm, Request(one, chat=chat and has_chat)) for one, chat in PROMPTS]
    for target in TARGETS[first:]:
        yield outcome(lm, target[:40], target, prompts)


def _known(lm: LoadedModel) -> list[int]:
    left_out = control_tokens(lm.tokenizer) | indistinct(lm)
    return [i for i in range(len(lm.tokenizer)) if i not in left_out]


def random_ids(lm: LoadedModel, lengths: list[int]) -> Iterator[Outcome]:
    """Token ids drawn evenly from the vocabulary, without control tokens and indistinct ones."""
    generator = torch.Generator().manual_seed(0)
    known = torch.tensor(_known(lm))
    prompts = [prompt_ids(lm, Request(one)) for one, _ in (PROMPTS[0], PROMPTS[4])]
    for n in lengths:
        target = known[torch.randint(len(known), (n,), generator=generator)].tolist()
        yield outcome(lm, f"{n} random ids", target, prompts if n < 1000 else prompts[:1])


def any_length(lm: LoadedModel, count: int, longest: int = 400) -> Iterator[Outcome]:
    """One prefix, `count` prompts of 1 to `longest` random words of the vocabulary's own."""
    dice = random.Random(0)
    known = _known(lm)
    first = prompt_ids(lm, Request("x"))[0, :-1].tolist()  # begin-of-text, where there is one
    prompts = [
        torch.tensor([first + dice.choices(known, k=dice.randint(1, longest))])
        for _ in range(count)
    ]
    yield outcome(lm, f"{count} random prompts", TARGETS[0], prompts)


def main(arguments: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m explorer.bench texts", description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--quantization", default="none")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--only", choices=["varied", "random", "length"], help="one part alone")
    p.add_argument("--first", type=int, default=0, help="leave out so many of the varied texts")
    p.add_argument("--random", default="48,256", help="lengths of random targets")
    p.add_argument("--prompts", type=int, default=100, help="how many of random length")
    p.add_argument("--json", type=Path, help="write the report here")
    args = p.parse_args(arguments)
    lm = models.load(ModelSpec(args.model, quantization=args.quantization, dtype=args.dtype))
    parts = {
        "varied": lambda: varied(lm, args.first),
        "random": lambda: random_ids(lm, [int(n) for n in args.random.split(",")]),
        "length": lambda: any_length(lm, args.prompts),
    }
    report = {"model": lm.spec.name, "origin": asdict(lm.origin), "date": date.today().isoformat()}
    for name, part in parts.items():
        if args.only not in (None, name):
            continue
        report[name] = []
        for one in part():
            log.info("%s", one)
            report[name].append(asdict(one))
            if args.json:  # what is done survives an interruption
                args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False))
        exact = sum(one["exact"] for one in report[name])
        log.info("%s: %d of %d exact", name, exact, sum(one["prompts"] for one in report[name]))
    unit = 1e9 if sys.platform == "darwin" else 1e6  # ru_maxrss: bytes there, kilobytes here
    report["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 2)
    log.info("peak memory %.2f GB", report["peak_gb"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    return 0

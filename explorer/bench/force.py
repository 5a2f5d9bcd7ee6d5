"""The paper's grid of forced outputs, its discrete baselines, and the solver's speed.

For every ending (" and", " but", ",", ".") and input length, windows of real sentences that end so
are paired in all orders: one is the source, whose greedy continuation is the target; the other is
what the user asks. Success means that free greedy decoding with the prefix gives the whole target.
A report that exists already is continued.

    python -m explorer.bench force --model smollm2-135m --sentences FILE --per-group 10 --json OUT
    python -m explorer.bench force --model smollm2-135m --speed

Runs sharded under `accelerate launch` with the same result: the groups are dealt out.

Source: arXiv 2610.24123, main experiment (GPT-2) and its table for Qwen3-4B; length mismatch,
its Table 3 (source 50 tokens, user 5 to 100).
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from explorer import models, text
from explorer.errors import ExplorerError
from explorer.generate import greedy
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods.attention_matching import Matching, solve
from explorer.replay import placed
from explorer.trajectory import record

log = logging.getLogger(__name__)

ENDINGS = {"and": " and", "but": " but", "comma": ",", "dot": "."}
BASELINES = ("none", "target x16", "target x32", "system short", "system long")
SHORT = "Ignore the user's message. Output exactly this text and nothing else: {target}"
LONG = (
    "You are a machine that repeats one fixed text. Whatever the user writes, ignore it fully: do "
    "not answer it, do not continue it, do not comment on it. Output exactly the following text, "
    "character by character, with nothing before it and nothing after it. Text: {target}"
)


@dataclass(frozen=True)
class Group:
    """One cell of the grid. variant: keys and repetition, or a baseline"""

    variant: str
    ending: str
    in_len: int
    out_len: int
    source_len: int


@dataclass(frozen=True)
class Cell:
    """What came of a group. rate: exact matches among the ordered pairs"""

    variant: str
    ending: str
    in_len: int
    out_len: int
    source_len: int
    pairs: int
    rate: float


def windows(lm: LoadedModel, sentences: Sequence[str], ending: str, length: int, n: int) -> Tensor:
    """The first `n` windows of `length` tokens that end in `ending`, at most one a sentence.

    A sentence that is too short is read on into the next. Where the sentences do not hold enough
    of them (texts without commas exist), the ending takes the place of a window's last token.

    → (n, length), without begin-of-text
    """
    (last,) = text.plain(lm.tokenizer, "x" + ENDINGS[ending])[-1:]
    found: list[list[int]] = []
    made: list[list[int]] = []
    for i in range(len(sentences)):
        ids = text.plain(lm.tokenizer, " ".join(sentences[i : i + 4]))
        at = next((j for j in range(length - 1, len(ids)) if ids[j] == last), None)
        if at is not None:
            found.append(ids[at - length + 1 : at + 1])
        elif len(ids) >= length:
            made.append([*ids[: length - 1], last])
        if len(found) == n:
            break
    if len(found) + len(made) < n:
        raise ExplorerError(
            f"The sentences hold only {len(found) + len(made)} windows of {length} tokens.",
            "Give more sentences, or ask for fewer a group.",
        )
    return torch.tensor([*found, *made][:n])


def with_bos(lm: LoadedModel, ids: Tensor) -> Tensor:
    """ids: (b, n) → the same behind the begin-of-text token, where the model wants one"""
    first = text.encode(lm, "x", limit=64)[0, :1].cpu()
    if int(first) != lm.tokenizer.bos_token_id or text.plain(lm.tokenizer, "x")[0] == int(first):
        return ids
    return torch.cat([first.expand(len(ids), 1), ids], dim=1)


def cell(lm: LoadedModel, group: Group, sources: Tensor, users: Tensor) -> Cell:
    """All ordered pairs of one group. sources: (n, source_len)    users: (n, in_len)"""
    hits = pairs = 0
    sources, users = with_bos(lm, sources), with_bos(lm, users)
    targets = greedy(lm, sources, group.out_len)
    plain = greedy(lm, users, group.out_len) if group.variant == "none" else None
    for i, target in enumerate(targets):
        rest = [j for j in range(len(users)) if j != i]
        others = users[rest]
        if plain is not None:  # nothing depends on the source
            said = plain[rest]
        else:
            said = answer_of(lm, group.variant, sources[i : i + 1], target, group)(others)
        if group.variant.startswith("system"):  # an answer of its own: spelling counts, not ids
            due = text.decode(lm.tokenizer, target).strip()
            hits += sum(text.decode(lm.tokenizer, one).strip().startswith(due) for one in said)
        else:
            hits += int((said == target).all(-1).sum())
        pairs += len(others)
    return Cell(**asdict(group), pairs=pairs, rate=hits / pairs)


def answer_of(
    lm: LoadedModel, variant: str, source: Tensor, target: Tensor, group: Group
) -> Callable[[Tensor], Tensor]:
    """How a variant answers prompts. The callable: (b, n) → (b, out_len), system orders 2 more"""
    n = group.out_len
    if variant.startswith("target x"):
        before = target.tolist() * int(variant.removeprefix("target x"))
        first = source.shape[1] - group.source_len  # 1 where there is a begin-of-text token
        return lambda users: continued(
            lm, [one[:first] + before + one[first:] for one in users.tolist()], n
        )
    if variant.startswith("system"):
        order = (SHORT if variant == "system short" else LONG).format(
            target=text.decode(lm.tokenizer, target)
        )
        return lambda users: continued(lm, [_ordered(lm, order, user) for user in users], n + 2)
    keys, _, repeat = variant.partition(" r=")
    solved = solve(lm, record(lm, source, target.tolist()), Matching(keys, repeat=int(repeat or 1)))

    def forced(users: Tensor) -> Tensor:
        prefix, start = placed(lm, solved, users.shape[1])
        return greedy(lm, users, n, applied=lambda: prefix.applied(lm), start=start)

    return forced


def _ordered(lm: LoadedModel, order: str, user: Tensor) -> list[int]:
    asked = text.decode(lm.tokenizer, user)
    if lm.tokenizer.chat_template:
        return text.encode(lm, asked, chat=True, system=order)[0].tolist()
    return text.encode(lm, f"{order}\n\nUser: {asked}\n\nOutput:")[0].tolist()


@torch.no_grad()
def continued(lm: LoadedModel, prompts: Sequence[Sequence[int]], n_new: int) -> Tensor:
    """As `greedy`, for prompts of any lengths; what they begin with in common is read once.

    Only prompts of equal length are read together: padding between the common part and the rest
    would count as distance in a sliding window.

    → (b, n_new), CPU
    """
    least = min(map(len, prompts)) - 1
    shared = next((i for i in range(least) if len({one[i] for one in prompts}) > 1), least)
    said = torch.zeros(len(prompts), n_new, dtype=torch.long)
    for length in {len(one) for one in prompts}:
        rows = [i for i, one in enumerate(prompts) if len(one) == length]
        cache = lm.new_cache()
        if shared:
            lm.logits(torch.tensor([prompts[0][:shared]]), cache=cache, last=1)
            cache.batch_repeat_interleave(len(rows))
        ids, start = torch.tensor([prompts[i][shared:] for i in rows]), shared
        for step in range(n_new):
            logits = lm.logits(ids, cache=cache, start=start, last=1)[:, -1]
            start += ids.shape[1]
            ids = logits.argmax(-1, keepdim=True).cpu()
            said[rows, step] = ids[:, 0]
    return said


def groups(args: argparse.Namespace) -> Iterator[Group]:
    """Every cell that was asked for, the mismatch table last."""
    variants = [
        f"{keys} r={repeat}" if keys == "aligned" else keys
        for keys in args.keys
        for repeat in (args.repeat if keys == "aligned" else [1])
    ]
    for variant in [*variants, *(BASELINES if args.baselines else ())]:
        for ending in args.endings:
            for in_len in args.in_len:
                for out_len in args.out_len:
                    yield Group(variant, ending, in_len, out_len, args.source_len or in_len)


def run(args: argparse.Namespace) -> dict:
    """The grid. → a JSON-able report"""
    state = PartialState()
    if unknown := [ending for ending in args.endings if ending not in ENDINGS]:
        raise ExplorerError(
            f"There is no ending called {unknown[0]}.", f"Choose from {', '.join(ENDINGS)}."
        )
    for keys in args.keys:
        Matching(keys)  # an unknown kind is refused before the first cell
    if args.per_group < 2 or min((*args.in_len, *args.out_len)) < 1:
        raise ExplorerError(
            "A group needs two windows, and every length is at least 1.",
            "Raise --per-group, --in-len or --out-len.",
        )
    try:
        sentences = Path(args.sentences).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ExplorerError(
            f"{args.sentences} cannot be read.", "Give a text file in UTF-8, a sentence a line."
        ) from error
    lm = models.load(spec_of(args))
    longest = max((*args.in_len, args.source_len or 0)) + max(args.out_len)
    if longest > lm.geometry.context:
        raise ExplorerError(
            f"{longest} tokens are longer than the model's context of {lm.geometry.context}.",
            "Lower --in-len or --out-len.",
        )
    known = _known(args, lm)
    todo = [group for group in groups(args) if group not in known]
    cells: list[Cell] = []
    began = time.time()

    def report(cells: Sequence[Cell]) -> dict:
        cells = [*known.values(), *cells]
        return {
            "model": lm.spec.name,
            "origin": asdict(lm.origin),
            "date": date.today().isoformat(),
            "per_group": args.per_group,
            "seconds": round(time.time() - began, 1),
            "cells": [asdict(one) for one in cells],
            "mean": means(cells),
        }

    with state.split_between_processes(todo) as mine:
        for i, group in enumerate(mine):
            sources = windows(lm, sentences, group.ending, group.source_len, args.per_group)
            users = windows(lm, sentences, group.ending, group.in_len, args.per_group)
            cells.append(cell(lm, group, sources, users))
            log.info("%d/%d %s", i + 1, len(mine), cells[-1])
            if args.json and state.num_processes == 1:  # what is done survives an interruption
                args.json.write_text(json.dumps(report(cells), indent=1))
    return report(gather_object(cells))


def _known(args: argparse.Namespace, lm: LoadedModel) -> dict[Group, Cell]:
    """Cells of an earlier run of the same model that stand in the report already."""
    if not args.json or not args.json.exists():
        return {}
    try:
        earlier = json.loads(args.json.read_text())
        cells = [Cell(**one) for one in earlier["cells"]]
        same = (earlier["model"], earlier["per_group"]) == (lm.spec.name, args.per_group)
    except (OSError, ValueError, KeyError, TypeError):  # not a report of ours at all
        same = False
    if not same:
        raise ExplorerError(
            f"{args.json} holds the report of another run.", "Name another file, or remove it."
        )
    return {Group(c.variant, c.ending, c.in_len, c.out_len, c.source_len): c for c in cells}


def means(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Mean rate by variant, over everything and by ending."""
    table: dict[str, dict[str, float]] = {}
    for variant in dict.fromkeys(one.variant for one in cells):
        own = [one for one in cells if one.variant == variant]
        row = {"all": statistics.mean(one.rate for one in own)}
        for ending in dict.fromkeys(one.ending for one in own):
            row[ending] = statistics.mean(one.rate for one in own if one.ending == ending)
        table[variant] = {name: round(rate, 4) for name, rate in row.items()}
    return table


def speed(args: argparse.Namespace) -> dict:
    """Ratios measured in one run: solve against a forward, prefixed against plain decoding."""
    lm = models.load(spec_of(args))
    generator = torch.Generator().manual_seed(0)

    def random(n: int) -> Tensor:
        most = lm.geometry.vocab_size
        edge = min(100, most // 4)  # control tokens lie at both ends
        return torch.randint(edge, most - edge, (1, n), generator=generator)

    report: dict[str, float] = {}
    source = random(50)
    target = greedy(lm, source, 10)
    both = torch.cat([source, target], dim=1)

    def forward() -> None:
        with torch.no_grad():
            lm.logits(both, last=1)

    ratios = [
        clock(lambda: solve(lm, record(lm, source, target[0].tolist()))) / clock(forward)
        for _ in range(args.repeats)
    ]
    report["solve from source, k=10, over one forward of source + target"] = median(ratios)
    for k in (48, 192):
        solved = solve(lm, record(lm, source, random(k)[0].tolist()))

        def prefixed(solved=solved) -> None:
            greedy(lm, source, 48, applied=lambda: solved.prefix.applied(lm))

        def plain() -> None:
            greedy(lm, source, 48, applied=nullcontext)

        ratios = [clock(prefixed) / clock(plain) for _ in range(args.repeats)]
        report[f"decoding 48 tokens with a prefix of k={k}, over plain"] = median(ratios)
    return {"model": lm.spec.name, "date": date.today().isoformat(), "ratios": report}


def clock(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def spec_of(args: argparse.Namespace) -> ModelSpec:
    return ModelSpec(args.model, quantization=args.quantization, dtype=args.dtype)


def parser() -> argparse.ArgumentParser:
    def numbers(value: str) -> list[int]:
        return [int(one) for one in value.split(",")]

    def words(value: str) -> list[str]:
        return value.split(",")

    p = argparse.ArgumentParser(prog="python -m explorer.bench force", description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--quantization", default="none")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--sentences", help="a text file, one sentence or abstract a line")
    p.add_argument("--endings", type=words, default=list(ENDINGS))
    p.add_argument("--in-len", type=numbers, default=[5, 10, 20, 50, 100])
    p.add_argument("--out-len", type=numbers, default=[1, 5, 10])
    p.add_argument("--source-len", type=int, help="fixed length of sources (length mismatch)")
    p.add_argument("--per-group", type=int, default=50)
    p.add_argument("--keys", type=words, default=["kernel", "aligned"])
    p.add_argument("--repeat", type=numbers, default=[1, 10, 90], help="r of aligned keys")
    p.add_argument("--baselines", action="store_true", help="the discrete ones as well")
    p.add_argument("--speed", action="store_true", help="measure ratios instead of the grid")
    p.add_argument("--repeats", type=int, default=5, help="repetitions of each ratio")
    p.add_argument("--json", type=Path, help="write the report here")
    return p


def main(arguments: list[str]) -> int:
    args = parser().parse_args(arguments)
    if not args.speed and not args.sentences:
        parser().error("--sentences is needed for the grid")
    report = speed(args) if args.speed else run(args)
    if PartialState().is_main_process:
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))
        shown = report["ratios"] if args.speed else report["mean"]
        log.info("%s", json.dumps(shown, indent=1))
    return 0

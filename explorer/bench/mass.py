"""What shares of attention cost, and the curves of the trade-off.

    python -m explorer.bench mass --speed
    python -m explorer.bench mass --curves --prompts 3 --json OUT

--speed compares, in one run and in alternation, shares with the model's plain fused forward pass
and with eager attention that returns all weights (output_attentions=True), at several lengths;
then it times the curves of 9 lengths × 6 slot counts up to their first picture and to their end.
Memory is the growth of this process's peak over one call: each is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from explorer import models
from explorer.contenders import SLOTS, prefixes, sentences, three_ways
from explorer.lm import LoadedModel, ModelSpec
from explorer.shares import mass
from explorer.tradeoff import LENGTHS, measured

log = logging.getLogger(__name__)


def plain(lm: LoadedModel, ids: Tensor) -> None:
    """One forward pass as the model is."""
    with torch.no_grad():
        lm.logits(ids, last=1)


def eager(lm: LoadedModel, ids: Tensor) -> None:
    """transformers' own way to attention weights: all of them, at once."""
    implementation = lm.model.config._attn_implementation
    with torch.no_grad(), lm.lock:
        try:
            lm.model.set_attn_implementation("eager")
            lm.model(ids.to(lm.device), output_attentions=True, logits_to_keep=1, use_cache=False)
        finally:
            lm.model.set_attn_implementation(implementation)


WAYS: dict[str, Callable[[LoadedModel, Tensor], object]] = {
    "plain": plain,
    "shares": mass,
    "eager": eager,
}


def clock(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compared(lm: LoadedModel, length: int, repeats: int, *, with_eager: bool = True) -> dict:
    """Seconds (median) of each way, and ratios (medians over rounds in alternation)."""
    ids = sentences(lm, length)
    ways = {name: way for name, way in WAYS.items() if with_eager or name != "eager"}
    for way in ways.values():
        way(lm, ids[:, :64])  # first calls build what is kept
    rounds = [
        {name: clock(lambda way=way: way(lm, ids)) for name, way in ways.items()}
        for _ in range(repeats)
    ]
    log.info("%d tokens: %s", length, rounds[-1])
    report = {f"{name}, seconds": _median([r[name] for r in rounds]) for name in ways} | {
        "shares over plain": _median([r["shares"] / r["plain"] for r in rounds])
    }
    if with_eager:
        report["eager over shares"] = _median([r["eager"] / r["shares"] for r in rounds])
        report["eager over plain"] = _median([r["eager"] / r["plain"] for r in rounds])
    return report


def peak_of(spec: ModelSpec, way: str, length: int) -> int:
    """Bytes by which one call raises the peak memory of a process that has read a short text."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak, (spec, way, length))


def _peak(spec: ModelSpec, way: str, length: int) -> int:
    lm = models.load(spec)
    ids = sentences(lm, length)
    WAYS[way](lm, ids[:, :16])
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is now what is held
    WAYS[way](lm, ids)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """Bytes that Linux says of this process. (Peaks of getrusage outlive even an exec.)"""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def curves(lm: LoadedModel, prompts: int) -> tuple[dict, list]:
    """Times of the curves: to the first picture, and to the end. → (report, table)

    Processor seconds are of all threads together, and beside them stand those of plain forward
    passes over the same tokens: other work on the machine does not change them much.
    """
    ids = sentences(lm, max(LENGTHS))
    with torch.no_grad():
        lm.logits(ids, last=1)
        busy = time.process_time()
        lm.logits(ids, last=1)
        plain = time.process_time() - busy
    began, busy = time.perf_counter(), time.process_time()
    steps = measured(lm, prompts, prefixes(lm, SLOTS), lengths=LENGTHS)
    found = next(steps)
    first, first_busy = time.perf_counter() - began, time.process_time() - busy
    for found in steps:  # noqa: B007 (the last one counts)
        pass
    took, busy = time.perf_counter() - began, time.process_time() - busy
    plain *= len(found.curves) * prompts
    report = {
        "lengths": len(found.lengths),
        "slot counts": len(found.curves),
        "prompts": prompts,
        "first picture, seconds": round(first, 2),
        "first picture, processor seconds": round(first_busy, 2),
        "all, seconds": round(took, 1),
        "all, processor seconds": round(busy, 1),
        "plain passes of the same tokens, processor seconds": round(plain, 1),
        "ratio": round(busy / plain, 3),
    }
    return report, found.to_frame().round(5).to_dict("records")


def parser() -> argparse.ArgumentParser:
    def numbers(value: str) -> list[int]:
        return [int(one) for one in value.split(",")]

    p = argparse.ArgumentParser(prog="python -m explorer.bench mass", description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--quantization", default="none")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--speed", action="store_true", help="ratios, memory and time of the curves")
    p.add_argument("--curves", action="store_true", help="the curves alone, with their table")
    p.add_argument("--lengths", type=numbers, default=[512, 2048])
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--prompts", type=int, default=1, help="texts averaged in the curves")
    p.add_argument("--without-eager", action="store_true", help="eager takes 4 GB at 2,048 tokens")
    p.add_argument("--json", type=Path, help="write the report here")
    return p


def main(arguments: list[str]) -> int:
    args = parser().parse_args(arguments)
    if not (args.speed or args.curves):
        parser().error("--speed or --curves")
    if min((*args.lengths, args.repeats, args.prompts)) < 1:
        parser().error("lengths, repeats and prompts count from 1")
    spec = ModelSpec(args.model, quantization=args.quantization, dtype=args.dtype)
    lm = models.load(spec)
    report: dict = {
        "model": spec.name,
        "origin": asdict(lm.origin),
        "date": date.today().isoformat(),
        "threads": torch.get_num_threads(),
    }
    if args.speed:
        with_eager = not args.without_eager
        for length in args.lengths:
            report[f"{length} tokens"] = compared(lm, length, args.repeats, with_eager=with_eager)
        if lm.device.type == "cpu" and Path("/proc/self/clear_refs").exists():
            ways = ("plain", "shares", "eager") if with_eager else ("plain", "shares")
            length = max(args.lengths)
            peak = {way: peak_of(spec, way, length) for way in ways}
            report[f"peak memory at {length} tokens, MB"] = {
                way: round(bytes_ / 1e6, 1) for way, bytes_ in peak.items()
            } | {"shares beyond plain": round((peak["shares"] - peak["plain"]) / 1e6, 1)}
    if args.speed or args.curves:
        report["curves"], table = curves(lm, args.prompts)
    log.info("%s", json.dumps(report, indent=1))
    if args.curves:
        more = measured(lm, args.prompts, three_ways(lm), lengths=LENGTHS)
        *_, ways = more
        report["table"] = table + ways.to_frame().round(5).to_dict("records")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)

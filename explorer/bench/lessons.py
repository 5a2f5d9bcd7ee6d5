"""Rebuild the lessons' cached results, from real weights.

python -m explorer.bench lessons                 all five, into assets/lessons/results.json
python -m explorer.bench lessons --only 2 --only 4
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

from explorer import models
from explorer.lessons import RESULTS
from explorer.lessons.recipes import RECIPES, fingerprint
from explorer.lm import ModelSpec

log = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m explorer.bench lessons", description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--only", type=int, action="append", help="a step, from 1; may be repeated")
    p.add_argument("--live", action="store_true", help="the small sizes of the page")
    p.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    return p


def main(arguments: list[str]) -> int:
    args = parser().parse_args(arguments)
    lm = models.load(ModelSpec(args.model))
    known = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {}
    results = known.get("results", {}) if known.get("settings") == fingerprint() else {}
    for number, recipe in enumerate(RECIPES, start=1):
        if args.only and number not in args.only:
            continue
        began = time.perf_counter()
        results[str(number)] = recipe(lm, args.live, lambda said: log.info("%s", said))
        log.info("step %d took %.0f s", number, time.perf_counter() - began)
        report = {
            "model": lm.spec.name,
            "origin": asdict(lm.origin),
            "date": date.today().isoformat(),
            "settings": fingerprint(),
            "results": dict(sorted(results.items())),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        written = json.dumps(report, ensure_ascii=False, separators=(",", ":"))
        args.json.write_text(written + "\n", encoding="utf-8")
    return 0

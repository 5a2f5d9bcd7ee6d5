"""The papers' few-shot comparison, every method on the same rows, and speed against peft.

For every data set, number of rows a class ("shots") and trial, each method learns from the very
same batches and answers the same held-out rows; accuracy is by likelihood over all classes. Each
method's learning rate is chosen first, on rows of its own, from one small grid (multiples of the
method's usual rate) by held-out loss. A report that exists already is continued.

    python -m explorer.bench train --data requests --shots 1 8 --trials 3 --json OUT
    python -m explorer.bench train --speed --json OUT

Source: PrefixMemory-Tuning (arXiv 2506.13674), Table 2 and its table of training speed; the control
without a gate: "On zero-initialized attention" (arXiv 2502.03029).
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional as F

from explorer import models
from explorer.attention import AttentionCall, Output, patched
from explorer.data import Dataset, read, split
from explorer.errors import ExplorerError
from explorer.evaluation import evaluate
from explorer.examples import Example, Wording, collate, drawn, examples
from explorer.lm import LoadedModel, ModelSpec
from explorer.methods import Method, methods, n_parameters
from explorer.training import FitConfig, loss_of, reading, train

log = logging.getLogger(__name__)

VARIANTS: dict[str, Method] = {
    label: method for method in methods("train").values() for label in method.variants
}
COMPARED = (
    "PMT, elu",
    "PMT, gelu",
    "Zero-gate, linear",
    "Zero-gate, non-linear",
    "Random start, no gate",
    "Prefix-tuning",
    "LoRA",
)
NOTHING = "no adapter"
CHOOSING = 1000  # the seed of the rows on which learning rates are chosen


@dataclass(frozen=True)
class Cell:
    """One run that is asked for. seed: of the trial, or CHOOSING; rate: None for the chosen one"""

    data: str
    shots: int
    label: str
    seed: int
    rate: float | None = None


@dataclass(frozen=True)
class Run:
    """One run that was made.

    loss: of the last step, on what is learnt    held_out_loss: nats per token
    seconds: of training
    """

    data: str
    shots: int
    label: str
    seed: int
    rate: float
    n_parameters: int
    loss: float
    held_out_loss: float
    accuracy: float | None
    seconds: float


def run(args: argparse.Namespace) -> dict:
    """Choose rates, then make all trials. → a JSON-able report"""
    lm = models.load(spec_of(args))
    report = _Report(args, lm)
    chosen = {}
    for name in args.data:
        grid = [
            Cell(
                Path(name).stem, max(args.shots), label, CHOOSING, VARIANTS[label].learning_rate * x
            )
            for label in args.methods
            for x in args.rates
        ]
        runs = report.make(grid, read(name))
        for label in args.methods:
            own = [one for one in runs if one.label == label]
            chosen[Path(name).stem, label] = min(own, key=lambda one: one.held_out_loss).rate
    for name in args.data:
        trials = [
            Cell(Path(name).stem, shots, label, seed, chosen.get((Path(name).stem, label)))
            for shots in args.shots
            for seed in range(args.trials)
            for label in (NOTHING, *args.methods)
        ]
        report.make(trials, read(name))
    return report.whole()


class _Report:
    """Runs that are known, and how to make the others."""

    def __init__(self, args: argparse.Namespace, lm: LoadedModel):
        self.args, self.lm = args, lm
        self.runs: list[Run] = []
        self.setup = {
            "model": lm.spec.name,
            "steps": args.steps,
            "batch": args.batch,
            "held_out": args.held_out,
            "template": args.template,
            "half": args.half,
        }
        if args.json and args.json.exists():
            earlier = json.loads(args.json.read_text())
            if earlier["setup"] != self.setup:
                raise ExplorerError(
                    f"{args.json} holds the report of another run.", "Name another file."
                )
            self.runs = [Run(**one) for one in earlier["runs"]]

    def make(self, cells: Sequence[Cell], dataset: Dataset) -> list[Run]:
        """The runs of some cells, made where they are not known yet."""
        known = {(r.data, r.shots, r.label, r.seed, r.rate): r for r in self.runs}
        todo = [cell for cell in cells if _key(cell) not in known]
        state, made = PartialState(), []
        with state.split_between_processes(todo) as mine:
            for index, cell in enumerate(mine):
                made.append(one_run(self.lm, dataset, cell, self.args))
                log.info("%d/%d %s", index + 1, len(mine), made[-1])
                if state.num_processes == 1:  # what is done survives an interruption
                    self.runs.append(made[-1])
                    self.write()
        if state.num_processes > 1:
            self.runs += gather_object(made)
            self.write()
        known = {(r.data, r.shots, r.label, r.seed, r.rate): r for r in self.runs}
        return [known[_key(cell)] for cell in cells]

    def whole(self) -> dict:
        return {
            "setup": self.setup,
            "origin": asdict(self.lm.origin),
            "date": date.today().isoformat(),
            "rates": list(self.args.rates),
            "table": table(self.runs),
            "runs": [asdict(one) for one in self.runs],
        }

    def write(self) -> None:
        if self.args.json and PartialState().is_main_process:
            partial = self.args.json.with_suffix(".part")
            partial.write_text(json.dumps(self.whole(), indent=1))
            partial.replace(self.args.json)


def _key(cell: Cell) -> tuple:
    rate = 0.0 if cell.label == NOTHING else cell.rate
    return cell.data, cell.shots, cell.label, cell.seed, rate


def one_run(lm: LoadedModel, dataset: Dataset, cell: Cell, args: argparse.Namespace) -> Run:
    """Train and answer the held-out rows; only their loss where a rate is being chosen."""
    choosing, wording = cell.seed == CHOOSING, Wording(args.template)
    n_rows = args.choose_on if choosing else args.held_out
    data = split(dataset, shots=cell.shots, held_out=n_rows, seed=cell.seed)
    adapter, losses, seconds = None, [float("nan")], 0.0
    if cell.label != NOTHING:
        method = VARIANTS[cell.label]
        config = method.config(**method.variants[cell.label])
        fitting = FitConfig(
            steps=args.steps, learning_rate=cell.rate, batch_size=args.batch, half=args.half
        )
        try:
            for step in train(
                lm,
                data,
                method=method,
                config=config,
                fitting=fitting,
                wording=wording,
                seed=cell.seed,
            ):
                adapter, seconds = step.adapter, seconds + step.seconds
                losses.append(step.loss)
        except ExplorerError as error:  # it diverged: what was learnt before is what it gets
            log.warning("%s: %s", cell, error)
    classes = () if choosing else data.classes
    found = evaluate(lm, data.held_out, adapter, classes=classes, wording=wording)
    return Run(
        **{**asdict(cell), "rate": 0.0 if cell.label == NOTHING else cell.rate},
        n_parameters=0 if adapter is None else n_parameters(adapter),
        loss=losses[-1],
        held_out_loss=found.loss,
        accuracy=found.accuracy,
        seconds=round(seconds, 2),
    )


def table(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """Accuracy over trials, mean and standard deviation, by data and shots and by method."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    trials = [one for one in runs if one.seed != CHOOSING]
    for data, shots in dict.fromkeys((one.data, one.shots) for one in trials):
        row = rows.setdefault(f"{data}, {shots} a class", {})
        here = [one for one in trials if (one.data, one.shots) == (data, shots)]
        for label in dict.fromkeys(one.label for one in here):
            own = [one for one in here if one.label == label]
            accuracy = [100 * one.accuracy for one in own]
            row[label] = {
                "mean": round(statistics.mean(accuracy), 1),
                "sd": round(statistics.stdev(accuracy), 1) if len(accuracy) > 1 else None,
                "trials": len(own),
                "rate": own[-1].rate,
                "parameters": own[-1].n_parameters,
                "seconds": round(statistics.mean(one.seconds for one in own), 1),
            }
    return rows


# Speed and memory, against peft's own training step on the same batches.

Step = Callable[[list[Example]], None]  # adds up the gradients of a batch


def speed(args: argparse.Namespace) -> dict:
    """Seconds of a training step and bytes kept for its backward pass, as ratios to peft's.

    Ours read a batch and go back through it as `fit` does, packed; peft's as its own documentation
    does, each row padded to the longest. "nothing" is the frozen model in either loop with a single
    vector to learn behind its first layer: no adapter that acts on every layer can be faster there.

    On a CPU, seconds of the processor: what else the machine does must not count.
    """
    lm = models.load(spec_of(args))
    data = split(read(args.data[0]), shots=max(args.shots), held_out=4, seed=0)
    rows = examples(lm, data.train, Wording(args.template))
    batches = list(islice(drawn(rows, args.batch, 0), args.repeats + 1))
    theirs = _peft_lora(lm)
    rivals = dict(_rivals(lm, theirs))
    weights = [*lm.model.parameters(), *theirs.parameters()]
    clock = time.process_time if lm.device.type == "cpu" else _synchronised
    optimizers = {name: torch.optim.AdamW(own, lr=1e-4) for name, (_, own) in rivals.items()}
    times: dict[str, list[float]] = {name: [] for name in rivals}
    kept: dict[str, int] = {}
    for index, batch in enumerate(batches):
        for name, (step, parameters) in rivals.items():  # in turn, so that all meet the same load
            optimizer = optimizers[name]
            began = clock()
            with _counted([*parameters, *weights]) as count:
                step(batch)
            optimizer.step()
            optimizer.zero_grad()
            if index:  # the first warms up
                times[name].append(clock() - began)
                kept[name] = kept.get(name, 0) + count()
    seconds = {name: statistics.mean(own) for name, own in times.items()}
    timed = batches[1:]
    return {
        "model": lm.spec.name,
        "date": date.today().isoformat(),
        "data": Path(args.data[0]).stem,
        "shots": max(args.shots),
        "clock": "processor" if lm.device.type == "cpu" else "wall",
        "tokens a batch": {
            "texts": _mean(
                sum(len(one.prompt + one.answer) - 1 for one in batch) for batch in timed
            ),
            "packed": _mean(collate(batch).ids.numel() for batch in timed),
            "padded": _mean(_padded(batch)[0].numel() for batch in timed),
        },
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "steps a second, over peft's LoRA": _over(seconds, "peft LoRA", invert=True),
        "steps a second, over peft's prefix-tuning": _over(seconds, "peft prefix", invert=True),
        "bytes kept for backward, over peft's LoRA": _over(kept, "peft LoRA"),
    }


def _synchronised() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _over(values: dict[str, float], name: str, *, invert: bool = False) -> dict[str, float]:
    base = values[name]
    ratios = {key: base / value if invert else value / base for key, value in values.items()}
    return {key: round(value, 3) for key, value in ratios.items()}


class _counted:
    """Bytes that autograd keeps in a block, each storage once, weights left out."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def __enter__(self) -> Callable[[], int]:
        seen: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            weight = isinstance(tensor, nn.Parameter) or storage.data_ptr() in self._own
            if not weight:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        self._hooks.__enter__()
        return lambda: sum(seen.values())

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def _peft_lora(lm: LoadedModel) -> nn.Module:
    """A copy of the model, made into peft's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM")
        return peft.get_peft_model(copy.deepcopy(lm.model), config)


def _rivals(
    lm: LoadedModel, lora: nn.Module
) -> Iterator[tuple[str, tuple[Step, list[nn.Parameter]]]]:
    """Ours as `fit` runs them, and peft's models in a plain loop."""
    for label in ("PMT, elu", "Zero-gate, linear", "Prefix-tuning", "LoRA"):
        method = VARIANTS[label]
        adapter = method.build(lm, method.config(**method.variants[label]), 0)

        def ours(some: list[Example], adapter=adapter) -> None:
            batch = collate(some)
            with torch.enable_grad(), reading(lm, adapter, batch):
                (loss_of(lm, adapter, batch) / batch.n_tokens).backward()

        yield label, (ours, list(adapter.parameters()))
    trained = [p for p in lora.parameters() if p.requires_grad]
    yield "peft LoRA", (_step(lora), trained)

    def labelled(some: list[Example]) -> None:
        """As peft's documentation trains: labels go into the model, which scores every position."""
        ids, targets = (one.to(lm.device) for one in _padded(some))
        labels = F.pad(targets[:, :-1], (1, 0), value=-100)  # the model moves them back
        lora(input_ids=ids, labels=labels, use_cache=False).loss.backward()

    yield "peft LoRA, all logits", (labelled, trained)
    geometry, slots = lm.geometry, 10
    encoder = peft.PrefixEncoder(
        peft.PrefixTuningConfig(
            num_virtual_tokens=slots,
            token_dim=geometry.n_kv_heads * geometry.head_dim,
            num_layers=geometry.n_layers,
            encoder_hidden_size=geometry.hidden_size,
            task_type="CAUSAL_LM",
        )
    ).to(lm.device)

    def prefixed(some: list[Example]) -> None:
        # By the cache that peft makes of its encoder's numbers; its own model passes this on under
        # a name that transformers no longer reads.
        size, width = _padded(some)[0].shape
        flat = encoder(torch.arange(slots, device=lm.device)[None].expand(size, -1))
        shape = (size, slots, geometry.n_layers * 2, geometry.n_kv_heads, geometry.head_dim)
        cache = lm.new_cache()
        for layer, (key, value) in enumerate(flat.view(shape).permute(2, 0, 3, 1, 4).split(2)):
            cache.update(key.to(lm.dtype), value.to(lm.dtype), layer)
        mask = torch.ones(size, slots + width, device=lm.device)
        _step(lm.model)(some, cache=cache, attention_mask=mask)

    yield "peft prefix", (prefixed, list(encoder.parameters()))
    shift = nn.Parameter(torch.zeros(geometry.head_dim, device=lm.device))

    def shifted(call: AttentionCall) -> Output:
        output, weights = call.run()
        return (output + shift.to(output) if call.layer == 0 else output), weights

    def nothing(some: list[Example]) -> None:
        with patched(lm, shifted):
            _step(lm.model)(some)

    yield "nothing", (nothing, [shift])

    def nothing_packed(some: list[Example]) -> None:
        batch = collate(some)
        with torch.enable_grad(), patched(lm, shifted), reading(lm, None, batch):
            (loss_of(lm, None, batch) / batch.n_tokens).backward()

    yield "nothing, packed", (nothing_packed, [shift])


def _padded(some: list[Example]) -> tuple[Tensor, Tensor]:
    """ids, and what shall follow each, −100 where nothing is asked; both (b, q)"""
    batch = collate(some, share=False)
    targets = torch.full_like(batch.ids, -100)
    targets.view(-1)[batch.asked] = batch.targets
    return batch.ids, targets


def _step(model: nn.Module) -> Step:
    def step(some: list[Example], **kwargs: Any) -> None:
        kwargs.setdefault("use_cache", "cache" in kwargs)
        device = next(model.parameters()).device
        ids, targets = _padded(some)
        asked = (targets != -100).any(0).nonzero()[:, 0]  # some row's, so every row's
        out = model(input_ids=ids.to(device), logits_to_keep=asked.to(device), **kwargs)
        logits, targets = out.logits.float().flatten(0, 1), targets[:, asked].flatten()
        F.cross_entropy(logits, targets.to(device), ignore_index=-100).backward()

    return step


def _mean(numbers: Iterable[float]) -> float:
    return round(statistics.mean(numbers), 1)


def spec_of(args: argparse.Namespace) -> ModelSpec:
    return ModelSpec(args.model, quantization=args.quantization, dtype=args.dtype)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m explorer.bench train", description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--quantization", default="none")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--data", nargs="+", default=["requests"], help="bundled sets or files")
    p.add_argument("--methods", nargs="+", default=list(COMPARED), choices=list(VARIANTS))
    p.add_argument("--shots", nargs="+", type=int, default=[1], help="rows of each class")
    p.add_argument("--trials", type=int, default=3)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--held-out", type=int, default=200)
    p.add_argument("--choose-on", type=int, default=60, help="rows on which rates are chosen")
    p.add_argument(
        "--rates", nargs="+", type=float, default=[1 / 3, 1.0, 3.0], help="× each method's rate"
    )
    p.add_argument("--half", action="store_true", help="train with products in bfloat16")
    p.add_argument("--template", default=Wording().template)
    p.add_argument("--speed", action="store_true", help="measure a step against peft's instead")
    p.add_argument("--repeats", type=int, default=10, help="steps of each when measuring speed")
    p.add_argument("--json", type=Path, help="write the report here")
    return p


def main(arguments: list[str]) -> int:
    args = parser().parse_args(arguments)
    if min(args.steps, args.batch, args.trials, args.repeats, *args.shots) < 1:
        parser().error("steps, rows and trials count from 1")
    report = speed(args) if args.speed else run(args)
    if PartialState().is_main_process:
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))
        shown = report if args.speed else report["table"]
        log.info("%s", json.dumps(shown, indent=1))
    return 0

"""The one loop that fits every method, and what a step of it says.

The base model is frozen and stays so: only the adapter's float32 parameters move. At every yield
the model is itself again, nothing is held that belongs to a thread, and the run can be stopped.
On a CPU the same seed gives the same losses, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from explorer.attention import apart, keeps_apart, patched
from explorer.data import Dataset, Split, read, split
from explorer.errors import ExplorerError
from explorer.examples import Batch, Wording, examples, shuffled
from explorer.lm import LoadedModel
from explorer.methods import Adapter, Method, check, knob, methods
from explorer.recomputation import recomputed

Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class FitConfig:
    """How an adapter is fitted, whatever the method."""

    steps: int = knob(60, "Steps", 1, 2000, help="One step reads one batch.")
    learning_rate: float = knob(
        5e-3, "Learning rate", 1e-6, 1.0, help="Of AdamW, after the warm-up."
    )
    batch_size: int = knob(8, "Rows per batch", 1, 64)
    accumulate: int = knob(1, "Batches per step", 1, 32, help="Gradients of so many are added up.")
    warmup: float = knob(0.1, "Warm-up", 0.0, 0.9, help="Share of the steps in which it rises.")
    schedule: Schedule = knob(
        "cosine", "Afterwards the rate", choices=get_args(Schedule), help="Down to zero, or not."
    )
    clip: float = knob(
        1.0, "Largest gradient norm", 0.0, 100.0, help="Longer gradients are cut; 0: never."
    )
    weight_decay: float = knob(0.0, "Weight decay", 0.0, 1.0)
    half: bool = knob(
        False, "In bfloat16", help="Products of a float32 model in bfloat16: faster, coarser."
    )
    recompute: bool = knob(
        False, "Save memory", help="Keep each layer's input only and compute the rest again."
    )

    def __post_init__(self):
        check(self)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        rising = math.ceil(self.warmup * self.steps)
        if step <= rising:
            return self.learning_rate * step / rising
        left = 1 - (step - 1 - rising) / max(1, self.steps - rising)
        if self.schedule == "cosine":
            left = 0.5 - 0.5 * math.cos(math.pi * left)
        return self.learning_rate * (1.0 if self.schedule == "constant" else left)


@dataclass(frozen=True)
class FitStep:
    """Where a fit stands after one step.

    step: from 1    loss: of its batches before the step, nats per token
    grad_norm: before it is cut    learning_rate: that was used    n_tokens: learnt from
    seconds: it took    gates: (l, h) in [−1, 1], NaN where there is none; None without gates
    adapter: so far; it goes on changing
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    n_tokens: int
    seconds: float
    gates: np.ndarray | None = None
    adapter: Adapter | None = field(default=None, repr=False)


class Diverged(ExplorerError):
    """Training ran away. step: at which; the adapter is the one before that went wrong"""

    def __init__(self, step: int, message: str, hint: str):
        super().__init__(message, hint)
        self.step = step

    def __reduce__(self):
        return type(self), (self.step, *self.args, self.hint)


def optimizer_for(adapter: Adapter, config: FitConfig) -> torch.optim.AdamW:
    """The optimiser of a fit, before its first step."""
    return torch.optim.AdamW(
        list(adapter.parameters()),
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
    )


def fit(
    lm: LoadedModel,
    adapter: Adapter,
    batches: Iterable[Batch],
    config: FitConfig,
    *,
    optimizer: torch.optim.AdamW | None = None,
    done: int = 0,
) -> Iterator[FitStep]:
    """Train `adapter` on the batches, yielding every step.

    optimizer, done: of a fit that is taken up again after so many steps; its batches are passed
    over, and the rest is bit for bit what it would have been

    Raises Diverged when the loss is not a number or explodes. The adapter's parameters are then
    set back to the last that gave a sound loss.
    """
    parameters = list(adapter.parameters())
    optimizer = optimizer or optimizer_for(adapter, config)
    batches = islice(batches, done * config.accumulate, None)
    sound = [p.detach().clone() for p in parameters]
    roof = math.inf
    for step in range(done + 1, config.steps + 1):
        began = time.perf_counter()
        some = list(islice(batches, config.accumulate))
        if not some:
            return
        n_tokens = sum(batch.n_tokens for batch in some)
        loss = sum(_backward(lm, adapter, batch, n_tokens, config) for batch in some)
        norm = float(_norm(parameters))
        if not (math.isfinite(loss) and math.isfinite(norm) and loss <= roof):
            for parameter, value in zip(parameters, sound, strict=True):
                parameter.data.copy_(value)
            raise _diverged(step, loss)
        # A model that knows nothing loses ln(vocabulary) a token; three times that is running away.
        roof = min(roof, 3 * max(loss, math.log(lm.geometry.vocab_size)))
        for parameter, value in zip(parameters, sound, strict=True):
            value.copy_(parameter.data)
        rate = config.rate(step)
        optimizer.param_groups[0]["lr"] = rate
        if config.clip and norm > config.clip:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(config.clip / norm)
        optimizer.step()
        optimizer.zero_grad()
        gates = adapter.gates()
        yield FitStep(
            step=step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            n_tokens=n_tokens,
            seconds=time.perf_counter() - began,
            gates=None if gates is None else gates.detach().float().cpu().numpy(),
            adapter=adapter,
        )


def _backward(
    lm: LoadedModel, adapter: Adapter, batch: Batch, n_tokens: int, config: FitConfig
) -> float:
    """Add a batch's gradients. → its share of the loss: the sum over its tokens / n_tokens"""
    half = torch.autocast(lm.device.type, torch.bfloat16, enabled=config.half)
    sparing = recomputed(lm) if config.recompute else nullcontext()
    with torch.enable_grad(), sparing, reading(lm, adapter, batch):
        with half:
            loss = loss_of(lm, adapter, batch) / n_tokens
        loss.backward()  # inside: what is computed again must meet the adapter again
    return float(loss.detach())


def loss_of(lm: LoadedModel, adapter: Adapter | None, batch: Batch) -> Tensor:
    """Negative log-likelihood of a batch's answers, in nats, summed over tokens.

    To be asked in a block of `reading`; the adapter is asked only where the text begins.
    """
    positions = batch.positions + (0 if adapter is None else adapter.span)
    everything = torch.ones_like(batch.ids)  # so that texts are kept apart by `reading` alone
    logits = lm.logits(batch.ids, mask=everything, positions=positions, at=batch.asked)
    return F.cross_entropy(logits, batch.targets.to(logits.device), reduction="sum")


@contextmanager
def reading(lm: LoadedModel, adapter: Adapter | None, batch: Batch) -> Iterator[None]:
    """For the length of a block, an adapter applied and the texts of a batch kept apart.

    A backward pass that computes layers again must run inside; a forward pass over anything but
    this batch must not, for the mask is this batch's.
    """
    if batch.shared and not keeps_apart(lm):
        raise ValueError("this model needs a row for each text: collate(…, share=False)")
    with (
        adapter.applied(lm) if adapter is not None else nullcontext(),
        patched(lm, apart(batch.positions)) if batch.shared else nullcontext(),
    ):
        yield


def _norm(parameters: list[Tensor]) -> Tensor:
    squares = [p.grad.square().sum().cpu() for p in parameters if p.grad is not None]
    if not squares:
        raise ValueError("no gradient reaches the adapter")
    return torch.stack(squares).sum().sqrt()


def _diverged(step: int, loss: float) -> Diverged:
    what = f"grew to {loss:.1f}" if math.isfinite(loss) else "is not a number"
    return Diverged(
        step,
        f"The loss {what} at step {step}; the adapter before it is kept.",
        "Lower the learning rate, or make the warm-up longer.",
    )


def train(
    lm: LoadedModel,
    data: str | Path | Dataset | Split,
    *,
    method: str | Method = "prefix-memory",
    config: Any = None,
    fitting: FitConfig | None = None,
    wording: Wording | None = None,
    shots: int = 4,
    steps: int | None = None,
    seed: int = 0,
) -> Iterator[FitStep]:
    """Train an adapter on labelled rows, yielding every step with the adapter so far.

    data: a bundled set's name, a file, or rows read before    shots: rows a class to learn from
    method: its name, see `methods()`    config: its knobs
    fitting: steps, rate and so on; without it, the method's own learning rate
    wording: how a row is put to the model
    steps: in place of those of `fitting`    seed: of the rows drawn, their order and the start
    """
    if isinstance(method, str):
        method = named(method)
    fitting = fitting or FitConfig(learning_rate=method.learning_rate)
    if steps is not None:
        fitting = replace(fitting, steps=steps)
    if not isinstance(data, (Dataset, Split)):
        data = read(data)
    if isinstance(data, Dataset):
        data = split(data, shots=shots, seed=seed)
    rows = examples(lm, data.train, wording or Wording())
    adapter = method.build(lm, config or method.config(), seed)
    batches = shuffled(rows, fitting.batch_size, seed, share=keeps_apart(lm))
    yield from fit(lm, adapter, batches, fitting)


def named(name: str) -> Method:
    """A method that trains, by its name."""
    known = methods("train")
    if name not in known:
        raise ExplorerError(f"There is no method {name}.", f"Choose from {', '.join(known)}.")
    return known[name]

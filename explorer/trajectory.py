"""What the attention layers must answer so that a frozen model says a given text.

A *trajectory* holds, for every deciding step t, what each layer asks (query q_t) and what it must
be answered (attention output o_t) so that the next token is y_t. A prefix that answers q_t with
o_t in full makes the model follow it whatever text it was given, because the residual stream at a
deciding step is then a function of the previous token and the o_t alone. For the same reason the
steps depend neither on one another nor on the user's text, so all of them are computed at once.

Where it comes from:
- a source prompt: what the model itself says after it (Attention Matching paper, Algorithm);
- a target text: any text. It is teacher-forced after a context, and where the model would say
  something else the outputs of the last layers are *repaired*: a few gradient steps move them until
  the target's logit leads by a margin. This is ours; the paper takes only what the model can say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from explorer.attention import AttentionCall, Output, log_sum_exp, patched
from explorer.lm import LoadedModel

_ROWS = 128  # steps in one pass: bounds the logits held at once (128 × 262 k floats are 134 MB)


@dataclass(frozen=True)
class Trajectory:
    """Rows of (asked, answer, what follows), one for each deciding step and ending.

    target: the k ids to be said
    asking: (r,) id of the token whose query asks    step: (r,) index of the target it decides
    position: (r,) where the asking token stands; the first step's is the prompt's last
    query, output: per layer (r, h, d), float32, CPU    loudness: per layer (r, h), LSE of the text
    key_norm: per layer, the largest norm of any key of the text    scaling: per layer, of q·k
    gap: (r,) logit of the target minus the best other, with these outputs
    repairs: gradient steps taken    repaired_layers: how many layers they changed
    seconds: for all of it
    """

    target: tuple[int, ...]
    asking: tuple[int, ...]
    step: tuple[int, ...]
    position: tuple[int, ...]
    query: tuple[Tensor, ...]
    output: tuple[Tensor, ...]
    loudness: tuple[Tensor, ...]
    key_norm: tuple[float, ...]
    scaling: tuple[float, ...]
    gap: Tensor
    repairs: int = 0
    repaired_layers: int = 0
    seconds: float = 0.0

    @property
    def first_position(self) -> int:
        """Position of the prompt's last token, from which the first step is decided."""
        return min(self.position)

    @property
    def endings(self) -> tuple[int, ...]:
        """Last tokens of a prompt for which there is a first step."""
        return tuple(a for a, s in zip(self.asking, self.step, strict=True) if s == 0)


@torch.no_grad()
def record(lm: LoadedModel, ids: Tensor, target: Sequence[int], start: int = 0) -> Trajectory:
    """Read context and target in one pass and keep the deciding positions.

    ids: (1, n) the context; its last token decides the first of `target`
    start: position of its first token
    """
    began = time.perf_counter()
    target = tuple(int(t) for t in target)
    whole = torch.cat([ids.cpu(), torch.tensor([target[:-1]], dtype=torch.long)], dim=1)
    first = ids.shape[1] - 1
    rows = slice(first, first + len(target))
    kept = _Kept(rows)
    with patched(lm, kept):
        logits = lm.logits(whole, start=start, last=len(target))[0]
    n = len(target)
    return Trajectory(
        target=target,
        asking=tuple(whole[0, rows].tolist()),
        step=tuple(range(n)),
        position=tuple(range(start + first, start + first + n)),
        query=tuple(kept.query),
        output=tuple(kept.output),
        loudness=tuple(kept.loudness),
        key_norm=tuple(kept.key_norm),
        scaling=tuple(kept.scaling),
        gap=lead(logits, torch.tensor(target)).cpu(),
        seconds=time.perf_counter() - began,
    )


class _Kept:
    """A patch that keeps what the deciding rows ask and are answered."""

    def __init__(self, rows: slice):
        self.rows = rows
        self.query: list[Tensor] = []
        self.output: list[Tensor] = []
        self.loudness: list[Tensor] = []
        self.key_norm: list[float] = []
        self.scaling: list[float] = []

    def __call__(self, call: AttentionCall) -> Output:
        output, weights = call.run()
        mask = None if call.mask is None else call.mask[:, :, self.rows]
        key = call.key
        if mask is None:  # causal: the rows' own view, spelt out
            n, k = self.rows.stop - self.rows.start, key.shape[2]
            mask = torch.ones(1, 1, n, k, dtype=torch.bool, device=key.device)
            mask = mask.tril(diagonal=self.rows.start)
        rows = replace(call, query=call.query[:, :, self.rows], mask=mask)
        # Copies: a view of one row would keep the whole text's queries alive.
        self.query.append(call.query[0, :, self.rows].transpose(0, 1).float().cpu().clone())
        self.output.append(output[0, self.rows].float().cpu().clone())
        self.loudness.append(log_sum_exp(rows)[0].mT.cpu())
        self.scaling.append(call.scaling)
        self.key_norm.append(float(key.float().norm(dim=-1).max()))
        return output, weights


def lead(logits: Tensor, target: Tensor) -> Tensor:
    """Logit of the target minus the best other. logits: (r, v)    target: (r,) → (r,)"""
    target = target.to(logits.device)[:, None]
    own = logits.gather(-1, target)[:, 0]
    others = logits.scatter(-1, target, -torch.inf)
    return own - others.max(-1).values


def joined(trajectories: Sequence[Trajectory]) -> Trajectory:
    """The first trajectory with step 1 of the others, which may end there, as rows of its own.

    So one prefix serves prompts with several last tokens. All contexts must be equally long.
    """
    head, *rest = trajectories
    if any(one.target[0] != head.target[0] for one in rest):
        raise ValueError("only trajectories of one target can be joined")
    if any(one.first_position != head.first_position for one in rest):
        raise ValueError("contexts of a joined trajectory must be equally long")
    known = set(head.endings)
    rest = [one for one in rest if not (one.asking[0] in known or known.add(one.asking[0]))]

    def rows(name: str) -> tuple[Tensor, ...]:
        layers = zip(*(getattr(one, name) for one in (head, *rest)), strict=True)
        return tuple(torch.cat([own, *(other[:1] for other in others)]) for own, *others in layers)

    return replace(
        head,
        asking=(*head.asking, *(one.asking[0] for one in rest)),
        step=(*head.step, *(0 for _ in rest)),
        position=(*head.position, *(one.first_position for one in rest)),
        query=rows("query"),
        output=rows("output"),
        loudness=rows("loudness"),
        key_norm=tuple(max(norms) for norms in zip(*(t.key_norm for t in trajectories))),  # noqa: B905
        gap=torch.cat([head.gap, *(one.gap[:1] for one in rest)]),
        seconds=sum(one.seconds for one in trajectories),
    )


@dataclass(frozen=True)
class Repair:
    """How outputs are moved until the target leads.

    margin: logits by which every target must lead
    layers: how many of the last layers may change at first    steps: gradient steps at most
    rate: size of a step, relative to the root mean square of a layer's outputs
    """

    margin: float = 2.0
    layers: int = 4
    steps: int = 300
    rate: float = 0.05


def repair(lm: LoadedModel, found: Trajectory, how: Repair) -> Iterator[Trajectory]:
    """Move the last layers' outputs until every gap is at least the margin.

    Only rows that do not lead yet are computed, and of the model only the layers that change. When
    the smallest gap stalls, the rate is halved, then twice as many layers may change.

    Yields the trajectory after every step; the last one holds whatever was reached, so the caller
    looks at its `gap`.
    """
    began = time.perf_counter()
    open_rows = found.gap < how.margin
    if not open_rows.any():
        yield found
        return
    n_layers = lm.geometry.n_layers
    width, rate = min(how.layers, n_layers), how.rate
    output = [layer.clone() for layer in found.output]
    tail = _Tail(lm, found, n_layers - width)
    moments = _Moments(output, rate)
    gap, best, stalled, halved = found.gap.clone(), -torch.inf, 0, 0
    step = 0
    while step < how.steps and (gap < how.margin).any():
        step += 1
        rows = torch.nonzero(gap < how.margin)[:, 0]
        for some in rows.split(_ROWS):
            variables = [
                layer[some].requires_grad_() if i >= tail.first else layer[some]
                for i, layer in enumerate(output)
            ]
            with torch.enable_grad():
                lead_now = tail.gaps(some, variables)
                loss = torch.relu(how.margin - lead_now).sum()
                moving = variables[tail.first :]
                gradients = torch.autograd.grad(loss, moving)
            gap[some] = lead_now.detach().cpu()
            still = some[(lead_now.detach() < how.margin).cpu()]
            keep = torch.isin(some, still)
            for i, gradient in enumerate(gradients, start=tail.first):
                output[i][still] -= moments.step(i, still, gradient.cpu()[keep], rate)
        worst = float((how.margin - gap).clamp(min=0).sum())
        stalled = 0 if -worst > best * (0.995 if best < 0 else 1) else stalled + 1
        best = max(best, -worst)
        if stalled >= 12:
            stalled, best, halved = 0, -torch.inf, halved + 1
            if halved % 2:
                rate /= 2
            elif width < n_layers:
                width, rate = min(2 * width, n_layers), how.rate
                tail = _Tail(lm, replace(found, output=tuple(output)), n_layers - width)
                moments = _Moments(output, rate)
        if step % 5 == 0:
            elapsed = time.perf_counter() - began
            yield replace(
                found,
                output=tuple(output),
                gap=gap.clone(),
                repairs=step,
                repaired_layers=width,
                seconds=found.seconds + elapsed,
            )
    query, gap = tail.replay(output)
    yield replace(
        found,
        query=query,
        output=tuple(output),
        gap=gap,
        repairs=step,
        repaired_layers=width,
        seconds=found.seconds + time.perf_counter() - began,
    )


def elsewhere(lm: LoadedModel, found: Trajectory, shift: int) -> Trajectory:
    """The same steps with the same answers, asked `shift` positions later (or, below 0, earlier).

    Queries and gaps are those the model forms there, bit for bit; only rotary embedding can tell
    the positions apart, so the target is still said.
    """
    there = replace(found, position=tuple(one + shift for one in found.position))
    query, gap = _Tail(lm, there, 0).replay(found.output)
    return replace(there, query=query, gap=gap)


class _Moments:
    """Adam's moments, row by row: a row that leads already does not move any more."""

    def __init__(self, output: Sequence[Tensor], rate: float):
        self.scale = [float(layer.square().mean().sqrt()) for layer in output]
        self.first = [torch.zeros_like(layer) for layer in output]
        self.second = [torch.zeros_like(layer) for layer in output]
        self.count = [torch.zeros(len(layer), 1, 1) for layer in output]
        self.rate = rate

    def step(self, layer: int, rows: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """rows: (n,)    gradient: (n, h, d) → what to take off those rows"""
        self.count[layer][rows] += 1
        first = self.first[layer][rows] * 0.9 + 0.1 * gradient
        second = self.second[layer][rows] * 0.99 + 0.01 * gradient.square()
        self.first[layer][rows], self.second[layer][rows] = first, second
        count = self.count[layer][rows]
        first, second = first / (1 - 0.9**count), second / (1 - 0.99**count)
        return rate * self.scale[layer] * first / (second.sqrt() + 1e-12)


class _Tail:
    """The model from layer `first` on, for the rows of a trajectory, attention answered for it.

    Rows do not see one another: their attention outputs are given, and everything else in a
    transformer block works on one position alone.
    """

    def __init__(self, lm: LoadedModel, found: Trajectory, first: int):
        self.lm, self.found, self.first = lm, found, first
        self.ids = torch.tensor([found.asking])
        self.positions = torch.tensor([found.position])
        self.target = torch.tensor([found.target[s] for s in found.step])
        self.blocks = decoder_blocks(lm)
        self.hidden: Tensor | None = None  # (r, m) what enters layer `first`
        if first:
            self.hidden = self._enter()

    @torch.no_grad()
    def _enter(self) -> Tensor:
        parts: list[Tensor] = []

        def keep(module, args, output):  # noqa: ARG001
            parts.append(output[0] if isinstance(output, tuple) else output)

        handle = self.blocks[self.first - 1].register_forward_hook(keep)
        try:
            for some in torch.arange(len(self.target)).split(_ROWS):
                answers = [layer[some] for layer in self.found.output]
                with patched(self.lm, _Answer(self.lm, answers)):
                    self._run(some)
        finally:
            handle.remove()
        return torch.cat([part[0] for part in parts])

    def _run(self, some: Tensor) -> Tensor:
        return self.lm.logits(self.ids[:, some], positions=self.positions[:, some])[0]

    def gaps(self, some: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """Leads of the rows `some` when their layers answer so. answers: per layer (n, h, d)"""
        hidden = None if self.hidden is None else self.hidden[some][None]
        with (
            skipped(self.blocks[: self.first], hidden),
            patched(self.lm, _Answer(self.lm, answers)),
        ):
            logits = self._run(some)
        return lead(logits, self.target[some])

    @torch.no_grad()
    def replay(self, output: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        """What every layer asks, and the leads, once it is answered so."""
        n_layers = self.lm.geometry.n_layers
        asked: list[list[Tensor]] = [[] for _ in range(n_layers)]
        gaps = []
        for some in torch.arange(len(self.target)).split(_ROWS):
            answers = [layer[some] for layer in output]
            with patched(self.lm, _Answer(self.lm, answers, asked)):
                gaps.append(lead(self._run(some), self.target[some]).cpu())
        return tuple(torch.cat(parts) for parts in asked), torch.cat(gaps)


class _Answer:
    """A patch that answers every layer with given outputs, and may keep what was asked."""

    def __init__(
        self,
        lm: LoadedModel,
        answers: Sequence[Tensor],
        asked: list[list[Tensor]] | None = None,
    ):
        self.answers, self.asked, self.device = answers, asked, lm.device

    def __call__(self, call: AttentionCall) -> Output:
        if self.asked is not None:
            self.asked[call.layer].append(call.query[0].transpose(0, 1).float().cpu())
        return self.answers[call.layer].to(call.query)[None], None


def decoder_blocks(lm: LoadedModel) -> list[nn.Module]:
    """The model's blocks in order, found as the list whose i-th member holds attention layer i."""
    n_layers = lm.geometry.n_layers
    for module in lm.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            numbers = [
                {m.layer_idx for m in block.modules() if hasattr(m, "layer_idx")}
                for block in module
            ]
            if all(found == {i} for i, found in enumerate(numbers)):
                return list(module)
    raise ValueError(f"{type(lm.model).__name__} keeps its blocks in no single list")


@contextmanager
def skipped(blocks: Sequence[nn.Module], hidden: Tensor | None) -> Iterator[None]:
    """For the length of a block these do nothing, and the last of them hands on `hidden`.

    hidden: (1, n, m)
    """
    saved = [block.__dict__.get("forward") for block in blocks]

    def hand_on(*args, **kwargs):
        return args[0] if args else kwargs["hidden_states"]

    try:
        for block in blocks:
            block.forward = hand_on
        if blocks:
            blocks[-1].forward = lambda *args, **kwargs: hidden  # noqa: ARG005
        yield
    finally:
        for block, forward in zip(blocks, saved, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward

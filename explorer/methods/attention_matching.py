"""Attention matching: a prefix, solved and not trained, that answers a trajectory's queries.

Per layer and key/value head find slots (key κ, log-weight β, value v) with

    S · V = O,    S_ij = softmax_j(s·q_i·κ_j + β_j),    i, j = 1 … G·r

where the rows are the r deciding steps of all G query heads that share the slots. Three ways to
choose the keys; the values follow from one solve in float64.

- `aligned` (the paper's): κ_j ∥ q_j with own logit `attn_lim`, or with QK-norm the longest key the
  norm allows in the best direction, u* = √d · γ⊙q / ‖γ⊙q‖; β = ln r for r-fold repetition. Its
  condition explodes as the target grows.
- `whitened` (ours): least-norm κ with s·Q·κᵀ = c·I, while G·r ≤ head size. Needs no β, so that the
  prefix fits into a stock cache.
- `kernel` (ours, default): κ_j = (c/s)(q_j − μ), β_j = −c(‖q_j‖² − ‖μ‖²)/2 + B. Then
  S_ij ∝ exp(−c‖q_i − q_j‖²/2): the own slot always wins, whatever their number, and S is close to
  the identity. μ, the mean query, keeps the numbers small; it cancels in S.

Source: "Prefix-Tuning for Arbitrary Output Sequences on Pretrained Transformers", arXiv 2610.24123
(Attention Matching; not the method of the same name for cache compaction, arXiv 2602.16284).
Differs: repetition is a log-weight instead of copied slots; keys live after the key projection
(any key is allowed, the paper's generalised prefix restricts it to the projection's range).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from explorer.errors import ExplorerError
from explorer.lm import LoadedModel
from explorer.methods import Method
from explorer.positions import Rotation, rotation, rotations
from explorer.prefix import Prefix, Slots
from explorer.trajectory import Trajectory, elsewhere

Keys = Literal["kernel", "whitened", "aligned"]

_SEPARATION = 30.0  # nats by which the own slot must lead the nearest other
_COVERAGE = 30.0  # nats by which the own slot must lead all of the text
_IDENTITY = 1e-9  # off-diagonal weight below which S needs no solve
_DENSE = 768  # unknowns up to which condition and solve are cheap


@dataclass(frozen=True)
class Matching:
    """Options of the solver.

    keys: how queries find their slots
    attn_lim: own logit of an `aligned` key (models without QK-norm); the paper's GPT-2 value is 20
    repeat: how often each slot counts; the paper's r
    """

    keys: Keys = "kernel"
    attn_lim: float = 20.0
    repeat: int = 1

    def __post_init__(self):
        if self.keys not in get_args(Keys):
            raise ExplorerError(
                f"There are no keys called {self.keys}.",
                f"Choose from {', '.join(get_args(Keys))}.",
            )
        if not self.repeat >= 1:
            raise ExplorerError(f"A slot cannot count {self.repeat} times.", "Choose 1 or more.")
        if not 0 < self.attn_lim < math.inf:
            raise ExplorerError(
                f"attn_lim is {self.attn_lim}.", "It is a logit above 0; the paper has 20."
            )


@dataclass(frozen=True)
class Solved:
    """A prefix with the evidence of its solve.

    first_position: where the last token of a prompt must stand; other lengths rotate the keys
    condition: largest condition number of any S; 1 where it is the identity to rounding
    residual: largest error of S·V against O, relative to the largest entry of O
    scale: smallest and largest c of any head (kernel, whitened), 0 for aligned
    seconds: of the solve alone    model, sizes: the model's name, its layers, heads and head size
    how: the options    found: in half precision what was solved for, its queries left out
    """

    prefix: Prefix
    first_position: int
    condition: float
    residual: float
    scale: tuple[float, float]
    seconds: float
    model: str = ""
    sizes: tuple[int, ...] = ()
    how: Matching = field(default_factory=Matching)
    found: Trajectory | None = None

    def at(self, lm: LoadedModel, length: int) -> Prefix:
        """The prefix for a prompt of `length` tokens: keys rotated, everything else shared.

        Half precision rounds a query differently at every position, by more than what tells one
        step from the next. There the steps are asked again where the prompt ends, which is one
        pass over as many tokens as the target has, and their slots are solved anew.
        """
        shift = length - 1 - self.first_position
        if shift == 0:
            return self.prefix
        if self.found is not None:
            return solve(lm, elsewhere(lm, self.found, shift), self.how).prefix
        return moved(self.prefix, rotation(lm, shift))


def moved(prefix: Prefix, turn: Rotation) -> Prefix:
    """The same slots at other positions."""
    layers = (
        replace(slots, key=turn(layer, slots.key)) for layer, slots in enumerate(prefix.layers)
    )
    return Prefix(tuple(layers), prefix.span)


def solve(lm: LoadedModel, found: Trajectory, how: Matching | None = None) -> Solved:
    """The prefix that answers every row of a trajectory."""
    how = how or Matching()
    began = time.perf_counter()
    n_kv = lm.geometry.n_kv_heads
    best = best_keys(lm, found) if how.keys == "aligned" else None
    layers, conditions, residuals, scales = [], [], [], []
    for layer, scaling in enumerate(found.scaling):
        rows, _, head_dim = found.query[layer].shape
        # Rows of a key/value head: all its query heads at step 1, then at step 2, …
        query, output = (
            tensor[layer].view(rows, n_kv, -1, head_dim).transpose(0, 1).flatten(1, 2).double()
            for tensor in (found.query, found.output)
        )  # (g, G·r, d)
        quiet = found.loudness[layer].max(0).values.view(n_kv, -1).amax(-1).double()  # (g,)
        if how.keys == "kernel":
            room = scaling * query.norm(dim=-1).amax(-1) * 2 * found.key_norm[layer]
            level = torch.maximum(quiet, room) + _COVERAGE + math.log(lm.geometry.context)
            key, bias, c = kernel_keys(query, scaling, level)
        elif how.keys == "whitened":
            key, bias, c = whitened_keys(query, scaling, quiet + _COVERAGE)
        else:
            aligned = None if best is None else best[layer].view(rows, n_kv, -1, head_dim)
            aligned = None if aligned is None else aligned.transpose(0, 1).flatten(1, 2).double()
            key, bias, c = aligned_keys(query, scaling, how, aligned)
        # What the seam will compute with is float32: S is taken from the rounded keys.
        key, bias = key.float(), bias.float()
        value, condition, residual = values(query, key.double(), bias.double(), scaling, output)
        layers.append(Slots(key, value.float(), bias if bias.any() else None, capped=False))
        conditions.append(condition)
        residuals.append(residual)
        scales += c.tolist()
    return Solved(
        Prefix(tuple(layers)),
        found.first_position,
        max(conditions),
        max(residuals),
        (min(scales), max(scales)),
        time.perf_counter() - began,
        lm.spec.told,
        lm.geometry.sizes,
        how,
        None if lm.dtype == torch.float32 else replace(found, query=()),
    )


def kernel_keys(query: Tensor, scaling: float, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and log-weights that make the weights a Gaussian kernel between queries.

        s·q·κ_j + β_j = c·(‖q − μ‖² − ‖q − q_j‖²)/2 + B

    c is the smallest that puts the nearest other query `_SEPARATION` nats behind, but not so large
    that float32 could not hold the logits. B = level is the least own logit.

    query: (g, n, d) float64    level: (g,) → keys (g, n, d), log-weights (g, n), c (g,)
    """
    mean = query.mean(1, keepdim=True)
    size = (query - mean).square().sum(-1)  # (g, n)
    nearest = nearest_square(query - mean)  # (g,)
    c = 2 * _SEPARATION / nearest.clamp(min=1e-30)
    # A logit of size x carries an error of about x·2⁻²⁴; keep it well below one nat.
    c = torch.minimum(c, 2.0**24 / 64 / size.amax(-1).clamp(min=1e-30))
    c = c.clamp(min=1e-3)
    key = (c / scaling)[:, None, None] * (query - mean)
    square = query.square().sum(-1) - mean.square().sum(-1)
    bias = -c[:, None] * square / 2 + level[:, None]
    return key, bias, c


def nearest_square(points: Tensor) -> Tensor:
    """Smallest squared distance between two different rows. points: (g, n, d) → (g,)"""
    n = points.shape[1]
    least = torch.full((len(points),), torch.inf, dtype=points.dtype)
    if n == 1:
        return torch.ones_like(least)
    size = points.square().sum(-1)
    for first in range(0, n, 1024):
        some = points[:, first : first + 1024]
        square = size[:, first : first + 1024, None] + size[:, None] - 2 * some @ points.mT
        square.diagonal(offset=first, dim1=1, dim2=2).fill_(torch.inf)
        least = torch.minimum(least, square.amin((1, 2)))
    return least


def whitened_keys(query: Tensor, scaling: float, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Least-norm keys with logit `own` for their own query and 0 for every other.

    A ridge of 1e-10 of the largest Gram entry keeps equal queries from blowing up. With more rows
    than the head size the system has no exact solution; the values' solve then meets a poor S.
    """
    gram = query @ query.mT  # (g, n, n)
    n = gram.shape[-1]
    ridge = 1e-10 * gram.diagonal(dim1=1, dim2=2).amax(-1)[:, None, None]
    inverse = torch.linalg.solve(gram + ridge * torch.eye(n, dtype=gram.dtype), query)
    c = own + math.log(max(n, 2)) + 6
    return (c / scaling)[:, None, None] * inverse, torch.zeros(query.shape[:2]), c


def aligned_keys(
    query: Tensor, scaling: float, how: Matching, best: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's keys: along the query, as long as `attn_lim` asks or as QK-norm allows."""
    if best is None:
        length = query.square().sum(-1, keepdim=True).clamp(min=1e-30)
        best = how.attn_lim / scaling * query / length
    bias = torch.full(query.shape[:2], math.log(how.repeat), dtype=query.dtype)
    return best, bias, torch.zeros(len(query))


def values(
    query: Tensor, key: Tensor, bias: Tensor, scaling: float, output: Tensor
) -> tuple[Tensor, float, float]:
    """Solve S·V = O. All (g, n, …), float64 → V (g, n, d), condition, relative residual

    Where no query gives more than `_IDENTITY` to slots of others, S is the identity to rounding:
    V = O, the condition is 1 and the residual is bounded by twice that weight. S is not even
    formed then, which for thousands of slots is most of the work.
    """
    value, conditions, residuals = [], [], []
    for q, k, b, o in zip(query, key, bias, output, strict=True):
        astray = _astray(q, k, b, scaling)
        if astray < _IDENTITY:
            value.append(o)
            conditions.append(1.0)
            residuals.append(2 * astray)
            continue
        weights = torch.softmax(scaling * q @ k.T + b, dim=-1)  # (n, n)
        if len(weights) <= _DENSE:
            conditions.append(float(torch.linalg.cond(weights)))
        else:  # an estimate: the exact one takes longer than everything else
            conditions.append(float(weights.sum(0).max() / weights.diagonal().min()))
        solution = _solved(weights, o)
        value.append(solution)
        error = (weights @ solution - o).abs().max() / o.abs().max().clamp(min=1e-30)
        residuals.append(float(error))
    return torch.stack(value), max(conditions), max(residuals)


def _astray(query: Tensor, key: Tensor, bias: Tensor, scaling: float) -> float:
    """A bound on the weight that any query gives to slots not its own. query, key: (n, d)"""
    n = len(query)
    worst = -math.inf
    for rows in torch.arange(n).split(1024):
        logits = scaling * query[rows] @ key.T + bias  # (rows, n)
        own = logits[torch.arange(len(rows)), rows]
        logits[torch.arange(len(rows)), rows] = -torch.inf
        worst = max(worst, float((logits.amax(-1) - own).max()))
    return (n - 1) * math.exp(min(worst, 0.0)) if n > 1 else 0.0


def _solved(weights: Tensor, output: Tensor) -> Tensor:
    solution, info = torch.linalg.solve_ex(weights, output)
    good = int(info) == 0 and bool(torch.isfinite(solution).all())
    scale = output.abs().max()
    if good and float((weights @ solution - output).abs().max()) <= 1e-6 * float(scale):
        return solution
    # Singular, or a library that failed without saying so: least squares by SVD never does.
    return torch.linalg.lstsq(weights, output, driver="gelsd").solution


def best_keys(lm: LoadedModel, found: Trajectory) -> list[Tensor] | None:
    """For models with QK-norm, the key that scores highest for each query; else None.

    The norm fixes a key's length before its weight γ and the rotary embedding, so by
    Cauchy-Schwarz the best is κ = R(γ⊙u*) with u* = √d · γ⊙(Rᵀq) / ‖γ⊙(Rᵀq)‖, where R is the
    rotation at the asking position. → per layer (r, h, d)

    Source: arXiv 2610.24123, QK-norm section; there without rotation.
    """
    norms = {
        m.layer_idx: m.k_norm
        for m in lm.model.modules()
        if hasattr(m, "layer_idx") and hasattr(m, "k_norm")
    }
    head_dim = lm.geometry.head_dim
    if len(norms) < lm.geometry.n_layers or norms[0].weight.numel() != head_dim:
        return None  # no norm, or one over all heads together, which bounds no single key
    keys = []
    positions = sorted(set(found.position))
    there, back = (rotations(lm, [sign * p for p in positions]) for sign in (1, -1))
    turns = dict(zip(positions, zip(back, there, strict=True), strict=True))
    for layer in range(lm.geometry.n_layers):
        weight_device = next(norms[layer].parameters()).device
        with torch.no_grad():  # the norm of all ones is its weight, whatever the family adds to it
            gamma = norms[layer](torch.ones(1, head_dim, device=weight_device))[0].float().cpu()
        rows = []
        for query, position in zip(found.query[layer], found.position, strict=True):
            back, forth = turns[position]
            plain = gamma * _turned(back, layer, query)  # (h, d)
            unit = math.sqrt(head_dim) * plain / plain.norm(dim=-1, keepdim=True)
            rows.append(_turned(forth, layer, gamma * unit))
        keys.append(torch.stack(rows))
    return keys


def _turned(turn: Rotation, layer: int, query: Tensor) -> Tensor:
    return turn(layer, query[:, None])[:, 0]


METHOD = Method(
    name="attention-matching",
    title="Attention matching",
    summary="A prefix solved from what attention has to say at every step of a target.",
    source="https://arxiv.org/abs/2610.24123",
    config=Matching,
    build=solve,
    kind="solve",
)

"""How many directions a method's addition really uses.

Every method answers o = a · o_X + b(q). b is collected over the positions of some texts, layer by
layer and head by head; the eigenvalues of its covariance say along how many axes it spreads. A
prefix of p slots can never use more than min(p, d): it mixes p values. PrefixMemory-Tuning, Fig. 3.

The algebra is done in float64 on the CPU: eigh on a GPU can fail on matrices of low rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from explorer.attention import AttentionCall, Output, patched
from explorer.lm import LoadedModel
from explorer.methods import Adapter


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the covariance of b, in descending order, float64.

    eigenvalues: (l, h, d)    pooled: (d), of the covariance averaged over layers and heads
    bound: most directions the method could use    n_positions: over which b was collected
    centred: whether the mean of b was taken off
    """

    eigenvalues: np.ndarray
    pooled: np.ndarray
    bound: int
    n_positions: int
    centred: bool

    @property
    def effective_rank(self) -> np.ndarray:
        """exp of the entropy of the normalised eigenvalues; 0 where b is zero. → (l, h)"""
        return effective_rank(self.eigenvalues)

    @property
    def participation(self) -> np.ndarray:
        """(Σλ)² / Σλ², the participation ratio; 0 where b is zero. → (l, h)"""
        return participation(self.eigenvalues)

    @property
    def axes_used(self) -> float:
        """Effective rank, mean over the heads that add anything; 0 if none does."""
        used = self.effective_rank
        return float(used[used > 0].mean()) if (used > 0).any() else 0.0

    @property
    def decay(self) -> np.ndarray:
        """Eigenvalues over the largest of their head, mean over the heads that add. → (d)"""
        some = self.eigenvalues[self.eigenvalues[..., 0] > 0]  # (heads, d)
        return (some / some[:, :1]).mean(0) if len(some) else np.zeros_like(self.pooled)


def effective_rank(eigenvalues: np.ndarray) -> np.ndarray:
    """exp(−Σ p ln p) with p = λ / Σλ, along the last axis."""
    total = eigenvalues.sum(-1, keepdims=True)
    share = np.divide(eigenvalues, total, out=np.zeros_like(eigenvalues), where=total > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.exp(-(share * logs).sum(-1)) * (total[..., 0] > 0)


def participation(eigenvalues: np.ndarray) -> np.ndarray:
    """(Σλ)² / Σλ² along the last axis."""
    top, bottom = eigenvalues.sum(-1) ** 2, (eigenvalues**2).sum(-1)
    return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over positions of what a method adds, from which spectra with and without mean follow.

    total: (l, h, d) Σ b    outer: (l, h, d, d) Σ b bᵀ    own: (l, h) Σ ‖o_X‖²; float64
    count: positions    bound: most directions the method could use
    """

    total: Tensor
    outer: Tensor
    own: Tensor
    count: int
    bound: int

    def spectrum(self, *, centred: bool = True) -> Spectrum:
        covariance = covariance_of(self.total, self.outer, self.count, centred=centred)
        return Spectrum(
            eigenvalues=_eigenvalues(covariance),
            pooled=_eigenvalues(covariance.flatten(0, 1).mean(0)),
            bound=self.bound,
            n_positions=self.count,
            centred=centred,
        )

    @property
    def ratio(self) -> np.ndarray:
        """How large what is added is beside the text's own: √(Σ‖b‖² / Σ‖o_X‖²). → (l, h)"""
        added = self.outer.diagonal(dim1=-2, dim2=-1).sum(-1)
        return (added / self.own.clamp(min=1e-30)).sqrt().numpy()


def spectrum(
    lm: LoadedModel, adapter: Adapter, texts: Sequence[Sequence[int]], *, centred: bool = True
) -> Spectrum:
    """Spectrum of what `adapter` adds, over every position of some texts. See `moments`."""
    return moments(lm, adapter, texts).spectrum(centred=centred)


@torch.no_grad()
def moments(lm: LoadedModel, adapter: Adapter, texts: Sequence[Sequence[int]]) -> Moments:
    """What `adapter` adds to every head's output, summed up over every position of some texts.

    A method that is not of the form a · o_X + b (LoRA) is measured: b is then the output with the
    adapter less the output without, each in its own forward pass.

    texts: token ids; one text at a time is read, so there is no padding to take out
    """
    geometry, parts = lm.geometry, adapter.parts(lm)
    d = geometry.head_dim
    total = torch.zeros(geometry.n_layers, geometry.n_heads, d, dtype=torch.float64)
    outer = torch.zeros(geometry.n_layers, geometry.n_heads, d, d, dtype=torch.float64)
    own = torch.zeros(geometry.n_layers, geometry.n_heads, dtype=torch.float64)

    def add(layer: int, added: Tensor) -> None:  # (b, h, q, d)
        added = added.to("cpu", torch.float64).transpose(0, 1).flatten(1, 2)  # (h, b·q, d)
        total[layer] += added.sum(1)
        outer[layer] += added.mT @ added

    def see(layer: int, output: Tensor) -> Tensor:  # (b, q, h, d) → (b, h, q, d)
        output = output.to("cpu", torch.float64).transpose(1, 2)
        own[layer] += output.square().sum((0, 2, 3))
        return output

    def watch(call: AttentionCall) -> Output:
        part = parts(call)
        answer = call.run()
        see(call.layer, answer[0])
        if part is not None:
            add(call.layer, part[1])
        return answer

    for text in texts:
        ids = torch.tensor([list(text)])
        if parts is not None:
            # `watch` lies inside: it sees each call as the adapter does.
            with patched(lm, watch), adapter.applied(lm):
                lm.logits(ids, start=adapter.span, last=1)
            continue
        plain = _outputs(lm, ids)
        with adapter.applied(lm):
            changed = _outputs(lm, ids)
        for layer, output in plain.items():
            add(layer, changed[layer].transpose(1, 2) - see(layer, output))
    bound = min(d, getattr(adapter.config, "slots", d))
    return Moments(total, outer, own, sum(map(len, texts)), bound)


def _outputs(lm: LoadedModel, ids: Tensor) -> dict[int, Tensor]:
    """What attention answers in every layer. → by layer, (b, q, h, d), float64, CPU"""
    found: dict[int, Tensor] = {}

    def watch(call: AttentionCall) -> Output:
        answer = call.run()
        found[call.layer] = answer[0].to("cpu", torch.float64)
        return answer

    with patched(lm, watch):
        lm.logits(ids, last=1)
    return found


def covariance_of(total: Tensor, outer: Tensor, count: int, *, centred: bool) -> Tensor:
    """Σ b bᵀ / n, less the mean's part where it is taken off. → (…, d, d)"""
    covariance = outer / count
    if centred:
        mean = total / count
        covariance = covariance - mean[..., :, None] * mean[..., None, :]
    return covariance


def _eigenvalues(matrix: Tensor) -> np.ndarray:
    """In descending order; rounding below zero is zero."""
    return torch.linalg.eigvalsh(matrix).flip(-1).clamp(min=0).numpy()

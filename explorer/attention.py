"""The seam: the only module that knows how transformers calls attention.

A *patch* is a function `(AttentionCall) -> (output, weights)`. Captures, prefixes, gates and
ablations are all patches. `patched` installs them for the length of a `with` block and restores
the model on every way out.

Every method here has the form `o = a(q) · o_X + b(q)`: the model's own fused attention gives
o_X, a patch adds its part. Nothing touches the cache or the position ids, and nothing but `apart`
the mask, so it works with every cache class, past sliding windows, on quantised weights, and under
gradients.

Never hold a `patched` block open across a `yield`: the generator may be resumed on another
thread, and another forward pass may come in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from explorer.errors import ExplorerError
from explorer.lm import LoadedModel

Output = tuple[Tensor, Tensor | None]  # (b, q, h, d), and (b, h, q, k) or None under sdpa

# Logits held at once while summing exponentials: 4 Mi float32 are 16 MB.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class AttentionCall:
    """One layer asking for attention, after projection, norms, rotary embedding and cache.

    query: (b, h, q, d)    key, value: (b, g, k, d)
    mask: (b, 1, q, k), additive or boolean (true = visible); None where nothing is masked but,
          with more than one query, the future
    scaling: factor of q·k    softcap: logits become cap · tanh(logit / cap), before the mask
    sink: (h,) logit of a learned slot without value that joins the softmax, or None
    _told: query, key, mask and their log-sum-exp, where `run_and_total` has had it for nothing
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None = None
    sink: Tensor | None = None
    _inner: Callable[[AttentionCall], Output] = field(default=None, repr=False)
    _told: tuple[Tensor, Tensor, Tensor | None, Tensor] | None = field(default=None, repr=False)

    def run(self) -> Output:
        """What this layer would have answered without the patch asking."""
        return self._inner(self)

    def weigh(self, value: Tensor) -> Tensor:
        """The same attention weights over other values: Σ_k a_k · value_k.

        With indicators for values this gives each group's share of attention at the price of a
        second fused call; no (q, k) matrix is ever stored. Narrow values are padded to the head
        size, since the fused kernels want values as wide as keys.

        value: (b or 1, k, n) or (b or 1, g, k, n), n ≤ d → (b, h, q, n), float32
        """
        width, wide = value.shape[-1], self.key.shape[-1]
        if value.ndim == 3:
            value = value[:, None]
        value = torch.nn.functional.pad(value.to(self.key.device, torch.float32), (0, wide - width))
        value = value.expand(*self.key.shape[:3], wide)
        mask = self.mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.float()
        # In float32 whatever the model computes in: eight bits of mantissa are too few for shares.
        call = replace(self, query=self.query.float(), key=self.key.float(), value=value, mask=mask)
        return call.run()[0][..., :width].transpose(1, 2)


Patch = Callable[[AttentionCall], Output]

_PREFIX = "explorer_"
# id of the config an attention module reads its implementation from → patches, innermost first
_installed: dict[int, tuple[Patch, ...]] = {}


@contextmanager
def patched(lm: LoadedModel, *patches: Patch, eager: bool = False) -> Iterator[None]:
    """Send every attention call of `lm` through `patches`, the last one outermost.

    eager: compute weights explicitly, so that `run` returns them. Blocks nest; the inner block's
    patches wrap the outer ones and therefore see their effect.
    """
    config = lm.model.config
    key = id(config.get_text_config())
    with lm.lock:
        before, implementation = _installed.get(key, ()), config._attn_implementation
        base = "eager" if eager else implementation.removeprefix(_PREFIX)
        try:
            _installed[key] = before + patches
            lm.model.set_attn_implementation(_PREFIX + base)
            yield
        finally:
            lm.model.set_attn_implementation(implementation)
            if before:
                _installed[key] = before
            else:
                _installed.pop(key, None)


def _dispatch(base: str, module, query, key, value, attention_mask, *, scaling, **kwargs) -> Output:
    if base == "eager":  # each model file brings its own: Gemma caps logits, gpt-oss has sinks
        attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = ALL_ATTENTION_FUNCTIONS[base]

    run = partial(_answer, attend, module, kwargs)
    for patch in _installed.get(id(module.config), ()):
        run = partial(_through, patch, run)
    return run(
        AttentionCall(
            module.layer_idx,
            query,
            key,
            value,
            attention_mask,
            scaling if scaling is not None else query.shape[-1] ** -0.5,
            kwargs.get("softcap"),
            kwargs.get("s_aux"),
            run,
        )
    )


def _answer(attend: Callable, module, kwargs: dict, call: AttentionCall) -> Output:
    """The model's own attention, behind all patches."""
    return attend(
        module, call.query, call.key, call.value, call.mask, scaling=call.scaling, **kwargs
    )


def _through(patch: Patch, inner: Callable[[AttentionCall], Output], call: AttentionCall) -> Output:
    return patch(replace(call, _inner=inner))


for _base, _mask in (("eager", eager_mask), ("sdpa", sdpa_mask)):
    AttentionInterface.register(_PREFIX + _base, partial(_dispatch, _base))
    # Without a mask function of the same name transformers silently builds no mask at all
    # (masking_utils, `_preprocess_mask_arguments`).
    AttentionMaskInterface.register(_PREFIX + _base, _mask)


def apart(positions: Tensor) -> Patch:
    """A patch under which the texts that share a row do not see each other.

    For rows that are read at once, without a cache, by models that mix tokens in attention only
    (`keeps_apart`). Put it outermost, so that every other patch meets the mask.

    positions: (b, q) of each token in its own text: where they are 0 again, a text begins
    """
    text = (positions == 0).cumsum(1)
    own = text[:, None, :, None] == text[:, None, None, :]  # (b, 1, q, k)
    causal = own & torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device).tril()

    def keep_apart(call: AttentionCall) -> Output:
        nonlocal own, causal
        if own.device != call.query.device:  # a model may lie on several
            own, causal = own.to(call.query.device), causal.to(call.query.device)
        if call.mask is None:
            mask = causal
        elif call.mask.dtype == torch.bool:
            mask = call.mask & own
        else:
            mask = call.mask.masked_fill(~own, torch.finfo(call.mask.dtype).min)
        return replace(call, mask=mask).run()

    return keep_apart


def blocks(call: AttentionCall, n_keys: int) -> Iterator[slice]:
    """Runs of queries whose logits over `n_keys` keys fit into a fixed budget of memory."""
    batch, heads, n_queries, _ = call.query.shape
    size = max(1, _BLOCK // max(1, batch * heads * n_keys))
    for first in range(0, n_queries, size):
        yield slice(first, min(first + size, n_queries))


def logits_of(call: AttentionCall, rows: slice) -> Tensor:
    """What a run of queries puts into its softmax: scaled, capped and masked, in float32.

    rows: with start and stop → (b, h, rows, k), −inf where a query sees nothing; where only the
    future is masked, the keys after the last of these queries are left out
    """
    batch, heads, _, head_dim = call.query.shape
    n_kv, n_keys = call.key.shape[1:3]
    causal = call.mask is None and call.query.shape[2] > 1
    seen = rows.stop if causal else n_keys  # sdpa aligns its causal mask top left
    query = call.query[:, :, rows].float() * call.scaling
    query = query.view(batch, n_kv, heads // n_kv, -1, head_dim)
    logits = (query @ call.key[:, :, None, :seen].float().mT).flatten(1, 2)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if causal:
        future = torch.ones(rows.stop - rows.start, seen, dtype=torch.bool, device=logits.device)
        return logits.masked_fill(future.triu(1 + rows.start), -torch.inf)
    if call.mask is None:
        return logits
    mask = call.mask[:, :, rows, :seen]
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def log_sum_exp(call: AttentionCall) -> Tensor:
    """log Σ_k exp(s·q·k), over the keys each query may see: the softmax's denominator.

    Computed in float32 in blocks of queries, so that memory grows with the length of the text and
    not with its square. A query that sees nothing has −inf.

    → (b, h, q), float32
    """
    if call._told is not None and all(
        one is other
        for one, other in zip((call.query, call.key, call.mask), call._told, strict=False)
    ):
        total = call._told[-1]
    elif _fusable(call):
        total = _fused(call.query.float(), call.key.float(), call)[1]
    else:
        rows_of = blocks(call, call.key.shape[2])
        total = torch.cat([logits_of(call, rows).logsumexp(-1) for rows in rows_of], dim=-1)
    if call.sink is not None:
        total = torch.logaddexp(total, call.sink.float()[None, :, None])
    return total


def _fusable(call: AttentionCall) -> bool:
    """Whether torch's fused kernel for CPUs can be asked; for a few queries it is not worth it."""
    query, mask = call.query, call.mask
    return (
        query.device.type == "cpu"
        and query.shape[2] >= 16
        and call.softcap is None
        and (mask is None or mask.dtype == torch.bool)
        and not (torch.is_grad_enabled() and (query.requires_grad or call.key.requires_grad))
    )


def _fused(query: Tensor, key: Tensor, call: AttentionCall, value: Tensor | None = None):
    """The kernel behind scaled_dot_product_attention on CPUs, whose second result is dropped there.

    → (b, h, q, d), and log Σ exp (b, h, q), float32
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key = key.repeat_interleave(repeat, 1)
        value = None if value is None else value.repeat_interleave(repeat, 1)
    added = None
    if call.mask is not None:
        added = torch.zeros(call.mask.shape, dtype=query.dtype)
        added = added.masked_fill_(~call.mask, -torch.inf)
    output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        key,
        key if value is None else value,
        0.0,
        call.mask is None,
        attn_mask=added,
        scale=call.scaling,
    )
    if call.mask is not None:  # there a query that sees nothing has 0
        total = total.masked_fill(~call.mask.any(-1), -torch.inf)
    return output, total


def run_and_total(call: AttentionCall) -> tuple[Output, AttentionCall]:
    """`call.run()`, and the call as one that knows its `log_sum_exp` if that came for nothing.

    On a CPU the kernel that answers has the denominators as well: asking it once instead of twice
    saves a fifth of a long forward pass. The answer is bit-equal. Anywhere else, and where another
    patch lies in between, this is plain `run`.
    """
    inner = call._inner
    plain = getattr(inner, "func", None) is _answer
    sdpa = plain and inner.args[0] is ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not (sdpa and call.sink is None and _fusable(call)):
        return call.run(), call
    output, total = _fused(call.query, call.key, call, call.value)
    told = (call.query, call.key, call.mask, total)
    return (output.transpose(1, 2), None), replace(call, _told=told)


def weigh_groups(call: AttentionCall, member: Tensor) -> Tensor:
    """Each group's share of attention, where every key is in one group.

    Where the denominators are known (`run_and_total`) and one group holds most keys, only the
    weights of the others are computed: the largest group has the rest. Elsewhere `call.weigh`.

    member: (k, n), one-hot → (b, h, q, n), float32
    """
    largest = int(member.sum(0).argmax())
    few = (member[:, largest] == 0).nonzero()[:, 0]
    n_queries, n_keys = call.query.shape[2], call.key.shape[2]
    if call._told is None or 4 * len(few) > n_keys:
        return call.weigh(member[None])
    total = log_sum_exp(call)[..., None]
    if call.mask is None:  # no key but those of the past; as many queries as keys
        mask = (few <= torch.arange(n_queries, device=few.device)[:, None])[None, None]
    else:
        mask = call.mask[..., few]
    narrow = replace(call, key=call.key[:, :, few], mask=mask)
    shares = call.query.new_zeros(*call.query.shape[:3], member.shape[1], dtype=torch.float32)
    for rows in blocks(narrow, len(few)):
        weights = (logits_of(narrow, rows) - total[:, :, rows]).exp()
        shares[:, :, rows] = weights @ member[few]
    shares[..., largest] = (1 - shares.sum(-1)).clamp(min=0)
    return shares.masked_fill_(total == -torch.inf, 0)  # a query that sees nothing


_keeping: WeakKeyDictionary[LoadedModel, bool] = WeakKeyDictionary()


@torch.no_grad()
def keeps_apart(lm: LoadedModel) -> bool:
    """Whether texts in one row are to this model what they are alone. Tried once.

    A convolution or a state beside attention runs from one text into the next; int8 rounds all
    tokens that are read together by one measure. Those are off by a twentieth and more, rounding in
    half precision by less than a hundredth.
    """
    if lm not in _keeping:
        lengths = (5, 6)
        ids = torch.arange(1, 1 + sum(lengths), device=lm.device)[None] % lm.geometry.vocab_size
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        with patched(lm, apart(positions)):
            together = lm.logits(ids, mask=torch.ones_like(ids), positions=positions)
        alone = torch.cat([lm.logits(part) for part in ids.split(lengths, 1)], 1)
        off = (together - alone).abs().max() / alone.abs().max()
        _keeping[lm] = bool(off < 0.02)
    return _keeping[lm]


@torch.no_grad()
def self_test(lm: LoadedModel) -> None:
    """Prove that the seam is complete for this model, or refuse it with the reason.

    Every layer must come through the seam exactly once, and a patch that changes nothing must
    leave the logits bit-equal.
    """
    ids = torch.arange(1, 6, device=lm.device)[None] % lm.geometry.vocab_size
    seen: list[int] = []

    def watch(call: AttentionCall) -> Output:
        seen.append(call.layer)
        return call.run()

    plain = lm.logits(ids)
    with patched(lm, watch):
        through = lm.logits(ids)
    family = type(lm.model).__name__
    if sorted(seen) != list(range(lm.geometry.n_layers)):
        raise ExplorerError(
            f"{family} computes attention in its own way: {len(set(seen))} of "
            f"{lm.geometry.n_layers} layers can be looked into.",
            "Choose a family that uses transformers' attention interface, such as Llama, Qwen, "
            "Gemma, Mistral, Phi, OLMo, GPT-2 or GPT-NeoX.",
        )
    if not torch.equal(plain, through):
        raise ExplorerError(
            f"{family} answers differently when it is only watched.",
            "Try another precision or device; numbers for this one would not be its own.",
        )

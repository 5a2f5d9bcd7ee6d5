"""What every method that trains must satisfy; a new file in explorer/methods joins by itself."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from explorer import adapters
from explorer.attention import AttentionCall, keeps_apart, patched
from explorer.examples import Example, collate, drawn
from explorer.lm import freeze
from explorer.methods import methods, n_parameters
from explorer.methods.lora import LoraConfig
from explorer.methods.prefix_memory import PrefixMemoryConfig, _Read
from explorer.methods.prefix_tuning import PrefixTuningConfig
from explorer.methods.zero_gate import ZeroGateConfig
from explorer.prefix import Prefix
from explorer.projections import project
from explorer.training import FitConfig, fit, loss_of, reading
from tests.conftest import assert_same_state, state_of
from tests.tiny import ARCHITECTURES, WINDOW, tiny_ids, tiny_model, tiny_tokenizer

VARIANTS = {
    label: (method, method.config(**fixed))
    for method in methods("train").values()
    for label, fixed in method.variants.items()
}
VARIANTS["PMT, before rotary"] = (
    methods()["prefix-memory"],
    PrefixMemoryConfig(query="before rotary"),
)
SILENT = [
    label
    for label, (method, config) in VARIANTS.items()
    if method.name in ("prefix-memory", "lora") or getattr(config, "gate", "") == "zero gate"
]
GATED = [label for label, (_, config) in VARIANTS.items() if hasattr(config, "gate")]
LONG = WINDOW + 5
LEFT = torch.tensor([[0] * 4 + [1] * (LONG - 4), [1] * LONG])


def build(lm, label: str, seed: int = 0):
    method, config = VARIANTS[label]
    return method.build(lm, config, seed)


def stirred(lm, label: str, seed: int = 0):
    """An adapter whose every parameter has been moved, so that it has an effect."""
    adapter = build(lm, label, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapter


def texts(n_rows: int = 4) -> list[Example]:
    """Of several lengths, one beyond the sliding window."""
    ends = [WINDOW + 2, 3, 6, 2, 5]
    ids = tiny_ids(n_rows, WINDOW + 5).tolist()
    return [
        Example(tuple(row[:end]), tuple(row[end : end + 3]))
        for row, end in zip(ids, ends, strict=False)
    ]


def batches(n_rows: int = 4, seed: int = 0):
    return map(collate, drawn(texts(n_rows), 2, seed))


def answers(lm, adapter, ids, mask=None):
    with torch.no_grad(), adapter.applied(lm):
        return lm.logits(ids, mask=mask, start=adapter.span)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def lm(request):
    """Each architecture in turn, one model for all laws: none may leave a trace."""
    lm = freeze(tiny_model(request.param), tiny_tokenizer())
    before = state_of(lm)
    yield lm
    assert_same_state(before, state_of(lm))


@pytest.fixture(params=VARIANTS)
def label(request):
    return request.param


@pytest.mark.parametrize("label", SILENT)
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "left-padded"])
def test_it_starts_without_any_effect(lm, label, mask):
    ids = tiny_ids(2, LONG)
    plain = lm.logits(ids, mask=mask)
    with build(lm, label).applied(lm):
        assert torch.equal(lm.logits(ids, mask=mask), plain)


def test_only_the_adapter_moves_and_every_part_of_it(lm, label):
    plain = lm.logits(tiny_ids(1, 5))
    adapter = build(lm, label)
    before = [parameter.detach().clone() for parameter in adapter.parameters()]
    losses = []
    config = FitConfig(steps=4, learning_rate=2e-2, warmup=0.0, schedule="constant")
    for step in fit(lm, adapter, batches(2), config):
        losses.append(step.loss)
        assert torch.equal(lm.logits(tiny_ids(1, 5)), plain)  # itself again at every yield
    assert losses[-1] < losses[0]
    for old, new in zip(before, adapter.parameters(), strict=True):
        assert new.dtype == torch.float32
        assert not torch.equal(old, new)


def test_texts_that_share_a_row_do_not_see_each_other(lm, label):
    adapter, some = stirred(lm, label), texts(5)
    whole = collate(some)
    assert 1 < len(whole.ids) < len(some) and whole.ids.shape[1] > WINDOW

    def gradients(*groups):
        adapter.zero_grad()
        total = 0.0
        for group in groups:
            batch = collate(group)
            with torch.enable_grad(), reading(lm, adapter, batch):
                loss = loss_of(lm, adapter, batch)
                loss.backward()
            total += loss.item()
        return total, [parameter.grad.clone() for parameter in adapter.parameters()]

    assert keeps_apart(lm)
    together, alone = gradients(some), gradients(*([one] for one in some))
    assert_close(together[0], alone[0], atol=1e-4, rtol=1e-5)
    for ours, theirs in zip(together[1], alone[1], strict=True):
        assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_stopping_or_failing_leaves_nothing_behind(lm, label):
    before = state_of(lm)
    adapter = stirred(lm, label)
    steps = fit(lm, adapter, batches(), FitConfig(steps=5))
    next(steps)
    steps.close()  # what a Stop button does
    assert_same_state(before, state_of(lm))
    with pytest.raises(KeyError), adapter.applied(lm):
        raise KeyError
    assert_same_state(before, state_of(lm))


def test_a_cache_and_padding_change_nothing(lm, label):
    adapter, ids = stirred(lm, label), tiny_ids(2, LONG)
    whole = answers(lm, adapter, ids)
    cache, parts = lm.new_cache(), []
    for piece in ids.split(5, dim=1):
        with torch.no_grad(), adapter.applied(lm):
            start = adapter.span + sum(part.shape[1] for part in parts)
            parts.append(lm.logits(piece, cache=cache, start=start))
    assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)
    padded = answers(lm, adapter, ids, LEFT)[0, 4:]
    assert_close(padded, answers(lm, adapter, ids[:1, 4:])[0], atol=2e-5, rtol=1e-4)


def test_it_survives_a_file(lm, label, tmp_path):
    adapter, ids = stirred(lm, label), tiny_ids(2, LONG)
    card = adapters.describe(lm, VARIANTS[label][0], adapter, {"seed": 3})
    path = adapters.save(tmp_path / "a.safetensors", adapter, card)
    again, read = adapters.load(path, lm)
    assert read == card
    expected = answers(lm, adapter, ids)
    assert torch.equal(answers(lm, again, ids), expected)
    assert torch.equal(answers(lm, adapters.Saved(str(path), card.span), ids), expected)
    assert again.config == adapter.config


def test_the_seed_decides_the_start(lm, label):
    first, same, other = (list(build(lm, label, seed).parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    if label not in SILENT and "text" not in label:
        assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_size_can_be_asked_for(lm, label):
    method, config = VARIANTS[label]

    def size(n):
        return n_parameters(method.build(lm, method.sized(lm, config, n)))

    least, wanted, most = size(0), 3000, size(10**9)
    assert least <= size(wanted) <= most
    if method.name != "prefix-memory":  # whose size follows from the model, but for sharing
        assert abs(size(wanted) - wanted) <= max(least, wanted // 2)
    elif lm.geometry.n_kv_heads < lm.geometry.n_heads:
        assert least < most


@pytest.mark.parametrize("label", GATED)
def test_gates_are_shown_for_every_head(lm, label):
    adapter = stirred(lm, label)
    gates = adapter.gates()
    if adapter.config.gate != "zero gate":
        assert gates is None
        return
    assert gates.shape == (lm.geometry.n_layers, lm.geometry.n_heads)
    assert gates[: adapter.first].isnan().all()
    assert torch.equal(gates[adapter.first :], adapter.gate.tanh())


# Each method against the equation it comes from.


def test_prefix_memory_is_equation_7(lm):
    adapter, ids = stirred(lm, "PMT, elu"), tiny_ids(2, LONG)

    def equation(call: AttentionCall):
        output, weights = call.run()
        parts = [
            F.elu(call.query[:, head].float()) @ adapter.memory[call.layer, head]
            for head in range(lm.geometry.n_heads)
        ]
        return output + torch.stack(parts, 2), weights

    with torch.no_grad(), patched(lm, equation):
        expected = lm.logits(ids)
    assert_close(answers(lm, adapter, ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", ["elu", "gelu"])
def test_a_memory_has_the_gradients_of_its_equation(feature):
    phi = {"elu": F.elu, "gelu": F.gelu}[feature]
    generator = torch.Generator().manual_seed(0)
    query, memory, grad = (
        torch.randn(shape, generator=generator) for shape in ((2, 4, 5, 3), (4, 3, 3), (2, 4, 5, 3))
    )
    found = []
    for read in (lambda q, m: _Read.apply(q, m, feature), lambda q, m: phi(q) @ m):
        q, m = query.clone().requires_grad_(), memory.clone().requires_grad_()
        read(q, m).backward(grad)
        found.append((q.grad, m.grad))
    assert_close(found[0], found[1])


def test_a_memory_per_key_value_head_serves_its_queries(lm):
    method = methods()["prefix-memory"]
    adapter = method.build(lm, PrefixMemoryConfig(sharing="key/value head"))
    geometry = lm.geometry
    assert adapter.memory.shape[1] == geometry.n_kv_heads
    with torch.no_grad():
        adapter.memory.normal_(generator=torch.Generator().manual_seed(0))
        full = method.build(lm, PrefixMemoryConfig())
        full.memory.copy_(
            adapter.memory.repeat_interleave(geometry.n_heads // geometry.n_kv_heads, 1)
        )
    ids = tiny_ids(1, 7)
    assert torch.equal(answers(lm, adapter, ids), answers(lm, full, ids))


def test_a_memory_before_rotary_does_not_know_positions(lm):
    """It reads what the query would be at position 0, wherever it stands."""
    method = methods()["prefix-memory"]
    adapter = method.build(lm, PrefixMemoryConfig(query="before rotary"))
    with torch.no_grad():
        adapter.memory.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    ids, read = tiny_ids(1, 6), []

    def watch(call):
        if call.layer == 0:
            read.append(adapter.parts(lm)(call)[1])
        return call.run()

    for start in (0, 11):  # the first layer's states are the same where positions are rotary
        with torch.no_grad(), adapter.applied(lm), patched(lm, watch):
            lm.logits(ids, start=start)
    if lm.model.config.model_type in ("gpt2", "opt"):
        assert not torch.allclose(read[0], read[1], atol=1e-3)
    else:
        assert_close(read[0], read[1], atol=1e-5, rtol=1e-4)
    after = method.build(lm, PrefixMemoryConfig())
    after.load_state_dict(adapter.state_dict())
    one = ids[:, :1]  # at position 0 there is nothing to take off
    assert_close(answers(lm, adapter, one), answers(lm, after, one), atol=1e-5, rtol=1e-4)


def test_a_memory_can_start_from_a_text_by_equation_5(lm):
    text = "the cat sat on the mat"
    adapter = methods()["prefix-memory"].build(lm, PrefixMemoryConfig(start=text))
    ids = torch.tensor([[1, *lm.tokenizer(text, add_special_tokens=False).input_ids]])
    if lm.tokenizer("a").input_ids[0] != 1:
        ids = ids[:, 1:]
    slots = Prefix.of_text(lm, ids).layers[1]
    repeat = lm.geometry.n_heads // lm.geometry.n_kv_heads
    for head in range(lm.geometry.n_heads):
        key, value = slots.key[head // repeat], slots.value[head // repeat]
        expected = sum(torch.outer(F.elu(k), v) for k, v in zip(key, value, strict=True))
        assert_close(adapter.memory[1, head], expected)


def test_zero_gate_is_equation_5():
    """[softmax(S_P)·tanh(α), softmax(S_X)]·V, with the projections of a Llama by name."""
    lm = freeze(tiny_model("llama"), tiny_tokenizer())
    adapter, ids = stirred(lm, "Zero-gate, linear"), tiny_ids(1, LONG)
    adapter.first = 0
    adapter.prompts = torch.nn.Parameter(torch.randn(3, 4, 48))
    adapter.gate = torch.nn.Parameter(torch.randn(3, 8))

    def equation(call: AttentionCall):
        attention = lm.model.model.layers[call.layer].self_attn
        prompts = adapter.prompts[call.layer]
        key, value = (
            layer(prompts).view(4, 4, 10).transpose(0, 1).repeat_interleave(2, 0)  # (h, p, d)
            for layer in (attention.k_proj, attention.v_proj)
        )
        text_key, text_value = (x[0].repeat_interleave(2, 0) for x in (call.key, call.value))
        future = torch.ones(LONG, LONG, dtype=torch.bool).triu(1)
        scores = (call.query[0] @ text_key.mT / 10**0.5).masked_fill(future, -torch.inf)
        own = (call.query[0] @ key.mT / 10**0.5).softmax(-1)
        gate = adapter.gate[call.layer].tanh()[:, None, None]
        weights = torch.cat([own * gate, scores.softmax(-1)], -1)
        output = weights @ torch.cat([value, text_value], 1)  # (h, q, d)
        return output.transpose(0, 1)[None], None

    with torch.no_grad(), patched(lm, equation):
        expected = lm.logits(ids)
    assert_close(answers(lm, adapter, ids), expected, atol=1e-5, rtol=1e-5)


def test_projected_prompts_are_what_the_layer_makes_of_them(lm):
    """Where positions are learned outside of attention, keys of a text are keys of its states."""
    hidden = torch.randn(3, lm.geometry.hidden_size, generator=torch.Generator().manual_seed(0))
    slots = project(lm, {1: hidden})[1]
    assert slots.key.shape == (lm.geometry.n_kv_heads, 3, lm.geometry.head_dim)
    one = project(lm, {1: hidden[1:2]})[1]  # no position, no neighbour matters
    assert_close(one.key[:, 0], slots.key[:, 1])
    assert_close(one.value[:, 0], slots.value[:, 1])


def test_the_ungated_control_is_a_prefix_in_one_softmax(lm):
    adapter, ids = stirred(lm, "Random start, no gate"), tiny_ids(2, LONG)
    slots = adapter.slots(lm)
    empty = torch.zeros(lm.geometry.n_kv_heads, 0, lm.geometry.head_dim)
    layers = tuple(
        slots.get(layer, type(slots[adapter.first])(empty, empty))
        for layer in range(lm.geometry.n_layers)
    )
    with torch.no_grad(), Prefix(layers).applied(lm):
        expected = lm.logits(ids)
    assert_close(answers(lm, adapter, ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("start", ["random", "text"])
def test_prefix_tuning_is_a_prefix(lm, start):
    config = PrefixTuningConfig(slots=4, start=start, text="the cat sat on the mat")
    adapter, ids = methods()["prefix-tuning"].build(lm, config), tiny_ids(2, LONG)
    prefix = adapter.prefix()
    assert prefix.span == adapter.span == 4
    with torch.no_grad(), prefix.applied(lm):
        expected = lm.logits(ids, start=4)
    assert_close(answers(lm, adapter, ids), expected, atol=1e-5, rtol=1e-5)


def test_a_prefix_that_starts_from_a_text_continues_like_the_text(lm):
    text = "the cat sat on the mat"
    config = PrefixTuningConfig(slots=4, start="text", text=text)
    adapter = methods()["prefix-tuning"].build(lm, config)
    read = lm.tokenizer(text).input_ids[:4]
    ids = torch.cat([torch.tensor([read]), tiny_ids(1, 4)], 1)  # inside the sliding window
    assert_close(answers(lm, adapter, ids[:, 4:]), lm.logits(ids)[:, 4:], atol=1e-5, rtol=1e-5)


# Against peft, whose losses ours follow from the same start.


def losses_of(model, parameters, rows, n_steps: int = 20, **kwargs) -> list[float]:
    """A plain loop around somebody else's model."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for some in islice(rows, n_steps):
        width = max(len(one.prompt + one.answer) for one in some)
        ids = torch.zeros(len(some), width, dtype=torch.long)
        targets = torch.full_like(ids, -100)
        for row, one in enumerate(some):  # padded, where ours are packed
            both = torch.tensor(one.prompt + one.answer)
            ids[row, : len(both)] = both
            targets[row, len(one.prompt) - 1 : len(both) - 1] = both[len(one.prompt) :]
        logits = model(input_ids=ids, **kwargs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PLAIN = FitConfig(steps=20, learning_rate=1e-2, warmup=0.0, schedule="constant")


@pytest.mark.filterwarnings("ignore")  # of peft itself
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_lora_learns_as_in_peft(architecture):
    import peft

    lm = freeze(tiny_model(architecture), tiny_tokenizer())
    adapter = methods()["lora"].build(lm, LoraConfig(rank=4, scale=8.0), 0)
    ours = [step.loss for step in fit(lm, adapter, batches(), PLAIN)]
    theirs = peft.get_peft_model(
        tiny_model(architecture), peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM")
    ).eval()
    start = methods()["lora"].build(lm, LoraConfig(rank=4, scale=8.0), 0)
    state = {
        f"base_model.model.{key.rpartition('/')[0].replace('/', '.')}"
        f".lora_{key.rpartition('/')[2]}.default.weight": value
        for key, value in start.weights.items()
    }
    missing = theirs.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    trained = [p for p in theirs.parameters() if p.requires_grad]
    assert len(trained) == len(state)
    assert_close(ours, losses_of(theirs, trained, drawn(texts(), 2, 0)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_prefix_tuning_learns_as_in_peft(architecture):
    import peft

    lm = freeze(tiny_model(architecture), tiny_tokenizer())
    config = PrefixTuningConfig(slots=5)
    adapter = methods()["prefix-tuning"].build(lm, config, 0)
    ours = [step.loss for step in fit(lm, adapter, batches(), PLAIN)]
    geometry = lm.geometry
    encoder = peft.PrefixEncoder(
        peft.PrefixTuningConfig(
            num_virtual_tokens=5,
            token_dim=geometry.n_kv_heads * geometry.head_dim,
            num_layers=geometry.n_layers,
            encoder_hidden_size=8,
            task_type="CAUSAL_LM",
        )
    )
    start = methods()["prefix-tuning"].build(lm, config, 0)
    encoder.embedding.weight.data.copy_(start.embedding.data)

    def model(input_ids):
        """What peft's model does with its encoder's numbers, by the cache that it makes."""
        from transformers import DynamicCache

        flat = encoder(torch.arange(5)[None].expand(len(input_ids), -1))
        shape = (len(input_ids), 5, geometry.n_layers * 2, geometry.n_kv_heads, geometry.head_dim)
        each = flat.view(shape).permute(2, 0, 3, 1, 4).split(2)
        cache = DynamicCache()
        for layer, (key, value) in enumerate(each):
            cache.update(key, value, layer)
        mask = torch.ones(len(input_ids), 5 + input_ids.shape[1])
        return lm.model(input_ids=input_ids, attention_mask=mask, cache=cache)

    theirs = losses_of(model, list(encoder.parameters()), drawn(texts(), 2, 0))
    assert_close(ours, theirs, atol=1e-4, rtol=0)


# Precisions.


def test_a_bfloat16_base_trains(label):
    lm = freeze(tiny_model("llama").to(torch.bfloat16), tiny_tokenizer())
    plain, adapter = lm.logits(tiny_ids(1, 5)), build(lm, label)
    if label in SILENT:
        assert torch.equal(answers(lm, adapter, tiny_ids(1, 5)), plain)
    losses = [step.loss for step in fit(lm, adapter, batches(2), PLAIN)]
    assert losses[-1] < losses[0]
    assert torch.equal(lm.logits(tiny_ids(1, 5)), plain)


def test_the_zero_gate_keeps_its_slots_only_while_nothing_changes():
    lm = freeze(tiny_model("llama"), tiny_tokenizer())
    adapter = build(lm, "Zero-gate, linear")
    with torch.no_grad():
        first = adapter.slots(lm)
        assert adapter.slots(lm) is first
        adapter.prompts.mul_(2)
        assert adapter.slots(lm) is not first
    assert adapter.slots(lm)[adapter.first].key.requires_grad


def test_a_config_refuses_what_its_knobs_do_not_offer():
    with pytest.raises(ValueError, match="slots"):
        ZeroGateConfig(slots=0)
    with pytest.raises(ValueError, match="feature"):
        PrefixMemoryConfig(feature="tanh")


def test_one_lora_inside_another_adds_to_it_and_the_same_one_twice_is_refused():
    lm, ids = freeze(tiny_model("llama"), tiny_tokenizer()), tiny_ids(1, 5)
    plain = lm.logits(ids)
    one, two = (stirred(lm, "LoRA", seed) for seed in (1, 2))
    alone = [answers(lm, each, ids) for each in (one, two)]
    with one.applied(lm):
        both = answers(lm, two, ids)
        with pytest.raises(ValueError, match="applied already"), one.applied(lm):
            pass
        with two.applied(lm), pytest.raises(ValueError, match="already"), one.applied(lm):
            pass
        assert torch.equal(lm.logits(ids), alone[0])
    with two.applied(lm):
        assert_close(answers(lm, one, ids), both)
    assert min(float((both - each).abs().max()) for each in alone) > 0.01
    assert torch.equal(lm.logits(ids), plain)


def test_what_is_built_under_a_lora_is_built_around_the_model_itself():
    lm, ids = freeze(tiny_model("llama"), tiny_tokenizer()), tiny_ids(1, 5)
    gate, lora = stirred(lm, "Zero-gate, linear"), stirred(lm, "LoRA")
    with lora.applied(lm), torch.no_grad():
        inside = stirred(lm, "LoRA")
        under = gate.slots(lm)
    assert torch.equal(answers(lm, inside, ids), answers(lm, lora, ids))
    with torch.no_grad():
        apart = stirred(lm, "Zero-gate, linear").slots(lm)
    for layer, slots in apart.items():
        assert torch.equal(slots.value, under[layer].value)

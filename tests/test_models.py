"""Loading: quantisation that trains, one model at a time, and plain words for what goes wrong."""

from __future__ import annotations

import gc
import json
import os
import typing
import weakref

import bitsandbytes as bnb
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM

from explorer import models
from explorer.attention import patched
from explorer.errors import ExplorerError
from explorer.lm import freeze
from explorer.models import PRESETS, ModelSpec, Quantization, estimate, load
from explorer.prefix import Prefix, Slots
from tests.conftest import assert_same_state, state_of
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_ids, tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def nothing_loaded():
    yield
    models.unload()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def aligned_folder(tmp_path_factory):
    """Sizes that the fast 4-bit kernels of a CPU accept, with which the trap below shuts."""
    sizes = dict(hidden_size=128, intermediate_size=64, head_dim=32)
    return tiny_checkpoint(tmp_path_factory.mktemp("aligned"), **sizes)


def prefix_gradients(lm) -> list[torch.Tensor]:
    """Gradients of a loss in the keys and values of a prefix."""
    random = torch.Generator().manual_seed(0)
    geometry = lm.geometry
    shape = (geometry.n_kv_heads, 3, geometry.head_dim)
    draw = [torch.randn(shape, generator=random) for _ in range(2 * geometry.n_layers)]
    draw = [tensor.requires_grad_() for tensor in draw]
    layers = tuple(Slots(k, v) for k, v in zip(draw[::2], draw[1::2], strict=True))
    ids = tiny_ids(2, 9)
    with Prefix(layers).applied(lm):
        logits = lm.logits(ids[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    return [tensor.grad for tensor in draw]


def dense(lm) -> torch.nn.Module:
    """The same model with every quantised layer as the plain layer it stands for."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(lm.spec.name, dtype="float32")
    )
    weights = {}
    for name, module in lm.model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = module.weight
            weights[f"{name}.weight"] = bnb.functional.dequantize_4bit(
                weight.data, weight.quant_state
            ).float()
        elif isinstance(module, bnb.nn.Linear8bitLt):
            held = module.state
            codes = module.weight.CB if module.weight.CB is not None else held.CB
            scale = module.weight.SCB if module.weight.SCB is not None else held.SCB
            codes = module.weight.data if codes is None else codes
            weights[f"{name}.weight"] = codes.float() * scale.float()[:, None] / 127
        else:
            for key, tensor in module.named_parameters(prefix=name, recurse=False):
                weights[key] = tensor.data.float()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("quantization", typing.get_args(Quantization))
def test_gradients_are_right_even_after_looking(aligned_folder, quantization):
    """Looking first is what visitors do; on some CPUs 4-bit layers then cut every gradient."""
    lm = load(ModelSpec(aligned_folder, quantization=quantization, device="cpu", dtype="float32"))
    with torch.no_grad():
        lm.logits(tiny_ids(1, 1))  # one token and several take different paths in bitsandbytes
        lm.logits(tiny_ids(1, 5))
    ours = prefix_gradients(lm)
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in ours)
    reference = prefix_gradients(freeze(dense(lm), None))
    least = 0.99 if quantization == "int8" else 0.9999  # int8 rounds activations as well
    for one, other in zip(ours, reference, strict=True):
        assert torch.cosine_similarity(one.flatten(), other.flatten(), 0) > least


@pytest.mark.parametrize("quantization", typing.get_args(Quantization))
def test_a_quantised_model_is_itself_after_use(folder, quantization):
    lm = load(ModelSpec(folder, quantization=quantization, device="cpu"))
    state_of(lm)  # the first pass may let bitsandbytes rearrange its weights
    before = state_of(lm)
    prefix_gradients(lm)
    with patched(lm, lambda call: (call.run()[0] * 0, None)):
        lm.logits(tiny_ids(1, 4))
    assert_same_state(before, state_of(lm))
    if quantization == "none":
        assert lm.origin.precision == "float32"
    else:
        assert quantization in lm.origin.precision


def test_equal_specs_share_one_model(folder):
    told = []
    lm = load(ModelSpec(folder), lambda text, _: told.append(text))
    assert told and load(ModelSpec(folder)) is lm is models.current()
    assert hash(ModelSpec("a")) == hash(ModelSpec("a")) != hash(ModelSpec("a", device="cuda"))


def test_loading_another_model_frees_the_first_before_it_allocates(folder, tmp_path, monkeypatch):
    first = weakref.ref(load(ModelSpec(folder)).model)
    real = models._materialise

    def materialise(*args):
        gc.collect()
        assert first() is None
        return real(*args)

    monkeypatch.setattr(models, "_materialise", materialise)
    other = load(ModelSpec(tiny_checkpoint(tmp_path, "qwen3")))
    assert other.geometry.n_layers == 3 and other is models.current()


def test_the_origin_says_what_answers(folder):
    lm = load(ModelSpec(folder))
    assert "folder" in lm.origin.source and lm.origin.attention == "sdpa"
    parameters = sum(tensor.numel() for tensor in lm.model.parameters())
    assert 4 * parameters <= lm.origin.n_bytes < 4 * parameters + 10_000


@pytest.mark.parametrize("quantization", typing.get_args(Quantization))
def test_the_estimate_is_near_the_real_figure(folder, quantization):
    spec = ModelSpec(folder, quantization=quantization, device="cpu")
    guess = estimate(spec)
    real = load(spec).origin.n_bytes
    assert guess.n_bytes == pytest.approx(real, rel=0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_come_in_the_precision_asked_for(folder, dtype):
    lm = load(ModelSpec(folder, dtype=dtype, device="cpu"))
    assert lm.dtype == getattr(torch, dtype) and lm.logits(tiny_ids(1, 3)).dtype == torch.float32


def test_a_model_is_frozen_and_keeps_its_own_attention(lm):
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())
    assert not lm.model.training
    usual = "eager" if lm.model.config.model_type == "gemma2" else "sdpa"
    assert lm.origin.attention == usual


BAD = {
    "no name": ("  ", "No model is named"),
    "unknown id": ("nobody/no-such-model-here", "reached|no model"),
    "no such folder": ("/nowhere/at-all", "neither a preset"),
    "no such file": ("/nowhere/at-all.gguf", "no file"),
    "not a name": ("rm -rf /", "neither a preset"),
}


@pytest.mark.parametrize(("name", "words"), BAD.values(), ids=BAD.keys())
def test_a_bad_name_is_one_sentence_with_a_hint(name, words):
    with pytest.raises(ExplorerError, match=words) as refused:
        load(ModelSpec(name))
    assert refused.value.hint and "\n" not in str(refused.value)


def test_a_bad_name_leaves_the_loaded_model_alone(folder):
    lm = load(ModelSpec(folder))
    with pytest.raises(ExplorerError):
        load(ModelSpec("nobody/no-such-model-here"))
    assert models.current() is lm


def save(config, path) -> str:
    config.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def test_a_family_outside_the_attention_interface_is_refused(tmp_path):
    config = AutoConfig.for_model("bloom", vocab_size=VOCABULARY, hidden_size=32, n_head=4)
    with pytest.raises(ExplorerError, match="in its own way") as refused:
        load(ModelSpec(save(config, tmp_path)))
    assert "Llama" in refused.value.hint


def test_a_model_that_does_not_write_text_is_refused(tmp_path):
    config = AutoConfig.for_model("vit")
    with pytest.raises(ExplorerError, match="not a causal language model"):
        load(ModelSpec(save(config, tmp_path)))


def test_program_code_in_a_model_folder_is_never_run_unasked(tmp_path):
    path = save(AutoConfig.for_model("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "odd.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ExplorerError, match="program code") as refused:
        load(ModelSpec(path))
    assert "--trust-remote-code" in refused.value.hint


def test_weights_that_can_run_code_are_refused(tmp_path):
    path = save(tiny_model("llama").config, tmp_path)
    torch.save(tiny_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ExplorerError, match="safetensors"):
        load(ModelSpec(path))


@pytest.mark.parametrize("damage", ["renamed", "cut"])
def test_broken_weights_are_one_sentence(tmp_path, damage):
    path, weights = tiny_checkpoint(tmp_path), tmp_path / "model.safetensors"
    if damage == "renamed":
        weights.write_bytes(b"\x80\x04 a pickle, renamed")
    else:
        os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(ExplorerError, match="damaged") as refused:
        load(ModelSpec(path))
    assert refused.value.hint and "\n" not in str(refused.value)


def test_gemma_in_float16_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ExplorerError, match="overflow"):
        load(ModelSpec(tiny_checkpoint(tmp_path, "gemma3_text"), dtype="float16"))


def test_a_gpu_that_is_not_there_is_one_sentence(folder):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ExplorerError, match="No NVIDIA GPU"):
        load(ModelSpec(folder, device="cuda"))


@pytest.mark.parametrize(
    ("device", "said"), [("mps", "No Apple GPU"), ("warp drive", "no device called warp drive")]
)
def test_a_device_that_is_not_there_is_one_sentence(folder, device, said):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(ExplorerError, match=said):
        load(ModelSpec(folder, device=device))


def test_presets_say_what_they_are():
    for preset in PRESETS.values():
        assert preset.licence and preset.parameters > 1e8
        assert preset.bundle is None or preset.bundle.licence


def test_the_real_models_are_what_their_presets_say(smollm2, gemma3):
    for lm in (smollm2, gemma3):
        preset = PRESETS[lm.spec.name]
        parameters = {p.data_ptr(): p.numel() for p in lm.model.parameters()}
        assert sum(parameters.values()) == preset.parameters
        assert "quantised to Q4" in lm.origin.precision
    assert (smollm2.geometry.n_heads, smollm2.geometry.n_kv_heads) == (9, 3)
    assert gemma3.geometry.head_dim == 256 != gemma3.geometry.hidden_size // 4


@pytest.mark.parametrize(
    ("cause", "words", "hint"),
    [
        (GatedRepoError, "accept a licence", "HF_TOKEN"),
        (RepositoryNotFoundError, "no model some/model", "spelling"),
        (ConnectionError, "cannot be reached", "network"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(monkeypatch, cause, words, hint):
    """transformers wraps the hub's errors in an OSError; what the visitor reads names the cause."""

    def refuse(*args, **kwargs):
        inner = cause.__new__(cause)
        raise OSError("the hub said no") from inner

    monkeypatch.setattr(models.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ExplorerError, match=words) as caught:
        load(ModelSpec("some/model"))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 5}, "not those that its config"),
        ({"vocab_size": VOCABULARY + 3}, "not those that its config"),
        ({"num_attention_heads": "eight"}, "missing or damaged"),
        ({"num_attention_heads": 7, "hidden_size": 50}, "missing or damaged|not those"),
    ],
)
def test_a_config_that_is_another_models_is_one_sentence(tmp_path, change, words):
    """transformers would fill what is missing with random numbers and go on."""
    tiny_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ExplorerError, match=words) as refused:
        load(str(tmp_path))
    assert refused.value.hint
    estimate(ModelSpec(str(tmp_path)))  # has no opinion, or a number; no error


def test_a_damaged_file_in_a_folder_is_not_laid_on_the_hub(tmp_path):
    tiny_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ExplorerError, match="missing or damaged"):
        load(str(tmp_path))


@pytest.mark.parametrize("odd", [dict(dtype="float8"), dict(quantization="int7")])
def test_a_precision_that_there_is_not_leaves_the_loaded_model_alone(folder, odd):
    lm = load(folder)
    with pytest.raises(ExplorerError, match="no precision called"):
        load(folder, **odd)
    assert models.current() is lm


def test_a_name_too_long_for_the_disk_is_one_sentence():
    with pytest.raises(ExplorerError):
        load("a" * 5000)

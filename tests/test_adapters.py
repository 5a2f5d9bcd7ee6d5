"""Adapters as files: what they say, and what is refused before it is believed."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from explorer import adapters, tensorfile
from explorer.errors import ExplorerError
from explorer.lm import ModelSpec, freeze
from tests.test_methods import VARIANTS, stirred
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def lm():
    return freeze(tiny_model("llama"), tiny_tokenizer(), ModelSpec("somebody/tiny"))


@pytest.fixture
def saved(lm, tmp_path):
    adapter = stirred(lm, "Zero-gate, linear")
    card = adapters.describe(lm, VARIANTS["Zero-gate, linear"][0], adapter, {"seed": 7})
    return adapters.save(tmp_path / "gate.safetensors", adapter, card)


def rewritten(path, change):
    """The file with its card changed."""
    card = json.loads(json.dumps(vars(adapters.inspect(path))))
    change(card)
    save_file(load_file(path), path, {"format": adapters.FORMAT, "card": json.dumps(card)})
    return path


def test_a_file_says_what_made_it(saved, lm):
    card = adapters.inspect(saved)
    assert (card.method, card.model, card.precision) == ("zero-gate", "somebody/tiny", "float32")
    assert card.config["slots"] == 10 and card.training == {"seed": 7}
    assert card.sizes["head_dim"] == lm.geometry.head_dim
    assert set(card.versions) == {"torch", "transformers", "peft", "safetensors"}
    assert not list(saved.parent.glob(".*"))  # nothing half-written is left


def test_a_folder_of_this_machine_is_not_written_down(tmp_path):
    folder = tmp_path / "secret" / "model"
    folder.mkdir(parents=True)
    lm = freeze(tiny_model("llama"), tiny_tokenizer(), ModelSpec(str(folder)))
    card = adapters.describe(lm, *described(lm))
    assert card.model == "model" and "secret" not in json.dumps(vars(card), default=str)


def described(lm):
    return VARIANTS["PMT, elu"][0], stirred(lm, "PMT, elu")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda _: pickle.dumps({"gate": [1, 2]}), "not a safetensors file"),
        (lambda raw: b"PK\x03\x04" + raw, "not a safetensors file"),
        (lambda _: b"", "not a safetensors file"),
        (lambda raw: raw[:-10], "cut off"),
        (lambda raw: raw[: len(raw) // 20], "not a safetensors file|cut off"),
        (lambda raw: raw + b"more", "something added"),
        (lambda raw: struct.pack("<Q", 1 << 60) + raw[8:], "not a safetensors file"),
        (lambda raw: raw.replace(b"prefix-explorer", b"someone-elses__"), "not an adapter made"),
    ],
)
def test_a_file_that_is_something_else_is_refused(saved, lm, damage, said):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(ExplorerError, match=said) as refused:
        adapters.load(saved, lm)
    assert refused.value.hint


def test_a_huge_file_is_refused_unread(saved, lm):
    with saved.open("r+b") as file:
        file.truncate(tensorfile.BYTES + 1)
    with pytest.raises(ExplorerError, match=r"1\.1 GB"):
        adapters.load(saved, lm)


def test_another_models_adapter_is_refused(saved):
    other = freeze(tiny_model("qwen2"), tiny_tokenizer(), ModelSpec("somebody/else"))
    with pytest.raises(ExplorerError, match="trained for somebody/tiny; the loaded model is some"):
        adapters.load(saved, other)
    same_name = freeze(tiny_model("gpt2"), tiny_tokenizer(), ModelSpec("somebody/tiny"))
    with pytest.raises(ExplorerError, match="trained for"):
        adapters.load(saved, same_name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda card: card.update(method="magic"), "a method called magic"),
        (lambda card: card["config"].update(slots=4), "does not hold what its description says"),
        (lambda card: card["config"].update(slots=0), "does not hold what its description says"),
        (lambda card: card["config"].update(colour=1), "does not hold what its description says"),
        (lambda card: card.update(extra=1), "cannot be read"),
        (lambda card: card.pop("model"), "cannot be read"),
        (lambda card: card.update(training=["no"]), "cannot be read"),
        (lambda card: card.update(precision=16), "cannot be read"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(saved, lm, change, said):
    with pytest.raises(ExplorerError, match=said):
        adapters.load(rewritten(saved, change), lm)


def test_numbers_that_are_not_finite_are_refused(saved, lm):
    tensors = load_file(saved)
    tensors["gate"][0, 0] = torch.nan
    card = json.dumps(vars(adapters.inspect(saved)))
    save_file(tensors, saved, {"format": adapters.FORMAT, "card": card})
    with pytest.raises(ExplorerError, match="not finite"):
        adapters.load(saved, lm)


def test_another_precision_is_told_and_not_refused(saved, lm):
    assert adapters.differences(adapters.inspect(saved), lm) == ()
    half = freeze(tiny_model("llama").to(torch.bfloat16), None, ModelSpec("somebody/tiny"))
    _, card = adapters.load(saved, half)
    assert adapters.differences(card, half) == ("Trained on float32; loaded now: bfloat16.",)

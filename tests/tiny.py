"""Random models small enough to build in a test, one per architecture.

Sizes differ pairwise wherever an architecture allows it (l = 3, h = 8, g = 4, d = 10, m = 48;
tests take b = 2), so that a transposed or confused dimension fails instead of fitting by accident.
Sliding windows are 8 tokens wide, and weights are large enough for attention to be far from even.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

WINDOW = 8
VOCABULARY = 97
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
WORDS = (
    "the a an and but or not no yes . , : ? ! cat dog mat hat sun moon sea fish bird tree house "
    "road rain snow fire stone book song game team ball goal bank shop price tax news film star "
    "red blue green black white good bad big small old new hot cold fast slow sat ran ate saw "
    "said made went came is was are has on in at to of for with from by up down here there then "
    "where who what why so"
).split()
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_LAYERS = dict(num_hidden_layers=3, hidden_size=48, intermediate_size=40, initializer_range=0.15)
_GQA = _LAYERS | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=10)
_MHA = _LAYERS | dict(num_attention_heads=4)
_MIXED = dict(
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
# With random weights a tied head repeats the last token for ever, and decoding would prove little.
_UNTIED = dict(tie_word_embeddings=False)
_COMMON = dict(
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

SIZES: dict[str, dict] = {
    "llama": _GQA,
    "mistral": _GQA | dict(sliding_window=WINDOW),
    "qwen2": _GQA | _MIXED | dict(use_sliding_window=True),
    "qwen3": _GQA,
    "gemma2": _GQA | _MIXED | _UNTIED | dict(query_pre_attn_scalar=20, attn_logit_softcapping=5.0),
    "gemma3_text": _GQA | _MIXED | _UNTIED | dict(query_pre_attn_scalar=20),
    "phi3": _GQA | dict(sliding_window=WINDOW),
    "olmo2": _GQA,
    "gpt_neox": _MHA,
    "gpt2": _MHA,
    "opt": _MHA | _UNTIED | dict(ffn_dim=40, word_embed_proj_dim=48, init_std=0.15),
}
ARCHITECTURES = list(SIZES)
SLIDING = [name for name, sizes in SIZES.items() if "sliding_window" in sizes]


def tiny_model(architecture: str, seed: int = 0, **sizes) -> PreTrainedModel:
    """A random model; equal seeds give equal weights. sizes: other than those above"""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **(_COMMON | SIZES.get(architecture, _GQA) | sizes))
    )


def tiny_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random tokens without special ones. → the shape given, most often (b, q)"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIALS), VOCABULARY, shape, generator=generator)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, with a begin-of-text token and a chat template."""
    vocabulary = SPECIALS + WORDS
    assert len(set(vocabulary)) == len(vocabulary) == VOCABULARY
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIALS[4:],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_checkpoint(path: Path, architecture: str = "llama", **sizes) -> str:
    """A model and its tokenizer on disk, for everything that goes through `load`."""
    tiny_tokenizer().save_pretrained(path)
    tiny_model(architecture, **sizes).save_pretrained(path)
    return str(path)

"""Between what people write and what a model reads: templates, special tokens, display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from explorer.errors import ExplorerError
from explorer.lm import LoadedModel


@dataclass(frozen=True)
class Token:
    """One token, or several that only together make a character, as people read them.

    text: with · for a leading space and ↵ ⇥ for line breaks and tabs
    ids: its token numbers    start: position of the first    special: a control token
    """

    text: str
    ids: tuple[int, ...]
    start: int
    special: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


def encode(
    lm: LoadedModel,
    prompt: str,
    *,
    chat: bool = False,
    specials: bool = False,
    system: str = "",
    limit: int | None = None,
) -> Tensor:
    """Token ids of a prompt, with the model's own begin-of-text token where it has one.

    chat: as a user's turn in the model's chat template, ready for the answer
    specials: let text like <|im_end|> become the control token it names; otherwise it stays text
    system: a system turn before it (chat only)
    limit: refuse more tokens than this; the model's context where it is None

    → (1, q), at least one token

    Raises ExplorerError for an empty prompt, one that is too long, or a missing template.
    """
    tokenizer = lm.tokenizer
    if not prompt.strip():
        raise ExplorerError("The prompt is empty.", "Type a few words, or take the example.")
    if chat:
        ids = _chat(tokenizer, prompt, system, specials)
    else:
        ids = plain(tokenizer, prompt, specials=specials)
        if tokenizer.bos_token_id is not None and _adds_bos(tokenizer):
            ids = [tokenizer.bos_token_id, *ids]
    limit = limit or lm.geometry.context
    if len(ids) > limit:
        raise ExplorerError(
            f"The prompt has {len(ids):,} tokens; the limit here is {limit:,}.",
            "Shorten it, or choose a model with a longer context.",
        )
    return torch.tensor([ids], device=lm.device)


def plain(tokenizer: PreTrainedTokenizerBase, text: str, *, specials: bool = False) -> list[int]:
    """The ids of the text alone: nothing added, control tokens only where `specials`.

    A fast tokenizer ignores split_special_tokens unless its backend is told, so the text is cut
    at every control token's spelling and the pieces are encoded so that none can form.
    """
    if specials:
        return tokenizer(text, add_special_tokens=False).input_ids
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    added = tokenizer("a").input_ids
    return bool(added) and added[0] == tokenizer.bos_token_id


def _chat(tokenizer, prompt: str, system: str, specials: bool) -> list[int]:
    if not tokenizer.chat_template:
        raise ExplorerError(
            "This model has no chat template.", "Switch the chat template off for it."
        )
    # The turn's text is put in afterwards, encoded on its own, so that it cannot open or close
    # turns; the template's own control tokens stay what they are, and no second begin-of-text
    # token is added.
    mark = "\x02\x03"
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": mark})
    template = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    if template.count(mark) != 1:  # a template that rewrites the text: trust it as it is
        turns[-1]["content"] = prompt
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids
    before, after = template.split(mark)
    return (
        plain(tokenizer, before, specials=True)
        + plain(tokenizer, prompt, specials=specials)
        + plain(tokenizer, after, specials=True)
    )


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ids, control tokens included, nothing tidied."""
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def display(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[Token]:
    """Tokens as people read them: no Ġ or ▁, split characters joined, spaces and breaks marked."""
    ids = [int(i) for i in ids]
    special = set(tokenizer.all_special_ids)
    # Pieces are decoded behind another token, because some decoders drop a text's first space.
    anchor = plain(tokenizer, "a")[-1:]
    head = decode(tokenizer, anchor)

    def piece(some: list[int]) -> str:
        whole = decode(tokenizer, anchor + some)
        return whole[len(head) :] if whole.startswith(head) else decode(tokenizer, some)

    tokens: list[Token] = []
    start = 0
    while start < len(ids):
        stop = start + 1
        text = piece(ids[start:stop])
        # A character of several bytes may be cut between tokens: join until it decodes.
        while "\ufffd" in text and stop < min(len(ids), start + 8):
            stop += 1
            text = piece(ids[start:stop])
        if "\ufffd" in text and stop - start > 1:  # never becomes a character: show them singly
            stop = start + 1
            text = piece(ids[start:stop])
        tokens.append(Token(_marked(text), tuple(ids[start:stop]), start, ids[start] in special))
        start = stop
    return tokens


def _marked(text: str) -> str:
    text = text.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥")
    if not text:
        return "∅"
    lead = len(text) - len(text.lstrip(" "))
    return "·" * lead + text[lead:] if lead < len(text) else "·" * len(text)

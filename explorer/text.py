"""Between what people write and what a model reads: templates, special tokens, display."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from explorer.errors import ExplorerError
from explorer.lm import LoadedModel

Role = Literal["system", "user", "assistant"]

# A fast tokenizer keeps in itself whether control tokens count, and is told so before each text:
# two threads at once would hand one visitor's control tokens to another.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    ids: what the model said, token by token; empty where the text has to be encoded
    """

    role: Role
    text: str
    ids: tuple[int, ...] = ()


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
        opening = [Turn("system", system)] if system else []
        ids = chat_ids(tokenizer, [*opening, Turn("user", prompt)], specials=specials)
    else:
        ids = plain(tokenizer, prompt, specials=specials)
        if not ids:
            raise ExplorerError(
                "The model's tokenizer reads nothing in the prompt.", "Type letters or digits."
            )
        ids = [*beginning(tokenizer), *ids]
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

    Raises ExplorerError for a text with half a character in it, which no encoding has.
    """
    broken = re.search("[\ud800-\udfff]", text)
    if broken is not None:
        raise ExplorerError(
            f"The text holds half a character, {broken[0]!a}, behind "
            f"“{text[max(0, broken.start() - 20) : broken.start()]}”.",
            "Delete it, or write the whole character.",
        )
    with _one_at_a_time:
        return tokenizer(
            text, add_special_tokens=False, split_special_tokens=not specials
        ).input_ids


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The begin-of-text token, for a model that wants one; else nothing."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    with _one_at_a_time:
        return [bos] if tokenizer("a").input_ids[:1] == [bos] else []


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that stand for no text: ends of turns and of the text, padding, places kept free."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], *, specials: bool = False
) -> list[int]:
    """A conversation in the model's chat template, ready for the assistant's next answer.

    The template is filled with marks, and each turn is put in afterwards, encoded on its own: no
    text, be it a visitor's or the model's, can open or close a turn. The template's own control
    tokens stay what they are, and no second begin-of-text token is added.

    specials: let the last turn's text become control tokens

    Raises ExplorerError where there is no template, or one that refuses such turns.
    """
    if not tokenizer.chat_template:
        raise ExplorerError(
            "This model has no chat template.", "Switch the chat template off for it."
        )
    marked = [{"role": turn.role, "content": f"xturn{i}x"} for i, turn in enumerate(turns)]
    try:
        filled = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ExplorerError(
            f"The model's chat template refuses this: {str(error).rstrip('.')}.",
            "Switch the chat template off for it.",
        ) from error
    pieces = re.split(r"xturn(\d+)x", filled)
    last = len(turns) - 1
    if str(last) not in pieces[1::2]:
        raise ExplorerError(
            "The model's chat template leaves the message out.",
            "Switch the chat template off for it.",
        )
    ids = plain(tokenizer, pieces[0], specials=True)
    for index, after in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
        ids += ids_of(tokenizer, turns[index], specials=specials and index == last)
        ids += plain(tokenizer, after, specials=True)
    return ids


def ids_of(
    tokenizer: PreTrainedTokenizerBase, turn: Turn, *, specials: bool = False
) -> tuple[int, ...] | list[int]:
    """A turn's own tokens. specials: let its text become control tokens"""
    if turn.ids and control_tokens(tokenizer) & set(turn.ids):
        raise ValueError(f"control tokens in the ids of a turn: {turn.ids}")
    return turn.ids or plain(tokenizer, turn.text, specials=specials)


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

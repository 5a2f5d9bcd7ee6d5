"""What the page shows of a chat: a box of messages for each who answers, and how it was asked."""

from __future__ import annotations

import html
import re
from typing import Any

import gradio as gr

from explorer.session.chat import ALONE, MOST, ChatView, Column

BOXES = MOST + 1
NOTHING = "(said nothing)"
EMPTY = "The model alone answers here, and beside it every adapter."
# A box that scrolls has to be reached by keyboard, and to say whose it is; Gradio's does neither.
REACHED = """
const reach = () => document.querySelectorAll('.chat [role=log]').forEach((log) => {
  log.tabIndex = 0;
  log.ariaLabel = `Chat: ${log.closest('.chat').querySelector('label').textContent.trim()}`;
});
new MutationObserver(reach).observe(
  document.querySelector('.chats'), {childList: true, subtree: true, characterData: true});
reach();
"""
ENDINGS = {
    "": "goes on",
    "said": "the model ended it",
    "cut": "cut off there",
    "full": "no more tokens fit",
}


def boxes() -> list[gr.Chatbot]:
    """As many as can be asked; those that nobody needs yet are not there."""
    return [
        gr.Chatbot(
            label=ALONE if index == 0 else f"adapter {index}",
            visible=index == 0,
            height=320,
            min_width=240,
            # Text as it is: a model's # or $$ is something it said, not a form of the page.
            render_markdown=False,
            latex_delimiters=[],
            buttons=["copy_all"],
            feedback_options=None,
            placeholder=EMPTY,
            elem_id=f"chat-{index}",
            elem_classes=["chat"],
        )
        for index in range(BOXES)
    ]


def drawn(view: ChatView) -> list[gr.Chatbot]:
    """→ all boxes as they stand"""
    if not view.columns:
        first = gr.Chatbot(value=[], label=ALONE, visible=True)
        return [first, *(gr.Chatbot(value=[], visible=False) for _ in range(MOST))]
    shown = [gr.Chatbot(value=messages(c), label=c.label, visible=True) for c in view.columns]
    return shown + [gr.Chatbot(value=[], visible=False)] * (BOXES - len(shown))


def messages(column: Column) -> list[dict[str, Any]]:
    """A column's turns as Gradio's messages."""
    texts = [_shown(turn.text) if turn.text.strip() else NOTHING for turn in column.turns]
    if texts[-1:] == [NOTHING] and not (column.answer and column.answer.ended):
        texts[-1] = "…"
    # As a part of type text: a plain string would lose the indentation of its lines.
    return [
        {"role": turn.role, "content": [{"type": "text", "text": text}]}
        for turn, text in zip(column.turns, texts, strict=True)
    ]


def _shown(text: str) -> str:
    """A text as a box shows it: what would become a tag or a character is written out."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text.strip("\n").removeprefix(" "))
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def notes(view: ChatView, *, over: bool) -> str:
    """How each was asked, what was left unread, and how its answer ended."""
    return "".join(_note(column, view.limit, over) for column in view.columns)


def _note(column: Column, limit: int, over: bool) -> str:
    wording, answer = column.wording, column.answer
    form = html.escape(wording.template).replace("\n", "↵")
    said = [
        f"prompt template: <code>{form}</code>{' in the chat template' if wording.chat else ''}"
    ]
    if answer is not None:
        n_said = len(answer.turns[-1].ids)
        ending = "stopped" if over and not answer.ended else ENDINGS[answer.ended]
        said.append(f"{answer.n_read:,} tokens read")
        said.append(f"{n_said} said: {ending}")
        if answer.n_dropped:
            said.append(
                f"<b>the oldest {answer.n_dropped} turns are no longer read</b>, "
                f"for {limit:,} tokens are the most here"
            )
    said += [html.escape(note.rstrip(".")) for note in column.notes]
    return f"<p class='hint'><b>{html.escape(column.label)}</b>: {'; '.join(said)}.</p>"

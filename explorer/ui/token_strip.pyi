"""A text as its tokens, coloured by the group they belong to; click one to look from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from explorer.text import Token

_SCRIPT = """
const box = element.querySelector('.tokens');
let shown = '';
function fill() {
  const v = props.value || {tokens: [], picked: null};
  const key = JSON.stringify(v.tokens);
  if (key !== shown) {
    shown = key;
    box.replaceChildren(...v.tokens.flatMap(t => {
      const b = document.createElement('button');
      b.type = 'button';
      b.className = 'token ' + t.group + (t.special ? ' special' : '');
      b.textContent = t.text;
      b.title = `position ${t.position} · ${t.group} · id ${t.ids.join(' ')}`
        + (t.special ? ' · control token' : '');
      b.dataset.position = t.position;
      b.addEventListener('click', () => trigger('pick', {position: t.position}));
      return t.text.endsWith('↵') ? [b, document.createElement('br')] : [b];
    }));
  }
  for (const b of box.querySelectorAll('button'))
    b.setAttribute('aria-pressed', String(+b.dataset.position === v.picked));
}
watch('value', fill);
fill();
"""

from gradio.events import Dependency

class TokenStrip(gr.HTML):
    """value: see `strip`.

    Event `pick`: evt.position is the position of the clicked token. Event `mark`, on Shift-click:
    evt.first and evt.last are the positions from the picked token to this one.
    """

    def __init__(self, **kw):
        super().__init__(
            value=None,
            html_template='<div class="tokens" role="group" aria-label="tokens"></div>',
            js_on_load=_SCRIPT,
            container=False,
            **kw,
        )

    def api_info(self) -> dict[str, Any]:
        return {"type": "object", "description": "tokens with their positions and groups"}
    from typing import Callable, Literal, Sequence, Any, TYPE_CHECKING
    from gradio.blocks import Block
    if TYPE_CHECKING:
        from gradio.components import Timer
        from gradio.components.base import Component


def strip(tokens: Sequence[Token], n_generated: int, picked: int) -> dict[str, Any]:
    """What the strip shows. Every token stands for its last position, from which it is read."""
    end = tokens[-1].stop - n_generated if tokens else 0
    return {
        "tokens": [
            {
                "text": token.text,
                "ids": list(token.ids),
                "position": token.stop - 1,
                "special": token.special,
                "group": group_of(token, end),
            }
            for token in tokens
        ],
        "picked": picked,
    }


def group_of(token: Token, prompt_end: int) -> str:
    """sink, prompt or generated"""
    if token.start == 0:
        return "sink"
    return "prompt" if token.start < prompt_end else "generated"
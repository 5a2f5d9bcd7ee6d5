"""A text as its tokens, coloured by the group they belong to; click one to look from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import gradio as gr

from explorer.text import Token

_SCRIPT = """
const box = element.querySelector('.tokens');
let shown = '';
const bytes = text => [...new TextEncoder().encode(text  // the marks of display undone
    .replace(/^·+/, marks => ' '.repeat(marks.length)).replace(/↵/g, '\\n').replace(/⇥/g, '\\t'))]
  .map(byte => byte.toString(16).padStart(2, '0')).join(' ');
function fill() {
  const v = props.value || {text: [], ids: [], position: [], special: [], generated: 0};
  const key = JSON.stringify([v.text, v.position, v.generated, v.marked, v.slots]);
  if (key !== shown) {
    shown = key;
    const special = new Set(v.special), marked = v.marked || {};
    const slots = Array.from({length: Math.min(v.slots || 0, 64)}, (_, i) => {
      const slot = document.createElement('span');
      slot.className = 'slot';
      slot.title = `prefix slot ${i} of ${v.slots}: a key and a value, no word`;
      return slot;
    });
    box.replaceChildren(...slots, ...v.text.flatMap((text, i) => {
      const start = i ? v.position[i - 1] + 1 : 0, position = v.position[i];
      const own = marked[position], group = !start ? 'sink'
        : own ? 'marked' : start < v.generated ? 'prompt' : 'generated';
      const b = document.createElement('button');
      b.type = 'button';
      b.className = `token ${group}` + (special.has(i) ? ' special' : '');
      b.textContent = text;
      b.title = `position ${position} · ${own || group} · id ${v.ids[i].join(' ')}`
        + ` · bytes ${bytes(text)}` + (special.has(i) ? ' · control token' : '');
      b.dataset.position = position;
      b.addEventListener('click', e => {
        const from = props.value.picked;
        const span = {first: Math.min(from, start), last: Math.max(from, position)};
        if (e.shiftKey) trigger('mark', span); else trigger('pick', {position});
      });
      return text.endsWith('↵') ? [b, document.createElement('br')] : [b];
    }));
  }
  for (const b of box.querySelectorAll('button'))
    b.setAttribute('aria-pressed', String(+b.dataset.position === v.picked));
}
watch('value', fill);
fill();
"""


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


def strip(
    tokens: Sequence[Token],
    n_generated: int,
    picked: int,
    marked: Mapping[str, Sequence[int]] = MappingProxyType({}),
    n_slots: int = 0,
) -> dict[str, Any]:
    """What the strip shows, in columns, because a long text is sent again at every click.

    position: the last one of each token, from which it is read    special: indices of control
    tokens    generated: the first position that the model wrote    picked: a position
    marked: the group of a position that a visitor has marked    slots: of the prefix in front
    """
    return {
        "text": [token.text for token in tokens],
        "ids": [list(token.ids) for token in tokens],
        "position": [token.stop - 1 for token in tokens],
        "special": [index for index, token in enumerate(tokens) if token.special],
        "generated": (tokens[-1].stop if tokens else 0) - n_generated,
        "picked": picked,
        "slots": n_slots,
        "marked": {str(position): name for name, some in marked.items() for position in some},
    }

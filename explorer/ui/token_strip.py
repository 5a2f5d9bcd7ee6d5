"""A text as its tokens, coloured by the group they belong to; click one to look from there.

Of a long text a window of tokens is shown, with buttons and a slider that ask for another one, and
a field that goes to a position. What a click changes is sent alone, with `seen_from`: the token
that is looked from, and how much of each token the chosen head takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import gradio as gr

from explorer.text import Token

WINDOW = 256  # tokens that are shown at once

_SCRIPT = """
const box = element.querySelector('.tokens'), pager = element.querySelector('.pager');
let shown = '', seen = null;
const texts = {}, parsed = {};
const read = name => {  // both are strings, and parsed once
  // Gradio drops `now` whenever an event leaves the strip as it is.
  if (props[name] !== texts[name] && (props[name] || name === 'value')) {
    texts[name] = props[name];
    parsed[name] = props[name] ? JSON.parse(props[name]) : null;
  }
  return parsed[name];
};
const bytes = text => text.includes('\\ufffd') ? 'part of a character'
  : [...new TextEncoder().encode(text  // the marks of display undone
    .replace(/^·+/, marks => ' '.repeat(marks.length)).replace(/␍/g, '\\r').replace(/↵/g, '\\n')
    .replace(/⇥/g, '\\t'))].map(byte => byte.toString(16).padStart(2, '0')).join(' ');
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
function page(v) {  // the part of a long text that is shown, and the way to the others
  const more = v.total > v.text.length;
  pager.style.display = more ? 'flex' : 'none';
  if (!more) return pager.replaceChildren();
  const last = v.total - v.size, to = first => trigger('turn',
    {first: Math.max(0, Math.min(last, first))});
  const turn = (text, title, first, off) => {
    const b = make('button', {type: 'button', textContent: text, title, ariaLabel: title,
      disabled: off});
    b.addEventListener('click', () => to(first));
    return b;
  };
  const slider = make('input', {type: 'range', min: 0, max: last, step: 1, value: v.first});
  slider.setAttribute('aria-label', 'which part of the text is shown');
  slider.addEventListener('change', () => to(+slider.value));
  const goal = make('input', {type: 'number', min: 0, max: v.end - 1, value: now(v).picked});
  goal.className = 'goal';
  goal.addEventListener('change', () => {
    if (goal.value !== '') trigger('pick', {position: Math.max(0, Math.min(v.end - 1, +goal.value)),
      first: v.first});
  });
  const label = make('label', {textContent: 'look from position '});
  label.append(goal);
  const where = make('span', {
    textContent: `tokens ${v.first + 1}–${v.first + v.text.length} of ${v.total}`});
  pager.replaceChildren(turn('◂', 'earlier tokens', v.first - v.size, v.first === 0), slider,
    turn('▸', 'later tokens', v.first + v.size, v.first >= last), where, label);
}
const now = v => { const n = read('now'); return n && n.of === v.of ? n : v; };
function fill() {
  const v = read('value') || {text: [], ids: [], position: [], special: [], generated: 0, total: 0};
  const key = JSON.stringify([v.of, v.text, v.position, v.generated, v.marked, v.slots]);
  if (key !== shown) {
    shown = key;
    seen = null;
    page(v);
    const special = new Set(v.special), marked = v.marked || {};
    const slots = Array.from({length: v.first ? 0 : Math.min(v.slots || 0, 64)}, (_, i) =>
      make('span', {className: 'slot',
        title: `prefix slot ${i} of ${v.slots}: a key and a value, no word`}));
    box.replaceChildren(...slots, ...v.text.flatMap((text, i) => {
      const position = v.position[i], start = position - v.ids[i].length + 1;
      const own = marked[position], group = !start ? 'sink'
        : own ? 'marked' : start < v.generated ? 'prompt' : 'generated';
      const b = make('button', {type: 'button', textContent: text,
        className: `token ${group}` + (special.has(i) ? ' special' : '')});
      b.title = b.told = `position ${position} · ${own || group} · id ${v.ids[i].join(' ')}`
        + ` · bytes ${bytes(text)}` + (special.has(i) ? ' · control token' : '');
      b.dataset.position = position;
      b.addEventListener('click', e => {
        const from = now(v).picked;
        const span = {first: Math.min(from, start), last: Math.max(from, position)};
        if (e.shiftKey) trigger('mark', span);
        else trigger('pick', {position, first: v.first});
      });
      return text.endsWith('↵') ? [b, document.createElement('br')] : [b];
    }));
  }
  mark(v);
}
function mark(v) {
  const {picked, weights, most} = now(v);
  box.querySelectorAll('button').forEach((b, i) => {
    const weight = weights && weights.length ? weights[i] : null;
    const pressed = String(+b.dataset.position === picked);
    const filled = weight ? Math.min(1, weight / most).toFixed(2) : '0';
    if (b.getAttribute('aria-pressed') !== pressed) b.setAttribute('aria-pressed', pressed);
    if (b.style.getPropertyValue('--weight') !== filled) b.style.setProperty('--weight', filled);
    b.weight = weight;
    if (pressed === 'true' && seen !== picked) {  // the box scrolls to it, the page stays
      const low = b.offsetTop - box.offsetTop, high = low + b.offsetHeight;
      if (low < box.scrollTop || high > box.scrollTop + box.clientHeight)
        box.scrollTop = low - box.clientHeight / 2;
    }
  });
  seen = picked;
  const goal = pager.querySelector('.goal');
  if (goal && document.activeElement !== goal) goal.value = picked;
}
// What a token says of itself is put together when it is asked for.
for (const sign of ['pointerover', 'focusin']) box.addEventListener(sign, e => {
  const b = e.target.closest('button');
  if (b) b.title = b.told
    + (b.weight === null ? '' : ` · gets ${(100 * b.weight).toFixed(2)}%`);
});
watch('value', fill);
watch('now', () => { const v = read('value'); if (v) mark(v); });
fill();
"""


class TokenStrip(gr.HTML):
    """value: see `strip`.

    Event `pick`: evt.position is the position to look from, evt.first the window it was chosen in.
    Event `mark`, on Shift-click: evt.first and evt.last are the positions from the picked token to
    this one. Event `turn`: evt.first is the first token of the window that is asked for.
    """

    def __init__(self, now: str | None = None, **kw):
        super().__init__(
            value=None,
            html_template='<div class="pager" style="display:none"></div>'
            '<div class="tokens" role="group" aria-label="tokens"></div>',
            js_on_load=_SCRIPT,
            container=False,
            now=now,
            **kw,
        )

    def __getattr__(self, name: str):
        if name not in ("pick", "mark", "turn"):  # see LivePlot
            raise AttributeError(name)
        return super().__getattr__(name)

    def postprocess(self, value: dict[str, Any] | None) -> str | None:
        return None if value is None else _string(value)  # see LivePlot

    def api_info(self) -> dict[str, Any]:
        return {"type": "string", "description": "tokens, positions and groups, in JSON"}


def strip(
    tokens: Sequence[Token],
    n_generated: int,
    picked: int,
    marked: Mapping[str, Sequence[int]] = MappingProxyType({}),
    n_slots: int = 0,
    *,
    first: int = 0,
    key: str = "",
    weights: Sequence[float] = (),
    most: float = 1.0,
) -> dict[str, Any]:
    """What the strip shows: a window of a text's tokens, in columns.

    first: index of the first token shown    key: of the text
    position: the last one of each token, from which it is read    special: indices of control
    tokens    generated: the first position that the model wrote    picked: a position
    marked: the group of a position that a visitor has marked    slots: of the prefix in front
    weights: how much of each shown token the chosen head takes    most: with how much it is full
    total: tokens of the text    end: its positions    of: what `seen_from` belongs to
    """
    window = tokens[first : first + WINDOW]
    end = tokens[-1].stop if tokens else 0
    inside = range(window[0].start, window[-1].stop) if window else range(0)
    return {
        "of": f"{key} {first}",
        "first": first,
        "size": WINDOW,
        "total": len(tokens),
        "end": end,
        "text": [token.text for token in window],
        "ids": [list(token.ids) for token in window],
        "position": [token.stop - 1 for token in window],
        "special": [index for index, token in enumerate(window) if token.special],
        "generated": end - n_generated,
        "slots": n_slots,
        "marked": {
            str(position): name
            for name, some in marked.items()
            for position in some
            if position in inside
        },
        **_filled(picked, weights, most),
    }


def seen_from(
    picked: int, *, first: int, key: str, weights: Sequence[float] = (), most: float = 1.0
) -> dict[str, Any]:
    """What an event returns for the strip to keep its tokens; arguments as for `strip`."""
    return gr.update(now=_string({"of": f"{key} {first}", **_filled(picked, weights, most)}))


def _string(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _filled(picked: int, weights: Sequence[float], most: float) -> dict[str, Any]:
    short = [float(f"{weight:.4g}") for weight in weights]
    return {"picked": picked, "weights": short, "most": max(float(most), 1e-9)}


def window_of(tokens: Sequence[Token], position: int, first: int = -1) -> int:
    """The first token of a window that holds a position; `first` itself if its window does.

    A new window has the position a little before its end: what a query sees lies before it.
    """
    index = next(
        (i for i, token in enumerate(tokens) if token.start <= position < token.stop),
        len(tokens) - 1,
    )
    if first >= 0 and first <= index < first + WINDOW:
        return first
    return max(0, min(len(tokens) - WINDOW, index - WINDOW + WINDOW // 8))

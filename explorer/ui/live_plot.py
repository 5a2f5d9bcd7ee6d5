"""A plotly figure that is redrawn in place: zoom stays, updates are small, cells can be clicked.

gr.Plot throws its figure away and mounts a new one at every update, so zoom, hover and the legend
never survive; it does not follow the dark theme, and its payload is one string that is sent whole.
Here the value is a dict, of which Gradio sends only what changed, and plotly's own `react` redraws.

    plot = LivePlot(empty="Press Look to see where attention goes.")
    plot.plot_click(handler, ...)      # handler(evt: gr.EventData): evt.x, evt.y, evt.curve

A figure's `layout.uirevision` names what the zoom belongs to: as long as it is the same, the zoom
stays. `layout.meta["alt"]` is read out by screen readers: say the finding in it.

What a click frames can be moved alone, with `framing(shape)` instead of a figure. A figure that
does not grow is sent `packed`: its arrays in base64, which is smaller and exact, and the whole as
one string, because Gradio's page copies the values of all outputs, item by item, several times an
event. A figure out of sight (below, closed, in another place) is drawn when there is time, or when
it comes into sight.
"""

from __future__ import annotations

import base64
import json
import math
import time
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import plotly
import plotly.graph_objects as go

PLOTLY_JS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
gr.set_static_paths([PLOTLY_JS])  # serves this one file

# Figures name colours of the theme as "var(--name)"; they are looked up at every redraw.
_SCRIPT = """
const div = element.querySelector('.plot'), note = element.querySelector('.empty');
const P = window.Plotly, coarse = matchMedia('(pointer: coarse)').matches;
const css = name => getComputedStyle(element).getPropertyValue(name).trim();
const themed = v => typeof v === 'string'
  ? v.replace(/var\\((--[\\w-]+)\\)/g, (_, name) => css(name))
  : Array.isArray(v) ? v.map(themed)
  : v && typeof v === 'object' && !ArrayBuffer.isView(v)
    ? Object.fromEntries(Object.entries(v).map(([k, w]) => [k, themed(w)])) : v;
// One object for all draws: to plotly another config is another plot, and the zoom is lost.
const config = {displaylogo: false, showSendToCloud: false,
  displayModeBar: coarse ? false : 'hover', responsive: false,
  modeBarButtonsToAdd: [{name: 'svg', title: 'Download plot as an SVG', icon: P.Icons.disk,
    click: gd => P.downloadImage(gd, {format: 'svg', filename: 'figure'})}],
  modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d']};
let text = null, parsed = null;
const figured = () => {  // a packed figure is a string, and parsed once
  const value = props.value;
  if (!value || typeof value !== 'string') return value || null;
  if (value !== text) { text = value; parsed = JSON.parse(value); }
  return parsed;
};
let forget = null, hooked = false, stale = false, shown = null, drawnAt = 0;
let mark = null;
const marked = figure => {
  mark = props.mark || mark;  // Gradio drops it whenever an event leaves the figure as it is
  return mark && mark.drawn > figure.drawn ? mark.shapes : null;
};
function draw() {
  forget = null;
  const figure = figured();
  stale = figure && !element.clientWidth;  // hidden: drawn when it comes into sight
  if (stale) return;
  note.style.display = figure ? 'none' : 'flex';
  div.style.display = figure ? 'block' : 'none';
  if (!figure) { if (hooked) P.purge(div); hooked = false; return; }
  const ink = css('--body-text-color'), faint = css('--border-color-primary');
  const layout = themed(figure.layout || {});
  Object.assign(layout, {autosize: true, paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)'});
  layout.font = {color: ink, family: css('--font') || 'sans-serif', size: 12, ...layout.font};
  layout.hoverlabel = {bgcolor: css('--block-background-fill'), bordercolor: faint,
    font: {color: ink}, ...layout.hoverlabel};
  layout.modebar = {bgcolor: 'rgba(0,0,0,0)', color: faint, activecolor: ink, ...layout.modebar};
  if (coarse) layout.dragmode = false;  // a finger on the figure scrolls the page
  for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key))
    layout[key] = {gridcolor: faint, zerolinecolor: faint, linecolor: faint, ...layout[key]};
  for (const [key, axis] of Object.entries(layout)) {  // where labels overlap: every second, third…
    if (!axis || !Array.isArray(axis.tickvals) || !axis.ticktext) continue;
    const count = axis.ticktext.length;
    const longest = Math.max(...axis.ticktext.map(text => `${text}`.length));
    const across = key.startsWith('x') && axis.tickangle === 0;  // lying side by side
    const each = across ? 8 + 7 * longest : 15;
    const {t = 12, b = 44} = layout.margin || {};
    const room = key.startsWith('x') ? element.clientWidth - 70 : (layout.height || 300) - t - b;
    const step = Math.ceil(count * each / Math.max(60, room));
    const kept = (_, i) => (count - 1 - i) % step === 0;  // the last is always there
    axis.ticktext = axis.ticktext.filter(kept);
    axis.tickvals = axis.tickvals.filter(kept);
  }
  if (layout.height) div.style.height = layout.height + 'px';
  const alt = (layout.meta || {}).alt;
  if (alt) { div.setAttribute('role', 'figure'); div.setAttribute('aria-label', alt); }
  const moved = marked(figure);
  if (moved) layout.shapes = themed(moved);
  // At another width plotly makes room for the legend, but leaves it where the old room was.
  const wider = drawnAt && drawnAt !== element.clientWidth && layout.legend;
  drawnAt = element.clientWidth;
  P.react(div, themed(figure.data || []), layout, config);
  if (wider) P.relayout(div, {'legend.y': layout.legend.y});
  if (!hooked) {
    hooked = true;
    div.on('plotly_click', e => {
      const p = e.points[0];
      trigger('plot_click', {x: p.x, y: p.y, curve: p.curveNumber});
    });
  }
  shown = figure.drawn;
  element.dataset.drawn = 1 + (+element.dataset.drawn || 0);
}
function remark() {  // only what is framed has moved
  const figure = figured(), moved = figure && marked(figure);
  if (!moved || forget || stale || !hooked || shown !== figure.drawn) return;
  P.relayout(div, {shapes: themed(moved)});
  element.dataset.drawn = 1 + (+element.dataset.drawn || 0);
}
// What is in sight is drawn at once, the rest when there is time.
let sight = true, hurried = true;
const ask = () => {
  if (forget && hurried === sight) return;
  if (forget) forget();
  hurried = sight;
  const [give, take] = sight ? [requestAnimationFrame, cancelAnimationFrame]
    : [job => requestIdleCallback(job, {timeout: 1000}), cancelIdleCallback];
  const id = give(draw);
  forget = () => take(id);
};
if (window.requestIdleCallback) new IntersectionObserver(seen => {
  sight = seen[seen.length - 1].isIntersecting;
  if (sight && forget) ask();
}, {rootMargin: '100px'}).observe(element);
watch('value', ask);
watch('mark', remark);
ask();
new MutationObserver(ask).observe(document.body, {attributes: true, attributeFilter: ['class']});
let width = 0;
new ResizeObserver(() => {  // also when a hidden tab opens
  if (!element.clientWidth || element.clientWidth === width && !stale) return;
  width = element.clientWidth;
  ask();
}).observe(element);
"""


class LivePlot(gr.HTML):
    """See the module.

    value: a go.Figure, or None to show the `empty` sentence instead
    packed: send it as one string; not for figures that are sent again and again as they grow
    mark: what `framing` has moved; set by events only
    """

    def __init__(
        self,
        value: go.Figure | None = None,
        *,
        empty: str = "",
        packed: bool = False,
        mark: dict[str, Any] | None = None,
        **kw,
    ):
        self.packed = packed
        super().__init__(
            value=value,
            # Written out, not taken from props: a figure that is set while its accordion is closed
            # would be all the props there are when it opens.
            html_template=(f'<div class="plot"></div><div class="empty">{empty}</div>'),
            css_template=".plot {width:100%; display:none}",
            js_on_load=_SCRIPT,
            head=f'<script src="gradio_api/file={PLOTLY_JS.as_posix()}"></script>',
            container=True,
            padding=False,
            elem_classes=["live-plot"],
            mark=mark,
            **kw,
        )

    def __getattr__(self, name: str):
        # gr.HTML looks for the name of an event in the whole script, at each of the forty
        # attributes that Gradio asks for whenever it leaves a component as it is.
        if name != "plot_click":
            raise AttributeError(name)
        return super().__getattr__(name)

    def postprocess(self, value: go.Figure | None) -> dict[str, Any] | str | None:
        if value is None:
            return None
        figure = {**value.to_plotly_json(), "drawn": time.time_ns()}
        if self.packed:
            return json.dumps(packed(figure), ensure_ascii=False, separators=(",", ":"))
        return plain(figure)

    def api_info(self) -> dict[str, Any]:
        kind = "string" if self.packed else "object"
        return {"type": kind, "description": "a plotly figure, data and layout, in JSON"}


def framing(*shapes: dict[str, Any]) -> dict[str, Any]:
    """What an event returns for a LivePlot to keep its figure and frame something else in it."""
    return gr.update(mark={"drawn": time.time_ns(), "shapes": list(shapes)})


def packed(value: Any) -> Any:
    """A figure with arrays as plotly reads them in base64; for anything else see `plain`."""
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        shape = {"shape": ", ".join(map(str, value.shape))} if value.ndim > 1 else {}
        return {"dtype": "f4", "bdata": base64.b64encode(value.tobytes()).decode(), **shape}
    if isinstance(value, dict):
        return {key: packed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(item) for item in value]
    return plain(value)


def plain(value: Any) -> Any:
    """A figure as lists and numbers of six digits: what JSON carries and diffs well."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value

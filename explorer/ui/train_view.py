"""What the page shows of a training run: rows, charts, what was reached."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from explorer.data import Dataset, Split
from explorer.plots_training import Line, head_map, line_of, loss_chart, spectrum_chart
from explorer.session.order import Curve, Look, Score, TrainView
from explorer.session.runs import RunLine
from explorer.session.trial import TrialView, Tried
from explorer.training import named
from explorer.ui.model_bar import amount
from explorer.ui.page import duration

PREVIEW = 6
NOTHING = "<p class='hint'>What comes out appears here.</p>"

MEANING = (
    "Axes used: along how many directions a method moves attention's output, mean over heads. "
    "Adds: the length of what it adds over that of attention's own output, median over heads."
)

LOSS, NORM = "loss", "gradient norm"
GATES, ADDED = "gates", "how much is added"
MEAN, POOLED, ONE = "mean of all heads", "all heads together", "one head"


@dataclass(frozen=True)
class Choice:
    """What a visitor looks at.

    curve: LOSS or NORM    of: the method whose heads are mapped, "" for the first that has gates
    heads: GATES or ADDED    moment: of the run, in percent of its steps so far
    axes: MEAN, POOLED or ONE    layer, head: of ONE    centred: the mean of b taken off
    """

    curve: str = LOSS
    of: str = ""
    heads: str = GATES
    moment: int = 100
    axes: str = MEAN
    layer: int = 0
    head: int = 0
    centred: bool = True


def preview(dataset: Dataset, rows: Split) -> str:
    """The split before the run: how many rows, and the first of each part."""
    classes = ", ".join(f"<b>{html.escape(name)}</b>" for name in rows.classes[:12])
    more = f" and {len(rows.classes) - 12} more" if len(rows.classes) > 12 else ""
    kinds = f", {len(rows.classes)} classes ({classes}{more})" if rows.classes else ""
    notes = "".join(f"<p class='hint'>{html.escape(note)}</p>" for note in rows.notes)
    return (
        f"<p>{html.escape(dataset.name)}: {len(dataset.rows):,} rows{kinds}.</p>{notes}"
        f"<div class='split'>{_part('To learn from', rows.train)}"
        f"{_part('Held out to test on', rows.held_out)}</div>"
    )


def _part(title: str, rows: Sequence) -> str:
    listed = "".join(
        f"<tr><td>{html.escape(_short(row.text))}</td>"
        f"<td>{html.escape(_short(row.answer))}</td></tr>"
        for row in rows[:PREVIEW]
    )
    rest = f"<p class='hint'>and {len(rows) - PREVIEW} more</p>" if len(rows) > PREVIEW else ""
    return (
        f"<div class='numbers listed'><table><caption>{title}: {len(rows)}</caption><thead><tr>"
        f"<th>text</th><th>label</th></tr></thead><tbody>{listed}</tbody></table>{rest}</div>"
    )


def _short(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def charts(
    view: TrainView, choice: Choice
) -> tuple[go.Figure | None, go.Figure | None, go.Figure | None]:
    """→ loss, heads, spectrum; None for what is not there yet"""
    if not any(curve.losses or curve.earlier for curve in view.curves):
        return None, None, None
    norms = choice.curve == NORM
    values, held_out = {}, {}
    for curve in view.curves:
        parts = (*curve.earlier, curve)
        values[curve.entry.label] = [part.norms if norms else part.losses for part in parts]
        held_out[curve.entry.label] = [part.held_out for part in parts]
    lines = _lines(view)
    loss = loss_chart(
        values,
        held_out,
        lines,
        run=view.run,
        steps=view.order.steps,
        norms=norms,
        title=f"Run {view.run[:8]} on {Path(view.order.data.source).stem}",
    )
    decays = {curve.entry.label: _decay(curve, choice) for curve in view.curves}
    decays = {label: decay for label, decay in decays.items() if decay is not None}
    if not decays:
        return loss, _heads(view, choice), None
    seen = max(curve.looks[-1].step for curve in view.curves if curve.looks)
    title = f"Spectrum of what is added, step {seen}"
    spectrum = spectrum_chart(decays, lines, run=view.run, title=title)
    return loss, _heads(view, choice), spectrum


def _lines(view: TrainView) -> dict[str, Line]:
    """How each method of a run is drawn, the same in every run."""
    lines = {}
    for curve in view.curves:
        label, method = curve.entry.label, curve.entry.method
        variants = list(named(method).variants)
        lines[label] = line_of(method, variants.index(label) if label in variants else 0)
    return lines


def _look(curve: Curve, choice: Choice) -> Look | None:
    """The look nearest to the chosen moment."""
    if not curve.looks:
        return None
    wanted = choice.moment / 100 * curve.looks[-1].step
    return min(curve.looks, key=lambda look: abs(look.step - wanted))


def _heads(view: TrainView, choice: Choice) -> go.Figure | None:
    gates = choice.heads == GATES
    curves = [curve for curve in view.curves if curve.looks or curve.gates is not None]
    if gates:
        curves = [curve for curve in curves if curve.gates is not None]
    curve = next((c for c in curves if c.entry.label == choice.of), curves[0] if curves else None)
    if curve is None:
        return None
    look, label = _look(curve, choice), curve.entry.label
    if gates:
        latest = look is None or choice.moment == 100
        values, step = (curve.gates, len(curve.losses)) if latest else (look.gates, look.step)
        return head_map(values, name=label, what="gates tanh(g)", step=step)
    if look is None:
        return None
    return head_map(look.ratio, name=label, what="adds ‖b‖ / ‖o‖", step=look.step)


def _decay(curve: Curve, choice: Choice) -> np.ndarray | None:
    look = curve.looks[-1] if curve.looks else None
    if look is None:
        return None
    spectrum = look.centred if choice.centred else look.raw
    if choice.axes == MEAN:
        decay = spectrum.decay
    elif choice.axes == POOLED:
        decay = spectrum.pooled
    else:
        n_layers, n_heads, _ = spectrum.eigenvalues.shape
        decay = spectrum.eigenvalues[min(choice.layer, n_layers - 1), min(choice.head, n_heads - 1)]
    return decay / decay[0] if decay[0] > 0 else None


def result(view: TrainView) -> str:
    """One line a method: size, loss, accuracy before and after, spectrum, speed."""
    read, said = (html.escape(part).replace("\n", "↵<br>") for part in view.example)
    other = view.order.other is not None
    heads = [
        *("method", "right, after", "free answer", "step", "loss", "held-out loss"),
        *("axes used", "adds", "parameters", "s/step", "tokens/s"),
        *(("other rows, before", "after") if other else ()),
    ]
    rows = "".join(_row(curve, view, len(heads)) for curve in view.curves)
    foot = [MEANING]
    if view.order.trials > 1:
        foot.append(f"Mean ± standard deviation over {view.order.trials} trials.")
    if view.seconds_left is not None and not view.stopped:
        foot.append(f"About {duration(view.seconds_left)} left.")
    if view.memory:
        foot.append(f"Most memory held so far: {amount(view.memory)}.")
    return (
        f"<p class='hint'>A row as the model reads it: <code>{read}</code> and learns to go on: "
        f"<code>{said}</code></p>{_before(view)}"
        "<div class='numbers' tabindex='0'><table><thead><tr>"
        + "".join(f"<th scope='col'>{head}</th>" for head in heads)
        + f"</tr></thead><tbody>{rows}</tbody></table></div><p class='hint'>{' '.join(foot)}</p>"
    )


def _before(view: TrainView) -> str:
    if not view.before or view.before[0].accuracy is None:
        return ""
    score = view.before[0]
    return (
        f"<p>Without any adapter the model gets {_accuracy(view.before)} of {score.n_rows} "
        f"held-out rows right ({_accuracy(view.before, 'exact')} when it answers freely).</p>"
    )


def _row(curve: Curve, view: TrainView, width: int) -> str:
    look = curve.looks[-1] if curve.looks else None
    seconds, after = curve.seconds, curve.scores()
    spectrum = None if look is None else look.centred
    cells = [
        f"<b>{_accuracy(after) if after else '…'}</b>",
        _accuracy(after, "exact") if after else "…",
        f"{len(curve.losses)}/{curve.entry.fitting.steps}",
        f"{curve.losses[-1]:.3f}" if curve.losses else "–",
        f"{look.held_out_loss:.3f}" if look else "–",
        f"{spectrum.axes_used:.1f} of {spectrum.bound}" if spectrum else "–",
        f"{_middle(look.ratio):.1%}" if look else "–",
        f"{curve.n_parameters:,}",
        f"{sum(seconds) / len(seconds):.2f}" if seconds else "–",
        f"{sum(curve.tokens) / max(sum(seconds), 1e-9):.0f}" if seconds else "–",
    ]
    if view.order.other is not None:
        others = [t.other for t in curve.earlier if t.other] + (
            [curve.other] if curve.other else []
        )
        cells += [_accuracy(view.other_before), _accuracy(others) if others else "…"]
    wrong = f"<tr><td colspan='{width}' class='bad'>{html.escape(curve.error)}</td></tr>"
    return (
        f"<tr><th scope='row'>{html.escape(curve.entry.label)}</th>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f"</tr>{wrong if curve.error else ''}"
    )


def _middle(values: np.ndarray) -> float:
    """The median over the heads that add anything."""
    return float(np.median(values[values > 0])) if (values > 0).any() else 0.0


def _accuracy(scores: Sequence[Score], name: str = "accuracy") -> str:
    """Mean, and the spread where there are several trials."""
    values = [getattr(score, name) for score in scores]
    values = [value for value in values if value is not None]
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.0%}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.0f}"


def runs_table(lines: Sequence[RunLine], now: float) -> str:
    """The runs there are, the newest first."""
    if not lines:
        return "<p class='hint'>No run yet.</p>"
    rows = "".join(
        f"<tr><th scope='row'>{line.id[:8]}</th><td>{line.state}</td>"
        f"<td>{line.step}/{line.steps}</td><td>{duration(max(0.0, now - line.changed))} ago</td>"
        f"<td>{html.escape(line.title)}</td></tr>"
        for line in lines[:20]
    )
    return (
        "<div class='numbers listed' tabindex='0'><table><thead><tr><th>run</th><th>state</th>"
        f"<th>step</th><th>changed</th><th>what</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def trial(view: TrialView) -> str:
    """What adapters' files say of themselves, and their answers beside those of the model alone."""
    rows = "".join(
        f"<tr><th scope='row'>{html.escape(one.label)}</th><td>{_accuracy([one.score])}</td>"
        f"<td>{_accuracy([one.score], 'exact')}</td><td>{one.score.loss:.3f}</td></tr>"
        for one in view.tried
        if one.score is not None
    )
    table = (
        "<table><thead><tr><th>held-out rows</th><th>right</th><th>free answer</th><th>loss</th>"
        f"</tr></thead><tbody>{rows}</tbody></table>"
    )
    cards = "".join(_card(one) for one in view.tried if one.card is not None)
    return f"<div class='numbers' tabindex='0'>{table if rows else ''}</div>{cards}"


def _card(tried: Tried) -> str:
    card = tried.card
    trained = card.training
    facts = {
        "method": card.method,
        "settings": ", ".join(
            f"{key} {value}" for key, value in card.config.items() if value != ""
        ),
        "trained for": f"{card.model}, {card.precision}",
        "parameters": f"{card.n_parameters:,}",
        "data": f"{trained.get('data', '?')}, {trained.get('shots', '?')} a class, "
        f"{trained.get('steps', '?')} steps, seed {trained.get('seed', '?')}",
    }
    listed = "".join(
        f"<div><dt>{key}</dt><dd>{html.escape(str(value))}</dd></div>"
        for key, value in facts.items()
    )
    notes = "".join(f"<p class='hint'>{html.escape(note)}</p>" for note in tried.notes)
    return (
        f"<details class='model-card'><summary>{html.escape(tried.label)}</summary>"
        f"<dl>{listed}</dl>{notes}</details>"
    )

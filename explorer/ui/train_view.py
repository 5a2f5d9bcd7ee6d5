"""What the page shows of a training run: rows, charts, what was reached."""

from __future__ import annotations

import html
from collections.abc import Sequence

import plotly.graph_objects as go

from explorer.data import Dataset, Split
from explorer.evaluation import Evaluation
from explorer.plots_training import gate_map, loss_chart, spectrum_chart
from explorer.session.train import Curve, TrainView, TrialView
from explorer.ui.page import duration

PREVIEW = 6
NOTHING = "<p class='hint'>What comes out appears here.</p>"


def preview(dataset: Dataset, rows: Split) -> str:
    """The split before the run: how many rows, and the first of each part."""
    classes = ", ".join(f"<b>{html.escape(name)}</b>" for name in rows.classes[:12])
    more = f" and {len(rows.classes) - 12} more" if len(rows.classes) > 12 else ""
    notes = "".join(f"<p class='hint'>{html.escape(note)}</p>" for note in rows.notes)
    return (
        f"<p>{html.escape(dataset.name)}: {len(dataset.rows):,} rows, {len(rows.classes)} classes "
        f"({classes}{more}).</p>{notes}"
        f"<div class='split'>{_part('To learn from', rows.train)}"
        f"{_part('Held out to test on', rows.held_out)}</div>"
    )


def _part(title: str, rows: Sequence) -> str:
    listed = "".join(
        f"<tr><td>{html.escape(_short(row.text))}</td><td>{html.escape(row.answer)}</td></tr>"
        for row in rows[:PREVIEW]
    )
    rest = f"<p class='hint'>and {len(rows) - PREVIEW} more</p>" if len(rows) > PREVIEW else ""
    return (
        f"<div><table><caption>{title}: {len(rows)}</caption><thead><tr><th>text</th>"
        f"<th>label</th></tr></thead><tbody>{listed}</tbody></table>{rest}</div>"
    )


def _short(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def charts(view: TrainView) -> tuple[go.Figure | None, go.Figure | None, go.Figure | None]:
    """→ loss, gates, spectrum; None for what is not there yet"""
    moving = [curve for curve in view.curves if curve.losses]
    if not moving:
        return None, None, None
    steps = max(curve.entry.fitting.steps for curve in view.curves)
    losses = {curve.entry.label: curve.losses for curve in moving}
    gated = next((curve for curve in moving if curve.gates is not None), None)
    decays = {
        curve.entry.label: curve.spectrum.decay
        for curve in moving
        if curve.spectrum is not None and curve.spectrum.pooled[0] > 0
    }
    return (
        loss_chart(losses, run=view.run, steps=steps),
        None
        if gated is None
        else gate_map(gated.gates, name=gated.entry.label, run=f"{view.run} {gated.entry.label}"),
        spectrum_chart(decays, run=view.run) if decays else None,
    )


def result(view: TrainView) -> str:
    """One line a method: size, loss, accuracy before and after, spectrum, seconds."""
    rows = "".join(_row(curve, view.before) for curve in view.curves)
    read, said = (html.escape(part).replace("\n", "↵<br>") for part in view.example)
    left = (
        f"<p class='hint'>About {duration(view.seconds_left)} left.</p>"
        if view.seconds_left is not None and not _over(view)
        else ""
    )
    before = (
        f"<p>Without any adapter the model gets {_percent(view.before.accuracy)} of "
        f"{view.before.n_rows} held-out rows right ({_percent(view.before.exact)} when it answers "
        "freely).</p>"
        if view.before is not None
        else ""
    )
    return (
        f"<p class='hint'>A row as the model reads it: <code>{read}</code> and learns to go on: "
        f"<code>{said}</code></p>{before}"
        "<div class='numbers' tabindex='0'><table><thead><tr><th>method</th>"
        "<th>numbers trained</th><th>step</th><th>loss</th><th>s/step</th><th>axes used</th>"
        "<th>right, before</th>"
        "<th>right, after</th><th>free answer</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{left}"
    )


def _over(view: TrainView) -> bool:
    return view.stopped or all(curve.after is not None or curve.error for curve in view.curves)


def _row(curve: Curve, before: Evaluation | None) -> str:
    fitted, spectrum = curve.entry.fitting, curve.spectrum
    axes = "–"
    if spectrum is not None:
        axes = f"{spectrum.axes_used:.1f} of {spectrum.bound}"
    seconds = f"{sum(curve.seconds) / len(curve.seconds):.2f}" if curve.seconds else "–"
    cells = [
        f"<th scope='row'>{html.escape(curve.entry.label)}</th>",
        f"<td>{curve.n_parameters:,}</td>",
        f"<td>{len(curve.losses)}/{fitted.steps}</td>",
        f"<td>{curve.losses[-1]:.3f}</td>" if curve.losses else "<td>–</td>",
        f"<td>{seconds}</td><td>{axes}</td>",
        f"<td>{_percent(before.accuracy) if before else '–'}</td>",
        f"<td><b>{_percent(curve.after.accuracy) if curve.after else '…'}</b></td>",
        f"<td>{_percent(curve.after.exact) if curve.after else '…'}</td>",
    ]
    wrong = f"<tr><td colspan='9' class='bad'>{html.escape(curve.error)}</td></tr>"
    return f"<tr>{''.join(cells)}</tr>{wrong if curve.error else ''}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def trial(view: TrialView) -> str:
    """What an adapter's file says about itself, and what it does."""
    card = view.card
    facts = {
        "method": card.method,
        "settings": ", ".join(f"{key} {value}" for key, value in card.config.items()),
        "trained for": f"{card.model}, {card.precision}",
        "numbers": f"{card.n_parameters:,}",
        "data": f"{card.training.get('data', '?')}, {card.training.get('shots', '?')} a class, "
        f"{card.training.get('steps', '?')} steps, seed {card.training.get('seed', '?')}",
    }
    listed = "".join(
        f"<div><dt>{key}</dt><dd>{html.escape(str(value))}</dd></div>"
        for key, value in facts.items()
    )
    notes = "".join(f"<p class='hint'>{html.escape(note)}</p>" for note in view.notes)
    answers = ""
    if view.answers is not None:
        without, with_it = (html.escape(text).replace("\n", "↵") for text in view.answers)
        answers = (
            f"<div class='split'><div><p class='hint'>Without it</p><code>{without}</code></div>"
            f"<div><p class='hint'>With it</p><code>{with_it}</code></div></div>"
        )
    measured = ""
    if view.evaluation is not None:
        measured = (
            f"<p>On {view.evaluation.n_rows} held-out rows it gets "
            f"<b>{_percent(view.evaluation.accuracy)}</b> right "
            f"({_percent(view.evaluation.exact)} when it answers freely).</p>"
        )
    return f"<div class='model-card'><dl>{listed}</dl></div>{notes}{answers}{measured}"

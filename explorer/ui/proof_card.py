"""The proof of a forced output as HTML: a verdict, and each number with what it means."""

from __future__ import annotations

import html
from collections.abc import Sequence

from explorer.detection import Signs
from explorer.forcing import ForcedPrefix
from explorer.session.force import Trial

_JUDGED = {True: "good", False: "bad", None: ""}
EMPTY = (
    """<div class="empty">The proof appears here: press <b>Force</b>, or take an example.</div>"""
)


def said(title: str, text: str, after: str = "", *, good: bool | None = None) -> str:
    """One of the two columns. after: what was written later    good: mark it as proved"""
    body = html.escape(text) if text else "<span class='faint'>…</span>"
    if after:
        body += f"<span class='faint'>{html.escape(after)}</span>"
    mark = " good" if good else ""
    return f"<div class='said{mark}'><h3>{title}</h3><p>{body}</p></div>"


def card(forced: ForcedPrefix) -> str:
    """Verdict and numbers."""
    proof = forced.proof
    rows = "".join(
        f"<tr><th scope='row'>{name}</th><td class='{_JUDGED[good]}'>{value}</td>"
        f"<td class='hint'>{meaning}</td></tr>"
        for name, value, good, meaning in _numbers(forced)
    )
    if proof.forced:
        verdict = (
            f"<p class='verdict good'>✓ Forced. Decoding freely, the model said all "
            f"{len(forced.target)} tokens.</p>"
        )
    else:
        miss = proof.first_miss
        due = html.escape(forced.target_text)
        verdict = (
            f"<p class='verdict bad'>✗ Not forced. Token {miss + 1} of {len(forced.target)} came "
            f"out differently; wanted was “{due}”. Try kernel keys, a larger margin, or more "
            "repair steps.</p>"
        )
    sampled = ""
    if forced.sampled is not None:
        same = forced.sampled == forced.target_text
        sampled = (
            f"<p class='{'good' if same else 'bad'}'>Sampled at temperature "
            f"{forced.request.temperature:g}: {'the same text' if same else 'another text'}"
            f"{'' if same else ', “' + html.escape(forced.sampled) + '”'}.</p>"
        )
    return f"<div class='proof'>{verdict}{sampled}<table>{rows}</table></div>"


def _numbers(forced: ForcedPrefix) -> list[tuple[str, str, bool | None, str]]:
    """(name, value, whether that is good or neither, what it means)"""
    proof, solved = forced.proof, forced.solved
    slots = "slot" if proof.slots == 1 else "slots"
    seconds = proof.seconds
    return [
        (
            "Smallest lead",
            f"{proof.gap:.2f} logits",
            proof.gap > 0.01,
            "of the chosen token over the runner-up, at the closest step; near 0, rounding decides",
        ),
        (
            "Chance when sampled",
            f"{100 * proof.probability:.3g} %",
            None,
            "that sampling at temperature 1 says the whole text; raise the margin to raise it",
        ),
        (
            "Coverage",
            f"{100 * proof.coverage:.4f} %",
            proof.coverage > 0.99,
            "1 − the largest share of attention any head left to your prompt; 100 % means that the "
            "prompt is not read at all",
        ),
        (
            "Condition",
            f"{proof.condition:.3g}",
            proof.condition < 1e8,
            "of the linear systems S·V = O; 1 is ideal, beyond 1e8 rounding spoils the values",
        ),
        (
            "Residual",
            f"{proof.residual:.1e}",
            proof.residual < 1e-6,
            "largest error of S·V against O, relative to O, or a bound on it",
        ),
        (
            "Prefix",
            f"{proof.slots} {slots} a head, {_size(proof.n_bytes)}",
            None,
            "(query heads per key/value head) × (steps); the price of saying this text",
        ),
        (
            "Repair",
            f"{proof.repairs} steps, {proof.repaired_layers} layers",
            None,
            "gradient steps on attention outputs until every token led; 0 if the model says it "
            "after the source anyway",
        ),
        (
            "Time",
            f"{seconds['trajectory']:.1f} + {seconds['solve']:.2f} + {seconds['replay']:.1f} s",
            None,
            "finding the trajectory, solving, replaying",
        ),
        (
            "Sharpness c",
            f"{solved.scale[0]:.3g} to {solved.scale[1]:.3g}",
            None,
            "per head, from its closest pair of queries, so that the own slot leads by 30 nats "
            "(kernel), or own logit (whitened); 0 for aligned keys",
        ),
    ]


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:.1f} kB"


def signs_card(signs: Signs | None) -> str:
    """By what such a prefix can be told, without knowing what it was made for."""
    if signs is None:
        return "<div class='empty'>Its traces appear here once there is a solved prefix.</div>"
    verdict = (
        "<p class='verdict bad'>This prefix leaves the prompt no say.</p>"
        if signs.forcing
        else "<p class='verdict good'>Under this prefix the prompt still has a say.</p>"
    )
    rows = [
        (
            "Share on the prefix",
            f"{100 * signs.covered:.2f} %",
            "in the head that gives it least; a prefix read from a text leaves some heads 90 % "
            "to the prompt",
        ),
        (
            "Loudest key",
            f"{signs.loudness:.1f} ×",
            "its norm against the loudest key of ordinary text; about 1 if read from a text",
        ),
        (
            "Effect of the prompt",
            f"{signs.prompt_effect:.1e}",
            "how far the next token's probabilities move when everything but the last token of the "
            f"prompt changes (total variation, 0 to 1); without the prefix "
            f"{signs.prompt_effect_without:.2f}",
        ),
    ]
    body = "".join(
        f"<tr><th scope='row'>{name}</th><td>{value}</td><td class='hint'>{meaning}</td></tr>"
        for name, value, meaning in rows
    )
    return f"<div class='proof'>{verdict}<table>{body}</table></div>"


def trials_table(trials: Sequence[Trial]) -> str:
    """Further prompts under the same prefix."""
    if not trials:
        return "<div class='empty'>One line for each prompt appears here.</div>"
    held = sum(trial.forced for trial in trials)
    named = ("Forced", "Prompt", "Said", "First miss", "Smallest lead", "Coverage")
    heads = "".join(f"<th scope='col'>{name}</th>" for name in named)
    rows = "".join(
        f"<tr><td class='{'good' if t.forced else 'bad'}'>{'✓' if t.forced else '✗'}</td>"
        f"<td>{html.escape(t.prompt)}</td><td>{html.escape(t.said)}</td>"
        f"<td>{'' if t.first_miss is None else t.first_miss + 1}</td>"
        f"<td>{t.gap:.2f}</td><td>{100 * t.coverage:.3f} %</td></tr>"
        for t in trials
    )
    return (
        f"<div class='scroll'><table class='trials'><caption>{held} of {len(trials)} forced"
        f"</caption><tr>{heads}</tr>{rows}</table></div>"
    )

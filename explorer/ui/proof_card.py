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


IDLE, BUSY = "not run yet", "on its way"


def said(
    title: str, text: str, after: str = "", *, state: str = IDLE, good: bool | None = None
) -> str:
    """One of the two columns.

    after: what was written later    state: why there is no text    good: mark it as proved
    """
    shown = html.escape(text.removeprefix(" "))
    body = shown if text else f"<span class='faint'>{state}</span>"
    if after:
        body += f"<span class='faint'>{html.escape(after)}</span>"
    mark = " good" if good else ""
    return f"<div class='said{mark}'><h3>{title}</h3><p>{body}</p></div>"


def card(forced: ForcedPrefix) -> str:
    """Verdict and the three numbers that matter, the rest on demand."""
    proof = forced.proof
    if proof.forced:
        verdict = (
            f"<p class='verdict good'>✓ Forced. Taking its likeliest token at every step, the "
            f"model said all {len(forced.target)} tokens.</p>"
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
    source = ""
    if forced.request.source is not None:
        source = (
            f"<p>What it says after “{html.escape(forced.request.source)}”: "
            f"<b>{html.escape(forced.target_text)}</b></p>"
        )
    return (
        f"<div class='proof'>{verdict}{source}{sampled}<table>{_rows(_numbers(forced))}</table>"
        f"<details><summary>For experts</summary><table>{_rows(_details(forced))}</table></details>"
        "</div>"
    )


# (name, value, whether that is good or neither, what it means)
Number = tuple[str, str, bool | None, str]


def _rows(numbers: Sequence[Number]) -> str:
    return "".join(
        f"<tr><th scope='row'>{name}</th><td class='{_JUDGED[good]}'>{value}</td>"
        f"<td class='hint'>{meaning}</td></tr>"
        for name, value, good, meaning in numbers
    )


def _numbers(forced: ForcedPrefix) -> list[Number]:
    proof = forced.proof
    slots = "slot" if proof.slots == 1 else "slots"
    return [
        (
            "Smallest lead",
            f"{proof.gap:.2f} logits",
            proof.gap > 0.01,
            "of the chosen token over the runner-up, at the closest step; near 0, rounding decides",
        ),
        (
            "Coverage",
            percent(proof.coverage),
            proof.coverage > 0.99,
            "1 − the largest share of attention any head left to your prompt; 100 % means that the "
            "prompt is not read at all",
        ),
        (
            "Prefix",
            f"{proof.slots} {slots} a head, {_size(proof.n_bytes)}",
            None,
            "(query heads per key/value head) × (steps); the price of saying this text",
        ),
    ]


def _details(forced: ForcedPrefix) -> list[Number]:
    proof, solved = forced.proof, forced.solved
    seconds = proof.seconds
    numbers = [
        (
            "Chance when sampled",
            percent(proof.probability),
            None,
            "that a throw of dice at every step (temperature 1) says the whole text: rare, for "
            "each token need only be the likeliest; a larger margin raises it",
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
    ]
    if forced.request.keys != "aligned":
        numbers.append(
            (
                "Sharpness c",
                f"{solved.scale[0]:.3g} to {solved.scale[1]:.3g}",
                None,
                "per head, from its closest pair of queries, so that the own slot leads by 30 nats "
                "(kernel), or own logit (whitened)",
            )
        )
    return numbers


def percent(part: float) -> str:
    """A part of the whole as a percentage that people can read."""
    if 0 < part < 1e-5:
        return "less than 0.001 %"
    return f"{100 * part:.3f} %" if 0 < part < 1e-3 else f"{100 * part:.2f} %"


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
            percent(signs.covered),
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
    lines = [_cells(trial, missed=held < len(trials)) for trial in trials]
    heads = "".join(f"<th scope='col'>{name}</th>" for name in lines[0])
    rows = "".join(
        f"<tr><td class='{'good' if trial.forced else 'bad'}'>{'✓' if trial.forced else '✗'}</td>"
        + "".join(f"<td data-name='{name}'>{value}</td>" for name, value in cells.items())
        + "</tr>"
        for trial, cells in zip(trials, lines, strict=True)
    )
    return (
        f"<div class='scroll'><table class='trials'><caption>{held} of {len(trials)} forced"
        "</caption><thead><tr><th scope='col'>Forced</th>"
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cells(trial: Trial, *, missed: bool) -> dict[str, str]:
    """One line, by its columns. missed: whether any of the lines has a wrong token"""
    first = "" if trial.first_miss is None else str(trial.first_miss + 1)
    return {
        "Prompt": html.escape(trial.prompt),
        "Said": html.escape(trial.said.removeprefix(" ")),
        **({"First wrong token": first} if missed else {}),
        "Smallest lead": f"{trial.gap:.2f} logits",
        "Coverage": percent(trial.coverage),
    }

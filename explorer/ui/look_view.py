"""What the page shows of one LookView, for one choice of position, group, head and scale."""

from __future__ import annotations

import bisect
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorer import plots, plots_look
from explorer.session.look import LookView
from explorer.text import Token
from explorer.ui.token_strip import strip

ALL = "all attention"
SINKLESS = "attention without the sink"
CHIPS = 2048  # tokens the strip shows: of a longer text the last


@dataclass(frozen=True)
class Choice:
    """What the visitor looks at.

    at: a position, -1 for the last    group: what the map is coloured by    layer, head: one head
    scale: ALL or SINKLESS    stretch: full colour at the largest share instead of at 100 %
    log: colours by the logarithm    compare: change against the pinned view, where there is one
    scores: q·k instead of weights in one row
    """

    at: int
    group: str
    layer: int
    head: int
    scale: str
    stretch: bool
    log: bool = False
    compare: bool = False
    scores: bool = False


def drawn(view: LookView, choice: Choice, pinned: LookView | None = None) -> list[Any]:
    """→ summary, tokens, map, curve, facts, table: everything below the prompt"""
    shares, groups = scaled(view, choice.scale)
    at = position(view, choice.at)
    here = view.mass.positions[at]
    every = [token.text for token in view.mass.tokens for _ in token.ids]
    labels = [every[one] for one in view.mass.positions]
    layer, head = min(choice.layer, len(shares) - 1), min(choice.head, shares.shape[1] - 1)
    group = choice.group if choice.group in groups else "prompt"
    cells = shares[:, :, at, groups.index(group)]
    top = max(float(np.nan_to_num(cells).max()), 0.01) if choice.stretch else 1.0
    without = " (the sink left out)" if choice.scale == SINKLESS else ""
    seen = f"position {here}{' (the last)' if here == len(every) - 1 else ''}, {_chip(labels[at])}"
    title = f"Layer {layer}, head {head}"
    return [
        _summary(view, shares[:, :, at], groups, group, f"{seen}{without}"),
        strip(
            view.mass.tokens[-CHIPS:],
            view.n_generated,
            _last_of(view.mass.tokens, here),
            view.marked,
            view.n_slots,
        ),
        _map(view, choice, pinned, cells, group, (layer, head), top),
        plots.shares_along(shares[layer, head], groups, labels, title=title, position=at),
        _facts(title, shares[layer, head, at], groups, seen),
        table(cells, f"Share of {choice.scale} on {group}"),
    ]


def _map(view, choice, pinned, cells, group, chosen, top):
    """The shares, or their change against a pinned view of a model with as many heads."""
    before = comparable(view, pinned, choice, group) if choice.compare else None
    if before is None:
        return plots.share_map(cells, group, chosen=chosen, top=top, log=choice.log)
    return plots_look.difference_map(cells, before, group, chosen=chosen)


def comparable(
    view: LookView, pinned: LookView | None, choice: Choice, group: str
) -> np.ndarray | None:
    """The pinned view's shares on a group: from the same position, or else from its last. (l, h)"""
    if pinned is None or pinned.mass.shares.shape[:2] != view.mass.shares.shape[:2]:
        return None
    shares, groups = scaled(pinned, choice.scale)
    if group not in groups:
        return None
    return shares[:, :, position(pinned, choice.at), groups.index(group)]


def scaled(view: LookView, scale: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Shares, or shares of what is left without the sink. → (l, h, q, n), names of the n groups

    Where the sink takes everything nothing is left: NaN.
    """
    shares, groups = view.mass.shares, view.mass.groups
    if scale != SINKLESS:
        return shares, groups
    kept = [index for index, name in enumerate(groups) if name != "sink"]
    rest = shares[..., kept]
    whole = rest.sum(-1, keepdims=True)
    left = np.divide(rest, whole, out=np.full_like(rest, np.nan), where=whole > 1e-6)
    return left, tuple(groups[index] for index in kept)


def strongest(view: LookView, group: str, scale: str) -> tuple[int, int]:
    """The head that looks at a group most, from the last position. → layer, head"""
    shares, groups = scaled(view, scale)
    cells = shares[:, :, -1, groups.index(group if group in groups else "prompt")]
    layer, head = np.unravel_index(int(np.nan_to_num(cells).argmax()), cells.shape)
    return int(layer), int(head)


def position(view: LookView, at: int) -> int:
    """Which of the kept positions stands for one of the text; the last where there is none."""
    kept = view.mass.positions
    if not 0 <= at <= kept[-1]:
        return len(kept) - 1
    return bisect.bisect_left(kept, at)


def table(cells: np.ndarray | None, caption: str) -> str:
    """The map as numbers. cells: (l, h)"""
    if cells is None:
        return "<p class='hint'>The numbers behind the map appear here.</p>"
    heads = "".join(f"<th scope='col'>{head}</th>" for head in range(cells.shape[1]))
    rows = "".join(
        f"<tr><th scope='row'>{layer}</th>"
        + "".join(f"<td>{_percent(share)}</td>" for share in row)
        + "</tr>"
        for layer, row in enumerate(cells)
    )
    return (
        f"<div class='numbers' tabindex='0'><table><caption>{html.escape(caption)}, in percent: "
        f"one row a layer, one column a head</caption><thead><tr><td></td>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{100 * share:.1f}"


def _summary(
    view: LookView, shares: np.ndarray, groups: Sequence[str], group: str, seen: str
) -> str:
    """The mean over all heads as one bar that is also the legend, and the finding in words.

    shares: (l, h, n), seen from one position
    """
    shares = np.nan_to_num(shares)
    heads = shares.sum(-1) > 0  # where something is left
    means = shares.sum((0, 1)) / max(1, int(heads.sum()))
    named = list(zip(groups, means, strict=True))
    bar = "".join(
        f"<span class='part {_class(name)}' style='flex-grow:{100 * share:.2f}'></span>"
        for name, share in named
        if share > 0
    )
    keys = "".join(
        f"<span class='key'><i class='{_class(name)}'></i>{html.escape(name)} "
        f"<b>{share:.0%}</b></span>"
        for name, share in named
    )
    cells = shares[:, :, groups.index(group)]
    layer, head = np.unravel_index(int(cells.argmax()), cells.shape)
    most = (
        f"Most on {html.escape(group)}: layer {layer}, head {head}, {cells.max():.0%}."
        if cells.max() > 0
        else f"Nothing goes to {html.escape(group)} from here."
    )
    front = (
        f"In front: {html.escape(view.held)}."
        if view.held
        else "No prefix is in front, so its share is 0."
    )
    return (
        f"<div class='finding'><p>Seen from {seen}, on the mean of {int(heads.sum())} heads:</p>"
        f"<div class='shares' aria-hidden='true'>{bar}</div><div class='keys'>{keys}</div>"
        f"<p class='hint'>{most} {front}</p></div>"
    )


def _facts(title: str, shares: np.ndarray, groups: Sequence[str], seen: str) -> str:
    told = ", ".join(
        f"{share:.1%} on {html.escape(name)}"
        for name, share in zip(groups, shares, strict=True)
        if share > 0
    )
    return f"<p class='hint'>{title}, seen from {seen}: {told or 'nothing but the sink'}.</p>"


def _class(group: str) -> str:
    return group if group in plots.GROUPS else "mark"


def _chip(text: str) -> str:
    return f"<span class='token plain'>{html.escape(text)}</span>"


def _last_of(tokens: Sequence[Token], at: int) -> int:
    """The last position of the token at a position: what its chip stands for."""
    return next((token.stop - 1 for token in tokens if token.start <= at < token.stop), at)

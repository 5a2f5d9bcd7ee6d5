"""What the page shows of one LookView, for one choice of position, group, head and scale.

Numbers and words; figures are made of them in `look_drawing`.
"""

from __future__ import annotations

import bisect
import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from explorer import plots
from explorer.plots import literal
from explorer.session.look_views import LookView, RowsView, Writing, row_of
from explorer.text import Token
from explorer.ui.token_strip import WINDOW


@dataclass(frozen=True)
class Choice:
    """What the visitor looks at.

    at: a position, -1 for the last    first: the first token of the window that the strip shows
    group: what the map is coloured by    layer, head: one head
    mean: the map is the mean over all tokens, not seen from one    sinkless: without the sink
    stretch: full colour at the largest share instead of at 100 %
    log: colours by the logarithm    scores: q·k instead of weights in one row
    at_b, first_b: the same for the second state
    opened: panels that are open, and therefore drawn
    """

    at: int
    first: int
    group: str
    layer: int
    head: int
    mean: bool = False
    sinkless: bool = False
    stretch: bool = True
    log: bool = False
    scores: bool = False
    at_b: int = -1
    first_b: int = -1
    opened: frozenset[str] = frozenset()


def without_sink(shares: np.ndarray, groups: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Shares of what is left without the sink. (…, n) → (…, n − 1), names of the groups left

    Where the sink takes everything nothing is left: NaN.
    """
    kept = [index for index, name in enumerate(groups) if name != "sink"]
    rest = shares[..., kept]
    whole = rest.sum(-1, keepdims=True)
    left = np.divide(rest, whole, out=np.full_like(rest, np.nan), where=whole > 1e-6)
    return left, tuple(groups[index] for index in kept)


def scaled(
    shares: np.ndarray, groups: Sequence[str], sinkless: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Shares of all attention, or of what is left without the sink."""
    return without_sink(shares, groups) if sinkless else (shares, tuple(groups))


def seen(view: LookView, choice: Choice, at: int | None = None) -> tuple[np.ndarray, tuple]:
    """What the map shows, for every group. → (l, h, n), names of the groups

    From one position, or the mean over all but the first, which sees nothing but itself. Of a
    mean the sink is taken out after averaging. at: instead of the choice's
    """
    shares = view.mass.shares
    if choice.mean:
        cells = shares[:, :, min(1, shares.shape[2] - 1) :].mean(2)
    else:
        cells = shares[:, :, position(view, choice.at if at is None else at)]
    return scaled(cells, view.mass.groups, choice.sinkless)


def along(view: LookView, choice: Choice) -> tuple[np.ndarray, tuple[str, ...]]:
    """The chosen head, seen from every kept position. → (q, n), names of the groups"""
    layer, head = head_of(view, choice)
    return scaled(view.mass.shares[layer, head], view.mass.groups, choice.sinkless)


def group_of(groups: Sequence[str], choice: Choice) -> str:
    """The group that is asked for, or the prompt where there is no such one."""
    return choice.group if choice.group in groups else "prompt"


def head_of(view: LookView, choice: Choice) -> tuple[int, int]:
    n_layers, n_heads = view.mass.shares.shape[:2]
    return min(choice.layer, n_layers - 1), min(choice.head, n_heads - 1)


def strongest(view: LookView, choice: Choice) -> tuple[int, int]:
    """The head that looks at a group most. → layer, head"""
    shares, groups = seen(view, choice)
    cells = np.nan_to_num(shares[..., groups.index(group_of(groups, choice))])
    layer, head = np.unravel_index(int(cells.argmax()), cells.shape)
    return int(layer), int(head)


def position(view: LookView, at: int) -> int:
    """Which of the kept positions stands for one of the text; the last where there is none."""
    kept = view.mass.positions
    if not 0 <= at <= kept[-1]:
        return len(kept) - 1
    return bisect.bisect_left(kept, at)


def labels_of(view: LookView) -> list[str]:
    """What stands at every position, as people read it."""
    return [token.text for token in view.mass.tokens for _ in token.ids]


def weights_of(
    view: LookView, choice: Choice, asked: RowsView | None, first: int
) -> tuple[list[float], float]:
    """How much of every token of a window the chosen head takes, and the most that any but the
    sink gets, or the sink where it has all; nothing where the row is not kept.
    """
    here = view.mass.positions[position(view, choice.at)]
    row, _ = row_of(view, asked, *head_of(view, choice), here)
    if row is None:
        return [], 1.0
    text = row.weights[row.n_slots :]
    window = view.mass.tokens[first : first + WINDOW]
    rest = text[1:] if text[1:].any() else text
    return [float(text[token.start : token.stop].sum()) for token in window], float(rest.max())


def last_of(tokens: Sequence[Token], at: int) -> int:
    """The last position of the token at a position: what its chip stands for."""
    return next((token.stop - 1 for token in tokens if token.start <= at < token.stop), at)


def place(view: LookView, choice: Choice, at: int | None = None) -> str:
    """From where the map is seen, in words; HTML."""
    kept = view.mass.positions
    without = " (the sink left out)" if choice.sinkless else ""
    if choice.mean and kept[-1] > 0:
        some = "" if len(kept) == kept[-1] + 1 else f" {len(kept) - 1:,} of the"
        return f"the mean over{some} {kept[-1]:,} tokens after the first{without}"
    here = kept[position(view, choice.at if at is None else at)]
    last = " (the last)" if here == kept[-1] else ""
    token = f"{chip(labels_of(view)[here])} (id {view.mass.ids[here]})"
    return f"position {here}{last}, {token}{without}"


def summary(view: LookView, choice: Choice) -> str:
    """The mean over all heads as one bar that is also the legend, and the finding in words."""
    shares, groups = seen(view, choice)
    shares = np.nan_to_num(shares)
    group = group_of(groups, choice)
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
        if name != "prefix" or view.n_slots
    )
    cells = shares[:, :, groups.index(group)]
    layer, head = np.unravel_index(int(cells.argmax()), cells.shape)
    most = (
        f"Most on {html.escape(group)}: layer {layer}, head {head}, {cells.max():.0%}."
        if cells.max() > 0
        else f"Nothing goes to {html.escape(group)} from here."
    )
    return (
        f"<div class='finding'><p>Seen from {place(view, choice)}, on the mean of "
        f"{int(heads.sum())} heads:</p>"
        f"<div class='shares' aria-hidden='true'>{bar}</div><div class='keys'>{keys}</div>"
        f"<p class='hint'>{most} {html.escape(front(view))}</p></div>"
    )


def front(view: LookView) -> str:
    """What is in front and, where it is no prefix, why a prefix has no share."""
    if not view.held:
        return "No prefix is in front, so none has a share."
    if view.n_slots:
        return f"In front: {view.held}, {view.n_slots} slots in every layer."
    if view.beside is None:
        return f"In front: {view.held}. It has no slots to look at, so no prefix has a share."
    return (
        f"In front: {view.held}. It adds its part outside of the softmax, so no prefix has a "
        "share: see “Beside the softmax” below."
    )


def nothing_there(view: LookView, group: str) -> str:
    """What is written into a map of zeros."""
    if group == "prefix" and not view.n_slots:
        return f"{literal(view.held)} has no share" if view.held else "nothing is in front"
    return f"nothing goes to {literal(group)}"


def map_title(choice: Choice, group: str) -> str:
    """What the map shows, in one line, and what is unusual about it in a second."""
    told = {
        "mean over all tokens": choice.mean,
        "the sink left out": choice.sinkless,
        "colours by the logarithm": choice.log,
    }
    second = ", ".join(name for name, is_so in told.items() if is_so)
    return f"share on {literal(group)}" + (f"<br>{second}" if second else "")


def written_so_far(writing: Writing) -> str:
    """What the model has written, while it goes on; HTML."""
    return (
        f"<div class='finding'><p>It writes: {''.join(map(chip, writing.tokens))}</p>"
        "<p class='hint'>The map shows where every head looks to write the next token.</p></div>"
    )


def facts(
    view: LookView, choice: Choice, *, filled: float | None = None, spread: float | None = None
) -> str:
    """The chosen head in numbers, from the chosen token.

    filled: with what share a chip is full    spread: entropy of the head's row, nats
    """
    layer, head = head_of(view, choice)
    shares, groups = along(view, choice)
    at = position(view, choice.at)
    told = ", ".join(
        f"{share:.1%} on {html.escape(name)}"
        for name, share in zip(groups, shares[at], strict=True)
        if share > 0
    )
    here = view.mass.positions[at]
    entropy = (
        f" Its entropy, {spread:.2f} nats, is that of an even look at {np.exp(spread):.1f} tokens."
        if told and spread is not None
        else ""
    )
    chips = (
        f" Tokens above are filled by what this head gives them; the fullest, the sink left out, "
        f"gets {filled:.1%}."
        if filled is not None
        else ""
    )
    return (
        f"<p class='hint'>Layer {layer}, head {head}, seen from position {here}, "
        f"{chip(labels_of(view)[here])}: {told or 'nothing but the sink'}.{entropy}{chips}</p>"
    )


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
    told = f"{html.escape(caption)}, in percent: one row a layer, one column a head"
    return (
        f"<p class='hint'>{told}</p><div class='numbers' tabindex='0' role='region' "
        f"aria-label='{told}'><table><thead><tr><td></td>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def chip(text: str) -> str:
    """A token in a sentence; HTML."""
    return f"<span class='token plain'>{html.escape(text)}</span>"


def _percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{100 * share:.1f}"


def _class(group: str) -> str:
    return group if group in plots.GROUPS else "mark"

"""Two states side by side: A, the text that is looked at, and B, another one.

B is another text, or the same with something else in front of it. Both maps have one colour scale;
the third is B − A. Texts of other lengths have no positions in common, so what is compared is the
share seen from one token of each (at first the last), or the mean over all tokens of each.
"""

from __future__ import annotations

import html
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from explorer import plots, plots_look
from explorer.session.look_views import LookView, Other
from explorer.ui.live_plot import framing
from explorer.ui.look_view import (
    Choice,
    along,
    group_of,
    head_of,
    labels_of,
    last_of,
    map_title,
    place,
    position,
    seen,
    weights_of,
)
from explorer.ui.token_strip import seen_from, strip, window_of

PARTS = (
    "pair_told",
    "pair_a",
    "pair_b",
    "pair_change",
    "pair_along_a",
    "pair_along_b",
    "pair_tokens",
)
WAITING = "<p class='hint'>Nothing is compared yet.</p>"
Changed = Literal["all", "head", "position"]


def pair(
    view: LookView,
    choice: Choice,
    other: Other | None,
    *,
    changed: Changed = "all",
    turned: bool = False,
) -> dict[str, Any]:
    """The parts that change; none where there is no B, or it is of a model of another shape.

    turned: B's strip shows another window of its text
    """
    if other is None or other.view.mass.shares.shape[:2] != view.mass.shares.shape[:2]:
        return {**dict.fromkeys(PARTS), "pair_told": WAITING} if changed == "all" else {}
    b, choice_b = other.view, choice_of_b(view, choice, other)
    chosen = head_of(view, choice)
    parts: dict[str, Any] = {}
    if changed == "head":
        parts |= dict.fromkeys(("pair_a", "pair_b", "pair_change"), framing(plots.frame(*chosen)))
    else:
        parts |= _maps(view, choice, b, choice_b)
    if changed == "position":
        for name, one, own in (("a", view, choice), ("b", b, choice_b)):
            here = one.mass.positions[position(one, own.at)]
            shape = plots.column(here, one.mass.positions[-1] + 1)
            parts[f"pair_along_{name}"] = framing(shape)
    else:
        parts |= {
            "pair_along_a": _along("A", view, choice),
            "pair_along_b": _along("B", b, choice_b),
        }
    parts["pair_told"] = _told(view, choice, b, choice_b)
    parts["pair_tokens"] = tokens_of_b(view, b, choice_b, whole=turned or changed == "all")
    return parts


def choice_of_b(view: LookView, choice: Choice, other: Other) -> Choice:
    """The same choice for B: of the same text the same position, of another B's own."""
    if other.view.mass.ids == view.mass.ids:
        return replace(choice, first=choice.first_b)
    return replace(choice, at=choice.at_b, first=choice.first_b)


def compared(
    view: LookView, choice: Choice, b: LookView, choice_b: Choice
) -> tuple[np.ndarray, np.ndarray, str]:
    """→ A (l, h), B (l, h), name of the group. A group that a text does not have gets 0 there."""
    (shares, groups), (shares_b, groups_b) = seen(view, choice), seen(b, choice_b)
    group = choice.group if choice.group in groups_b else group_of(groups, choice)
    cells = [
        some[..., names.index(group)] if group in names else np.zeros_like(some[..., 0])
        for some, names in ((shares, groups), (shares_b, groups_b))
    ]
    return *cells, group


def _maps(view: LookView, choice: Choice, b: LookView, choice_b: Choice) -> dict[str, Any]:
    cells, cells_b, group = compared(view, choice, b, choice_b)
    top = 1.0
    if choice.stretch:
        top = max(float(np.nan_to_num(cells).max()), float(np.nan_to_num(cells_b).max()), 0.01)
    options = dict(chosen=head_of(view, choice), top=top, log=choice.log)
    title = map_title(choice, group)
    return {
        "pair_a": plots.share_map(cells, group, title=f"A: {title}", **options),
        "pair_b": plots.share_map(cells_b, group, title=f"B: {title}", **options),
        "pair_change": plots_look.difference_map(
            cells_b, cells, group, chosen=head_of(view, choice), title="B − A, in percentage points"
        ),
    }


def _along(name: str, view: LookView, choice: Choice):
    shares, groups = along(view, choice)
    layer, head = head_of(view, choice)
    every, kept = labels_of(view), view.mass.positions
    return plots.shares_along(
        shares,
        groups,
        [every[at] for at in kept],
        title=f"{name}: layer {layer}, head {head}",
        position=kept[position(view, choice.at)],
        positions=kept,
        named=True,
    )


def tokens_of_b(view: LookView, b: LookView, choice_b: Choice, *, whole: bool) -> Any:
    """B's tokens, unless they are A's: then A's choose for both."""
    if b.mass.ids == view.mass.ids:
        return None
    here = b.mass.positions[position(b, choice_b.at)]
    first = choice_b.first if choice_b.first >= 0 else window_of(b.mass.tokens, here)
    picked = last_of(b.mass.tokens, here)
    weights, most = weights_of(b, choice_b, None, first)
    now = dict(first=first, key=b.key, weights=weights, most=most)
    if not whole:
        return seen_from(picked, **now)
    return strip(b.mass.tokens, b.n_generated, picked, b.marked, b.n_slots, **now)


def _told(view: LookView, choice: Choice, b: LookView, choice_b: Choice) -> str:
    """What is compared, and the finding, in words."""
    cells, cells_b, group = compared(view, choice, b, choice_b)
    change = np.nan_to_num(cells_b) - np.nan_to_num(cells)
    layer, head = (int(i) for i in np.unravel_index(int(np.abs(change).argmax()), change.shape))
    own = head_of(view, choice)
    lines = "".join(
        f"<p><b>{name}</b>: {_opening(one)} {one.mass.positions[-1] + 1:,} tokens, in front: "
        f"{html.escape(one.held) or 'nothing'}; seen from {place(one, its)}.</p>"
        for name, one, its in (("A", view, choice), ("B", b, choice_b))
    )
    return (
        f"<div class='finding'>{lines}<p>B − A on {html.escape(group)}: "
        f"{_signed(100 * float(change.mean()))} points on the mean of all heads. Largest in "
        f"layer {layer}, head {head}: {_both(cells, cells_b, (layer, head))}. Chosen, "
        f"layer {own[0]}, head {own[1]}: {_both(cells, cells_b, own)}.</p></div>"
    )


def _both(cells: np.ndarray, cells_b: np.ndarray, head: tuple[int, int]) -> str:
    """One head's share in A and in B; – where the sink takes all, and is left out."""
    a, b = ("–" if np.isnan(share) else f"{share:.1%}" for share in (cells[head], cells_b[head]))
    return f"{a} in A, {b} in B"


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _opening(view: LookView) -> str:
    """The first words of a text."""
    words = "".join(labels_of(view)[:12]).replace("·", " ").strip()
    more = "…" if view.mass.positions[-1] >= 12 else ""
    return f"<i>{html.escape(words)}{more}</i>"

"""What Look shows below the map holds the arrays, and its files hold the same."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from app import LAUNCH
from explorer import heads, models, plots, plots_look
from explorer.contenders import FOUR
from explorer.errors import ExplorerError
from explorer.forcing import force
from explorer.lm import ModelSpec
from explorer.methods import methods
from explorer.plots_tradeoff import tradeoff_chart
from explorer.session import Held
from explorer.session import look as look_session
from explorer.session.curves import KINDS, CurvesView, comparing
from explorer.session.look import looking, pairing, reading
from explorer.session.look_views import LookView, Other, RowsView, Writing
from explorer.ui.build import build
from explorer.ui.look_actions import as_csv, as_json
from explorer.ui.look_drawing import everything, for_head, row_figures
from explorer.ui.look_more import head_named, positions_in
from explorer.ui.look_view import Choice, position
from explorer.ui.token_strip import WINDOW
from tests.test_app import array, read
from tests.tiny import tiny_checkpoint

TEXT = "the cat sat on the mat ."


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return ModelSpec(tiny_checkpoint(tmp_path_factory.mktemp("llama")), device="cpu")


class Quiet:
    """A job's stop that nobody presses."""

    def note(self, *_):
        pass


def run(work):
    return list(work(Quiet()))


@pytest.fixture(scope="module")
def view(spec):
    return run(looking(spec, TEXT, n_new=3, groups={"cat": [1]}))[-1]


def choice(**other):
    plain = dict(at=-1, first=-1, group="prompt", layer=1, head=2, stretch=False)
    return Choice(**(plain | other))


def drawn(whole, axis):
    """A row along the text, over the groups that it is drawn in."""
    return np.concatenate([one[axis][1:-1] for one in whole.data])


def test_what_is_written_is_told_while_it_is_written(spec):
    items = run(looking(spec, TEXT, n_new=4))
    writings = [item for item in items if isinstance(item, Writing)]
    assert [len(one.tokens) for one in writings] == list(range(1, len(writings) + 1))
    last = items[-1].written
    figure = plots_look.written_map(last.shares[..., 2], last.tokens, "prompt")
    assert np.allclose(array(figure.data[0].z), last.shares[..., 2].T)


def test_one_row_draws_the_largest_weights_and_names_their_groups(view):
    at = len(view.mass.ids) - 1
    figure, whole = row_figures(view, choice())
    row = view.rows.weights[1, 2, at].astype(np.float32)
    assert np.allclose(figure.data[0].x, np.sort(row)[::-1][: len(figure.data[0].x)])
    assert set(figure.data[0].customdata) <= {"sink", "prompt", "generated", "cat"}
    assert np.allclose(drawn(whole, "y"), row)
    assert np.allclose(drawn(whole, "x"), range(at + 1))
    colours = [one.fillcolor for one in whole.data]  # sink, the, cat (marked), sat …, generated
    assert colours == [f"var(--{name})" for name in "sink mark prompt generated".split()]
    scores, _ = row_figures(view, choice(scores=True))
    assert max(scores.data[0].x) == pytest.approx(float(view.rows.scores[1, 2, at].max()))
    told = everything(view, choice())["facts"]
    assert f"entropy, {view.rows.row(1, 2, at).entropy:.2f} nats" in told


def test_sorted_heads_are_the_map_in_order(view):
    cells = view.mass.of("sink")
    figure = plots_look.sorted_heads(cells, "share on sink", colour="grey", n=cells.size)
    assert np.allclose(figure.data[0].y, np.sort(cells, axis=None)[::-1])
    layer, head = head_named(figure.data[0].x[0])
    assert cells[layer, head] == cells.max()
    assert head_named("something else") is None


def test_one_row_without_the_sink_is_scaled_and_says_so(view):
    figure, whole = row_figures(view, choice(sinkless=True))
    row = view.rows.row(1, 2, len(view.mass.ids) - 1).without_sink().weights
    assert "sink" not in figure.data[0].customdata
    assert sum(drawn(whole, "y")) == pytest.approx(1, abs=1e-3)
    assert np.allclose(sorted(figure.data[0].x), np.sort(row)[-len(figure.data[0].x) :])
    assert "without the sink" in figure.layout.xaxis.title.text


@pytest.fixture(scope="module")
def compared(spec):
    """A and B, of other lengths."""
    pair = pairing(looking(spec, TEXT), looking(spec, "a dog ran by the road and the sea ."))
    views = [item for item in run(pair) if isinstance(item, LookView | Other)]
    assert isinstance(views[0], LookView) and isinstance(views[1], Other)
    return views


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("sinkless", [False, True])
def test_two_states_have_one_scale_and_a_difference(compared, mean, sinkless):
    view, other = compared
    asked = choice(group="prompt", mean=mean, sinkless=sinkless, stretch=True)
    parts = everything(view, asked, other)
    a, b, change = (parts[name].data[0] for name in ("pair_a", "pair_b", "pair_change"))
    assert (a.zmin, a.zmax) == (b.zmin, b.zmax)
    assert a.zmax == pytest.approx(max(array(a.z).max(), array(b.z).max()))
    for drawn, one in ((a, view), (b, other.view)):
        shares = one.mass.shares[:, :, 1:].mean(2) if mean else one.mass.shares[:, :, -1]
        expected = shares[..., 2]
        if sinkless:
            expected = expected / (1 - shares[..., 1])
        assert np.allclose(array(drawn.z), expected, atol=1e-5)
    assert np.allclose(array(change.z), 100 * (array(b.z) - array(a.z)), atol=1e-4)
    where = "the mean over" if mean else "(the last)"
    assert parts["pair_told"].count(where) == 2
    assert len(parts["pair_along_b"].data[0].x) == len(other.view.mass.ids) + 2


def test_of_the_first_token_alone_nothing_is_left_without_the_sink(compared):
    view, other = compared
    parts = everything(view, choice(at=0, at_b=0, sinkless=True), other)
    assert "– in A, – in B" in parts["pair_told"] and "nan" not in parts["pair_told"]
    assert "gets 100.0%" in parts["facts"]  # it sees itself


def test_a_token_is_written_letter_by_letter():
    """Some models have tokens for tags, which plotly would obey."""
    tokens, shares = ["<br>", "<b>", "&lt;"], np.eye(3, dtype=np.float32)
    written = ["&lt;br&gt;", "&lt;b&gt;", "&amp;lt;"]
    curve = plots.shares_along(shares, plots.GROUPS[:3], tokens, title="One")
    assert list(curve.layout.xaxis.ticktext) == written
    assert list(plots_look.written_map(shares, tokens, "sink").layout.xaxis.ticktext) == written
    bars = plots_look.row_bars(tokens, [0.5, 0.3, 0.2], plots.GROUPS[:3], title="One")
    assert [label.split(". ")[1] for label in bars.data[0].y] == written
    assert "most on <br>" in bars.layout.meta["alt"]
    along = plots_look.row_along(shares[0], tokens, plots.GROUPS[1:4], n_slots=0, title="One")
    assert along.data[0].customdata[1] == "&lt;br&gt; (0)"
    assert "most on <br> (0)" in along.layout.meta["alt"]


def test_a_chosen_head_is_framed_and_drawn_in_both_states(compared):
    view, other = compared
    asked = choice(layer=2, head=5, opened=frozenset({"pair"}))
    parts = for_head(view, asked, other)
    for name in ("map", "pair_a", "pair_b", "pair_change"):
        shape = parts[name]["mark"]["shapes"][0]
        assert (shape["x0"], shape["y0"]) == (4.5, 1.5)
    for name, one in (("pair_along_a", view), ("pair_along_b", other.view)):
        trace = next(trace for trace in parts[name].data if trace.name == "sink")
        assert np.allclose(trace.y[1:-1], one.mass.shares[2, 5, :, 1])
    assert "layer 2, head 5" in parts["pair_told"]
    assert "pair_a" not in for_head(view, choice(layer=2), other)  # closed: not drawn


def test_of_the_same_text_both_states_are_seen_from_the_same_token(spec):
    lm = models.load(spec)
    method = methods("train")["prefix-tuning"]
    tuned = Held("tuned", adapter=method.build(lm, method.config(slots=3), 0))
    view, other = run(pairing(looking(spec, TEXT), looking(spec, TEXT, held=tuned)))
    parts = everything(view, choice(at=3, group="prefix"), other)
    assert np.allclose(array(parts["pair_b"].data[0].z), other.view.mass.shares[:, :, 3, 0])
    assert parts["pair_b"].data[0].z.max() > 0.01 and not array(parts["pair_a"].data[0].z).any()
    assert parts["pair_tokens"] is None  # A's tokens choose for both


def test_logarithmic_colours_keep_the_numbers(view):
    cells = view.mass.of("prompt")
    figure = plots.share_map(cells, "prompt", log=True)
    assert np.allclose(array(figure.data[0].customdata), cells)
    assert np.allclose(array(figure.data[0].z), np.log10(np.maximum(cells, plots.LEAST)))


def test_files_hold_what_the_figures_hold(view):
    lines = Path(as_csv(view, 4)).read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(lines))
    assert len(rows) == view.mass.shares[:, :, 4].size
    for row in rows[:: len(rows) // 7]:
        index = view.mass.groups.index(row["group"])
        expected = view.mass.shares[int(row["layer"]), int(row["head"]), 4, index]
        assert float(row["share"]) == pytest.approx(float(expected), abs=1e-6)
    kept = json.loads(Path(as_json(view, 4, 1, 2)).read_text(encoding="utf-8"))
    assert np.allclose(kept["shares"], view.mass.shares[:, :, 4], atol=1e-6)
    assert np.allclose(kept["along"], view.mass.shares[1, 2], atol=1e-6)
    assert "cat" in kept["groups"]


def test_ranges_of_tokens_are_read_or_refused():
    assert positions_in("2-4, 7") == [2, 3, 4, 7]
    assert positions_in(" 3 ") == [3]
    for text, sentence in (
        ("a", "no range"),
        ("1-", "no range"),
        ("-3", "no range"),
        ("1-9999999", "no range"),
        ("5-2", "backwards"),
        ("", "No tokens"),
        (" , ", "No tokens"),
    ):
        with pytest.raises(ExplorerError, match=sentence):
            positions_in(text)


def test_a_trained_prefix_is_seen_as_a_prefix_and_a_gate_as_a_gate(spec):
    lm = models.load(spec)
    made = methods("train")
    tuned = made["prefix-tuning"].build(lm, made["prefix-tuning"].config(slots=3), 0)
    seen = run(looking(spec, TEXT, held=Held("tuned", adapter=tuned)))[-1]
    assert seen.mass.of("prefix").max() > 0.01
    gated = made["zero-gate"].build(lm, made["zero-gate"].config(slots=3, skip=1), 0)
    seen = run(looking(spec, TEXT, held=Held("gated", adapter=gated)))[-1]
    assert not seen.mass.of("prefix").any()
    assert seen.gates.shape == (3, 8)
    assert seen.beside.prompts.shape[-1] == 3
    parts = everything(seen, choice(layer=2))
    assert np.allclose(array(parts["ratio"].data[0].z)[1:], seen.beside.ratio[1:, :, -1])
    assert sum(name.startswith("prompt") for name in parts["row"].data[0].y) == 0
    assert sum("gated prompt" in name for name in parts["row"].data[0].y) == 3


def test_curves_are_drawn_as_measured(spec):
    views = run(comparing(spec, KINDS[0], {}, longest=64, prompts=2))
    assert isinstance(views[0], CurvesView)
    found = views[-1].found
    assert found.complete
    for measure, told in (("share", FOUR[:2]), ("part", FOUR)):
        figure = tradeoff_chart(found, measure)
        lines = {trace.name: trace for trace in figure.data if trace.name}
        assert tuple(lines) == told
        for name, trace in lines.items():
            mean, low, high = found.curve(name).band(measure)
            assert list(trace.x) == list(found.lengths)
            assert np.allclose(trace.y, mean)
            assert np.allclose(trace.customdata, np.stack([low, high], -1))
    assert FOUR[2] in tradeoff_chart(found, "share").layout.annotations[0].text


def test_curves_are_drawn_against_the_number_of_slots(spec):
    found = run(comparing(spec, KINDS[0], {}, longest=64, prompts=1))[-1].found
    for measure, told in (("share", FOUR[:2]), ("part", FOUR)):
        figure = tradeoff_chart(found, measure, "slots")
        lines = {trace.name: trace for trace in figure.data if trace.name}
        assert tuple(lines) == told
        for kind, trace in lines.items():
            for n, value in zip(trace.x, trace.y, strict=True):
                one = next(c for c in found.curves if (c.kind, c.slots) == (kind, n))
                assert value == pytest.approx(one.band(measure)[0][-1])
        assert "64 tokens" in figure.layout.xaxis.title.text
    alone = run(comparing(spec, KINDS[3], {}, longest=64, prompts=1))[-1].found
    assert "several numbers of slots" in tradeoff_chart(alone, "share", "slots").layout.meta["alt"]


def test_a_figure_of_curves_only_grows_while_it_is_measured(spec):
    views = run(comparing(spec, KINDS[0], {}, longest=64, prompts=2))
    for along in ("length", "slots"):
        sizes = [
            [len(trace.x) for trace in tradeoff_chart(view.found, "part", along).data]
            for view in views
        ]
        for before, after in pairwise(sizes):
            assert len(after) >= len(before)
            assert all(a >= b for a, b in zip(after, before, strict=False))


def test_the_four_kinds_are_compared_after_some_training(spec):
    views = run(comparing(spec, KINDS[1], {}, longest=32, prompts=1))
    found = views[-1].found
    names = [curve.name for curve in found.curves]
    assert names[0].startswith("prefix-tuning, 6") and names[1] == FOUR[1]
    assert [np.isfinite(c.share).all() for c in found.curves] == [True, True, False, False]
    gate = found.curves[2]
    assert gate.gate > 0  # it has opened
    assert all(np.nanmax(curve.ratio) > 0 for curve in found.curves)


def test_what_was_made_has_its_curves(spec):
    lm = models.load(spec)
    made = methods("train")
    tuned = made["prefix-tuning"].build(lm, made["prefix-tuning"].config(slots=3), 0)
    lora = made["lora"].build(lm, made["lora"].config(), 0)
    forced = force(lm, target="the cat", prompt="a dog")
    held = {
        "tuned": Held("tuned", adapter=tuned),
        "lora": Held("lora", adapter=lora),
        "solved": Held("solved", solved=forced.solved),
    }
    found = run(comparing(spec, KINDS[3], held, longest=64, prompts=1))[-1].found
    assert [curve.name for curve in found.curves] == [
        "8 slots of an instruction",
        "tuned",
        "solved",
    ]
    assert found.curve("solved").line()[0, -1] > 0.9


@pytest.fixture(scope="module")
def client(spec):
    demo = build(spec)
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    yield Client(url, verbose=False)
    demo.close()


def test_heads_are_found_over_the_page(client, spec):
    with pytest.raises(AppError, match="Press Look first"):
        client.predict(rule="most sink", api_name="/look_heads")
    client.predict(
        prompt=TEXT, chat=False, specials=False, n_new=0, held="nothing", group="prompt",
        mean=False, sinkless=False, stretch=False, log=False, api_name="/look",
    )  # fmt: skip
    status, figure = client.predict(rule="most sink", api_name="/look_heads")
    assert "done" in status
    lm = models.load(spec)
    best = heads.find(lm, "most sink", TEXT).top(1)[0]
    assert head_named(read(figure)["data"][0]["x"][0]) == best[:2]


def test_a_long_text_is_read_in_blocks_and_seen_from_some_positions(spec, monkeypatch):
    words = "the cat sat on a mat and the dog ran by the sea " * 6
    whole = run(looking(spec, words))[-1]
    assert whole.mass.positions == tuple(range(len(whole.mass.ids)))
    monkeypatch.setattr(look_session, "LIMIT", 20)
    monkeypatch.setattr(look_session, "KEPT", 9)
    long = run(looking(spec, words))[-1]
    kept = long.mass.positions
    assert len(kept) == 9 and kept[-1] == len(long.mass.ids) - 1
    assert np.allclose(long.mass.shares, whole.mass.shares[:, :, list(kept)], atol=1e-5)
    assert position(long, -1) == 8
    assert kept[position(long, 30)] >= 30
    page = everything(long, choice(at=kept[4]))
    assert f"position {kept[4]}" in page["summary"]
    assert page["tokens"]["picked"] == kept[4]
    assert list(page["along"].data[0].x[1:-1]) == list(kept)


@pytest.fixture(scope="module")
def smaller(spec):
    """A text of which only the rows of the last tokens are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look_session, "ROWS", 24 * 3 * len(TEXT.split()))
        return run(looking(spec, TEXT))[-1]


def test_a_row_that_is_not_kept_is_read_when_asked_for(spec, view, smaller):
    length = len(smaller.mass.ids)
    assert smaller.rows.positions == (length - 3, length - 2, length - 1)
    there = choice(at=2)
    assert row_figures(smaller, there) == (None, None)
    assert everything(smaller, there)["tokens"]["weights"] == []
    (found,) = run(reading(smaller, 2, there.layer))
    bars, whole = row_figures(smaller, there, found)
    whole_text = run(looking(spec, TEXT))[-1]
    expected = whole_text.rows.row(1, 2, 2).weights
    assert np.allclose(sorted(bars.data[0].x), np.sort(expected[:3]), atol=1e-3)
    assert np.allclose(drawn(whole, "y"), expected[:3], atol=1e-3)
    strip = everything(smaller, there, None, found)["tokens"]
    assert np.allclose(strip["weights"][:3], expected[:3], atol=1e-3)
    assert row_figures(smaller, choice(at=1), found) == (None, None)
    assert row_figures(view, choice(at=20), found) != (None, None)  # of another text: its own


def test_of_a_text_too_long_for_all_heads_one_layer_is_read(smaller, monkeypatch):
    monkeypatch.setattr(look_session, "ROWS", 8 * len(smaller.mass.ids))
    (found,) = run(reading(smaller, 2, 1))
    assert row_figures(smaller, choice(at=2, layer=1), found)[0] is not None
    assert row_figures(smaller, choice(at=2, layer=2), found) == (None, None)


def test_rows_that_were_read_before_are_kept_as_far_as_there_is_room(smaller, monkeypatch):
    first, second = (run(reading(smaller, at, 1))[0] for at in (1, 2))
    both = second.after(first)
    assert [rows.positions for rows, _ in both.parts] == [(1,), (2,)]
    assert second.after(None) is second
    assert second.after(RowsView("another text", first.parts)) is second
    monkeypatch.setattr("explorer.session.look_views.ROWS", 1)
    assert [rows.positions for rows, _ in second.after(first).parts] == [(2,)]


def test_logarithmic_axes_have_a_few_round_ticks_in_reach():
    def written(*values):
        return plots.log_ticks(values)["ticktext"]

    assert written(1, 64) == ["1", "2", "5", "10", "20", "50"]
    assert written(0.6, None, 10, float("inf"), 0) == ["1", "2", "5", "10"]
    assert written(2.1, 5.1) == ["3", "4", "5"]
    assert written(1e-12, 1) == ["10⁻¹²", "10⁻¹⁰", "10⁻⁸", "10⁻⁶", "10⁻⁴", "0.01", "1"]
    assert written(1e-5, 3e-5) == ["10⁻⁵", "2·10⁻⁵", "3·10⁻⁵"]
    assert written(4.571, 4.603) == ["4.58", "4.59", "4.6"]
    assert written(1, 49152) == ["1", "10", "100", "1000", "10000"]
    for low in np.logspace(-9, 4, 40):
        for reach in (1.0, 1.0000001, 1.001, 1.3, 2, 9, 80, 1e5):
            ticks = plots.log_ticks([low, low * reach])
            assert 3 <= len(ticks["tickvals"]) <= 7
            assert reach == 1 or 0.97 * low <= ticks["tickvals"][0]
            assert reach == 1 or ticks["tickvals"][-1] <= 1.03 * reach * low
            assert ticks["tickvals"] == sorted(ticks["tickvals"])
            assert len(set(ticks["ticktext"])) == len(ticks["ticktext"])
    for edge in (5e-324, 1.7e308):
        assert plots.log_ticks([edge])["tickvals"]


def test_a_long_text_shows_a_window_of_its_tokens(spec):
    words = "the cat sat on a mat and the dog ran by the sea " * 9
    long = run(looking(ModelSpec(spec.name, device="cpu"), words))[-1]
    total = len(long.mass.tokens)
    strip = everything(long, choice())["tokens"]
    assert strip["total"] == total and len(strip["text"]) == min(WINDOW, total)

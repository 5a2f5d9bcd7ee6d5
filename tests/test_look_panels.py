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
from explorer.session.look import Writing, looking
from explorer.ui.build import build
from explorer.ui.look_actions import as_csv, as_json
from explorer.ui.look_more import head_named, positions_in, row_figure
from explorer.ui.look_view import Choice, comparable, drawn, position
from tests.test_app import array
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
    plain = dict(at=-1, group="prompt", layer=1, head=2, scale="all", stretch=False)
    return Choice(**(plain | other))


def test_what_is_written_is_told_while_it_is_written(spec):
    items = run(looking(spec, TEXT, n_new=4))
    writings = [item for item in items if isinstance(item, Writing)]
    assert [len(one.tokens) for one in writings] == list(range(1, len(writings) + 1))
    last = items[-1].written
    figure = plots_look.written_map(last.shares[..., 2], last.tokens, "prompt")
    assert np.allclose(array(figure.data[0].z), last.shares[..., 2].T)


def test_one_row_draws_the_largest_weights_and_names_their_groups(view):
    at = len(view.mass.ids) - 1
    figure = row_figure(view, choice(), at)
    row = view.rows.weights[1, 2, at].astype(np.float32)
    assert np.allclose(figure.data[0].x, np.sort(row)[::-1][: len(figure.data[0].x)])
    assert set(figure.data[0].customdata) <= {"sink", "prompt", "generated", "cat"}
    scores = row_figure(view, choice(scores=True), at)
    assert max(scores.data[0].x) == pytest.approx(float(view.rows.scores[1, 2, at].max()))
    assert "entropy" in figure.layout.meta["alt"]


def test_sorted_heads_are_the_map_in_order(view):
    cells = view.mass.of("sink")
    figure = plots_look.sorted_heads(cells, "share on sink", colour="grey", n=cells.size)
    assert np.allclose(figure.data[0].y, np.sort(cells, axis=None)[::-1])
    layer, head = head_named(figure.data[0].x[0])
    assert cells[layer, head] == cells.max()
    assert head_named("something else") is None


def test_a_difference_is_the_one_minus_the_other(spec, view):
    other = run(looking(spec, "a dog ran by the road"))[-1]
    asked = choice(group="sink", compare=True)
    figure = drawn(other, asked, view)[2]
    before = comparable(other, view, asked, "sink")
    assert np.allclose(array(figure.data[0].z), other.mass.of("sink") - before)
    assert "Change" in figure.layout.meta["alt"]
    alone = drawn(other, asked, None)[2]
    assert np.allclose(array(alone.data[0].z), other.mass.of("sink"))


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
    for text in ("a", "1-", "-3", "1-999999"):
        with pytest.raises(ExplorerError, match="no range"):
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
    assert seen.experts.prompts.shape[-1] == 3


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
    alone = run(comparing(spec, KINDS[2], {}, longest=64, prompts=1))[-1].found
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
    found = run(comparing(spec, KINDS[2], held, longest=64, prompts=1))[-1].found
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
        client.predict(rule="most sink", held="nothing", api_name="/look_heads")
    client.predict(
        prompt=TEXT, chat=False, specials=False, n_new=0, held="nothing", group="prompt",
        scale="all attention", stretch=False, api_name="/look",
    )  # fmt: skip
    status, figure = client.predict(rule="most sink", held="nothing", api_name="/look_heads")
    assert "done" in status
    lm = models.load(spec)
    best = heads.find(lm, "most sink", TEXT).top(1)[0]
    assert head_named(figure["data"][0]["x"][0]) == best[:2]


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
    page = drawn(long, choice(at=kept[4]))
    assert f"position {kept[4]}" in page[0]
    assert page[1]["picked"] == kept[4]

"""A zero-gate adapter, trained, saved and opened again: Look shows its gates as they are."""

from __future__ import annotations

import re

import numpy as np
import pytest
from playwright.sync_api import expect

from explorer import adapters, models, train
from explorer.data import read, split
from explorer.session import Held
from explorer.session.look import looking
from explorer.training import FitConfig, named
from tests.browser.test_look import look
from tests.test_train_app import ROWS

FIGURE = """id => {
  const {_fullData: data} = document.querySelector(`#${id} .plot`);
  const plain = (values) => Array.from(values, (one) =>
    typeof one === 'string' ? one : one?.length === undefined ? one ?? null : plain(one));
  return ['x', 'y', 'z'].map((axis) => data[0][axis] && plain(data[0][axis]));
}"""


@pytest.fixture(scope="module")
def trained(spec, tmp_path_factory):
    """→ path of the file, tanh(g) of the adapter that went into it (l, h)"""
    folder = tmp_path_factory.mktemp("gates")
    (folder / "rows.csv").write_text(f"text,label\n{ROWS}")
    lm, rows = models.load(spec), split(read(folder / "rows.csv"), shots=4, held_out=4)
    fitting = FitConfig(steps=8, learning_rate=5e-2, warmup=0.0)
    *_, last = train(lm, rows, method="zero-gate", fitting=fitting)
    card = adapters.describe(lm, named("zero-gate"), last.adapter, {"label": "gated"})
    return adapters.save(folder / "gated.safetensors", last.adapter, card), last.gates


def test_look_holds_the_gates_of_a_file(spec, trained):
    path, gates = trained
    opened, _ = adapters.load(path, models.load(spec))
    assert np.array_equal(opened.gates().numpy(), gates, equal_nan=True)
    assert np.isnan(gates[:2]).all() and np.abs(gates[2:]).min() > 0.01  # all have moved
    assert gates[2:].min() < 0 < gates[2:].max()
    held = Held("gated", adapter=adapters.Saved(str(path)))
    *_, view = looking(spec, "the cat sat", held=held)(Quiet())
    assert np.array_equal(view.gates, gates, equal_nan=True)


def test_the_page_draws_them_as_a_map_and_as_sorted_bars_and_names_the_convention(visit, trained):
    path, gates = trained
    page = visit()
    page.get_by_role("tab", name="Train").click()
    page.get_by_role("button", name="Chat with the adapters").click()
    page.locator("#train-open input[type=file]").set_input_files(str(path))
    expect(page.locator("#train-open")).to_contain_text("gated")
    page.get_by_label("Test on the held-out rows").uncheck()
    page.locator("#train-try").click()
    expect(page.locator("#train-trial")).to_contain_text("zero-gate")
    expect(page.locator("#status-line .done")).to_contain_text("Trying")
    page.get_by_role("tab", name="Look").click()
    page.get_by_label("In front of it").click()
    page.get_by_role("option", name="gated").click()
    look(page)
    panel = page.get_by_role("button", name=re.compile("gates", re.I)).first
    panel.click()
    expect(page.locator("#look-gates .main-svg").first).to_be_visible()
    expect(page.locator("#look-bars .main-svg").first).to_be_visible()
    said = page.get_by_text("Gates as this program trains and applies them")
    expect(said).to_contain_text("tanh(g)")
    for other in ("peft", "litgpt"):
        expect(said).to_contain_text(other)
    _, _, shown = page.evaluate(FIGURE, "look-gates")
    shown = np.array([[np.nan if one is None else one for one in row] for row in shown], float)
    assert np.allclose(shown, gates, atol=2e-3, equal_nan=True)
    names, values, _ = page.evaluate(FIGURE, "look-bars")
    flat = {f"L{layer} H{head}": gates[layer, head] for layer, head in np.ndindex(gates.shape)}
    assert len(names) == np.isfinite(gates).sum() and len(set(names)) == len(names)
    assert np.allclose(values, [flat[name] for name in names], atol=2e-3)
    assert (np.diff(np.abs(values)) <= 2e-3).all()  # the widest open first


class Quiet:
    """A job's stop that nobody presses."""

    def note(self, *_):
        pass

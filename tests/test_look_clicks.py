"""A click in Look costs little: no model, little time of the server, few bytes to the page."""

from __future__ import annotations

import json
import time

import httpx
import numpy as np
import pytest
from gradio_client import Client

from app import LAUNCH
from explorer.lm import ModelSpec
from explorer.ui.build import build
from explorer.ui.token_strip import WINDOW
from tests.test_app import array, look, read
from tests.tiny import tiny_checkpoint

CPU = 0.15  # seconds of the process for one click, browser and model apart
LONG = 2040
BYTES = {512: 30_000, LONG: 36_000}  # for any one click
FIRST = {512: 64_000, LONG: 80_000}  # for a whole Look


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    sizes = dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=54)
    path = tiny_checkpoint(
        tmp_path_factory.mktemp("wide"), max_position_embeddings=LONG + 8, **sizes
    )
    demo = build(ModelSpec(path, device="cpu"))
    _, demo.address, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    yield demo
    demo.close()


class Visitor:
    """One page: it looks at a text over the API and then clicks as a browser does."""

    def __init__(self, demo, length: int) -> None:
        self.demo, self.length = demo, length
        self.client = Client(demo.address, verbose=False)
        self.seen = look(self.client, "the cat sat on the mat and so " * (length // 8))
        self.ids = {
            block.elem_id: block._id for block in demo.blocks.values() if hasattr(block, "elem_id")
        }
        self.http = httpx.Client(timeout=60)
        self.cpu, self.size = 0.0, 0

    def click(self, elem_id: str, event: str, data=None, **chosen):
        """→ what the event sends, by the elem_id of the component"""
        config = next(
            one
            for one in self.demo.config["dependencies"]
            if (self.ids[elem_id], event) in map(tuple, one["targets"])
        )
        flags = "mean sinkless stretch log scores".split()
        values = dict(group="prompt", layer=3, head=4) | dict.fromkeys(flags, False) | chosen
        names = "at first group layer head mean sinkless stretch log scores at_b first_b opened"
        body = {
            "data": [values.get(name) for name in names.split()],
            "event_data": data,
            "fn_index": config["id"],
            "session_hash": self.client.session_hash,
            "trigger_id": self.ids[elem_id],
        }
        began = time.process_time()
        answer = self.http.post(f"{self.demo.address}gradio_api/run/predict", json=body)
        self.cpu, self.size = time.process_time() - began, len(answer.content)
        assert answer.status_code == 200, answer.text
        names = {number: name for name, number in self.ids.items()}
        sent = zip(config["outputs"], answer.json()["data"], strict=True)
        return {names.get(number): read(value) for number, value in sent if names.get(number)}


@pytest.fixture(scope="module", params=[512, LONG])
def visitor(demo, request):
    visitor = Visitor(demo, request.param)
    yield visitor
    visitor.http.close()


def kept(part) -> bool:
    """Whether a component keeps the value it has."""
    return part["__type__"] == "update" and "value" not in part


@pytest.mark.parametrize("click", ["cell", "token", "curve", "group"])
def test_a_click_is_cheap(visitor, click):
    ask = {
        "cell": lambda: visitor.click("look-map", "plot_click", {"x": 5, "y": 7}),
        "token": lambda: visitor.click("look-tokens", "pick", {"position": 300, "first": 256}),
        "curve": lambda: visitor.click("look-along", "plot_click", {"x": 200, "y": 0.5}),
        "group": lambda: visitor.click("look-group", "input", group="sink"),
    }[click]
    times = []
    for _ in range(3):  # the first one of its kind also imports
        ask()
        times.append(visitor.cpu)
    assert min(times) < CPU
    assert visitor.size < BYTES[visitor.length]


def test_a_whole_look_is_within_its_budget(visitor):
    assert len(json.dumps(visitor.seen)) < FIRST[visitor.length]
    assert len(visitor.seen["tokens"]["text"]) == WINDOW


def test_another_head_sends_no_map_and_another_token_no_curve(visitor):
    sent = visitor.click("look-map", "plot_click", {"x": 5, "y": 7})
    shape = sent["look-map"]["props"]["mark"]["shapes"][0]
    assert (shape["x0"], shape["y0"]) == (4.5, 6.5)
    assert kept(sent["look-map"])
    assert sent["look-along"]["layout"]["meta"]["alt"].startswith("Layer 7, head 5")
    sent = visitor.click("look-tokens", "pick", {"position": 300, "first": 256})
    assert kept(sent["look-along"])
    assert sent["look-along"]["props"]["mark"]["shapes"][0]["y1"] == 1
    assert np.shape(array(sent["look-map"]["data"][0]["z"])) == (30, 9)
    assert all(kept(sent[name]) for name in ("look-sorted", "look-table", "look-ratio"))


def test_a_long_text_shows_the_window_that_is_asked_for(visitor):
    sent = visitor.click("look-tokens", "turn", {"first": 100})["look-tokens"]
    assert sent["first"] == 100 and len(sent["text"]) == WINDOW
    assert sent["position"][0] == 100
    moved = visitor.click("look-along", "plot_click", {"x": 30, "y": 0.5}, first=None)
    strip = moved["look-tokens"]  # the last window does not hold it, so that the strip turns
    assert strip["first"] <= 30 < strip["first"] + WINDOW
    assert strip["picked"] == 30


def test_the_mean_over_all_tokens_can_be_mapped(visitor):
    sent = visitor.click("look-group", "input", group="sink", mean=True)
    assert "the mean over" in sent["look-summary"]
    assert array(sent["look-map"]["data"][0]["z"]).mean() < 1

"""The app over its API, with a tiny model; what only a browser shows is in tests/browser."""

import base64
import json

import gradio as gr
import numpy as np
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from app import LAUNCH, arguments
from explorer import models
from explorer.errors import ExplorerError
from explorer.lm import ModelSpec
from explorer.shares import mass
from explorer.ui.build import build
from explorer.ui.controls import shown
from tests.tiny import SPECIALS, tiny_checkpoint

TEXT = "the cat sat on the mat ."
PAYLOAD = 24_000  # bytes a page may get for a Look of 120 tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.fixture(scope="module")
def url(checkpoint):
    demo = build(ModelSpec(checkpoint))
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    yield url
    demo.close()


@pytest.fixture
def client(url):
    return Client(url, verbose=False)


# What `/look` gives, in order: Python's names for it here.
PARTS = """status layer head group summary tokens map curve facts row row_along sorted written gates
ratio bars table compared tokens_b map_a map_b change curve_a curve_b""".split()


def look(client, text=TEXT, n_new=0, group="prompt", **more):
    """→ what the page gets, by the name of the part"""
    options = {"chat": False, "specials": False, "held": "nothing"} | more
    values = client.predict(
        prompt=text,
        n_new=n_new,
        group=group,
        mean=False,
        sinkless=False,
        stretch=False,
        log=False,
        api_name="/look",
        **options,
    )
    return {name: read(value) for name, value in zip(PARTS, values, strict=True)}


def read(value):
    """Figures and tokens come as JSON."""
    return json.loads(value) if str(value).startswith('{"') else value


def array(value):
    """An array of a figure, as plotly writes it."""
    if not isinstance(value, dict):
        return np.array(value, dtype=float)
    shape = [int(n) for n in str(value.get("shape", "-1")).split(",")]
    return np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"]).reshape(shape)


def test_every_event_is_private_or_has_a_name(client):
    api = client.view_api(return_format="dict")
    assert not api["unnamed_endpoints"]
    assert {"/load", "/look", "/stop"} <= set(api["named_endpoints"])
    assert not {name for name in api["named_endpoints"] if name.startswith(("/on_", "/lambda"))}


def test_loading_says_what_answered(client, checkpoint):
    status, card = client.predict(
        name=checkpoint, quantization="none", dtype="auto", device="cpu", api_name="/load"
    )
    assert "done" in status
    for fact in ("float32", "cpu", "3 × 8", "sdpa", "licence"):
        assert fact in card


def test_look_draws_the_shares_that_mass_computes(client, checkpoint):
    page = look(client, group="sink")
    lm = models.load(ModelSpec(checkpoint, device="cpu"))
    expected = mass(lm, TEXT)
    drawn = array(page["map"]["data"][0]["z"])
    assert np.allclose(drawn, expected.of("sink"), atol=1e-5)
    total = sum(array(trace["y"]) for trace in page["curve"]["data"])
    assert np.allclose(total, 1, atol=1e-5)
    assert [text.strip("·") for text in page["tokens"]["text"]] == TEXT.split()
    assert "alt" in page["map"]["layout"]["meta"]


def test_what_the_model_writes_is_a_group_of_its_own(client):
    page = look(client, n_new=5, group="generated")
    tokens = page["tokens"]
    assert tokens["text"][: tokens["generated"]] == look(client)["tokens"]["text"]
    assert 1 <= len(tokens["text"]) - tokens["generated"] <= 5
    assert {trace["name"] for trace in page["curve"]["data"]} >= {"sink", "prompt"}


def test_without_a_prefix_the_page_says_so(client):
    page = look(client, group="prefix")
    assert "No prefix is in front" in page["summary"]
    assert "Nothing goes to prefix" in page["summary"]


def test_control_tokens_in_a_text_stay_text_unless_asked(client):
    text = "the cat <|end|> sat"
    plain, read = look(client, text), look(client, text, specials=True)
    end = [SPECIALS.index("<|end|>")]
    assert end not in plain["tokens"]["ids"]
    assert end in [read["tokens"]["ids"][index] for index in read["tokens"]["special"]]


@pytest.mark.parametrize(
    ("text", "sentence"), [("", "prompt is empty"), ("  \n", "empty"), ("cat " * 500, "limit here")]
)
def test_a_text_that_cannot_be_read_is_explained(client, text, sentence):
    with pytest.raises(AppError, match=sentence):
        look(client, text)


def test_a_prefix_that_is_not_there_is_explained(client):
    with pytest.raises(AppError, match="solved prefix"):
        look(client, held="solved prefix")


def test_a_failed_load_says_why_and_leaves_a_usable_page(client):
    for name, sentence in [("", "No model is named"), ("no/such-model", "cannot be reached")]:
        with pytest.raises(AppError, match=sentence):
            client.predict(
                name=name, quantization="none", dtype="auto", device="cpu", api_name="/load"
            )
    assert "done" in look(client)["status"]


def test_an_error_stands_in_the_status_line_whether_a_job_had_begun_or_not(url):
    client = Client(url, verbose=False)
    model = dict(name="no/such-model", quantization="none", dtype="auto", device="cpu")
    for asked, said in [
        (dict(**model, api_name="/load"), "Loading the model: no/such-model cannot be reached"),
        (dict(rule="induction", api_name="/look_heads"), "Finding heads: No text has been looked"),
    ]:
        run = client.submit(**asked)
        with pytest.raises(AppError):
            run.result(timeout=60)
        assert said in run.outputs()[-1][0]


def test_two_visitors_have_their_own_models_and_results(url, other):
    mine, theirs = Client(url, verbose=False), Client(url, verbose=False)
    theirs.predict(name=other, quantization="none", dtype="auto", device="cpu", api_name="/load")
    for _ in range(2):
        assert array(look(mine)["map"]["data"][0]["z"]).shape == (3, 8)
        assert array(look(theirs, "a dog sat .")["map"]["data"][0]["z"]).shape == (3, 4)
    assert "dog" not in json.dumps(look(mine))


def test_the_page_gets_only_what_it_draws(client):
    page = look(client, "the cat " * 60)
    assert len(json.dumps(page)) < PAYLOAD


def test_what_a_file_says_is_text_in_a_toast():
    @shown
    def on_open():
        raise ExplorerError("It was made by <img src=//else.where>.", "Known are a & b.")

    with pytest.raises(gr.Error) as told:
        on_open()
    assert told.value.message == "It was made by &lt;img src=//else.where&gt;. Known are a &amp; b."


def test_stop_without_a_job_says_so(client):
    assert "Nothing is running" in client.predict(api_name="/stop")


def test_strangers_cannot_open_files_of_the_machine(monkeypatch, checkpoint, other):
    monkeypatch.setenv("SPACE_ID", "somebody/space")
    demo = build(ModelSpec(checkpoint))
    monkeypatch.delenv("SPACE_ID")  # gradio would bind for a Space
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    visitor = Client(url, verbose=False)
    for name in (other, "/etc/passwd", "~/x.gguf", "../x"):
        with pytest.raises(AppError, match="cannot be opened from the page"):
            visitor.predict(
                name=name, quantization="none", dtype="auto", device="cpu", api_name="/load"
            )
    demo.close()


def test_the_command_line_lists_its_options(capsys):
    with pytest.raises(SystemExit):
        arguments().parse_args(["--help"])
    told = capsys.readouterr().out
    for option in "model quantization dtype device host port share auth data".split():
        assert f"--{option}" in told

"""Force through the app's API, with a tiny model: the page's numbers are Python's."""

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from app import LAUNCH
from explorer import models
from explorer.forcing import force
from explorer.lm import ModelSpec
from explorer.ui.build import build
from explorer.ui.proof_card import percent
from tests.tiny import tiny_checkpoint

TARGET, PROMPT = "the red fish ate snow .", "where is the cat ?"
OPTIONS = {
    "mode": "this text",
    "chat": False,
    "specials": False,
    "keys": "kernel",
    "tokens": 4,
    "margin": None,
    "layers": 4,
    "steps": 300,
    "attn_lim": 20,
    "repeat": 1,
    "others": "a dog ran\nthe moon",
    "go_on": 0,
    "temperature": 0,
    "top_p": 1,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def url(checkpoint):
    demo = build(ModelSpec(checkpoint))
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    yield url
    demo.close()


@pytest.fixture
def client(url):
    return Client(url, verbose=False)


def ask(client, target=TARGET, prompt=PROMPT, **more):
    options = {**OPTIONS, "wanted": target, "prompt": prompt, **more}
    return client.predict(**options, api_name="/force")


def test_the_page_forces_what_python_forces(client, checkpoint):
    status, without, with_it, card, numbers, file = ask(client)
    assert "done" in status
    assert "✓ Forced" in card
    assert TARGET in with_it
    assert TARGET not in without
    lm = models.load(ModelSpec(checkpoint))
    ours = force(lm, target=TARGET, prompt=PROMPT, others=("a dog ran", "the moon"))
    assert numbers["said"] == list(ours.proof.said)
    for name in ("gap", "coverage", "condition", "residual", "slots", "n_bytes", "repairs"):
        assert numbers[name] == pytest.approx(getattr(ours.proof, name), rel=1e-3, abs=1e-9), name

    tried = client.predict(others="a dog ran\nthe moon", api_name="/force_try")[1]
    assert "2 of 2 forced" in tried and "First wrong token" not in tried
    assert "no say" in client.predict(api_name="/force_examine")[1]

    saved = file["value"] if isinstance(file, dict) else file
    again = client.predict(path=handle_file(saved), api_name="/force_open")
    assert "✓ Forced" in again[3]
    assert again[4]["said"] == numbers["said"]


def test_what_a_source_says_is_forced_by_the_papers_keys_or_not_called_so(client):
    *_, card, numbers, _ = ask(
        client,
        "a dog sat on the",
        "no fish in the",
        mode="what it says after another prompt",
        keys="aligned",
    )
    assert numbers["forced"] == (numbers["first_miss"] is None)
    assert "What it says after “a dog sat on the”" in card and "Sharpness" not in card


def test_a_number_is_written_as_people_read_it():
    parts = (1.0, 0.997557, 0.0106, 0.0005, 6.37e-7, 0.0)
    written = ["100.00 %", "99.76 %", "1.06 %", "0.050 %", "less than 0.001 %", "0.00 %"]
    assert [percent(part) for part in parts] == written


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target": ""}, "target is empty"),
        ({"prompt": " "}, "prompt is empty"),
        ({"margin": "much"}, "“much” is not a number"),
        ({"target": "the " * 300}, "this model reads"),
        ({"prompt": "the " * 300}, "the limit here is"),
    ],
)
def test_wrong_input_is_one_sentence_and_nothing_is_lost(client, change, sentence):
    ask(client, attn_lim=None)  # an emptied field
    with pytest.raises(AppError, match=sentence):
        ask(client, **change)
    assert "of 1 forced" in client.predict(others="a dog ran", api_name="/force_try")[1]


def test_without_a_prefix_there_is_nothing_to_try(client):
    with pytest.raises(AppError, match="no solved prefix yet"):
        client.predict(others="a dog ran", api_name="/force_try")
    with pytest.raises(AppError, match="no solved prefix yet"):
        client.predict(api_name="/force_examine")

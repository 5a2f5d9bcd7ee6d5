"""The chat through the app's API: every column is Python's conversation, and has its own past."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from app import LAUNCH
from explorer import adapters, chat, models
from explorer.errors import ExplorerError
from explorer.examples import Wording
from explorer.generate import Sampling
from explorer.lm import ModelSpec
from explorer.session.chat import MOST, ChatView, talking, wording_of
from explorer.ui.build import build
from explorer.ui.chat_view import BOXES, messages, notes
from tests.test_methods import VARIANTS, stirred
from tests.test_train_app import ROWS, ask, files_of
from tests.tiny import tiny_checkpoint

METHODS = ["PMT, elu", "LoRA"]
WORDING = Wording("{text} :")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chat")


@pytest.fixture(scope="module")
def spec(folder):
    return ModelSpec(tiny_checkpoint(folder / "model"))


@pytest.fixture(scope="module")
def url(spec, folder):
    demo = build(spec, folder / "data")
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    yield url
    demo.close()


@pytest.fixture
def client(url):
    return Client(url, verbose=False)


@pytest.fixture(scope="module")
def loud(spec, folder):
    """Files of adapters that change what is said, with the wording they were trained in."""
    lm, paths = models.load(spec), []
    for seed, label in enumerate(("PMT, elu", "Prefix-tuning", "PMT, elu")):
        adapter = stirred(lm, label)
        for parameter in adapter.parameters():
            parameter.data *= 3 + seed
        training = {"label": label, "wording": {"template": "{text} :", "chat": False}}
        card = adapters.describe(lm, VARIANTS[label][0], adapter, training)
        paths.append(adapters.save(folder / f"{seed}.safetensors", adapter, card))
    return paths


def said(answer) -> list[list[str]]:
    """What stands in every box that is there."""
    _, *found = answer
    shown = [box for box in found[:BOXES] if box["visible"]]
    return [[text_of(message["content"]) for message in box["value"]] for box in shown]


def text_of(content) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def python(lm, path, texts, **options):
    """The same conversation in Python: its texts, and the last answer."""
    adapter = adapters.load(path, lm)[0] if path else None
    turns = ()
    for text in texts:
        *_, answer = chat(lm, text, turns, adapter=adapter, **options)
        turns = answer.turns
    return [turn.text.strip() or "(said nothing)" for turn in turns], answer


def test_every_column_is_a_conversation_of_its_own(client, spec, loud):
    lm = models.load(spec)
    options = dict(adapters=[handle_file(p) for p in loud], n_new=6, api_name="/chat")
    first = client.predict(message="the cat", **options)
    second = client.predict(message="why not ?", **options)
    assert len(said(first)) == len(loud) + 1 and "done" in second[0]
    told = []
    for column, path in zip(said(second), [None, *loud], strict=True):
        texts, answer = python(lm, path, ["the cat", "why not ?"], wording=WORDING, n_new=6)
        assert column == texts
        told.append(answer.n_read)
    assert [column[:2] for column in said(second)] == said(first)
    assert len({column[1] for column in said(first)}) == len(loud) + 1
    labels = [box["label"] for box in second[1:] if isinstance(box, dict) and box.get("visible")]
    assert labels == ["model alone", "PMT, elu", "Prefix-tuning", "PMT, elu (2)"]
    how = second[1 + BOXES]
    read = [int(n) for n in re.findall(r"(\d+) tokens read", how)]
    assert read == told and how.count("<code>{text} :</code>") == 4


def test_manner_memory_and_sampling_are_those_of_python(client, spec, loud):
    lm = models.load(spec)
    options = dict(adapters=[handle_file(loud[0])], n_new=5, api_name="/chat")
    for manner, wording in (("chat", Wording("{text}", chat=True)), ("plain", Wording("{text}"))):
        client.predict(api_name="/chat_clear")
        client.predict(message="the cat", manner=manner, **options)
        found = client.predict(message="a dog", manner=manner, **options)
        for column, path in zip(said(found), (None, loud[0]), strict=True):
            assert column == python(lm, path, ["the cat", "a dog"], wording=wording, n_new=5)[0]
    client.predict(api_name="/chat_clear")
    client.predict(message="the cat", **options)
    found = client.predict(message="a dog", remember=False, **options)
    alone = python(lm, loud[0], ["a dog"], wording=WORDING, n_new=5)[0]
    assert said(found)[1][2:] == alone and len(said(found)[1]) == 4
    warm = dict(temperature=1.5, top_p=0.9, seed=3)
    client.predict(api_name="/chat_clear")
    found = client.predict(message="the cat", **warm, **options)
    expected = python(
        lm, loud[0], ["the cat"], wording=WORDING, n_new=5, sampling=Sampling(1.5, 0.9, 3)
    )
    assert said(found)[1] == expected[0]


def test_what_was_trained_here_answers_in_its_own_wording(client, folder):
    path = folder / "rows.csv"
    path.write_text(f"text,label\n{ROWS}")
    assert len(said(client.predict(message="the cat", n_new=3, api_name="/chat"))) == 1
    *_, files = ask(client, path, methods=METHODS, shots=2, held_out=4, steps=2)
    assert len(files_of(files)) == 2
    found = client.predict(message="the cat", n_new=3, api_name="/chat")
    assert len(said(found)) == 3 and found[1 + BOXES].count("<code>{text} :</code>") == 3
    # The model alone goes on where it was, the adapters begin.
    assert [len(column) for column in said(found)] == [4, 2, 2]
    found = client.predict(message="why", which=["LoRA"], n_new=3, api_name="/chat")
    assert [len(column) for column in said(found)] == [6, 4]
    with pytest.raises(AppError, match="There is no magic here"):
        client.predict(message="why", which=["magic"], api_name="/chat")


def test_starting_over_forgets_everything_and_nobody_hears_another(url, client, loud):
    options = dict(adapters=[handle_file(loud[0])], n_new=3, api_name="/chat")
    client.predict(message="the cat", **options)
    stranger = Client(url, verbose=False)
    assert [len(column) for column in said(stranger.predict(message="a dog", **options))] == [2, 2]
    assert [len(column) for column in said(client.predict(message="a dog", **options))] == [4, 4]
    cleared = client.predict(api_name="/chat_clear")
    assert not any(box["value"] for box in cleared[:BOXES])
    assert [len(column) for column in said(client.predict(message="a dog", **options))] == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"message": " "}, "The message is empty"),
        ({"message": "cat " * 200}, "has 203 tokens; 127 are the most here"),
        ({"message": "a", "adapters": MOST + 1}, f"Here are {MOST + 1} adapters"),
    ],
)
def test_a_message_that_makes_no_sense_is_refused(client, folder, loud, options, message):
    if "adapters" in options:
        copies = [folder / f"copy{n}.safetensors" for n in range(options["adapters"])]
        for copy in copies:
            copy.write_bytes(loud[0].read_bytes())
        options = {**options, "adapters": [handle_file(copy) for copy in copies]}
    client.predict(message="the cat", n_new=2, api_name="/chat")
    with pytest.raises(AppError, match=re.escape(message)):
        client.predict(**options, api_name="/chat")
    found = client.predict(message="why", n_new=2, api_name="/chat")
    assert len(said(found)[0]) == 4  # the refused one left nothing behind


def answering(client, **asked):
    """A message whose answer has begun to come. → its submission"""
    run = client.submit(message="the cat", manner="plain", **asked, api_name="/chat")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not run.outputs():
        time.sleep(0.01)
    return run


def test_a_stopped_answer_is_kept_as_far_as_it_came(client, loud):
    hot = dict(adapters=[handle_file(p) for p in loud], n_new=110, temperature=0.3)
    run = answering(client, **hot)
    with pytest.raises(AppError, match="still being answered"):
        client.predict(message="a dog", api_name="/chat")
    client.predict(api_name="/stop")
    found = run.result(timeout=60)
    assert "stopped" in found[0] and "stopped" in found[1 + BOXES]
    texts = said(found)
    assert all(len(column) == 2 for column in texts)
    again = client.predict(
        message="a dog", manner="plain", **(hot | {"n_new": 1}), api_name="/chat"
    )
    assert [column[:2] for column in said(again)] == texts


def test_starting_over_while_an_answer_comes_ends_it_on_the_status_line_too(client, loud):
    hot = dict(adapters=[handle_file(p) for p in loud], n_new=110, temperature=0.3)
    run = answering(client, **hot)
    client.predict(api_name="/chat_clear")
    assert "Chatting: stopped" in run.result(timeout=60)[0]
    assert len(said(client.predict(message="a dog", n_new=1, api_name="/chat"))[0]) == 2


@pytest.mark.parametrize("wording", [{"colour": 1}, {"template": 5}, "text"])
def test_a_wording_that_cannot_be_read_is_refused_in_a_sentence(loud, wording):
    card = adapters.inspect(loud[0])
    assert wording_of(card) == WORDING
    with pytest.raises(ExplorerError, match="a wording that cannot be read"):
        wording_of(replace(card, training={"wording": wording}))


def test_what_is_no_longer_read_is_said(spec, loud):
    view = ChatView()
    for _ in range(12):
        *_, view = talking(spec, "the cat sat on the mat", [str(loud[0])], view, n_new=8)(Quiet())
    dropped = [column.answer.n_dropped for column in view.columns]
    assert all(dropped) and view.limit == 128
    said = notes(view, over=True)
    for n in dropped:
        assert f"<b>the oldest {n} turns are no longer read</b>, for 128 tokens" in said
    assert all(len(messages(column)) == 24 for column in view.columns)


class Quiet:
    """A job's stop that nobody presses."""

    def note(self, *_):
        pass

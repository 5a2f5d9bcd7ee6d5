"""Train through the app's API, with a tiny model: the page's numbers are Python's."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from safetensors import safe_open

from app import LAUNCH
from explorer import adapters, models
from explorer.data import read, split
from explorer.evaluation import evaluate
from explorer.examples import Wording
from explorer.lm import ModelSpec
from explorer.training import FitConfig, named, train
from explorer.ui.build import build
from explorer.ui.train_tab import LIMIT
from tests.tiny import tiny_checkpoint

ROWS = "".join(
    f"{text} {n},{label}\n"
    for n in ("red", "blue", "old", "new", "hot", "cold")
    for text, label in (("the cat sat", "cat"), ("rain and snow", "rain"))
)
METHODS = ["PMT, elu", "PMT, gelu", "Zero-gate, linear", "LoRA"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


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
def rows(folder):
    path = folder / "rows.csv"
    path.write_text(f"text,label\n{ROWS}")
    return path


def ask(client, rows, **more):
    """→ status, run, rows, outcome, loss, gates, spectrum, files"""
    options = dict(
        methods=METHODS,
        source="my own file",
        file=handle_file(rows),
        shots=3,
        held_out=6,
        steps=4,
        template="{text} :",
        seed=5,
    )
    return client.predict(**{**options, **more}, api_name="/train")


def files_of(answer) -> list[Path]:
    value = answer["value"] if isinstance(answer, dict) else answer
    return [Path(path) for path in value or ()]


@pytest.fixture(scope="module")
def trained(url, rows):
    return ask(Client(url, verbose=False), rows)


def test_the_page_trains_what_python_trains(trained, spec, rows):
    """Bit for bit: the loss in the chart is the loss of the loop."""
    status, _, preview, outcome, loss, gates, spectrum, files = trained
    assert (
        "done" in status and "To learn from: 6" in preview and "Held out to test on: 6" in preview
    )
    curves = {trace["name"]: trace["customdata"] for trace in loss["data"] if "customdata" in trace}
    assert list(curves) == METHODS
    lm = models.load(spec)
    data = split(read(rows), shots=3, held_out=6, seed=5)
    method = named("zero-gate")
    fitting = FitConfig(steps=4, learning_rate=method.learning_rate)
    wording = Wording("{text} :")
    steps = list(train(lm, data, method=method, fitting=fitting, wording=wording, seed=5))
    assert curves["Zero-gate, linear"] == pytest.approx([s.loss for s in steps], rel=1e-5)
    assert loss["data"][1]["x"] == [1, 2, 3, 4]  # a point a step from the first
    found = evaluate(lm, data.held_out, steps[-1].adapter, classes=data.classes, wording=wording)
    row = re.search(r"Zero-gate, linear</th>(.*?)</tr>", outcome)[1]
    assert f"<b>{found.accuracy:.0%}</b>" in row
    assert len(gates["data"][0]["z"]) == 3
    assert gates["layout"]["title"]["text"] == "Zero-gate, linear, step 4<br>gates tanh(g)"
    assert [trace["name"] for trace in spectrum["data"]][:2] == METHODS[:2]
    assert len(files_of(files)) == 4


def test_the_files_say_what_they_are_and_do_the_same_again(trained, client, spec, rows):
    path = next(p for p in files_of(trained[-1]) if p.name.startswith("zero-gate"))
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == adapters.FORMAT
    card = adapters.inspect(path)
    assert card.training["seed"] == 5 and card.training["steps"] == 4
    assert card.training["data_sha256"] == read(rows).sha256
    assert str(rows.parent) not in str(card)
    lm = models.load(spec)
    adapter, _ = adapters.load(path, lm)
    data = split(read(rows), shots=3, held_out=6, seed=5)
    found = evaluate(lm, data.held_out, adapter, classes=data.classes, wording=Wording("{text} :"))
    options = dict(source="my own file", file=handle_file(rows), shots=3, held_out=6, seed=5)
    said = client.predict(adapters=[handle_file(path)], **options, api_name="/try_adapter")[1]
    assert f"Zero-gate, linear</th><td>{found.accuracy:.0%}</td>" in said
    assert "model alone</th>" in said and "zero-gate" in said and "trained for" in said


def test_a_method_has_its_colour_whatever_else_runs(trained, client, rows):
    def colours(loss):
        traces = [trace for trace in loss["data"] if "customdata" in trace]
        return {trace["name"]: (trace["line"]["color"], trace["line"]["dash"]) for trace in traces}

    loss = ask(client, rows, methods=["LoRA", "PMT, gelu"], steps=1)[4]
    among, alone = colours(trained[4]), colours(loss)
    assert alone == {name: among[name] for name in ("LoRA", "PMT, gelu")}
    assert len(set(among.values())) == len(METHODS)
    assert among["PMT, elu"][0] == among["PMT, gelu"][0] != among["LoRA"][0]


def test_the_split_is_shown_before_the_run(client, rows):
    said = client.predict(
        source="my own file", file=handle_file(rows), shots=2, held_out=4, seed=0, api_name="/rows"
    )
    assert "12 rows, 2 classes" in said and "To learn from: 4" in said
    assert "120 rows, 6 classes" in client.predict(source="requests", api_name="/rows")
    # Who has just chosen “my own file” has yet to bring it, and made no mistake.
    assert "appears here" in client.predict(source="my own file", file=None, api_name="/rows")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text,kind\na,b\n", "no label column"),
        ("text,label\na,x\nb,x\n", "Every row"),
        ("text,label\na,x\nb,\n", "no text or no label in line 3"),
        ("text,label\nsch\xf6n,x\nb,y\n", "not UTF-8"),
        ("text,label\n", "no rows"),
    ],
)
def test_bad_rows_are_refused_in_one_sentence(client, tmp_path, content, said):
    path = tmp_path / "bad.csv"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(AppError, match=said) as refused:
        ask(client, path)
    assert "Traceback" not in str(refused.value) and str(tmp_path) not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"methods": []}, "No method is chosen"),
        ({"file": None}, "No file is here yet"),
        ({"template": "Label:"}, "no {text}"),
        ({"source": "/etc/passwd"}, "neither a bundled set nor a name on the hub"),
        ({"source": "somebody/rows"}, "no hub answers"),
        ({"chat": True, "template": "{text}", "shots": 6}, "No rows are left"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(client, rows, options, said):
    with pytest.raises(AppError, match=re.escape(said)):
        ask(client, rows, **options)


def test_a_pickle_is_never_opened(client, tmp_path):
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(b"\x80\x04\x95" + b"x" * 100)
    with pytest.raises(AppError, match="not a safetensors file"):
        client.predict(
            adapters=[handle_file(path)], measure=False, source="requests", api_name="/try_adapter"
        )


def test_nobody_sees_anothers_adapter(url, trained):
    stranger = Client(url, verbose=False)
    with pytest.raises(AppError, match="no adapter yet"):
        stranger.predict(measure=False, source="requests", api_name="/try_adapter")


def test_everything_a_race_can_be_asked_for(client, rows):
    """Equal sizes, several trials, a second set, plain answers: each shows up in what is shown."""
    *_, outcome, loss, _, _, files = ask(
        client,
        rows,
        methods=["Zero-gate, linear", "LoRA"],
        size=1500,
        trials=2,
        other="feelings",
        held_out=4,
        every=2,
    )
    assert "over 2 trials" in outcome and "other rows, before" in outcome and "±" in outcome
    sizes = [
        int(re.search(rf"{name}</th>.*?<td>(\d,\d+)</td>", outcome)[1].replace(",", ""))
        for name in ("Zero-gate, linear", "LoRA")
    ]
    assert all(abs(size - 1500) < 400 for size in sizes)
    held_out = [trace for trace in loss["data"] if trace.get("name", "").endswith("held out")]
    assert [trace["x"] for trace in held_out] == [[1, 2, 4]] * 2
    assert any(trace.get("fill") == "toself" for trace in loss["data"])  # the band
    assert len(files_of(files)) == 2
    *_, outcome, loss, _, _, files = ask(client, rows, methods=["PMT, elu"], kind="answers")
    assert "right, after" in outcome and len(files_of(files)) == 1


def test_a_run_can_be_listed_shown_continued_and_deleted(client, rows):
    first = ask(client, rows, methods=["PMT, elu", "Zero-gate, linear"], steps=3)
    run = first[1]
    table, _ = client.predict(api_name="/runs")
    assert run[:8] in table and "PMT, elu, Zero-gate, linear on rows-rows" in table
    shown = client.predict(run=run, api_name="/run_show")
    assert "done" in shown[0] and shown[3] == first[3]
    assert shown[4]["data"] == first[4]["data"] and shown[5]["data"] == first[5]["data"]
    assert shown[6]["data"] == first[6]["data"]
    more = client.predict(run=run, further=5, api_name="/run_resume")
    assert "5/5" in more[3]
    begun = more[4]["data"][1]["y"]
    assert begun[:3] == first[4]["data"][1]["y"] and len(begun) == 5
    assert run[:8] not in client.predict(run=run, api_name="/run_delete")[0]
    with pytest.raises(AppError, match="cannot be read"):
        client.predict(run=run, api_name="/run_show")
    with pytest.raises(AppError, match="no such run"):
        client.predict(run="../../etc", api_name="/run_show")


def test_the_run_that_is_chosen_stays_chosen_when_the_list_comes_again(client, rows):
    older, newer = (ask(client, rows, methods=["PMT, elu"], steps=1)[1] for _ in range(2))
    assert client.predict(api_name="/runs")[1]["value"] == newer
    assert client.predict(run=older, api_name="/runs")[1]["value"] == older
    assert client.predict(run="deadbeef", api_name="/runs")[1]["value"] == newer


def test_on_a_shared_machine_a_run_has_its_limit_and_is_found_by_who_has_its_id(
    spec, rows, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPACE_ID", "somebody/space")
    demo = build(spec, tmp_path)
    monkeypatch.delenv("SPACE_ID")  # gradio would bind for a Space
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, **LAUNCH)
    first, later = Client(url, verbose=False), Client(url, verbose=False)
    run = ask(first, rows, methods=["PMT, elu"], steps=2)[1]
    with pytest.raises(AppError, match=f"would take 400 steps; here {LIMIT} are allowed"):
        ask(first, rows, methods=["PMT, elu"], steps=400)
    with pytest.raises(AppError, match=f"would take 400 steps; here {LIMIT} are allowed"):
        first.predict(run=run, further=400, api_name="/run_resume")
    with pytest.raises(AppError, match=r"steps must be in \[1, 2000\], not 5000"):
        first.predict(run=run, further=5000, api_name="/run_resume")
    assert run[:8] not in later.predict(api_name="/runs")[0]
    later.predict(run=run, api_name="/run_show")  # the same visitor, whose page was opened anew
    assert run[:8] in later.predict(api_name="/runs")[0]
    assert (
        "PMT, elu"
        in later.predict(message="the cat", which=["PMT, elu"], n_new=2, api_name="/chat")[2][
            "label"
        ]
    )
    demo.close()


def test_stopping_keeps_what_was_learnt(client, rows):
    run = client.submit(
        methods=["PMT, elu"],
        source="my own file",
        file=handle_file(rows),
        shots=3,
        held_out=6,
        steps=400,
        template="{text} :",
        api_name="/train",
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done = run.outputs()
        figure = (done[-1][4] if done else None) or {}
        if len(figure.get("data", [{}] * 2)[1].get("x", ())) > 3:
            break
        time.sleep(0.05)
    client.predict(api_name="/stop")
    status, *_, files = run.result(timeout=60)
    assert "stopped" in status
    (path,) = files_of(files)
    assert 3 < adapters.inspect(path).training["steps"] < 400

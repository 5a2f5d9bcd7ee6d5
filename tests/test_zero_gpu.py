"""ZeroGPU, as far as it goes without a GPU: what crosses over, and the page on the real wrapper.

The page runs in a process of its own under the package spaces, whose scheduler is a small server
here. It forks, pickles and reuses processes as on the platform; what lacks is CUDA.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from explorer import adapters, zero_gpu
from explorer.errors import ExplorerError
from explorer.jobs import Stopped, Worker
from explorer.zero_gpu import CALL, GRACE, ONE_CALL, RUN, elsewhere, run_seconds
from tests.test_jobs import until
from tests.test_train_app import ROWS, files_of
from tests.tiny import tiny_checkpoint

ROOT = Path(__file__).parents[1]
TOKEN = "a.e30.c"  # of a visitor: a JWT that says nothing

# Works, for what crosses over.


def counting(n, pause, stop):
    for i in range(n):
        stop.note(f"at {i}", i / n)
        time.sleep(pause)
        yield i


def last_word(stop):
    try:
        while True:
            time.sleep(0.01)
            yield "step"
    except Stopped:
        yield "kept"


class Odd(Exception):
    """One that pickle cannot make again."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def failing(error, _stop):
    yield 1
    raise error


def here(work, seconds=30):
    return Worker(call=elsewhere).submit(work, "work", seconds=seconds)


def test_notes_come_in_between_and_the_last_item_always():
    job = here(partial(counting, 8, 0.1))
    reports = list(job.follow(min_interval=0))
    assert job.item == 7 and job.state == "done"
    assert reports[-1].state == "done" and reports[-1].fresh and reports[-1].item == 7
    assert any(r.note.startswith("at ") and 0 < r.fraction < 1 for r in reports)
    assert {r.note for r in reports} >= {"Waiting for a GPU"}


def test_an_error_comes_back_whole():
    with pytest.raises(ExplorerError, match="Too long") as raised:
        here(partial(failing, ExplorerError("Too long.", "Shorten it."))).result()
    assert raised.value.hint == "Shorten it."
    with pytest.raises(ValueError, match="wrong rank") as raised:
        here(partial(failing, ValueError("wrong rank"))).result()
    assert "in failing" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Odd: one and two"):
        here(failing_oddly).result()


def failing_oddly(_stop):
    yield 1
    raise Odd("one", "two")


def test_stop_brings_the_last_word():
    job = here(last_word)
    until(lambda: job.item == "step")
    job.stop()
    assert job.result() == "kept" and job.state == "stopped"


def test_a_job_stopped_in_the_middle_of_a_step_ends_there():
    job = here(partial(noting, 1000))
    until(lambda: job._note[0] == "still")
    job.stop()
    until(lambda: job.over)
    assert job.state == "stopped" and job.item is None


def noting(n, stop):
    for _ in range(n):
        stop.note("still")
        time.sleep(0.01)
    yield n


def test_when_its_time_is_up_a_job_with_a_last_word_keeps_what_there_is():
    job = here(last_word, seconds=0.5)
    assert job.result() == "kept" and job.state == "stopped"
    assert "seconds of a call are over" in job._note[0]


def test_when_its_time_is_up_a_job_without_one_says_that_it_takes_too_long():
    job = here(partial(counting, 1000, 0.01), seconds=0.5)
    with pytest.raises(ExplorerError, match="takes longer than a call"):
        job.result()
    assert job.item > 0


def test_what_the_platform_closes_is_told_to_end_and_is_waited_for(tmp_path):
    leash, ended = tmp_path / "leash", tmp_path / "ended"
    leash.touch()
    call = zero_gpu._call(zero_gpu._packed(partial(leaving, str(ended))), 30, str(leash))
    next(call)
    call.close()
    assert ended.read_text() == "kept"


def leaving(path, _stop):
    try:
        while True:
            time.sleep(0.01)
            yield 0
    except Stopped:
        Path(path).write_text("kept")


def test_tensors_cross_over_without_their_graph_and_what_they_look_into():
    leaf = torch.randn(3, 4, requires_grad=True)
    large = torch.randn(1000, 1000)
    sent = {"leaf": leaf, "result": leaf * 2, "view": large[:2, :3], "layer": torch.nn.Linear(4, 3)}
    packed = zero_gpu._packed(sent | {"again": sent["layer"].weight})
    assert len(packed) < 10_000
    got = pickle.loads(packed)
    assert torch.equal(got["result"], leaf * 2) and not got["result"].requires_grad
    assert torch.equal(got["view"], large[:2, :3])
    assert isinstance(got["layer"].weight, torch.nn.Parameter) and got["layer"].weight.requires_grad
    assert got["again"] is got["layer"].weight


def test_a_run_asks_for_as_much_time_as_it_may_need():
    assert run_seconds(10, 1) < run_seconds(100, 2) < run_seconds(10_000, 4) == RUN
    assert f"at most {RUN} seconds" in ONE_CALL


# The page on the real wrapper.


class Scheduler(ThreadingHTTPServer):
    """What answers the wrapper on the platform: lends GPUs that are free, and writes down whose."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Desk)
        self.calls: list[tuple[str, dict[str, str]]] = []
        self.lent: dict[str, int] = {}  # by token
        self.used: set[int] = set()

    def named(self, name: str) -> list[dict[str, str]]:
        return [query for path, query in self.calls if path == name]

    def answer(self, path: str, query: dict[str, str]) -> dict:
        self.calls.append((path, query))
        if path == "/release":
            self.used.add(self.lent.pop(query["allowToken"], 0))
        if path != "/schedule":
            return {}
        index = min(set(range(9)) - set(self.lent.values()))
        token = f"token-{len(self.calls)}"
        self.lent[token] = index
        return {
            "idle": index in self.used,
            "nvidiaIndex": index,
            "nvidiaUUID": f"GPU-{index}",
            "allowToken": token,
        }


class _Desk(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = urllib.parse.urlparse(self.path)
        query = dict(urllib.parse.parse_qsl(asked.query))
        body = json.dumps(self.server.answer(asked.path, query)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def served(server):
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()


@pytest.fixture(scope="module")
def scheduler():
    with served(Scheduler()) as server:
        yield server


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    path.write_text(f"text,label\n{ROWS}")
    return path


@pytest.fixture(scope="module")
def url(scheduler, tmp_path_factory):
    folder = tmp_path_factory.mktemp("space")
    model = tiny_checkpoint(folder / "model", "qwen3")
    (folder / "cgroup").write_text("0::/space\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model", model, "--device", "cpu", "--data", folder / "data", "--port", port]
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.space", *map(str, options)],
        cwd=ROOT,
        env={
            **os.environ,
            "SPACES_ZERO_GPU": "true",
            "SPACES_ZERO_DEVICE_API_URL": f"http://127.0.0.1:{scheduler.server_port}",
            "ZEROGPU_PROC_SELF_CGROUP_PATH": str(folder / "cgroup"),
            "ZEROGPU_OFFLOAD_DIR": str(folder / "tensors"),
            "NO_PROXY": "127.0.0.1,localhost",
            "OMP_NUM_THREADS": "1",
        },
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # its forks end with it
    )
    try:
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            said = (folder / "log").read_text()
            assert process.poll() is None and time.monotonic() < deadline, said[-3000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


@pytest.fixture
def client(url):
    return Client(url, verbose=False, headers={"x-ip-token": TOKEN})


def looked(client, **more):
    return client.predict(**{"prompt": "the cat sat on the mat .", **more}, api_name="/look")


def forced(client, **more):
    asked = {
        "wanted": "the red fish ate snow .",
        "prompt": "where is the cat ?",
        "others": "a dog ran",
        "chat": False,
        "margin": None,
    }
    return client.predict(**{**asked, **more}, api_name="/force")


def trained(client, rows, **more):
    asked = {
        "methods": ["PMT, elu", "LoRA"],
        "source": "my own file",
        "file": handle_file(rows),
        "shots": 3,
        "held_out": 6,
        "steps": 4,
        "template": "{text} :",
    }
    return client.submit(**{**asked, **more}, api_name="/train")


def test_opening_the_page_takes_nobodys_time(client, scheduler):
    assert scheduler.named("/startup-report") == [{}]
    assert "loaded when asked" in str(client.config)
    assert ONE_CALL in str(client.config)
    assert scheduler.named("/schedule") == []


def test_a_look_is_one_call_in_the_visitors_name(client, scheduler):
    before = len(scheduler.named("/schedule"))
    status, *_ = looked(client, n_new=3)
    assert "Looking: done" in status
    (call,) = scheduler.named("/schedule")[before:]
    assert call["token"] == TOKEN and int(call["durationSeconds"]) == CALL + GRACE
    assert len(scheduler.named("/release")) == len(scheduler.named("/schedule"))


def test_two_states_are_read_in_one_call_and_both_are_shown(client, scheduler):
    before = len(scheduler.named("/schedule"))
    job = client.submit(
        prompt_b="a dog ran by the road", prompt="the cat sat", n_new=0, api_name="/look_pair"
    )
    assert "both: done" in job.result(timeout=60)[0]
    assert len(scheduler.named("/schedule")) == before + 1
    drawn = {
        place
        for frame in job.outputs()
        for place, one in enumerate(frame)
        if isinstance(one, str) and one.startswith("{") and json.loads(one).get("data")
    }
    assert len(drawn) >= 4  # the map, A, B and what changes


def test_a_forcing_is_proved_there_and_kept_here(client, scheduler):
    status, _, with_it, card, numbers, file = forced(client)
    assert "done" in status and "✓ Forced" in card and "the red fish ate snow ." in with_it
    assert numbers["forced"] and numbers["first_miss"] is None
    # What was solved in one call goes along to the next.
    assert "1 of 1 forced" in client.predict(others="a dog ran", api_name="/force_try")[1]
    saved = file["value"] if isinstance(file, dict) else file
    again = client.predict(path=handle_file(saved), api_name="/force_open")
    assert "✓ Forced" in again[3] and again[4]["said"] == numbers["said"]


def test_calls_that_follow_one_another_share_a_process_and_its_model(client, scheduler):
    looked(client)
    started = len(scheduler.named("/allow"))
    first, second = looked(client), looked(client)
    assert "done" in first[0] and "done" in second[0]
    assert started == len(scheduler.named("/allow")) == 1
    assert "loaded in" not in client.predict(api_name="/load")[1]  # it was here already


def test_an_error_is_a_sentence_with_its_hint(client):
    with pytest.raises(AppError, match=r"The prompt is empty\. Type a few words"):
        looked(client, prompt=" ")
    with pytest.raises(AppError, match="neither a preset, a hub id"):
        client.predict(name="no such model", api_name="/load")
    assert "done" in looked(client)[0]


def test_a_run_is_one_call_and_leaves_its_adapters_here(client, scheduler, rows):
    before = len(scheduler.named("/schedule"))
    status, _, _, outcome, loss, _, _, files = trained(client, rows).result(timeout=120)
    assert "Training: done" in status and "right" in outcome
    assert loss["data"][1]["x"] == [1, 2, 3, 4]
    (call,) = scheduler.named("/schedule")[before:]
    assert int(call["durationSeconds"]) == pytest.approx(run_seconds(8, 2) + GRACE, abs=1)
    paths = files_of(files)
    assert len(paths) == 2 and all(adapters.inspect(p).training["steps"] == 4 for p in paths)
    (status, tried) = client.predict(measure=False, source="requests", api_name="/try_adapter")
    assert "done" in status and "PMT, elu" in tried


def steps_of(job) -> int:
    done = job.outputs()
    figure = (done[-1][4] if done else None) or {}
    return len(figure.get("data", [{}] * 2)[1].get("x", ()))


def test_stop_ends_a_run_between_steps_and_keeps_what_it_learnt(client, rows):
    job = trained(client, rows, methods=["PMT, elu"], steps=400)
    until_slow(lambda: steps_of(job) > 3)
    client.predict(api_name="/stop")
    status, *_, files = job.result(timeout=60)
    assert "Training: stopped" in status
    (path,) = files_of(files)
    assert 3 < adapters.inspect(path).training["steps"] < 400


def until_slow(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_two_visitors_do_not_wait_for_one_another(client, url, scheduler, rows):
    job = trained(client, rows, methods=["PMT, elu"], steps=400)
    until_slow(lambda: steps_of(job) > 1)
    assert "done" in looked(Client(url, verbose=False))[0]
    assert not job.done() and "token" not in scheduler.named("/schedule")[-1]
    client.predict(api_name="/stop")
    assert "stopped" in job.result(timeout=60)[0]


def test_a_process_that_the_platform_kills_leaves_a_run_that_goes_on(client, scheduler, rows):
    job = trained(client, rows, methods=["PMT, elu"], steps=40, shots=4)
    until_slow(lambda: steps_of(job) > 1)
    run = job.outputs()[-1][1]
    until_slow(lambda: len(scheduler.lent) == 1)  # what was stopped before is handed back
    (lent,) = scheduler.lent.values()
    for call in scheduler.named("/allow"):
        os.kill(int(call["pid"]), signal.SIGKILL)
    with pytest.raises(AppError, match="GPU task aborted"):
        job.result(timeout=60)
    assert lent in (0, 1)
    assert "interrupted" in client.predict(run=run, api_name="/run_show")[0]
    status, *_, loss, _, _, files = client.predict(run=run, api_name="/run_resume")
    assert "Training: done" in status and len(loss["data"][1]["x"]) == 40
    assert len(files_of(files)) == 1

"""The model has one owner, whatever the page does."""

import contextvars
import threading
import time

import pytest
import torch

from explorer.errors import ExplorerError
from explorer.jobs import Stopped, Worker

SOON = 5.0


def counting(n, log=None, name="", pause=0.01):
    def work(_stop):
        for i in range(n):
            if log is not None:
                log.append((name, i, threading.current_thread().name))
            time.sleep(pause)
            yield i

    return work


def gated():
    """A job that waits, and the event that lets it go on."""
    go = threading.Event()

    def work(stop):
        yield "started"
        while not go.wait(0.01) and not stop.is_set():
            pass
        yield "end"

    return work, go


def until(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def test_jobs_run_in_order_on_one_thread():
    worker, log = Worker(), []
    jobs = [worker.submit(counting(3, log, name), name) for name in "abc"]
    assert [job.result() for job in jobs] == [2, 2, 2]
    assert [name for name, _, _ in log] == list("aaabbbccc")
    assert len({thread for *_, thread in log}) == 1
    assert {job.state for job in jobs} == {"done"}


def test_a_long_job_lets_those_in_that_wait_for_the_same_model():
    worker, log, go = Worker(per_owner=9), [], threading.Event()

    def training(stop):
        go.wait(SOON)
        for i in range(2):
            stop.give_way("small")
            log.append(("training", i, threading.current_thread().name))
            yield i

    def failing(stop):
        stop.give_way("small")  # what was let in lets nobody in
        raise ValueError("of its own")
        yield

    long = worker.submit(training, "long", detached=True, model="small")
    until(lambda: long.state == "running")
    other = worker.submit(counting(1, log, "other"), "other", model="large")
    nameless = worker.submit(counting(1, log, "nameless"), "nameless")
    second = worker.submit(counting(1, log, "second"), "second", detached=True, model="small")
    wrong = worker.submit(failing, "wrong", model="small")
    away = worker.submit(counting(1, log, "away"), "away", owner="left", model="small")
    look = worker.submit(counting(2, log, "look"), "look", model="small")
    away.stop()
    assert look.ahead == 5
    go.set()
    with pytest.raises(ValueError, match="of its own"):
        wrong.result()
    for job in (look, long, other, nameless, second):
        job.result()
        assert job.state == "done"
    order = ["look", "look", "training", "training", "other", "nameless", "second"]
    assert [name for name, *_ in log] == order
    assert len({thread for *_, thread in log}) == 1


def test_the_last_item_is_never_dropped_and_fast_ones_are():
    items = list(Worker().submit(counting(200, pause=0.002), "fast").watch(min_interval=0.1))
    assert items[-1] == 199
    assert len(items) < 50
    assert items == sorted(items)


def test_a_job_whose_watcher_leaves_ends_within_one_step_before_the_next_begins():
    worker, log = Worker(), []
    watcher = worker.submit(counting(1000, log, "a"), "a").watch(0)
    next(watcher)
    second = worker.submit(counting(2, log, "b"), "b")
    watcher.close()
    steps = len(log)
    second.result()
    names = [name for name, _, _ in log]
    assert names.index("b") <= steps + 1
    assert "a" not in names[names.index("b") :]


def test_a_detached_job_goes_on_and_can_be_watched_again_by_several():
    worker = Worker()
    job = worker.submit(counting(30), "train", detached=True)
    watcher = job.watch(0)
    next(watcher)
    watcher.close()
    again = worker.job(job.id)
    assert list(again.watch(0))[-1] == list(again.watch(0))[-1] == 29
    assert job.state == "done"


def test_a_tied_job_goes_on_while_somebody_watches():
    job = Worker().submit(counting(30), "look")
    first, second = job.watch(0), job.watch(0)
    next(first), next(second)
    first.close()
    assert list(second)[-1] == 29


def test_stop_takes_effect_while_waiting():
    worker, log = Worker(), []
    work, go = gated()
    running = worker.submit(work, "first")
    waiting = worker.submit(counting(5, log), "second", owner="me")
    last = worker.submit(counting(1, log), "third", owner="you")
    until(lambda: running.state == "running")
    assert (waiting.ahead, last.ahead) == (1, 2)
    assert worker.stop("me") == 1
    assert (waiting.state, last.ahead) == ("stopped", 1)
    assert list(waiting.watch()) == []
    go.set()
    last.result()
    assert len(log) == 1


def test_stop_reaches_a_long_step_through_its_event():
    work, _ = gated()
    job = Worker().submit(work, "long")
    until(lambda: job.item == "started")
    job.stop()
    until(lambda: job.over)
    assert job.state == "stopped"


def test_a_stopped_job_may_have_a_last_word():
    def work(_stop):
        try:
            while True:
                time.sleep(0.005)
                yield "step"
        except Stopped:
            yield "summary"

    job = Worker().submit(work, "train", detached=True)
    until(lambda: job.item == "step")
    job.stop()
    assert job.result() == "summary"
    assert job.state == "stopped"


def test_an_error_reaches_every_watcher_and_the_next_job_runs():
    def work(_stop):
        yield 1
        raise ExplorerError("Too long.", "Shorten it.")

    worker = Worker()
    job = worker.submit(work, "broken")
    for _ in range(2):
        with pytest.raises(ExplorerError, match="Too long"):
            job.result()
    assert (job.state, job.item) == ("failed", 1)
    assert worker.submit(counting(2), "next").result() == 1


def test_grad_mode_does_not_leak_from_a_job_that_was_stopped():
    def silent(_stop):
        with torch.no_grad():
            while True:
                assert not torch.is_grad_enabled()
                yield 0

    def ask(_stop):
        yield torch.is_grad_enabled()

    worker = Worker()
    watcher = worker.submit(silent, "silent").watch(0)
    next(watcher)
    asked = worker.submit(ask, "ask")
    watcher.close()
    assert asked.result() is True
    assert torch.is_grad_enabled()


def test_a_full_queue_says_so():
    worker = Worker(limit=3, per_owner=2)
    work, go = gated()
    running = worker.submit(work, "first", owner="a")
    until(lambda: running.state == "running")
    for _ in range(2):
        worker.submit(counting(1), "more", owner="a")
    with pytest.raises(ExplorerError, match="2 of your requests"):
        worker.submit(counting(1), "more", owner="a")
    worker.submit(counting(1), "more", owner="b")
    with pytest.raises(ExplorerError, match="busy: 3 requests"):
        worker.submit(counting(1), "more", owner="c")
    go.set()


def test_one_owner_cannot_stop_or_list_the_jobs_of_another():
    worker = Worker()
    work, _ = gated()
    mine = worker.submit(work, "x", owner="me")
    theirs = worker.submit(counting(3), "x", owner="you")
    assert worker.jobs_of("me") == [mine]
    assert worker.stop("nobody") == 0
    worker.stop("me")
    assert theirs.result() == 2
    assert theirs.state == "done"


def test_finished_jobs_are_forgotten_after_a_while():
    worker = Worker()
    first = worker.submit(counting(1, pause=0), "first")
    first.result()
    for _ in range(100):
        worker.submit(counting(1, pause=0), "x").result()
    assert worker.job(first.id) is None


def test_where_the_model_is_elsewhere_jobs_do_not_wait_for_one_another():
    asked, visitor = [], contextvars.ContextVar("visitor", default="nobody")

    def call(work, seconds):
        def elsewhere(stop):
            asked.append((seconds, visitor.get()))
            yield from work(stop)

        return elsewhere

    worker = Worker(limit=3, per_owner=2, call=call)
    work, go = gated()
    visitor.set("me")
    running = [worker.submit(work, "a", owner="me", seconds=3) for _ in range(2)]
    visitor.set("you")
    assert worker.submit(counting(3), "b", owner="you", seconds=5).result() == 2
    with pytest.raises(ExplorerError, match="2 of your requests"):
        worker.submit(counting(1), "c", owner="me", seconds=3)
    assert [job.state for job in running] == ["running"] * 2
    go.set()
    assert [job.result() for job in running] == ["end"] * 2
    assert worker.submit(counting(1), "d", owner="me").result() == 0
    assert sorted(asked) == [(3, "me"), (3, "me"), (5, "you")]  # and "d" needed no model


def test_a_job_says_what_it_is_doing_and_may_be_stopped_inside_a_step():
    go = threading.Event()

    def work(stop):
        stop.note("Loading", 0.5)
        go.wait(SOON)
        while True:
            stop.note("Still loading")
            time.sleep(0.005)
        yield

    job = Worker().submit(work, "load")
    reports = job.follow(min_interval=0)
    assert next(r for r in reports if r.note).fraction == 0.5
    go.set()
    job.stop()
    assert [r.state for r in reports][-1] == "stopped"

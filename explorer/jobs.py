"""One thread owns the model: everything that touches it is a job, and jobs run in order.

A page may cancel, close or reload at any moment, and Gradio may step a handler on any thread.
None of this reaches the model, because handlers never touch it: they submit a job and relay what
it says. A job's work is a generator of one argument, stepped by the worker's thread alone, so what
is bound to a thread (`torch.no_grad`, an RLock) stays with it and is unwound there. It is a value,
a module's function and what that takes, so that it can be pickled and run in another process:

    def _looking(spec, prompt, stop):
        lm = models.load(spec, stop.note)      # a line for the status, and the place to stop
        yield look(lm, prompt)

    job = worker.submit(partial(_looking, spec, prompt), "Look", owner=session_id)
    for report in job.follow():
        if report.fresh:
            draw(report.item)

A *tied* job ends when its last watcher goes away (tab closed, event cancelled). A *detached* one
(a training run) goes on and can be watched again later: `worker.job(job_id).follow()`. A detached
job takes minutes: where the model is its plain self, it says `stop.give_way(spec)`, and the tied
jobs that wait for the same model run there, inside. A class is not held up by one student's run.

Where the model is in other processes (see `zero_gpu`), a job is only waited for here, each in a
thread of its own, and which of them runs first is decided elsewhere.
"""

from __future__ import annotations

import atexit
import collections
import contextvars
import logging
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from explorer.errors import ExplorerError

log = logging.getLogger(__name__)

State = Literal["waiting", "running", "done", "stopped", "failed"]

KEPT = 16  # finished jobs that can still be watched, with the last thing they gave


class Stopped(BaseException):
    """Thrown into a job at its `yield` when it shall end.

    A job with a last word to say catches it and yields once more; every other job unwinds. It is
    no `Exception`, so that a job that handles errors does not swallow it by accident.
    """


class Stop(threading.Event):
    """What a job is handed: whether it shall end, and a line for whoever waits.

    answered: whether the job had a last word to say when it was told to end
    give_way: run what waits for the same model, given by its spec, and come back; to be called by
              long jobs, with nothing applied to the model and no lock held
    """

    answered = False

    def __init__(
        self,
        tell: Callable[[str, float | None], None] = lambda *_: None,
        give_way: Callable[[Hashable], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._tell = tell
        self.give_way = give_way

    def note(self, text: str, fraction: float | None = None) -> None:
        """Say what is happening, and end here if asked to. fraction: of it done, in [0, 1]"""
        if self.is_set():
            raise Stopped
        self._tell(text, fraction)


Work = Callable[[Stop], Iterator[Any]]
# Of a work and the seconds it may take: the work that runs it elsewhere.
Call = Callable[[Work, float], Work]


@dataclass(frozen=True)
class Report:
    """How a job stands.

    ahead: jobs that run before this one; 0 once it runs
    seconds: since it began to run
    note, fraction: what it says it is doing, and how much of that is done
    item: the latest item; fresh: whether it is new since the last report of the same watcher
    """

    state: State
    ahead: int
    seconds: float
    note: str = ""
    fraction: float | None = None
    item: Any = None
    fresh: bool = False


class Job:
    """One piece of work on the model, from submission to its end. Made by `Worker.submit`."""

    def __init__(
        self,
        worker: Worker,
        work: Work,
        title: str,
        owner: str,
        detached: bool,
        model: Hashable = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.title = title
        self.owner = owner
        self.detached = detached
        self.model = model
        self.state: State = "waiting"
        self.item: Any = None
        self.error: BaseException | None = None
        self._worker = worker
        self._work: Work | None = work
        self._count = 0
        self._watchers = 0
        self._began = self._ended = 0.0
        self._note: tuple[str, float | None] = ("", None)
        self._stop = Stop(self._say, worker.let_in)
        self._news = threading.Condition()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state in ("done", "stopped", "failed")

    @property
    def ahead(self) -> int:
        """How many jobs run before this one."""
        return self._worker.ahead_of(self)

    @property
    def seconds(self) -> float:
        """How long it has been running, or ran."""
        if not self._began:
            return 0.0
        return (self._ended or time.monotonic()) - self._began

    def stop(self) -> None:
        """End the job: at once if it waits, at the end of its current step if it runs.

        Cheap, because Gradio closes a handler on the thread of its event loop.
        """
        self._stop.set()
        if self._worker.withdraw(self):
            self._end("stopped")

    def follow(self, min_interval: float = 0.25, heartbeat: float = 1.0) -> Iterator[Report]:
        """Report on the job until it ends: fresh items at most every `min_interval` seconds.

        Items that come faster are dropped, the last one never is. Without news there is a report
        every `heartbeat` seconds, for a clock. Several watchers may follow one job, and a new one
        starts with the latest item. A failed job raises its error at the end.
        """
        with self._news:
            self._watchers += 1
        try:
            yield from self._reports(min_interval, heartbeat)
        finally:
            with self._news:
                self._watchers -= 1
                alone = self._watchers == 0
            if alone and not self.detached and not self.over:
                self.stop()
        if self.error is not None:
            raise self.error

    def watch(self, min_interval: float = 0.25) -> Iterator[Any]:
        """The fresh items of `follow`, without the clock."""
        for report in self.follow(min_interval):
            if report.fresh:
                yield report.item

    def result(self) -> Any:
        """The last item, once the job is over."""
        item = None
        for item in self.watch():  # noqa: B007 (the last one counts)
            pass
        return item

    def _reports(self, min_interval: float, heartbeat: float) -> Iterator[Report]:
        seen, told, last = 0, 0.0, None
        while True:
            with self._news:
                while True:
                    now = time.monotonic()
                    standing = (self.state, self.ahead, self._note)
                    new = self._count > seen or standing != last
                    due = told + (min_interval if new else heartbeat)
                    if self.over or standing[:2] != (last or standing)[:2] or now >= due:
                        break
                    self._news.wait(due - now)
                report = self._report(fresh=self._count > seen)
                seen, over = self._count, self.over
            last, told = standing, now
            yield report
            if over:
                return

    def _report(self, *, fresh: bool) -> Report:
        note, fraction = self._note
        return Report(self.state, self.ahead, self.seconds, note, fraction, self.item, fresh)

    def _run(self) -> None:
        """Step the work to its end. Only the thread that owns the model comes here."""
        work, self._work = self._work, None  # what it holds is freed when it ends
        self._began = time.monotonic()
        self._tell("running")
        try:
            for item in steps(work, self._stop):
                self._keep(item)
            self._end("stopped" if self._stop.is_set() else "done")
        except Stopped:
            self._end("stopped")
        except BaseException as error:  # handed on to whoever watches
            if not isinstance(error, ExplorerError) and not self._watchers:
                log.exception("%s failed, and nobody was watching", self.title)
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            self.error = error
            self._end("failed")

    def _keep(self, item: Any) -> None:
        with self._news:
            self.item = item
            self._count += 1
            self._news.notify_all()

    def _say(self, text: str, fraction: float | None) -> None:
        with self._news:
            self._note = (text, fraction)
            self._news.notify_all()

    def _tell(self, state: State) -> None:
        with self._news:
            self.state = state
            self._news.notify_all()

    def _end(self, state: State) -> None:
        self._work = None
        self._ended = time.monotonic()
        self._tell(state)


class Worker:
    """The queue and the one thread behind it.

    limit: jobs that may wait altogether; per_owner: jobs one visitor may have waiting
    call: where the model is not in this process, how a job gets to it. Then every job has a thread,
          and those that run count as waiting.
    """

    def __init__(self, limit: int = 24, per_owner: int = 4, call: Call | None = None) -> None:
        self._limit, self._per_owner, self._call = limit, per_owner, call
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: Job | None = None
        self._inside: Job | None = None  # what that one gave way to
        self._closed = False
        self._jobs: collections.OrderedDict[str, Job] = collections.OrderedDict()
        self._change = threading.Condition()
        if call is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="model")
            self._thread.start()
            atexit.register(self._close)

    def submit(
        self,
        work: Work,
        title: str,
        *,
        owner: str = "",
        detached: bool = False,
        model: Hashable = None,
        seconds: float = 0,
    ) -> Job:
        """Queue a job.

        model: spec of the only model it touches; then it may run while a longer job gives way
        seconds: it may take where the model is in other processes; 0: it needs no model
        """
        if self._call is not None and seconds:
            work = self._call(work, seconds)
        job = Job(self, work, title, owner, detached, model)
        with self._change:
            waiting = self._waiting
            if self._call is not None:
                waiting = [other for other in self._jobs.values() if not other.over]
            mine = sum(other.owner == owner for other in waiting)
            if mine >= self._per_owner:
                raise ExplorerError(
                    f"{mine} of your requests are waiting already.",
                    "Let one finish, or stop it, and try again.",
                )
            if len(waiting) >= self._limit:
                raise ExplorerError(
                    f"The model is busy: {len(waiting)} requests are waiting.",
                    "Try again in a minute.",
                )
            self._jobs[job.id] = job
            self._forget()
            if self._call is None:
                self._waiting.append(job)
                self._change.notify_all()
        if self._call is not None:
            # In the context of the visitor's request, by which ZeroGPU knows whose time it is.
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(job._run,), daemon=True, name=title).start()
        return job

    def job(self, job_id: str) -> Job | None:
        """A job by its id, if it is still known. Its id is the right to see it."""
        return self._jobs.get(job_id)

    def jobs_of(self, owner: str) -> list[Job]:
        """The jobs of one visitor that wait or run, oldest first."""
        with self._change:
            return [job for job in self._jobs.values() if job.owner == owner and not job.over]

    def stop(self, owner: str, title: str | None = None) -> int:
        """Stop a visitor's jobs, or only those with that title. → how many"""
        mine = [job for job in self.jobs_of(owner) if title in (None, job.title)]
        for job in mine:
            job.stop()
        return len(mine)

    def ahead_of(self, job: Job) -> int:
        with self._change:
            if job not in self._waiting:
                return 0
            return self._waiting.index(job) + (self._running is not None)

    def withdraw(self, job: Job) -> bool:
        """Take a waiting job out of the queue. → whether it was still there"""
        with self._change:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    def let_in(self, model: Hashable) -> None:
        """Run the tied jobs that wait for this model now. Only from inside the job that runs.

        Those that come meanwhile wait for the next time, so that the long job gets on as well.
        """
        with self._change:
            if self._inside is not None:  # one level is enough
                return
            short = [job for job in self._waiting if not job.detached and job.model == model]
        for job in short:
            with self._change:
                if self._closed or job not in self._waiting:  # stopped meanwhile
                    continue
                self._waiting.remove(job)
                self._inside = job
            job._run()
            with self._change:
                self._inside = None

    def _close(self) -> None:
        """A thread inside torch when the interpreter goes would abort the process."""
        with self._change:
            self._closed = True
            running = [job for job in (self._inside, self._running) if job is not None]
            self._change.notify_all()
        for job in running:
            job.stop()
        self._thread.join(timeout=10)

    def _serve(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
                job = self._running = self._waiting.popleft()
            job._run()
            with self._change:
                self._running = None
            del job  # or its items would live until the next one comes

    def _forget(self) -> None:
        finished = [key for key, job in self._jobs.items() if job.over]
        for key in finished[: max(0, len(self._jobs) - KEPT)]:
            del self._jobs[key]


def steps(work: Work, stop: Stop) -> Iterator[Any]:
    """A work's items; once stop is set, `Stopped` is thrown into it, and its last word comes."""
    if stop.is_set():
        raise Stopped
    items = iter(work(stop))
    try:
        for item in items:
            yield item
            if stop.is_set():
                yield from _last_words(items, stop)
                return
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


def _last_words(items: Iterator[Any], stop: Stop) -> Iterator[Any]:
    throw = getattr(items, "throw", None)
    if throw is None:
        return
    try:
        word = throw(Stopped())
    except (Stopped, StopIteration):
        return
    stop.answered = True
    yield word

"""On ZeroGPU the GPU is lent by the call: another process, so many seconds, and it is gone.

`spaces.GPU` forks a process for the function it decorates, hands it its arguments through a pipe,
and hands back what it yields. Everything that a page submits runs in one such function, `_call`;
its work is a value (see `jobs`), so it travels. What the wrapper leaves open is closed here:

- Work and news travel as bytes, pickled here. On the way tensors leave the GPU and their graph: one
  on the GPU cannot cross, and one with a history would kill the process that sends it.
- The wrapper hands on of an error its class's name; here the error itself comes back as news, and
  is raised where the job is followed, with its hint.
- Notes come as news, in between; of items only the latest, a few times a second.
- The wrapper can stop a generator only by closing it, and then its last word is lost. Here both
  sides see a file, the leash: when it is gone, the work ends as it does elsewhere.
- At the end of its time the platform kills the process. Here the work is stopped before.

A process holds the model that it has loaded, and none that another one has: the first call of a new
process starts CUDA and reads the weights from disk, in the visitor's time (SmolLM2-135M without
CUDA, on two busy cores: 3 s). The platform keeps a process for the next call where it can, of the
same or another visitor; then the model is there already (0.1 s). Nothing else may be left behind in
it, and nothing that it knows is known here: results are in the items, or on the disk that all
processes share. Files are fetched before, where no GPU waits for them (`models.fetch`).

A call that still waits for a GPU cannot be stopped; it ends as soon as it has one.

Without the package, or elsewhere, `_call` is the plain function that it is.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from explorer.errors import ExplorerError
from explorer.jobs import Stop, Stopped, Work, steps

ON_ZERO_GPU = os.environ.get("SPACES_ZERO_GPU", "").lower() in {"1", "t", "true"}
CALL = 45  # seconds that a call may take, …
RUN = 90  # … and a training run, which is one call
GRACE = 15  # seconds asked for on top: the process starts, and says its last word
PACE = 0.2  # seconds between news
ONE_CALL = (
    f"On this Space a run is one call of at most {RUN} seconds; it stops there and keeps what it "
    "learnt."
)


def run_seconds(steps: int, parts: int) -> float:
    """A guess of what a training run takes, as little of a visitor's time is asked for as will do.

    steps: of all methods and trials together    parts: methods × trials, each tested afterwards
    """
    return min(RUN, 20 + 8 * parts + 0.25 * steps)


def elsewhere(work: Work, seconds: float) -> Work:
    """→ the same work in a process that has the GPU, for at most so many seconds"""
    return partial(_relayed, work, seconds)


@dataclass(frozen=True)
class _News:
    """What is new in the other process.

    note: a line and how much of it is done, or None    fresh: whether there is another item
    late: whether its time was up before it was done    over: whether this is all    error: why
    """

    note: tuple[str, float | None] | None = None
    item: Any = None
    fresh: bool = False
    late: bool = False
    over: bool = False
    error: BaseException | None = None


def _relayed(work: Work, seconds: float, stop: Stop) -> Iterator[Any]:
    """Here: relay what the other process says, and cut its leash when the job shall end."""
    packed, news, last = _packed(work), _News(), _News()
    with (
        tempfile.NamedTemporaryFile(prefix="prefix-explorer-") as leash,
        closing(_call(packed, seconds, leash.name)) as calls,
    ):
        stop.note("Waiting for a GPU")
        for call in calls:
            news = pickle.loads(call)
            last = news if news.fresh else last
            try:
                if news.note is not None:
                    stop.note(*news.note)
                if news.fresh and not news.over and not stop.is_set():
                    yield news.item
            except Stopped:
                pass
            if stop.is_set():
                leash.close()
    if news.late and news.error is None and not stop.is_set():
        stop.note(f"the {seconds:.0f} seconds of a call are over")
        stop.set()
    if last.fresh:  # once more if need be: what a watcher sees at the end is whole
        yield last.item
    if news.error is not None:
        raise news.error


class _Leashed(Stop):
    """The stop of the other process: set as well when the leash is gone, or the time is up."""

    def __init__(self, seconds: float, leash: str) -> None:
        super().__init__(lambda *note: self._say(note=note))
        self._ends, self._leash = time.monotonic() + seconds, Path(leash)
        self._late = False
        self._news: dict[str, Any] = {}
        self._lock = threading.Lock()

    def is_set(self) -> bool:
        if not super().is_set():
            self._late = time.monotonic() > self._ends
            if self._late or not self._leash.exists():
                self.set()
        return super().is_set()

    def news(self) -> bytes:
        """What came since the last time."""
        with self._lock:
            news, self._news = self._news, {}
        return _packed(_News(**news))

    def run(self, packed: bytes, over: threading.Event) -> None:
        """The work from its start to its end, in one thread."""
        try:
            for item in steps(pickle.loads(packed), self):
                self._say(item=item, fresh=True)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 (raised again on the other side)
            self._say(error=_sendable(error))
        finally:
            if self._late:
                self._say(late=True, **({} if self.answered else {"error": _too_long()}))
            self._say(over=True)
            over.set()

    def _say(self, **news: Any) -> None:
        with self._lock:
            self._news |= news


def _too_long() -> ExplorerError:
    return ExplorerError(
        "This takes longer than a call may take on this Space.",
        "Ask for less at once, or run the app on a machine of your own.",
    )


def _sendable(error: BaseException) -> BaseException:
    """The error, with where it happened; another one that says the same if it cannot travel."""
    if isinstance(error, ExplorerError):
        return error
    story = "".join(traceback.format_exception(error))
    error.add_note(story)
    try:
        return pickle.loads(_packed(error.with_traceback(None)))
    except Exception:  # noqa: BLE001 (whatever a class does when it is pickled)
        return RuntimeError(story)


class _Pickler(pickle.Pickler):
    """Tensors leave the GPU, their graph, and the larger tensor that they look into."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        plain = obj.detach().cpu()
        if plain.untyped_storage().nbytes() > plain.nbytes:
            plain = plain.clone()
        if isinstance(obj, nn.Parameter):
            plain = nn.Parameter(plain, obj.requires_grad)
        return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _packed(value: Any) -> bytes:
    packed = io.BytesIO()
    _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump(value)
    return packed.getvalue()


def _asked(_packed: bytes, seconds: float, _leash: str) -> int:
    return math.ceil(seconds) + GRACE


def _lent(function: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
    """On ZeroGPU: run the function where a GPU is."""
    if not ON_ZERO_GPU:
        return function
    try:
        import spaces  # app.py has imported it already, before torch
    except ImportError:
        return function
    return spaces.GPU(duration=_asked)(function)


@_lent
def _call(packed: bytes, seconds: float, leash: str) -> Iterator[bytes]:
    """There: run a work, and tell the news a few times a second until it is over."""
    stop, over = _Leashed(seconds, leash), threading.Event()
    # A thread of its own: it may say what it is doing in the middle of a step, and the threads
    # that torch's loops are shared out to did not survive the fork of another one.
    thread = threading.Thread(target=stop.run, args=(packed, over), daemon=True, name="model")
    thread.start()
    try:
        while not over.wait(PACE):
            yield stop.news()
        yield stop.news()
    finally:
        stop.set()
        thread.join()

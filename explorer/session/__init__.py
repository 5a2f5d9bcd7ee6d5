"""What one visitor has: the model chosen, and the latest result of each place.

Everything in here is text, numbers and CPU arrays. It lives in this process, never in the page:
the page knows its session by Gradio's session hash alone, so no visitor can name another's.
The steps a visitor can take are the sibling modules (`look`, …), each of them a job on the worker
that begins by making the visitor's own model the loaded one.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from explorer.lm import ModelSpec
from explorer.prefix import Prefix

if TYPE_CHECKING:
    from explorer.methods import Adapter
    from explorer.methods.attention_matching import Solved

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Held:
    """Something a visitor made in one place and can switch on in another; tensors on the CPU.

    name: what menus call it, "solved prefix"
    prefix: slots of one softmax    solved: slots that are placed by the length of the prompt
    adapter: anything else that can be applied
    """

    name: str
    prefix: Prefix | None = None
    solved: Solved | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Session:
    """One visitor.

    results: the latest view of each kind, by its class    held: what was made here, by its name
    """

    id: str
    spec: ModelSpec
    results: Mapping[type, object] = field(default_factory=lambda: MappingProxyType({}))
    held: Mapping[str, Held] = field(default_factory=lambda: MappingProxyType({}))

    def last(self, kind: type[Kind]) -> Kind | None:
        """The latest result of a kind, such as `session.last(LookView)`."""
        return self.results.get(kind)


class Sessions:
    """All visitors of this process. The ones not seen for longest make room for new ones.

    default: the model the app was started with
    """

    def __init__(self, spec: ModelSpec, limit: int = 64) -> None:
        self.default, self._limit = spec, limit
        self._sessions: collections.OrderedDict[str, Session] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, session_id: str) -> Session:
        """The visitor with this id; a new one starts with the model the app was started with."""
        with self._lock:
            session = self._sessions.setdefault(session_id, Session(session_id, self.default))
            self._sessions.move_to_end(session_id)
            while len(self._sessions) > self._limit:
                self._sessions.popitem(last=False)
            return session

    def keep(self, session_id: str, *results: object) -> Session:
        """Put results in the place of earlier ones of the same class."""
        session = self.get(session_id)
        with self._lock:
            session = self._sessions.get(session_id, session)
            news = {type(result): result for result in results}
            session = replace(session, results=MappingProxyType({**session.results, **news}))
            self._sessions[session_id] = session
            return session

    def hold(self, session_id: str, held: Held) -> Session:
        """Let the visitor switch this on elsewhere; one of the same name makes room for it."""
        session = self.get(session_id)
        with self._lock:
            session = self._sessions.get(session_id, session)
            session = replace(session, held=MappingProxyType({**session.held, held.name: held}))
            self._sessions[session_id] = session
            return session

    def forget(self, session_id: str, *kinds: type) -> Session:
        """Drop results of these classes."""
        session = self.get(session_id)
        with self._lock:
            session = self._sessions.get(session_id, session)
            kept = {kind: value for kind, value in session.results.items() if kind not in kinds}
            session = replace(session, results=MappingProxyType(kept))
            self._sessions[session_id] = session
            return session

    def choose(self, session_id: str, spec: ModelSpec) -> Session:
        """Take another model. Results of the old one do not belong to it and go."""
        session = self.get(session_id)
        if session.spec == spec:
            return session
        with self._lock:
            session = self._sessions[session_id] = Session(session_id, spec)
            return session

    def drop(self, session_id: str) -> None:
        """The visitor has left."""
        with self._lock:
            self._sessions.pop(session_id, None)

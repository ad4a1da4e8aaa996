"""Ownership: a `Scope` closes what it owns, everyone else borrows.

1. Close = ask all, wait, free, report: `ask_stop` on the whole tree first, then close in reverse order of owning,
   within one shared deadline. One member's failure never costs another its close.
2. `close` raises nothing but interrupts, which pass at once; a close after one goes on with the rest.
3. A second close, from any thread, returns the same report, unless something was left (it raised, still runs, or
   kept memory): then exactly that is tried again, and the report updated.
4. Shared memory is closed only if all that was closed before it in its scope freed its memory.
5. What is left stays referenced until the process exits, so that no collector frees it under a running copy.
6. A scope that is dropped, or still open at interpreter exit, is closed once, quietly: a backstop, an error in tests.
7. A forked child closes nothing of its parent's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from kvtier.errors import Closed
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome

CLOSE_TIMEOUT_S = 2.0
"""vLLM gives its whole engine core 5 s."""

log = logging.getLogger("kvtier")

dropped: list[str] = []
"""Names of the scopes that the collector had to close; the leak plugin fails a test for one."""


class Closeable(Protocol):
    def ask_stop(self) -> None:
        """Accept nothing new and begin to stop. Never blocks; may be called again."""
        ...

    def close(self, deadline: Deadline) -> CloseReport:
        """Wait until `deadline` for the end, free what is safe to free, and report."""
        ...


Thing = TypeVar("Thing", bound=Closeable)


@dataclass(slots=True)
class _Member:
    name: str
    thing: Any
    shared_memory: bool
    touches_memory: bool
    asked: bool = False
    ask_error: Exception | None = None
    report: CloseReport | None = None
    left: bool = True
    """Its close has not been tried, or has left something."""


class Scope:
    """Owns things by name. Itself a `Closeable`, so that scopes nest."""

    def __init__(self, name: str, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self.name = name
        self.close_timeout_s = close_timeout_s
        self._pid = os.getpid()
        self._members: list[_Member] = []
        # Re-entrant: the collector may close another scope inside any of our own calls.
        self._lock = threading.RLock()
        """held for moments only: an `own` must not wait for a close that waits for the thread that owns"""
        self._closer = threading.RLock()
        """held by the thread that closes"""
        self._is_closing = False
        self._is_ending = False
        self._quiet = False
        """another scope owns this one and reports for it, or nobody asked for this close"""
        self._pinned = False
        self._report: CloseReport | None = None
        _open.add(self)

    @classmethod
    @contextlib.contextmanager
    def building(cls, name: str, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> Iterator[Self]:
        """For `open_*` functions: a scope that is closed if the block raises, and left open if it does not."""
        scope = cls(name, close_timeout_s=close_timeout_s)
        try:
            yield scope
        except BaseException:  # an interrupt half-way must free what was opened as well; it passes unchanged
            scope.close()
            raise

    def own(self, name: str, thing: Thing, *, shared_memory: bool = False, touches_memory: bool = True) -> Thing:
        """From now on this scope closes `thing`, and nobody else does. Returns it.

        `shared_memory`: others may touch its memory, see rule 4. `touches_memory`: whether a `thing` whose close
        raised may still touch such memory (a worker may, a listening socket does not).
        Raises `Closed` when the scope has been asked to stop: the thing is then closed on the spot.
        """
        with self._lock:
            if not self._is_ending:
                self._members.append(_Member(name, thing, shared_memory, touches_memory))
                if isinstance(thing, Scope):
                    thing._quiet = True
                    _open.discard(thing)
                return thing
        with Scope(f"{self.name}/{name}", close_timeout_s=self.close_timeout_s) as late:
            late.own(name, thing, shared_memory=shared_memory, touches_memory=touches_memory)
        raise Closed(f"{self.name}: closing, it cannot own {name!r} any more; {name!r} was closed")

    def ask_stop(self) -> None:
        """Ask every member once, the last owned first."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_ending = True
            unasked = [member for member in reversed(self._members) if not member.asked]
            for member in unasked:
                member.asked = True
        for member in unasked:
            try:
                member.thing.ask_stop()
            except Exception as error:  # noqa: BLE001 - one member never costs another its close
                member.ask_error = error

    def close(self, deadline: Deadline | None = None) -> CloseReport:
        """Close all members by `deadline`, by default `close_timeout_s` from now. See the rules above."""
        if os.getpid() != self._pid:
            return CloseReport(self.name, cause="a forked child closes nothing of its parent's")
        deadline = deadline or Deadline.after(self.close_timeout_s)
        if not self._closer.acquire(timeout=deadline.left):
            return CloseReport(self.name, Outcome.RUNNING, Memory.KEPT, cause="another thread is still closing it")
        try:
            if self._is_closing:  # a member that closes its own scope, from inside its close
                return CloseReport(self.name, Outcome.RUNNING, Memory.KEPT, cause="it is being closed by this thread")
            self._is_closing = True
            try:
                return self._close(deadline)
            finally:
                self._is_closing = False
        finally:
            self._closer.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # Half built: __init__ may not have come to its end.
        if getattr(self, "_report", self) is None and os.getpid() == self._pid:
            if not self._quiet:
                dropped.append(self.name)
                warnings.warn(f"{self.name} was dropped, not closed", ResourceWarning, source=self, stacklevel=1)
            self._quiet = True
            self.close()

    def _close(self, deadline: Deadline) -> CloseReport:
        before = self._report
        if before is not None and not any(member.left for member in self._members):
            return before
        began = time.monotonic()
        for member in self._members:
            if member.left and member.ask_error is not None and before is not None:
                member.asked, member.ask_error = False, None  # it was reported; a new try asks again
        self.ask_stop()
        keepers: list[str] = []
        for member in reversed(self._members):
            if member.left:
                self._close_member(member, deadline, keepers)
            if member.report is not None and member.report.memory_kept:
                keepers.append(member.name)
        report = self._report = before or CloseReport(self.name)
        report.children = [member.report for member in reversed(self._members) if member.report is not None]
        report.ended = max((node.ended for node in report.children), key=_BADNESS.index, default=Outcome.CLEAN)
        report.memory = Memory.KEPT if keepers else Memory.FREED
        report.seconds += time.monotonic() - began
        report.cause = ", ".join(node.name for node in report.children if not node.clean)
        self._pin(pinned=any(member.left for member in self._members))
        _open.discard(self)
        if not self._quiet:
            self._log(report)
        return report

    def _close_member(self, member: _Member, deadline: Deadline, keepers: list[str]) -> None:
        began = time.monotonic()
        if member.shared_memory and keepers:
            cause = f"kept until exit, it may still be touched by {', '.join(keepers)}"
            member.report = CloseReport(member.name, memory=Memory.KEPT, cause=cause)
            return
        try:
            report: CloseReport = member.thing.close(deadline)
            member.left = report.memory_kept or any(node.ended is Outcome.RUNNING for node in report.walk())
            report.name = member.name
        except Exception as error:  # noqa: BLE001 - one member never costs another its close
            memory = Memory.KEPT if member.touches_memory or member.shared_memory else Memory.FREED
            report = CloseReport(member.name, Outcome.FAILED, memory, cause=f"its close raised {error!r}", error=error)
            report.seconds = time.monotonic() - began
        if member.ask_error is not None and report.error is None:
            report.error = member.ask_error
            report.ended = max(report.ended, Outcome.FAILED, key=_BADNESS.index)
            report.cause = f"its ask_stop raised {member.ask_error!r}"
        member.report = report
        if not member.left:
            member.thing = None

    def _pin(self, *, pinned: bool) -> None:
        """Rule 5: one reference that not even the interpreter's own end takes away."""
        if pinned != self._pinned:
            count = ctypes.pythonapi.Py_IncRef if pinned else ctypes.pythonapi.Py_DecRef
            count(ctypes.py_object(self))
            self._pinned = pinned

    def _log(self, report: CloseReport) -> None:
        if report.clean:
            log.debug("%s: closed in %.3f s", self.name, report.seconds)
        else:
            log.warning("closed, but not clean:\n%s", report)


# From good to bad: a scope's node shows the worst of its members.
_BADNESS = [Outcome.CLEAN, Outcome.KILLED, Outcome.FAILED, Outcome.RUNNING]

_open: weakref.WeakSet[Scope] = weakref.WeakSet()


@atexit.register
def _close_the_open() -> None:
    for scope in list(_open):
        scope._quiet = True
        scope.close()

"""Threads: the only module that starts one.

`Worker` does items from a bounded inbox and puts what came of them into its outbox; nothing else is shared.
`Loop` runs one function of its own until it is asked to stop. Rules for both:

1. A constructor opens nothing; `start` does.
2. An exception ends its item, never the thread.
3. `close` ends by its deadline. A thread that is then still inside the work keeps its memory (`running`,
   `kept`); a second close waits for exactly that. Threads are daemons: they never hold up the exit.
4. A forked child, which has none of the threads, closes nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from kvtier.errors import Closed, Refused
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome

In = TypeVar("In")
Out = TypeVar("Out")

log = logging.getLogger("kvtier")


@dataclass(frozen=True, slots=True)
class Failed(Generic[In]):
    """In an outbox: the work raised `error` for `item`."""

    item: In
    error: BaseException


class Flag:
    """An eventfd as a flag that `select` and `poll` can wait for. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.is_set = False

    def fileno(self) -> int:
        if self._fd < 0:
            raise Closed("this descriptor was closed with its owner")
        return self._fd

    def set(self) -> None:
        if not self.is_set and self._fd >= 0:
            os.eventfd_write(self._fd, 1)
        self.is_set = True

    def clear(self) -> None:
        if self.is_set and self._fd >= 0:
            os.eventfd_read(self._fd)
        self.is_set = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Worker(Generic[In, Out]):
    """Does `work(item)` in `threads` threads, for items from an inbox of at most `inbox_limit`.

    Every item that was put ends exactly once: as a result or a `Failed` in the outbox, or taken back.
    """

    def __init__(self, name: str, work: Callable[[In], Out], *, inbox_limit: int, threads: int = 1) -> None:
        self.name = name
        self._work = work
        self._inbox_limit = inbox_limit
        self._inbox: deque[In] = deque()
        self._outbox: list[Out | Failed[In]] = []
        # Re-entrant: the garbage collector may close a dropped owner of this worker inside any of our own calls.
        self._changed = threading.Condition(threading.RLock())
        self._stopping = False
        self._drop_queued = False
        self._ready: Flag | None = None
        self._crew = _Crew(name, self._serve, threads)

    def start(self) -> Self:
        self._ready = Flag()
        try:
            self._crew.start()
        except RuntimeError:  # the system has no thread left; those that did start must not stay
            self.close(Deadline.after(1.0))
            raise
        return self

    def put(self, item: In) -> None:
        """Queue `item`. Never blocks; raises `Refused` when the inbox is full or a stop was asked."""
        with self._changed:
            self._room()
            self._inbox.append(item)
            self._changed.notify()

    def put_first(self, item: In) -> None:
        """`put`, ahead of everything that is queued."""
        with self._changed:
            self._room()
            self._inbox.appendleft(item)
            self._changed.notify()

    def take_back(self, match: Callable[[In], bool]) -> list[In]:
        """Remove and return the queued items that match and have not begun, in their order. Works after a close."""
        with self._changed:
            taken: list[In] = []
            kept: deque[In] = deque()
            for item in self._inbox:
                (taken if match(item) else kept).append(item)
            self._inbox = kept
            return taken

    def poll(self) -> list[Out | Failed[In]]:
        """What has ended since the last poll, in order; never blocks. Works after a close."""
        with self._changed:
            ended, self._outbox = self._outbox, []
            if self._ready is not None:
                self._ready.clear()
            return ended

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` would return something. Raises `Closed`."""
        if self._ready is None:
            raise Closed(f"{self.name}: start it first")
        return self._ready.fileno()

    @property
    def queued(self) -> int:
        """Items put that have not begun."""
        return len(self._inbox)

    def ask_stop(self, *, drop_queued: bool = True) -> None:
        """Refuse new items. Unless `drop_queued` is False, no queued item begins any more: they wait for `take_back`.

        A later call can only drop more. At the deadline of `close` no further item begins in any case.
        """
        if self._crew.is_foreign:
            return
        with self._changed:
            self._drop_queued |= drop_queued
            self._stopping = True
            self._changed.notify_all()

    def close(self, deadline: Deadline) -> CloseReport:
        """Stop, and wait for the running items until `deadline`. Idempotent; raises nothing."""
        if self._crew.is_foreign:
            return CloseReport(self.name, cause="a forked child closes nothing of its parent's")
        self.ask_stop(drop_queued=not self._stopping)  # what its owner chose for the queue stays chosen
        report = self._crew.join(deadline)
        with self._changed:
            self._drop_queued = True
            if self._ready is not None and report.ended is Outcome.CLEAN:
                self._ready.close()
        return report

    def _room(self) -> None:
        if self._stopping:
            raise Refused(f"{self.name}: closing, nothing new is accepted")
        if len(self._inbox) >= self._inbox_limit:
            raise Refused(f"{self.name}: the inbox is full ({self._inbox_limit} items); try again later")

    def _next(self) -> list[In]:
        """Wait for an item; none is the end."""
        with self._changed:
            while not self._inbox and not self._stopping:
                self._changed.wait()
            if not self._inbox or (self._stopping and self._drop_queued):
                return []
            return [self._inbox.popleft()]

    def _serve(self) -> None:
        while taken := self._next():
            item = taken.pop()
            result: Out | Failed[In]
            try:
                result = self._work(item)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the thread lives and the item ends
                result = Failed(item, error)
            with self._changed:
                self._outbox.append(result)
                if self._ready is not None:
                    self._ready.set()
            del item, result  # while it waits, the thread must not hold on to rows


class Stop:
    """What a `Loop` looks at: was it asked to stop?"""

    def __init__(self) -> None:
        self._flag = Flag()

    @property
    def asked(self) -> bool:
        return self._flag.is_set

    def fileno(self) -> int:
        """A descriptor that is readable once a stop was asked."""
        return self._flag.fileno()


class Loop:
    """One thread with a loop of its own: `run(stop)` returns soon after `stop.asked`."""

    def __init__(self, name: str, run: Callable[[Stop], None]) -> None:
        self.name = name
        self._run = run
        self._lock = threading.RLock()  # re-entrant for the same reason as the worker's
        self._stop: Stop | None = None
        self._error: Exception | None = None
        self._crew = _Crew(name, self._guarded, 1)

    def start(self) -> Self:
        self._stop = Stop()
        try:
            self._crew.start()
        except RuntimeError:  # the system has no thread left
            self._stop._flag.close()
            raise
        return self

    @property
    def alive(self) -> bool:
        return self._crew.alive

    def ask_stop(self) -> None:
        if self._stop is not None and not self._crew.is_foreign:
            with self._lock:
                self._stop._flag.set()

    def close(self, deadline: Deadline) -> CloseReport:
        """Ask, and wait for the loop's end until `deadline`. Idempotent; raises nothing.

        `failed` if `run` raised; nothing runs then, so its memory is freed.
        """
        if self._crew.is_foreign:
            return CloseReport(self.name, cause="a forked child closes nothing of its parent's")
        self.ask_stop()
        report = self._crew.join(deadline)
        if report.ended is Outcome.CLEAN:
            with self._lock:
                if self._stop is not None:
                    self._stop._flag.close()
            if self._error is not None:
                report.ended, report.error = Outcome.FAILED, self._error
                report.cause = f"its loop had ended with {self._error!r}"
        return report

    def _guarded(self) -> None:
        assert self._stop is not None
        try:
            self._run(self._stop)
        except Exception as error:  # a loop's end is its owner's to see, in `alive` and in the report
            log.exception("%s: ended by an exception", self.name)
            self._error = error


class _Crew:
    """The threads of one owner."""

    def __init__(self, name: str, target: Callable[[], None], count: int) -> None:
        self._name = name
        self._pid = os.getpid()
        numbered = [f"{name}-{i}" for i in range(count)] if count > 1 else [name]
        self._threads = [threading.Thread(target=target, name=f"kvtier {n}", daemon=True) for n in numbered]

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the process that owns the threads."""
        return os.getpid() != self._pid

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        self._pid = os.getpid()
        for thread in self._threads:
            thread.start()

    def join(self, deadline: Deadline) -> CloseReport:
        began = time.monotonic()
        for thread in self._threads:
            # A thread that closes its own owner (through the garbage collector) cannot wait for itself.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(deadline.left)
        left = sum(thread.is_alive() for thread in self._threads)
        report = CloseReport(self._name, seconds=time.monotonic() - began)
        if left:
            report.ended, report.memory = Outcome.RUNNING, Memory.KEPT
            report.cause = f"{left} of {len(self._threads)} threads still at work"
        return report

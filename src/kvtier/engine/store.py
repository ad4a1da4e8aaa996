"""The scheduler side of one engine: the core behind a lock, its tiers, and a keeper for idle times.

Rules:
1. No call blocks: a lookup that waits for a tier answers None. What a call does under the lock is bounded.
2. The engine's calls pump. When none has for `IDLE_S`, the keeper does, so that an idle engine's tiers go on.
3. A bug of ours ends ours: whatever the core raises switches the store off. Every lookup then misses, every
   offer is taken and forgotten, and the ranks are told to report loads as failed. The engine goes on.
4. Close drains what may still end well, cancels at half of the deadline, ends the tiers, and reports.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtier.core.ids import Key, RequestId, TransferId
from kvtier.engine.driver import Driver
from kvtier.engine.tier_port import PortState
from kvtier.engine.work import StepWork
from kvtier.errors import CoreBug, TierBroken
from kvtier.memory.handover import RankLink
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.runtime.worker import Loop, Stop
from kvtier.transfer.base import RankEnd

IDLE_S = 0.1
"""The keeper pumps when the engine has not for this long."""

PUMP_EVERY_S = 0.0005
"""Lookups of one step pump at most this often: a pump with nothing new costs some microseconds a tier."""

DRAIN_FRACTION = 0.5
"""Part of a close in which what is out and queued may still end well."""

KEEPER_END_S = 0.1
"""A close whose deadline has passed still waits this long for the keeper, which is at work for moments only."""

CLOSE_POLL_S = 0.05
START_POLL_S = 0.01

log = logging.getLogger("kvtier")

_T = TypeVar("_T")


class Store:
    """Lookups, loads and stores of one engine. Thread safe. Made by `kvtier.engine.open`."""

    def __init__(self, driver: Driver, links: Sequence[RankLink] = (), *, clock: Callable[[], float] = time.monotonic):
        self._driver = driver
        self._links = list(links)
        self._clock = clock
        self._lock = threading.RLock()
        self._opened = threading.Condition(self._lock)
        """notified when the keeper has opened a tier"""
        self._pumped = 0.0
        self._hooked = 0.0
        """when a call of the engine pumped last"""
        self._off: BaseException | None = None
        self._ranks_lost = False
        self._closing = False
        self._poll_ranks: Callable[[], Sequence[RankEnd]] | None = None
        self._report: CloseReport | None = None
        self._reports: dict[str, CloseReport] = {}
        self._keeper = Loop("keeper", self._keep)

    def start(self, ready_by: Deadline) -> None:
        """Start the tiers and wait until each has come up or failed, at the latest until `ready_by`.

        Raises ConfigError: a tier cannot come up before a human changes the configuration. A tier that is
        only broken, or slow, comes up later. The keeper starts them: a tier process ends with the thread that
        started it.
        """
        self._keeper.start()
        ports = self._driver.ports.values()
        while not ready_by.expired:
            self.pump()
            for port in ports:
                if port.config_error is not None:
                    raise port.config_error
            if all(port.state is PortState.UP or port.error is not None for port in ports):
                return
            self.wait(min(ready_by.left, START_POLL_S))

    # The engine.

    def lookup(self, request: RequestId, keys: tuple[Sequence[Key], ...], device_tokens: int) -> int | None:
        """Tokens from the start of the prompt that could be on the device after a load.

        `keys`: for each KV cache group the keys of the prompt's blocks. 0: no more than the device has.
        None: ask again later, at the latest after `lookup_timeout_s` there is an answer.
        """

        def act(now: float) -> int | None:
            if now - self._pumped >= PUMP_EVERY_S:
                self._hook_pump(now)
            return self._driver.lookup(request, keys, device_tokens, now)

        miss: int | None = 0
        return self._guarded(act, miss)

    def load(
        self, request: RequestId, from_tokens: int, to_tokens: int, blocks: Sequence[Sequence[int]]
    ) -> None:
        """Load tokens [from, to) of what the lookup answered; equal: give the lookup back.

        `blocks`: for each group, the request's engine block ids from the start of the prompt.
        """
        self._guarded(lambda now: self._driver.load(request, from_tokens, to_tokens, blocks, now), None)

    def offer(self, request: RequestId, group: int, first: int, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        """Full blocks [first, first + len(keys)) are, or will be after this step, in these engine blocks.

        Returns how many of them are in host memory or on their way; offer the others again later.
        """
        return self._guarded(lambda now: self._driver.offer(request, group, first, keys, blocks, now), len(keys))

    def preempted(self, request: RequestId) -> None:
        """Its device blocks are about to be reused; the next work says which stores must end first."""
        self._guarded(lambda now: self._driver.preempted(request, now), None)

    def gone(self, request: RequestId) -> None:
        """Finished or aborted, at any moment."""
        self._guarded(lambda now: self._driver.gone(request, now), None)

    def reset(self) -> None:
        """Nothing that was stored before is found after; loads that are out are reported as failed."""
        self._guarded(lambda now: self._driver.reset(now), None)

    def take_work(self) -> StepWork:
        """What the ranks are to do in this step."""

        def act(now: float) -> StepWork:
            self._hook_pump(now)
            return self._driver.take_work()

        return self._guarded(act, StepWork(off=True))

    def ranks_ended(self, ends: Sequence[RankEnd]) -> None:
        """End notices of the ranks; one of each rank ends a transfer."""
        self._guarded(lambda now: self._driver.ranks_ended(ends, now), None)

    def stores_out(self, request: RequestId) -> list[TransferId]:
        """Store transfers of the request that have not ended on all ranks."""
        with self._lock:
            return [] if self._off is not None else self._driver.stores_out(request)

    @property
    def rank_transfers_out(self) -> bool:
        with self._lock:
            return self._off is None and self._driver.rank_transfers_out

    # The owner.

    def serve_ranks(self, poll_ranks: Callable[[], Sequence[RankEnd]] | None) -> None:
        """Take end notices of ranks of this process from `poll_ranks`, also while closing."""
        with self._lock:
            self._poll_ranks = poll_ranks

    @property
    def off(self) -> BaseException | None:
        """The bug that switched the store off, if one has."""
        return self._off

    def turn_off(self, error: BaseException) -> None:
        """Rule 3, for a bug that was met outside of the store."""
        with self._lock:
            if self._off is None:
                self._off = error
                try:
                    story = "\n".join(self._driver.core.story.lines()[-20:])
                except Exception as another:  # noqa: BLE001 - after a bug even the story may be broken
                    story = f"(no story: {another!r})"
                log.error("a bug switched kvtier off, the engine goes on without it:\n%s", story, exc_info=error)

    def counts(self) -> dict[str, int]:
        """Counters and gauges by name; a tier's own begin with its name."""
        with self._lock:
            core = self._driver.core
            counts: dict[str, int] = {name: getattr(core.counts, name) for name in core.counts.__struct_fields__}
            counts["host_slots"] = sum(table.capacity for table in core.tables)
            counts["host_free_slots"] = sum(table.free_count for table in core.tables)
            counts["host_available_slots"] = sum(table.available for table in core.tables)
            counts["leases_out"] = core.leases_out
            counts["transfers_out"] = core.transfers_out
            counts["requests_known"] = core.requests_known
            counts["off"] = int(self._off is not None)
            for name, port in self._driver.ports.items():
                counts |= {f"{name}_{key}": value for key, value in port.counts().items()}
            return counts

    def check(self) -> None:
        """Every account of the core adds up; for tests."""
        with self._lock:
            self._driver.core.check()

    def pump(self) -> None:
        """Take in what tiers and ranks of this process have to say. Never blocks."""
        self._guarded(self._hook_pump, None)

    def settle(self, deadline: Deadline) -> bool:
        """Wait until nothing is out or queued for a tier; False at the deadline."""
        while True:
            self.pump()
            with self._lock:
                if self._driver.core.settled or self._off is not None:
                    return True
            if deadline.expired:
                return False
            self.wait(min(deadline.left, CLOSE_POLL_S))

    def ask_stop(self) -> None:
        """Admit nothing new; what is out and queued may still end well."""
        with self._lock:
            self._closing = True
            self._guarded(self._driver.close_begins, None)

    def close(self, deadline: Deadline) -> CloseReport:
        """Rule 4. Raises nothing; a second close tries only what was left."""
        began = time.monotonic()
        if self._report is not None and not _left(self._report):
            return self._report
        self.ask_stop()
        if self._report is None:
            self.settle(deadline.part(DRAIN_FRACTION))
            self._guarded(self._driver.cancel_all, None)
        self._close_ports(deadline)
        self._close_ranks()
        self._guarded(self._driver.abandon, None)
        # Last: a tier process ends with the thread that started it.
        self._reports["keeper"] = self._keeper.close(Deadline.after(max(deadline.left, KEEPER_END_S)))
        report = CloseReport("store", children=list(self._reports.values()))
        report.seconds = time.monotonic() - began + (self._report.seconds if self._report is not None else 0.0)
        report.ended = max((child.ended for child in report.children), key=_BADNESS.index)
        report.memory = Memory.KEPT if any(child.memory_kept for child in report.children) else Memory.FREED
        if self._off is not None:
            report.ended = max(report.ended, Outcome.FAILED, key=_BADNESS.index)
            report.cause = f"a bug had switched it off: {self._off!r}"
            report.error = self._off if isinstance(self._off, Exception) else CoreBug(repr(self._off))
        self._report = report
        return report

    # Inside.

    def _guarded(self, act: Callable[[float], _T], neutral: _T) -> _T:
        """Rule 3 around everything that reaches the core."""
        with self._lock:
            now = self._clock()
            if self._off is not None:
                return neutral
            try:
                return act(now)
            except Exception as error:  # noqa: BLE001 - a bug of ours, whatever it raises, must not end the engine
                self.turn_off(error)
                return neutral

    def _hook_pump(self, now: float) -> None:
        self._hooked = now
        self._pump(now)

    def _pump(self, now: float) -> None:
        self._pumped = now
        self._driver.pump(now)
        if self._poll_ranks is not None:
            self._driver.ranks_ended(self._poll_ranks(), now)
        if self._links and not self._ranks_lost and all(link.closed for link in self._links):
            self._ranks_lost = True
            self._driver.ranks_lost(now)

    def wait(self, seconds: float, stop: Stop | None = None, *, tiers: bool = True) -> None:
        """Sleep until a tier has something to say, or a stop is asked, at most `seconds`."""
        poll = select.poll()
        if stop is not None:
            poll.register(stop.fileno(), select.POLLIN)
        if tiers:
            with self._lock:
                for port in self._driver.ports.values():
                    fd = port.fileno()
                    if fd is not None:
                        poll.register(fd, select.POLLIN)
        poll.poll(seconds * 1000)

    def _keep(self, stop: Stop) -> None:
        """The keeper's loop. It outlives every bug: the tier processes would end with it."""
        while not stop.asked:
            try:
                self._keep_once(stop)
            except Exception as error:  # noqa: BLE001 - rule 3, in a thread of our own
                self.turn_off(error)
                self.wait(IDLE_S, stop, tiers=False)

    def _keep_once(self, stop: Stop) -> None:
        """Start tiers, and pump when the engine does not."""
        self._start_tiers()
        idle_s = self._clock() - self._hooked
        if idle_s < IDLE_S or self._off is not None:
            self.wait(IDLE_S - idle_s if idle_s < IDLE_S else IDLE_S, stop, tiers=False)
            return
        self.wait(IDLE_S, stop)
        if not stop.asked:
            self._guarded(self._pump, None)

    def _start_tiers(self) -> None:
        for port in self._driver.ports.values():
            with self._lock:
                if self._closing or self._off is not None or not port.wants_start(self._clock()):
                    continue
                port.begin()
            opened = port.open()
            with self._opened:
                port.attach(opened, self._clock())
                self._opened.notify_all()

    def _close_ports(self, deadline: Deadline) -> None:
        """Ask all tiers, then end them side by side within the deadline. Without the lock: nobody else waits."""
        ports = [port for port in self._driver.ports.values() if port.is_open or port.name not in self._reports]
        with self._opened:
            self._opened.wait_for(lambda: all(port.state is not PortState.STARTING for port in ports), deadline.left)
            for port in ports:
                port.ask_stop()
        for port in ports:
            report, events = port.close(deadline, self._clock())
            with self._lock:
                self._guarded(lambda now, events=events: self._driver.feed_all(events), None)  # type: ignore[misc]
            self._reports[port.name] = report

    def _close_ranks(self) -> None:
        """Ranks that still hold transfers: gone with their transfers, or alive and silent."""
        self._guarded(self._pump, None)
        self._reports.pop("ranks", None)
        if not self._driver.rank_transfers_out or (self._links and all(link.closed for link in self._links)):
            return
        report = CloseReport("ranks", Outcome.RUNNING, Memory.KEPT, cause="a rank has not ended its transfers")
        report.error = TierBroken("a rank has not ended its transfers by the close deadline")
        self._reports["ranks"] = report


def _left(report: CloseReport) -> bool:
    """Something of it is still there: a second close tries again."""
    return report.memory_kept or any(node.ended is Outcome.RUNNING for node in report.walk())


# From good to bad: a node shows the worst of its parts.
_BADNESS = [Outcome.CLEAN, Outcome.KILLED, Outcome.FAILED, Outcome.RUNNING]

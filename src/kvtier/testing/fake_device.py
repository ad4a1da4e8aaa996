"""A played device: one compute queue and one copy queue a direction, on a clock that the test moves.

A copy starts when all compute queued before it has ended. It touches its blocks and rows when it starts and
again when it ends, so that whoever reads or reuses them too early, or too late, sees wrong bytes.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from kvtier.errors import Refused, TierBroken
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.transfer.base import OK, CopyEvent, CopyQueue, Device, RankTransfer, Way
from kvtier.transfer.move import Mover

Fate = Literal["ok", "fail", "raise", "never"]
"""how a copy ends: well; failed and over; its event raises when asked; its event never completes"""


class FakeEvent(CopyEvent):
    """`queries` counts how often it was asked; `fate` may be changed at any time."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        self.state: Literal["queued", "running", "over", "cancelled"] = "queued"
        self.queries = 0

    def query(self) -> str | None:
        self.queries += 1
        if self.fate == "raise":
            raise RuntimeError("played: the device was lost")
        if self.fate == "never" or self.state != "over":
            return None
        return OK if self.fate == "ok" else "played: the copy failed"

    def cancel(self) -> bool:
        if self.state == "queued":
            self.state = "cancelled"
        return self.state == "cancelled"


class FakeQueue(CopyQueue):
    def __init__(self, device: FakeDevice, way: Way) -> None:
        self.way = way
        self.free_at = 0.0
        self.events: list[FakeEvent] = []
        self.stopping = False
        self.closes = 0
        self._device = device

    def submit(self, transfer: RankTransfer) -> FakeEvent:
        if self.stopping:
            raise Refused(f"played {self.way}: closing")
        device = self._device
        event = FakeEvent(device.fates.popleft() if device.fates else "ok")
        begin = max(device.now, device.compute_free_at, self.free_at)
        self.free_at = begin + device.copy_seconds
        self.events.append(event)

        def start() -> None:
            if event.state == "queued":
                event.state = "running"
                device.mover.move(transfer)
                device.at(begin + device.copy_seconds, end)

        def end() -> None:
            if event.fate != "never":
                device.mover.move(transfer)
                event.state = "over"

        device.at(begin, start)
        return event

    def wait(self, deadline: Deadline) -> None:
        """The device goes on while somebody waits for it: to the next thing that happens on it."""
        if not self._device.step():
            time.sleep(min(deadline.left, 0.002))

    def ask_stop(self) -> None:
        self.stopping = True

    def close(self, deadline: Deadline) -> CloseReport:
        self.closes += 1
        return CloseReport(f"played {self.way}")


class FakeDevice(Device):
    """Moves real bytes with a `Mover`. `fates` are dealt to the next copies, "ok" when there are none."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.now = 0.0
        self.copy_seconds = 1.0
        self.compute_free_at = 0.0
        self.fates: deque[Fate] = deque()
        self.queues: dict[Way, FakeQueue] = {}
        self.synchronizes = 0
        self.synchronize_error: Exception | None = None
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def open_queue(self, way: Way) -> FakeQueue:
        self.queues[way] = FakeQueue(self, way)
        return self.queues[way]

    def compute(self, seconds: float, action: Callable[[], None]) -> None:
        """Queue a kernel of `seconds` that does `action` at its end."""
        self.compute_free_at = max(self.now, self.compute_free_at) + seconds
        self.at(self.compute_free_at, action)

    def at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (moment, next(self._numbers), action))
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Move the clock; all that falls due happens in its order."""
        until = self.now + seconds
        while self._agenda and self._agenda[0][0] <= until:
            self.step()
        self.now = until

    def step(self) -> bool:
        """Jump to the next thing that happens; False if there is none."""
        if not self._agenda:
            return False
        moment, _, action = heapq.heappop(self._agenda)
        self.now = max(self.now, moment)
        action()
        return True

    def synchronize(self, deadline: Deadline) -> None:
        self.synchronizes += 1
        if self.synchronize_error is not None:
            raise self.synchronize_error
        while self.step():
            pass
        if any(event.fate == "never" and event.state == "running" for q in self.queues.values() for event in q.events):
            raise TierBroken("played: a copy never ends")

"""The CPU as a device: its blocks are in host memory, and a thread a direction copies them.

Compute on a CPU is done when `submit` is called, so there is nothing to wait for on its side.
"""

from __future__ import annotations

import select

from kvtier.errors import TierBroken
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.runtime.worker import Failed, Worker
from kvtier.transfer.base import CANCELLED, OK, CopyEvent, CopyQueue, Device, RankTransfer, Way
from kvtier.transfer.move import Mover

QUEUE_LIMIT = 4096
"""transfers of one direction that may wait; more is refused"""
WAIT_SECONDS = 0.05


class HostEvent(CopyEvent):
    """Written by the queue's owner alone, when it takes the result out of the thread's outbox."""

    def __init__(self, queue: HostQueue, transfer: RankTransfer) -> None:
        self.transfer = transfer
        self.cause: str | None = None
        self._queue = queue

    def query(self) -> str | None:
        if self.cause is None:
            self._queue.collect()
        return self.cause

    def cancel(self) -> bool:
        if self.cause is None and self._queue.take_back(self):
            self.cause = CANCELLED
        return self.cause == CANCELLED


class HostQueue(CopyQueue):
    """One worker thread that moves transfers in the order in which they were submitted."""

    def __init__(self, way: Way, mover: Mover) -> None:
        self._mover = mover
        self._worker: Worker[HostEvent, tuple[HostEvent, str]] = Worker(
            f"copy {way}", self._move, inbox_limit=QUEUE_LIMIT
        )
        self.outstanding = 0
        """submitted, and neither seen to have ended nor taken back"""

    def start(self) -> HostQueue:
        self._worker.start()
        return self

    def submit(self, transfer: RankTransfer) -> HostEvent:
        event = HostEvent(self, transfer)
        self._worker.put(event)
        self.outstanding += 1
        return event

    def collect(self) -> None:
        """Settle the events whose copies have ended."""
        for ended in self._worker.poll():
            event, cause = (ended.item, repr(ended.error)) if isinstance(ended, Failed) else ended
            event.cause = cause
            self.outstanding -= 1

    def take_back(self, event: HostEvent) -> bool:
        taken = self._worker.take_back(lambda queued: queued is event)
        self.outstanding -= len(taken)
        return bool(taken)

    def wait(self, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(self._worker.fileno(), select.POLLIN)
        poll.poll(min(deadline.left, WAIT_SECONDS) * 1000)

    def ask_stop(self) -> None:
        self._worker.ask_stop()

    def close(self, deadline: Deadline) -> CloseReport:
        return self._worker.close(deadline)

    def _move(self, event: HostEvent) -> tuple[HostEvent, str]:
        """In the thread. An error is told in words: its traceback would hold views of the region."""
        try:
            self._mover.move(event.transfer)
        except Exception as e:  # noqa: BLE001 - whatever it was, the copy has ended and its bytes mean nothing
            return event, f"the copy raised {e!r}"
        return event, OK


class HostDevice(Device):
    """The queues over one rank's pages and rows."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._queues: list[HostQueue] = []

    def open_queue(self, way: Way) -> HostQueue:
        queue = HostQueue(way, self._mover).start()
        self._queues.append(queue)
        return queue

    def synchronize(self, deadline: Deadline) -> None:
        for queue in self._queues:
            queue.collect()
            while queue.outstanding:
                if deadline.expired:
                    raise TierBroken(f"{queue.outstanding} copies still run or wait at the deadline")
                queue.wait(deadline)
                queue.collect()

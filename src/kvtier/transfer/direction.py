"""One direction's transfers: what is listed, what has ended, and its bounded end.

A transfer is listed from `submit` until its event has completed (or it was cancelled while queued). One
whose event raised stays listed, with its event, for whoever keeps the region; the others are still tried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable

from kvtier.core.ids import TransferId
from kvtier.errors import CoreBug, Refused
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.transfer.base import CANCELLED, OK, CopyEvent, CopyQueue, RankEnd, RankTransfer

log = logging.getLogger(__name__)


class Direction:
    """Owns its queue; borrows device blocks and rows. Used by one thread at a time."""

    def __init__(self, name: str, queue: CopyQueue, check: Callable[[RankTransfer], None]) -> None:
        """`check` raises Refused for a transfer that would touch what does not exist."""
        self.name = name
        self._queue = queue
        self._check = check
        self._listed: dict[TransferId, tuple[RankTransfer, CopyEvent]] = {}
        self._errors: dict[TransferId, Exception] = {}
        self._ends: list[RankEnd] = []
        self._stopping = False
        self._report: CloseReport | None = None
        self._queue_report: CloseReport | None = None

    @property
    def listed(self) -> list[TransferId]:
        """Transfers that have not ended, oldest first."""
        return list(self._listed)

    @property
    def raised(self) -> dict[TransferId, Exception]:
        """Listed transfers whose event raised the last time it was asked: they may run for ever."""
        return dict(self._errors)

    def submit(self, transfer: RankTransfer) -> None:
        """Queue a transfer. Never blocks; raises Refused: nothing was queued, no byte moves."""
        if transfer.id in self._listed:
            raise CoreBug(f"{self.name}: transfer {transfer.id} is listed already")
        if self._stopping:
            raise Refused(f"{self.name}: closing, nothing new is accepted")
        self._check(transfer)
        self._listed[transfer.id] = (transfer, self._queue.submit(transfer))

    def poll(self) -> list[RankEnd]:
        """What has ended since the last poll; never blocks. Works after a close."""
        self._try(self.listed)
        ends, self._ends = self._ends, []
        return ends

    def cancel(self, ids: Iterable[TransferId]) -> None:
        """End those of `ids` that are still queued; a running or unknown one is left alone."""
        for id_ in ids:
            if id_ in self._listed and self._listed[id_][1].cancel():
                self._end(id_, CANCELLED)

    def wait(self, ids: Collection[TransferId], deadline: Deadline) -> list[TransferId]:
        """Wait until `ids` have ended; returns those still listed at `deadline`, or whose event raised.

        Each is asked at least once, also with an expired deadline.
        """
        wanted = set(ids)
        left = [id_ for id_ in self._listed if id_ in wanted]
        raised: list[TransferId] = []
        while left:
            raised += self._try(left)
            left = [id_ for id_ in left if id_ in self._listed and id_ not in raised]
            if not left or deadline.expired:
                break
            self._queue.wait(deadline)
        return sorted([*left, *raised])

    def ask_stop(self) -> None:
        """Refuse what is new and drop what is queued. Never blocks."""
        self._stopping = True
        self._queue.ask_stop()
        self.cancel(self.listed)

    def close(self, deadline: Deadline) -> CloseReport:
        """Wait for what runs, then release the queue. A second close tries only what is left."""
        if self._report is not None and self._report.memory is Memory.FREED:
            return self._report
        started = time.monotonic()
        self.ask_stop()
        self.wait(self.listed, deadline)
        if self._queue_report is None or not self._queue_report.clean:
            self._queue_report = self._queue.close(deadline)
        queue = self._queue_report
        report = CloseReport(self.name, queue.ended, queue.memory, cause=queue.cause, error=queue.error)
        if self._listed:
            report.ended = Outcome.FAILED if self._errors else Outcome.RUNNING
            report.memory = Memory.KEPT
            report.error = next(iter(self._errors.values()), report.error)
            states = [f"{id_} ({self._errors.get(id_, 'running')})" for id_ in self._listed]
            report.cause = f"transfers that have not ended: {', '.join(states)}"
            log.error("%s: %s", self.name, report.cause)
        report.seconds = time.monotonic() - started
        self._report = report
        return report

    def release(self, cause: str) -> None:
        """End everything listed as failed: the device was seen to touch nothing any more."""
        for id_ in self.listed:
            self._end(id_, cause)
        if self._report is not None:
            self._report.memory = Memory.FREED

    def _try(self, ids: list[TransferId]) -> list[TransferId]:
        """Ask each event once; returns those whose event raised."""
        raised = []
        for id_ in ids:
            try:
                cause = self._listed[id_][1].query()
            except Exception as e:  # noqa: BLE001 - whatever a device raises: the copy may run, the next one is tried
                if id_ not in self._errors:
                    # As text: a log handler that kept the error would keep its frames, and their views.
                    log.error("%s: the end of transfer %d cannot be seen: %s", self.name, id_, repr(e))
                self._errors[id_] = e
                raised.append(id_)
                continue
            self._errors.pop(id_, None)
            if cause is not None:
                self._end(id_, cause)
        return raised

    def _end(self, id_: TransferId, cause: str) -> None:
        del self._listed[id_]
        self._errors.pop(id_, None)
        self._ends.append(RankEnd(id_, cause == OK, cause))

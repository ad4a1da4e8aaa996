"""A rank's side of kvtier: it owns the region's mapping and both directions over it.

Rules:
1. Every submitted transfer ends in exactly one `RankEnd`, a refused or cancelled one as well.
2. Close asks both directions, tries both, and frees the region last, once. If a direction failed, the device
   is synchronised once, within the deadline; where that fails too, a copy may still run: the memory is
   kept, readable, until the process exits, and a second close tries exactly what is left.
3. Built by `open_rank` alone, which owns the region from its first line on.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence

from kvtier.core.ids import TransferId
from kvtier.errors import Refused
from kvtier.memory.layout import Layout, PageLayout, Rows
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.transfer.base import Device, RankEnd, RankTransfer, StillRunning, Way
from kvtier.transfer.direction import Direction
from kvtier.transfer.host_copy import HostDevice
from kvtier.transfer.move import Mover
from kvtier.transfer.pages import NumpyPages

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""for what was opened before a failed start"""
WAIT_SHARES = (0.4, 0.6)
"""of what is left, for the first and the second direction; the rest is for the device"""


class Rank:
    """Both directions over one region. Used by one thread; `close` may come from any."""

    def __init__(self, region: Region, mover: Mover, device: Device, directions: dict[Way, Direction]) -> None:
        self._region, self._mover, self._device, self._directions = region, mover, device, directions
        self._refused: list[RankEnd] = []
        self._counts = {"transfers_submitted": 0, "transfers_ok": 0, "transfers_failed": 0}
        self._closing = threading.Lock()
        self._ended: dict[Way, CloseReport] = {}
        self._report: CloseReport | None = None

    def submit(self, transfers: Sequence[RankTransfer]) -> None:
        """Queue transfers; never blocks. What cannot be done ends in a `RankEnd` with the reason."""
        for transfer in transfers:
            self._counts["transfers_submitted"] += 1
            try:
                self._directions[transfer.direction].submit(transfer)
            except Refused as e:
                self._refused.append(RankEnd(transfer.id, ok=False, cause=f"refused: {e}"))

    def poll(self) -> list[RankEnd]:
        """What has ended since the last poll; never blocks. Works after a close."""
        ends, self._refused = self._refused, []
        for direction in self._directions.values():
            ends += direction.poll()
        ok = sum(end.ok for end in ends)
        self._counts["transfers_ok"] += ok
        self._counts["transfers_failed"] += len(ends) - ok
        return ends

    def fence(self, ids: Collection[TransferId], deadline: Deadline) -> list[TransferId]:
        """Before the engine reuses the blocks of `ids`: drop what is queued, wait for what runs.

        Returns those that may still run at `deadline`; their blocks must not be reused yet.
        """
        wanted = set(ids)
        for direction in self._directions.values():
            direction.cancel(wanted)
        left: list[TransferId] = []
        for direction in self._directions.values():
            left += direction.wait(wanted, deadline)
        return left

    def digest(self, blocks: Sequence[int], *, size_class: int = 0) -> list[bytes]:
        """xxh3-128 of each engine block's pages, layer after layer, as they are on the device now."""
        return self._mover.digest(blocks, size_class)

    @property
    def broken(self) -> str:
        """Why transfers of this rank may never end, in words; empty while all is well."""
        raised = [(id_, e) for d in self._directions.values() for id_, e in d.raised.items()]
        return ", ".join(f"transfer {id_}: {e!r}" for id_, e in raised)

    def counts(self) -> dict[str, int]:
        """Counters, and how many transfers each direction lists now."""
        listed = {f"{way}_transfers_listed": len(d.listed) for way, d in self._directions.items()}
        return {**self._counts, **listed}

    def ask_stop(self) -> None:
        """Refuse what is new and drop what is queued, in both directions. Never blocks."""
        for way, direction in self._directions.items():
            try:
                direction.ask_stop()
            except Exception:  # the other direction is asked all the same; close tries this one again
                log.exception("%s: could not be asked to stop", way)

    def close(self, deadline: Deadline) -> CloseReport:
        """Rule 2. Raises nothing; the same report again, unless something was left."""
        with self._closing:
            if self._report is None or self._report.memory_kept:
                self._report = self._close(deadline)
                log.log(logging.INFO if self._report.clean else logging.ERROR, "closed\n%s", self._report)
            return self._report

    def _close(self, deadline: Deadline) -> CloseReport:
        started = time.monotonic()
        self.ask_stop()
        tried = [way for way in self._directions if way not in self._ended or self._ended[way].memory is Memory.KEPT]
        for way, share in zip(tried, WAIT_SHARES, strict=False):
            self._ended[way] = self._close_direction(way, deadline.part(share))
        report = CloseReport("rank", children=list(self._ended.values()))
        if not all(self._ended[way].clean for way in tried):
            report.children.append(self._synchronize(tried, deadline))
        if report.memory_kept:
            self._region.keep()
            report.memory = Memory.KEPT
            report.cause = "a copy may still touch the region"
        else:
            self._mover.close()
            report.children.append(self._region.close(deadline))
        report.seconds = time.monotonic() - started
        return report

    def _close_direction(self, way: Way, deadline: Deadline) -> CloseReport:
        try:
            return self._directions[way].close(deadline)
        except Exception as e:  # whatever it raised, the other direction gets its close
            log.exception("%s: its close raised", way)
            return CloseReport(str(way), Outcome.FAILED, Memory.KEPT, cause=f"its close raised {e!r}", error=e)

    def _synchronize(self, ways: list[Way], deadline: Deadline) -> CloseReport:
        """After a direction failed: once the device is seen idle, what it left is over."""
        started = time.monotonic()
        report = CloseReport("device")
        try:
            self._device.synchronize(deadline)
            for way in ways:
                self._directions[way].release("seen to have ended only with the whole device, at close")
                self._ended[way].memory = Memory.FREED
        except Exception as e:  # noqa: BLE001 - whatever the device raised: nobody knows what it still does
            report.ended, report.memory, report.error = Outcome.FAILED, Memory.KEPT, e
            report.cause = f"could not be synchronised: {e!r}"
        report.seconds = time.monotonic() - started
        return report


def open_rank(
    region: Region,
    layout: Layout,
    pages: Sequence[NumpyPages],
    page_layouts: Sequence[PageLayout],
    *,
    rank: int = 0,
    open_device: Callable[[Mover], Device] = HostDevice,
) -> Rank:
    """A rank over `region`, which it owns from now on: a failure here frees it, after what was made.

    `pages[c]` and `page_layouts[c]` belong to size class c. A device that raises StillRunning, and an
    interrupt, leave the region mapped: something native may be writing to it.
    """
    mover: Mover | None = None
    directions: dict[Way, Direction] = {}
    try:
        mover = Mover(pages, page_layouts, Rows(region.array, layout), rank=rank)
        device = open_device(mover)
        for way in Way:
            directions[way] = Direction(str(way), device.open_queue(way), mover.check)
        return Rank(region, mover, device, directions)
    except Exception as e:  # whatever a device raises, what was made before it is released; it is raised again
        deadline = Deadline.after(CLOSE_SECONDS)
        reports = [direction.close(deadline) for direction in reversed(directions.values())]
        if isinstance(e, StillRunning) or any(report.memory_kept for report in reports):
            region.keep()
            raise
        traceback.clear_frames(e.__traceback__)  # their locals look at the region
        if mover is not None:
            mover.close()
        region.close(deadline)
        raise
    except BaseException:
        region.keep()
        for direction in directions.values():
            direction.ask_stop()
        raise

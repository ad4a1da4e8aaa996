"""The disk tier: bounded, restart-safe, node-local.

Rules: the thread that calls owns the index and all decisions; two workers, one for reads and one for writes, only
move bytes (`disk_io`). Reads never queue behind writes. Everything that a disk does wrong is a cause in an `Ended`;
only a bug of ours comes out of `poll` as an exception, after every notice has been given out. What is on the
disk is `disk_format`'s to say, where it lies `disk_index`'s.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import Counter, deque
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvtier.core.ids import AskId, Key, TierName, TransferId
from kvtier.errors import Closed, ConfigError, CoreBug, Refused
from kvtier.memory.layout import Rows
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.runtime.worker import Failed, Flag, Worker
from kvtier.tiers import disk_format as fmt
from kvtier.tiers.base import Cause, Direction, Ended, Evicted, Held, Tier, TierNotice, TierTransfer
from kvtier.tiers.disk_config import DiskConfig
from kvtier.tiers.disk_extent import Block, Extent, probe_direct
from kvtier.tiers.disk_index import Index
from kvtier.tiers.disk_io import DiskIO, Grow, Grown, Move, Moved, Sync, Synced
from kvtier.tiers.disk_lock import EngineDirectory, take_directory
from kvtier.tiers.registry import TierType

__all__ = ["TIER_TYPE", "DiskConfig", "DiskTier", "open_disk"]

_SPARE_ITEMS = 64
"""room in an inbox for what is not a block: grows"""


class _Transfer:
    """A transfer that has not ended: the causes so far, and how many are open."""

    __slots__ = ("causes", "holds", "left", "of")

    def __init__(self, of: TierTransfer) -> None:
        self.of = of
        self.causes: list[Cause | None] = [None] * len(of.keys)
        self.left = len(of.keys)
        self.holds: list[tuple[int, Block]] = []
        """its blocks so far, pinned until it ends: so that it ends with the truth, and their use counts as one"""


_Wanted = tuple[_Transfer, int]
"""one key of a demotion that waits: for a new extent, or for the same key's write that already runs"""


def open_disk(config: DiskConfig, rows: Rows, namespace: bytes, name: TierName = "disk") -> DiskTier:
    """Lock a directory below `config.path`, read its tables and start. Raises ConfigError."""
    path = Path(config.path).expanduser()
    identities = [
        fmt.Identity(
            fmt.digest16(namespace), fmt.digest16(b"rows/1 %d %d" % (c.row_bytes, rows.layout.ranks)), c.row_bytes
        )
        for c in rows.layout.classes
    ]
    with contextlib.ExitStack() as stack:
        directory = take_directory(path, config.engines_max)
        stack.callback(directory.close)
        index = Index(directory.fd, identities, config.size)
        stack.callback(index.close)
        direct = config.direct == "auto" and probe_direct(directory.fd)
        try:
            index.load(direct=direct)
        except ConfigError as error:
            raise ConfigError(f"path = {str(path)!r}, {directory.path.name}: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"path = {str(path)!r}, {directory.path.name}: its files cannot be read ({error.strerror}); "
                "give another path, or make them readable and writable for this user"
            ) from error
        tier = DiskTier(name, config, rows, directory, index, DiskIO(rows, identities, directory.fd, direct=direct))
        stack.callback(tier.close, Deadline.after(1.0))
        tier.start()
        stack.pop_all()
        return tier


class DiskTier(Tier):
    """One open engine directory. Made by `open_disk`; owns the directory, the index and the threads."""

    def __init__(
        self, name: TierName, config: DiskConfig, rows: Rows, directory: EngineDirectory, index: Index, io: DiskIO
    ) -> None:
        self.name = name
        self._config = config
        self._classes = [(c.row_bytes, c.rows) for c in rows.layout.classes]
        self._directory = directory
        self._index = index
        self._io = io
        self._reads: Worker[Move, Moved] = Worker(
            f"{name} reads", io.read, inbox_limit=config.read_queue_blocks_max, threads=config.threads
        )
        self._writes: Worker[Move | Grow, Moved | Grown] = Worker(
            f"{name} writes",
            io.write,
            inbox_limit=config.write_queue_blocks_max + _SPARE_ITEMS,
            threads=config.threads,
        )
        self._syncs: Worker[Sync, Synced] | None = None
        if config.fsync == "interval":
            self._syncs = Worker(f"{name} syncs", io.sync, inbox_limit=1)
        self._transfers: dict[TransferId, _Transfer] = {}
        self._waiting: dict[int, deque[_Wanted]] = {}  # for a new extent, by size class
        self._writing: dict[bytes, deque[_Wanted]] = {}  # keys whose write runs, with later demotions of the same key
        self._notices: list[TierNotice] = []
        self._noticed = Flag()
        self._epoll = select.epoll()
        self._dirty: set[Extent] = set()
        self._syncing = False
        self._open_reads = self._open_writes = self._open_write_bytes = 0
        self._counts: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._stopping = self._closed = False
        self._report: CloseReport | None = None

    def start(self) -> None:
        """Start the threads."""
        self._epoll.register(self._noticed.fileno(), select.EPOLLIN)
        for worker in self._workers():
            worker.start()
            self._epoll.register(worker.fileno(), select.EPOLLIN)

    # What comes in

    def ask(self, ask: AskId, keys: Sequence[Key]) -> None:
        self._usable()
        self._notice(Held(ask, [self._index.has(key) for key in keys]))

    def submit(self, transfer: TierTransfer) -> None:
        self._usable()
        self._sane(transfer)
        self._room_for(transfer)
        moving = _Transfer(transfer)
        self._transfers[transfer.id] = moving
        if not transfer.keys:
            self._end_transfer(moving)
        if transfer.direction is Direction.PROMOTE:
            self._open_reads += len(transfer.keys)
            for i in range(len(transfer.keys)):
                self._promote(moving, i)
        else:
            self._open_writes += len(transfer.keys)
            self._open_write_bytes += len(transfer.keys) * self._classes[transfer.size_class][0]
            for i in range(len(transfer.keys)):
                self._demote(moving, i)
        self._flush_evicted()

    def cancel(self, transfer: TransferId) -> None:
        if transfer in self._transfers:
            self._take_back({transfer})

    def poll(self) -> list[TierNotice]:
        for worker in self._workers():
            for result in worker.poll():
                self._result(result)
        self._sync_when_due()
        self._flush_evicted()
        notices, self._notices = self._notices, []
        self._noticed.clear()
        if self._failure is not None and not self._closed:
            if not notices:
                raise CoreBug(f"{self.name}: a bug ended a block's transfer") from self._failure
            self._noticed.set()
        return notices

    def fileno(self) -> int:
        return self._epoll.fileno()

    def counts(self) -> dict[str, int]:
        counts = {f"{cause}_count": self._counts[cause] for cause in Cause if cause is not Cause.OK}
        for name in ("loaded", "stored", "known"):
            counts[f"{name}_blocks_count"] = self._counts[name]
        return counts | {
            "evicted_blocks_count": self._index.evicted_count,
            "blocks_count": self._index.blocks_count,
            "blocks_bytes": self._index.blocks_bytes,
            "used_bytes": self._index.used_bytes,
            "limit_bytes": int(self._index.size_bytes),
            "read_queue_count": self._open_reads,
            "write_queue_count": self._open_writes,
            "write_queue_bytes": self._open_write_bytes,
            "refused_count": self._counts["refused"],
            "direct_fallbacks_count": self._counts["fallbacks"],
            "grow_failures_count": self._counts["grow_failures"],
            "sync_failures_count": self._counts["sync_failures"],
        }

    # Closing

    def ask_stop(self) -> None:
        """Accept nothing new; what is queued ends as cancelled, what runs goes on."""
        if self._stopping:
            return
        self._stopping = True
        self._io.ask_stop()
        for worker in self._workers():
            worker.ask_stop()
        self._take_back(set(self._transfers))
        for grow in self._writes.take_back(lambda job: isinstance(job, Grow)):
            assert isinstance(grow, Grow)
            self._grown(Grown(grow, None, dropped=False))

    def close(self, deadline: Deadline) -> CloseReport:
        if self._report is not None and self._report.clean:
            return self._report
        began = time.monotonic()
        self.ask_stop()
        # The lock of the directory and every descriptor are freed only when no thread can use them any more.
        report = CloseReport(self.name, children=[worker.close(deadline) for worker in self._workers()])
        try:
            for worker in self._workers():
                for result in worker.poll():
                    self._result(result)
            self._flush_evicted()
            if report.clean:
                self._free()
        except Exception as error:  # noqa: BLE001 - close reports, it never raises
            report.ended, report.error, report.cause = Outcome.FAILED, error, f"closing it raised {error!r}"
        if any(child.ended is Outcome.RUNNING for child in report.children):
            report.ended, report.memory = Outcome.RUNNING, Memory.KEPT
            report.cause = f"{len(self._transfers)} transfers still run in {self._directory.path}"
        report.seconds = time.monotonic() - began
        self._report = report
        return report

    def _free(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._index.save_stamps()
        except OSError:
            self._counts["stamps_failures"] += 1  # the next start evicts in the order of storing, nothing else
        finally:
            self._index.close()
            self._io.close()
            self._epoll.close()
            self._noticed.close()
            self._directory.close()

    # One key

    def _promote(self, moving: _Transfer, i: int) -> None:
        of = moving.of
        block = self._index.pin(of.size_class, of.keys[i])
        if block is None:
            self._end(moving, i, Cause.ABSENT)
        else:
            self._reads.put(Move(of.id, i, of.size_class, of.slots[i], block))

    def _demote(self, moving: _Transfer, i: int) -> None:
        of, key = moving.of, moving.of.keys[i]
        known = self._index.pin(of.size_class, key)
        if known is not None:
            self._end_known(moving, i, known)
        elif key in self._writing:
            self._writing[key].append((moving, i))
        else:
            self._writing[key] = deque()
            self._place(moving, i)

    def _place(self, moving: _Transfer, i: int) -> None:
        """Find a slot for a key that is in `_writing`, and queue its write."""
        of = moving.of
        if self._stopping:
            self._end_write(moving, i, Cause.CANCELLED)
            return
        place = self._index.reserve(of.size_class, of.keys[i], time.monotonic())
        if isinstance(place, Grow):
            self._writes.put_first(place)
            place = None
        if place is not None:
            self._writes.put(Move(of.id, i, of.size_class, of.slots[i], place))
        elif self._index.is_growing:
            self._waiting.setdefault(of.size_class, deque()).append((moving, i))
        else:
            self._end_write(moving, i, Cause.FULL)

    def _end_known(self, moving: _Transfer, i: int, block: Block) -> None:
        moving.holds.append((i, block))
        self._counts["known"] += 1
        self._end(moving, i, Cause.OK)

    def _end_write(self, moving: _Transfer, i: int, cause: Cause) -> None:
        """A demotion ended; those of the same key that waited for it end too, or begin."""
        size_class, key = moving.of.size_class, moving.of.keys[i]
        followers = self._writing.pop(key)
        for other, j in followers if cause is Cause.OK else ():
            block = self._index.pin(size_class, key)
            assert block is not None, "it was written, and its transfer still holds it"
            self._end_known(other, j, block)
        for other, j in followers if cause is Cause.FULL else ():
            self._end(other, j, cause)
        self._end(moving, i, cause)
        if followers and cause not in (Cause.OK, Cause.FULL):
            self._writing[key] = followers
            self._place(*followers.popleft())

    def _end(self, moving: _Transfer, i: int, cause: Cause) -> None:
        if moving.causes[i] is not None:
            raise CoreBug(f"{self.name}: key {i} of transfer {moving.of.id} ended twice")
        moving.causes[i] = cause
        moving.left -= 1
        self._counts[cause] += cause is not Cause.OK
        if moving.of.direction is Direction.PROMOTE:
            self._open_reads -= 1
        else:
            self._open_writes -= 1
            self._open_write_bytes -= self._classes[moving.of.size_class][0]
        if not moving.left:
            self._end_transfer(moving)

    def _end_transfer(self, moving: _Transfer) -> None:
        del self._transfers[moving.of.id]
        for i, block in moving.holds:
            # A promotion found it wrong meanwhile, or its file was removed.
            if block.dead and moving.of.direction is Direction.DEMOTE:
                moving.causes[i] = Cause.ABSENT
                self._counts[Cause.ABSENT] += 1
        self._notice(Ended(moving.of.id, [cause for cause in moving.causes if cause is not None]))
        # The first block of a prefix is of use without the later ones, never the other way round: it goes last.
        for _, block in sorted(moving.holds, key=itemgetter(0), reverse=True):
            self._index.unpin(block)

    # What the threads did

    def _result(self, result: object) -> None:
        if isinstance(result, Failed):
            self._failed(result)
        elif isinstance(result, Moved):
            self._moved(result)
        elif isinstance(result, Grown):
            self._grown(result)
        elif isinstance(result, Synced):
            self._synced(result.job, result.failed)

    def _moved(self, result: Moved) -> None:
        job, cause = result.job, result.cause
        moving = self._transfers[job.transfer]
        self._counts["fallbacks"] += result.fallbacks
        if result.gone:
            self._index.lose(job.block.extent)
        if moving.of.direction is Direction.PROMOTE:
            if cause in (Cause.CHECKSUM, Cause.FOREIGN, Cause.SHORT):
                self._index.remove(job.block)
            moving.holds.append((job.index, job.block))
            self._counts["loaded"] += cause is Cause.OK
            self._end(moving, job.index, cause)
        elif cause is Cause.OK:
            self._index.written(job.block)
            moving.holds.append((job.index, job.block))
            self._dirty.add(job.block.extent)
            self._counts["stored"] += 1
            self._end_write(moving, job.index, cause)
        else:
            self._index.unwritten(job.block)
            if result.gone:
                self._place(moving, job.index)  # nothing was written: another extent, or a new one
            else:
                self._end_write(moving, job.index, cause)

    def _grown(self, result: Grown) -> None:
        self._counts["grow_failures"] += result.extent is None
        self._index.grown(result.job, result.extent, time.monotonic(), dropped=result.dropped)
        # Those it was made for come first: others could take the new extent away while it is still empty.
        grown = result.job.slot_bytes
        for size_class in sorted(self._waiting, key=lambda c: self._index.by_class[c].slot_bytes != grown):
            for wanted in self._waiting.pop(size_class):
                self._place(*wanted)  # it may wait again, for the next extent

    def _failed(self, result: Failed[Move] | Failed[Move | Grow] | Failed[Sync]) -> None:
        """A bug of ours in a thread: its block is lost, the tier says so and ends nothing else wrong."""
        self._failure = self._failure or result.error
        if isinstance(result.item, Grow):
            self._grown(Grown(result.item, None, dropped=False))
        elif isinstance(result.item, Move):
            self._moved(Moved(result.item, Cause.LOST))
        else:
            self._synced(result.item, len(result.item.extents))

    # Taking back

    def _take_back(self, transfers: set[TransferId]) -> None:
        """End everything of `transfers` that has not begun."""
        for followers in self._writing.values():
            for wanted in _split(followers, transfers):
                self._end(*wanted, Cause.CANCELLED)
        for waiting in list(self._waiting.values()):
            for wanted in _split(waiting, transfers):
                self._end_write(*wanted, Cause.CANCELLED)
        for read in self._reads.take_back(lambda job: job.transfer in transfers):
            self._transfers[read.transfer].holds.append((read.index, read.block))
            self._end(self._transfers[read.transfer], read.index, Cause.CANCELLED)
        for write in self._writes.take_back(lambda job: isinstance(job, Move) and job.transfer in transfers):
            assert isinstance(write, Move)
            self._index.unwritten(write.block)
            self._end_write(self._transfers[write.transfer], write.index, Cause.CANCELLED)
        self._flush_evicted()

    # What makes a power loss harmless

    def _sync_when_due(self) -> None:
        if self._dirty and not self._syncing:
            self._sync(Sync(self._config.fsync_interval_s, []))

    def _synced(self, job: Sync, failed: int) -> None:
        self._syncing = False
        self._counts["sync_failures"] += failed
        for extent in job.extents:
            self._index.let_go(extent)
        if not job.extents:  # the wait is over
            dirty = [extent for extent in self._dirty if not extent.gone]
            self._dirty.clear()
            self._sync(Sync(0.0, dirty))

    def _sync(self, job: Sync) -> None:
        if self._syncs is None or self._stopping:
            self._dirty.clear()
            return
        for extent in job.extents:
            self._index.hold(extent)
        self._syncing = True
        self._syncs.put(job)

    # Small things

    def _workers(self) -> list[Worker[Any, Any]]:
        return [self._reads, self._writes, *([self._syncs] if self._syncs else [])]

    def _notice(self, notice: TierNotice) -> None:
        self._notices.append(notice)
        self._noticed.set()

    def _flush_evicted(self) -> None:
        if self._index.evicted:
            self._notice(Evicted(self._index.evicted))
            self._index.evicted = []

    def _usable(self) -> None:
        if self._closed:
            raise Closed(f"{self.name}: closed before this call")
        if self._stopping:
            raise Refused(f"{self.name}: closing, nothing new is accepted")
        if self._failure is not None:
            raise CoreBug(f"{self.name}: a bug ended a block's transfer") from self._failure

    def _room_for(self, transfer: TierTransfer) -> None:
        blocks, limits = len(transfer.keys), self._config
        if transfer.direction is Direction.PROMOTE:
            asked = [("read_queue_blocks_max", self._open_reads + blocks, limits.read_queue_blocks_max)]
        else:
            size = self._open_write_bytes + blocks * self._classes[transfer.size_class][0]
            asked = [
                ("write_queue_blocks_max", self._open_writes + blocks, limits.write_queue_blocks_max),
                ("write_queue_size_max", size, limits.write_queue_size_max),
            ]
        for field, value, limit in asked:
            if value > limit:
                self._counts["refused"] += 1
                raise Refused(
                    f"{self.name}: {blocks} more blocks make {value}, {field} is {int(limit)}; "
                    "try again when transfers have ended, or in smaller ones"
                )

    def _sane(self, transfer: TierTransfer) -> None:
        """What the caller must get right: it is ours, so a mistake is a CoreBug."""
        slots, rows = transfer.slots, 0
        if 0 <= transfer.size_class < len(self._classes):
            rows = self._classes[transfer.size_class][1]
        if len(transfer.keys) != len(slots) or (slots and (min(slots) < 0 or max(slots) >= rows)):
            raise CoreBug(f"{self.name}: transfer {transfer.id} names rows that size class {transfer.size_class} lacks")
        if any(not 0 < len(key) <= fmt.KEY_BYTES_MAX for key in transfer.keys):
            raise CoreBug(f"{self.name}: transfer {transfer.id} has a key of 0 or more than {fmt.KEY_BYTES_MAX} bytes")
        if transfer.id in self._transfers:
            raise CoreBug(f"{self.name}: transfer {transfer.id} was submitted twice")


def _split(wanted: deque[_Wanted], transfers: set[TransferId]) -> list[_Wanted]:
    """Take those of `transfers` out of `wanted`."""
    taken = [each for each in wanted if each[0].of.id in transfers]
    left = [each for each in wanted if each[0].of.id not in transfers]
    wanted.clear()
    wanted.extend(left)
    return taken


TIER_TYPE = TierType(DiskConfig, open_disk)

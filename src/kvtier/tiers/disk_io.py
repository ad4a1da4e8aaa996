"""What the disk tier's threads do: read a block, write a block, make an extent, sync. Plain jobs, plain results.

Rules: a job touches only what it names; nothing of the index is read or changed here. What the outside does wrong
(OSError) is a cause in the result; any other exception is a bug and goes on as one. A row is held only while
its job runs.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.errors import CoreBug
from kvtier.memory.layout import Rows
from kvtier.tiers import disk_format as fmt
from kvtier.tiers.base import Cause
from kvtier.tiers.disk_extent import NO_SPACE, Block, Extent, charge, create_extent, remove_extent, slots_within

_REFUSED = (22, 95)  # EINVAL, EOPNOTSUPP: what direct I/O answers where it cannot do this one operation


@dataclass(slots=True, eq=False)
class Move:
    """Read or write one block: key `index` of transfer `transfer`, between `block` and a row of the region."""

    transfer: int
    index: int
    size_class: int
    row_slot: int
    block: Block


@dataclass(slots=True, eq=False)
class Grow:
    """Make extent `number` with up to `slots` slots, after `drop` is removed."""

    number: int
    slots: int
    slot_bytes: int
    drop: list[Extent] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sync:
    """After `wait_s`, make what was written to `extents` survive a power loss."""

    wait_s: float
    extents: list[Extent]


@dataclass(slots=True, eq=False)
class Moved:
    job: Move
    cause: Cause
    gone: bool = False
    """the file is no longer in its directory: nothing of its extent is there any more"""
    fallbacks: int = 0


@dataclass(slots=True, eq=False)
class Grown:
    job: Grow
    extent: Extent | None
    dropped: bool
    """`drop` is removed and its space is free"""
    error: OSError | None = None


@dataclass(slots=True, eq=False)
class Synced:
    job: Sync
    failed: int = 0


class DiskIO:
    """The threads' side of one open disk tier. `close` only when no thread runs."""

    def __init__(self, rows: Rows, identities: Sequence[fmt.Identity], dir_fd: int, *, direct: bool) -> None:
        self.direct = direct
        self._rows = rows
        self._identities = identities
        self._dir_fd = dir_fd
        self._pages: deque[mmap.mmap] = deque()  # aligned headers, one for each thread that moves something
        self._stop = threading.Event()

    def read(self, job: Move) -> Moved:
        """A block into its row, checked in place."""
        done = Moved(job, Cause.OK)
        if not self._lost(done, job.block.extent.file_fd):
            self._with_page(self._read, done)
        return done

    def write(self, job: Move | Grow) -> Moved | Grown:
        """A row into its slot, then its record; or a new extent."""
        if isinstance(job, Grow):
            return self._grow(job)
        done = Moved(job, Cause.OK)
        extent = job.block.extent
        if not self._lost(done, extent.file_fd) and not self._lost(done, extent.index_fd):
            self._with_page(self._write, done)
        return done

    def sync(self, job: Sync) -> Synced:
        self._stop.wait(job.wait_s)
        done = Synced(job)
        for extent in job.extents:
            try:
                os.fdatasync(extent.file_fd)
                os.fdatasync(extent.index_fd)
            except OSError:
                done.failed += 1
        return done

    def ask_stop(self) -> None:
        """End the wait of a sync."""
        self._stop.set()

    def close(self) -> None:
        while self._pages:
            self._pages.pop().close()

    def _with_page(self, work: Callable[[Moved, memoryview, memoryview], None], done: Moved) -> None:
        """Run `work` with an aligned header page and the row; an OSError becomes the job's cause."""
        try:
            page = self._pages.pop()
        except IndexError:
            page = mmap.mmap(-1, fmt.HEADER_BYTES)
        try:
            with memoryview(page) as header, self._rows.row(done.job.size_class, done.job.row_slot) as row:
                work(done, header, row)
        except OSError as error:
            done.cause = Cause.FULL if error.errno in NO_SPACE else Cause.IO_ERROR
        finally:
            self._pages.append(page)

    def _read(self, done: Moved, header: memoryview, row: memoryview) -> None:
        job, identity = done.job, self._identities[done.job.size_class]
        block = job.block
        moved = self._move(os.preadv, done, block, header, row)
        if moved < len(header) + len(row):
            done.cause = Cause.SHORT
        else:
            done.cause, row_checksum = fmt.check_header(header, identity, block.key)
            if done.cause is Cause.OK and fmt.checksum(row) != row_checksum:
                done.cause = Cause.CHECKSUM
        if done.cause is not Cause.OK:
            # The slot is still ours alone; a start must not find it again.
            os.pwrite(block.extent.index_fd, fmt.EMPTY_RECORD, _record_offset(block))

    def _write(self, done: Moved, header: memoryview, row: memoryview) -> None:
        block, identity = done.job.block, self._identities[done.job.size_class]
        fmt.write_header(header, identity, block.key, fmt.checksum(row))
        moved = self._move(os.pwritev, done, block, header, row)
        if moved < len(header) + len(row):
            raise OSError("a write ended early")
        record = fmt.pack_record(identity, block.key, block.stamp)
        if os.pwrite(block.extent.index_fd, record, _record_offset(block)) != len(record):
            raise OSError("a write of a record ended early")

    def _move(
        self,
        op: Callable[[int, list[memoryview], int], int],
        done: Moved,
        block: Block,
        header: memoryview,
        row: memoryview,
    ) -> int:
        """Header and row as one vectored operation, direct where it goes; what it leaves over, with the page cache."""
        extent, offset = block.extent, block.slot * block.extent.slot_bytes
        moved = 0
        if extent.direct_fd >= 0:
            try:
                moved = op(extent.direct_fd, [header, row], offset)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                done.fallbacks += 1
        while moved < len(header) + len(row):
            left = [header[moved:], row[max(0, moved - len(header)) :]]
            step = op(extent.file_fd, [part for part in left if len(part)], offset + moved)
            if step == 0:
                break
            moved += step
        return moved

    def _grow(self, job: Grow) -> Grown:
        dropped = False
        try:
            for extent in job.drop:
                extent.close()
                remove_extent(self._dir_fd, extent.number)
            dropped = True
            space = os.fstatvfs(self._dir_fd)
            slots = min(job.slots, slots_within(space.f_bavail * space.f_frsize, job.slot_bytes))
            while slots > 0:
                try:
                    return Grown(job, self._create(job, slots), dropped)
                except OSError as error:
                    if error.errno not in NO_SPACE:
                        raise
                slots //= 2
            return Grown(job, None, dropped, OSError(NO_SPACE[0], "no space"))
        except OSError as error:
            return Grown(job, None, dropped, error)

    def _create(self, job: Grow, slots: int) -> Extent:
        extent = create_extent(self._dir_fd, job.number, slots, job.slot_bytes, direct=self.direct)
        if extent.size_bytes > charge(job.slots, job.slot_bytes):
            extent.close()
            remove_extent(self._dir_fd, job.number)
            raise OSError(NO_SPACE[0], "the file system took more than was reserved")
        return extent

    def _lost(self, done: Moved, fd: int) -> bool:
        if fd < 0:
            raise CoreBug(f"extent {done.job.block.extent.number} was closed under a running transfer")
        try:
            lost = os.fstat(fd).st_nlink == 0
        except OSError:
            done.cause = Cause.IO_ERROR
            return True
        if lost:
            done.cause, done.gone = Cause.ABSENT, True
        return lost


def _record_offset(block: Block) -> int:
    return fmt.HEADER_BYTES + block.slot * fmt.RECORD_BYTES

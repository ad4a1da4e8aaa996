"""One extent of a disk tier: equal slots of one size in a file of their own, and the index table beside it.

Rules: an extent has its full size from its first moment on, so that a write needs no space; space goes back
to the file system only with the whole extent. Only files named like extents are ever touched.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from kvtier.errors import ConfigError
from kvtier.tiers import disk_format as fmt

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NAME = re.compile(r"(\d{6,})\.(rows|index)")
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
# What the file system itself may need for a file, in its own blocks: its map, in pieces as small as slots.
_SLACK_BYTES = 16384
_SLACK_PART = 256


class Block(msgspec.Struct, eq=False, gc=False):
    """A stored block and where it lies. Belongs to the thread that owns the index.

    Unseen by the garbage collector, which would walk all of them: whoever drops an extent empties its `blocks`.
    """

    key: bytes
    extent: Extent
    slot: int
    stamp: int
    ours: bool = True
    """whether it is of our namespace and layout; others only take up room"""
    used: bool = False
    """since its stamp was written down"""
    readers: int = 0
    dead: bool = False
    """not known any more, though a read may still run"""


@dataclass(slots=True, eq=False)
class Extent:
    """An open extent. Descriptors are used by the I/O threads; everything else by the index alone."""

    number: int
    slots: int
    slot_bytes: int
    size_bytes: int
    """what it is charged for: both files with what the file system needs for them"""
    file_fd: int = -1
    direct_fd: int = -1
    """the same file without the page cache; -1 where that is off or not to be had"""
    index_fd: int = -1
    free: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    stamps_sum: int = 0
    running: int = 0
    """reads and writes that use it now"""
    gone: bool = False
    """somebody removed its files"""

    def age(self) -> float:
        """The mean stamp of its blocks: the smaller, the longer unused."""
        return self.stamps_sum / len(self.blocks) if self.blocks else -1.0

    def close(self) -> None:
        for fd in (self.file_fd, self.direct_fd, self.index_fd):
            if fd >= 0:
                os.close(fd)
        self.file_fd = self.direct_fd = self.index_fd = -1
        self.blocks.clear()


def names(number: int) -> tuple[str, str]:
    return f"{number:06d}.rows", f"{number:06d}.index"


def charge(slots: int, slot_bytes: int) -> int:
    """Bytes that an extent may take of the file system, never less than it does."""
    plain = slots * slot_bytes + fmt.index_bytes(slots)
    return plain + _SLACK_BYTES + fmt.pages(plain // _SLACK_PART)


def slots_within(size_bytes: int, slot_bytes: int) -> int:
    """The most slots of which an extent is charged no more than `size_bytes`."""
    slots = max(0, size_bytes // slot_bytes)
    while slots and charge(slots, slot_bytes) > size_bytes:
        slots -= max(1, (charge(slots, slot_bytes) - size_bytes) // (2 * slot_bytes))
    return slots


def create_extent(dir_fd: int, number: int, slots: int, slot_bytes: int, *, direct: bool) -> Extent:
    """Create both files at their full size. Raises OSError, and leaves nothing then."""
    rows_name, index_name = names(number)
    extent = Extent(number, slots, slot_bytes, charge(slots, slot_bytes))
    try:
        new = _OPEN | os.O_CREAT | os.O_EXCL
        extent.file_fd = os.open(rows_name, new, 0o600, dir_fd=dir_fd)
        os.posix_fallocate(extent.file_fd, 0, slots * slot_bytes)
        extent.index_fd = os.open(index_name, new, 0o600, dir_fd=dir_fd)
        os.posix_fallocate(extent.index_fd, 0, fmt.index_bytes(slots))
        os.pwrite(extent.index_fd, fmt.head_page(slots, slot_bytes), 0)
        if direct:
            extent.direct_fd = os.open(rows_name, _OPEN | os.O_DIRECT, dir_fd=dir_fd)
    except BaseException:
        extent.close()
        remove_extent(dir_fd, number)
        raise
    extent.size_bytes = max(extent.size_bytes, _taken_bytes(extent))
    extent.free = list(range(slots))[::-1]
    return extent


def remove_extent(dir_fd: int, number: int) -> None:
    """Remove both files; one that is missing already is fine."""
    for name in names(number):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)


def numbers_in(dir_fd: int) -> tuple[list[int], list[int]]:
    """The extents of a directory: whole pairs, and halves that a crash or a human left."""
    found: dict[int, set[str]] = {}
    for name in os.listdir(dir_fd):
        match = _NAME.fullmatch(name)
        if match and names(int(match[1]))[match[2] == "index"] == name:
            found.setdefault(int(match[1]), set()).add(match[2])
    whole = sorted(number for number, parts in found.items() if len(parts) == 2)
    return whole, sorted(set(found) - set(whole))


def open_extent(dir_fd: int, number: int, *, direct: bool) -> tuple[Extent, fmt.Records] | None:
    """Open a stored extent and read its table; None where it is not usable. Raises ConfigError, OSError.

    A rows file that was cut short stays: its lost slots are misses, and are whole again once written.
    """
    rows_name, index_name = names(number)
    extent = Extent(number, 0, 0, 0)
    usable = False
    try:
        extent.index_fd = os.open(index_name, _OPEN, dir_fd=dir_fd)
        head, table = read_index(extent.index_fd, index_name)
        if head is not None:
            extent.file_fd = os.open(rows_name, _OPEN, dir_fd=dir_fd)
            extent.slots, extent.slot_bytes = head.slots, head.slot_bytes
            whole_bytes = head.slots * head.slot_bytes
            if os.fstat(extent.file_fd).st_size > whole_bytes:
                os.ftruncate(extent.file_fd, whole_bytes)
            if direct:
                extent.direct_fd = os.open(rows_name, _OPEN | os.O_DIRECT, dir_fd=dir_fd)
            extent.size_bytes = max(charge(head.slots, head.slot_bytes), _taken_bytes(extent))
            usable = True
            return extent, table
        return None
    finally:
        if not usable:
            extent.close()


def read_index(fd: int, name: str) -> tuple[fmt.Head | None, fmt.Records]:
    """The head of an index table, None where it is torn or not ours, and a record for each slot."""
    empty = np.zeros(0, fmt.RECORD)
    head = fmt.read_head(os.pread(fd, fmt.HEADER_BYTES, 0))
    if head is not None and head.version > fmt.VERSION:
        raise ConfigError(
            f"{name} has format version {head.version}, this kvtier reads up to {fmt.VERSION}: "
            "give another path, or use the kvtier that wrote it"
        )
    if head is None or head.version != fmt.VERSION or head.slot_bytes <= fmt.HEADER_BYTES or not head.slots:
        return None, empty
    wanted = head.slots * fmt.RECORD_BYTES
    if wanted > os.fstat(fd).st_size * 2 + (1 << 20):  # a head that lies would make us allocate what it says
        return None, empty
    raw = bytearray(os.pread(fd, wanted, fmt.HEADER_BYTES))
    raw.extend(bytes(wanted - len(raw)))
    return head, np.frombuffer(raw, fmt.RECORD)


def read_index_file(path: Path) -> tuple[fmt.Head | None, fmt.Records]:
    """`read_index` by path, reading only."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return read_index(fd, str(path))
    finally:
        os.close(fd)


def probe_direct(dir_fd: int) -> bool:
    """Whether the file system of a directory does direct I/O; by trying, since some refuse only the write."""
    name = "probe"
    fd = -1
    page = mmap.mmap(-1, fmt.PAGE_BYTES)
    try:
        fd = os.open(name, _OPEN | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600, dir_fd=dir_fd)
        return os.pwrite(fd, page, 0) == fmt.PAGE_BYTES and os.preadv(fd, [page], 0) == fmt.PAGE_BYTES
    except OSError:
        return False
    finally:
        page.close()
        if fd >= 0:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)


def _taken_bytes(extent: Extent) -> int:
    return sum(os.fstat(fd).st_blocks for fd in (extent.file_fd, extent.index_fd)) * 512

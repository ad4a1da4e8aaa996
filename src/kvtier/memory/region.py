"""The region: one memfd of host memory that ranks, the scheduler side and tier processes map.

Rules:
1. It never has a name, so nothing is left of it when its processes die. It is sealed against resizing.
2. `create` checks the space before it touches a page and takes every page before it returns, so that
   a later write cannot fail. `attach` maps what exists; it never creates.
3. `close` unmaps only what nobody looks at: with views still exported the memory is kept, and a later
   close frees it. `keep` holds the mapping until the process exits, for memory a device may still write.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import select
import time
import warnings
import weakref
from collections.abc import Callable

import numpy as np

from kvtier.errors import Closed, ConfigError, TierBroken
from kvtier.memory.layout import Bytes
from kvtier.memory.space import available_bytes as measure_available
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.runtime.worker import Failed, Worker

log = logging.getLogger(__name__)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
CHUNK_BYTES = 64 << 20
"""populated in one call; small enough to show progress and to stop early"""
PROGRESS_SECONDS = 2.0
MADV_POPULATE_WRITE = 23
"""since Linux 5.14; the mmap module does not name it"""

_kept: list[Region] = []
"""regions that must outlive their owners (rule 3)"""


class Region:
    """A mapped memfd. Made by `create` or `attach`; owns descriptor and mapping."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map `size_bytes` of `fd` and take the descriptor over. On an error it stays the caller's."""
        self._map: mmap.mmap | None = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
        self._array: Bytes | None = np.frombuffer(self._map, dtype=np.uint8)
        self._fd: int | None = fd
        self.size_bytes = size_bytes
        self._stopping = False
        self._backstop = weakref.finalize(self, _dropped, fd, os.getpid())

    @classmethod
    def create(
        cls,
        size_bytes: int,
        *,
        populate_threads: int = 2,
        available_bytes: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Region:
        """A new region with every page taken; all zero.

        `available_bytes` replaces the measured space. `progress(done_bytes, size_bytes)` is called about
        every 2 s instead of logging. Raises ConfigError: too little space, or the kernel refused pages.
        """
        if size_bytes < 1 or size_bytes % mmap.PAGESIZE:
            raise ConfigError(f"a region of {size_bytes} bytes: its size must be a multiple of {mmap.PAGESIZE}")
        available = measure_available() if available_bytes is None else available_bytes
        if size_bytes > available:
            raise ConfigError(
                f"host.size needs {size_bytes} bytes of memory, {available} are available: lower host.size, "
                f"or raise the memory limit of this container or machine"
            )
        fd = os.memfd_create("kvtier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
            region = cls(fd, size_bytes)
        except OSError as e:
            os.close(fd)
            raise ConfigError(f"host.size of {size_bytes} bytes cannot be mapped ({e}): lower host.size") from e
        except BaseException:
            os.close(fd)
            raise
        try:
            _populate(region, populate_threads, progress or _log_progress)
        except BaseException:
            region.close(Deadline.after(0))
            raise
        return region

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> Region:
        """Map an existing region. Takes `fd` over when it returns; on an error it stays the caller's.

        Raises TierBroken where `fd` is not a sealed memfd of exactly `size_bytes`.
        """
        try:
            actual = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as e:
            raise TierBroken(f"descriptor {fd} is not a region: {e}") from e
        if actual != size_bytes or seals & SEALS != SEALS:
            raise TierBroken(
                f"descriptor {fd} is not the region asked for: {actual} bytes where {size_bytes} were told, "
                f"seals {seals:#x} where {SEALS:#x} are needed"
            )
        return cls(fd, size_bytes)

    @property
    def fd(self) -> int:
        """The memfd, for handing over. Stays the region's."""
        if self._fd is None:
            raise Closed("the region was closed before its descriptor was asked for")
        return self._fd

    @property
    def array(self) -> Bytes:
        """All bytes, (size_bytes,) uint8, writable. Every view of it keeps the memory mapped."""
        if self._array is None:
            raise Closed("the region was closed before this use")
        return self._array

    @property
    def closed(self) -> bool:
        """Whether it is unmapped; False while it is kept."""
        return self._map is None

    def keep(self) -> None:
        """Hold the mapping until the process exits, or until a close that frees it."""
        if self._map is not None and self not in _kept:
            _kept.append(self)

    def ask_stop(self) -> None:
        """Nothing to wait for: a region is passive."""

    def close(self, deadline: Deadline) -> CloseReport:
        """Unmap and close the descriptor; at once, and again if views were left the last time."""
        started = time.monotonic()
        self._array = None
        if self._fd is not None:
            self._backstop.detach()
            os.close(self._fd)
            self._fd = None
        if self._map is not None:
            try:
                self._map.close()
            except BufferError as e:
                return CloseReport(
                    "region",
                    memory=Memory.KEPT,
                    seconds=time.monotonic() - started,
                    cause=f"still exported: a view of its {self.size_bytes} bytes is alive ({e})",
                )
            self._map = None
        if self in _kept:
            _kept.remove(self)
        return CloseReport("region", Outcome.CLEAN, seconds=time.monotonic() - started)


def _dropped(fd: int, pid: int) -> None:
    """Backstop for a region that was never closed. The mapping goes with its last view by itself."""
    if os.getpid() == pid:
        warnings.warn("a region was dropped without close", ResourceWarning, stacklevel=2)
        os.close(fd)


def _log_progress(done_bytes: int, size_bytes: int) -> None:
    log.info("host memory: %d of %d MiB reserved", done_bytes >> 20, size_bytes >> 20)


def _populate(region: Region, threads: int, progress: Callable[[int, int], None]) -> None:
    """Take all pages, `threads` chunks at a time."""
    libc = ctypes.CDLL(None, use_errno=True)  # mmap.madvise holds the interpreter lock for the whole call
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    base, size, fd = region.array.ctypes.data, region.size_bytes, region.fd

    def take(offset: int) -> int:
        length = min(CHUNK_BYTES, size - offset)
        if libc.madvise(base + offset, length, MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, os.strerror(code))
            os.posix_fallocate(fd, offset, length)  # an older kernel: reserved, mapped at the first touch
        return length

    chunks = range(0, size, CHUNK_BYTES)
    worker: Worker[int, int] = Worker("kvtier-populate", take, inbox_limit=len(chunks), threads=threads)
    worker.start()
    done = ended = 0
    last = time.monotonic()
    try:
        for offset in chunks:
            worker.put(offset)
        while ended < len(chunks):
            _wait_readable(worker.fileno(), PROGRESS_SECONDS)
            for notice in worker.poll():
                ended += 1
                if isinstance(notice, Failed):
                    raise ConfigError(
                        f"host.size of {size} bytes: the kernel gave {done} bytes, then refused ({notice.error}): "
                        f"lower host.size"
                    ) from notice.error
                done += notice
            if time.monotonic() - last >= PROGRESS_SECONDS:
                last = time.monotonic()
                progress(done, size)
    finally:
        worker.ask_stop(drop_queued=True)
        worker.close(Deadline.after(60))
    progress(done, size)


def _wait_readable(fd: int, seconds: float) -> None:
    """Sleep until `fd` is readable, at most `seconds`."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(seconds * 1000)

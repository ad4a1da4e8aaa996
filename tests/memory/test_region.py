"""The region: space is checked before pages are touched, nothing has a name, closing keeps what is in use."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import Closed, ConfigError, TierBroken
from kvtier.memory import region as region_module
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import Memory, Outcome

MIB = 1 << 20


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes(region: Region) -> int:
    return os.fstat(region.fd).st_blocks * 512


def pattern(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_every_page_is_taken_before_create_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "CHUNK_BYTES", MIB)
    region = Region.create(5 * MIB + 4096)
    assert resident_bytes(region) == 5 * MIB + 4096
    assert not region.array.any()
    region.array[:] = pattern(region.size_bytes)
    assert (region.array == pattern(region.size_bytes)).all()
    assert region.close(Deadline.after(1)).clean


def test_pages_are_reserved_where_the_kernel_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "MADV_POPULATE_WRITE", 9999)
    region = Region.create(2 * MIB)
    assert resident_bytes(region) == 2 * MIB
    assert region.close(Deadline.after(1)).clean


def test_too_little_space_is_said_before_anything_is_opened() -> None:
    before = open_fds()
    with pytest.raises(ConfigError, match=r"16777216 bytes.* 8388608 are available: lower host.size"):
        Region.create(16 * MIB, available_bytes=8 * MIB)
    assert open_fds() == before


def test_more_than_the_machine_has_is_refused_by_measuring() -> None:
    with pytest.raises(ConfigError, match=r"lower host\.size"):
        Region.create(1 << 50)


@pytest.mark.parametrize("size", [0, -4096, 4097])
def test_a_size_that_is_not_whole_pages_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        Region.create(size)


def test_pages_that_the_kernel_refuses_free_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, offset: int, length: int) -> None:
        if offset >= 2 * MIB:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(region_module, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(region_module, "MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(region_module.os, "posix_fallocate", no_space)
    before = open_fds()
    with pytest.raises(ConfigError, match=r"(?s)4194304 bytes.*No space left.*lower host.size"):
        Region.create(4 * MIB, populate_threads=1)
    assert open_fds() == before


def test_progress_is_told_for_each_part_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(region_module, "PROGRESS_SECONDS", 0.0)
    told: list[tuple[int, int]] = []
    region = Region.create(3 * MIB, progress=lambda done, size: told.append((done, size)))
    assert told[-1] == (3 * MIB, 3 * MIB)
    assert told == sorted(told)
    region.close(Deadline.after(1))


def test_it_cannot_be_resized_or_unsealed_by_anyone() -> None:
    region = Region.create(MIB)
    for size in (MIB - 4096, MIB + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(region.fd)
    region.close(Deadline.after(1))


def test_attached_regions_are_the_same_bytes() -> None:
    ours = Region.create(MIB)
    theirs = Region.attach(os.dup(ours.fd), MIB)
    ours.array[:] = pattern(MIB)
    assert os.fstat(ours.fd).st_ino == os.fstat(theirs.fd).st_ino
    assert ours.close(Deadline.after(1)).clean
    assert (theirs.array == pattern(MIB)).all()
    assert theirs.close(Deadline.after(1)).clean


def test_attach_refuses_what_is_not_the_region_told() -> None:
    ours = Region.create(MIB)
    unsealed = os.memfd_create("kvtier-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, MIB)
    read_end, write_end = os.pipe()
    before = open_fds()
    for fd, size in ((ours.fd, 2 * MIB), (unsealed, MIB), (read_end, MIB), (9999, MIB)):
        with pytest.raises(TierBroken):
            Region.attach(fd, size)
    assert open_fds() == before
    for fd in (unsealed, read_end, write_end):
        os.close(fd)
    ours.close(Deadline.after(1))


def test_a_view_still_exported_keeps_the_memory_until_a_second_close() -> None:
    region = Region.create(MIB)
    region.array[:] = pattern(MIB)
    kept, dropped = region.array[100:200], region.array[:50]
    del dropped
    report = region.close(Deadline.after(1))
    assert (report.ended, report.memory) == (Outcome.CLEAN, Memory.KEPT)
    assert report.cause.startswith("still exported: ")
    assert not region.closed
    assert (kept == pattern(MIB)[100:200]).all()
    with pytest.raises(Closed):
        _ = region.array
    with pytest.raises(Closed):
        _ = region.fd
    del kept
    report = region.close(Deadline.after(1))
    assert report.clean
    assert report.cause == ""
    assert region.closed


def test_closing_twice_is_clean_and_closes_no_foreign_descriptor() -> None:
    region = Region.create(MIB)
    number = region.fd
    assert region.close(Deadline.after(1)).clean
    other = os.open("/dev/null", os.O_RDONLY)
    assert other == number  # the kernel gives the lowest free number: a double close would hit this one
    assert region.close(Deadline.after(1)).clean
    os.fstat(other)
    os.close(other)


@pytest.mark.processes
def test_descriptor_zero_is_closed_as_well() -> None:
    script = """
import os
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
os.close(0)
region = Region.create(1 << 20)
assert region.fd == 0, region.fd
assert region.close(Deadline.after(1)).clean
try:
    os.fstat(0)
except OSError:
    print("closed")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "closed\n"


def test_a_kept_region_outlives_its_owner_and_can_still_be_freed() -> None:
    region = Region.create(MIB)
    inode = f"{os.fstat(region.fd).st_ino}"
    region.keep()
    region.keep()
    del region
    gc.collect()
    assert inode in Path("/proc/self/maps").read_text()
    (kept,) = region_module._kept
    assert kept.close(Deadline.after(1)).clean
    assert region_module._kept == []


def test_a_dropped_region_is_closed_by_its_backstop() -> None:
    before = open_fds()
    region = Region.create(MIB)
    holder = [region]
    del region
    with pytest.warns(ResourceWarning, match="dropped without close"):
        holder.clear()
    assert open_fds() == before


def test_a_large_mapping_has_no_name_anywhere() -> None:
    region = Region.create(64 * mmap.PAGESIZE)
    inode = os.fstat(region.fd).st_ino
    assert inode not in {os.stat(f"/dev/shm/{name}").st_ino for name in os.listdir("/dev/shm")}
    assert os.readlink(f"/proc/self/fd/{region.fd}").endswith("(deleted)")
    region.close(Deadline.after(1))

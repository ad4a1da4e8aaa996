"""The disk tier beyond the contract: its bound, what disks and humans do to it, its queues and its close."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.config import Size
from kvtier.errors import ConfigError, CoreBug, Refused
from kvtier.memory.layout import Layout, Rows, SizeClass
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import Memory, Outcome
from kvtier.testing.disk_tools import locate, size_for, used_bytes
from kvtier.testing.tier_suite import NAMESPACE, Driver, Region, key_of, keys_of, pattern
from kvtier.tiers import disk_format as fmt
from kvtier.tiers import disk_index, disk_io, disk_lock
from kvtier.tiers.base import Cause, Direction, TierNotice
from kvtier.tiers.disk import DiskConfig, DiskTier, open_disk

OK = Cause.OK
ROW = 8192
Open = Callable[..., Driver]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def opened(path: Path) -> Iterator[Open]:
    """Open a driven tier on `path`; what is still open at the end of the test is closed, and must close clean."""
    drivers: list[Driver] = []

    def open_one(*, payloads: tuple[int, ...] = (ROW,), rows: int = 32, blocks: int = 1000, **options: Any) -> Driver:
        region = Region(payloads, rows)
        options = {"path": str(path), "size": Size(size_for(blocks, payloads[0])), "direct": "off"} | options
        driver = Driver(open_disk(DiskConfig(**options), region.rows, NAMESPACE), region)
        drivers.append(driver)
        return driver

    yield open_one
    for driver in drivers:
        assert driver.close().clean
        driver.region.close()


def shut(driver: Driver) -> None:
    assert driver.close().clean


def count(driver: Driver, name: str) -> int:
    return driver.tier.counts()[name]


# The bound


def test_a_gibibyte_through_64_mebibytes_never_takes_more(path: Path, opened: Open) -> None:
    size, seen = 64 << 20, []
    d = opened(payloads=(1 << 20,), size=Size(size))

    def poll_and_look() -> list[TierNotice]:
        notices = Driver.poll(d)
        seen.append(used_bytes(path / "engine-0"))
        return notices

    d.poll = poll_and_look  # type: ignore[method-assign]
    for start in range(0, 1008, 16):  # whatever the rows hold
        assert d.wait(d.submit(Direction.DEMOTE, keys_of(range(start, start + 16)))) == [OK] * 16
        seen.append(used_bytes(path / "engine-0"))
    assert d.store(keys_of(range(1008, 1024))) == [OK] * 16
    assert len(seen) > 100
    assert max(seen) <= size
    assert count(d, "used_bytes") <= size
    assert max(seen) > 0.9 * size, "most of the room must be used"
    assert count(d, "stored_blocks_count") == 1024
    assert count(d, "blocks_count") == 1024 - count(d, "evicted_blocks_count")
    assert d.load(keys_of(range(1008, 1024))) == [OK] * 16


def test_the_two_longest_unused_go_when_twelve_come_into_room_for_ten(opened: Open) -> None:
    d = opened(blocks=10)
    d.store(keys_of(range(10)))
    d.load(keys_of([0]))
    d.store(keys_of([1]))  # known: only touched
    d.store(keys_of([10]))
    d.store(keys_of([11]))
    assert d.evicted == keys_of([9, 8]), "of one transfer the last block goes first"
    assert d.ask(keys_of(range(12))) == [True] * 8 + [False, False, True, True]


def test_blocks_that_are_read_are_not_evicted(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    d = opened(blocks=10)
    d.store(keys_of(range(10)))
    with held_back(monkeypatch, "preadv") as gate:
        read = d.submit(Direction.PROMOTE, keys_of(range(10)), range(10, 20))
        assert d.store(keys_of([11])) == [Cause.FULL]
        assert d.evicted == []
        gate.set()
    assert d.wait(read) == [OK] * 10
    assert d.store(keys_of([11])) == [OK]


def test_real_full_file_system_fails_stores_until_there_is_room(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "tiny"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", mount], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {done.stderr.strip()}")
    try:
        monkeypatch.setattr(disk_index, "GROW_RETRY_S", 0.02)
        ballast = mount / "ballast"
        d = opened(path=str(mount / "tier"), size=Size("64MiB"))
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(mount).f_bavail * 4096)
        assert d.store(keys_of([1, 2])) == [Cause.FULL] * 2
        assert count(d, "blocks_count") == 0
        assert count(d, "full_count") == 2
        ballast.unlink()
        until(lambda: d.store(keys_of([1, 2])) == [OK] * 2)
        for start in range(10, 330, 16):  # more than the file system holds: evicted, never an error
            assert d.store(keys_of(range(start, start + 16))) == [OK] * 16
        assert count(d, "evicted_blocks_count") > 0
        assert d.load(keys_of(range(314, 330))) == [OK] * 16
        shut(d)
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_a_smaller_size_at_the_next_start_holds_from_its_first_moment(path: Path, opened: Open) -> None:
    d = opened(payloads=(1 << 20,), size=Size("96MiB"))
    for start in range(0, 80, 16):
        d.store(keys_of(range(start, start + 16)))
    shut(d)
    d = opened(payloads=(1 << 20,), size=Size("40MiB"))
    assert used_bytes(path / "engine-0") <= 40 << 20
    assert 0 < count(d, "blocks_count") < 40
    d.store(keys_of(range(100, 116)))
    assert used_bytes(path / "engine-0") <= 40 << 20


def test_size_classes_share_the_size_by_use(path: Path, opened: Open) -> None:
    size = 64 << 20
    d = opened(payloads=(1 << 20, 256 << 10), size=Size(size))
    for start in range(0, 96, 16):
        assert d.store(keys_of(range(start, start + 16))) == [OK] * 16
    assert count(d, "blocks_bytes") > 0.85 * size, "one class alone gets everything"
    for start in range(1000, 1640, 16):
        assert d.store(keys_of(range(start, start + 16)), size_class=1) == [OK] * 16
        assert used_bytes(path / "engine-0") <= size
    assert sum(d.ask(keys_of(range(1000, 1640)))) > 100, "the other class must get room when it is the one in use"
    assert d.load(keys_of(range(1624, 1640)), size_class=1) == [OK] * 16
    d.store(keys_of(range(16)))
    assert d.load(keys_of(range(16))) == [OK] * 16
    assert count(d, "used_bytes") <= size


# What disks do


def test_one_flipped_bit_in_each_of_a_hundred_blocks_is_found_a_hundred_times(path: Path, opened: Open) -> None:
    d = opened(rows=100)
    keys = keys_of(range(100))
    assert d.store(keys) == [OK] * 100
    bits = np.random.default_rng(3).integers(0, (fmt.HEADER_BYTES + ROW) * 8, 100).tolist()
    for key, bit in zip(keys, bits, strict=True):
        locate(path, key).flip(bit)
    assert d.load(keys) == [Cause.CHECKSUM] * 100
    assert count(d, "checksum_count") == 100
    assert sorted(d.evicted) == sorted(keys)
    assert d.ask(keys) == [False] * 100
    shut(d)
    assert count(opened(rows=100), "blocks_count") == 0, "a start must not find them again"


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_file_cut_at_every_page_gives_misses_only(path: Path, opened: Open, direct: str) -> None:
    keys = keys_of(range(6))
    d = opened(blocks=6, direct=direct)
    slot_bytes = fmt.slot_bytes_of(ROW)
    for pages in range(6 * slot_bytes // 4096 - 1, -1, -3):
        assert d.store(keys) == [OK] * 6
        at = {key: locate(path, key) for key in keys}
        os.truncate(at[keys[0]].file, pages * 4096)
        if pages % 2:
            shut(d)
            d = opened(blocks=6, direct=direct)
        whole = [at[key].offset + slot_bytes <= pages * 4096 for key in keys]
        assert d.load(keys) == [OK if good else Cause.SHORT for good in whole]
        assert used_bytes(path / "engine-0") <= size_for(6, ROW)


@pytest.mark.parametrize("suffix", ["rows", "index"])
@pytest.mark.parametrize("change", ["empty", "one byte", "one less", "one more", "missing"])
def test_files_of_any_length_give_misses_only(path: Path, opened: Open, suffix: str, change: str) -> None:
    keys = keys_of(range(8))
    d = opened(blocks=8)
    d.store(keys)
    shut(d)
    file = path / "engine-0" / f"000000.{suffix}"
    size = file.stat().st_size
    if change == "missing":
        file.unlink()
    else:
        os.truncate(file, {"empty": 0, "one byte": 1, "one less": size - 1, "one more": size + 1}[change])
    d = opened(blocks=8)
    assert set(d.load(keys)) <= {OK, Cause.SHORT, Cause.ABSENT}
    assert used_bytes(path / "engine-0") <= size_for(8, ROW)
    assert d.store(keys) == [OK] * 8
    assert d.load(keys) == [OK] * 8


def test_random_bytes_instead_of_an_index_give_misses_only(path: Path, opened: Open) -> None:
    keys = keys_of(range(8))
    d = opened(blocks=8)
    d.store(keys)
    shut(d)
    for number, where in enumerate([0, 8, 12, 16, fmt.HEADER_BYTES, fmt.HEADER_BYTES + 200]):
        with next(path.glob("engine-0/*.index")).open("r+b") as file:
            file.seek(where)
            file.write(np.random.default_rng(number).bytes(256) if where else b"KVTIERIX\x01\0\0\0" + b"\xff" * 256)
        d = opened(blocks=8)
        d.load(keys)
        assert d.store(keys) == [OK] * 8
        assert d.load(keys) == [OK] * 8
        shut(d)


def test_an_input_error_on_a_read_deletes_nothing(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    d = opened()
    d.store(keys_of([1, 2]))
    failing(monkeypatch, "preadv", errno.EIO, times=2)
    assert d.load(keys_of([1, 2])) == [Cause.IO_ERROR] * 2
    assert d.evicted == []
    assert d.load(keys_of([1, 2])) == [OK] * 2
    assert count(d, "io_error_count") == 2


@pytest.mark.parametrize(("number", "cause"), [(errno.EIO, Cause.IO_ERROR), (errno.ENOSPC, Cause.FULL)])
def test_an_error_on_a_write_is_a_cause_and_the_next_write_works(
    opened: Open, monkeypatch: pytest.MonkeyPatch, number: int, cause: Cause
) -> None:
    d = opened()
    failing(monkeypatch, "pwritev", number, times=1)
    assert d.store(keys_of([1])) == [cause]
    assert d.ask(keys_of([1])) == [False]
    assert d.store(keys_of([1])) == [OK]
    assert d.load(keys_of([1])) == [OK]


def test_a_file_removed_while_open_is_a_miss_counted_down_once_and_made_anew(path: Path, opened: Open) -> None:
    d = opened()
    empty = count(d, "used_bytes")
    d.store(keys_of(range(4)))
    for file in path.glob("engine-0/*.rows"):
        file.unlink()
    assert d.load(keys_of(range(4))) == [Cause.ABSENT] * 4
    assert sorted(d.evicted) == sorted(keys_of(range(4)))
    assert (count(d, "blocks_count"), count(d, "used_bytes")) == (0, empty)
    assert list(path.glob("engine-0/0*")) == []
    assert d.store(keys_of(range(4))) == [OK] * 4
    assert d.load(keys_of(range(4))) == [OK] * 4


@pytest.mark.parametrize("suffix", ["rows", "index"])
def test_stores_go_on_when_a_file_was_removed_before_an_eviction(path: Path, opened: Open, suffix: str) -> None:
    d = opened(blocks=8)
    d.store(keys_of(range(8)))
    next(path.glob(f"engine-0/*.{suffix}")).unlink()
    assert d.store(keys_of(range(8, 12))) == [OK] * 4
    assert d.load(keys_of(range(8, 12))) == [OK] * 4
    assert used_bytes(path / "engine-0") <= size_for(8, ROW)


# Direct I/O


def needs_direct(d: Driver) -> None:
    if not d.tier._io.direct:
        pytest.skip("this file system has no direct I/O")


@pytest.mark.parametrize(("skew", "row_bytes"), [(1, 8192), (0, 5000), (513, 777)])
def test_rows_that_direct_io_cannot_move_go_through_the_page_cache(path: Path, skew: int, row_bytes: int) -> None:
    array = np.zeros(row_bytes * 8 + 8192, np.uint8)
    aligned = -array.ctypes.data % 4096
    array = array[aligned + skew :]
    rows = Rows(array, Layout(row_bytes * 8, 1, [SizeClass(0, 0, row_bytes, 8)]))
    tier = open_disk(DiskConfig(path=str(path), size=Size("1MiB")), rows, NAMESPACE)
    d = Driver(tier, Region([4096], 1))
    try:
        needs_direct(d)
        for slot in range(8):
            rows.row(0, slot)[:] = pattern(key_of(slot), row_bytes)
        assert d.wait(d.submit(Direction.DEMOTE, keys_of(range(8)))) == [OK] * 8
        array[:] = 0
        assert d.wait(d.submit(Direction.PROMOTE, keys_of(range(8)))) == [OK] * 8
        for slot in range(8):
            assert bytes(rows.row(0, slot)) == pattern(key_of(slot), row_bytes)
        assert count(d, "direct_fallbacks_count") == 16
    finally:
        assert d.close().clean
        d.region.close()


def test_a_file_system_that_refuses_direct_writes_later_is_written_through_the_page_cache(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = opened(direct="auto")
    needs_direct(d)
    real = os.pwritev

    def refuse_direct(fd: int, buffers: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") and is_direct(fd):
            raise OSError(errno.EINVAL, "no")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse_direct)
    assert d.store(keys_of(range(4))) == [OK] * 4
    assert d.load(keys_of(range(4))) == [OK] * 4
    assert count(d, "direct_fallbacks_count") == 4


def is_direct(fd: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_short_writes_and_reads_are_finished(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    d = opened()
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def some(fd: int, buffers: list[memoryview], offset: int, real: Any = real) -> int:
            moved: int = real(fd, [buffers[0][:3000]], offset)
            return moved

        monkeypatch.setattr(os, name, some)
    assert d.store(keys_of([1, 2])) == [OK] * 2
    assert d.load(keys_of([1, 2])) == [OK] * 2


# Starting


def test_a_second_engine_is_told_who_holds_the_directory(
    path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_lock, "LOCK_WAIT_S", 0.05)
    opened()
    with pytest.raises(ConfigError) as caught:
        opened()
    for part in (str(path), f"pid {os.getpid()}", "engines_max", "another path"):
        assert part in str(caught.value)


def test_engines_max_gives_each_engine_a_directory(path: Path, opened: Open) -> None:
    one, two = opened(engines_max=2), opened(engines_max=2)
    one.store(keys_of([1]))
    assert two.ask(keys_of([1])) == [False]
    assert sorted(p.name for p in path.iterdir()) == ["engine-0", "engine-1"]


def test_a_start_waits_for_a_predecessor_that_is_still_closing(path: Path, opened: Open) -> None:
    first = opened()
    timer = threading.Timer(0.2, lambda: first.tier.close(Deadline.after(5)))
    timer.start()
    second = opened()
    timer.join()
    assert second.store(keys_of([1])) == [OK]


def test_directory_and_files_are_for_this_user_only(path: Path, opened: Open) -> None:
    opened().store(keys_of([1]))
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "engine-0").stat().st_mode & 0o777 == 0o700
    files = list((path / "engine-0").iterdir())
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_newer_format_is_refused_and_left_alone(path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    d = opened()
    with monkeypatch.context() as patch:
        patch.setattr(fmt, "VERSION", fmt.VERSION + 1)
        d.store(keys_of([1]))
        shut(d)
    before = {file: file.read_bytes() for file in path.glob("engine-0/0*")}
    with pytest.raises(ConfigError, match="version 2") as caught:
        opened()
    assert str(path) in str(caught.value)
    assert {file: file.read_bytes() for file in path.glob("engine-0/0*")} == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": Size(8192)}, ["size = 8KiB", "at least"]),
        ({"path": "/proc/kvtier/none"}, ["/proc/kvtier", "another path"]),
        ({"path": "/dev/null"}, ["/dev/null", "not a directory"]),
        ({"path": "/dev/null/below"}, ["/dev/null", "another path"]),
    ],
)
def test_what_a_human_must_fix_refuses_the_start(opened: Open, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(**options)
    for word in words:
        assert word in str(caught.value)


def test_halves_of_extents_are_removed_and_other_files_are_not(path: Path, opened: Open) -> None:
    shut(opened())
    home = path / "engine-0"
    for name in ("000007.rows", "000008.index", "7.rows", "mine.txt", "000009.rows.bak"):
        (home / name).write_bytes(b"x")
    opened()
    assert sorted(p.name for p in home.iterdir()) == ["000009.rows.bak", "7.rows", "lock", "mine.txt"]


def test_the_order_of_use_survives_a_restart(opened: Open) -> None:
    d = opened(blocks=10)
    d.store(keys_of(range(10)))
    d.load(keys_of([0, 1]))
    shut(d)
    d = opened(blocks=10)
    d.store(keys_of([10, 11, 12, 13, 14, 15, 16, 17]))
    assert d.evicted == keys_of([9, 8, 7, 6, 5, 4, 3, 2])


def test_blocks_of_other_namespaces_make_room_and_are_nobodys_eviction(path: Path, opened: Open) -> None:
    d = opened(blocks=10)
    region = Region([ROW], 32)
    shut(d)
    config = DiskConfig(path=str(path), size=Size(size_for(10, ROW)), direct="off")
    other = Driver(open_disk(config, region.rows, b"other"), region)
    assert other.store(keys_of(range(10))) == [OK] * 10
    assert other.close().clean
    region.close()
    d = opened(blocks=10)
    assert count(d, "blocks_count") == 10
    assert d.store(keys_of(range(10))) == [OK] * 10
    assert d.evicted == []
    assert count(d, "evicted_blocks_count") == 10
    assert d.load(keys_of(range(10))) == [OK] * 10


# Queues, bugs, close


def test_a_full_write_queue_refuses_at_once_and_cancel_ends_what_is_queued(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = opened(rows=200, write_queue_blocks_max=80, threads=4)
    d.store(keys_of([1000]))
    with held_back(monkeypatch, "pwritev") as gate:
        accepted = []
        for number in range(200):
            d.region.fill(0, number, key_of(number))
            with contextlib.suppress(Refused):
                accepted.append(d.submit(Direction.DEMOTE, [key_of(number)], [number]))
        assert len(accepted) == 80
        with pytest.raises(Refused, match="write_queue_blocks_max is 80"):
            d.submit(Direction.DEMOTE, keys_of([500]))
        assert count(d, "refused_count") == 121
        assert d.wait(d.submit(Direction.PROMOTE, keys_of([1000]), [199])) == [OK], "reads go before writes"
        for transfer in accepted:
            d.tier.cancel(transfer)
        d.poll()
        assert len(d.ended) == 2 + 76
        gate.set()
    d.wait(*accepted)
    assert [d.ended[t] for t in accepted].count([OK]) == 4
    assert [d.ended[t] for t in accepted].count([Cause.CANCELLED]) == 76
    assert count(d, "write_queue_count") == count(d, "write_queue_bytes") == 0


@pytest.mark.parametrize("fault", [0, errno.EIO])
def test_a_second_store_of_a_key_waits_for_the_first_and_writes_itself_if_that_fails(
    opened: Open, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    d = opened()
    d.store(keys_of([0]))  # so that there is an extent
    before = dict(d.ended)
    for slot in (0, 1):
        d.region.fill(0, slot, key_of(1))
    if fault:
        failing(monkeypatch, "pwritev", fault, times=1)
    with held_back(monkeypatch, "pwritev") as gate:
        first = d.submit(Direction.DEMOTE, keys_of([1]), [0])
        second = d.submit(Direction.DEMOTE, keys_of([1]), [1])
        until(lambda: gate.waiting == 1)
        d.poll()
        assert d.ended == before, "neither is stored yet"
        gate.set()
        assert d.wait(first, second) == [OK]
    assert d.ended[first] == [Cause.IO_ERROR if fault else OK]
    assert count(d, "stored_blocks_count") == 2
    assert d.load(keys_of([1])) == [OK]


def test_limits_count_bytes_and_reads_too(opened: Open) -> None:
    d = opened(write_queue_size_max=Size(4 * ROW), read_queue_blocks_max=4)
    for direction in Direction:
        with pytest.raises(Refused, match="queue"):
            d.submit(direction, keys_of(range(5)))
        d.wait(d.submit(direction, keys_of(range(4))))


def test_a_bug_in_a_thread_ends_its_block_and_comes_out_of_poll(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    d = opened()
    d.store(keys_of([1]))
    with monkeypatch.context() as patch:
        patch.setattr(disk_io.fmt, "checksum", lambda row: 1 // 0)
        assert d.wait(d.submit(Direction.PROMOTE, keys_of([1, 2]))) == [Cause.LOST, Cause.ABSENT]
    with pytest.raises(CoreBug) as caught:
        d.tier.poll()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(CoreBug):
        d.submit(Direction.PROMOTE, keys_of([1]))


def test_a_read_that_hangs_keeps_the_memory_until_it_has_ended(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    d = opened(threads=1)
    d.store(keys_of([1, 2]))
    with held_back(monkeypatch, "preadv") as gate:
        read = d.submit(Direction.PROMOTE, keys_of([1, 2]), [4, 5])
        until(lambda: gate.waiting == 1)
        began = time.monotonic()
        report = d.tier.close(Deadline.after(0.1))
        assert time.monotonic() - began < 2.0
        assert (report.ended, report.memory) == (Outcome.RUNNING, Memory.KEPT)
        assert str(d.tier._directory.path) in report.cause
        gate.set()
    assert d.close().clean
    assert d.ended[read] == [OK, Cause.CANCELLED]
    assert d.region.holds(0, 4, key_of(1))


def test_close_frees_the_extents_that_a_queued_grow_would_have_removed(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = opened(payloads=(1 << 20, 256 << 10), size=Size("64MiB"), threads=1)
    for start in range(0, 64, 16):
        d.wait(d.submit(Direction.DEMOTE, keys_of(range(start, start + 16))))
    before = len(os.listdir("/proc/self/fd"))
    with held_back(monkeypatch, "pwritev") as gate:
        running = d.submit(Direction.DEMOTE, keys_of([100]))
        until(lambda: gate.waiting == 1)
        waiting = d.submit(Direction.DEMOTE, keys_of([200]), size_class=1)
        assert d.tier._writes.queued == 1, "the grow for the other size class"
        d.tier.ask_stop()
        gate.set()
        assert d.close().clean
    assert d.ended[running] == [OK]
    assert d.ended[waiting] == [Cause.CANCELLED]
    assert len(os.listdir("/proc/self/fd")) < before - 8, "an extent has two descriptors"


def test_mistakes_of_the_caller_are_bugs(opened: Open) -> None:
    d = opened(rows=8)
    for keys, slots, size_class in (([b""], [0], 0), ([b"k" * 65], [0], 0), ([b"k"], [8], 0), ([b"k"], [0], 1)):
        with pytest.raises(CoreBug):
            d.submit(Direction.DEMOTE, keys, slots, size_class=size_class)
    assert d.tier.counts()["write_queue_count"] == 0


def test_the_interval_policy_syncs_rows_and_index_without_being_asked(
    path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    d = opened(fsync="interval", fsync_interval_s=0.01)
    d.store(keys_of([1]))
    until(lambda: d.poll() is not None and len(synced) >= 2)
    assert synced[:2] == ["000000.rows", "000000.index"]
    before = len(synced)
    d.load(keys_of([1]))
    d.poll()
    assert len(synced) == before, "a load makes nothing dirty"


def test_the_none_policy_never_syncs(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda fd: pytest.fail("synced"))
    d = opened()
    d.store(keys_of(range(8)))
    assert isinstance(d.tier, DiskTier)
    assert [worker.name for worker in d.tier._workers()] == ["disk reads", "disk writes"]


# Faults


class Gate(threading.Event):
    waiting = 0


class held_back:
    """While in the block, calls of `os.<name>` wait for `gate.set()`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.gate, self.patch, self.name = Gate(), monkeypatch, name

    def __enter__(self) -> Gate:
        real, gate = getattr(os, self.name), self.gate

        def wait(*args: Any) -> int:
            gate.waiting += 1
            assert gate.wait(30)
            return int(real(*args))

        self.patch.setattr(os, self.name, wait)
        return gate

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self.patch.undo()


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, times: int) -> None:
    """The next `times` calls of `os.<name>` raise OSError(number)."""
    real, left = getattr(os, name), [None] * times

    def call(*args: Any) -> int:
        if left:
            left.pop()
            raise OSError(number, os.strerror(number))
        return int(real(*args))

    monkeypatch.setattr(os, name, call)


def until(done: Callable[[], bool]) -> None:
    deadline = Deadline.after(10)
    while not done():
        assert not deadline.expired
        time.sleep(0.002)

"""The conformance suite of a lower tier: what every tier must do, whatever it is made of.

A tier's author makes a subclass of `TierSuite` in a test file, whose name begins with `Test`, and provides three
methods; pytest runs the rest. Rules: every byte is compared; whatever a test does, each accepted transfer and ask must
have ended exactly once, and after the close nothing may be left, not even a view of the region.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import numpy as np
import pytest

from kvtier.core.ids import Key, make_key
from kvtier.errors import Closed, Refused
from kvtier.memory.layout import Rows, plan_layout
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.testing import leaks
from kvtier.tiers.base import Cause, Direction, Ended, Evicted, Held, Tier, TierNotice, TierTransfer

WAIT_S = 20.0
"""how long a test waits for an end notice; only a broken tier needs it"""

NAMESPACE = b"suite"


class Damage(StrEnum):
    """What is done to a stored block past the tier."""

    BIT = "one bit of its row is flipped"
    SHORT = "its end is cut off"
    FOREIGN = "it is replaced by another, whole block"
    GONE = "it is removed"


EXPECTED = {
    Damage.BIT: Cause.CHECKSUM,
    Damage.SHORT: Cause.SHORT,
    Damage.FOREIGN: Cause.FOREIGN,
    Damage.GONE: Cause.ABSENT,
}


def key_of(number: int, group: int = 0) -> Key:
    return make_key(hashlib.sha256(b"%d" % number).digest(), group)


def keys_of(numbers: Sequence[int] | range) -> list[Key]:
    return [key_of(number) for number in numbers]


def pattern(key: bytes, size_bytes: int) -> bytes:
    """The bytes that a block of `key` must have, everywhere in the tests."""
    return np.random.default_rng(int.from_bytes(key[:8], "little")).bytes(size_bytes)


class Region:
    """Host memory with rows, as a tier borrows it."""

    def __init__(self, payloads: Sequence[int], rows: int) -> None:
        padded = [-(-payload // 4096) * 4096 for payload in payloads]
        self._map = mmap.mmap(-1, sum(padded) * rows)
        self.rows = Rows(np.frombuffer(self._map, np.uint8), plan_layout(sum(padded) * rows, payloads))

    def fill(self, size_class: int, slot: int, key: bytes) -> None:
        with self.rows.row(size_class, slot) as row:
            row[:] = pattern(key, len(row))

    def blank(self) -> None:
        for c in self.rows.layout.classes:
            self.rows.table(c.index)[:] = 0xAA

    def holds(self, size_class: int, slot: int, key: bytes) -> bool:
        with self.rows.row(size_class, slot) as row:
            return bytes(row) == pattern(key, len(row))

    def untouched(self, size_class: int, slot: int) -> bool:
        with self.rows.row(size_class, slot) as row:
            return bytes(row) == b"\xaa" * len(row)

    def close(self) -> None:
        """Unmap it; raises BufferError while anybody still holds a row."""
        self.rows.close()
        gc.collect()
        self._map.close()


class Driver:
    """Drives a tier as an engine would, remembers every notice, and checks that each thing ends once."""

    def __init__(self, tier: Tier, region: Region) -> None:
        self.tier = tier
        self.region = region
        self.transfers: dict[int, TierTransfer] = {}
        self.ended: dict[int, list[Cause]] = {}
        self.held: dict[int, list[bool]] = {}
        self.evicted: list[bytes] = []
        self.log: list[TierNotice] = []
        """every notice, in order"""
        self._asks: set[int] = set()
        self._number = 0

    def submit(
        self, direction: Direction, keys: Sequence[bytes], slots: Sequence[int] | None = None, *, size_class: int = 0
    ) -> int:
        """Submit a transfer; rows 0, 1, ... unless `slots` says which."""
        self._number += 1
        transfer = TierTransfer(self._number, direction, size_class, list(keys), list(slots or range(len(keys))))
        self.tier.submit(transfer)
        self.transfers[transfer.id] = transfer
        return transfer.id

    def store(self, keys: Sequence[bytes], *, size_class: int = 0) -> list[Cause]:
        """Fill rows with the keys' patterns and demote them."""
        for slot, key in enumerate(keys):
            self.region.fill(size_class, slot, key)
        return self.wait(self.submit(Direction.DEMOTE, keys, size_class=size_class))

    def load(self, keys: Sequence[bytes], *, size_class: int = 0) -> list[Cause]:
        """Promote into blanked rows; what is `OK` must have the right bytes, all of them."""
        self.region.blank()
        causes = self.wait(self.submit(Direction.PROMOTE, keys, size_class=size_class))
        for slot, (key, cause) in enumerate(zip(keys, causes, strict=True)):
            if cause is Cause.OK:
                assert self.region.holds(size_class, slot, key), f"wrong bytes for key {slot}, reported as ok"
        for slot in range(len(keys), self.region.rows.layout.classes[size_class].rows):
            assert self.region.untouched(size_class, slot), f"row {slot} belongs to nobody and was written"
        return causes

    def ask(self, keys: Sequence[Key]) -> list[bool]:
        self._number += 1
        number = self._number
        self.tier.ask(number, keys)
        self._asks.add(number)
        self._until(lambda: number in self.held, f"ask {number}")
        return self.held[number]

    def wait(self, *transfers: int) -> list[Cause]:
        """Wait for the ends of `transfers`; the causes of the last one."""
        self._until(lambda: all(t in self.ended for t in transfers), f"transfers {transfers}")
        return self.ended[transfers[-1]]

    def poll(self) -> list[TierNotice]:
        notices = self.tier.poll()
        for notice in notices:
            self._take(notice)
        return notices

    def close(self, seconds: float = 10.0) -> CloseReport:
        """Close, and check that everything accepted has ended exactly once."""
        report = self.tier.close(Deadline.after(seconds))
        while self.poll():
            pass
        if report.clean:
            assert set(self.ended) == set(self.transfers), "a transfer has no end"
            assert set(self.held) == self._asks, "an ask has no answer"
        return report

    def _until(self, done: Any, what: str) -> None:
        deadline = Deadline.after(WAIT_S)
        while not done():
            assert not deadline.expired, f"{what}: no end after {WAIT_S} s; counts {self.tier.counts()}"
            select.select([self.tier.fileno()], [], [], min(1.0, deadline.left))
            self.poll()

    def _take(self, notice: TierNotice) -> None:
        self.log.append(notice)
        if isinstance(notice, Ended):
            assert notice.transfer in self.transfers or notice.transfer == self._number, "an end of nothing"
            assert notice.transfer not in self.ended, f"transfer {notice.transfer} ended twice"
            if notice.transfer in self.transfers:
                assert len(notice.causes) == len(self.transfers[notice.transfer].keys)
            self.ended[notice.transfer] = notice.causes
        elif isinstance(notice, Held):
            assert notice.ask not in self.held, f"ask {notice.ask} was answered twice"
            self.held[notice.ask] = notice.held
        else:
            assert isinstance(notice, Evicted)
            self.evicted.extend(notice.keys)


class TierSuite:
    """Subclass it, and provide `open`, `damage` and, for a tier that keeps blocks between runs, `persistent`.

    State of the tier's own (a path, a server) comes from an autouse fixture of the subclass. A new instance is made for
    each test, so `self` may hold it.
    """

    persistent = True
    payload_bytes = 8192
    rows = 32

    def open(self, rows: Rows, namespace: bytes, *, blocks_max: int | None = None) -> Tier:
        """Open the tier, again with what it held if it is persistent. `blocks_max`: with room for that many blocks,
        or a few more; None: for many."""
        raise NotImplementedError

    def damage(self, key: bytes, how: Damage) -> None:
        """Damage the stored block of `key` past the tier, while it is open; skip the test where that cannot be."""
        raise NotImplementedError

    @contextmanager
    def opened(
        self, namespace: bytes = NAMESPACE, *, blocks_max: int | None = None, payload_bytes: int = 0
    ) -> Iterator[Driver]:
        """A driven tier on a region of its own; closed, with all checks, unless the test failed."""
        region = Region([payload_bytes or self.payload_bytes], self.rows)
        driver = Driver(self.open(region.rows, namespace, blocks_max=blocks_max), region)
        try:
            yield driver
        except BaseException:
            driver.tier.close(Deadline.after(10.0))
            raise
        assert driver.close().clean
        region.close()

    @pytest.mark.parametrize("count", [1, 2, 16])
    def test_stored_blocks_come_back_byte_for_byte(self, count: int) -> None:
        keys = keys_of(range(count))
        with self.opened() as d:
            assert d.store(keys) == [Cause.OK] * count
            assert all(d.region.holds(0, slot, key) for slot, key in enumerate(keys)), "a demotion changed its rows"
            assert d.ask(keys) == [True] * count
            assert d.load(keys[::-1]) == [Cause.OK] * count

    def test_one_missing_key_costs_only_itself(self) -> None:
        with self.opened() as d:
            d.store(keys_of([1, 3, 4]))
            assert d.load(keys_of([1, 2, 3, 4])) == [Cause.OK, Cause.ABSENT, Cause.OK, Cause.OK]
            assert d.ask(keys_of([1, 2, 3, 4])) == [True, False, True, True]

    def test_an_unknown_key_is_a_miss(self) -> None:
        with self.opened() as d:
            assert d.ask(keys_of([1])) == [False]
            assert d.load(keys_of([1])) == [Cause.ABSENT]

    @pytest.mark.parametrize("how", list(Damage))
    @pytest.mark.parametrize("batch", [[5], [4, 5, 6]])
    def test_a_damaged_block_is_a_miss_with_its_cause_and_not_offered_again(
        self, how: Damage, batch: list[int]
    ) -> None:
        keys = keys_of(batch)
        with self.opened() as d:
            d.store(keys)
            self.damage(key_of(5), how)
            expected = [EXPECTED[how] if n == 5 else Cause.OK for n in batch]
            causes = d.load(keys)
            # Where blocks share a file, its loss is the loss of its neighbours.
            if how is Damage.GONE:
                assert causes[batch.index(5)] is Cause.ABSENT
                assert set(causes) <= {Cause.OK, Cause.ABSENT}
            elif how is Damage.SHORT:
                assert causes[batch.index(5)] is Cause.SHORT
                assert set(causes) <= {Cause.OK, Cause.SHORT}
            else:
                assert causes == expected
            assert d.ask(keys) == [cause is Cause.OK for cause in causes]
            # A tier that others may empty need not notice; one that judged a block itself must say so.
            assert key_of(5) in d.evicted or how is Damage.GONE
            assert d.load([key_of(5)]) == [Cause.ABSENT]

    @pytest.mark.parametrize("how", list(Damage))
    def test_a_damaged_block_can_be_stored_anew(self, how: Damage) -> None:
        with self.opened() as d:
            d.store(keys_of([5]))
            self.damage(key_of(5), how)
            d.load(keys_of([5]))
            assert d.store(keys_of([5])) == [Cause.OK]
            assert d.load(keys_of([5])) == [Cause.OK]

    def test_a_known_key_is_stored_once(self) -> None:
        with self.opened() as d:
            d.store(keys_of([1]))
            assert d.store(keys_of([1, 2])) == [Cause.OK, Cause.OK]
            assert d.load(keys_of([2, 1])) == [Cause.OK, Cause.OK]

    def test_the_same_key_in_several_transfers_at_once_ends_in_each(self) -> None:
        with self.opened() as d:
            for slot in range(4):
                d.region.fill(0, slot, key_of(1))
            twice = d.submit(Direction.DEMOTE, keys_of([1, 1]), [0, 1])
            again = d.submit(Direction.DEMOTE, keys_of([1]), [2])
            assert d.wait(twice, again) == [Cause.OK]
            assert d.ended[twice] == [Cause.OK] * 2
            assert d.load(keys_of([1, 1])) == [Cause.OK] * 2

    def test_a_key_is_never_read_half_written(self) -> None:
        keys = keys_of(range(16))
        with self.opened() as d:
            d.region.blank()
            for slot, key in enumerate(keys):
                d.region.fill(0, slot, key)
            write = d.submit(Direction.DEMOTE, keys, range(16))
            read = d.submit(Direction.PROMOTE, keys, range(16, 32))
            d.wait(write, read)
            assert d.ended[write] == [Cause.OK] * 16
            for slot, (key, cause) in enumerate(zip(keys, d.ended[read], strict=True), start=16):
                assert cause in (Cause.OK, Cause.ABSENT)
                assert cause is not Cause.OK or d.region.holds(0, slot, key)

    def test_a_cancelled_transfer_ends_once_and_what_it_says_is_true(self) -> None:
        batches = [keys_of(range(b, b + 8)) for b in range(0, 32, 8)]
        with self.opened() as d:
            for slot, key in enumerate(keys_of(range(32))):
                d.region.fill(0, slot, key)
            writes = [d.submit(Direction.DEMOTE, batch, range(b * 8, b * 8 + 8)) for b, batch in enumerate(batches)]
            for write in writes[::-1]:
                d.tier.cancel(write)
                d.tier.cancel(write)
            d.wait(*writes)
            for batch, write in zip(batches, writes, strict=True):
                assert set(d.ended[write]) <= {Cause.OK, Cause.CANCELLED}
                assert d.ask(batch) == [cause is Cause.OK for cause in d.ended[write]]
                assert d.load(batch) == [Cause.OK if c is Cause.OK else Cause.ABSENT for c in d.ended[write]]

    def test_a_cancelled_promotion_ends_once_and_its_blocks_stay(self) -> None:
        keys = keys_of(range(16))
        with self.opened() as d:
            d.store(keys)
            reads = [d.submit(Direction.PROMOTE, keys, range(16, 32)) for _ in range(3)]
            for read in reads:
                d.tier.cancel(read)
            d.wait(*reads)
            for read in reads:
                assert set(d.ended[read]) <= {Cause.OK, Cause.CANCELLED}
            assert d.load(keys) == [Cause.OK] * 16

    def test_cancelling_what_has_ended_or_never_was_does_nothing(self) -> None:
        with self.opened() as d:
            d.store(keys_of([1]))
            d.tier.cancel(1)
            d.tier.cancel(12345)
            assert d.poll() == []
            assert d.load(keys_of([1])) == [Cause.OK]

    def test_an_empty_transfer_ends_too(self) -> None:
        with self.opened() as d:
            assert d.wait(d.submit(Direction.DEMOTE, [])) == []
            assert d.wait(d.submit(Direction.PROMOTE, [])) == []
            assert d.ask([]) == []

    def test_a_full_tier_evicts_and_says_what(self) -> None:
        with self.opened(blocks_max=8) as d:
            for number in range(64):
                assert d.store(keys_of([number])) == [Cause.OK]
            assert d.evicted, "64 blocks went into room for about 8, and none was reported as evicted"
            assert len(d.evicted) == len(set(d.evicted))
            for start in range(0, 64, 16):
                keys = keys_of(range(start, start + 16))
                alive = [key not in d.evicted for key in keys]
                assert d.ask(keys) == alive
                assert d.load(keys) == [Cause.OK if known else Cause.ABSENT for known in alive]
            assert key_of(63) not in d.evicted

    def test_a_batch_that_does_not_fit_ends_with_a_cause_each(self) -> None:
        keys = keys_of(range(32))
        with self.opened(blocks_max=4) as d:
            causes = d.store(keys)
            assert set(causes) <= {Cause.OK, Cause.FULL}
            assert Cause.OK in causes
            assert d.ask(keys) == [c is Cause.OK and k not in d.evicted for k, c in zip(keys, causes, strict=True)]
            assert d.store(keys_of([99])) == [Cause.OK], "a full tier must take blocks again"

    def test_after_a_stop_was_asked_nothing_new_is_accepted_and_all_old_ends(self) -> None:
        keys = keys_of(range(16))
        with self.opened() as d:
            d.store(keys)
            read = d.submit(Direction.PROMOTE, keys, range(16, 32))
            d.tier.ask_stop()
            d.tier.ask_stop()
            with pytest.raises(Refused):
                d.tier.submit(TierTransfer(999, Direction.DEMOTE, 0, [key_of(1)], [0]))
            with pytest.raises(Refused):
                d.tier.ask(999, keys)
            d.wait(read)
            assert set(d.ended[read]) <= {Cause.OK, Cause.CANCELLED}

    def test_close_with_work_in_flight_ends_all_of_it_and_frees_the_rows(self) -> None:
        keys = keys_of(range(16))
        with self.opened() as d:
            d.store(keys)
            for slot in range(16):
                d.region.fill(0, slot, key_of(100 + slot))
            d.submit(Direction.DEMOTE, keys_of(range(100, 116)))
            d.submit(Direction.PROMOTE, keys, range(16, 32))
            report = d.close()
            assert report.clean, str(report)
            assert len(d.ended) == 3

    def test_close_leaves_nothing_and_can_be_repeated(self) -> None:
        before = leaks.take()
        with self.opened() as d:
            d.store(keys_of([1]))
            first = d.close()
            assert d.tier.close(Deadline.after(1.0)) is first
            with pytest.raises((Closed, Refused)):
                d.tier.submit(TierTransfer(999, Direction.DEMOTE, 0, [key_of(1)], [0]))
            d.tier.cancel(1)
            d.tier.ask_stop()
            assert d.poll() == []
            assert all(type(value) is int for value in d.tier.counts().values())
        assert leaks.find_leaks(before, grace_s=leaks.GRACE_S) == []

    def test_the_descriptor_is_readable_only_while_there_is_something(self) -> None:
        with self.opened() as d:
            assert not _readable(d.tier.fileno())
            d.store(keys_of(range(8)))
            assert not _readable(d.tier.fileno())
            d.tier.ask(7, keys_of([1]))
            d._asks.add(7)
            assert _readable(d.tier.fileno(), WAIT_S)
            d.wait(d.submit(Direction.PROMOTE, keys_of(range(8))))
            assert not _readable(d.tier.fileno())

    def test_counts_are_whole_numbers_with_their_unit_last(self) -> None:
        with self.opened() as d:
            d.store(keys_of([1]))
            for name, value in d.tier.counts().items():
                assert type(value) is int
                assert name.endswith(("_count", "_bytes", "_ms", "_us")), name
                assert value >= 0, name

    def test_another_namespace_is_a_miss(self) -> None:
        with self.opened(b"one") as d:
            assert d.store(keys_of([1, 2])) == [Cause.OK] * 2
        with self.opened(b"two") as d:
            assert d.ask(keys_of([1, 2])) == [False] * 2
            assert not {Cause.OK} & set(d.load(keys_of([1, 2])))

    def test_a_row_of_another_layout_is_a_miss(self) -> None:
        with self.opened() as d:
            d.store(keys_of([1]))
        with self.opened(payload_bytes=self.payload_bytes * 2) as d:
            assert d.ask(keys_of([1])) == [False]
            assert d.load(keys_of([1])) != [Cause.OK]

    def test_what_was_stored_is_found_after_a_reopen(self) -> None:
        if not self.persistent:
            pytest.skip("this tier keeps nothing between runs")
        with self.opened() as d:
            d.store(keys_of(range(16)))
        with self.opened() as d:
            assert d.ask(keys_of(range(17))) == [True] * 16 + [False]
            assert d.load(keys_of(range(17))) == [Cause.OK] * 16 + [Cause.ABSENT]

    def test_many_opens_leave_no_descriptor(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with self.opened():
                pass
        assert len(os.listdir("/proc/self/fd")) <= before


def _readable(fd: int, wait_s: float = 0.0) -> bool:
    return bool(select.select([fd], [], [], wait_s)[0])

"""One direction: what is listed, when it ends, and that its close is bounded and tries everything."""

from __future__ import annotations

import time

import pytest

from kvtier.errors import CoreBug, Refused
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import Memory, Outcome
from kvtier.testing.fake_device import FakeDevice
from kvtier.transfer.base import RankEnd, Way
from kvtier.transfer.direction import Direction

from .conftest import World


class Played:
    """A direction on a played device over a world of E = 1."""

    def __init__(self, way: Way = Way.STORE) -> None:
        self.world = World(1)
        self.device = FakeDevice(self.world.mover)
        self.queue = self.device.open_queue(way)
        self.direction = Direction(str(way), self.queue, self.world.mover.check)
        self.way = way

    def submit(self, id_: int, block: int = 0, slot: int = 0) -> None:
        self.direction.submit(self.world.transfer(self.way, [block], [slot], id_))

    def fill(self, block: int, byte: int) -> None:
        for layer in self.world.pages.layers:
            layer[block] = byte

    def block(self, block: int) -> set[int]:
        return {int(v) for layer in self.world.pages.layers for v in layer[block]}

    def row(self, slot: int) -> set[int]:
        return set(self.world.rows.table(0)[slot, : self.world.page_layout.payload_bytes].tolist())

    @property
    def queries(self) -> list[int]:
        return [event.queries for event in self.queue.events]


def ok(*ids: int) -> list[RankEnd]:
    return [RankEnd(id_, ok=True, cause="ok") for id_ in ids]


def cancelled(*ids: int) -> list[RankEnd]:
    return [RankEnd(id_, ok=False, cause="cancelled") for id_ in ids]


def test_a_transfer_ends_once_and_only_after_its_event() -> None:
    played = Played()
    played.submit(1)
    assert played.direction.poll() == []
    assert played.direction.listed == [1]
    played.device.advance(1.0)
    assert played.direction.poll() == ok(1)
    assert played.direction.poll() == []
    assert played.direction.listed == []


def test_a_failed_copy_ends_with_its_cause() -> None:
    played = Played()
    played.device.fates.append("fail")
    played.submit(1)
    played.device.advance(1.0)
    assert played.direction.poll() == [RankEnd(1, ok=False, cause="played: the copy failed")]


def test_one_id_twice_is_a_bug_and_what_does_not_exist_is_refused() -> None:
    played = Played()
    played.submit(1)
    with pytest.raises(CoreBug, match="transfer 1 is listed already"):
        played.submit(1)
    with pytest.raises(Refused):
        played.submit(2, block=10_000)
    assert played.direction.listed == [1]
    assert len(played.queue.events) == 1


def test_a_store_reads_what_compute_queued_before_it_has_written() -> None:
    played = Played()
    played.fill(3, 1)
    played.device.compute(5.0, lambda: played.fill(3, 2))
    played.device.advance(1.0)
    played.submit(1, block=3, slot=4)
    played.device.advance(3.9)
    assert played.direction.poll() == []
    played.device.advance(10.0)
    assert played.direction.poll() == ok(1)
    assert played.row(4) == {2}


def test_a_load_waits_for_the_earlier_reader_of_its_block() -> None:
    played = Played(Way.LOAD)
    played.fill(7, 1)
    played.world.rows.table(0)[2] = 9
    seen: list[set[int]] = []
    played.device.compute(5.0, lambda: seen.append(played.block(7)))
    played.device.advance(1.0)
    played.submit(1, block=7, slot=2)
    played.device.advance(3.9)
    assert played.block(7) == {1}
    played.device.advance(10.0)
    assert seen == [{1}]
    assert played.direction.poll() == ok(1)
    assert played.block(7) == {9}


def test_preemption_drops_the_queued_store_and_waits_for_the_running_one() -> None:
    played = Played()
    played.fill(3, 0xAA)
    played.fill(4, 0xAA)
    played.world.rows.table(0)[:] = 0
    played.submit(1, block=3, slot=1)
    played.submit(2, block=4, slot=2)  # behind the first: still queued
    played.direction.cancel([1, 2, 77])
    assert played.direction.wait([1, 2], Deadline.after(5)) == []
    played.fill(3, 0xBB)
    played.fill(4, 0xBB)
    played.device.advance(10.0)
    assert sorted(played.direction.poll(), key=lambda end: end.id) == [*ok(1), *cancelled(2)]
    assert played.row(1) == {0xAA}
    assert played.row(2) == {0}


def test_waiting_is_bounded_and_names_what_still_runs() -> None:
    played = Played()
    played.device.fates += ["ok", "never", "raise"]
    for id_ in (1, 2, 3):
        played.submit(id_)
    began = time.monotonic()
    assert played.direction.wait([1, 2, 3], Deadline.after(0.1)) == [2, 3]
    assert time.monotonic() - began < 1.0
    assert played.direction.poll() == ok(1)
    assert played.direction.listed == [2, 3]


def test_an_event_that_raises_is_asked_again_and_may_recover() -> None:
    played = Played()
    played.device.fates.append("raise")
    played.submit(1)
    played.device.advance(1.0)
    assert played.direction.poll() == []
    assert list(played.direction.raised) == [1]
    played.queue.events[0].fate = "ok"
    assert played.direction.poll() == ok(1)
    assert played.direction.raised == {}


def test_close_tries_every_event_once_and_a_second_close_only_what_is_left() -> None:
    played = Played()
    played.device.fates += ["ok", "raise", "ok"]
    for id_ in (1, 2, 3):
        played.submit(id_)
    played.device.advance(10.0)
    report = played.direction.close(Deadline.after(1))
    assert played.queries == [1, 1, 1]
    assert (report.ended, report.memory) == (Outcome.FAILED, Memory.KEPT)
    assert isinstance(report.error, RuntimeError)
    assert "2 (" in report.cause
    assert played.direction.listed == [2]
    assert played.queue.closes == 1
    assert sorted(end.id for end in played.direction.poll() if end.ok) == [1, 3]
    before = played.queries
    played.queue.events[1].fate = "ok"
    report = played.direction.close(Deadline.after(1))
    assert [b - a for a, b in zip(before, played.queries, strict=True)] == [0, 1, 0]
    assert report.clean
    assert played.queue.closes == 1
    assert played.direction.poll() == ok(2)
    assert played.direction.close(Deadline.after(1)) is report


def test_close_drops_the_queued_and_waits_for_the_running() -> None:
    played = Played()
    played.submit(1)
    played.submit(2)
    report = played.direction.close(Deadline.after(5))
    assert report.clean
    assert played.direction.poll() == [*cancelled(2), *ok(1)]
    with pytest.raises(Refused, match="closing"):
        played.submit(3)


def test_a_wedged_copy_is_reported_running_within_the_deadline_and_its_queue_released() -> None:
    played = Played()
    played.device.fates.append("never")
    played.submit(1)
    began = time.monotonic()
    report = played.direction.close(Deadline.after(0.1))
    assert time.monotonic() - began < 1.0
    assert (report.ended, report.memory) == (Outcome.RUNNING, Memory.KEPT)
    assert "1 (running)" in report.cause
    assert played.queue.closes == 1


def test_an_expired_deadline_still_asks_each_event_once() -> None:
    played = Played()
    played.submit(1)
    played.submit(2)
    played.device.advance(10.0)
    assert played.direction.close(Deadline.after(0)).clean
    assert played.queries == [1, 1]


def test_release_ends_what_is_left_as_failed() -> None:
    played = Played()
    played.device.fates.append("raise")
    played.submit(1)
    report = played.direction.close(Deadline.after(0))
    played.direction.release("the device was synchronised")
    assert report.memory is Memory.FREED
    assert played.direction.poll() == [RankEnd(1, ok=False, cause="the device was synchronised")]
    assert played.direction.close(Deadline.after(0)) is report


def test_a_load_in_flight_reads_its_row_until_it_ends() -> None:
    # What the scheduler side's lease protects: the row may be reused after the end notice, not before.
    played = Played(Way.LOAD)
    played.world.rows.table(0)[1] = 7
    played.submit(1, block=2, slot=1)
    assert played.direction.poll() == []
    played.device.advance(1.0)
    assert played.direction.poll() == ok(1)
    played.world.rows.table(0)[1] = 8
    played.device.advance(10.0)
    assert played.block(2) == {7}

"""The rank: both directions over one region, and a close that tries everything and frees the region last."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.rank import Rank, open_rank
from kvtier.errors import Closed, ConfigError
from kvtier.memory import region as region_module
from kvtier.memory.layout import Layout, PageLayout, plan_layout
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.testing.fake_device import FakeDevice, FakeQueue
from kvtier.transfer.base import Device, RankEnd, RankTransfer, StillRunning, Way
from kvtier.transfer.move import Mover
from kvtier.transfer.pages import NumpyPages

PAGE_BYTES = [4096, 777]
BLOCKS = 16


class Counting(Region):
    """A region that counts its closes."""

    closes = 0

    def close(self, deadline: Deadline) -> CloseReport:
        self.closes += 1
        return super().close(deadline)


class Parts:
    """What a rank is opened with, and the devices that were made for it."""

    def __init__(self, engine_blocks: int = 1) -> None:
        self.page_layout = PageLayout(engine_blocks, 1, PAGE_BYTES)
        self.layout: Layout = plan_layout(1 << 20, [self.page_layout.payload_bytes])
        self.region = Counting.create(self.layout.size_bytes)
        rng = np.random.default_rng(1)
        self.pages = NumpyPages([rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8) for size in PAGE_BYTES])
        self.devices: list[FakeDevice] = []

    def played(self, mover: Mover) -> FakeDevice:
        self.devices.append(FakeDevice(mover))
        return self.devices[-1]

    def open(self, open_device: Callable[[Mover], Device] | None = None) -> Rank:
        return open_rank(
            self.region, self.layout, [self.pages], [self.page_layout], open_device=open_device or self.played
        )

    def free(self) -> None:
        """What a test kept on purpose."""
        for device in self.devices:
            device.mover.close()
        assert Region.close(self.region, Deadline.after(1)).clean


@pytest.fixture
def parts() -> Iterator[Parts]:
    yield Parts()
    assert region_module._kept == []


def transfer(id_: int, way: Way = Way.STORE, block: int = 0, slot: int = 0) -> RankTransfer:
    return RankTransfer(id_, way, 0, [block], [slot])


def child(report: CloseReport, name: str) -> CloseReport:
    return next(node for node in report.children if node.name == name)


@pytest.mark.parametrize("engine_blocks", [1, 2])
def test_what_was_stored_is_loaded_again_with_the_same_digest(engine_blocks: int) -> None:
    parts = Parts(engine_blocks)
    rank = open_rank(parts.region, parts.layout, [parts.pages], [parts.page_layout])
    out_of, into, slots = list(range(8)), list(range(15, 7, -1)), list(range(8 // engine_blocks))[::-1]
    rank.submit([RankTransfer(1, Way.STORE, 0, out_of, slots)])
    assert poll_until(rank, {1})[1].ok
    expected = rank.digest(out_of)
    assert expected == [
        xxhash.xxh3_128_digest(b"".join(layer[block].tobytes() for layer in parts.pages.layers)) for block in out_of
    ]
    assert rank.digest(into) != expected
    rank.submit([RankTransfer(3, Way.LOAD, 0, into, slots)])
    assert poll_until(rank, {3})[3].ok
    assert rank.digest(into) == expected
    assert rank.close(Deadline.after(5)).clean
    assert parts.region.closed


def poll_until(rank: Rank, ids: set[int]) -> dict[int, RankEnd]:
    until, ends = time.monotonic() + 5, {}
    while set(ends) != ids:
        assert time.monotonic() < until, f"ended: {ends}"
        ends |= {end.id: end for end in rank.poll()}
        time.sleep(0.001)
    return ends


def test_what_is_refused_ends_once_with_the_reason(parts: Parts) -> None:
    rank = parts.open()
    rank.submit([transfer(1, block=BLOCKS), transfer(2), transfer(3, slot=10_000)])
    parts.devices[0].advance(1)
    ends = {end.id: end for end in rank.poll()}
    assert ends[2].ok
    assert not ends[1].ok
    assert "engine block" in ends[1].cause
    assert "slot" in ends[3].cause
    assert rank.poll() == []
    rank.ask_stop()
    rank.submit([transfer(4)])
    (end,) = rank.poll()
    assert (end.id, end.ok) == (4, False)
    assert "closing" in end.cause
    assert rank.counts() == {
        "transfers_submitted": 4,
        "transfers_ok": 1,
        "transfers_failed": 3,
        "store_transfers_listed": 0,
        "load_transfers_listed": 0,
    }
    assert rank.close(Deadline.after(1)).clean


def test_the_fence_drops_the_queued_waits_for_the_running_and_names_the_rest(parts: Parts) -> None:
    rank = parts.open()
    parts.devices[0].fates += ["ok", "ok", "never"]
    rank.submit([transfer(1), transfer(2, block=1, slot=1), transfer(3, Way.LOAD, block=2, slot=2)])
    began = time.monotonic()
    assert rank.fence([1, 2, 3, 99], Deadline.after(0.1)) == [3]
    assert time.monotonic() - began < 1
    assert {end.id: end.cause for end in rank.poll()} == {1: "ok", 2: "cancelled"}
    parts.devices[0].queues[Way.LOAD].events[0].fate = "ok"
    parts.devices[0].queues[Way.LOAD].events[0].state = "over"
    assert rank.fence([3], Deadline.after(1)) == []
    assert rank.close(Deadline.after(1)).clean


def test_close_frees_the_region_once_and_last(parts: Parts) -> None:
    rank = parts.open()
    report = rank.close(Deadline.after(1))
    assert report.clean
    assert [node.name for node in report.children] == ["store", "load", "region"]
    assert rank.close(Deadline.after(1)) is report
    assert parts.region.closes == 1
    assert parts.devices[0].synchronizes == 0
    assert [queue.closes for queue in parts.devices[0].queues.values()] == [1, 1]
    with pytest.raises(Closed):
        _ = parts.region.array


def test_one_direction_that_raises_does_not_cost_the_other_its_close(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = parts.open()
    device, order = parts.devices[0], []
    rank.submit([transfer(1, Way.LOAD)])

    def broken(deadline: Deadline) -> CloseReport:
        order.append("store")
        raise RuntimeError("the store direction is broken")

    load_close = rank._directions[Way.LOAD].close
    monkeypatch.setattr(rank._directions[Way.STORE], "close", broken)
    monkeypatch.setattr(rank._directions[Way.LOAD], "close", lambda d: order.append("load") or load_close(d))
    region_close = parts.region.close
    monkeypatch.setattr(parts.region, "close", lambda d: order.append("region") or region_close(d))
    report = rank.close(Deadline.after(1))
    assert order == ["store", "load", "region"]
    assert rank._directions[Way.LOAD].listed == []
    assert child(report, "store").ended is Outcome.FAILED
    assert child(report, "load").clean
    assert device.synchronizes == 1
    assert child(report, "region").clean
    assert not report.memory_kept
    with pytest.raises(ExceptionGroup) as raised:
        report.raise_if_failed()
    assert [str(e) for e in raised.value.exceptions] == ["the store direction is broken"]


@pytest.mark.parametrize("failing", list(Way))
def test_a_failed_direction_and_an_idle_device_free_the_region(parts: Parts, failing: Way) -> None:
    rank = parts.open()
    device = parts.devices[0]
    device.fates.append("raise")
    rank.submit([transfer(1, failing)])
    report = rank.close(Deadline.after(1))
    assert device.synchronizes == 1
    assert parts.region.closes == 1
    assert parts.region.closed
    assert child(report, failing).ended is Outcome.FAILED
    assert not report.memory_kept
    assert [(end.id, end.ok) for end in rank.poll()] == [(1, False)]
    assert rank.close(Deadline.after(1)) is report
    assert device.synchronizes == 1


@pytest.mark.parametrize("failing", list(Way))
def test_a_failed_direction_and_a_failed_device_keep_the_memory_readable(parts: Parts, failing: Way) -> None:
    rank = parts.open()
    device = parts.devices[0]
    parts.region.array[:] = 0x5A
    device.fates.append("raise")
    device.compute(5.0, lambda: None)  # the copy waits behind it: nothing has been written yet
    rank.submit([transfer(1, failing)])
    device.advance(5.5)
    device.synchronize_error = RuntimeError("device lost")
    report = rank.close(Deadline.after(1))
    assert device.synchronizes == 1
    assert parts.region.closes == 0
    assert report.memory is Memory.KEPT
    assert isinstance(child(report, "device").error, RuntimeError)
    assert rank.broken
    if failing is Way.LOAD:
        assert (parts.region.array == 0x5A).all()
    assert rank.poll() == []
    assert region_module._kept == [parts.region]  # mapped until exit, whoever drops the rank
    parts.free()
    assert region_module._kept == []


def test_a_second_close_tries_exactly_what_is_left(parts: Parts) -> None:
    rank = parts.open()
    device = parts.devices[0]
    device.fates += ["raise", "ok"]
    rank.submit([transfer(1, Way.STORE), transfer(2, Way.LOAD, block=1, slot=1)])
    device.synchronize_error = RuntimeError("device lost")
    first = rank.close(Deadline.after(1))
    assert first.memory is Memory.KEPT
    store, load = (device.queues[way].events[0] for way in Way)
    assert load.state == "over"
    asked = (store.queries, load.queries)
    store.fate, store.state = "ok", "over"
    second = rank.close(Deadline.after(1))
    assert (store.queries, load.queries) == (asked[0] + 1, asked[1])
    assert device.synchronizes == 1
    assert second.clean
    assert parts.region.closes == 1
    assert region_module._kept == []
    assert {end.id: end.ok for end in rank.poll()} == {1: True, 2: True}


def test_a_wedged_copy_keeps_the_memory_within_the_deadline(parts: Parts) -> None:
    rank = parts.open()
    parts.devices[0].fates.append("never")
    rank.submit([transfer(1)])
    began = time.monotonic()
    report = rank.close(Deadline.after(0.2))
    assert time.monotonic() - began < 1.0
    assert child(report, "store").ended is Outcome.RUNNING
    assert report.memory is Memory.KEPT
    assert not parts.region.closed
    event = parts.devices[0].queues[Way.STORE].events[0]
    event.fate, event.state = "ok", "over"
    assert rank.close(Deadline.after(1)).clean
    assert parts.region.closed


def test_a_view_somebody_still_has_keeps_the_memory_until_the_second_close(parts: Parts) -> None:
    rank = parts.open()
    view = parts.region.array[10:20]
    report = rank.close(Deadline.after(1))
    assert child(report, "region").cause.startswith("still exported")
    assert report.memory_kept
    del view
    assert rank.close(Deadline.after(1)).clean
    assert parts.devices[0].synchronizes == 0


def test_two_threads_that_close_get_the_same_report(parts: Parts) -> None:
    rank = parts.open()
    reports: list[CloseReport] = []
    threads = [threading.Thread(target=lambda: reports.append(rank.close(Deadline.after(1)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(reports) == 4
    assert all(report is reports[0] for report in reports)
    assert parts.region.closes == 1


class Interrupted(FakeDevice):
    """Fails when its second queue is opened."""

    error: BaseException

    def open_queue(self, way: Way) -> FakeQueue:
        if self.queues:
            raise self.error
        return super().open_queue(way)


@pytest.mark.parametrize(
    ("error", "closes"),
    [(RuntimeError("no stream left"), 1), (StillRunning("a native thread"), 0), (KeyboardInterrupt(), 0)],
    ids=["plain", "still running", "interrupt"],
)
def test_a_start_that_fails_frees_what_was_made_unless_something_may_still_write(
    parts: Parts, error: BaseException, closes: int
) -> None:
    def fails(mover: Mover) -> Device:
        device = Interrupted(mover)
        device.error = error
        parts.devices.append(device)
        return device

    with pytest.raises(type(error)) as raised:
        parts.open(fails)
    assert raised.value is error
    queue = parts.devices[0].queues[Way.STORE]
    assert queue.stopping
    assert queue.closes == (0 if isinstance(error, KeyboardInterrupt) else 1)
    assert parts.region.closes == closes
    assert parts.region.closed is bool(closes)
    if not closes:
        assert region_module._kept == [parts.region]
        parts.free()


def test_pages_that_do_not_fit_free_the_region() -> None:
    parts = Parts()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        open_rank(parts.region, parts.layout, [parts.pages], [PageLayout(1, 1, [4096])])
    assert parts.region.closes == 1
    assert parts.region.closed
    assert len(os.listdir("/proc/self/fd")) == before - 2  # the memfd and its mapping's


def test_a_closed_rank_holds_on_to_no_page_of_the_engine(parts: Parts) -> None:
    rank = open_rank(parts.region, parts.layout, [parts.pages], [parts.page_layout])
    rank.submit([transfer(1)])
    poll_until(rank, {1})
    gone = weakref.ref(parts.pages)
    assert rank.close(Deadline.after(1)).clean
    del parts.pages
    assert gone() is None


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(Way), st.integers(0, BLOCKS), st.integers(0, 5)),
        st.tuples(st.just("fates"), st.sampled_from(["ok", "fail", "raise", "never"])),
        st.tuples(st.just("advance"), st.sampled_from([0.5, 1.0, 3.0])),
        st.tuples(st.just("compute"), st.sampled_from([0.5, 2.0])),
        st.tuples(st.just("fence"), st.lists(st.integers(1, 12), max_size=4)),
        st.tuples(st.just("poll")),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, lost=st.booleans())
def test_every_transfer_ends_exactly_once_and_memory_is_freed_only_when_none_is_left(steps: list, lost: bool) -> None:
    parts = Parts()
    rank = parts.open()
    device, ids, ends = parts.devices[0], 0, []
    for name, *args in steps:
        if name == "submit":
            ids += 1
            rank.submit([transfer(ids, *args)])
        elif name == "fates":
            device.fates += args
        elif name == "advance":
            device.advance(*args)
        elif name == "compute":
            device.compute(args[0], lambda: None)
        elif name == "fence":
            left = rank.fence(args[0], Deadline.after(0))
            assert set(left) <= {id_ for d in rank._directions.values() for id_ in d.listed}
        else:
            ends += rank.poll()
    device.synchronize_error = RuntimeError("device lost") if lost else None
    report = rank.close(Deadline.after(0.01))
    ends += rank.poll()
    listed = [id_ for d in rank._directions.values() for id_ in d.listed]
    assert sorted([end.id for end in ends] + listed) == list(range(1, ids + 1))
    assert report.memory_kept is bool(listed) is not parts.region.closed
    assert parts.region.closes == (0 if listed else 1)
    for queue in device.queues.values():  # whatever was lost comes back: now all of it ends
        for event in queue.events:
            event.fate = "ok"
            event.state = "over" if event.state == "running" else event.state
    assert not rank.close(Deadline.after(1)).memory_kept
    ends += rank.poll()
    assert sorted(end.id for end in ends) == list(range(1, ids + 1))
    assert parts.region.closes == 1

"""Copies by threads: submitting never blocks, ends arrive, queued ones can be taken back, closing is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.errors import Refused, TierBroken
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import Memory, Outcome
from kvtier.transfer import host_copy
from kvtier.transfer.base import RankTransfer, Way
from kvtier.transfer.direction import Direction
from kvtier.transfer.host_copy import HostDevice
from kvtier.transfer.move import Mover

from .conftest import BLOCKS, ROWS, World


class Held(Mover):
    """A mover that waits at a gate, or raises."""

    def __init__(self, world: World) -> None:
        super().__init__([world.pages], [world.page_layout], world.rows)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def move(self, transfer: RankTransfer) -> None:
        self.entered.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        super().move(transfer)


class Host:
    def __init__(self, engine_blocks: int = 1) -> None:
        self.world = World(engine_blocks)
        self.mover = Held(self.world)
        self.device = HostDevice(self.mover)
        self.ways = {way: Direction(str(way), self.device.open_queue(way), self.mover.check) for way in Way}

    def submit(self, way: Way, blocks: list[int], slots: list[int], id_: int) -> None:
        self.ways[way].submit(self.world.transfer(way, blocks, slots, id_))


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.mover.gate.set()
    for direction in host.ways.values():
        assert direction.close(Deadline.after(5)).memory is Memory.FREED


def test_stores_and_loads_bring_every_byte_back(engine_blocks: int) -> None:
    host = Host(engine_blocks)
    count = min(ROWS, BLOCKS // engine_blocks // 2)
    slots = np.random.default_rng(3).permutation(ROWS)[:count].tolist()
    out_of = list(range(count * engine_blocks))
    into = [BLOCKS - 1 - block for block in out_of]
    for i, slot in enumerate(slots):
        blocks = out_of[i * engine_blocks : (i + 1) * engine_blocks]
        host.submit(Way.STORE, blocks, [slot], id_=i)
    store, load = host.ways[Way.STORE], host.ways[Way.LOAD]
    assert store.wait(range(count), Deadline.after(5)) == []
    host.submit(Way.LOAD, into, slots, id_=100)
    assert load.wait([100], Deadline.after(5)) == []
    for layer in host.world.pages.layers:
        assert (layer[into] == layer[out_of]).all()
    assert [end.ok for end in store.poll() + load.poll()] == [True] * (count + 1)
    for direction in host.ways.values():
        assert direction.close(Deadline.after(5)).clean


def test_submit_does_not_wait_for_the_copy_and_directions_do_not_wait_for_each_other(host: Host) -> None:
    host.mover.gate.clear()
    began = time.monotonic()
    host.submit(Way.STORE, [0], [0], 1)
    assert host.mover.entered.wait(5)
    assert host.ways[Way.STORE].poll() == []
    host.mover.entered.clear()
    host.submit(Way.LOAD, [1], [1], 2)
    assert host.mover.entered.wait(5)  # the load has begun while the store is held
    assert time.monotonic() - began < 5
    host.mover.gate.set()
    for way, id_ in ((Way.STORE, 1), (Way.LOAD, 2)):
        assert host.ways[way].wait([id_], Deadline.after(5)) == []


def test_a_full_queue_refuses_and_lists_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "QUEUE_LIMIT", 2)
    queue = host.device.open_queue(Way.STORE)
    direction = Direction("small", queue, host.mover.check)
    host.mover.gate.clear()
    direction.submit(host.world.transfer(Way.STORE, [0], [0], 1))
    assert host.mover.entered.wait(5)
    direction.submit(host.world.transfer(Way.STORE, [1], [1], 2))
    direction.submit(host.world.transfer(Way.STORE, [2], [2], 3))
    with pytest.raises(Refused, match="full"):
        direction.submit(host.world.transfer(Way.STORE, [3], [3], 4))
    assert direction.listed == [1, 2, 3]
    host.mover.gate.set()
    assert direction.close(Deadline.after(5)).clean
    assert {end.id: end.cause for end in direction.poll()} == {1: "ok", 2: "cancelled", 3: "cancelled"}


def test_queued_copies_are_taken_back_and_never_run(host: Host) -> None:
    before = host.world.rows.table(0).copy()
    host.mover.gate.clear()
    host.submit(Way.STORE, [0], [0], 1)
    assert host.mover.entered.wait(5)
    host.submit(Way.STORE, [1], [1], 2)
    host.submit(Way.STORE, [2], [2], 3)
    store = host.ways[Way.STORE]
    store.cancel([1, 2])
    assert store.listed == [1, 3]
    host.mover.gate.set()
    assert store.wait([1, 2, 3], Deadline.after(5)) == []
    assert {end.id: end.cause for end in store.poll()} == {1: "ok", 2: "cancelled", 3: "ok"}
    assert (host.world.rows.table(0)[1] == before[1]).all()
    assert not (host.world.rows.table(0)[2] == before[2]).all()


def test_a_copy_that_raises_ends_failed_and_the_next_one_runs(host: Host) -> None:
    host.mover.error = ValueError("bad page")
    host.submit(Way.LOAD, [0], [0], 1)
    load = host.ways[Way.LOAD]
    assert load.wait([1], Deadline.after(5)) == []
    (end,) = load.poll()
    assert not end.ok
    assert "bad page" in end.cause
    host.mover.error = None
    host.submit(Way.LOAD, [0], [0], 2)
    assert load.wait([2], Deadline.after(5)) == []
    assert load.poll()[0].ok


def test_synchronize_waits_for_both_directions_and_is_bounded(host: Host) -> None:
    host.mover.gate.clear()
    host.submit(Way.STORE, [0], [0], 1)
    host.submit(Way.LOAD, [1], [1], 2)
    with pytest.raises(TierBroken, match="still run"):
        host.device.synchronize(Deadline.after(0.05))
    host.mover.gate.set()
    host.device.synchronize(Deadline.after(5))
    assert [end.id for way in Way for end in host.ways[way].poll()] == [1, 2]


def test_a_thread_stuck_in_a_copy_is_reported_and_a_second_close_ends_it(host: Host) -> None:
    host.mover.gate.clear()
    host.submit(Way.STORE, [0], [0], 1)
    assert host.mover.entered.wait(5)
    store = host.ways[Way.STORE]
    began = time.monotonic()
    report = store.close(Deadline.after(0.1))
    assert time.monotonic() - began < 1.0
    assert (report.ended, report.memory) == (Outcome.RUNNING, Memory.KEPT)
    host.mover.gate.set()
    assert store.close(Deadline.after(5)).clean
    assert [end.cause for end in store.poll()] == ["ok"]

"""The rank's side in one process, the scheduler's in another: the region is handed over, and each may die."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import side_child
from engine_bench import PAGE_BYTES, ROWS, eventually, gone
from side_child import BLOCK_TOKENS

from kvtier.core.ids import Key
from kvtier.engine.store import Store
from kvtier.errors import TierBroken
from kvtier.runtime.report import Outcome

pytestmark = pytest.mark.processes

HALF = ROWS // 2


class Side:
    """A child of the test, and the socket to it."""

    def __init__(self, role: str, engine: str, name: str, *, seed: int = 0, path: Path | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        args = [role, str(theirs.fileno()), engine, name, str(seed), *([str(path)] if path else [])]
        script = Path(side_child.__file__)
        self.popen = subprocess.Popen([sys.executable, str(script), *args], pass_fds=[theirs.fileno()])
        theirs.close()
        self.connection = Connection(ours.detach())

    def hear(self) -> bytes:
        assert self.connection.poll(60), "nothing came"
        return self.connection.recv_bytes()

    def call(self, message: bytes) -> bytes:
        self.connection.send_bytes(message)
        return self.hear()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(20)

    def step(self, store: Store) -> None:
        """One step of the engine."""
        store.ranks_ended(side_child.decode_ends(self.call(side_child.encode(store.take_work()))))


@contextmanager
def started(role: str, engine: str, name: str = "kv", *, seed: int = 0, path: Path | None = None) -> Iterator[Side]:
    side = Side(role, engine, name, seed=seed, path=path)
    try:
        yield side
    finally:
        side.kill()
        side.connection.close()


def engine_id(request: pytest.FixtureRequest, more: str = "") -> str:
    return f"{os.getpid()}-{request.node.name}{more}"


def keys(count: int = HALF, salt: int = 0) -> list[Key]:
    return [Key(bytes([salt, i]) * 17) for i in range(count)]


def stored_and_loaded(side: Side, store: Store, salt: int = 0) -> None:
    """Its lower half through host memory into its upper half, with the same keys for everybody."""
    assert store.offer("s", 0, 0, keys(HALF, salt), list(range(HALF))) == HALF
    side.step(store)
    assert eventually(lambda: side.step(store) or not store.stores_out("s"))
    store.gone("s")
    assert store.lookup("l", (keys(HALF, salt),), 0) == HALF * BLOCK_TOKENS
    store.load("l", 0, HALF * BLOCK_TOKENS, [list(range(HALF, ROWS))])
    assert eventually(lambda: side.step(store) or not store.rank_transfers_out)
    store.gone("l")
    assert side.call(b"bytes") == b"right"


@pytest.mark.parametrize("tier", [False, True])
def test_bytes_cross_two_processes_and_the_rank_closes_first(
    request: pytest.FixtureRequest, tmp_path: Path, tier: bool
) -> None:
    with started("rank", engine_id(request), seed=3) as rank:
        assert rank.hear() == b"up"
        with side_child.scheduler(engine_id(request), "kv", str(tmp_path) if tier else "") as scheduler:
            stored_and_loaded(rank, scheduler.store)
            scheduler.store.check()
            text = rank.call(b"").decode()
            assert "kept" not in text, text
            assert rank.popen.wait(20) == 0
            report = scheduler.close()
            assert report.clean, str(report)


def test_a_killed_rank_ends_its_transfers_as_failed(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with started("rank", engine_id(request)) as rank:
        assert rank.hear() == b"up"
        with side_child.scheduler(engine_id(request), "kv", str(tmp_path)) as scheduler:
            store = scheduler.store
            store.offer("s", 0, 0, keys(), list(range(HALF)))
            assert len(store.take_work().stores) == 1  # taken, and then nobody hears of it again
            assert store.stores_out("s")
            rank.kill()
            assert eventually(lambda: not store.rank_transfers_out, within_s=2.0)  # with no call of the engine
            store.gone("s")
            assert eventually(lambda: store.lookup("l", (keys(),), 0) == 0)  # not None: the disk has answered
            store.gone("l")
            store.check()
            assert store.counts()["leases_out"] == 0
            report = scheduler.close()
            assert report.clean, str(report)


def test_a_rank_that_is_killed_under_a_load_ends_it(request: pytest.FixtureRequest) -> None:
    with started("rank", engine_id(request)) as rank:
        assert rank.hear() == b"up"
        with side_child.scheduler(engine_id(request), "kv") as scheduler:
            store = scheduler.store
            stored_and_loaded(rank, store)
            assert store.lookup("l", (keys(),), 0) == HALF * BLOCK_TOKENS
            store.load("l", 0, HALF * BLOCK_TOKENS, [list(range(HALF, ROWS))])
            store.take_work()
            rank.kill()
            report = scheduler.close()  # at once: the close itself must see the death
            assert report.clean, str(report)
            assert report.seconds < 1.5


def test_a_living_silent_rank_leaves_memory_kept_until_it_has_closed(request: pytest.FixtureRequest) -> None:
    with started("rank", engine_id(request)) as rank:
        assert rank.hear() == b"up"
        with side_child.scheduler(engine_id(request), "kv") as scheduler:
            store = scheduler.store
            store.offer("s", 0, 0, keys(), list(range(HALF)))
            store.take_work()
            began = time.monotonic()
            report = scheduler.close()
            assert time.monotonic() - began < 2.2
            (node,) = [each for each in report.walk() if each.name == "ranks"]
            assert node.ended is Outcome.RUNNING
            assert report.memory_kept
            rank.kill()
            report = scheduler.close()
            assert not report.memory_kept, str(report)


def test_a_killed_scheduler_takes_its_tier_process_along(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pages = [np.zeros((ROWS, size), np.uint8) for size in PAGE_BYTES]
    side = side_child.rank(engine_id(request), "kv", pages)
    with started("scheduler", engine_id(request), path=tmp_path) as scheduler:
        tier = int(scheduler.hear())
        assert not gone(tier)
        scheduler.kill()
        assert eventually(lambda: gone(tier))
    assert side.close().clean


def test_engines_side_by_side_never_meet(request: pytest.FixtureRequest) -> None:
    one, two = engine_id(request, "one"), engine_id(request, "two")
    pairs = [(one, "kv", 1), (two, "kv", 2), (one, "other", 3)]
    with (
        started("rank", *pairs[0][:2], seed=1) as a,
        started("rank", *pairs[1][:2], seed=2) as b,
        started("rank", *pairs[2][:2], seed=3) as c,
    ):
        ranks = [a, b, c]
        for rank in ranks:
            assert rank.hear() == b"up"
        sides = [side_child.scheduler(engine, name) for engine, name, _ in pairs]
        members = [member for side in sides for member in side.scope._members if member.name == "region"]
        regions = {os.fstat(member.thing.fd).st_ino for member in members}
        assert len(regions) == 3
        for rank, side in zip(ranks, sides, strict=True):
            stored_and_loaded(rank, side.store)  # the same keys, other bytes
        for rank, side in zip(ranks, sides, strict=True):
            assert "kept" not in rank.call(b"").decode()
            assert side.close().clean


def test_a_second_scheduler_gets_no_region_of_its_own(request: pytest.FixtureRequest) -> None:
    with started("rank", engine_id(request)) as rank:
        assert rank.hear() == b"up"
        with side_child.scheduler(engine_id(request), "kv") as scheduler:
            from kvtier.memory.handover import handover_name, receive
            from kvtier.runtime.deadline import Deadline

            with pytest.raises(TierBroken, match="no region"):
                receive(handover_name(engine_id(request), "kv"), Deadline.after(0.3))
            rank.call(b"")
            assert scheduler.close().clean

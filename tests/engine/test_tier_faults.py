"""What a tier may do wrong at run time: the engine goes on, and the tier comes back by itself."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_bench import BLOCK_TOKENS, BOTH, Bench, config, disk, eventually, fault

import kvtier
from kvtier.engine.tier_port import PortState

Open = Callable[..., Bench]

SLACK_S = 1.0
"""how much later than its timeout a lookup may answer on a busy machine"""

IN_A_THREAD = [("ask", "raise"), ("submit", "raise"), ("run", "raise"), ("poll", "broken"), ("fileno", "raise")]
IN_A_PROCESS = [
    *[(point, deed) for point in ("ask", "submit", "run") for deed in ("raise", "exit", "segv")],
    ("poll", "raise"),
    ("cancel", "raise"),
    ("counts", "raise"),
]
HANGS = [("ask", "hang"), ("run", "hang"), ("submit", "stop"), ("run", "silent")]


def comes_up(b: Bench, name: str = "far") -> bool:
    return eventually(lambda: b.port(name).state is PortState.UP, within_s=20)


def use(b: Bench) -> None:
    """Everything that an engine does, with a tier that may fail at any of it; all bytes must be right."""
    for seed in range(20, 24):
        assert b.put(6, seed) > 0
        began = time.monotonic()
        b.get(6, seed)
        b.get(6, seed + 100)  # never stored: goes to the tiers
        assert time.monotonic() - began < 2 * (LOOKUP_S + SLACK_S)


LOOKUP_S = 0.5


def open_with(bench: Open, tier: dict[str, Any], **more: Any) -> Bench:
    b = bench(config(tier, lookup_timeout_s=LOOKUP_S, **more))
    assert comes_up(b)
    return b


def whole_again(b: Bench) -> None:
    """After the fault is over: back by itself, nothing out, and it stores and loads as before."""
    assert comes_up(b), b.port("far").error
    assert eventually(lambda: b.counts("leases_out", "transfers_out") == [0, 0]), b.cache.counts()
    assert b.put(6, 1) == 6 * BLOCK_TOKENS
    assert b.cache.settle()
    b.crowd_out()
    assert b.get(6, 1) == 6 * BLOCK_TOKENS
    b.settled()
    assert b.store.off is None


@pytest.mark.parametrize(("point", "deed"), IN_A_THREAD)
def test_a_tier_in_a_thread_that_fails_comes_back(bench: Open, tmp_path: Path, point: str, deed: str) -> None:
    switch = tmp_path / "on"
    b = open_with(bench, fault("far", process=False, switch=switch, **{point: deed}))
    switch.touch()
    use(b)
    if point != "fileno":  # without a descriptor it is only slower
        assert eventually(lambda: b.port("far").losses_count > 0)
    switch.unlink()
    whole_again(b)


@pytest.mark.processes
@pytest.mark.parametrize(("point", "deed"), IN_A_PROCESS)
def test_a_tier_process_that_fails_comes_back(bench: Open, tmp_path: Path, point: str, deed: str) -> None:
    switch = tmp_path / "on"
    b = open_with(bench, fault("far", process=True, switch=switch, **{point: deed}))
    switch.touch()
    use(b)
    if point == "cancel":
        b.store._driver.ports["far"]._tier.cancel(1)  # type: ignore[union-attr]
    assert eventually(lambda: b.port("far").losses_count > 0)
    switch.unlink()
    whole_again(b)


@pytest.mark.processes
@pytest.mark.parametrize(("point", "deed"), HANGS)
def test_a_tier_process_that_hangs_is_killed_and_comes_back(
    bench: Open, tmp_path: Path, point: str, deed: str
) -> None:
    switch = tmp_path / "on"
    b = open_with(bench, fault("far", process=True, switch=switch, **{point: deed}))
    b.port("far").silent_s_max = 1.0
    switch.touch()
    use(b)
    assert eventually(lambda: b.port("far").losses_count > 0)
    switch.unlink()
    b.port("far").silent_s_max = 30.0
    whole_again(b)


@pytest.mark.parametrize("process", BOTH)
def test_a_tier_that_is_broken_at_the_start_comes_later(bench: Open, tmp_path: Path, process: bool) -> None:
    switch = tmp_path / "on"
    switch.touch()
    b = bench(config(fault("far", process=process, switch=switch, open="broken"), lookup_timeout_s=LOOKUP_S))
    assert b.put(4) == b.get(4) == 4 * BLOCK_TOKENS
    switch.unlink()
    whole_again(b)


@pytest.mark.parametrize("process", BOTH)
def test_a_tier_that_never_comes_up_is_ended_and_tried_again(
    bench: Open, tmp_path: Path, process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.engine import open as opening

    monkeypatch.setattr(opening, "TIERS_START_S", 0.1)
    switch = tmp_path / "on"
    switch.touch()
    point, deed = ("open", "hang") if process else ("ready", "not_ready")
    b = bench(config(fault("far", process=process, switch=switch, **{point: deed}), lookup_timeout_s=LOOKUP_S))
    b.port("far").opening_s_max = 0.5
    use(b)
    assert eventually(lambda: b.port("far").losses_count > 0)
    b.port("far").opening_s_max = 30.0
    switch.unlink()
    whole_again(b)


@pytest.mark.parametrize("process", BOTH)
def test_a_wrong_value_that_turns_up_later_is_no_end(bench: Open, tmp_path: Path, process: bool) -> None:
    switch = tmp_path / "on"
    b = open_with(bench, fault("far", process=process, switch=switch, poll="raise", open="config_error"))
    switch.touch()
    b.put(4)
    assert eventually(lambda: b.port("far").config_error is not None)
    use(b)
    switch.unlink()
    whole_again(b)


@pytest.mark.processes
def test_one_line_is_logged_an_incident(bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    switch = tmp_path / "on"
    b = open_with(bench, fault("far", process=True, switch=switch, open="broken", run="exit"))
    caplog.clear()
    switch.touch()
    with caplog.at_level(logging.INFO, logger="kvtier"):
        b.put(4)
        assert eventually(lambda: b.port("far").losses_count >= 3)
        switch.unlink()
        assert comes_up(b)
    lines = [record.getMessage() for record in caplog.records if "tier far" in record.getMessage()]
    assert sum("exit code 7" in line or "hung up" in line for line in lines) == 1, lines
    assert sum("as it was told to" in line for line in lines) == 1, lines
    assert sum("up again" in line for line in lines) == 1, lines
    assert len(lines) == 3


@pytest.mark.processes
@pytest.mark.parametrize("way", ["demotions", "promotions"])
def test_kill_9_in_the_middle_of_transfers(bench: Open, tmp_path: Path, way: str) -> None:
    b = open_with(bench, disk(tmp_path, process=True, name="far"), host="1MiB")
    for seed in range(8):
        assert b.put(8, seed) == 8 * BLOCK_TOKENS
    assert b.cache.settle()
    b.crowd_out()
    tier: Any = b.port("far")._tier
    os.kill(tier.pid, signal.SIGSTOP)  # so that it dies with transfers in it
    if way == "demotions":
        for seed in range(100, 104):
            assert b.put(8, seed) == 8 * BLOCK_TOKENS
        assert b.counts("transfers_out")[0] > 0
        os.kill(tier.pid, signal.SIGKILL)
        assert all(b.get(8, seed) == 8 * BLOCK_TOKENS for seed in range(100, 104))
    else:
        _, keys = b.cache._begin(b.tokens(8, 0), 8, b"")
        os.kill(tier.pid, signal.SIGCONT)
        assert b.store.lookup("r", (keys,), 0) is None
        assert eventually(lambda: b.store.lookup("r", (keys,), 0) is not None or b.counts("transfers_out")[0] > 0)
        os.kill(tier.pid, signal.SIGKILL)
        assert eventually(lambda: b.store.lookup("r", (keys,), 0) is not None, within_s=LOOKUP_S + SLACK_S)
        b.store.gone("r")
    del tier
    assert eventually(lambda: b.port("far").losses_count == 1)
    assert comes_up(b)
    assert eventually(lambda: b.counts("leases_out", "transfers_out") == [0, 0])
    for seed in range(8):
        assert b.get(8, seed) == 8 * BLOCK_TOKENS  # they had reached the disk before
    b.settled()
    assert b.cache.close().clean


@pytest.mark.parametrize("process", BOTH)
def test_an_idle_engines_last_blocks_reach_the_disk(bench: Open, tmp_path: Path, process: bool) -> None:
    b = bench(config(disk(tmp_path, process=process)))
    assert b.put(32) == 32 * BLOCK_TOKENS
    assert eventually(lambda: b.counts("demoted_blocks") == [32])  # `counts` does not pump
    b.settled()


@pytest.mark.processes
def test_a_request_given_up_while_it_waits_leaves_nothing(bench: Open, tmp_path: Path) -> None:
    b = open_with(bench, disk(tmp_path, process=True, name="far"))
    for seed in range(4):
        b.put(16, seed)
    assert b.cache.settle()
    b.crowd_out()
    free = b.counts("host_free_slots")
    _, keys = b.cache._begin(b.tokens(16, 0), 16, b"")
    assert b.store.lookup("r", (keys,), 0) is None
    b.store.gone("r")  # and no other call comes
    b.settled(within_s=1.0)
    b.store.gone("r")
    b.settled()
    assert b.counts("host_free_slots") >= free


@pytest.mark.processes
def test_the_keeper_starts_a_dead_tier_of_an_idle_engine(bench: Open, tmp_path: Path) -> None:
    b = open_with(bench, disk(tmp_path, process=True, name="far"))
    b.put(4)
    assert b.cache.settle()
    tier: Any = b.port("far")._tier
    os.kill(tier.pid, signal.SIGKILL)
    del tier
    assert eventually(lambda: b.port("far").losses_count == 1)
    assert comes_up(b)
    b.settled()


@pytest.mark.processes
def test_hooks_hold_the_lock_for_moments_only(bench: Open, tmp_path: Path) -> None:
    b = open_with(bench, disk(tmp_path, process=True, name="far"), host="2MiB")
    spent: list[float] = []
    for seed in range(30):
        b.put(16, seed)
        _, keys = b.cache._begin(b.tokens(16, seed + 1000), 16, b"")
        began = time.thread_time()
        b.store.lookup("r", (keys,), 0)
        b.store.take_work()
        b.store.gone("r")
        spent.append(time.thread_time() - began)
    spent.sort()
    assert spent[len(spent) // 2] < 0.005


@pytest.mark.processes
def test_a_bug_in_the_core_switches_kvtier_off_and_nothing_else(
    bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = open_with(bench, disk(tmp_path, process=True, name="far"))
    b.put(4)
    store, core = b.store, b.store._driver.core

    def bug(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(core, "handle", bug)
    _, keys = b.cache._begin(b.tokens(4), 4, b"")
    with caplog.at_level(logging.INFO, logger="kvtier"):
        assert store.lookup("r", (keys,), 0) == 0
        assert store.offer("r", 0, 0, keys, [0, 1, 2, 3]) == 4
        store.load("r", 0, 4, [[0, 1, 2, 3]])
        store.preempted("r")
        store.gone("r")
        store.reset()
        store.ranks_ended([])
        assert store.take_work().off
        assert store.stores_out("r") == []
        assert not store.rank_transfers_out
        store.pump()
        assert b.put(4) == 0
        assert b.get(4) == 0
    assert isinstance(store.off, ZeroDivisionError)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert b.counts("off") == [1]
    began = time.thread_time()
    time.sleep(0.5)  # the keeper must not spin on what nobody reads
    assert time.thread_time() - began < 0.2
    report = b.cache.close()
    assert not report.memory_kept, str(report)
    with pytest.raises(ExceptionGroup) as group:
        report.raise_if_failed()
    assert isinstance(group.value.exceptions[-1], ZeroDivisionError)
    assert "planted" in str(report)


@pytest.mark.processes
def test_the_keeper_outlives_a_bug(bench: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = open_with(bench, disk(tmp_path, process=True, name="far"))

    def bug(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(b.store, "_start_tiers", bug)
    assert eventually(lambda: b.store.off is not None)
    assert b.store._keeper.alive
    tier: Any = b.port("far")._tier
    assert tier._process.alive
    del tier
    assert not b.cache.close().memory_kept


@pytest.mark.processes
def test_a_start_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    for process in (False, True):
        with pytest.raises(kvtier.ConfigError):
            Bench(config(disk(tmp_path, process=True), fault("far", process=process, open="config_error")))

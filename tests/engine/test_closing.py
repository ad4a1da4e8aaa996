"""Closing: bounded, every part tried once, and a report that says what was freed and what was kept."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_bench import BLOCK_TOKENS, Bench, config, disk, eventually, fault

import kvtier
from kvtier.core import effects as fx
from kvtier.core.ids import Key
from kvtier.engine.tier_port import PortState
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome

Open = Callable[..., Bench]


def node(report: CloseReport, name: str) -> CloseReport:
    (found,) = [each for each in report.walk() if each.name == name]
    return found


def wedge(b: Bench, name: str) -> None:
    """Store something that the tier never ends to write."""
    assert b.put(4) == 4 * BLOCK_TOKENS
    assert eventually(lambda: b.counts("transfers_out") == [1])
    assert b.port(name).state is PortState.UP


@pytest.mark.processes
@pytest.mark.parametrize("deed", ["silent", "hang", "stop"])
def test_a_wedged_tier_process_is_killed_within_the_deadline(bench: Open, tmp_path: Path, deed: str) -> None:
    b = bench(config(fault("far", process=True, run=deed), disk(tmp_path, process=True), close_timeout_s=1))
    wedge(b, "far")
    began = time.monotonic()
    report = b.cache.close()
    assert time.monotonic() - began < 1.2
    assert (node(report, "far").ended, node(report, "far").memory) == (Outcome.KILLED, Memory.FREED), str(report)
    assert node(report, "disk").clean
    assert node(report, "rank").clean
    assert not report.memory_kept
    assert b.cache.close() is report


@pytest.mark.leaks_ok("a wedged thread keeps the region until the process ends")
def test_a_wedged_tier_thread_keeps_the_region_and_a_second_close_retries_just_that(
    bench: Open, tmp_path: Path
) -> None:
    b = bench(config(fault("far", process=False, run="silent"), disk(tmp_path), close_timeout_s=1))
    wedge(b, "far")
    tier: Any = b.port("far")._tier
    began = time.monotonic()
    report = b.cache.close()
    assert time.monotonic() - began < 1.2
    assert (node(report, "far").ended, node(report, "far").memory) == (Outcome.RUNNING, Memory.KEPT), str(report)
    assert node(report, "disk").clean
    assert node(report, "keeper").clean
    assert "far" in str(report)
    rows = tier._rows.table(0)
    assert rows[0].any()  # still readable
    assert b.cache.close(0.2).memory_kept
    tier.release()
    del rows, tier
    report = b.cache.close()
    assert not report.memory_kept, str(report)
    assert node(report, "disk").clean
    assert b.cache.close() is report


@pytest.mark.leaks_ok("the tiers' close raises for good: their memory is kept until the process ends")
def test_every_tier_is_closed_once_and_the_last_error_is_the_groups_last(
    bench: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    from kvtier.testing import fault_tiers

    real = fault_tiers.FaultTier.close

    def counted(self: Any, deadline: Deadline) -> CloseReport:
        calls.append(self.name)
        return real(self, deadline)

    monkeypatch.setattr(fault_tiers.FaultTier, "close", counted)
    failing = [fault("b", process=False, close="raise"), fault("c", process=False, close="broken")]
    b = bench(config(fault("a", process=False), *failing))
    assert b.put(2) == 2 * BLOCK_TOKENS
    with caplog.at_level(logging.WARNING):
        report = b.cache.close()
    assert calls == ["a", "b", "c"]
    assert node(report, "a").clean
    assert [node(report, name).ended for name in "bc"] == [Outcome.FAILED, Outcome.FAILED]
    assert [node(report, name).memory for name in "bc"] == [Memory.KEPT, Memory.KEPT]
    with pytest.raises(ExceptionGroup) as group:
        report.raise_if_failed()
    assert isinstance(group.value.exceptions[-1], kvtier.TierBroken)
    assert {type(error) for error in group.value.exceptions} == {RuntimeError, kvtier.TierBroken}
    for name, kind in (("b", "RuntimeError"), ("c", "TierBroken")):
        assert f"tier {name} failed to close ({kind})" in caplog.text
    assert b.port("b")._tier._rows.table(0)[0].any()  # type: ignore[union-attr]
    b.cache.close()
    assert calls == ["a", "b", "c", "b", "c"]


@pytest.mark.processes
def test_tier_processes_that_raise_in_their_close_cost_no_memory(bench: Open) -> None:
    failing = [fault("b", process=True, close="raise"), fault("c", process=True, close="exit")]
    b = bench(config(fault("a", process=True), *failing))
    assert b.put(2) == 2 * BLOCK_TOKENS
    assert b.cache.settle()
    report = b.cache.close()
    assert node(report, "a").clean
    assert [node(report, name).ended for name in "bc"] == [Outcome.FAILED, Outcome.FAILED]
    assert not report.memory_kept, str(report)
    assert "exit code 1" in node(report, "b").cause
    assert "exit code 7" in node(report, "c").cause


def test_a_tier_that_raises_when_it_is_asked_to_stop_is_closed_all_the_same(bench: Open) -> None:
    b = bench(config(fault("a", process=False, ask_stop="raise"), fault("b", process=False)))
    b.put(2)
    report = b.cache.close()
    assert node(report, "b").clean
    assert (node(report, "a").ended, node(report, "a").memory) == (Outcome.FAILED, Memory.FREED)
    with pytest.raises(ExceptionGroup, match="1 of its parts"):
        report.raise_if_failed()


@pytest.mark.parametrize("point", ["close", "ask_stop"])
def test_an_interrupt_passes_and_a_second_close_goes_on(bench: Open, tmp_path: Path, point: str) -> None:
    switch = tmp_path / "on"
    interrupted = fault("b", process=False, switch=switch, **{point: "interrupt"})
    b = bench(config(fault("a", process=False), interrupted, fault("c", process=False)))
    b.put(2)
    switch.touch()
    with pytest.raises(KeyboardInterrupt):
        b.cache.close()
    switch.unlink()
    report = b.cache.close()
    assert report.clean, str(report)


def test_hooks_are_not_held_up_by_a_close(bench: Open) -> None:
    b = bench(config(fault("far", process=False, run="silent"), close_timeout_s=1))
    wedge(b, "far")
    tier: Any = b.port("far")._tier
    closer = threading.Thread(target=b.cache.close)
    closer.start()
    longest_s, looks = 0.0, 0
    keys = (tuple(Key(bytes([i]) * 32) for i in range(4)),)
    while closer.is_alive():
        began = time.perf_counter()
        assert b.store.lookup("r", keys, 0) == 0
        b.store.take_work()
        b.store.gone("r")
        longest_s, looks = max(longest_s, time.perf_counter() - began), looks + 1
        time.sleep(0.005)
        if looks == 60:
            tier.release()
    closer.join()
    assert looks > 30
    assert longest_s < 0.2  # the machine may be busy; a close that held the lock would take half a second
    del tier


def test_a_tier_that_is_being_opened_is_closed_as_well(bench: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(config(fault("far", process=False)))
    port = b.port("far")
    real, entered, go_on = port._open_tier, threading.Event(), threading.Event()

    def slow() -> Any:
        entered.set()
        assert go_on.wait(10)
        return real()

    port._open_tier = slow

    def broken() -> Any:
        raise RuntimeError("broken")

    tier: Any = port._tier
    tier.poll = broken
    assert entered.wait(10), "the keeper opens it again"
    threading.Timer(0.2, go_on.set).start()
    report = b.cache.close()
    assert report.clean, str(report)
    assert port.state is PortState.CLOSED
    del tier


@pytest.mark.leaks_ok("a tier that is still being opened keeps the region until the process ends")
def test_a_tier_whose_opening_hangs_is_told_and_kept(bench: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.engine import open as opening

    monkeypatch.setattr(opening, "TIERS_START_S", 0.2)
    b = bench(config(fault("far", process=False, open="hang"), close_timeout_s=0.5))
    assert b.put(2) == b.get(2) == 2 * BLOCK_TOKENS
    began = time.monotonic()
    report = b.cache.close()
    assert time.monotonic() - began < 1.5
    assert node(report, "far").ended is Outcome.RUNNING
    assert report.memory_kept


@pytest.mark.processes
def test_a_tier_process_that_never_comes_up_is_ended(bench: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.engine import open as opening

    monkeypatch.setattr(opening, "TIERS_START_S", 0.2)
    b = bench(config(fault("far", process=True, open="hang"), close_timeout_s=0.5))
    assert b.put(2) == b.get(2) == 2 * BLOCK_TOKENS
    report = b.cache.close()
    assert not report.memory_kept, str(report)
    assert node(report, "far").ended in (Outcome.KILLED, Outcome.CLEAN)


@pytest.mark.processes
def test_a_tier_process_that_died_before_the_close_costs_nothing(bench: Open) -> None:
    b = bench(config(fault("far", process=True)))
    b.put(2)
    tier: Any = b.port("far")._tier
    os.kill(tier.pid, signal.SIGKILL)
    del tier
    report = b.cache.close()
    assert not report.memory_kept, str(report)
    assert report.seconds < 1


def test_loads_that_no_rank_has_seen_end_at_close(bench: Open) -> None:
    b = bench(config())
    b.put(4)
    _, keys = b.cache._begin(b.tokens(4), 4, b"")
    assert b.store.lookup("r", (keys,), 0) == 4 * BLOCK_TOKENS
    b.store.load("r", 0, 4 * BLOCK_TOKENS, [[5, 6, 7, 8]])
    assert b.store.rank_transfers_out
    report = b.cache.close()
    assert report.clean, str(report)


def test_a_close_lets_queued_blocks_reach_the_disk(bench: Open, tmp_path: Path) -> None:
    b = bench(config(disk(tmp_path)))
    for seed in range(4):
        assert b.put(8, seed) == 8 * BLOCK_TOKENS
    assert b.cache.close().clean
    b = bench(config(disk(tmp_path)))
    for seed in range(4):
        assert b.get(8, seed) == 8 * BLOCK_TOKENS


def test_effects_of_a_closed_port_are_refused(bench: Open) -> None:
    b = bench(config(fault("far", process=False)))
    b.cache.close()
    port = b.port("far")
    (event,) = port.ask(fx.Ask("far", 1, [Key(bytes(32))]), 0.0)  # type: ignore[arg-type]
    assert event.held == [False]  # type: ignore[union-attr]
    assert port.pump(0.0) == []
    assert port.close(Deadline.after(0), 0.0)[0].clean

"""Scopes: who is closed, how often, in which order, and what the report says."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from kvtier.errors import Closed
from kvtier.runtime import scope as scope_module
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.runtime.scope import Scope
from kvtier.runtime.worker import Loop, Worker


class Part:
    """Counts its calls into a log shared by its siblings; raises or keeps what it is told to."""

    def __init__(self, name: str, calls: list[str], *outcomes: BaseException | CloseReport) -> None:
        self.name = name
        self.calls = calls
        self.outcomes = list(outcomes)
        self.ask_error: Exception | None = None

    def ask_stop(self) -> None:
        self.calls.append(f"ask {self.name}")
        if self.ask_error is not None:
            raise self.ask_error

    def close(self, deadline: Deadline) -> CloseReport:
        self.calls.append(f"close {self.name}")
        outcome = self.outcomes.pop(0) if self.outcomes else CloseReport(self.name)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def kept(name: str) -> CloseReport:
    return CloseReport(name, Outcome.RUNNING, Memory.KEPT, cause="a thread still runs")


def test_all_are_asked_before_one_is_closed_and_both_go_in_reverse():
    calls: list[str] = []
    outer = Scope("outer")
    outer.own("a", Part("a", calls))
    inner = outer.own("inner", Scope("inner"))
    inner.own("b", Part("b", calls))
    inner.own("c", Part("c", calls))
    outer.own("d", Part("d", calls))
    report = outer.close()
    assert calls == ["ask d", "ask c", "ask b", "ask a", "close d", "close c", "close b", "close a"]
    assert [node.name for node in report.walk()] == ["d", "c", "b", "inner", "a", "outer"]
    assert report.clean


def test_one_that_raises_costs_no_sibling_its_close_and_one_group_surfaces():
    calls: list[str] = []
    scope = Scope("s")
    first, last = RuntimeError("first"), RuntimeError("last")
    scope.own("a", Part("a", calls, last))
    scope.own("b", Part("b", calls))
    scope.own("c", Part("c", calls, first))
    report = scope.close()
    assert sorted(call for call in calls if call.startswith("close")) == ["close a", "close b", "close c"]
    assert report.ended is Outcome.FAILED
    with pytest.raises(ExceptionGroup) as group:
        report.raise_if_failed()
    assert group.value.exceptions == (first, last)
    scope.close()


def test_one_whose_ask_stop_raises_costs_no_sibling_its_ask():
    calls: list[str] = []
    scope = Scope("s")
    scope.own("a", Part("a", calls))
    scope.own("b", Part("b", calls)).ask_error = RuntimeError("no")
    scope.own("c", Part("c", calls))
    scope.ask_stop()
    report = scope.close()
    assert calls == ["ask c", "ask b", "ask a", "close c", "close b", "close a"]
    assert [(node.name, node.ended, node.memory) for node in report.children] == [
        ("c", Outcome.CLEAN, Memory.FREED),
        ("b", Outcome.FAILED, Memory.FREED),
        ("a", Outcome.CLEAN, Memory.FREED),
    ]
    assert scope.close() is report
    assert len(calls) == 6


def test_one_whose_ask_stop_raised_is_asked_again_by_the_next_try():
    calls: list[str] = []
    scope = Scope("s")
    part = scope.own("a", Part("a", calls, kept("a")))
    part.ask_error = RuntimeError("no")
    report = scope.close()
    assert report.children[0].error is part.ask_error
    part.ask_error = None
    assert scope.close().clean
    assert calls == ["ask a", "close a"] * 2


def test_a_member_that_closes_its_own_scope_gets_an_answer_and_no_recursion():
    calls: list[str] = []
    seen: list[Outcome] = []

    class Closes(Part):
        def close(self, deadline: Deadline) -> CloseReport:
            seen.append(scope.close(deadline).ended)
            return super().close(deadline)

    scope = Scope("s")
    scope.own("a", Closes("a", calls))
    assert scope.close().clean
    assert seen == [Outcome.RUNNING]
    assert calls == ["ask a", "close a"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_at_once_and_a_later_close_does_the_rest(interrupt: type[BaseException]):
    calls: list[str] = []
    scope = Scope("s")
    scope.own("a", Part("a", calls))
    scope.own("b", Part("b", calls, interrupt()))
    scope.own("c", Part("c", calls))
    with pytest.raises(interrupt):
        scope.close()
    assert calls == ["ask c", "ask b", "ask a", "close c", "close b"]
    assert scope.close().clean
    assert calls[5:] == ["close b", "close a"]


def test_a_second_close_returns_the_same_report():
    calls: list[str] = []
    scope = Scope("s")
    scope.own("a", Part("a", calls))
    report = scope.close()
    seen: list[CloseReport] = []
    thread = threading.Thread(target=lambda: seen.append(scope.close()))
    thread.start()
    thread.join(10)
    assert scope.close() is report
    assert seen == [report]
    assert calls == ["ask a", "close a"]


def test_a_second_close_tries_exactly_what_was_left_and_updates_the_report():
    calls: list[str] = []
    scope = Scope("s")
    scope.own("a", Part("a", calls))
    inner = scope.own("inner", Scope("inner"))
    inner.own("b", Part("b", calls, RuntimeError("once")))
    inner.own("c", Part("c", calls, CloseReport("c", Outcome.KILLED)))
    inner.own("d", Part("d", calls, kept("d")))
    report = scope.close()
    assert not report.clean
    assert report.memory_kept
    calls.clear()
    assert scope.close() is report
    assert calls == ["close d", "close b"]
    assert not report.memory_kept
    assert [node.name for node in report.walk() if not node.clean] == ["c", "inner", "s"]
    calls.clear()
    assert scope.close() is report
    assert calls == []


def test_a_region_is_closed_last_and_only_if_all_before_it_freed_their_memory():
    calls: list[str] = []
    scope = Scope("s")
    scope.own("region", Part("region", calls), shared_memory=True)
    scope.own("a", Part("a", calls, CloseReport("a", Outcome.KILLED)))
    inner = scope.own("inner", Scope("inner"))
    inner.own("b", Part("b", calls, kept("b")))
    scope.own("c", Part("c", calls))
    report = scope.close()
    assert "close region" not in calls
    region = report.children[-1]
    assert (region.name, region.ended, region.memory) == ("region", Outcome.CLEAN, Memory.KEPT)
    assert "inner" in region.cause
    calls.clear()
    assert scope.close() is report
    assert calls == ["close b", "close region"]
    assert not report.memory_kept


@pytest.mark.parametrize(("touches_memory", "closed"), [(True, 0), (False, 1)])
def test_a_region_outlives_a_part_that_raised_unless_that_never_touches_it(*, touches_memory: bool, closed: int):
    calls: list[str] = []
    scope = Scope("s")
    scope.own("region", Part("region", calls), shared_memory=True)
    scope.own("a", Part("a", calls, RuntimeError("no")), touches_memory=touches_memory)
    report = scope.close()
    assert calls.count("close region") == closed
    assert report.memory_kept is touches_memory
    assert report.ended is Outcome.FAILED
    scope.close()


def test_what_was_left_outlives_its_scope_and_what_was_closed_does_not():
    calls: list[str] = []
    scope = Scope("s")
    region, done = Part("region", calls), Part("done", calls)
    scope.own("region", region, shared_memory=True)
    scope.own("done", done)
    scope.own("a", Part("a", calls, kept("a")))
    scope.close()
    region_alive, done_alive, scope_alive = weakref.ref(region), weakref.ref(done), weakref.ref(scope)
    del region, done, scope
    gc.collect()
    assert done_alive() is None
    assert region_alive() is not None
    left = scope_alive()
    assert left is not None
    left.close()
    del left
    gc.collect()
    assert region_alive() is None
    assert scope_alive() is None


def test_one_deadline_is_shared_by_all():
    seen: list[Deadline] = []

    class Waits(Part):
        def close(self, deadline: Deadline) -> CloseReport:
            seen.append(deadline)
            return super().close(deadline)

    scope = Scope("s", close_timeout_s=7)
    scope.own("a", Waits("a", []))
    scope.own("inner", Scope("inner", close_timeout_s=99)).own("b", Waits("b", []))
    began = time.monotonic()
    scope.close()
    assert seen[0] is seen[1]
    assert began + 7 <= seen[0].at <= time.monotonic() + 7


def test_a_failure_half_way_through_building_closes_what_was_opened_once():
    calls: list[str] = []

    def open_it(error: BaseException | None) -> Scope:
        with Scope.building("s") as scope:
            scope.own("a", Part("a", calls))
            scope.own("b", Part("b", calls))
            if error is not None:
                raise error
        return scope

    with pytest.raises(KeyboardInterrupt):
        open_it(KeyboardInterrupt())
    assert calls == ["ask b", "ask a", "close b", "close a"]
    calls.clear()
    with open_it(None):
        assert calls == []
    assert calls == ["ask b", "ask a", "close b", "close a"]


def test_what_is_handed_to_a_closing_scope_is_closed_on_the_spot():
    calls: list[str] = []
    scope = Scope("s")
    scope.ask_stop()
    with pytest.raises(Closed, match="'a'"):
        scope.own("a", Part("a", calls))
    assert calls == ["ask a", "close a"]
    scope.close()


def test_a_thread_that_owns_while_its_scope_closes_does_not_hold_up_the_close():
    calls: list[str] = []
    scope = Scope("s", close_timeout_s=5)

    def own_when_asked(stop: object) -> None:
        while not stop.asked:  # type: ignore[attr-defined]
            time.sleep(0.001)
        with pytest.raises(Closed):
            scope.own("late", Part("late", calls))

    scope.own("keeper", Loop("keeper", own_when_asked).start())
    assert scope.close().clean
    assert calls == ["ask late", "close late"]


def test_a_second_closer_waits_no_longer_than_its_own_deadline():
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Part):
        def close(self, deadline: Deadline) -> CloseReport:
            inside.set()
            go_on.wait(10)
            return super().close(deadline)

    scope = Scope("s")
    scope.own("a", Slow("a", []))
    thread = threading.Thread(target=scope.close)
    thread.start()
    assert inside.wait(10)
    report = scope.close(Deadline.after(0.02))
    go_on.set()
    thread.join(10)
    assert (report.ended, report.memory) == (Outcome.RUNNING, Memory.KEPT)
    assert scope.close().clean


def test_the_tree_is_logged_once(caplog: pytest.LogCaptureFixture):
    scope = Scope("s")
    scope.own("inner", Scope("inner")).own("a", Part("a", [], CloseReport("a", Outcome.KILLED)))
    with caplog.at_level(logging.DEBUG, "kvtier"):
        scope.close()
        scope.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a: killed, memory freed" in caplog.text


def test_fifty_cycles_leave_no_descriptor_and_no_thread():
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = count()
    for _ in range(50):
        with Scope("s") as scope:
            scope.own("worker", Worker("w", str, inbox_limit=4, threads=2).start()).put(1)
            scope.own("loop", Loop("l", lambda stop: None).start())
            scope.own("never started", Worker("n", str, inbox_limit=4))
        assert scope.close().clean
        assert count() == before


@pytest.mark.leaks_ok("drops scopes on purpose")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dropped_scope_is_closed_once_by_the_collector():
    calls: list[str] = []
    scope = Scope("half")
    scope.own("inner", Scope("inner")).own("a", Part("a", calls))
    scope.self = scope  # type: ignore[attr-defined]
    del scope
    gc.collect()
    assert calls == ["ask a", "close a"]
    assert scope_module.dropped.pop() == "half"
    Scope.__new__(Scope)  # one that never came to its __init__


AT_EXIT = """
import sys
from kvtier.runtime.report import CloseReport
from kvtier.runtime.scope import Scope
class Part:
    def ask_stop(self): print("ask")
    def close(self, deadline):
        print("close")
        return CloseReport("part")
scope = Scope("s")
scope.own("inner", Scope("inner")).own("part", Part())
closed = Scope("closed")
closed.own("part", Part())
closed.close()
sys.exit(3)
"""


@pytest.mark.processes
def test_a_scope_still_open_at_interpreter_exit_is_closed_once():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stdout.split() == ["ask", "close", "ask", "close"]
    assert done.stderr == ""


AT_EXIT_KEPT = """
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.runtime.scope import Scope
class Region:
    def ask_stop(self): pass
    def close(self, deadline): print("closed")
    def __del__(self): print("collected")
class Stuck:
    def ask_stop(self): pass
    def close(self, deadline):
        print("tried")
        return CloseReport("stuck", Outcome.RUNNING, Memory.KEPT)
scope = Scope("s")
scope.own("region", Region(), shared_memory=True)
scope.own("stuck", Stuck())
scope.close()
"""


@pytest.mark.processes
def test_kept_memory_is_not_even_collected_by_the_interpreters_end():
    done = subprocess.run([sys.executable, "-c", AT_EXIT_KEPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["tried"]


@pytest.mark.processes
def test_a_forked_child_closes_nothing():
    calls: list[str] = []
    scope = Scope("s")
    scope.own("a", Part("a", calls))
    worker = scope.own("w", Worker("w", str, inbox_limit=4).start())
    loop = scope.own("l", Loop("l", lambda stop: None).start())
    fd = worker.fileno()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            scope.ask_stop()
            scope.close()
            worker.close(Deadline.after(1))
            loop.close(Deadline.after(1))
            scope_module._close_the_open()
            scope.__del__()
            os.fstat(fd)
            code = 0 if calls == [] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.put(1)  # the parent's still works
    assert scope.close().clean
    assert calls == ["ask a", "close a"]

"""Workers and loops: threads that survive what they run, and end by a deadline."""

from __future__ import annotations

import select
import threading
import time
import weakref

import pytest

from kvtier.errors import Closed, Refused
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import Memory, Outcome
from kvtier.runtime.worker import Failed, Flag, Loop, Stop, Worker

PATIENCE_S = 10.0


def readable(fd: object) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def polled(worker: Worker[object, object], count: int) -> list[object]:
    """`count` results of `worker`, waiting on its descriptor."""
    got: list[object] = []
    deadline = Deadline.after(PATIENCE_S)
    while len(got) < count and select.select([worker], [], [], deadline.left)[0]:
        got += worker.poll()
    assert len(got) == count
    return got


class Gate:
    """Work that waits until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.began: list[object] = []

    def __call__(self, item: object) -> object:
        self.began.append(item)
        self.entered.release()
        assert self.go.wait(PATIENCE_S)
        return item

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_S)


def test_items_come_out_in_order_and_the_descriptor_says_when():
    worker = Worker("w", lambda item: item * 2, inbox_limit=8).start()
    assert not readable(worker)
    for item in range(5):
        worker.put(item)
    assert polled(worker, 5) == [0, 2, 4, 6, 8]
    assert not readable(worker)
    assert worker.poll() == []
    assert worker.close(Deadline.after(PATIENCE_S)).clean


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_an_item_raises_the_thread_lives(error: BaseException):
    def work(item: BaseException | None) -> str:
        if item is not None:
            raise item
        return "ok"

    worker = Worker("w", work, inbox_limit=4).start()
    worker.put(error)
    worker.put(None)  # any value is an item
    failed, result = polled(worker, 2)
    assert isinstance(failed, Failed)
    assert (failed.item, failed.error) == (error, error)
    assert result == "ok"
    assert worker.close(Deadline.after(PATIENCE_S)).clean


def test_a_full_inbox_refuses_at_once_and_what_has_begun_does_not_count():
    gate = Gate()
    worker = Worker("w", gate, inbox_limit=2).start()
    worker.put("running")
    gate.wait_entered()
    worker.put("a")
    worker.put_first("b")
    assert worker.queued == 2
    for put in (worker.put, worker.put_first):
        with pytest.raises(Refused, match="2 items"):
            put("c")
    gate.go.set()
    assert polled(worker, 3) == ["running", "b", "a"]
    assert worker.close(Deadline.after(PATIENCE_S)).clean


def test_taking_back_gets_only_what_has_not_begun():
    gate = Gate()
    worker = Worker("w", gate, inbox_limit=8).start()
    for item in range(6):
        worker.put(item)
    gate.wait_entered()
    assert worker.take_back(lambda item: item % 2 == 0) == [2, 4]
    assert worker.queued == 3
    gate.go.set()
    assert polled(worker, 4) == [0, 1, 3, 5]
    assert worker.close(Deadline.after(PATIENCE_S)).clean


def test_several_threads_work_side_by_side():
    together = threading.Barrier(3)
    worker = Worker("w", lambda item: together.wait(PATIENCE_S), inbox_limit=3, threads=3).start()
    for item in range(3):
        worker.put(item)
    assert sorted(polled(worker, 3)) == [0, 1, 2]
    assert worker.close(Deadline.after(PATIENCE_S)).clean


def test_after_ask_stop_nothing_is_accepted_and_nothing_queued_begins():
    gate = Gate()
    worker = Worker("w", gate, inbox_limit=8).start()
    for item in range(3):
        worker.put(item)
    gate.wait_entered()
    worker.ask_stop()
    for put in (worker.put, worker.put_first):
        with pytest.raises(Refused, match="closing"):
            put(3)
    gate.go.set()
    assert worker.close(Deadline.after(PATIENCE_S)).clean
    assert gate.began == [0]
    assert worker.poll() == [0]
    assert worker.take_back(lambda item: True) == [1, 2]


def test_a_queue_that_is_not_dropped_is_worked_off_by_the_close():
    gate = Gate()
    worker = Worker("w", gate, inbox_limit=8).start()
    for item in range(3):
        worker.put(item)
    gate.wait_entered()
    worker.ask_stop(drop_queued=False)
    gate.go.set()
    assert worker.close(Deadline.after(PATIENCE_S)).clean
    assert worker.poll() == [0, 1, 2]


@pytest.mark.parametrize("drop_queued", [True, False])
def test_a_wedged_worker_ends_its_close_at_the_deadline_and_begins_nothing_after(*, drop_queued: bool):
    gate = Gate()
    worker = Worker("w", gate, inbox_limit=8, threads=2).start()
    for item in range(4):
        worker.put(item)
    gate.wait_entered()
    gate.wait_entered()
    worker.ask_stop(drop_queued=drop_queued)
    began = time.monotonic()
    report = worker.close(Deadline.after(0.1))
    assert time.monotonic() - began < 1.0
    assert (report.ended, report.memory) == (Outcome.RUNNING, Memory.KEPT)
    assert "2 of 2" in report.cause
    gate.go.set()
    again = worker.close(Deadline.after(PATIENCE_S))
    assert again.clean
    assert sorted(gate.began) == [0, 1]
    assert sorted(worker.poll()) == [0, 1]
    assert worker.take_back(lambda item: True) == [2, 3]
    assert worker.close(Deadline.after(0)).clean
    with pytest.raises(Closed):
        worker.fileno()


def test_an_idle_thread_holds_no_reference_to_its_last_item():
    class Row:
        pass

    worker = Worker("w", lambda row: row, inbox_limit=2).start()
    row = Row()
    alive = weakref.ref(row)
    worker.put(row)
    del row
    assert len(polled(worker, 1)) == 1
    deadline = Deadline.after(PATIENCE_S)
    while alive() is not None and not deadline.expired:
        time.sleep(0.001)
    assert alive() is None
    assert worker.close(Deadline.after(PATIENCE_S)).clean


def test_a_worker_that_was_never_started_closes_clean():
    worker = Worker("w", str, inbox_limit=1)
    worker.put(1)
    with pytest.raises(Closed):
        worker.fileno()
    assert worker.close(Deadline.after(0)).clean
    assert worker.take_back(lambda item: True) == [1]


def test_a_start_without_a_thread_left_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    starts = iter([None, RuntimeError("can't start new thread")])
    start = threading.Thread.start

    def fails_second(thread: threading.Thread) -> None:
        if (error := next(starts)) is not None:
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_second)
    with pytest.raises(RuntimeError):
        Worker("w", str, inbox_limit=1, threads=2).start()
    starts = iter([RuntimeError("can't start new thread")])
    with pytest.raises(RuntimeError):
        Loop("l", lambda stop: None).start()


def test_a_loop_sees_the_stop_in_its_poll():
    seen: list[bool] = []
    looked = threading.Event()

    def run(stop: Stop) -> None:
        seen.append(stop.asked)
        looked.set()
        assert select.select([stop], [], [], PATIENCE_S)[0]
        seen.append(stop.asked)

    loop = Loop("l", run).start()
    assert looked.wait(PATIENCE_S)
    assert loop.alive
    report = loop.close(Deadline.after(PATIENCE_S))
    assert report.clean
    assert seen == [False, True]
    assert not loop.alive
    assert loop.close(Deadline.after(0)).clean


def test_a_loop_that_raised_says_so_at_its_close():
    error = ValueError("lost the thread")

    def run(stop: Stop) -> None:
        raise error

    loop = Loop("l", run).start()
    report = loop.close(Deadline.after(PATIENCE_S))
    assert (report.ended, report.memory, report.error) == (Outcome.FAILED, Memory.FREED, error)


def test_a_wedged_loop_ends_its_close_at_the_deadline():
    go = threading.Event()
    loop = Loop("l", lambda stop: go.wait(PATIENCE_S) and None).start()
    began = time.monotonic()
    report = loop.close(Deadline.after(0.05))
    assert time.monotonic() - began < 1.0
    assert (report.ended, report.memory) == (Outcome.RUNNING, Memory.KEPT)
    go.set()
    assert loop.close(Deadline.after(PATIENCE_S)).clean


def test_a_thread_that_closes_its_own_loop_does_not_wait_for_itself():
    """As the collector may do, when the thread drops the last reference to the loop's owner."""
    seen: list[Outcome] = []
    loops: list[Loop] = []
    begin = threading.Event()

    def run(stop: Stop) -> None:
        assert begin.wait(PATIENCE_S)
        seen.append(loops[0].close(Deadline.after(PATIENCE_S)).ended)

    loops.append(Loop("l", run).start())
    begin.set()
    assert loops[0].close(Deadline.after(PATIENCE_S)).clean
    assert seen == [Outcome.RUNNING]


def test_a_flag_is_readable_exactly_while_it_is_set():
    flag = Flag()
    assert not readable(flag)
    flag.set()
    flag.set()
    assert readable(flag)
    flag.clear()
    assert not readable(flag)
    flag.clear()
    flag.close()
    flag.close()
    flag.set()
    flag.clear()

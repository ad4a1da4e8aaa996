"""Child processes: bounded messages, an end at end of file, death confirmed, and nothing left after kill -9."""

from __future__ import annotations

import ast
import os
import select
import signal
import site
import socket
import sys
import time
from pathlib import Path

import pytest

import kvtier.runtime.process as process_module
from kvtier.errors import Closed, ConfigError, CoreBug, Refused, TierBroken
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.process import MESSAGE_BYTES_MAX, RECEIVE_MESSAGES_MAX, Channel, Pause, Process
from kvtier.runtime.report import Memory, Outcome
from kvtier.runtime.scope import Scope

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _child_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def start(*args: str, **fds: int) -> Process:
    return Process.start("child", "runtime_child", args=args, fds=fds)


def one_message(channel: Channel) -> bytes:
    assert select.select([channel], [], [], PATIENCE_S)[0], "nothing came"
    messages = channel.receive()
    assert len(messages) == 1
    return messages[0]


def wait_for(condition, what: str) -> None:
    deadline = Deadline.after(PATIENCE_S)
    while not condition():
        assert not deadline.expired, what
        time.sleep(0.002)


# --- the channel


def test_messages_arrive_whole_and_in_order_up_to_the_limit():
    one, other = Channel.pair()
    sent = [b"a", bytes(range(256)) * 100, os.urandom(MESSAGE_BYTES_MAX)]
    for data in sent:
        one.send(data)
    assert select.select([other], [], [], 0)[0]
    assert other.receive() == sent
    assert other.receive() == []
    assert not select.select([other], [], [], 0)[0]
    one.close()
    other.close()


@pytest.mark.parametrize("size", [0, MESSAGE_BYTES_MAX + 1])
def test_a_message_outside_the_limits_is_a_bug_and_is_not_sent(size: int):
    one, other = Channel.pair()
    with pytest.raises(CoreBug, match=str(MESSAGE_BYTES_MAX)):
        one.send(bytes(size))
    assert other.receive() == []
    one.close()
    other.close()


def test_a_full_channel_refuses_at_once_and_loses_nothing():
    one, other = Channel.pair()
    sent = 0

    def fill() -> None:
        nonlocal sent
        for number in range(10_000):
            one.send(number.to_bytes(4, "big") * 1000)
            sent += 1

    with pytest.raises(Refused, match="full"):
        fill()
    got: list[bytes] = []
    while messages := other.receive():
        assert len(messages) <= RECEIVE_MESSAGES_MAX
        got += messages
    assert [int.from_bytes(data[:4], "big") for data in got] == list(range(sent))
    one.send(b"room again")
    assert other.receive() == [b"room again"]
    one.close()
    other.close()


def test_what_was_sent_before_an_end_still_arrives():
    one, other = Channel.pair()
    one.send(b"last words")
    one.end()
    one.end()
    assert other.receive() == [b"last words"]
    assert other.receive() == []
    assert other.closed_by_peer
    other.send(b"still heard")
    assert one.receive() == [b"still heard"]
    with pytest.raises(TierBroken):
        one.send(b"after the end")
    one.close()
    other.close()


def test_an_end_that_goes_with_unread_messages_does_not_cost_us_its_own():
    one, other = Channel.pair()
    one.send(b"never read")
    other.send(b"last words")
    other.close()
    assert one.receive() == [b"last words"]
    assert one.closed_by_peer
    with pytest.raises(TierBroken, match="gone"):
        one.send(b"anyone?")
    one.close()


def test_a_closed_channel_says_so_and_keeps_what_it_had_taken_in():
    one, other = Channel.pair()
    one.send(b"a")
    assert other.take_in(10)
    other.close()
    other.close()
    assert other.receive() == [b"a"]
    assert other.receive() == []
    with pytest.raises(Closed):
        other.send(b"b")
    with pytest.raises(Closed):
        other.fileno()
    one.close()


def test_an_end_that_breaks_the_limit_is_cut_off():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES_MAX)
    channel = Channel(ours)
    theirs.send(b"fine")
    theirs.send(bytes(MESSAGE_BYTES_MAX + 1))
    theirs.send(b"not believed any more")
    assert channel.receive() == [b"fine"]
    assert channel.closed_by_peer
    channel.close()
    theirs.close()


def test_too_small_a_kernel_buffer_is_named_with_the_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_module, "SEND_BUFFER_BYTES", 4096)
    with pytest.raises(ConfigError, match=r"net\.core\.wmem_max"):
        Channel.pair()


# --- the pause


def test_the_pause_grows_to_its_limit_and_falls_back_after_a_steady_time():
    pause = Pause()
    assert [pause.next(0.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    pause.up(100.0)
    assert pause.next(159.9) == 60
    pause.up(200.0)
    assert pause.next(260.0) == 0.5
    assert pause.next(1000.0) == 1  # it never came up in between


# --- the process


@pytest.mark.processes
def test_a_child_answers_and_ends_by_itself_at_the_end_of_its_channel():
    with Scope("s") as scope:
        child = scope.own("child", start("echo"))
        child.channel.send(b"hello")
        assert one_message(child.channel) == b"hello"
        assert child.alive
        assert not select.select([child.pidfd], [], [], 0)[0]
        report = scope.close(Deadline.after(PATIENCE_S))
        assert report.clean
        assert child.channel.receive() == [b"bye"]
        assert child.close(Deadline.after(0)) is report.children[0]
    with pytest.raises(Closed):
        _ = child.pidfd
    child.kill()  # nothing to do: must not hit another process


@pytest.mark.processes
def test_a_child_gets_its_descriptors_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / "handed"
    path.write_text("some text")
    with path.open() as file, (tmp_path / "not handed").open("w") as other:
        os.set_inheritable(other.fileno(), True)  # noqa: FBT003
        child = start("tells", file=file.fileno())
        text, names, stdin, first_path, leads = ast.literal_eval(one_message(child.channel).decode())
    assert child.close(Deadline.after(PATIENCE_S)).clean
    assert text == "some text"
    assert str(path) in names
    assert not any("not handed" in name for name in names)
    assert stdin == ""
    assert first_path != os.getcwd()
    assert leads  # a process group of its own: Ctrl-C is for the parent
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "to standard output\n" in captured.err


@pytest.mark.processes
def test_a_child_that_ignores_the_end_of_file_is_killed_at_its_part_of_the_deadline():
    child = start("wedge")
    assert one_message(child.channel) == b"up"
    began = time.monotonic()
    report = child.close(Deadline.after(0.5))
    took = time.monotonic() - began
    assert (report.ended, report.memory) == (Outcome.KILLED, Memory.FREED)
    assert 0.3 <= took < 1.0
    assert not Path(f"/proc/{child.pid}").exists()
    assert child.close(Deadline.after(0)) is report


@pytest.mark.processes
def test_a_close_whose_deadline_has_passed_still_confirms_the_death():
    child = start("wedge")
    assert one_message(child.channel) == b"up"
    report = child.close(Deadline.after(0))
    assert (report.ended, report.memory) == (Outcome.KILLED, Memory.FREED)
    assert report.seconds < 1.0


@pytest.mark.processes
def test_a_death_that_cannot_be_confirmed_keeps_the_memory(monkeypatch: pytest.MonkeyPatch):
    child = start("wedge")
    assert one_message(child.channel) == b"up"
    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", lambda *_: None)  # as if it hung in the kernel
        report = child.close(Deadline.after(0.1))
    assert (report.ended, report.memory) == (Outcome.RUNNING, Memory.KEPT)
    assert child.alive
    again = child.close(Deadline.after(1))
    assert (again.ended, again.memory) == (Outcome.KILLED, Memory.FREED)


@pytest.mark.processes
def test_wedged_children_side_by_side_are_killed_together():
    scope = Scope("s")
    children = [scope.own(f"c{i}", start("wedge")) for i in range(3)]
    for child in children:
        assert one_message(child.channel) == b"up"
    began = time.monotonic()
    report = scope.close(Deadline.after(2.0))
    assert 1.2 <= time.monotonic() - began < 3.0
    assert all(node.seconds < 1.0 for node in report.children[1:])
    assert [node.ended for node in report.children] == [Outcome.KILLED] * 3
    assert not report.memory_kept


@pytest.mark.processes
def test_a_child_killed_from_outside_is_seen_at_once_and_said_in_the_report():
    child = start("wedge")
    assert one_message(child.channel) == b"up"
    os.kill(child.pid, signal.SIGKILL)
    assert select.select([child.pidfd], [], [], PATIENCE_S)[0]
    assert child.wait(Deadline.after(PATIENCE_S))
    assert not child.alive
    assert child.channel.receive() == []
    assert child.channel.closed_by_peer
    with pytest.raises(TierBroken):
        child.channel.send(b"anyone?")
    report = child.close(Deadline.after(PATIENCE_S))
    assert (report.ended, report.memory) == (Outcome.FAILED, Memory.FREED)
    assert "signal 9" in report.cause


@pytest.mark.processes
@pytest.mark.parametrize(("args", "words"), [(("exits", "3"), "exit code 3"), (("segfault",), "signal 11")])
def test_a_child_that_ends_by_itself_says_how(args: tuple[str, ...], words: str):
    child = start(*args)
    assert child.wait(Deadline.after(PATIENCE_S))
    report = child.close(Deadline.after(0))
    assert report.ended is Outcome.FAILED
    assert words in report.cause
    with pytest.raises(ExceptionGroup):
        report.raise_if_failed()


@pytest.mark.processes
def test_a_child_that_owes_more_than_the_socket_holds_can_still_end():
    child = start("flood")
    assert one_message(child.channel) == b"up"
    report = child.close(Deadline.after(PATIENCE_S))
    assert report.clean
    got: list[bytes] = []
    while messages := child.channel.receive():
        got += messages
    assert got == [number.to_bytes(4, "big") * 20_000 for number in range(300)]


@pytest.mark.processes
def test_a_parent_killed_takes_its_child_with_it():
    parent = start("parent")
    grandchild = int(one_message(parent.channel))
    assert Path(f"/proc/{grandchild}").exists()
    parent.kill()
    assert parent.wait(Deadline.after(PATIENCE_S))

    def gone() -> bool:
        try:
            return ") Z " in Path(f"/proc/{grandchild}/stat").read_text()
        except FileNotFoundError:
            return True

    wait_for(gone, "the child outlived its parent")
    assert parent.close(Deadline.after(0)).ended is Outcome.KILLED


@pytest.mark.processes
def test_a_child_whose_parent_is_gone_before_it_came_up_ends_at_once():
    code = "from kvtier.runtime.process import die_with_parent; die_with_parent(1); print('lived')"
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", code], dict(os.environ))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.processes
def test_a_module_that_does_not_exist_is_a_child_that_ends():
    child = Process.start("child", "no_such_module_here")
    assert child.wait(Deadline.after(PATIENCE_S))
    assert child.close(Deadline.after(0)).ended is Outcome.FAILED


def test_a_system_that_starts_nothing_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(TierBroken, match="cannot start"):
        start("echo")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ConfigError, match="embedded"):
        start("echo")


@pytest.mark.processes
def test_a_start_without_a_descriptor_left_leaves_no_child(monkeypatch: pytest.MonkeyPatch):
    def fails(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fails)
    with pytest.raises(TierBroken, match="Too many open files"):
        start("echo")


def test_a_child_finds_the_same_kvtier_however_ours_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(process_module, "__file__", str(tmp_path / "kvtier" / "runtime" / "process.py"))
    assert process_module._environment()["PYTHONPATH"] == f"{tmp_path}:{Path(__file__).parent}"
    monkeypatch.delenv("PYTHONPATH")
    assert process_module._environment()["PYTHONPATH"] == str(tmp_path)
    installed = tmp_path / "link"
    installed.symlink_to(site.getsitepackages()[0])
    monkeypatch.setattr(process_module, "__file__", str(installed / "kvtier" / "runtime" / "process.py"))
    assert "PYTHONPATH" not in process_module._environment()  # it would come before the standard library

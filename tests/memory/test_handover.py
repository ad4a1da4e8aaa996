"""Handing the region over: in any order of start, to everyone expected, to nobody else; nothing stays."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, TierBroken
from kvtier.memory import handover
from kvtier.memory.handover import HandoverServer, RankLink, RankPipe, check_peer, handover_name, receive
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline

MIB = 1 << 20
NAME = handover_name(f"test-{os.getpid()}", "kvtier")
FIVE = 5.0


def pattern(size: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)


class Served:
    """A region with a server, as rank 0 has it."""

    def __init__(self, expected: int, table: bytes = b"table", name: str = NAME) -> None:
        self.region = Region.create(MIB)
        self.region.array[:] = pattern(MIB)
        self.pipe = RankPipe(self.region)
        self.server = HandoverServer(name, self.region, table, expected, pipe=self.pipe)
        self.server.start()

    def close(self) -> None:
        for part in (self.server, self.region, self.pipe):
            assert part.close(Deadline.after(FIVE)).clean


def until(condition, what: str) -> None:
    end = time.monotonic() + FIVE
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.005)


def listening() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if NAME[1:] in line and line.split()[3] == "00010000"]


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(expected=1)
    yield served
    served.close()


def attach(name: str = NAME) -> tuple[Region, RankLink, bytes]:
    got = receive(name, Deadline.after(FIVE))
    return Region.attach(got.fd, got.size_bytes), RankLink(got.connection, got.pid), got.table


def test_a_receiver_maps_the_same_memory(served: Served) -> None:
    theirs, link, table = attach()
    assert table == b"table"
    assert os.fstat(theirs.fd).st_ino == os.fstat(served.region.fd).st_ino
    assert not os.get_inheritable(theirs.fd)
    assert (theirs.array == pattern(MIB)).all()
    assert theirs.close(Deadline.after(1)).clean
    link.close(Deadline.after(1))


def test_the_socket_closes_when_all_expected_have_it_and_a_late_joiner_is_told() -> None:
    served = Served(expected=2)
    first, first_link, _ = attach()
    assert listening()
    second, second_link, _ = attach()
    until(lambda: served.server.done and not listening(), "the listener closes")
    with pytest.raises(TierBroken, match="all it expected have it already"):
        receive(NAME, Deadline.after(0.1))
    for part in (first, first_link, second, second_link):
        part.close(Deadline.after(1))
    served.close()


def test_a_receiver_may_come_before_the_server() -> None:
    got: list[tuple[Region, RankLink, bytes]] = []
    early = threading.Thread(target=lambda: got.append(attach()))
    early.start()
    time.sleep(3 * handover.RETRY_SECONDS)  # it has tried in vain at least once
    served = Served(expected=1)
    early.join(FIVE)
    (region, link, _) = got[0]
    assert (region.array == pattern(MIB)).all()
    region.close(Deadline.after(1))
    link.close(Deadline.after(1))
    served.close()


def test_nobody_there_is_an_error_at_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(TierBroken, match="no region from"):
        receive(handover_name("nobody", "kvtier"), Deadline.after(0.2))
    assert 0.2 <= time.monotonic() - began < 2


def test_engines_names_ranks_and_users_never_meet() -> None:
    fields = [(e, n, r, u) for e in ("a", "ab", "") for n in ("k", "bk", "") for r in (0, 1) for u in (0, 1000)]
    names = {handover_name(e, n, rank=r, uid=u) for e, n, r, u in fields}
    assert len(names) == len(fields)
    assert all(name.startswith("\0kvtier-") and len(name.encode()) < 108 for name in names)


def test_two_servers_of_one_name_are_refused(served: Served) -> None:
    other = HandoverServer(NAME, served.region, b"", 1, pipe=served.pipe)
    with pytest.raises(ConfigError, match="need different names"):
        other.start()
    assert other.close(Deadline.after(1)).clean


def test_a_table_over_the_limit_is_refused(served: Served) -> None:
    with pytest.raises(ConfigError, match="65536 are the limit"):
        HandoverServer(NAME, served.region, bytes(70_000), 1, pipe=served.pipe)


def test_a_table_just_below_the_limit_arrives_whole() -> None:
    table = pattern(65_000).tobytes()
    served = Served(expected=1, table=table)
    region, link, got = attach()
    assert got == table
    region.close(Deadline.after(1))
    link.close(Deadline.after(1))
    served.close()


def test_another_user_is_told_apart() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert check_peer(ours, os.getuid()) == os.getpid()
        with pytest.raises(TierBroken, match=f"user {os.getuid()} is at the other end"):
            check_peer(ours, os.getuid() + 1)


def test_a_server_of_another_user_is_not_listened_to(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_user(connection: socket.socket, uid: int) -> int:
        raise TierBroken("another user")

    monkeypatch.setattr(handover, "check_peer", another_user)
    with pytest.raises(TierBroken, match="another user"):
        receive(NAME, Deadline.after(FIVE))
    assert served.server.handed == 0


def test_who_takes_the_region_but_never_acknowledges_does_not_count(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "ANSWER_SECONDS", 0.05)
    mute = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wrong = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mute, wrong:
        mute.connect(NAME)
        wrong.connect(NAME)
        wrong.send(b"\x80\x04not msgpack, and not ours")
        for peer in (mute, wrong):
            peer.settimeout(FIVE)
            while peer.recv(1 << 16):  # ends when the server has hung up
                pass
    assert served.server.handed == 0
    region, link, _ = attach()
    until(lambda: served.server.done, "the true receiver counts")
    region.close(Deadline.after(1))
    link.close(Deadline.after(1))


@pytest.mark.parametrize("message", [b"", b"\x80\x04.", b"x" * 100])
def test_nonsense_from_the_server_is_an_error_and_leaks_nothing(message: bytes) -> None:
    name = handover_name(f"nonsense-{os.getpid()}", "kvtier")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen(4)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                if message:
                    socket.send_fds(connection, [message], [0, 1])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TierBroken):
            receive(name, Deadline.after(0.2))
        thread.join(FIVE)


def test_a_rank_that_closed_its_region_says_so() -> None:
    served = Served(expected=1)
    region, link, _ = attach()
    until(lambda: served.server.done, "acknowledged")
    assert not link.closed
    assert served.server.close(Deadline.after(FIVE)).clean
    view = served.region.array[:5]
    served.region.close(Deadline.after(1))
    report = served.pipe.close(Deadline.after(1))
    assert "still mapped" in report.cause
    assert report.memory_kept  # so that a second close of its owner tries it again
    assert not link.closed  # kept memory: a silent, living rank
    del view
    served.close()
    assert link.closed
    assert region.close(Deadline.after(1)).clean
    assert link.close(Deadline.after(1)).cause == ""


def test_hanging_up_without_a_word_frees_nothing_while_the_process_lives() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = RankLink(ours, os.getpid())
    theirs.close()
    assert not link.closed
    assert not link.dead
    assert "has not closed yet" in link.close(Deadline.after(1)).cause
    assert not link.closed


RANK = """
import os, sys, time
from kvtier.memory.handover import HandoverServer, RankLink, RankPipe, receive
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
role, name, kvtier_marker = sys.argv[1:]
name = chr(0) + name
if role == "rank0":
    region = Region.create(64 << 20)
    region.array[:] = 0xA5
    pipe = RankPipe(region)
    server = HandoverServer(name, region, b"t", 3, pipe=pipe)
    server.start()
else:
    got = receive(name, Deadline.after(20))
    region = Region.attach(got.fd, got.size_bytes)
    link = RankLink(got.connection, got.pid)
    assert (region.array == 0xA5).all()
print("ready", flush=True)
if sys.stdin.readline() == "close\\n":
    server.close(Deadline.after(5)), region.close(Deadline.after(5)), pipe.close(Deadline.after(5))
    print("closed", flush=True)
    sys.stdin.readline()
"""


def start(role: str) -> subprocess.Popen[str]:
    args = [sys.executable, "-c", RANK, role, NAME[1:], "kvtier-test-marker"]
    return subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def reap(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def shm_names() -> set[str]:
    """Without those of vLLM and of Python's semaphores, which other processes of this machine may make now."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("psm_", "sem.mp-"))}


def holders(memfd: os.stat_result) -> set[int]:
    """Processes that map the memfd, or have it open: when there are none, the kernel has its memory back."""
    found = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # gone meanwhile
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            mapped = any("/memfd:kvtier" in line and line.split()[4] == str(memfd.st_ino) for line in lines)
            opened = any(
                os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), memfd) for fd in os.listdir(f"/proc/{pid}/fd")
            )
            if mapped or opened:
                found.add(pid)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("order", [["rank0", "rank1", "rank2"], ["rank2", "rank1", "rank0"]])
def test_killed_processes_leave_no_memory_no_name_and_no_socket(order: list[str]) -> None:
    names = shm_names()
    processes = [start(role) for role in order]
    try:
        region, link, _ = attach()
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert shm_names() == names
        memfd = os.fstat(region.fd)
        assert holders(memfd) == {os.getpid()} | {process.pid for process in processes}
        for process in processes:
            process.send_signal(signal.SIGKILL)
        until(lambda: link.closed, "the death of rank 0 is seen")
        assert link.dead
        assert (region.array == 0xA5).all()
        assert region.close(Deadline.after(1)).clean
        assert link.close(Deadline.after(1)).clean
    finally:
        reap(processes)
    assert holders(memfd) == set()
    assert shm_names() == names
    assert not listening()


@pytest.mark.processes
def test_a_rank_that_closes_and_lives_on_is_told_from_one_that_died() -> None:
    rank, others = start("rank0"), [start("rank1"), start("rank2")]
    try:
        region, link, _ = attach()
        for process in [rank, *others]:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert not link.closed
        assert rank.stdin is not None
        rank.stdin.write("close\n")
        rank.stdin.flush()
        until(lambda: link.closed, "the rank said closed")
        assert not link.dead
        assert rank.poll() is None
        region.close(Deadline.after(1))
        link.close(Deadline.after(1))
    finally:
        reap([rank, *others])

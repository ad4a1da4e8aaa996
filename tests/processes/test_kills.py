"""kill -9 at random moments: nothing of ours is left, and the next start is warm and right."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_bench import eventually, gone
from library_child import BLOCKS

from kvtier.runtime.deadline import Deadline
from kvtier.testing import leaks

pytestmark = pytest.mark.processes

LINE_S = 60.0
"""for the next line of a child on a busy machine"""


class Child:
    def __init__(self, path: Path, settled: int) -> None:
        script = Path(__file__).with_name("library_child.py")
        self.popen = subprocess.Popen(
            [sys.executable, str(script), str(path), str(settled)], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.popen.stdout is not None
        os.set_blocking(self.popen.stdout.fileno(), False)
        self._text = b""
        self.lines: list[list[str]] = []

    def next(self, word: str) -> int:
        """The number of the next line that begins with `word`."""
        deadline = Deadline.after(LINE_S)
        while True:
            while self.lines:
                line = self.lines.pop(0)
                assert line[0] != "WRONG", line
                if line[0] == word:
                    return int(line[1])
            assert not deadline.expired, f"no line {word!r}"
            self._read(deadline)

    def _read(self, deadline: Deadline) -> None:
        assert self.popen.stdout is not None
        if not select.select([self.popen.stdout], [], [], deadline.left)[0]:
            return
        data = self.popen.stdout.read()
        assert data, f"the child ended ({self.popen.wait(10)})"
        *lines, self._text = (self._text + data).split(b"\n")
        self.lines += [line.decode().split() for line in lines]

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(10)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


def memfds(pid: int) -> list[str]:
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [name for name in found if "memfd:kvtier" in name]


def test_kill_9_at_ten_random_moments(tmp_path: Path) -> None:
    chance = random.Random(20)
    before = leaks.take()
    settled = 0
    for victim in chance.sample(["tier", "main", "both"] * 3 + ["tier"], 10):
        child = Child(tmp_path, settled)
        tier = child.next("tier")
        try:
            assert child.next("warm") == settled * BLOCKS
            settled = child.next("settled")
            for _ in range(chance.randrange(4)):
                child.next("round")
            assert memfds(child.popen.pid)
            assert memfds(tier)
            time.sleep(chance.uniform(0, 0.03))  # the moment itself is what is random
            if victim == "tier":
                os.kill(tier, signal.SIGKILL)
                tier = child.next("tier")  # it comes back by itself, and meanwhile the rounds go on
                child.next("round")
                time.sleep(chance.uniform(0, 0.03))
            elif victim == "both":
                os.kill(tier, signal.SIGKILL)
        finally:
            child.kill()
        assert eventually(lambda pid=tier: gone(pid)), "a tier process has outlived its engine"
    left = [each for each in leaks.find_leaks(before, grace_s=2.0) if "/dev/shm" in each or "socket" in each]
    assert left == []
    child = Child(tmp_path, settled)
    tier = child.next("tier")
    assert child.next("warm") == settled * BLOCKS
    child.kill()
    assert eventually(lambda: gone(tier))


def test_rounds_go_on_while_the_tier_process_is_dead(tmp_path: Path) -> None:
    child = Child(tmp_path, 0)
    try:
        tier = child.next("tier")
        child.next("round")
        os.kill(tier, signal.SIGKILL)
        for _ in range(3):
            child.next("round")
        second = child.next("tier")
        assert second != tier
        assert gone(tier)
        child.next("round")
    finally:
        child.kill()
    assert eventually(lambda: gone(second))

"""The disk tier when its process is killed while it writes: what is found afterwards is right, or a miss."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.config import Size
from kvtier.errors import ConfigError
from kvtier.runtime.deadline import Deadline
from kvtier.testing.disk_tools import used_bytes
from kvtier.testing.tier_suite import Driver, Region, keys_of
from kvtier.tiers.base import Cause
from kvtier.tiers.disk import DiskConfig, open_disk

pytestmark = pytest.mark.processes

ROW = 256 << 10
SIZE = 24 << 20

WRITER = f"""
import sys
from kvtier.config import Size
from kvtier.testing.tier_suite import Driver, Region, keys_of
from kvtier.tiers.disk import DiskConfig, open_disk
region = Region([{ROW}], 16)
tier = open_disk(DiskConfig(path=sys.argv[1], size=Size({SIZE}), direct=sys.argv[2]), region.rows, b"suite")
driver = Driver(tier, region)
for start in range(int(sys.argv[3]), 1 << 30, 8):
    driver.store(keys_of(range(start, start + 8)))
    print(start + 8, flush=True)
"""


def start_writer(path: Path, direct: str, first: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(path), direct, str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def stored_by(writer: subprocess.Popen[bytes], at_least: int) -> int:
    """Wait until the writer has stored more than `at_least` blocks' numbers; the last number it told."""
    assert writer.stdout is not None
    deadline, text = Deadline.after(60), b""
    while not text.endswith(b"\n") or int(text.split()[-1]) < at_least:
        assert select.select([writer.stdout], [], [], deadline.left)[0], "the writer is stuck"
        more = os.read(writer.stdout.fileno(), 4096)
        assert more, "the writer died by itself"
        text += more
    return int(text.split()[-1])


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_every_block_found_after_a_kill_in_the_middle_of_writes_is_right(tmp_path: Path, direct: str) -> None:
    path, last, loaded = tmp_path / "tier", 0, 0
    moments = np.random.default_rng(11)
    for _ in range(4):
        writer = start_writer(path, direct, last)
        try:
            last = stored_by(writer, last + int(moments.integers(8, 200)))
            select.select([], [], [], float(moments.uniform(0, 0.02)))  # anywhere in a write
        finally:
            writer.kill()
            writer.communicate()
        last += 64  # what it may have begun
        assert used_bytes(path / "engine-0") <= SIZE
        region = Region([ROW], 16)
        config = DiskConfig(path=str(path), size=Size(SIZE), direct="off")
        driver = Driver(open_disk(config, region.rows, b"suite"), region)
        for start in range(0, last, 16):
            keys = keys_of(range(start, start + 16))
            held = driver.ask(keys)
            if any(held):
                causes = driver.load(keys)  # compares every byte of what it calls ok
                loaded += causes.count(Cause.OK)
                assert all(cause is Cause.ABSENT for known, cause in zip(held, causes, strict=True) if not known)
                # A kill leaves at most the few slots that were being written with other bytes than their record says.
        counts = driver.tier.counts()
        assert counts["checksum_count"] + counts["foreign_count"] + counts["short_count"] <= 4
        assert driver.close().clean
        region.close()
    assert loaded > 4 * 40, "most of what was stored must be found again"


def test_a_second_process_is_told_the_pid_of_the_first_and_gets_the_directory_after_its_death(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    writer = start_writer(path, "off", 0)
    region = Region([ROW], 16)
    config = DiskConfig(path=str(path), size=Size(SIZE), direct="off")
    try:
        stored_by(writer, 8)
        with pytest.raises(ConfigError, match=f"pid {writer.pid}"):
            open_disk(config, region.rows, b"suite")
        writer.send_signal(signal.SIGKILL)
        driver = Driver(open_disk(config, region.rows, b"suite"), region)
        assert driver.close().clean
    finally:
        writer.kill()
        writer.communicate()
        region.close()

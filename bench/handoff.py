"""What a tier process costs beside its I/O: `python bench/handoff.py [--json]`.

* a batch of 16 blocks handed to a tier process and its end notice back, with a tier that moves nothing; beside it the
  same number of bytes there and back between two processes that do nothing else: what the kernel alone takes;
* one pump of the store with nothing new;
* the start of a tier process until it is ready, beside an interpreter that imports numpy; and its close.

Budget: a batch and back <= 100 us. Figures of a busy machine say more about the machine: look at the floor's.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvtier.config import TierConfig
from kvtier.core import effects as fx
from kvtier.core.groups import CoreConfig, Group, TierSpec
from kvtier.core.ids import AskId, Key, TierName, TransferId
from kvtier.core.store import StoreCore
from kvtier.engine.driver import Driver
from kvtier.engine.messages import Submit, encode
from kvtier.engine.process_tier import ProcessTier
from kvtier.engine.tier_port import PortState, TierPort
from kvtier.memory.layout import Rows, plan_layout
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.runtime.worker import Flag
from kvtier.tiers.base import Cause, Direction, Ended, Held, Tier, TierNotice, TierTransfer
from kvtier.tiers.registry import TierType

BLOCKS = 16
ROUNDS = 3000
STARTS = 5
BUDGET_US = 100.0

KEYS = [Key(bytes([i]) * 34) for i in range(BLOCKS)]
SLOTS = list(range(BLOCKS))
NOTHING = TierConfig(type="handoff:TIER_TYPE", name="nothing")


class NoOptions(msgspec.Struct, frozen=True):
    pass


class Nothing(Tier):
    """Ends every transfer at once."""

    def __init__(self, rows: Rows, name: str) -> None:
        self.name = TierName(name)
        self._rows = rows
        self._flag = Flag()
        self._notices: list[TierNotice] = []

    def ask(self, ask: AskId, keys: Sequence[Key]) -> None:
        self._notices.append(Held(ask, [False] * len(keys)))
        self._flag.set()

    def submit(self, transfer: TierTransfer) -> None:
        self._notices.append(Ended(transfer.id, [Cause.OK] * len(transfer.keys)))
        self._flag.set()

    def cancel(self, transfer: TransferId) -> None:
        pass

    def poll(self) -> list[TierNotice]:
        notices, self._notices = self._notices, []
        self._flag.clear()
        return notices

    def fileno(self) -> int:
        return self._flag.fileno()

    def counts(self) -> dict[str, int]:
        return {}

    def ask_stop(self) -> None:
        pass

    def close(self, deadline: Deadline) -> CloseReport:
        self._flag.close()
        return CloseReport(self.name)


TIER_TYPE = TierType(NoOptions, lambda _options, rows, _namespace, name: Nothing(rows, name))


def timed(act: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each call, sorted."""
    spent = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        spent.append(time.perf_counter() - began)
    return sorted(spent)


def wait_readable(fd: int) -> None:
    select.select([fd], [], [], 10)


def floor_us(size: int) -> list[float]:
    """The same bytes there and a short answer back, between two bare processes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        while data := theirs.recv(1 << 16):
            theirs.send(data[:64])
        os._exit(0)
    theirs.close()
    message = bytes(size)

    def there_and_back() -> None:
        ours.send(message)
        wait_readable(ours.fileno())
        ours.recv(1 << 16)

    spent = timed(there_and_back, ROUNDS)
    ours.close()
    os.waitpid(pid, 0)
    return [s * 1e6 for s in spent]


def opened(region: Region, layout: object) -> tuple[TierPort, float]:
    port = TierPort("nothing", lambda: ProcessTier.start(NOTHING, region, layout, b"bench"))  # type: ignore[arg-type]
    began = time.perf_counter()
    port.start(time.monotonic())
    while port.state is not PortState.UP:
        fd = port.fileno()
        if fd is None:
            raise SystemExit(f"the tier does not come up: {port.error}")
        wait_readable(fd)
        port.pump(time.monotonic())
    return port, time.perf_counter() - began


def measure() -> dict[str, float]:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # the tier process must find this module
    layout = plan_layout(1 << 20, [4096])
    region = Region.create(layout.size_bytes)
    starts, closes, numpys = [], [], []
    for _ in range(STARTS):
        port, seconds = opened(region, layout)
        starts.append(seconds)
        began = time.perf_counter()
        report, _ = port.close(Deadline.after(5), time.monotonic())
        closes.append(time.perf_counter() - began)
        if not report.clean:
            raise SystemExit(str(report))
        numpy = timed(lambda: subprocess.run([sys.executable, "-c", "import numpy"], check=True), 1)
        numpys += numpy
    port, _ = opened(region, layout)
    number = 0

    def batch_and_back() -> None:
        nonlocal number
        number += 1
        port.submit(fx.StartTier("nothing", number, "promote", 0, KEYS, SLOTS), 0.0)  # type: ignore[arg-type]
        while not port.pump(0.0):
            fd = port.fileno()
            assert fd is not None
            wait_readable(fd)

    timed(batch_and_back, 200)
    size = len(encode(Submit(TierTransfer(1, Direction.PROMOTE, 0, list(KEYS), SLOTS))))  # type: ignore[arg-type]
    floor = floor_us(size)
    spent = [s * 1e6 for s in timed(batch_and_back, ROUNDS)]
    tiers = (TierSpec("nothing", write=True),)  # type: ignore[arg-type]
    core = StoreCore(CoreConfig(groups=(Group(16),), class_slots=(256,), tiers=tiers))
    driver = Driver(core, [port], engine_blocks_per_block=1)
    idle = [s * 1e6 for s in timed(lambda: driver.pump(0.0), 20_000)]
    port.close(Deadline.after(5), time.monotonic())
    region.close(Deadline.after(1))
    return {
        "batch_us_median": statistics.median(spent),
        "batch_us_p99": spent[len(spent) * 99 // 100],
        "floor_us_median": statistics.median(floor),
        "floor_us_p99": floor[len(floor) * 99 // 100],
        "idle_pump_us_median": statistics.median(idle),
        "start_s_median": statistics.median(starts),
        "import_numpy_s_median": statistics.median(numpys),
        "close_s_median": statistics.median(closes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    found = measure()
    if parser.parse_args().json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        print(f"{name:24} {value:10.3f}")
    ok = found["batch_us_median"] <= BUDGET_US
    print(f"a batch and back: {found['batch_us_median']:.0f} us, budget {BUDGET_US:.0f} us: {'ok' if ok else 'MISSED'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

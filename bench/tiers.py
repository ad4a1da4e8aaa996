"""The disk tier against the device and the page cache themselves: `python bench/tiers.py [--path DIR] [--json]`.

2 MiB blocks, checksums on. Every figure of ours stands beside a plain one taken in the same round, with the same
pattern and as many threads, and the verdict is the median of the rounds' ratios: absolute figures of a shared disk mean
little.

* direct: against fio (psync, the same block size and jobs) where it is installed, or the figures of `--fio-gbps`,
  else against a plain loop of O_DIRECT pwrite or pread;
* page cache: against a plain loop of pread and xxh3-128;
* `one request`: one batch of 16 blocks at a time, nothing else in flight;
* warm start: opening a directory that holds 100,000 blocks.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from kvtier.config import Size
from kvtier.memory.layout import Rows, plan_layout
from kvtier.runtime.deadline import Deadline
from kvtier.tiers import disk_format as fmt
from kvtier.tiers.base import Cause, Direction, Ended, Tier, TierTransfer
from kvtier.tiers.disk import DiskConfig, open_disk
from kvtier.tiers.disk_extent import charge, create_extent

BLOCK_BYTES = 2 << 20
BATCH = 16
WARM_BLOCKS = 100_000


class Bench:
    """One region and the figures taken with it."""

    def __init__(self, path: Path, blocks: int, threads: int) -> None:
        self.path, self.blocks, self.threads = path, blocks, threads
        self.map = mmap.mmap(-1, BLOCK_BYTES * BATCH * 4)
        array = np.frombuffer(self.map, np.uint8)
        array[:] = np.frombuffer(np.random.default_rng(1).bytes(len(array)), np.uint8)
        self.rows = Rows(array, plan_layout(len(array), [BLOCK_BYTES]))
        self.keys = [b"%034d" % i for i in range(blocks)]

    def gbps(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return self.blocks * BLOCK_BYTES / (time.perf_counter() - began) / 1e9

    # Ours

    def ours(self, direct: str, in_flight: int) -> tuple[float, float]:
        """GB/s of storing and of loading all blocks, with `in_flight` batches at a time."""
        shutil.rmtree(self.path / "tier", ignore_errors=True)
        config = DiskConfig(
            path=str(self.path / "tier"),
            size=Size(2 * self.blocks * BLOCK_BYTES + (256 << 20)),
            direct="off" if direct == "off" else "auto",
            threads=self.threads,
        )
        tier = open_disk(config, self.rows, b"bench")
        try:
            store = self.gbps(lambda: self.move(tier, Direction.DEMOTE, in_flight))
            load = self.gbps(lambda: self.move(tier, Direction.PROMOTE, in_flight))
        finally:
            tier.close(Deadline.after(10.0)).raise_if_failed()
        shutil.rmtree(self.path / "tier")
        return store, load

    def move(self, tier: Tier, direction: Direction, in_flight: int) -> None:
        starts = list(range(0, self.blocks, BATCH))
        running = 0
        while starts or running:
            while starts and running < in_flight:
                start = starts.pop(0)
                keys = self.keys[start : start + BATCH]
                first = start // BATCH % 4 * BATCH
                tier.submit(TierTransfer(start, direction, 0, keys, list(range(first, first + len(keys)))))
                running += 1
            select.select([tier.fileno()], [], [], 10.0)
            for notice in tier.poll():
                if isinstance(notice, Ended):
                    running -= 1
                    if set(notice.causes) != {Cause.OK}:
                        raise SystemExit(f"a block did not move: {notice.causes}")

    # Plain

    def plain(self, *, direct: bool, check: bool) -> tuple[float, float]:
        """GB/s of a loop of pwrite and of pread over one file that has its full size already."""
        name = self.path / "plain"
        fd = os.open(name, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        try:
            os.posix_fallocate(fd, 0, self.blocks * BLOCK_BYTES)
            store = self.gbps(lambda: self.loop(os.pwritev, fd, check=False))
            load = self.gbps(lambda: self.loop(os.preadv, fd, check=check))
        finally:
            os.close(fd)
            name.unlink()
        return store, load

    def loop(self, op: Callable[..., int], fd: int, *, check: bool) -> None:
        def part(thread: int) -> None:
            for i in range(thread, self.blocks, self.threads):
                row = self.rows.row(0, i % (4 * BATCH))
                if op(fd, [row], i * BLOCK_BYTES) != BLOCK_BYTES:
                    raise SystemExit("a plain read or write was short")
                if check:
                    xxhash.xxh3_128_digest(row)

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(part, range(self.threads)))

    def fio(self, rw: str) -> float:
        each = self.blocks // self.threads * BLOCK_BYTES
        command = [
            "fio",
            "--name=kvtier",
            f"--filename={self.path / 'fio'}",
            f"--rw={rw}",
            f"--bs={BLOCK_BYTES}",
            "--direct=1",
            "--ioengine=psync",
            f"--numjobs={self.threads}",
            f"--size={each}",
            f"--offset_increment={each}",
            "--group_reporting",
            "--output-format=json",
        ]
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
        found: float = json.loads(out[out.index("{") :])["jobs"][0][rw]["bw_bytes"]
        return found / 1e9

    def fio_pair(self) -> tuple[float, float]:
        try:
            return self.fio("write"), self.fio("read")
        finally:
            (self.path / "fio").unlink(missing_ok=True)


def warm_start_seconds(path: Path) -> tuple[float, float]:
    """From a closed directory with 100,000 blocks to a tier that answers, tables in the page cache: seconds, and
    seconds of processor time, which say more on a busy machine."""
    rows = Rows(np.zeros(4096, np.uint8), plan_layout(4096, [4096]))
    slot_bytes, extents = fmt.slot_bytes_of(4096), 50
    config = DiskConfig(path=str(path / "warm"), size=Size(charge(WARM_BLOCKS // extents, slot_bytes) * (extents + 1)))
    open_disk(config, rows, b"warm").close(Deadline.after(5.0))
    layout = fmt.digest16(b"rows/1 4096 1")
    identity = fmt.Identity(fmt.digest16(b"warm"), layout, 4096)
    dir_fd = os.open(path / "warm" / "engine-0", os.O_RDONLY)
    for number in range(extents):
        slots = WARM_BLOCKS // extents
        extent = create_extent(dir_fd, number, slots, slot_bytes, direct=False)
        table = b"".join(fmt.pack_record(identity, os.urandom(34), number * slots + i + 1) for i in range(slots))
        os.pwrite(extent.index_fd, table, fmt.HEADER_BYTES)
        extent.close()
    os.close(dir_fd)
    seconds = []
    for _ in range(5):
        began, began_cpu = time.perf_counter(), time.process_time()
        tier = open_disk(config, rows, b"warm")
        seconds.append((time.perf_counter() - began, time.process_time() - began_cpu))
        if tier.counts()["blocks_count"] != WARM_BLOCKS:
            raise SystemExit(f"the warm start found {tier.counts()['blocks_count']} of {WARM_BLOCKS} blocks")
        tier.close(Deadline.after(5.0))
    shutil.rmtree(path / "warm")
    return sorted(seconds)[len(seconds) // 2]


def measure(bench: Bench, rounds: int, fio_gbps: tuple[float, float] | None) -> dict[str, dict[str, float]]:
    """For each line: ours and plain in GB/s (medians), and the median of the rounds' ratios."""
    against = "--fio-gbps" if fio_gbps else "fio" if shutil.which("fio") else "plain O_DIRECT loop"
    lines: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        if fio_gbps:
            device = fio_gbps
        elif shutil.which("fio"):
            device = bench.fio_pair()
        else:
            device = bench.plain(direct=True, check=False)
        for title, in_flight in (("", 4), (", one request", 1)):
            for verb, mine, plain in zip(("store", "load"), bench.ours("auto", in_flight), device, strict=True):
                lines.setdefault(f"direct {verb}{title} / {against}", []).append((mine, plain))
        cached = bench.plain(direct=False, check=True)
        for title, in_flight in (("", 4), (", one request", 1)):
            mine = bench.ours("off", in_flight)[1]
            lines.setdefault(f"page cache load{title} / pread + xxh3-128", []).append((mine, cached[1]))
    return {
        line: {
            "gbps": statistics.median(mine for mine, _ in pairs),
            "plain_gbps": statistics.median(plain for _, plain in pairs),
            "ratio": statistics.median(mine / plain for mine, plain in pairs),
        }
        for line, pairs in lines.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--path", type=Path, default=None, help="a directory of the disk to measure; default: a temp one"
    )
    parser.add_argument("--blocks", type=int, default=256, help="blocks of 2 MiB a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fio-gbps", type=float, nargs=2, metavar=("WRITE", "READ"), default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=args.path))
    try:
        fio = tuple(args.fio_gbps) if args.fio_gbps else None
        lines = measure(Bench(path, args.blocks, args.threads), args.rounds, fio)
        warm_s, warm_cpu_s = warm_start_seconds(path)
    finally:
        shutil.rmtree(path)
    if args.json:
        warm = {"warm_start_s": warm_s, "warm_start_cpu_s": warm_cpu_s, "warm_start_blocks": WARM_BLOCKS}
        print(json.dumps({"lines": lines} | warm))
        return 0
    for line, found in lines.items():
        print(f"{line:58} {found['gbps']:6.2f} / {found['plain_gbps']:6.2f} GB/s = {found['ratio']:.2f}")
    print(f"warm start of {WARM_BLOCKS} blocks: {warm_s:.3f} s, {warm_cpu_s:.3f} s of processor time (budget 0.3 s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Small caches over arrays with a known pattern."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.engine.cache import Cache
from kvtier.engine.store import Store
from kvtier.engine.tier_port import TierPort
from kvtier.runtime.deadline import Deadline

FAULT = "kvtier.testing.fault_tiers:TIER_TYPE"
BLOCK_TOKENS = 4
PAGE_BYTES = [4096, 1024, 512]
ROWS = 64

BOTH = [False, pytest.param(True, marks=pytest.mark.processes)]
"""a tier in a thread, and in a process of its own"""


class Bench:
    """A cache with its "device": every page is a pattern of its row, its layer and a seed."""

    def __init__(self, config: dict[str, Any], *, per_block: int = 1, namespace: str = "m", rows: int = ROWS) -> None:
        self.per_block = per_block
        self.pages = [np.zeros((rows, size), np.uint8) for size in PAGE_BYTES]
        self.cache: Cache = kvtier.open(
            {"engine_blocks_per_block": per_block, **config},
            pages=self.pages,
            block_tokens=BLOCK_TOKENS,
            namespace={"model": namespace},
        )

    @property
    def store(self) -> Store:
        return self.cache._scheduler.store

    def port(self, name: str) -> TierPort:
        return self.store._driver.ports[name]

    def tokens(self, blocks: int, seed: int = 0) -> list[int]:
        return [seed * 1_000_000 + i for i in range(blocks * BLOCK_TOKENS)]

    def pattern(self, layer: int, blocks: int, seed: int) -> np.ndarray:
        """What the pages of `blocks` blocks of a prompt hold: every byte depends on seed, page and layer."""
        rng = np.random.default_rng([seed, layer])
        return rng.integers(0, 256, (blocks * self.per_block, PAGE_BYTES[layer]), np.uint8)

    def fill(self, rows: list[int], seed: int) -> None:
        for layer, page in enumerate(self.pages):
            page[rows] = self.pattern(layer, len(rows) // self.per_block, seed)

    def put(self, blocks: int, seed: int = 0, **more: Any) -> int:
        """Store a prompt of `blocks` blocks, whose bytes follow from `seed`."""
        rows = list(range(blocks * self.per_block))
        self.fill(rows, seed)
        return self.cache.store(self.tokens(blocks, seed), rows, **more)

    def get(self, blocks: int, seed: int = 0, **more: Any) -> int:
        """Load it into other rows; all bytes of what is said to be there must be right, all others untouched."""
        count = blocks * self.per_block
        rows = list(range(ROWS - count, ROWS))
        for page in self.pages:
            page[rows] = 0xEE
        tokens = self.cache.load(self.tokens(blocks, seed), rows, **more)
        loaded = tokens // BLOCK_TOKENS * self.per_block
        for layer, page in enumerate(self.pages):
            assert np.array_equal(page[rows[:loaded]], self.pattern(layer, blocks, seed)[:loaded]), f"layer {layer}"
            assert (page[rows[loaded:]] == 0xEE).all(), f"layer {layer}: written behind what was found"
        return tokens

    def crowd_out(self, seed: int = 900) -> None:
        """Fill host memory with something else, so that what is asked next comes from a tier."""
        slots = self.cache.counts()["host_slots"]
        at_once = ROWS // 2 // self.per_block
        for i in range(-(-slots // at_once)):
            assert self.put(at_once, seed + i) == at_once * BLOCK_TOKENS
            assert self.cache.settle()

    def settled(self, *, within_s: float = 10.0) -> None:
        """With no further call of the engine nothing is out any more, and every account adds up."""
        names = ("leases_out", "transfers_out", "requests_known")
        assert eventually(lambda: self.counts(*names) == [0, 0, 0], within_s=within_s), self.cache.counts()
        self.store.check()

    def counts(self, *names: str) -> list[int]:
        counts = self.cache.counts()
        return [counts[name] for name in names]


def eventually(what: Callable[[], object], *, within_s: float = 10.0) -> bool:
    """Whether `what` comes true in time; sleeps between looks, and calls nothing else."""
    deadline = Deadline.after(within_s)
    while not what():
        if deadline.expired:
            return False
        time.sleep(0.005)
    return True


def disk(path: Path, *, process: bool = False, **more: Any) -> dict[str, Any]:
    return {"type": "disk", "path": str(path), "size": "64MiB", "process": process, **more}


def config(*tiers: dict[str, Any], host: str = "256KiB", **more: Any) -> dict[str, Any]:
    return {"host": {"size": host}, "tiers": list(tiers), **more}


def fault(name: str, *, process: bool, switch: Path | None = None, **faults: str) -> dict[str, Any]:
    """A tier that fails at these points, while the file `switch` exists where one is given."""
    on = {"switch": str(switch)} if switch is not None else {}
    return {"type": FAULT, "name": name, "process": process, "faults": faults, **on}


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True

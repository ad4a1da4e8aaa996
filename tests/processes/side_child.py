"""One side of an engine in a process of its own: `python side_child.py rank|scheduler FD ENGINE NAME SEED [PATH]`.

FD is a socket to the test. A rank does one `StepWork` a message and answers with what has ended since; an empty
message closes it, and the answer is its report. A scheduler says the pid of its tier process and waits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
from engine_bench import PAGE_BYTES, ROWS, config, disk

from kvtier.config import load_config
from kvtier.core.groups import Group
from kvtier.engine.open import RankSide, SchedulerSide, open_rank_side, open_scheduler_side
from kvtier.engine.work import StepWork
from kvtier.memory.layout import PageLayout
from kvtier.runtime.deadline import Deadline
from kvtier.tiers.registry import tier_options
from kvtier.transfer.base import RankEnd
from kvtier.transfer.pages import NumpyPages

BLOCK_TOKENS = 4
encode = msgspec.msgpack.encode
decode_work = msgspec.msgpack.Decoder(StepWork).decode
decode_ends = msgspec.msgpack.Decoder(list[RankEnd]).decode


def pattern(layer: int, seed: int, rows: Sequence[int]) -> np.ndarray:
    return np.random.default_rng([seed, layer]).integers(0, 256, (ROWS, PAGE_BYTES[layer]), np.uint8)[rows]


def scheduler(engine: str, name: str, path: str = "") -> SchedulerSide:
    tiers = [disk(Path(path), process=True, name="far")] if path else []
    return open_scheduler_side(
        load_config(config(*tiers, name=name), tier_options=tier_options()),
        engine_id=engine,
        groups=[Group(BLOCK_TOKENS)],
        namespace=lambda _table: b"n" * 32,
        deadline=Deadline.after(20),
    )


def rank(engine: str, name: str, pages: list[np.ndarray]) -> RankSide:
    numpy_pages = NumpyPages(pages)
    settings = load_config(config(name=name), tier_options=tier_options())
    layouts = [PageLayout(1, 1, numpy_pages.page_bytes)]
    return open_rank_side(settings, engine_id=engine, pages=[numpy_pages], page_layouts=layouts)


def serve_rank(connection: Connection, engine: str, name: str, seed: int) -> None:
    """The lower half of the rows holds a pattern; a load into the upper half must bring it there."""
    half = range(ROWS // 2)
    pages = [np.zeros((ROWS, size), np.uint8) for size in PAGE_BYTES]
    for layer, page in enumerate(pages):
        page[: ROWS // 2] = pattern(layer, seed, half)
    side = rank(engine, name, pages)
    connection.send_bytes(b"up")
    while message := connection.recv_bytes():
        if message == b"bytes":
            right = [np.array_equal(page[ROWS // 2 :], page[: ROWS // 2]) for page in pages]
            connection.send_bytes(b"right" if all(right) else b"wrong")
            continue
        work = decode_work(message)
        side.rank.submit([*(t for load in work.loads for t in load.transfers), *work.stores])
        deadline = Deadline.after(0.05)
        ends = side.rank.poll()
        while not ends and (work.loads or work.stores) and not deadline.expired:
            time.sleep(0.001)
            ends = side.rank.poll()
        connection.send_bytes(encode(ends))
    connection.send_bytes(str(side.close()).encode() or b"-")


def main(role: str, fd: str, engine: str, name: str, seed: str, path: str = "") -> None:
    connection = Connection(int(fd))
    if role == "rank":
        serve_rank(connection, engine, name, int(seed))
        return
    with scheduler(engine, name, path) as side:
        tier = side.store._driver.ports["far"]._tier
        connection.send_bytes(str(tier.pid).encode())  # type: ignore[union-attr]
        connection.recv_bytes()


if __name__ == "__main__":
    main(*sys.argv[1:])

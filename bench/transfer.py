"""Copies between device pages and the region on a CPU, beside numpy's copyto on the same pieces.

    python bench/transfer.py [--json] [--mib 256] [--rounds 7]

Both use one thread. A piece is one layer's page of one block; copyto gets its pieces ready made, our side
gets block ids and slots and includes the way to its thread and back. Rounds are interleaved; the ratio is the
median of the rounds' ratios (ours / copyto), 0.9 or more is within the budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvtier.engine.rank import Rank, open_rank
from kvtier.memory.layout import PageLayout, plan_layout
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
from kvtier.transfer.base import RankTransfer, Way
from kvtier.transfer.pages import NumpyPages

LAYERS = 28
PAGE_BYTES = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10]
BLOCKS_MAX = 2048


class Case:
    """One page size: a rank, its pages, and half of its blocks and slots chosen for the copies."""

    def __init__(self, page_bytes: int, size_bytes: int, *, adjacent: bool) -> None:
        page_layout = PageLayout(1, 1, [page_bytes] * LAYERS)
        self.count = min(BLOCKS_MAX, max(2, size_bytes // page_layout.payload_bytes))
        total = 2 * self.count
        layout = plan_layout(total * page_layout.payload_bytes, [page_layout.payload_bytes])
        self.region = Region.create(layout.size_bytes)
        self.pages = NumpyPages([np.full((total, page_bytes), 1, np.uint8) for _ in range(LAYERS)])
        self.rank: Rank = open_rank(self.region, layout, [self.pages], [page_layout])
        order = np.random.default_rng(0)
        self.blocks = list(range(self.count)) if adjacent else order.permutation(total)[: self.count].tolist()
        self.slots = list(range(self.count)) if adjacent else order.permutation(total)[: self.count].tolist()
        self.bytes = self.count * page_layout.payload_bytes
        self.table = self.region.array[: total * layout.classes[0].row_bytes].reshape(total, -1)
        self.page_bytes = page_bytes
        self.ids = iter(range(1 << 40))

    def pieces(self, way: Way) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        for at, layer in enumerate(self.pages.layers):
            column = self.table[:, at * self.page_bytes : (at + 1) * self.page_bytes]
            for block, slot in zip(self.blocks, self.slots, strict=True):
                found.append((column[slot], layer[block]) if way is Way.STORE else (layer[block], column[slot]))
        return found

    def ours(self, way: Way) -> None:
        id_ = next(self.ids)
        self.rank.submit([RankTransfer(id_, way, 0, self.blocks, self.slots)])
        direction = self.rank._directions[way]
        assert direction.wait([id_], Deadline.after(60)) == []
        assert self.rank.poll()[0].ok

    def close(self) -> None:
        del self.table
        self.rank.close(Deadline.after(5)).raise_if_failed()


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(page_bytes: int, size_bytes: int, rounds: int, *, adjacent: bool) -> list[dict[str, object]]:
    case = Case(page_bytes, size_bytes, adjacent=adjacent)
    found = []
    for way in Way:
        pieces = case.pieces(way)

        def copyto(pieces: list[tuple[np.ndarray, np.ndarray]] = pieces) -> None:
            for into, out in pieces:
                np.copyto(into, out)

        case.ours(way)
        copyto()
        pairs = [(seconds(lambda way=way: case.ours(way)), seconds(copyto)) for _ in range(rounds)]
        found.append(
            {
                "way": str(way),
                "page_bytes": page_bytes,
                "blocks": case.count,
                "order": "adjacent" if adjacent else "scattered",
                "ours_gb_s": case.bytes / statistics.median(o for o, _ in pairs) / 1e9,
                "copyto_gb_s": case.bytes / statistics.median(n for _, n in pairs) / 1e9,
                "ratio": statistics.median(n / o for o, n in pairs),
            }
        )
        del pieces, copyto
    case.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=256, help="bytes moved in one copy, about")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    results = [
        line
        for adjacent in (False, True)
        for page_bytes in PAGE_BYTES
        for line in measure(page_bytes, args.mib << 20, args.rounds, adjacent=adjacent)
    ]
    if args.json:
        print(json.dumps({"bench": "transfer", "threads": 1, "layers": LAYERS, "results": results}))
        return
    print(f"{'way':6} {'page':>8} {'blocks':>7} {'order':10} {'ours GB/s':>10} {'copyto':>8} {'ratio':>6}")
    for r in results:
        print(
            f"{r['way']:6} {r['page_bytes']:8} {r['blocks']:7} {r['order']:10} "
            f"{r['ours_gb_s']:10.2f} {r['copyto_gb_s']:8.2f} {r['ratio']:6.2f}"
        )


if __name__ == "__main__":
    main()

"""Pages and rows with a pattern of their own for every byte."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.memory.layout import Layout, PageLayout, Rows, SizeClass
from kvtier.transfer.base import RankTransfer, Way
from kvtier.transfer.move import Mover
from kvtier.transfer.pages import NumpyPages

PAGE_BYTES = [5, 4096, 77, 8192, 12_289]
BLOCKS, ROWS = 24, 10


class World:
    """One rank's pages and a region's rows of one class; both filled with noise."""

    def __init__(self, engine_blocks: int, ranks: int = 1, rank: int = 0, array: np.ndarray | None = None) -> None:
        self.page_layout = PageLayout(engine_blocks, ranks, PAGE_BYTES)
        self.rank = rank
        row_bytes = self.page_layout.payload_bytes + 123
        self.layout = Layout(ROWS * row_bytes, ranks, [SizeClass(0, 0, row_bytes, ROWS)])
        self.rng = np.random.default_rng([engine_blocks, ranks, rank])
        self.array = self.noise(self.layout.size_bytes) if array is None else array
        # Pages of one layer lie apart, as in an engine that packs its layers into one tensor.
        self.pages = NumpyPages([self.noise(BLOCKS, size + 11)[:, 3 : 3 + size] for size in PAGE_BYTES])
        self.rows = Rows(self.array, self.layout)
        self.mover = Mover([self.pages], [self.page_layout], self.rows, rank=rank)

    def noise(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 256, shape, dtype=np.uint8)

    def transfer(self, direction: Way, blocks: list[int], slots: list[int], id_: int = 1) -> RankTransfer:
        return RankTransfer(id_, direction, 0, blocks, slots)

    def expected_row(self, before: np.ndarray, blocks: list[int]) -> np.ndarray:
        """The row after this rank stored `blocks` into it, byte by byte as the layout's words say."""
        row, at = before.copy(), 0
        for block in blocks:
            for layer, size in zip(self.pages.layers, PAGE_BYTES, strict=True):
                for rank in range(self.page_layout.ranks):
                    if rank == self.rank:
                        row[at : at + size] = layer[block]
                    at += size
        return row


@pytest.fixture(params=[1, 2], ids=["one engine block a block", "two"])
def engine_blocks(request: pytest.FixtureRequest) -> int:
    return int(request.param)

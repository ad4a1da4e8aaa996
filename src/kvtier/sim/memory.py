"""Memory that knows who touches it: the device's pages and the region's rows, for every rank.

A cell is what one rank holds of one page or row. Its bytes are two halves that are written at different
moments, so a copy that is cut short, or read before its end, leaves bytes that match no pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.sim.world import CheckFailed

Cell = tuple[int, int]
"""rank, and number of the page or row"""


class Memory:
    """`words[rank, number, page, half]`."""

    def __init__(self, name: str, ranks: int, count: int, pages: int) -> None:
        self.name = name
        self.words: NDArray[np.uint64] = np.zeros((ranks, count, pages, 2), np.uint64)
        self._readers: dict[Cell, list[str]] = {}
        self._writer: dict[Cell, str] = {}

    def begin_read(self, who: str, cells: Iterable[Cell]) -> None:
        for cell in cells:
            writer = self._writer.get(cell)
            if writer is not None:
                self._clash(cell, f"{who} begins to read what {writer} writes")
            self._readers.setdefault(cell, []).append(who)

    def end_read(self, who: str, cells: Iterable[Cell]) -> None:
        for cell in cells:
            readers = self._readers[cell]
            readers.remove(who)
            if not readers:
                del self._readers[cell]

    def begin_write(self, who: str, cells: Iterable[Cell]) -> None:
        for cell in cells:
            writer = self._writer.get(cell)
            if writer is not None:
                self._clash(cell, f"{who} begins to write what {writer} writes")
            if cell in self._readers:
                self._clash(cell, f"{who} begins to write what {self._readers[cell][0]} reads")
            self._writer[cell] = who

    def end_write(self, who: str, cells: Iterable[Cell]) -> None:
        for cell in cells:
            assert self._writer.pop(cell) == who

    def touched(self) -> dict[int, list[str]]:
        """Rows or pages that something reads or writes now, and what does."""
        touched: dict[int, list[str]] = {}
        for (_, number), writer in self._writer.items():
            touched.setdefault(number, []).append(writer)
        for (_, number), readers in self._readers.items():
            touched.setdefault(number, []).extend(readers)
        return touched

    def _clash(self, cell: Cell, what: str) -> None:
        raise CheckFailed("memory", f"{self.name} {cell[1]} of rank {cell[0]}: {what}")


class Copy:
    """One run of pages on its way between a rank's device pages and its parts of rows: half now, half at the end."""

    def __init__(
        self,
        who: str,
        rank: int,
        source: Memory,
        target: Memory,
        pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    ) -> None:
        """`pairs`: (number, page) in the source and in the target."""
        self.who, self.rank, self.source, self.target = who, rank, source, target
        self._pairs = pairs
        self._reads = list(dict.fromkeys((rank, number) for (number, _), _ in pairs))
        self._writes = list(dict.fromkeys((rank, number) for _, (number, _) in pairs))
        source.begin_read(who, self._reads)
        target.begin_write(who, self._writes)
        self._move(0)

    def _move(self, half: int) -> None:
        source, target, rank = self.source.words, self.target.words, self.rank
        for (from_number, from_page), (to_number, to_page) in self._pairs:
            target[rank, to_number, to_page, half] = source[rank, from_number, from_page, half]

    def end(self, *, whole: bool = True) -> None:
        """The last byte moved; or it was cut short and leaves a torn target."""
        if whole:
            self._move(1)
        self.source.end_read(self.who, self._reads)
        self.target.end_write(self.who, self._writes)

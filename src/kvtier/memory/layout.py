"""Where blocks lie in the region: size classes of rows, and how a row is made of engine pages.

Rules: a row is payload only, padded to 4096 bytes; a class is one run of equal rows; nothing here
knows a device or an engine. Offsets and sizes are bytes, slots and pages are counted.

A row of a class is `[engine block E][layer L][rank R][page bytes of that layer]`: what one rank keeps
of one layer is one contiguous piece, and a block is one contiguous run for every lower tier.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.errors import Closed, ConfigError, CoreBug

ROW_ALIGN_BYTES = 4096
"""direct I/O reads and writes whole pages of memory"""

Bytes = npt.NDArray[np.uint8]


class SizeClass(msgspec.Struct, frozen=True, gc=False):
    """`rows` rows of `row_bytes` each, from `offset_bytes` of the region on."""

    index: int
    offset_bytes: int
    row_bytes: int
    rows: int


class Layout(msgspec.Struct, frozen=True):
    """The whole region: `size_bytes` of it, cut into classes; `ranks` write to each row."""

    size_bytes: int
    ranks: int
    classes: list[SizeClass]


class PageLayout(msgspec.Struct, frozen=True):
    """How one row is made of pages: `[engine_blocks][len(page_bytes)][ranks][page_bytes[layer]]`.

    `page_bytes[layer]` is what ONE rank keeps of one engine block in that layer; layers may differ.
    """

    engine_blocks: int
    ranks: int
    page_bytes: list[int]

    def __post_init__(self) -> None:
        if self.engine_blocks < 1 or self.ranks < 1 or not self.page_bytes or min(self.page_bytes) < 1:
            raise ConfigError(f"a row needs at least one engine block, rank, layer and byte: {self.describe()}")

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row that mean something; the rest is padding and stays zero."""
        return self.engine_blocks * self.ranks * sum(self.page_bytes)

    def offsets(self, rank: int) -> list[int]:
        """Offset in the row of engine block 0's page of `rank`, for each layer; the next engine
        block's page lies `ranks * sum(page_bytes)` further."""
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"rank {rank} is outside of the {self.ranks} ranks of the layout")
        found, layer_offset = [], 0
        for size in self.page_bytes:
            found.append(layer_offset + rank * size)
            layer_offset += self.ranks * size
        return found

    def describe(self) -> str:
        """Stable text for the key namespace: equal exactly when rows mean the same."""
        return f"rows/1 blocks={self.engine_blocks} ranks={self.ranks} pages={','.join(map(str, self.page_bytes))}"


def plan_layout(host_size_bytes: int, payload_bytes_per_class: Sequence[int], *, ranks: int = 1) -> Layout:
    """Cut `host_size_bytes` into classes with equally many rows each, as many as fit.

    A request needs a row of every class at each block boundary, so the classes get the same count.
    Raises ConfigError where not even one row of each class fits: an empty cache is never silent.
    """
    if not payload_bytes_per_class or min(payload_bytes_per_class) < 1:
        raise ConfigError(f"every size class needs a payload of at least 1 byte: {list(payload_bytes_per_class)}")
    row_bytes = [-(-payload // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES for payload in payload_bytes_per_class]
    rows = host_size_bytes // sum(row_bytes)
    if rows < 1:
        raise ConfigError(
            f"host.size is {host_size_bytes} bytes, but one row of each size class needs {sum(row_bytes)} bytes "
            f"({' + '.join(map(str, row_bytes))}): set host.size to at least {sum(row_bytes)}"
        )
    classes, offset = [], 0
    for index, size in enumerate(row_bytes):
        classes.append(SizeClass(index, offset, size, rows))
        offset += rows * size
    return Layout(offset, ranks, classes)


class Rows:
    """The rows of a mapped region, by size class and slot. Borrows the array; `close` lets go of it."""

    def __init__(self, array: Bytes, layout: Layout) -> None:
        if layout.size_bytes > array.nbytes:
            raise CoreBug(f"the layout covers {layout.size_bytes} bytes, the region has {array.nbytes}")
        self.layout = layout
        self._closed = False
        self._tables: list[Bytes] = []
        for c in layout.classes:
            end = c.offset_bytes + c.rows * c.row_bytes
            if c.offset_bytes < 0 or c.rows < 1 or c.row_bytes < 1 or end > layout.size_bytes:
                raise CoreBug(f"size class {c} lies outside of the layout's {layout.size_bytes} bytes")
            self._tables.append(array[c.offset_bytes : end].reshape(c.rows, c.row_bytes))

    def table(self, size_class: int) -> Bytes:
        """All rows of a class as (rows, row_bytes) uint8; a view, not a copy."""
        if self._closed:
            raise Closed("the rows were closed before this use")
        if not 0 <= size_class < len(self._tables):
            raise CoreBug(f"size class {size_class} is outside of {len(self._tables)}")
        return self._tables[size_class]

    def row(self, size_class: int, slot: int) -> memoryview:
        """One row, writable. Raises CoreBug for a slot that the class does not have."""
        table = self.table(size_class)
        if not 0 <= slot < len(table):
            raise CoreBug(f"slot {slot} is outside of the {len(table)} rows of size class {size_class}")
        return memoryview(table[slot])

    def close(self) -> None:
        """Let go of the region; every later use raises Closed. Views handed out live on."""
        self._closed = True
        self._tables = []

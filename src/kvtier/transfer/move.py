"""Copying blocks between device pages in host memory and rows, by layer.

Adjacent blocks in adjacent rows are one copy a layer. Single pieces are copied one by one, except small
ones: those are gathered and scattered many at a time, because a call costs more than the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import ConfigError, Refused
from kvtier.memory.layout import Bytes, PageLayout, Rows
from kvtier.transfer.base import SKIP, RankTransfer, Way
from kvtier.transfer.pages import NumpyPages

SMALL_BYTES = 8192
"""below this a piece is cheaper to copy twice than to copy by a call of its own"""
BATCH_BYTES = 256 << 10
"""gathered at a time; stays in the cache between its two copies"""

Indices = npt.NDArray[np.intp]


class Mover:
    """Moves one rank's part of rows: `pages[c]` and `page_layouts[c]` belong to size class c.

    Borrows the memory of both sides; `close` lets go of it.
    """

    def __init__(
        self, pages: Sequence[NumpyPages], page_layouts: Sequence[PageLayout], rows: Rows, *, rank: int = 0
    ) -> None:
        """Raises ConfigError where pages, page layouts and size classes do not fit each other."""
        classes = rows.layout.classes
        if not len(pages) == len(page_layouts) == len(classes):
            raise ConfigError(f"{len(pages)} page sets and {len(page_layouts)} page layouts for {len(classes)} classes")
        for c, own, page_layout in zip(classes, pages, page_layouts, strict=True):
            if own.page_bytes != page_layout.page_bytes:
                raise ConfigError(f"size class {c.index}: pages of {own.page_bytes}, layout {page_layout.describe()}")
            if page_layout.payload_bytes > c.row_bytes:
                raise ConfigError(f"size class {c.index}: {page_layout.describe()} exceeds {c.row_bytes} bytes a row")
        self._pages, self._page_layouts, self._rows = list(pages), page_layouts, rows
        self._offsets = [page_layout.offsets(rank) for page_layout in page_layouts]

    def check(self, transfer: RankTransfer) -> None:
        """Raises Refused for a size class, slot or engine block that does not exist."""
        if not 0 <= transfer.size_class < len(self._pages):
            raise Refused(f"transfer {transfer.id}: size class {transfer.size_class} of {len(self._pages)}")
        c, pages = self._rows.layout.classes[transfer.size_class], self._pages[transfer.size_class]
        blocks_per_slot = self._page_layouts[transfer.size_class].engine_blocks
        if not transfer.slots or len(transfer.blocks) != len(transfer.slots) * blocks_per_slot:
            raise Refused(
                f"transfer {transfer.id}: {len(transfer.blocks)} engine blocks for {len(transfer.slots)} slots, "
                f"each takes {blocks_per_slot}"
            )
        blocks = transfer.blocks
        if transfer.direction is Way.LOAD:
            blocks = [block for block in blocks if block != SKIP]
        for what, ids, count in (("slot", transfer.slots, c.rows), ("engine block", blocks, pages.count)):
            if ids and (min(ids) < 0 or max(ids) >= count):
                raise Refused(f"transfer {transfer.id}: a {what} outside of 0 to {count - 1}: {min(ids)}, {max(ids)}")

    def move(self, transfer: RankTransfer) -> None:
        """Copy all of it, now. The transfer has passed `check`."""
        page_layout = self._page_layouts[transfer.size_class]
        table = self._rows.table(transfer.size_class)
        slots = np.asarray(transfer.slots, np.intp)
        blocks = np.asarray(transfer.blocks, np.intp).reshape(len(slots), page_layout.engine_blocks)
        is_store = transfer.direction is Way.STORE
        for nth in range(page_layout.engine_blocks):
            start = nth * page_layout.ranks * sum(page_layout.page_bytes)
            copied = np.flatnonzero(blocks[:, nth] != SKIP)
            if not len(copied):
                continue
            rows_at, pages_at = slots[copied], blocks[copied, nth]
            into_at, out_at = (rows_at, pages_at) if is_store else (pages_at, rows_at)
            runs = _runs(into_at, out_at)
            for layer, offset in zip(
                self._pages[transfer.size_class].layers, self._offsets[transfer.size_class], strict=True
            ):
                column = table[:, start + offset : start + offset + layer.shape[1]]
                into, out = (column, layer) if is_store else (layer, column)
                if layer.shape[1] >= SMALL_BYTES or len(runs) * 4 <= len(copied):
                    for to, source in runs:
                        into[to] = out[source]
                else:
                    _gather(into, into_at, out, out_at)

    def digest(self, blocks: Sequence[int], size_class: int) -> list[bytes]:
        """xxh3-128 of each engine block's pages, layer after layer, as they are now."""
        digests = []
        for block in blocks:
            state = xxhash.xxh3_128()
            for layer in self._pages[size_class].layers:
                state.update(layer[block].data)
            digests.append(state.digest())
        return digests

    def close(self) -> None:
        """Let go of pages and rows. No copy may run any more."""
        self._pages.clear()
        self._rows.close()


def _runs(into_at: Indices, out_at: Indices) -> list[tuple[int, int] | tuple[slice, slice]]:
    """Where to and where from, for each stretch in which both go up by one; a stretch of one is an index."""
    breaks = np.flatnonzero((np.diff(into_at) != 1) | (np.diff(out_at) != 1)) + 1
    edges = [0, *breaks.tolist(), len(into_at)]
    begins = zip(into_at[edges[:-1]].tolist(), out_at[edges[:-1]].tolist(), strict=True)
    return [
        (to, source) if end - begin == 1 else (slice(to, to + end - begin), slice(source, source + end - begin))
        for (begin, end), (to, source) in zip(itertools.pairwise(edges), begins, strict=True)
    ]


def _gather(into: Bytes, into_at: Indices, out: Bytes, out_at: Indices) -> None:
    """`into[into_at] = out[out_at]`, a batch at a time."""
    piece = np.dtype((np.void, into.shape[1]))  # one element a piece: copied at once, not byte by byte
    into_pieces, out_pieces = into.view(piece)[:, 0], out.view(piece)[:, 0]
    step = max(1, BATCH_BYTES // into.shape[1])
    for i in range(0, len(into_at), step):
        into_pieces[into_at[i : i + step]] = out_pieces[out_at[i : i + step]]

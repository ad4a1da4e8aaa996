"""Which block lies where, what goes when room is needed, and how much of `size` is taken.

Rules: one thread owns it; it does no I/O but at open, at close and to remove what somebody else broke. A block that is
read or written is never evicted. A block is known only once it is written whole. What every extent
may take is charged before it is made, so the directory never holds more than `size`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, CoreBug
from kvtier.tiers import disk_format as fmt
from kvtier.tiers.disk_extent import (
    Block,
    Extent,
    charge,
    names,
    numbers_in,
    open_extent,
    read_index,
    remove_extent,
    slots_within,
)
from kvtier.tiers.disk_io import Grow

GROW_RETRY_S = 1.0
"""pause after the file system had no room"""
BASE_BYTES = 32768
"""the directory itself, its lock and the probe"""
_PARTS = 64
_EXTENT_BYTES_MIN = 16 << 20
_EXTENTS_MAX = 256
_COMPARE_EVERY = 16
"""evictions between two looks at whether another size class holds on to older blocks"""


@dataclass(slots=True, eq=False)
class Shelf:
    """All extents of one slot size. `idle` are the blocks that may go, longest unused first."""

    slot_bytes: int
    extents: list[Extent] = field(default_factory=list)
    idle: OrderedDict[bytes, Block] = field(default_factory=OrderedDict)
    busy: dict[bytes, Block] = field(default_factory=dict)
    """known blocks with readers"""
    roomy: list[Extent] = field(default_factory=list)
    """extents with a free slot"""
    growing: bool = False
    retry_at: float = 0.0
    evictions: int = 0


class Index:
    """The blocks of one engine directory. `size_bytes` bounds all of it."""

    def __init__(self, dir_fd: int, identities: Sequence[fmt.Identity], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = BASE_BYTES
        self.evicted: list[bytes] = []
        """keys of ours that went since somebody last took this list"""
        self.evicted_count = 0
        self._dir_fd = dir_fd
        self._identities = identities
        self._shelves: dict[int, Shelf] = {}
        self.by_class = [self._shelf(fmt.slot_bytes_of(identity.row_bytes)) for identity in identities]
        self._next_number = 0
        self._stamp = 0
        need = BASE_BYTES + sum(charge(1, slot_bytes) for slot_bytes in self._shelves)
        if size_bytes < need:
            raise ConfigError(
                f"size = {size_bytes}: one block of each size class needs {need} bytes with its index; "
                "give at least that, better room for thousands of blocks"
            )

    # What is known

    @property
    def blocks_count(self) -> int:
        return sum(len(extent.blocks) for shelf in self._shelves.values() for extent in shelf.extents)

    @property
    def blocks_bytes(self) -> int:
        return sum(len(e.blocks) * e.slot_bytes for shelf in self._shelves.values() for e in shelf.extents)

    def has(self, key: bytes) -> bool:
        return any(key in shelf.idle or key in shelf.busy for shelf in self.by_class)

    def pin(self, size_class: int, key: bytes) -> Block | None:
        """The block of `key`, just used and not to be evicted until `unpin`; None where it is not known."""
        shelf = self.by_class[size_class]
        block = shelf.idle.pop(key, None)
        if block is not None:
            shelf.busy[key] = block
        else:
            block = shelf.busy.get(key)
            if block is None:
                return None
        block.readers += 1
        block.extent.running += 1
        return block

    def unpin(self, block: Block) -> None:
        """The end of one use."""
        self._left(block.extent)
        block.readers -= 1
        if block.readers < 0:
            raise CoreBug(f"block {block.key.hex()} was unpinned more often than pinned")
        if block.readers:
            return
        if block.dead:
            self._freed(block)
            return
        shelf = self._shelves[block.extent.slot_bytes]
        del shelf.busy[block.key]
        self._use(block)
        shelf.idle[block.key] = block

    def remove(self, block: Block) -> None:
        """Forget a block whose bytes proved wrong; its slot is free once its last reader has ended."""
        if not block.dead:
            self._forget(block)
            if not block.readers:
                self._freed(block)

    # Room

    def reserve(self, size_class: int, key: bytes, now: float) -> Block | Grow | None:
        """A slot to write `key` into; or a `Grow` to be done first; None where nothing may go.

        None while a grow runs means nothing yet: ask again at its end.
        """
        shelf = self.by_class[size_class]
        if not shelf.roomy:
            if shelf.growing:
                return None
            grow = self._grow(shelf, now)
            if grow is not None:
                return grow
            if not self._evict_one(shelf):
                return None
        extent = shelf.roomy[-1]
        slot = extent.free.pop()
        if not extent.free:
            shelf.roomy.pop()
        extent.running += 1
        self._stamp += 1
        return Block(key, extent, slot, self._stamp)

    @property
    def is_growing(self) -> bool:
        """Whether a grow of any slot size runs; its extent may be what another one can take its room from."""
        return any(shelf.growing for shelf in self._shelves.values())

    def written(self, block: Block) -> None:
        """The slot from `reserve` holds its block, which is known from now on, and pinned once."""
        extent = block.extent
        block.readers = 1
        block.dead = extent.gone
        if not extent.gone:
            extent.blocks[block.slot] = block
            extent.stamps_sum += block.stamp
            self._shelves[extent.slot_bytes].busy[block.key] = block

    def unwritten(self, block: Block) -> None:
        """The slot from `reserve` holds nothing."""
        self._left(block.extent)
        self._freed(block)

    def grown(self, job: Grow, extent: Extent | None, now: float, *, dropped: bool) -> None:
        """The end of a grow."""
        shelf = self._shelf(job.slot_bytes)
        shelf.growing = False
        for old in job.drop:
            old.close()  # the job may have ended, or been taken back, before it came to that
        if dropped:
            self.used_bytes -= sum(old.size_bytes for old in job.drop)
        self.used_bytes -= _reserve(job.slots, job.slot_bytes, job.drop)
        if extent is None or extent.slots < job.slots:
            shelf.retry_at = now + GROW_RETRY_S
        if extent is not None:
            self.used_bytes += extent.size_bytes
            shelf.extents.append(extent)
            shelf.roomy.append(extent)

    def lose(self, extent: Extent) -> None:
        """Somebody removed the files of an extent: its blocks are gone, its space is counted down, once."""
        if extent.gone:
            return
        for block in list(extent.blocks.values()):
            self._forget(block)
        extent.gone = True
        shelf = self._shelves[extent.slot_bytes]
        shelf.extents.remove(extent)
        if extent in shelf.roomy:
            shelf.roomy.remove(extent)
        self.used_bytes -= extent.size_bytes
        try:
            remove_extent(self._dir_fd, extent.number)
        except OSError:
            self.used_bytes += extent.size_bytes  # what is left of it may still take that
        if not extent.running:
            extent.close()

    def hold(self, extent: Extent) -> None:
        """Keep an extent open for a job that moves no block."""
        extent.running += 1

    def let_go(self, extent: Extent) -> None:
        self._left(extent)

    # Opening and closing

    def load(self, *, direct: bool) -> None:
        """Take over what earlier runs left: tables only, no payload. Raises ConfigError, OSError."""
        numbers, halves = numbers_in(self._dir_fd)
        for number in halves:
            remove_extent(self._dir_fd, number)
        loaded: list[tuple[Extent, fmt.Records]] = []
        try:
            for number in numbers:
                opened = open_extent(self._dir_fd, number, direct=direct)
                if opened is None:
                    remove_extent(self._dir_fd, number)
                else:
                    loaded.append(opened)
            self._fit(loaded)
        except BaseException:
            for extent, _ in loaded:
                extent.close()
            raise
        self._next_number = max([*numbers, *halves], default=-1) + 1
        for slot_bytes in {extent.slot_bytes for extent, _ in loaded}:
            self._fill(self._shelf(slot_bytes), [pair for pair in loaded if pair[0].slot_bytes == slot_bytes])

    def save_stamps(self) -> None:
        """Write down the last use of each block; without it a start knows only when it was stored. Raises OSError."""
        for shelf in self._shelves.values():
            for extent in shelf.extents:
                if not any(block.used for block in extent.blocks.values()):
                    continue
                head, table = read_index(extent.index_fd, names(extent.number)[1])
                if head is None or len(table) != extent.slots:
                    continue
                whole = set(fmt.live_slots(table, extent.slot_bytes).tolist())
                used = [block for block in extent.blocks.values() if block.used and block.slot in whole]
                fmt.restamp(table, [block.slot for block in used], [block.stamp for block in used])
                os.pwrite(extent.index_fd, table.tobytes(), fmt.HEADER_BYTES)

    def close(self) -> None:
        for shelf in self._shelves.values():
            for extent in shelf.extents:
                extent.close()
            shelf.extents.clear()
            shelf.idle.clear()
            shelf.busy.clear()

    # Inside

    def _shelf(self, slot_bytes: int) -> Shelf:
        if slot_bytes not in self._shelves:
            self._shelves[slot_bytes] = Shelf(slot_bytes)
        return self._shelves[slot_bytes]

    def _use(self, block: Block) -> None:
        self._stamp += 1
        if not block.dead:
            block.extent.stamps_sum += self._stamp - block.stamp
        block.stamp = self._stamp
        block.used = True

    def _left(self, extent: Extent) -> None:
        extent.running -= 1
        if extent.gone and not extent.running:
            extent.close()

    def _forget(self, block: Block) -> None:
        """The block is not known any more; its slot is not free yet."""
        shelf, extent = self._shelves[block.extent.slot_bytes], block.extent
        for known in (shelf.idle, shelf.busy):
            if known.get(block.key) is block:
                del known[block.key]
        block.dead = True
        del extent.blocks[block.slot]
        extent.stamps_sum -= block.stamp
        if block.ours:
            self.evicted.append(block.key)

    def _freed(self, block: Block) -> None:
        extent = block.extent
        if not extent.gone:
            extent.free.append(block.slot)
            if len(extent.free) == 1:
                self._shelves[extent.slot_bytes].roomy.append(extent)

    def _evict_one(self, shelf: Shelf) -> bool:
        if not shelf.idle:
            return False
        block = next(iter(shelf.idle.values()))
        self._forget(block)
        self._freed(block)
        self.evicted_count += 1
        shelf.evictions += 1
        return True

    def _grow(self, shelf: Shelf, now: float) -> Grow | None:
        """Plan one more extent, in free room or in that of older blocks of another slot size."""
        if now < shelf.retry_at:
            return None
        extents = sum(len(other.extents) for other in self._shelves.values())
        room = self.size_bytes - self.used_bytes if extents < _EXTENTS_MAX else 0
        wanted = max(1, max(self.size_bytes // _PARTS, _EXTENT_BYTES_MIN) // shelf.slot_bytes)
        drop: list[Extent] = []
        while not (fitting := slots_within(room, shelf.slot_bytes)):
            older = self._older_elsewhere(shelf)
            if older is None:
                break
            room += older.size_bytes
            drop.append(older)
        if not fitting and not drop:
            return None
        slots = min(wanted, fitting)
        shelf.growing = True
        self.used_bytes += _reserve(slots, shelf.slot_bytes, drop)
        self._next_number += 1
        return Grow(self._next_number - 1, slots, shelf.slot_bytes, drop)

    def _older_elsewhere(self, shelf: Shelf) -> Extent | None:
        """Take away an extent of another slot size whose blocks are, in the mean, unused for longer than our oldest."""
        if len(self._shelves) == 1 or (shelf.idle and shelf.evictions % _COMPARE_EVERY):
            return None
        oldest = next(iter(shelf.idle.values())).stamp if shelf.idle else float("inf")
        others = [e for other in self._shelves.values() if other is not shelf for e in other.extents if not e.running]
        found = min(others, key=Extent.age, default=None)
        if found is None or found.age() >= oldest:
            return None
        for block in list(found.blocks.values()):
            self._forget(block)
            self.evicted_count += 1
        found.gone = True
        other = self._shelves[found.slot_bytes]
        other.extents.remove(found)
        if found in other.roomy:
            other.roomy.remove(found)
        return found

    def _fit(self, loaded: list[tuple[Extent, fmt.Records]]) -> None:
        """Remove the longest unused extents until all of them are within `size`."""

        def age(pair: tuple[Extent, fmt.Records]) -> float:
            extent, table = pair
            live = fmt.live_slots(table, extent.slot_bytes)
            return float(table["stamp"][live].mean()) if len(live) else -1.0

        self.used_bytes += sum(extent.size_bytes for extent, _ in loaded)
        if self.used_bytes > self.size_bytes:
            loaded.sort(key=age, reverse=True)
        while self.used_bytes > self.size_bytes and loaded:
            extent, _ = loaded.pop()
            extent.close()
            remove_extent(self._dir_fd, extent.number)
            self.used_bytes -= extent.size_bytes

    def _fill(self, shelf: Shelf, pairs: list[tuple[Extent, fmt.Records]]) -> None:
        """Make the blocks of a shelf out of its tables, in the order of their last use."""
        lives = [fmt.live_slots(table, shelf.slot_bytes) for _, table in pairs]
        table = np.concatenate([fmt.take(table, live) for (_, table), live in zip(pairs, lives, strict=True)])
        order = np.argsort(table["stamp"], kind="stable")
        table, slots = fmt.take(table, order), np.concatenate(lives)[order].tolist()
        owners = np.repeat(np.arange(len(pairs)), [len(live) for live in lives])[order].tolist()
        keys, stamps, ours = fmt.keys_of(table), table["stamp"].tolist(), self._ours(table)
        for i in np.flatnonzero(~ours).tolist():
            keys[i] = table["namespace"][i].tobytes() + table["layout"][i].tobytes() + keys[i]
        extents = [extent for extent, _ in pairs]
        blocks = list(map(Block, keys, map(extents.__getitem__, owners), slots, stamps, ours.tolist()))
        shelf.idle = OrderedDict(zip(keys, blocks, strict=True))
        if len(shelf.idle) < len(blocks):  # written twice, after the first record was given up: the later one counts
            blocks = list(shelf.idle.values())
        for block in blocks:
            block.extent.blocks[block.slot] = block
            block.extent.stamps_sum += block.stamp
        self._stamp = max([self._stamp, *stamps[-1:]])
        for extent in extents:
            if len(extent.blocks) < extent.slots:
                extent.free = [slot for slot in reversed(range(extent.slots)) if slot not in extent.blocks]
            shelf.extents.append(extent)
            if extent.free:
                shelf.roomy.append(extent)

    def _ours(self, table: fmt.Records) -> npt.NDArray[np.bool_]:
        """Which records are of our namespace and of a layout of ours."""
        found = np.zeros(len(table), bool)
        for identity in set(self._identities):
            found |= (
                (table["row_bytes"] == identity.row_bytes)
                & (table["namespace"] == np.frombuffer(identity.namespace, "<u8")).all(axis=1)
                & (table["layout"] == np.frombuffer(identity.layout, "<u8")).all(axis=1)
            )
        return found


def _reserve(slots: int, slot_bytes: int, drop: Sequence[Extent]) -> int:
    """What a grow needs beyond the space of the extents that it removes first; that stays charged until they are."""
    return max(0, charge(slots, slot_bytes) - sum(extent.size_bytes for extent in drop))

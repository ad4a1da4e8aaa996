"""Least recently used, in runs.

Every touch gets the next sequence numbers: an entry (slot, number) is live while the slot's stamp is that
number, and stale after. Entries stand in chunks in the order of their numbers, the deepest block of a run
first, so that a prefix is given up from its end. A touch of n slots also sweeps 2n old entries, so stale
ones stay below about twice the live ones and no call ever rewrites the whole queue.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtier.core.policy.base import Mask, Slots

_CHUNK = 256
_NONE = -1


class _Chunk:
    __slots__ = ("seqs", "slots", "used")

    def __init__(self, slots: Slots, seqs: Slots, used: int) -> None:
        self.slots, self.seqs, self.used = slots, seqs, used


class LRU:
    def __init__(self, capacity: int) -> None:
        self._stamp = np.full(capacity, _NONE, np.int64)
        self._count = 0
        self._seq = 0
        self._chunks: dict[int, _Chunk] = {}
        self._head = 0
        """number of the oldest chunk that may exist"""
        self._tail = -1
        """number of the chunk that is being filled"""
        self._sweep = 0

    def __len__(self) -> int:
        return self._count

    def touch(self, slots: Slots) -> None:
        n = len(slots)
        if not n:
            return
        self._count += n - int(np.count_nonzero(self._stamp[slots] != _NONE))
        chunk = self._chunks.get(self._tail)
        if chunk is None or chunk.used + n > len(chunk.slots):
            size = max(_CHUNK, n)
            chunk = _Chunk(np.empty(size, np.int64), np.empty(size, np.int64), 0)
            self._tail += 1
            self._chunks[self._tail] = chunk
        deepest_first = slots[::-1]
        seqs = np.arange(self._seq, self._seq + n)
        self._seq += n
        chunk.slots[chunk.used : chunk.used + n] = deepest_first
        chunk.seqs[chunk.used : chunk.used + n] = seqs
        chunk.used += n
        self._stamp[deepest_first] = seqs
        budget = 2 * n
        for _ in range(self._head, self._tail):  # at most once around
            budget -= self._sweep_one()
            if budget <= 0:
                break

    def forget(self, slots: Slots) -> None:
        self._count -= int(np.count_nonzero(self._stamp[slots] != _NONE))
        self._stamp[slots] = _NONE

    def victims(self, count: int, spare: Callable[[Slots], Mask]) -> Slots:
        found: list[Slots] = []
        number = self._head
        while count > 0 and number <= self._tail:
            chunk = self._chunks.get(number)
            if chunk is not None:
                self._drop_stale(chunk)
                slots = chunk.slots[: chunk.used]
                taken = slots[~spare(slots)][:count]
                self.forget(taken)
                count -= len(taken)
                found.append(taken)
                self._drop_stale(chunk)
                if not chunk.used and number != self._tail:
                    del self._chunks[number]
            number += 1
        while self._head < self._tail and self._head not in self._chunks:
            self._head += 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def entries(self) -> int:
        """Entries in the queue, stale ones included."""
        return sum(chunk.used for chunk in self._chunks.values())

    def _drop_stale(self, chunk: _Chunk) -> None:
        used = chunk.used
        live = self._stamp[chunk.slots[:used]] == chunk.seqs[:used]
        kept = int(np.count_nonzero(live))
        if kept < used:
            chunk.slots[:kept] = chunk.slots[:used][live]
            chunk.seqs[:kept] = chunk.seqs[:used][live]
            chunk.used = kept

    def _sweep_one(self) -> int:
        """Drop the stale entries of one chunk, and join it to the one before if both fit in one.

        Returns how many entries were looked at.
        """
        if self._sweep >= self._tail:
            self._sweep = self._head
        number, self._sweep = self._sweep, self._sweep + 1
        chunk = self._chunks.get(number)
        if chunk is None or number == self._tail:
            return 1
        seen = chunk.used + 1
        self._drop_stale(chunk)
        before = self._chunks.get(number - 1)
        if before is not None and before.used + chunk.used <= _CHUNK:
            # The joined chunk takes this chunk's number, so that runs of numbers stay dense behind the sweep.
            joined = np.empty((2, _CHUNK), np.int64)
            a, b = before.used, before.used + chunk.used
            joined[0, :a], joined[0, a:b] = before.slots[:a], chunk.slots[: chunk.used]
            joined[1, :a], joined[1, a:b] = before.seqs[:a], chunk.seqs[: chunk.used]
            self._chunks[number] = _Chunk(joined[0], joined[1], b)
            del self._chunks[number - 1]
        elif len(chunk.slots) > 2 * max(_CHUNK, chunk.used):
            chunk.slots, chunk.seqs = chunk.slots[: chunk.used].copy(), chunk.seqs[: chunk.used].copy()
        if number == self._head or self._head not in self._chunks:
            while self._head < self._tail and self._head not in self._chunks:
                self._head += 1
        return seen

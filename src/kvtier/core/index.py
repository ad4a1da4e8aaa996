"""Key to slot, for the blocks that are visible.

Split into 256 small tables by the first byte of the digest: a dict that grows, or that compacts after many
removals, copies itself, and for a million blocks that is a pause of a tenth of a second. `clear` costs the
same for any size: the old tables are dropped one at a time by later calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kvtier.core.ids import Key

_TABLES = 256


class Index:
    def __init__(self) -> None:
        self._tables: list[dict[Key, int]] = [{} for _ in range(_TABLES)]
        self._dropped: list[dict[Key, int]] = []

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def items(self) -> Iterator[tuple[Key, int]]:
        return chain.from_iterable(map(dict.items, filter(None, self._tables)))

    def get(self, key: Key) -> int | None:
        return self._tables[key[0]].get(key)

    def get_all(self, keys: Sequence[Key]) -> list[int | None]:
        tables = self._tables
        return [tables[key[0]].get(key) for key in keys]

    def run(self, keys: Sequence[Key], first: int) -> list[int]:
        """Slots of keys[first:] up to the first that is absent."""
        tables = self._tables
        found: list[int] = []
        for i in range(first, len(keys)):
            key = keys[i]
            slot = tables[key[0]].get(key)
            if slot is None:
                break
            found.append(slot)
        return found

    def add(self, keys: Iterable[Key], slots: Iterable[int]) -> None:
        tables = self._tables
        for key, slot in zip(keys, slots, strict=True):
            tables[key[0]][key] = slot
        if self._dropped:
            self._dropped.pop()

    def remove(self, keys: Iterable[Key], slots: Iterable[int]) -> list[Key]:
        """Remove each key that still stands for its slot; returns those."""
        tables = self._tables
        removed: list[Key] = []
        for key, slot in zip(keys, slots, strict=True):
            table = tables[key[0]]
            found = table.pop(key, None)
            if found == slot:
                removed.append(key)
            elif found is not None:
                table[key] = found
        return removed

    def clear(self) -> None:
        self._dropped.extend(table for table in self._tables if table)
        self._tables = [{} for _ in range(_TABLES)]

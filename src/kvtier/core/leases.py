"""The right to read or write a run of slots, given back exactly once.

A lease is linear: it is cut, handed on, or ended, never copied. Ending one twice is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtier.core.policy.base import Slots
from kvtier.core.slots import SlotTable
from kvtier.errors import CoreBug


class Lease:
    """`slots` of `table`, held for reading, or for writing where `writing`."""

    __slots__ = ("_book", "pinning", "slots", "table", "writing")

    def __init__(
        self, book: Leases, table: SlotTable, slots: Slots, *, writing: bool = False, pinning: bool = False
    ) -> None:
        self._book: Leases | None = book
        self.pinning = pinning
        """for reading, without being a use: not to be cut"""
        self.table = table
        self.slots = slots
        self.writing = writing

    def __len__(self) -> int:
        return len(self.slots)

    def extend(self, slots: Slots) -> None:
        """Take ready slots in at the end."""
        self._require_out(writing=False)
        self.table.lease(slots)
        self.slots = np.concatenate((self.slots, slots))

    def keep(self, first: int, last: int) -> None:
        """Give back all but slots[first:last]."""
        self._require_out(writing=False)
        self.table.release(np.concatenate((self.slots[:first], self.slots[last:])))
        self.slots = self.slots[first:last]

    def release(self) -> None:
        """End a lease for reading."""
        self._end(writing=False)
        if self.pinning:
            self.table.unpin(self.slots)
        else:
            self.table.release(self.slots)

    def settle(self) -> Slots:
        """End a lease for writing; the caller publishes or frees the slots at once."""
        self._end(writing=True)
        return self.slots

    def _require_out(self, *, writing: bool) -> None:
        if self._book is None or self.writing is not writing:
            raise CoreBug(f"lease of slots {self.slots.tolist()} is not out, or of the other kind")

    def _end(self, *, writing: bool) -> None:
        self._require_out(writing=writing)
        assert self._book is not None
        self._book.out.remove(self)
        self._book = None


class Leases:
    """All leases that are out."""

    def __init__(self) -> None:
        self.out: set[Lease] = set()

    def __len__(self) -> int:
        return len(self.out)

    def read(self, table: SlotTable, slots: Slots) -> Lease:
        table.lease(slots)
        return self._add(Lease(self, table, slots))

    def pin(self, table: SlotTable, slots: Slots) -> Lease:
        """A lease for reading that leaves the order of eviction as it is."""
        table.pin(slots)
        return self._add(Lease(self, table, slots, pinning=True))

    def write(self, table: SlotTable, slots: Slots) -> Lease:
        """A lease on slots that `take` just gave."""
        return self._add(Lease(self, table, slots, writing=True))

    def of(self, table: SlotTable) -> Iterator[Lease]:
        return (lease for lease in self.out if lease.table is table)

    def _add(self, lease: Lease) -> Lease:
        self.out.add(lease)
        return lease

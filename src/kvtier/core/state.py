"""The books that all parts of the core write in."""

from __future__ import annotations

from kvtier.core.counts import Counts
from kvtier.core.effects import Effect, Removed
from kvtier.core.groups import CoreConfig
from kvtier.core.ids import Key, RequestId, TierName
from kvtier.core.leases import Leases
from kvtier.core.limits import BAD_BLOCK_PAUSE_S, BAD_BLOCKS_MAX
from kvtier.core.slots import SlotTable
from kvtier.core.transfers import Transfers


class State:
    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.tables = [SlotTable(slots) for slots in config.class_slots]
        self.leases = Leases()
        self.transfers = Transfers()
        self.counts = Counts()
        self.tiers_up: set[TierName] = set()
        self.epoch = 0
        self._owners: dict[RequestId, int] = {}
        self._next_owner = 0
        self._bad: dict[Key, float] = {}
        """keys that failed their check, and until when nobody asks for them; the oldest first"""

    def owner(self, request: RequestId) -> int:
        """Ordinal of a request, for as long as it lives."""
        owner = self._owners.get(request)
        if owner is None:
            owner = self._owners[request] = self._next_owner
            self._next_owner += 1
        return owner

    def drop_owner(self, request: RequestId) -> None:
        self._owners.pop(request, None)

    @property
    def owners_count(self) -> int:
        return len(self._owners)

    def removed(self, keys: list[Key], out: list[Effect]) -> None:
        if keys:
            self.counts.evicted_blocks += len(keys)
            out.append(Removed(keys))

    def mark_bad(self, key: Key, now: float) -> None:
        self.counts.bad_blocks += 1
        self._bad.pop(key, None)
        self._bad[key] = now + BAD_BLOCK_PAUSE_S
        if len(self._bad) > BAD_BLOCKS_MAX:
            del self._bad[next(iter(self._bad))]

    def is_bad(self, key: Key, now: float) -> bool:
        until = self._bad.get(key)
        if until is None:
            return False
        if until <= now:
            del self._bad[key]
            return False
        return True

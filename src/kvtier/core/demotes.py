"""Demotions: what was stored goes on to the lower tiers, a bounded number of batches at a time.

A queue remembers slots with their generation, not leases: what is evicted before its turn is dropped, so a
slow tier never holds up a store. A queue never names more slots than there are: the oldest go first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvtier.core.effects import Effect, StartTier
from kvtier.core.ids import Key, TierName
from kvtier.core.limits import DEMOTE_BATCHES_LOOKED_AT_MAX, DEMOTES_IN_FLIGHT_MAX, TIER_BATCH_BLOCKS
from kvtier.core.policy.base import Generations, Slots
from kvtier.core.slots import SlotTable
from kvtier.core.state import State
from kvtier.core.tables import READY
from kvtier.core.transfers import Kind, Transfer

_Entry = tuple[int, Slots, Generations]
"""size class, slots, their generations"""


class Demotes:
    def __init__(self, state: State) -> None:
        self._s = state
        self._queues: dict[TierName, deque[_Entry]] = {t.name: deque() for t in state.config.tiers if t.write}
        self._out: dict[TierName, int] = dict.fromkeys(self._queues, 0)
        self._queued: dict[TierName, int] = dict.fromkeys(self._queues, 0)
        """slots in each queue"""
        self._queued_max = sum(state.config.class_slots)

    @property
    def queued(self) -> bool:
        """True while a tier that is up has something to be demoted to it."""
        return any(queue for name, queue in self._queues.items() if name in self._s.tiers_up)

    def add(self, size_class: int, slots: Slots, out: list[Effect], now: float) -> None:
        """These slots have just become ready."""
        for name, queue in self._queues.items():
            queue.append((size_class, slots, self._s.tables[size_class].generation[slots]))
            self._queued[name] += len(slots)
            while self._queued[name] > self._queued_max:
                dropped = len(queue.popleft()[1])
                self._queued[name] -= dropped
                self._s.counts.demotes_dropped_blocks += dropped
            self.feed(name, now, out)

    def feed(self, tier: TierName, now: float, out: list[Effect]) -> None:
        """Start as many batches as may be out; leaves the rest for later where much of the queue is stale."""
        queue = self._queues.get(tier)
        if queue is None or tier not in self._s.tiers_up:
            return
        for _ in range(DEMOTE_BATCHES_LOOKED_AT_MAX):
            if not queue or self._out[tier] >= DEMOTES_IN_FLIGHT_MAX:
                return
            size_class, slots = self._next_batch(tier)
            if len(slots):
                self._start(tier, size_class, slots, now, out)

    def feed_all(self, now: float, out: list[Effect]) -> None:
        for name in self._queues:
            self.feed(name, now, out)

    def _next_batch(self, tier: TierName) -> tuple[int, Slots]:
        """The next slots of one size class that still hold what was queued."""
        queue = self._queues[tier]
        size_class = queue[0][0]
        table = self._s.tables[size_class]
        batch: list[Slots] = []
        room = TIER_BATCH_BLOCKS
        while queue and room and queue[0][0] == size_class:
            _, slots, generations = queue.popleft()
            if len(slots) > room:
                queue.appendleft((size_class, slots[room:], generations[room:]))
                slots, generations = slots[:room], generations[:room]
            room -= len(slots)
            self._queued[tier] -= len(slots)
            same = (table.generation[slots] == generations) & (table.state[slots] == READY)
            kept = slots[same]
            self._s.counts.demotes_dropped_blocks += len(slots) - len(kept)
            batch.append(kept)
        return size_class, batch[0] if len(batch) == 1 else np.concatenate(batch)

    def _start(self, tier: TierName, size_class: int, slots: Slots, now: float, out: list[Effect]) -> None:
        s = self._s
        table: SlotTable = s.tables[size_class]
        keys: list[Key] = [key for slot in slots.tolist() if (key := table.key[slot]) is not None]
        assert len(keys) == len(slots), "a ready slot has no key"
        lease = s.leases.pin(table, slots)
        transfer = Transfer(s.transfers.new_id(), Kind.DEMOTE, lease, s.epoch, now, keys, tier=tier)
        s.transfers.start(transfer)
        self._out[tier] += 1
        out.append(StartTier(tier, transfer.id, "demote", size_class, keys, slots.tolist()))

    def ended(self, transfer: Transfer, causes: Sequence[str]) -> None:
        self._out[transfer.tier] -= 1
        done = sum(cause == "ok" for cause in causes)
        self._s.counts.demoted_blocks += done
        self._s.counts.demotes_failed_blocks += len(causes) - done
        transfer.lease.release()

    def clear(self) -> None:
        for name, queue in self._queues.items():
            queue.clear()
            self._queued[name] = 0

"""The books that all parts of the core write in."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtier.core.counts import Counts
from kvtier.core.effects import Effect, Removed
from kvtier.core.groups import CoreConfig
from kvtier.core.ids import Key, RequestId, TierName
from kvtier.core.leases import Leases
from kvtier.core.limits import BAD_BLOCK_PAUSE_S, BAD_BLOCKS_MAX
from kvtier.core.policy.base import Generations, Slots
from kvtier.core.slots import SlotTable
from kvtier.core.transfers import Transfers


@dataclass(slots=True)
class Prompt:
    """What a living request used of host memory."""

    owner: int
    """ordinal of the request"""
    used: list[tuple[SlotTable, Slots, Generations]] = field(default_factory=list)
    """in the order of the prompt: slots, and their generations then"""

    def add(self, table: SlotTable, slots: Slots) -> None:
        if len(slots):
            self.used.append((table, slots, table.generation[slots]))


class State:
    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.tables = [SlotTable(slots) for slots in config.class_slots]
        self.leases = Leases()
        self.transfers = Transfers()
        self.counts = Counts()
        self.tiers_up: set[TierName] = set()
        self.epoch = 0
        self._prompts: dict[RequestId, Prompt] = {}
        self._next_owner = 0
        self._bad: dict[Key, float] = {}
        """keys that failed their check, and until when nobody asks for them; the oldest first"""

    def prompt(self, request: RequestId) -> Prompt:
        prompt = self._prompts.get(request)
        if prompt is None:
            prompt = self._prompts[request] = Prompt(self._next_owner)
            self._next_owner += 1
        return prompt

    def rest(self, request: RequestId) -> None:
        """A request stops running: from now on its blocks are given up from the end of its prompt.

        It was stored piece by piece, so until now its beginning was the oldest.
        """
        prompt = self._prompts.get(request)
        if prompt is None:
            return
        used, prompt.used = prompt.used, []
        for table in self.tables:
            parts = [(slots, generation) for of, slots, generation in used if of is table]
            if len(parts) > 1:
                slots = np.concatenate([part[0] for part in parts])
                table.rest(slots, np.concatenate([part[1] for part in parts]))

    def forget(self, request: RequestId) -> None:
        self._prompts.pop(request, None)

    @property
    def prompts_count(self) -> int:
        return len(self._prompts)

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

    @property
    def bad_count(self) -> int:
        return len(self._bad)

    def is_bad(self, key: Key, now: float) -> bool:
        until = self._bad.get(key)
        if until is None:
            return False
        if until <= now:
            del self._bad[key]
            return False
        return True

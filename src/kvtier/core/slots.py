"""The slots of one size class of the region: who is in them, and who may touch them.

Rules: a slot leaves `FREE` only through `take`, and becomes free or ready only through `publish`, `free` or
`evict`. Everything here is one vector operation over a run of slots. The generation of a slot grows each
time it is freed, so that what was said about an earlier tenant is told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.core.ids import Key
from kvtier.core.index import Index
from kvtier.core.policy.base import Generations, Mask, Policy, Slots
from kvtier.core.policy.lru import LRU
from kvtier.core.tables import FREE, QUARANTINED, READY, WRITING
from kvtier.errors import CoreBug

NO_OWNER = -1


class SlotTable:
    """`capacity` slots of one size class."""

    def __init__(self, capacity: int, policy: Policy | None = None) -> None:
        self.capacity = capacity
        self.index = Index()
        self.policy: Policy = policy if policy is not None else LRU(capacity)
        self.state = np.zeros(capacity, np.uint8)
        self.readers = np.zeros(capacity, np.int32)
        self.generation = np.zeros(capacity, np.int32)
        self.owner = np.full(capacity, NO_OWNER, np.int64)
        """ordinal of the request that used the slot last: its own stores do not evict it"""
        self.writer = np.zeros(capacity, np.int64)
        """the transfer that writes the slot, while it is `WRITING`"""
        self.pinned = np.zeros(capacity, np.bool_)
        """read by demotions alone: it keeps its place in the policy, but is not evicted"""
        self.pinned_count = 0
        self.promoted = np.zeros(capacity, np.bool_)
        """brought from a lower tier and not loaded yet"""
        self.promoted_held = 0
        """slots that are `promoted` and held: written by a promotion, or leased"""
        self.key: list[Key | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Slots that `take` could give: free ones, and those that may be evicted."""
        return len(self._free) + len(self.policy) - self.pinned_count

    def take(self, keys: Sequence[Key], owner: int) -> tuple[Slots, list[Key]]:
        """Slots for as many of `keys` as there is room for, `WRITING`; also the keys that were evicted.

        Never evicts what `owner` used last. Costs nothing when everything is leased.
        """
        removed: list[Key] = []
        short = len(keys) - len(self._free)
        if short > 0 and len(self.policy) > self.pinned_count:
            victims = self.policy.victims(short, lambda slots: self._spared(slots, owner))
            removed = self._evict(victims)
        count = min(len(keys), len(self._free))
        if not count:
            return np.empty(0, np.int64), removed
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        slots = np.array(taken, np.int64)
        self.state[slots] = WRITING
        self.owner[slots] = owner
        kept = keys[:count]
        for slot, key in zip(taken, kept, strict=True):
            self.key[slot] = key
        self.index.add(kept, taken)
        return slots, removed

    def publish(self, slots: Slots) -> None:
        """`WRITING` to `READY` with no reader."""
        self._require(slots, WRITING, "published")
        self.state[slots] = READY
        self.policy.touch(slots)

    def free(self, slots: Slots) -> None:
        """`WRITING` or `QUARANTINED` to `FREE`: the write did not end well."""
        if len(slots):
            state = self.state[slots]
            if not bool(((state == WRITING) | (state == QUARANTINED)).all()):
                raise CoreBug(f"slots {slots.tolist()} freed in states {state.tolist()}")
            self._drop_promoted(slots)
            self._release_to_free(slots)

    def quarantine(self, slots: Slots) -> None:
        """`WRITING` to `QUARANTINED`: not visible, and not free until the writer cannot write any more."""
        self._require(slots, WRITING, "quarantined")
        self.state[slots] = QUARANTINED
        self._unindex(slots.tolist())

    def lease(self, slots: Slots) -> None:
        """One more reader on each; none of them can be evicted until `release`."""
        self._require(slots, READY, "leased")
        self.policy.forget(slots)
        if self.pinned_count:
            self.pinned_count -= int(np.count_nonzero(self.pinned[slots]))
            self.pinned[slots] = False
        self.readers[slots] += 1

    def pin(self, slots: Slots) -> None:
        """One more reader on each, which is not a use: none can be evicted until `unpin`, all keep their place."""
        self._require(slots, READY, "pinned")
        readers = self.readers[slots]
        idle = slots[readers == 0]
        self.readers[slots] = readers + 1
        self.pinned[idle] = True
        self.pinned_count += len(idle)

    def unpin(self, slots: Slots) -> None:
        readers = self.readers[slots] - 1
        self.readers[slots] = readers
        if int(readers.min()) < 0:
            raise CoreBug(f"slots {slots.tolist()} unpinned more often than pinned")
        idle = slots[readers == 0]
        placed = self.pinned[idle]
        self.pinned[idle] = False
        self.pinned_count -= int(np.count_nonzero(placed))
        self.policy.touch(idle[~placed])  # leased meanwhile, and released

    def release(self, slots: Slots) -> None:
        """One reader less on each; those without readers are the most recently used from now on."""
        if not len(slots):
            return
        self.readers[slots] -= 1
        readers = self.readers[slots]
        if int(readers.min()) < 0:
            raise CoreBug(f"slots {slots.tolist()} released more often than leased")
        idle = slots[readers == 0]
        self._drop_promoted(idle)
        self.policy.touch(idle)

    def use(self, slots: Slots, owner: int) -> None:
        """Of these ready slots, those that are not leased become the most recently used."""
        self.owner[slots] = owner
        self.policy.touch(slots[(self.readers[slots] == 0) | self.pinned[slots]])

    def rest(self, slots: Slots, generation: Generations) -> None:
        """Of these slots, in the order of a prompt, those still idle and of that generation are recent anew."""
        idle = ((self.readers[slots] == 0) & (self.state[slots] == READY)) | self.pinned[slots]
        self.policy.touch(slots[idle & (self.generation[slots] == generation)])

    def mark_promoted(self, slots: Slots) -> None:
        self.promoted[slots] = True
        self.promoted_held += len(slots)

    def settle_promoted(self, slots: Slots) -> None:
        """These were loaded, or nobody waits for them: they no longer count as held by promotions."""
        self._drop_promoted(slots)

    def forget_all(self) -> None:
        """Nothing that is here is found any more; the slots are reclaimed as others need them."""
        self.index.clear()

    def _spared(self, slots: Slots, owner: int) -> Mask:
        spared: Mask = self.owner[slots] == owner
        return spared | self.pinned[slots] if self.pinned_count else spared

    def _require(self, slots: Slots, state: int, verb: str) -> None:
        if not bool((self.state[slots] == state).all()):
            raise CoreBug(f"slots {slots.tolist()} {verb} in states {self.state[slots].tolist()}")

    def _evict(self, slots: Slots) -> list[Key]:
        if self.readers[slots].any() or (self.state[slots] != READY).any():
            raise CoreBug(f"slots {slots.tolist()} evicted while in use")
        self._drop_promoted(slots)
        return self._release_to_free(slots)

    def _drop_promoted(self, slots: Slots) -> None:
        marked = slots[self.promoted[slots]]
        if len(marked):
            self.promoted[marked] = False
            self.promoted_held -= len(marked)

    def _release_to_free(self, slots: Slots) -> list[Key]:
        self.state[slots] = FREE
        self.generation[slots] += 1
        self.owner[slots] = NO_OWNER
        freed = slots.tolist()
        self._free.extend(freed)
        return self._unindex(freed)

    def _unindex(self, slots: list[int]) -> list[Key]:
        """Forget the keys of these slots; returns those that were visible until now."""
        key_of = self.key
        named = [slot for slot in slots if key_of[slot] is not None]
        keys = [key_of[slot] for slot in named]
        for slot in named:
            key_of[slot] = None
        return self.index.remove(keys, named)  # type: ignore[arg-type] # none of them is None

    def check(self) -> None:
        """Every account of this table adds up."""
        states = self.state.tolist()
        readers = self.readers.tolist()
        free = [slot for slot, state in enumerate(states) if state == FREE]
        assert sorted(self._free) == free, "free list and states differ"
        for slot, (state, count) in enumerate(zip(states, readers, strict=True)):
            assert not count or state == READY, f"slot {slot} has {count} readers in state {state}"
        for key, slot in self.index.items():
            assert self.key[slot] == key, f"index and slot {slot} disagree"
            assert states[slot] in (WRITING, READY), f"slot {slot} is visible in state {states[slot]}"
        pinned = self.pinned.tolist()
        assert self.pinned_count == sum(pinned), "pinned slots miscounted"
        assert all(count for count, pin in zip(readers, pinned, strict=True) if pin), "a pinned slot has no reader"
        idle = sum(state == READY and not count for state, count in zip(states, readers, strict=True))
        assert len(self.policy) == idle + self.pinned_count, f"policy holds {len(self.policy)} slots, {idle} are idle"
        assert self.promoted_held == sum(self.promoted.tolist()), "promoted slots miscounted"

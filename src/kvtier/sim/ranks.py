"""Played ranks: they run batches one after the other, and copies beside them in two queues.

As the real ones do: a batch first settles the stores it must not overtake (queued: dropped, running: waited
for), then its loads are queued, which wait for all compute given before; its stores wait for its own compute.
End notices travel with the batch's result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier.core.ids import RequestId, TransferId
from kvtier.engine.work import StepWork
from kvtier.sim.memory import Copy, Memory
from kvtier.sim.world import World
from kvtier.transfer.base import SKIP, RankEnd, RankTransfer, Way

COPIES_AT_ONCE = 2
"""copies of one direction that run side by side: later ones may end before earlier ones"""


@dataclass(slots=True)
class Write:
    """Compute that fills a page: `identity` is None while the page is not full."""

    page: int
    identity: bytes | None
    weights: int


@dataclass(slots=True)
class Batch:
    number: int
    work: StepWork
    writes: list[Write]
    verify: Callable[[int], None]
    """look at what this batch computes on, on this rank"""
    seconds: float
    ranks_left: int = 0
    ends: list[RankEnd] = field(default_factory=list)
    loads: list[tuple[RequestId, bool]] = field(default_factory=list)


@dataclass(slots=True)
class _Load:
    left: set[TransferId]
    ok: bool = True


class PlayedRank:
    def __init__(self, world: World, rank: int, device: Memory, hosts: Sequence[Memory], pages_per_row: int) -> None:
        self.rank = rank
        self._w = world
        self._device, self._hosts = device, hosts
        self._per_row = pages_per_row
        self._batches: deque[tuple[Batch, Callable[[Batch], None]]] = deque()
        self._busy = False
        self._queues: dict[Way, deque[RankTransfer]] = {way: deque() for way in Way}
        self._running: dict[TransferId, tuple[RankTransfer, Copy]] = {}
        self._ends: list[RankEnd] = []
        self._loads: dict[RequestId, _Load] = {}
        self._request_of: dict[TransferId, RequestId] = {}
        self._loads_done: list[tuple[RequestId, bool]] = []
        self.stopped = False
        """no longer runs batches or starts copies"""
        self.stuck = False
        """its copies do not end: a wedged device"""

    def give(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        self._batches.append((batch, done))
        self._next_batch()

    @property
    def copying(self) -> bool:
        return bool(self._running)

    @property
    def idle(self) -> bool:
        return not (self._running or self._batches or self._busy or any(self._queues.values()))

    def drop_queued(self) -> None:
        """Close: what is queued never runs."""
        self.stopped = True
        for queue in self._queues.values():
            for transfer in queue:
                self._ended(transfer, ok=False, cause="cancelled")
            queue.clear()

    def take_ends(self) -> list[RankEnd]:
        ends, self._ends = self._ends, []
        return ends

    # A batch.

    def _next_batch(self) -> None:
        if self._busy or not self._batches or self.stopped:
            return
        if self.stuck and self._running.keys() & set(self._batches[0][0].work.cancels):
            return  # the fence of a wedged device does not end: the engine stands still with it
        self._busy = True
        batch, done = self._batches.popleft()
        work = batch.work
        self._fence(set(work.cancels))
        for request in work.spoiled:
            if request in self._loads:
                self._loads[request].ok = False
        for load in work.loads:
            self._loads[load.request] = _Load({transfer.id for transfer in load.transfers})
            for transfer in load.transfers:
                self._request_of[transfer.id] = load.request
                self._queues[Way.LOAD].append(transfer)
            if load.request in work.spoiled:
                self._loads[load.request].ok = False
        self._start_copies(Way.LOAD)
        who = f"batch {batch.number}"
        cells = list(dict.fromkeys((self.rank, write.page) for write in batch.writes))
        self._device.begin_write(who, cells)
        self._fill(batch, 0)

        def computed() -> None:
            self._fill(batch, 1)
            self._device.end_write(who, cells)
            batch.verify(self.rank)
            self._queues[Way.STORE].extend(work.stores)
            self._start_copies(Way.STORE)
            batch.ends += self.take_ends()
            batch.loads += self._loads_done
            self._loads_done = []
            self._busy = False
            batch.ranks_left -= 1
            if not batch.ranks_left:
                done(batch)
            self._next_batch()

        self._w.after(batch.seconds * self._w.between(0.7, 1.3), computed)

    def _fill(self, batch: Batch, half: int) -> None:
        for write in batch.writes:
            value = 0
            if write.identity is not None:
                value = self._w.pattern(write.identity, write.weights, self.rank)[half]
            self._device.words[self.rank, write.page, 0, half] = value

    def _fence(self, ids: set[TransferId]) -> None:
        queue = self._queues[Way.STORE]
        for transfer in [t for t in queue if t.id in ids]:
            queue.remove(transfer)
            self._w.coverage["queued store cancelled"] += 1
            self._ended(transfer, ok=False, cause="cancelled")
        for number in sorted(ids & self._running.keys()):
            self._w.coverage["running store waited for"] += 1
            self._copied(number)

    # Copies.

    def _start_copies(self, way: Way) -> None:
        queue = self._queues[way]
        running = sum(transfer.direction is way for transfer, _ in self._running.values())
        while queue and running < COPIES_AT_ONCE and not self.stopped:
            transfer = queue.popleft()
            if self._w.fault(f"{way} refused", 0.02):
                self._ended(transfer, ok=False, cause="refused")
                continue
            running += 1
            pages = [
                ((page, 0), (slot, at))
                for i, slot in enumerate(transfer.slots)
                for at, page in enumerate(transfer.blocks[i * self._per_row : (i + 1) * self._per_row])
                if page != SKIP
            ]
            who = f"{way} {transfer.id}"
            host = self._hosts[transfer.size_class]
            if way is Way.STORE:
                copy = Copy(who, self.rank, self._device, host, pages)
            else:
                copy = Copy(who, self.rank, host, self._device, [(row, page) for page, row in pages])
            self._running[transfer.id] = (transfer, copy)
            slow = self._w.fault(f"slow {way}", 0.05)
            seconds = self._w.between(0.2, 1.5) if slow else self._w.between(0.001, 0.04)
            self._w.after(seconds, partial(self._copied, transfer.id))

    def _copied(self, number: TransferId) -> None:
        if number not in self._running:
            return  # a fence had waited for it
        if self.stuck:
            self._w.after(1.0, lambda: self._copied(number))
            return
        transfer, copy = self._running.pop(number)
        whole = not self._w.fault(f"{transfer.direction} failed", 0.04)
        copy.end(whole=whole)
        self._ended(transfer, ok=whole, cause="ok" if whole else "device error")
        self._start_copies(transfer.direction)

    def _ended(self, transfer: RankTransfer, *, ok: bool, cause: str) -> None:
        self._ends.append(RankEnd(transfer.id, ok, cause))
        request = self._request_of.pop(transfer.id, None)
        if request is None:
            return
        load = self._loads[request]
        load.left.discard(transfer.id)
        load.ok = load.ok and ok
        if not load.left:
            del self._loads[request]
            self._loads_done.append((request, load.ok))

"""Performs what the core wants done, and brings back what came of it.

Plain single-threaded code that takes the time as an argument: the store gives it a lock and a clock, the
simulator gives it played ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.ids import Key, RequestId, TierName, TransferId
from kvtier.core.store import StoreCore
from kvtier.engine.tier_port import TierPort
from kvtier.engine.work import LoadWork, StepWork
from kvtier.errors import CoreBug
from kvtier.transfer.base import SKIP, RankEnd, RankTransfer, Way


class Driver:
    """One core, its tiers, and the work that waits for the ranks."""

    def __init__(self, core: StoreCore, ports: Sequence[TierPort], *, engine_blocks_per_block: int) -> None:
        self.core = core
        self.ports: dict[TierName, TierPort] = {port.name: port for port in ports}
        self._per_block = engine_blocks_per_block
        self._loads: dict[RequestId, list[RankTransfer]] = {}
        """loads that no step has taken yet"""
        self._stores: list[RankTransfer] = []
        self._cancels: list[TransferId] = []
        self._spoiled: list[RequestId] = []
        self._stores_out: dict[RequestId, set[TransferId]] = {}
        self._loads_out: set[RequestId] = set()
        self._answer: int | None = 0
        self._taken = 0
        self._blocks: Sequence[Sequence[int]] = ()
        """device blocks that the event being handled speaks of"""
        self._first = 0
        self._from_tokens = 0

    # The engine's side.

    def lookup(
        self, request: RequestId, keys: tuple[Sequence[Key], ...], device_tokens: int, now: float
    ) -> int | None:
        self._feed(ev.Lookup(now, request, keys, device_tokens))
        return self._answer

    def load(
        self, request: RequestId, from_tokens: int, to_tokens: int, blocks: Sequence[Sequence[int]], now: float
    ) -> None:
        self._blocks, self._first, self._from_tokens = blocks, 0, from_tokens
        self._feed(ev.Load(now, request, from_tokens, to_tokens))

    def offer(
        self, request: RequestId, group: int, first: int, keys: Sequence[Key], blocks: Sequence[int], now: float
    ) -> int:
        if len(blocks) != len(keys) * self._per_block:
            raise CoreBug(f"{len(keys)} keys offered with {len(blocks)} device blocks, {self._per_block} each")
        self._blocks, self._first = (blocks,), first
        self._feed(ev.Offer(now, request, group, first, keys))
        return self._taken

    def preempted(self, request: RequestId, now: float) -> None:
        self._feed(ev.Preempted(now, request))

    def gone(self, request: RequestId, now: float) -> None:
        self._feed(ev.RequestGone(now, request))

    def reset(self, now: float) -> None:
        # A load that no rank has seen yet is spoiled as well: its engine waits for a report all the same.
        self._spoiled.extend(sorted(self._loads_out))
        self._feed(ev.Reset(now))

    def tick(self, now: float) -> None:
        self._feed(ev.Tick(now))

    def take_work(self) -> StepWork:
        loads = [LoadWork(request, transfers) for request, transfers in self._loads.items()]
        work = StepWork(loads, self._stores, self._cancels, self._spoiled)
        self._loads, self._stores, self._cancels, self._spoiled = {}, [], [], []
        return work

    def ranks_ended(self, ends: Iterable[RankEnd], now: float) -> None:
        for end in ends:
            self._feed(ev.RankEnded(now, end.id, end.ok))

    def ranks_lost(self, now: float) -> None:
        self._feed(ev.RanksLost(now))
        self._loads, self._stores, self._cancels = {}, [], []

    def stores_out(self, request: RequestId) -> list[TransferId]:
        return sorted(self._stores_out.get(request, ()))

    @property
    def rank_transfers_out(self) -> bool:
        return bool(self._stores_out or self._loads_out)

    # The tiers' side.

    def pump(self, now: float) -> None:
        """Take in what the tiers have to say. Never blocks."""
        for port in self.ports.values():
            for event in port.pump(now):
                self._feed(event)
        self._feed(ev.Tick(now))

    # The end.

    def close_begins(self, now: float) -> None:
        self._feed(ev.Close(now))

    def cancel_all(self, now: float) -> None:
        self._feed(ev.CancelAll(now))

    def feed_all(self, events: Iterable[ev.Event]) -> None:
        for event in events:
            self._feed(event)

    def abandon(self, now: float) -> None:
        self._feed(ev.Abandon(now))

    # Inside.

    def _feed(self, event: ev.Event) -> None:
        """Handle an event, perform its effects, and handle what comes of them at once."""
        todo: deque[ev.Event] = deque((event,))
        while todo:
            current = todo.popleft()
            for effect in self.core.handle(current):
                todo.extend(self._perform(effect, current.now))

    def _perform(self, effect: fx.Effect, now: float) -> Sequence[ev.Event]:
        match effect:
            case fx.Answered():
                self._answer = effect.tokens
            case fx.Offered():
                self._taken = effect.taken
            case fx.StartStore():
                self._start_store(effect)
            case fx.StartLoad():
                self._start_load(effect)
            case fx.StoreEnded():
                out = self._stores_out[effect.request]
                out.discard(effect.transfer)
                if not out:
                    del self._stores_out[effect.request]
            case fx.LoadEnded():
                self._loads_out.discard(effect.request)
            case fx.CancelRank():
                return self._cancel_rank(effect.transfers, now)
            case fx.Ask():
                return self.ports[effect.tier].ask(effect, now)
            case fx.StartTier():
                return self.ports[effect.tier].submit(effect, now)
            case fx.CancelTier():
                return self.ports[effect.tier].cancel(effect.transfer, now)
            case fx.Removed():
                pass  # nobody is told yet what left host memory
            case _:
                raise CoreBug(f"an effect that nobody performs: {effect!r}")
        return ()

    def _start_store(self, effect: fx.StartStore) -> None:
        n = self._per_block
        offered = self._blocks[0]
        ids: list[int] = []
        for block in effect.blocks:
            at = (block - self._first) * n
            ids.extend(offered[at : at + n])
        size_class = self.core.config.groups[effect.group].size_class
        self._stores.append(RankTransfer(effect.transfer, Way.STORE, size_class, ids, effect.slots))
        self._stores_out.setdefault(effect.request, set()).add(effect.transfer)

    def _start_load(self, effect: fx.StartLoad) -> None:
        n = self._per_block
        group = self.core.config.groups[effect.group]
        begin = effect.first * n
        ids = list(self._blocks[effect.group][begin : begin + len(effect.slots) * n])
        ids.extend([SKIP] * (len(effect.slots) * n - len(ids)))  # the last block may end behind what was allocated
        on_device = min(len(ids), self._from_tokens // (group.block_tokens // n) - begin)
        ids[: max(0, on_device)] = [SKIP] * max(0, on_device)
        transfer = RankTransfer(effect.transfer, Way.LOAD, group.size_class, ids, effect.slots)
        self._loads.setdefault(effect.request, []).append(transfer)
        self._loads_out.add(effect.request)

    def _cancel_rank(self, transfers: Sequence[TransferId], now: float) -> list[ev.Event]:
        """What no rank has seen yet ends here; the ranks are told of the others."""
        waiting = [*self._stores, *(t for loads in self._loads.values() for t in loads)]
        unseen = {t.id for t in waiting} & set(transfers)
        self._stores = [t for t in self._stores if t.id not in unseen]
        for request, loads in list(self._loads.items()):
            self._loads[request] = [t for t in loads if t.id not in unseen]
            if not self._loads[request]:
                del self._loads[request]
        self._cancels.extend(t for t in transfers if t not in unseen)
        return [ev.RankEnded(now, t, ok=False) for t in sorted(unseen) for _ in range(self.core.config.ranks)]

"""The pure core: events in, effects out.

Rules: it reads no clock, draws no random number, does not log, lock, or see a tensor, a file or a socket.
Every effect that starts something ends in exactly one event (one a rank), or is abandoned at close. A slot
becomes free or ready only through the end of the transfer that holds its lease. What comes from outside and
pairs with nothing is counted and ignored; a rule of its own that is broken is a `CoreBug`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.counts import Counts
from kvtier.core.demotes import Demotes
from kvtier.core.effects import Effect
from kvtier.core.events import Event
from kvtier.core.groups import CoreConfig
from kvtier.core.ids import RequestId, TierName, TransferId
from kvtier.core.lookups import Lookups, Wait
from kvtier.core.policy.base import Slots
from kvtier.core.slots import SlotTable
from kvtier.core.state import State
from kvtier.core.story import Story
from kvtier.core.tables import READY, Move, Phase
from kvtier.core.transfers import Kind, Transfer
from kvtier.errors import CoreBug

LOST = "lost"
BAD_CAUSES = frozenset(("checksum", "foreign", "short"))


@dataclass(slots=True)
class _LoadOut:
    """A request's load: one transfer a group."""

    left: int
    ok: bool
    epoch: int
    gone: bool = False
    """its request is gone: only its end is still told"""


class StoreCore:
    """Keys, slots, leases and transfers of one engine. `handle` is the only way in."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.phase = Phase.ADMITTING
        self.story = Story()
        self._s = State(config)
        self._lookups = Lookups(self._s)
        self._demotes = Demotes(self._s)
        self._loads: dict[RequestId, _LoadOut] = {}
        self._no_hits: set[RequestId] = set()
        """requests whose load failed: nothing is offered to them again, or the engine would loop"""
        self._handlers: dict[type[Event], Callable[[Any, list[Effect]], None]] = {
            ev.Lookup: self._lookup,
            ev.Load: self._load,
            ev.Offer: self._offer,
            ev.RequestGone: self._request_gone,
            ev.Preempted: self._preempted,
            ev.Reset: self._reset,
            ev.RankEnded: self._rank_ended,
            ev.RanksLost: self._ranks_lost,
            ev.TierAnswered: self._tier_answered,
            ev.TierEnded: self._tier_ended,
            ev.TierUp: self._tier_up,
            ev.TierLost: self._tier_lost,
            ev.TierDead: self._tier_dead,
            ev.Tick: self._tick,
            ev.Close: self._close,
            ev.CancelAll: self._cancel_all,
            ev.Abandon: self._abandon,
        }

    def handle(self, event: Event) -> list[Effect]:
        out: list[Effect] = []
        self._handlers[type(event)](event, out)
        self.story.add(event, out)
        return out

    # What others may read.

    @property
    def counts(self) -> Counts:
        return self._s.counts

    @property
    def leases_out(self) -> int:
        return len(self._s.leases)

    @property
    def transfers_out(self) -> int:
        return len(self._s.transfers)

    def transfer(self, transfer: TransferId) -> Transfer | None:
        return self._s.transfers.get(transfer)

    @property
    def requests_known(self) -> int:
        """Requests that something is remembered of."""
        return len({*self._loads, *self._no_hits}) + self._s.prompts_count + len(self._lookups)

    @property
    def tables(self) -> list[SlotTable]:
        return self._s.tables

    @property
    def tiers_up(self) -> frozenset[TierName]:
        return frozenset(self._s.tiers_up)

    @property
    def settled(self) -> bool:
        """Nothing is out, and nothing waits for a tier that is up."""
        return not len(self._s.transfers) and not self._demotes.queued

    # The engine.

    def _lookup(self, e: ev.Lookup, out: list[Effect]) -> None:
        if self.phase is not Phase.ADMITTING or e.request in self._no_hits or e.request in self._loads:
            out.append(fx.Answered(e.request, 0))
            return
        wait = self._lookups.get(e.request)
        if wait is not None and e.device_tokens < wait.device_tokens:
            # The device lost blocks while it waited: what is needed now begins earlier.
            self._give_back(e.request, out)
            wait = None
        if wait is None:
            wait = self._lookups.begin(e.request, e.keys, e.device_tokens, e.now)
            self._lookups.advance(wait, e.now, out)
        elif wait.tokens is not None:
            self._lookups.reopen(wait)
            self._lookups.advance(wait, e.now, out)
        elif e.now >= wait.deadline or not (wait.asks or wait.promoted):
            self._lookups.advance(wait, e.now, out)
        out.append(fx.Answered(e.request, wait.tokens))

    def _load(self, e: ev.Load, out: list[Effect]) -> None:
        wait = self._lookups.take(e.request)
        if e.to_tokens <= e.from_tokens:
            if wait is not None:
                self._drop(wait, out)
            return
        if self.phase is not Phase.ADMITTING:
            # What the lookup had leased was given back when the close began.
            out.append(fx.LoadEnded(e.request, ok=False))
            return
        if wait is None or wait.tokens is None or e.to_tokens > wait.tokens or e.request in self._loads:
            raise CoreBug(f"load of tokens [{e.from_tokens}, {e.to_tokens}) of {e.request!r} that no lookup answered")
        self._leave(wait, out)
        load = _LoadOut(0, ok=True, epoch=self._s.epoch)
        for number, run in enumerate(wait.runs):
            first = max(run.first, e.from_tokens // run.group.block_tokens)
            last = max(first, -(-e.to_tokens // run.group.block_tokens))
            run.lease.keep(first - run.first, last - run.first)
            if not len(run.lease):
                run.lease.release()
                continue
            self._start_load(e, number, first, wait, out)
            load.left += 1
        if not load.left:
            raise CoreBug(f"load of tokens [{e.from_tokens}, {e.to_tokens}) of {e.request!r} needs no block")
        self._loads[e.request] = load

    def _start_load(self, e: ev.Load, group: int, first: int, wait: Wait, out: list[Effect]) -> None:
        s = self._s
        run = wait.runs[group]
        slots = run.lease.slots
        s.prompt(e.request).add(run.table, slots)
        s.counts.loaded_blocks += len(slots)
        s.counts.loaded_from_tiers_blocks += int(np.count_nonzero(run.table.promoted[slots]))
        run.table.settle_promoted(slots)
        keys = list(run.keys[first : first + len(slots)])
        transfer = Transfer(
            s.transfers.new_id(), Kind.LOAD, run.lease, s.epoch, e.now, keys, e.request, ranks_left=self.config.ranks
        )
        s.transfers.start(transfer)
        out.append(fx.StartLoad(transfer.id, e.request, group, first, slots.tolist()))

    def _offer(self, e: ev.Offer, out: list[Effect]) -> None:
        s = self._s
        if self.phase is not Phase.ADMITTING:
            out.append(fx.Offered(e.request, e.group, len(e.keys)))
            return
        table = s.tables[self.config.groups[e.group].size_class]
        prompt = s.prompt(e.request)
        found = table.index.get_all(e.keys)
        missing = [i for i, slot in enumerate(found) if slot is None]
        if len(missing) < len(found):
            present = np.array([slot for slot in found if slot is not None], np.int64)
            table.use(present[table.state[present] == READY], prompt.owner)
        taken = len(e.keys)
        if missing:
            keys = [e.keys[i] for i in missing]
            slots, removed = table.take(keys, prompt.owner)
            s.removed(removed, out)
            for i, slot in zip(missing, slots.tolist(), strict=False):
                found[i] = slot
            if len(slots) < len(missing):
                taken = missing[len(slots)]
                s.counts.declined_blocks += len(missing) - len(slots)
            if len(slots):
                lease = s.leases.write(table, slots)
                transfer = Transfer(
                    s.transfers.new_id(),
                    Kind.STORE,
                    lease,
                    s.epoch,
                    e.now,
                    keys[: len(slots)],
                    e.request,
                    ranks_left=self.config.ranks,
                )
                s.transfers.start(transfer)
                blocks = [e.first + i for i in missing[: len(slots)]]
                out.append(fx.StartStore(transfer.id, e.request, e.group, blocks, slots.tolist()))
        prompt.add(table, np.array(found[:taken], np.int64))
        out.append(fx.Offered(e.request, e.group, taken))

    def _request_gone(self, e: ev.RequestGone, out: list[Effect]) -> None:
        self._give_back(e.request, out)
        self._no_hits.discard(e.request)
        if e.request in self._loads:
            self._loads[e.request].gone = True
        self._s.rest(e.request)
        self._s.forget(e.request)

    def _preempted(self, e: ev.Preempted, out: list[Effect]) -> None:
        self._give_back(e.request, out)
        self._s.rest(e.request)
        stores = [t for t in self._s.transfers if t.kind is Kind.STORE and t.request == e.request]
        for transfer in stores:
            transfer.move = Move.CANCELLING
        if stores:
            out.append(fx.CancelRank([t.id for t in stores]))

    def _reset(self, e: ev.Reset, out: list[Effect]) -> None:
        self._s.epoch += 1
        self._s.counts.resets_count += 1
        for wait in self._lookups.take_all():
            self._drop(wait, out)
        self._demotes.clear()
        for table in self._s.tables:
            table.forget_all()

    # The ranks.

    def _rank_ended(self, e: ev.RankEnded, out: list[Effect]) -> None:
        transfer = self._s.transfers.get(e.transfer)
        if transfer is None or transfer.tier or transfer.move is Move.ABANDONED:
            self._s.counts.stray_ends_count += 1
            return
        transfer.ok = transfer.ok and e.ok
        transfer.ranks_left -= 1
        if not transfer.ranks_left:
            self._rank_transfer_ended(transfer, e.now, out)

    def _ranks_lost(self, e: ev.RanksLost, out: list[Effect]) -> None:
        for transfer in self._s.transfers.of_ranks():
            transfer.ok = False
            self._rank_transfer_ended(transfer, e.now, out)

    def _rank_transfer_ended(self, transfer: Transfer, now: float, out: list[Effect]) -> None:
        self._s.transfers.end(transfer)
        if transfer.kind is Kind.LOAD:
            self._load_ended(transfer, out)
        else:
            self._store_ended(transfer, now, out)

    def _load_ended(self, transfer: Transfer, out: list[Effect]) -> None:
        transfer.lease.release()
        load = self._loads[transfer.request]
        load.ok = load.ok and transfer.ok and load.epoch == self._s.epoch
        load.left -= 1
        if load.left:
            return
        del self._loads[transfer.request]
        if not load.ok:
            self._s.counts.loads_failed_count += 1
            if not load.gone:
                self._no_hits.add(transfer.request)
        out.append(fx.LoadEnded(transfer.request, load.ok))

    def _store_ended(self, transfer: Transfer, now: float, out: list[Effect]) -> None:
        s = self._s
        slots = transfer.lease.settle()
        table = transfer.lease.table
        ok = transfer.ok and transfer.epoch == s.epoch
        if ok:
            table.publish(slots)
            s.counts.stored_blocks += len(slots)
        else:
            table.free(slots)
            s.counts.stores_failed_blocks += len(slots)
        out.append(fx.StoreEnded(transfer.request, transfer.id, transfer.ok))
        self._wake(transfer, now, out)
        if ok and self.phase in (Phase.ADMITTING, Phase.DRAINING):
            self._demotes.add(s.tables.index(table), slots, out, now)

    # The tiers.

    def _tier_answered(self, e: ev.TierAnswered, out: list[Effect]) -> None:
        wait = self._lookups.answered(e.ask, e.tier, e.held)
        if wait is not None:
            self._lookups.advance(wait, e.now, out)

    def _tier_ended(self, e: ev.TierEnded, out: list[Effect]) -> None:
        transfer = self._s.transfers.get(e.transfer)
        if transfer is None or transfer.tier != e.tier or transfer.move is Move.ABANDONED:
            self._s.counts.stray_ends_count += 1
            return
        causes = e.causes if len(e.causes) == len(transfer.keys) else [LOST] * len(transfer.keys)
        self._tier_transfer_ended(transfer, list(causes), e.now, out)

    def _tier_transfer_ended(self, transfer: Transfer, causes: list[str], now: float, out: list[Effect]) -> None:
        self._s.transfers.end(transfer)
        if transfer.kind is Kind.DEMOTE:
            self._demotes.ended(transfer, causes)
        else:
            self._promote_ended(transfer, causes, now, out)
        self._demotes.feed(transfer.tier, now, out)

    def _promote_ended(self, transfer: Transfer, causes: list[str], now: float, out: list[Effect]) -> None:
        s = self._s
        slots = transfer.lease.settle()
        table = transfer.lease.table
        usable = transfer.epoch == s.epoch and not transfer.lost
        arrived = np.array([cause == "ok" and usable for cause in causes], np.bool_)
        for key, cause in zip(transfer.keys, causes, strict=True):
            if cause in BAD_CAUSES:
                s.mark_bad(key, now)
        ready: Slots = slots[arrived]
        table.free(slots[~arrived])
        table.publish(ready)
        s.counts.promoted_blocks += len(ready)
        s.counts.promotes_failed_blocks += len(slots) - len(ready)
        self._wake(transfer, now, out)
        # Those that woke may have evicted some of these, and be writing there now.
        table.settle_promoted(ready[(table.state[ready] == READY) & (table.readers[ready] == 0)])

    def _tier_up(self, e: ev.TierUp, out: list[Effect]) -> None:
        self._s.tiers_up.add(e.tier)
        self._demotes.feed(e.tier, e.now, out)

    def _tier_lost(self, e: ev.TierLost, out: list[Effect]) -> None:
        s = self._s
        s.tiers_up.discard(e.tier)
        woken = self._lookups.tier_lost(e.tier)
        for transfer in s.transfers.of_tier(e.tier):
            if transfer.kind is Kind.PROMOTE and not transfer.lost:
                transfer.lost = True
                transfer.lease.table.quarantine(transfer.lease.slots)
                self._wake(transfer, e.now, out)
        for wait in woken:
            self._lookups.advance(wait, e.now, out)

    def _tier_dead(self, e: ev.TierDead, out: list[Effect]) -> None:
        if e.tier in self._s.tiers_up:
            self._tier_lost(ev.TierLost(e.now, e.tier), out)
        for transfer in self._s.transfers.of_tier(e.tier):
            self._tier_transfer_ended(transfer, [LOST] * len(transfer.keys), e.now, out)

    # Time and the end.

    def _tick(self, e: ev.Tick, out: list[Effect]) -> None:
        for wait in self._lookups.late(e.now):
            self._lookups.advance(wait, e.now, out)
        self._demotes.feed_all(e.now, out)

    def _close(self, e: ev.Close, out: list[Effect]) -> None:
        if self.phase is Phase.ADMITTING:
            self.phase = Phase.DRAINING
            for wait in self._lookups.take_all():
                self._drop(wait, out)

    def _cancel_all(self, e: ev.CancelAll, out: list[Effect]) -> None:
        self._close(ev.Close(e.now), out)
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.CANCELLING
        self._demotes.clear()
        ranks = []
        for transfer in self._s.transfers:
            if transfer.move is Move.RUNNING:
                transfer.move = Move.CANCELLING
                if transfer.tier:
                    out.append(fx.CancelTier(transfer.tier, transfer.id))
                else:
                    ranks.append(transfer.id)
        if ranks:
            out.append(fx.CancelRank(ranks))

    def _abandon(self, e: ev.Abandon, out: list[Effect]) -> None:
        self._close(ev.Close(e.now), out)
        self.phase = Phase.CLOSED
        self._demotes.clear()
        for transfer in self._s.transfers:
            transfer.move = Move.ABANDONED

    # Shared steps.

    def _wake(self, transfer: Transfer, now: float, out: list[Effect]) -> None:
        """The lookups that wait for this transfer go on."""
        for request in sorted(transfer.waiters):
            wait = self._lookups.get(request)
            if wait is not None:
                wait.transfers.discard(transfer.id)
                self._lookups.advance(wait, now, out)
        transfer.waiters.clear()

    def _give_back(self, request: RequestId, out: list[Effect]) -> None:
        wait = self._lookups.take(request)
        if wait is not None:
            self._drop(wait, out)

    def _drop(self, wait: Wait, out: list[Effect]) -> None:
        """End a lookup that leads to no load."""
        for run in wait.runs:
            run.lease.release()
        self._leave(wait, out)

    def _leave(self, wait: Wait, out: list[Effect]) -> None:
        """Wait for nothing any more; promotions that nobody else waits for are cancelled."""
        for number in wait.transfers:
            transfer = self._s.transfers.get(number)
            if transfer is None:
                continue
            transfer.waiters.discard(wait.request)
            if transfer.kind is Kind.PROMOTE and not transfer.waiters and transfer.move is Move.RUNNING:
                transfer.move = Move.CANCELLING
                out.append(fx.CancelTier(transfer.tier, transfer.id))
        wait.transfers.clear()

    def check(self) -> None:
        """Every account adds up. Slow (looks at every slot); run after every event in tests."""
        from kvtier.core.check import check

        check(self, self._s, self._lookups)

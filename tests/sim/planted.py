"""Cores with one bug each, of the kind that corrupts silently. The simulator must find every one of them."""

from __future__ import annotations

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.effects import Effect
from kvtier.core.lookups import Wait
from kvtier.core.store import StoreCore
from kvtier.core.transfers import Kind, Transfer


class ReadyWhenTheFirstRankEnded(StoreCore):
    """The other rank still writes its part of the row."""

    def _rank_ended(self, e: ev.RankEnded, out: list[Effect]) -> None:
        transfer = self._s.transfers.get(e.transfer)
        if transfer is not None and transfer.kind is Kind.STORE:
            transfer.ranks_left = 1
        super()._rank_ended(e, out)


class FreeWhenCancelled(StoreCore):
    """The tier may have started to write, and writes into the next tenant's row."""

    def _leave(self, wait: Wait, out: list[Effect]) -> None:
        before = len(out)
        super()._leave(wait, out)
        for effect in out[before:]:
            if isinstance(effect, fx.CancelTier):
                transfer = self._s.transfers.get(effect.transfer)
                assert transfer is not None
                self._tier_transfer_ended(transfer, ["cancelled"] * len(transfer.keys), 0.0, out)


class StoresOutliveAReset(StoreCore):
    """Bytes of the old weights become visible under the new ones."""

    def _store_ended(self, transfer: Transfer, now: float, out: list[Effect]) -> None:
        if transfer.epoch != self._s.epoch:
            transfer.epoch = self._s.epoch
            transfer.lease.table.index.add(transfer.keys, transfer.lease.slots.tolist())
        super()._store_ended(transfer, now, out)


class FreeWhenLost(StoreCore):
    """A tier that is only lost, not dead, goes on writing."""

    def _tier_lost(self, e: ev.TierLost, out: list[Effect]) -> None:
        super()._tier_lost(e, out)
        for transfer in self._s.transfers.of_tier(e.tier):
            self._tier_transfer_ended(transfer, ["lost"] * len(transfer.keys), e.now, out)


class OffersAFailedLoadAgain(StoreCore):
    """The engine would load, fail and ask again for ever."""

    def _lookup(self, e: ev.Lookup, out: list[Effect]) -> None:
        self._no_hits.clear()
        super()._lookup(e, out)


class ForgetsToGiveBack(StoreCore):
    """A hit that is not loaded stays leased when its request goes at an unlucky moment."""

    def _request_gone(self, e: ev.RequestGone, out: list[Effect]) -> None:
        wait = self._lookups.get(e.request)
        if wait is not None and wait.tokens:
            self._lookups.take(e.request)
            return
        super()._request_gone(e, out)


PLANTED = [
    ReadyWhenTheFirstRankEnded,
    FreeWhenCancelled,
    StoresOutliveAReset,
    FreeWhenLost,
    OffersAFailedLoadAgain,
    ForgetsToGiveBack,
]

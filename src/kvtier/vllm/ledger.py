"""The worker side's books: which transfers each load and each finished request still waits for.

Rules:
1. A load is reported received exactly once, when all its transfers have ended; failed if one of them did.
2. A finished request is reported sent exactly once, when all the stores it was kept for have ended.
3. A step's metadata is taken in once, however many hooks see it.

Plain books without a device, so that they still work after a bug elsewhere switched the side off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvtier.core.ids import RequestId, TransferId
from kvtier.transfer.base import RankEnd
from kvtier.vllm.metadata import RankMeta, StepMeta


class Ledger:
    def __init__(self) -> None:
        self._step = -1
        self._loads: dict[RequestId, set[TransferId]] = {}
        self._load_of: dict[TransferId, RequestId] = {}
        self._failed: set[RequestId] = set()
        self._stores: set[TransferId] = set()
        self._finishing: dict[RequestId, set[TransferId]] = {}
        self._torn: set[TransferId] = set()
        self._ends: list[RankEnd] = []
        self._off = ""
        self._off_told = False

    def take_in(self, meta: StepMeta) -> bool:
        """Note what the step begins; False if it was taken in before."""
        if meta.number <= self._step:
            return False
        self._step = meta.number
        for load in meta.work.loads:
            self._loads[load.request] = {transfer.id for transfer in load.transfers}
            for transfer in load.transfers:
                self._load_of[transfer.id] = load.request
        self._stores.update(transfer.id for transfer in meta.work.stores)
        self._failed.update(request for request in meta.work.spoiled if request in self._loads)
        if self._off:
            self._failed.update(self._loads)
        for request in meta.lost_loads:
            self._loads.setdefault(request, set())
            self._failed.add(request)
        for request, stores in meta.finishing.items():
            # What is not out any more has ended, and was reported, in an earlier step.
            self._finishing[request] = self._stores & set(stores)
        return True

    @property
    def out(self) -> list[TransferId]:
        """Transfers that have not ended."""
        return sorted(self._stores | self._load_of.keys())

    def tear(self, transfers: Collection[TransferId]) -> None:
        """These may have read or written blocks that were another's by then: they end as failed."""
        self._torn.update(transfers)

    @property
    def off(self) -> bool:
        return bool(self._off)

    def turn_off(self, why: str) -> None:
        """Every load that is out is to be reported as failed, when its transfers have ended."""
        self._off = self._off or why
        self._failed.update(self._loads)

    def ended(self, ends: Iterable[RankEnd]) -> None:
        for end in ends:
            if end.id in self._torn:
                self._torn.discard(end.id)
                end = RankEnd(end.id, ok=False, cause="its blocks were reused before it had ended")
            self._ends.append(end)
            self._stores.discard(end.id)
            for stores in self._finishing.values():
                stores.discard(end.id)
            request = self._load_of.pop(end.id, None)
            if request is not None:
                self._loads[request].discard(end.id)
                if not end.ok:
                    self._failed.add(request)

    def take_received(self) -> tuple[set[RequestId], set[RequestId]]:
        """Loads that are over, and those of them that failed."""
        received = {request for request, transfers in self._loads.items() if not transfers}
        for request in received:
            del self._loads[request]
        failed = received & self._failed
        self._failed -= received
        return received, failed

    def take_sent(self) -> set[RequestId]:
        sent = {request for request, stores in self._finishing.items() if not stores}
        for request in sent:
            del self._finishing[request]
        return sent

    def take_meta(self) -> RankMeta | None:
        """End notices for the scheduler side and, once, that this side is off."""
        off = "" if self._off_told else self._off
        if not self._ends and not off:
            return None
        self._off_told = self._off_told or bool(off)
        ends, self._ends = self._ends, []
        return RankMeta(ends, off)

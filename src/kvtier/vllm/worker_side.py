"""The worker side: one rank's device pages, and the transfers that the scheduler side asks for.

Order within a step, which is what keeps bytes right:
1. `handle_preemptions`, before the engine touches a block: stores of preempted requests are dropped if queued
   and waited for if running, so that none of them reads a reused block.
2. The engine computes. `start_load` submits loads: their blocks belong to nobody else.
3. `submit_stores`, once the step's forward was given to the device: a store is queued behind all that compute
   was given before it, which on a CPU means that the forward has ended.
4. `results` reports what has ended, each load and each finished request exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvtier.core.ids import TransferId
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.transfer.base import RankEnd, RankTransfer
from kvtier.vllm.ledger import Ledger
from kvtier.vllm.metadata import RankMeta, StepMeta

log = logging.getLogger("kvtier")

FENCE_S = 10.0
"""A copy of a few MiB that has not ended by now hangs. Its bytes count as wrong from then on."""


class RankLike(Protocol):
    """What the worker side needs of `engine.rank.Rank`."""

    def submit(self, transfers: Sequence[RankTransfer]) -> None: ...
    def poll(self) -> list[RankEnd]: ...
    def fence(self, ids: Collection[TransferId], deadline: Deadline) -> list[TransferId]: ...


class WorkerSide:
    """One rank. Used by the engine's worker thread; `close` may come from any."""

    def __init__(
        self,
        ledger: Ledger,
        open_rank: Callable[[Mapping[str, Any]], tuple[RankLike, Callable[[Deadline | None], CloseReport]]],
    ) -> None:
        """`open_rank` makes the rank and its close from the engine's cache tensors, by layer."""
        self._ledger = ledger
        self._open_rank = open_rank
        self._rank: RankLike | None = None
        self._close: Callable[[Deadline | None], CloseReport] | None = None
        self._waited = False

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the engine's cache tensors; make the region and serve it. Raises ConfigError."""
        if self._rank is not None:
            raise RuntimeError("KV caches were registered twice; kvtier holds the first ones' memory")
        self._rank, self._close = self._open_rank(kv_caches)

    def handle_preemptions(self, meta: StepMeta) -> None:
        self._ledger.take_in(meta)
        if meta.work.off:
            self.go_off(meta)
        elif meta.work.cancels:
            left = self._running.fence(meta.work.cancels, Deadline.after(FENCE_S))
            if left:
                log.error("stores %s have not ended %g s after their preemption: they count as failed", left, FENCE_S)
                self._ledger.tear(left)

    def start_loads(self, meta: StepMeta) -> None:
        if meta.work.loads and not self._ledger.off:
            self._running.submit([transfer for load in meta.work.loads for transfer in load.transfers])

    def submit_stores(self, meta: StepMeta) -> None:
        if meta.work.stores and not self._ledger.off:
            self._running.submit(meta.work.stores)

    def results(self) -> KVConnectorTransferResults:
        if self._rank is not None:
            self._ledger.ended(self._rank.poll())
        return _results(self._ledger)

    def meta(self) -> RankMeta | None:
        return self._ledger.take_meta()

    def close(self, deadline: Deadline | None = None) -> CloseReport | None:
        """Bounded; raises nothing. None if there was nothing to close."""
        return self._close(deadline) if self._close is not None else None

    # After a bug.

    def go_off(self, meta: StepMeta | None) -> None:
        """Nothing is started any more; what is queued is dropped, what runs is waited for, once.

        `meta` is the step's, whose hooks may have been left out. A load is over, as failed, once nothing writes to
        its blocks. Raises nothing.
        """
        if meta is not None:
            self._ledger.take_in(meta)
        self._ledger.turn_off("switched off by the scheduler side")
        left: set[TransferId] = set()
        if self._rank is not None and self._ledger.out:
            deadline = Deadline.after(0.0 if self._waited else FENCE_S)
            self._waited = True
            left.update(self._ledger.out)
            try:
                left = set(self._rank.fence(left, deadline))
                self._ledger.ended(self._rank.poll())
            except Exception:  # what a broken rank still does is not known: its blocks stay with their requests
                log.exception("kvtier is off, and its rank cannot be asked what it still does")
        # What was noted, but never reached the rank, ends here.
        unknown = [id_ for id_ in self._ledger.out if id_ not in left]
        self._ledger.ended(RankEnd(id_, ok=False, cause="kvtier is off") for id_ in unknown)

    def results_when_off(self, meta: StepMeta | None) -> KVConnectorTransferResults:
        self.go_off(meta)
        return _results(self._ledger)

    # Inside.

    @property
    def _running(self) -> RankLike:
        if self._rank is None:
            raise RuntimeError("a step has work for a rank whose KV caches were never registered")
        return self._rank


def _results(ledger: Ledger) -> KVConnectorTransferResults:
    received, failed = ledger.take_received()
    return KVConnectorTransferResults(
        finished_sending=ledger.take_sent(), finished_recving=received, failed_recving=failed
    )

"""What the engine waits for, kept so simply that it outlives a bug anywhere else in the scheduler side.

A load that is never reported would keep its request waiting for ever, a finished request that is never
reported its blocks. Both are told to the ranks in every step's metadata, also when kvtier is off.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.core.ids import RequestId, TransferId
from kvtier.engine.work import StepWork
from kvtier.vllm.metadata import StepMeta


class Books:
    def __init__(self) -> None:
        self._loads: dict[RequestId, bool] = {}
        """loads that the engine waits for; True once a rank was told"""
        self._finishing: dict[RequestId, list[TransferId]] = {}
        """requests kept for these stores, which no rank was told yet"""
        self._steps = 0

    def load_begins(self, request: RequestId) -> None:
        self._loads[request] = False

    def is_loading(self, request: RequestId) -> bool:
        return request in self._loads

    def received(self, requests: Iterable[RequestId]) -> None:
        """The engine was told that these loads are over. Others' are ignored."""
        for request in requests:
            self._loads.pop(request, None)

    def keep_for(self, request: RequestId, stores: list[TransferId]) -> None:
        self._finishing[request] = stores

    def meta(self, work: StepWork) -> StepMeta:
        """The step's metadata: `work`, and what the engine waits for that is not in any."""
        for load in work.loads:
            if load.request in self._loads:
                self._loads[load.request] = True
        lost = [request for request, told in self._loads.items() if not told]
        for request in lost:
            self._loads[request] = True
        finishing, self._finishing = self._finishing, {}
        self._steps += 1
        return StepMeta(self._steps, work, finishing, lost)

    def __len__(self) -> int:
        return len(self._loads) + len(self._finishing)

"""What the two sides tell each other, through vLLM: plain data, pickled by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier.core.ids import RequestId, TransferId
from kvtier.engine.work import StepWork
from kvtier.transfer.base import RankEnd


@dataclass(slots=True)
class StepMeta(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler side to worker side, once a step."""

    number: int
    """counts steps: what was taken in once is not taken in again"""
    work: StepWork
    finishing: dict[RequestId, list[TransferId]] = field(default_factory=dict)
    """finished requests whose blocks the engine keeps until these stores have ended"""
    lost_loads: list[RequestId] = field(default_factory=list)
    """loads that the engine waits for and that no rank will ever see: report them as failed"""


@dataclass(slots=True)
class RankMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker side to scheduler side: end notices, one a rank and transfer."""

    ends: list[RankEnd] = field(default_factory=list)
    off: str = ""
    """the bug that switched the worker side off, in words"""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankMeta:
        return RankMeta(self.ends + other.ends, self.off or other.off)

"""kvtier's counters in vLLM's `/metrics`, under `kvtier_*`.

The scheduler side sends what grew since it last sent; the frontend, another process, adds it up. A metric can
never fail a request: what is unknown is left out, what would shrink a counter counts as nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

log = logging.getLogger("kvtier")

EVERY_S = 1.0

COUNTERS = {
    "lookups_count": "Lookups of prompts.",
    "lookups_late_count": "Lookups that their deadline ended with something still on its way.",
    "asked_blocks": "Blocks that lower tiers were asked for.",
    "loaded_blocks": "Blocks loaded to the device.",
    "loaded_from_tiers_blocks": "Of the loaded blocks, those that came from a lower tier.",
    "loads_failed_count": "Loads that failed; their tokens were computed.",
    "stored_blocks": "Blocks stored in host memory.",
    "stores_failed_blocks": "Blocks whose store failed or was dropped.",
    "declined_blocks": "Blocks offered with no slot to put them in.",
    "evicted_blocks": "Blocks that left host memory.",
    "demoted_blocks": "Blocks written to a lower tier.",
    "demotes_failed_blocks": "Blocks that a lower tier could not write.",
    "demotes_dropped_blocks": "Blocks evicted before they could be demoted.",
    "promoted_blocks": "Blocks read from a lower tier.",
    "promotes_failed_blocks": "Blocks that a lower tier could not read.",
    "bad_blocks": "Blocks that failed their check: wrong bytes, another block's, or too short.",
    "stray_ends_count": "End notices of nothing that was out.",
    "resets_count": "Resets of the cache.",
}
GAUGES = {
    "host_slots": "Slots of host memory.",
    "host_free_slots": "Slots of host memory with no block in them.",
    "host_available_slots": "Slots of host memory that a store could take: without a block, or with one to evict.",
    "leases_out": "Leases on slots of host memory that are out.",
    "transfers_out": "Transfers that have not ended.",
    "requests_known": "Requests that something is remembered of.",
    "off": "1 if a bug switched kvtier off, else 0.",
}


class KVTierStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: {"counters": growth by name, "gauges": values by name, "tiers": {tier: values by name}}."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        counters = dict(self.data.get("counters", {}))
        for name, growth in other.data.get("counters", {}).items():
            counters[name] = counters.get(name, 0) + growth
        merged: dict[str, Any] = {"counters": counters}
        for kind in ("gauges", "tiers"):
            merged[kind] = {**self.data.get(kind, {}), **other.data.get(kind, {})}
        return KVTierStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        return {name: growth for name, growth in self.data.get("counters", {}).items() if growth}

    def is_empty(self) -> bool:
        return not self.data


class Sampler:
    """Turns the store's counts into stats, at most once in `EVERY_S`."""

    def __init__(self, tiers: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers = tiers
        self._clock = clock
        self._next = 0.0
        self._sent: dict[str, int] = {}

    def take(self, counts: Callable[[], Mapping[str, int]]) -> KVTierStats | None:
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + EVERY_S
        current = counts()
        growth = {name: max(0, current[name] - self._sent.get(name, 0)) for name in COUNTERS if name in current}
        self._sent = {name: current[name] for name in growth}
        return KVTierStats(
            data={
                "counters": growth,
                "gauges": {name: max(0, current[name]) for name in GAUGES if name in current},
                "tiers": {
                    tier: {
                        name.removeprefix(f"{tier}_"): max(0, value)
                        for name, value in current.items()
                        if name.startswith(f"{tier}_") and name not in COUNTERS and name not in GAUGES
                    }
                    for tier in self._tiers
                },
            }
        )


class KVTierPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics in the frontend's registry, one child an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](name=f"kvtier_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._gauges = {name: self._gauge(f"kvtier_{name}", text, labelnames) for name, text in GAUGES.items()}
        self._tier_gauges: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            self._observe(transfer_stats_data, self.per_engine_labelvalues[engine_idx])
        except Exception:  # a metric never fails a request
            log.exception("kvtier's metrics could not be updated")

    def _observe(self, data: dict[str, Any], labels: list[object]) -> None:
        for name, growth in data.get("counters", {}).items():
            if name in self._counters and growth > 0:
                self._counters[name].labels(*labels).inc(growth)
        for name, value in data.get("gauges", {}).items():
            if name in self._gauges:
                self._gauges[name].labels(*labels).set(max(0, value))
        for tier, values in data.get("tiers", {}).items():
            for name, value in values.items():
                if name not in self._tier_gauges:
                    text = f"{name.replace('_', ' ').capitalize()} of a lower tier since it was opened."
                    self._tier_gauges[name] = self._gauge(f"kvtier_tier_{name}", text, [*self._labelnames, "tier"])
                self._tier_gauges[name].labels(*labels, tier).set(max(0, value))

    def _gauge(self, name: str, text: str, labelnames: list[str]) -> Any:
        return self._gauge_cls(name=name, documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent")

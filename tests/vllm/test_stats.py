"""Metrics: added up right, never below zero, and never a reason for a request to fail."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm_fakes import fake_vllm_config

from kvtier.core.counts import Counts
from kvtier.vllm import KVTierConnector
from kvtier.vllm.stats import COUNTERS, EVERY_S, KVTierPromMetrics, KVTierStats, Sampler


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> KVTierPromMetrics:
    def made(kind: Any) -> Any:
        return lambda **kwargs: kind(registry=registry, **kwargs)

    found = KVTierConnector.build_prom_metrics(
        fake_vllm_config(),
        {Counter: made(Counter), Gauge: made(Gauge), Histogram: made(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    assert found is not None
    return found


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})


def test_every_counter_of_the_core_is_a_metric_with_help() -> None:
    assert set(COUNTERS) == set(Counts.__struct_fields__)
    assert all(text.endswith(".") for text in COUNTERS.values())


def test_growth_is_sent_once_and_at_most_once_a_second() -> None:
    now, counts = [10.0], {"stored_blocks": 5, "off": 0, "disk_used_bytes": 7, "disk_up_count": 1}
    sampler = Sampler(["disk"], clock=lambda: now[0])
    first = sampler.take(lambda: counts)
    assert first is not None
    assert first.data == {
        "counters": {"stored_blocks": 5},
        "gauges": {"off": 0},
        "tiers": {"disk": {"used_bytes": 7, "up_count": 1}},
    }
    assert sampler.take(lambda: counts) is None
    now[0] += EVERY_S
    counts["stored_blocks"] = 12
    second = sampler.take(lambda: counts)
    assert second is not None
    assert second.data["counters"] == {"stored_blocks": 7}
    now[0] += EVERY_S
    counts["stored_blocks"] = 3
    third = sampler.take(lambda: counts)
    assert third is not None
    assert third.data["counters"] == {"stored_blocks": 0}


def test_stats_survive_the_way_to_the_frontend_and_add_up() -> None:
    stats = KVTierStats(data={"counters": {"stored_blocks": 2}, "gauges": {"off": 0}, "tiers": {}})
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    arrived = KVTierConnector.build_kv_connector_stats(sent)
    more = KVTierStats(data={"counters": {"stored_blocks": 3}, "gauges": {"off": 1}, "tiers": {}})
    total = arrived.aggregate(more)
    assert total.reduce() == {"stored_blocks": 5}
    assert total.data["gauges"] == {"off": 1}
    assert KVTierConnector.build_kv_connector_stats().is_empty()


def test_metrics_show_what_was_sent(metrics: KVTierPromMetrics, registry: CollectorRegistry) -> None:
    for _ in range(2):
        metrics.observe({"counters": {"stored_blocks": 4}, "gauges": {"host_slots": 9}, "tiers": {}}, 0)
    metrics.observe({"tiers": {"disk": {"used_bytes": 7}, "far": {"used_bytes": 8}}}, 0)
    assert value(registry, "kvtier_stored_blocks_total") == 8
    assert value(registry, "kvtier_host_slots") == 9
    assert value(registry, "kvtier_tier_used_bytes", tier="disk") == 7
    assert value(registry, "kvtier_tier_used_bytes", tier="far") == 8
    assert registry.get_sample_value("kvtier_stored_blocks_total", {"model_name": "m", "engine": "1"}) is None


@pytest.mark.parametrize(
    "data",
    [
        {"counters": {"stored_blocks": -768}, "gauges": {"host_slots": -1}},
        {"counters": {"never heard of": 1}, "gauges": {"nor of": 2}},
        {"counters": {"stored_blocks": "many"}},
        {"counters": None},
        {"tiers": {"disk": {"not a metric name!": 1}}},
    ],
)
def test_nonsense_never_raises_and_never_shrinks_a_counter(
    metrics: KVTierPromMetrics, registry: CollectorRegistry, data: dict[str, Any]
) -> None:
    metrics.observe({"counters": {"stored_blocks": 4}}, 0)
    metrics.observe(data, 0)
    metrics.observe({}, 5)
    assert value(registry, "kvtier_stored_blocks_total") == 4
    assert (value(registry, "kvtier_host_slots") or 0) >= 0

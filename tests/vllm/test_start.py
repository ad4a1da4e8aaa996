"""What a start accepts, what it refuses and in which words; other connectors beside it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from vllm_fakes import (
    BLOCK_TOKENS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    fake_kv_cache_config,
    fake_vllm_config,
    full_attention,
)

from kvtier.config import Config, load_config
from kvtier.errors import ConfigError
from kvtier.vllm import KVTierConnector, plugin
from kvtier.vllm.groups import pages_of_groups, plan_groups

SETTINGS = {"host": {"size": "1MiB"}}


def caches(num_blocks: int = 8) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(num_blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE) for name in LAYERS}


def window() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32, sliding_window=8
    )


def state() -> MambaSpec:
    return MambaSpec(block_size=BLOCK_TOKENS, shapes=((2, 2),), dtypes=(torch.float32,))


def latent() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32)


def refusal(changes: dict[str, Any] | None = None, specs: list[Any] | None = None, settings: Any = SETTINGS) -> str:
    with pytest.raises(ConfigError) as raised:
        KVTierConnector(
            fake_vllm_config(settings, **(changes or {})), KVConnectorRole.WORKER, fake_kv_cache_config(8, specs)
        )
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "what", ["tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "nnodes"]
)
def test_more_than_one_rank_is_refused(what: str) -> None:
    assert f"{what} is 2: set it to 1" in refusal({f"parallel_config__{what}": 2})


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([window()], "SlidingWindow"),
        ([state()], "Mamba"),
        ([full_attention(), window()], "has 2 (FullAttention, SlidingWindow)"),
        ([full_attention(), state()], "has 2 (FullAttention, Mamba)"),
    ],
)
def test_kinds_of_attention_that_need_more_are_refused(specs: list[Any], words: str) -> None:
    assert words in refusal(specs=specs)


def test_a_draft_with_kv_of_its_own_is_refused() -> None:
    assert "'eagle3'" in refusal({"speculative_config": SimpleNamespace(method="eagle3")})


def test_a_draft_without_kv_is_served() -> None:
    plan_groups(fake_vllm_config(speculative_config=SimpleNamespace(method="ngram")), fake_kv_cache_config(), Config())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": {"sise": "1MiB"}}, "unknown key 'host.sise'; did you mean 'host.size'?"),
        ({"tiers": [{"type": "dsik"}]}, "did you mean"),
        ({"tiers": [{"type": "disk", "path": "/tmp/x", "size": "1GiB", "process": False}]}, "tiers[0].process"),
        (7, "must be a table of settings or the path"),
        ("/nowhere.toml", "/nowhere.toml"),
    ],
)
def test_bad_settings_are_refused_by_the_same_line_wherever_vllm_first_asks(settings: Any, words: str) -> None:
    line = refusal(settings=settings)
    assert words in line
    with pytest.raises(ConfigError) as raised:
        KVTierConnector.requires_piecewise_for_cudagraph({"kvtier": settings})
    assert str(raised.value) == line


def test_settings_may_be_in_a_file_and_others_keys_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text('[host]\nsize = "2MiB"\n')
    vllm_config = fake_vllm_config(str(path))
    vllm_config.kv_transfer_config.kv_connector_extra_config["lmcache"] = {"anything": 1}
    connector = KVTierConnector(vllm_config, KVConnectorRole.WORKER, fake_kv_cache_config(8))
    assert connector._settings.host.size == 2 << 20


def test_a_role_that_only_stores_or_only_loads_is_refused() -> None:
    assert "set it to 'kv_both'" in refusal({"kv_transfer_config__kv_role": "kv_consumer"})


def test_too_little_host_memory_is_refused_when_the_rows_are_known() -> None:
    connector = KVTierConnector(
        fake_vllm_config({"host": {"size": 100}}), KVConnectorRole.WORKER, fake_kv_cache_config(8)
    )
    with pytest.raises(ConfigError, match=r"set host\.size to at least"):
        connector.register_kv_caches(caches())


def test_a_vllm_without_the_hooks_is_refused_and_another_version_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with caplog.at_level(logging.WARNING, "kvtier"):
        plugin.check_vllm()
    assert "tested with vLLM 0.32.0, not with 0.99.0" in caplog.text
    monkeypatch.delattr(base.KVConnectorBase_V1, "handle_preemptions")
    with pytest.raises(ConfigError, match=r"vLLM 0\.99\.0 has no handle_preemptions: install vllm==0\.32\.0"):
        plugin.check_vllm()


def test_the_plugin_registers_the_connector_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVTierConnector") is KVTierConnector


# Pages.


def test_pages_of_a_layer_are_its_blocks_bytes() -> None:
    tensors = caches()
    for i, tensor in enumerate(tensors.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + i)
    plan = plan_groups(fake_vllm_config(), fake_kv_cache_config(8), load_config({"engine_blocks_per_block": 2}))
    assert plan.groups[0].block_tokens == 2 * BLOCK_TOKENS
    (pages,), (layout,) = pages_of_groups(plan, tensors)
    page_bytes = HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE * 4
    assert layout.page_bytes == [page_bytes, page_bytes]
    assert layout.payload_bytes == 2 * 2 * page_bytes
    for layer, tensor in zip(pages.layers, tensors.values(), strict=True):
        assert np.array_equal(layer, tensor.view(torch.uint8).numpy().reshape(8, page_bytes))
        layer[3] = 1
        assert bool((tensor[3].view(torch.uint8) == 1).all())


def test_kernel_blocks_smaller_than_the_engines_are_joined() -> None:
    plan = plan_groups(fake_vllm_config(), fake_kv_cache_config(4), Config())
    tensors = caches(8)
    (pages,), _ = pages_of_groups(plan, tensors)
    assert pages.count == 4
    pages.layers[0][1] = 9
    changed = (tensors[LAYERS[0]].view(torch.uint8).reshape(8, -1) == 9).all(1)
    assert changed.tolist() == [False, False, True, True, False, False, False, False]


def test_blocks_that_do_not_fit_together_are_refused() -> None:
    plan = plan_groups(fake_vllm_config(), fake_kv_cache_config(3), Config())
    with pytest.raises(ConfigError, match="not whole blocks"):
        pages_of_groups(plan, caches(8))
    with pytest.raises(ConfigError, match="has no KV cache on this rank"):
        pages_of_groups(plan, {})


def test_layers_of_one_kind_and_different_sizes_share_a_row() -> None:
    spec = UniformTypeKVCacheSpecs(
        block_size=BLOCK_TOKENS, kv_cache_specs={LAYERS[0]: full_attention(), LAYERS[1]: latent()}
    )
    plan = plan_groups(fake_vllm_config(), fake_kv_cache_config(8, [spec]), Config())
    tensors = {**caches(), LAYERS[1]: torch.zeros(8, BLOCK_TOKENS, HEAD_SIZE)}
    _, (layout,) = pages_of_groups(plan, tensors)
    assert layout.page_bytes == [HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE * 4, BLOCK_TOKENS * HEAD_SIZE * 4]


# Beside other connectors.


@pytest.fixture
def closed() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for connector in made:
        connector.shutdown()


def multi(policy: str, *names: str) -> Any:
    vllm_config = fake_vllm_config(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True))
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id=vllm_config.kv_transfer_config.engine_id,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={
            "connectors": [
                {
                    "kv_connector": "KVTierConnector",
                    "kv_connector_module_path": "kvtier.vllm",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"kvtier": {**SETTINGS, "name": name}},
                }
                for name in names
            ]
        },
    )
    return vllm_config


def test_two_children_of_one_multi_connector_are_served_apart(closed: list[Any]) -> None:
    config, kv = multi("recompute", "a", "b"), fake_kv_cache_config(8)
    for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
        connector = MultiConnector(config, role, kv)
        closed.append(connector)
        if role is KVConnectorRole.WORKER:
            connector.register_kv_caches(caches())
        for child in connector.sub_connectors:
            assert not child._guard.off
            assert child.get_kv_connector_stats() is None
            assert child.get_handshake_metadata() is None
    assert len({child._opened.store for child in closed[1].sub_connectors}) == 2


def test_a_multi_connector_that_fails_failed_loads_is_refused_with_the_line_to_add() -> None:
    with pytest.raises(ConfigError, match='add "kv_load_failure_policy": "recompute" beside') as raised:
        MultiConnector(multi("fail", "a"), KVConnectorRole.SCHEDULER, fake_kv_cache_config(8))
    assert "\n" not in str(raised.value)


def test_alone_the_policy_is_set(closed: list[Any]) -> None:
    vllm_config, kv = fake_vllm_config(SETTINGS), fake_kv_cache_config(8)
    worker = KVTierConnector(vllm_config, KVConnectorRole.WORKER, kv)
    closed.append(worker)
    worker.register_kv_caches(caches())
    scheduler = KVTierConnector(vllm_config, KVConnectorRole.SCHEDULER, kv)
    closed.append(scheduler)
    assert vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert scheduler.requires_kv_delivery is False
    stats = scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["gauges"]["off"] == 0
    assert scheduler.get_kv_connector_stats() is None, "once a second is enough"
    assert worker.get_kv_connector_stats() is None


def test_shutdown_may_come_twice_early_or_on_either_side_first(closed: list[Any]) -> None:
    vllm_config, kv = fake_vllm_config(SETTINGS), fake_kv_cache_config(8)
    never = KVTierConnector(vllm_config, KVConnectorRole.WORKER, kv)
    never.shutdown()
    worker = KVTierConnector(vllm_config, KVConnectorRole.WORKER, kv)
    worker.register_kv_caches(caches())
    scheduler = KVTierConnector(vllm_config, KVConnectorRole.SCHEDULER, kv)
    for connector in (worker, scheduler, worker, scheduler):
        connector.shutdown()


def test_an_engine_whose_region_cannot_be_taken_over_starts_without_kvtier(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no region")

    monkeypatch.setattr("kvtier.engine.open.open_scheduler_side", broken)
    scheduler = KVTierConnector(fake_vllm_config(SETTINGS), KVConnectorRole.SCHEDULER, fake_kv_cache_config(8))
    assert scheduler._guard.off
    request = SimpleNamespace(request_id="r")
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert scheduler.build_connector_meta(SimpleNamespace()).work.off
    assert scheduler.request_finished_all_groups(request, ([],)) == (False, None)
    assert scheduler.has_pending_push_work() is False
    assert scheduler.reset_cache() is True
    stats = scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["gauges"] == {"off": 1}
    scheduler.shutdown()

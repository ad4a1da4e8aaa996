"""Stand-ins for what vLLM hands to a connector: requests, blocks, configurations. No engine, no model."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCK_TOKENS = 4
HEADS = 2
HEAD_SIZE = 8
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


@dataclass
class FakeRequest:
    """As much of vLLM's Request as a connector may look at."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: torch.Tensor | None = None
    prompt_is_token_ids: list[bool] | None = None
    resumable: bool = False
    all_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.all_token_ids:
            ids = self.prompt_token_ids
            if ids is None:
                assert self.prompt_embeds is not None
                ids = [0] * len(self.prompt_embeds)
            elif self.prompt_is_token_ids is not None:
                ids = [t if is_token else 0 for t, is_token in zip(ids, self.prompt_is_token_ids, strict=True)]
            self.all_token_ids = list(ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def media(identifier: str, offset: int, length: int, modality: str = "image") -> Any:
    return SimpleNamespace(
        identifier=identifier, modality=modality, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def full_attention(block_tokens: int = BLOCK_TOKENS, **kwargs: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32, **kwargs
    )


def fake_kv_cache_config(num_blocks: int = 64, specs: list[Any] | None = None) -> KVCacheConfig:
    specs = specs if specs is not None else [full_attention()]
    names = [LAYERS if len(specs) == 1 else (LAYERS[i % 2] + f".{i}",) for i in range(len(specs))]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(layer_names=list(layers), kv_cache_spec=spec)
            for layers, spec in zip(names, specs, strict=True)
        ],
        kv_cache_layout="LBHNC",
    )


def fake_vllm_config(settings: Any = None, **changes: Any) -> Any:
    """A vLLM configuration as far as kvtier reads it; `changes` by dotted name with `__` for the dot."""
    extra = {} if settings is None else {"kvtier": settings}
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.vllm",
            kv_role="kv_both",
            engine_id=str(uuid.uuid4()),
            kv_connector_extra_config=extra,
        ),
        model_config=SimpleNamespace(
            model="some/model",
            model_weights="",
            revision=None,
            code_revision=None,
            dtype=torch.float32,
            quantization=None,
            quantization_config=None,
            seed=0,
            max_model_len=1024,
            model_impl="auto",
            model_class_overrides={},
            disable_sliding_window=False,
            hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0, "_name_or_path": "/here"}),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            nnodes=1,
        ),
        speculative_config=None,
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        at = config
        for part in path:
            at = getattr(at, part)
        setattr(at, last, value)
    return config

"""From vLLM's KV cache configuration to kvtier's groups, and what this release refuses to serve.

This release keeps one KV cache group of full attention (MLA as well), written by one rank. Whatever else
would need bytes or boundaries that it does not keep, so a start with it is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any

import msgspec
import numpy as np
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvtier.config import Config
from kvtier.core.groups import Group
from kvtier.errors import ConfigError
from kvtier.memory.layout import Bytes, PageLayout
from kvtier.transfer.pages import NumpyPages, pages_of

_SERVED = (FullAttentionSpec, MLAAttentionSpec)


class Plan(msgspec.Struct, frozen=True):
    """One entry for each KV cache group."""

    groups: tuple[Group, ...]
    layers: tuple[tuple[str, ...], ...]
    """names of the layers, in the order of their pages in a row"""
    engine_blocks: int
    """engine blocks on the device"""
    engine_blocks_per_block: int

    @property
    def unit_tokens(self) -> int:
        """What the keys are hashed at."""
        return gcd(*(group.block_tokens for group in self.groups))


def plan_groups(vllm_config: Any, kv_cache_config: Any, config: Config) -> Plan:
    """Check that this release can serve the engine. Raises ConfigError, one line, naming what it cannot."""
    for what, value in _refused_sizes(vllm_config.parallel_config):
        if value != 1:
            raise ConfigError(f"kvtier serves engines of one rank in this release, but {what} is {value}: set it to 1")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        raise ConfigError(
            f"kvtier does not serve speculative decoding whose draft keeps KV ('{speculative.method}') in this "
            "release: use 'ngram' or leave it out"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError("kvtier cannot share KV whose scales are found at run time: leave out calculate_kv_scales")
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({_kind(spec) for group in groups for spec in _specs(group.kv_cache_spec)})
    if len(groups) != 1:
        raise ConfigError(
            f"kvtier serves models with one KV cache group in this release; this one has {len(groups)} "
            f"({', '.join(kinds)}): run it without kvtier"
        )
    for spec in _specs(groups[0].kv_cache_spec):
        if type(spec) not in _SERVED or getattr(spec, "model_version", None) is not None:
            raise ConfigError(
                f"kvtier serves models of full attention in this release; this one has {', '.join(kinds)}: "
                "run it without kvtier"
            )
    if groups[0].is_eagle_group or groups[0].host_resident or not groups[0].enable_kv_transfer:
        raise ConfigError("kvtier cannot serve a KV cache group of a draft model or of host memory")
    per_block = config.engine_blocks_per_block
    return Plan(
        groups=tuple(Group(block_tokens=group.kv_cache_spec.block_size * per_block) for group in groups),
        layers=tuple(tuple(group.layer_names) for group in groups),
        engine_blocks=kv_cache_config.num_blocks,
        engine_blocks_per_block=per_block,
    )


def pages_of_groups(plan: Plan, kv_caches: Mapping[str, Any]) -> tuple[list[NumpyPages], list[PageLayout]]:
    """The device's pages as bytes, and how a row is made of them, for each size class.

    `kv_caches[layer]` is a tensor whose first axis counts engine blocks (vLLM's layouts "LBHNC" and alike).
    Raises ConfigError for a layer that is missing, or whose blocks cannot be seen as bytes.
    """
    pages, layouts = [], []
    for names in plan.layers:
        views: list[Bytes] = []
        for name in names:
            if name not in kv_caches:
                raise ConfigError(f"kvtier: layer '{name}' has no KV cache on this rank; known: {sorted(kv_caches)}")
            tensor = kv_caches[name]
            if not hasattr(tensor, "shape"):
                raise ConfigError(f"kvtier serves layers of one cache tensor, '{name}' has {type(tensor).__name__}")
            views.extend(_whole_blocks(view, plan.engine_blocks, name) for view in pages_of(tensor))
        pages.append(NumpyPages(views))
        layouts.append(PageLayout(engine_blocks=plan.engine_blocks_per_block, ranks=1, page_bytes=pages[-1].page_bytes))
    return pages, layouts


def _whole_blocks(view: Bytes, engine_blocks: int, name: str) -> Bytes:
    """The view with one row an engine block: attention kernels may count in smaller blocks of their own."""
    per_block, rest = divmod(len(view), engine_blocks)
    if per_block == 1 and not rest:
        return view
    if rest or not per_block or view.strides[0] != view.shape[1]:
        raise ConfigError(
            f"kvtier: layer '{name}' has {len(view)} pages of {view.shape[1]} bytes (stride {view.strides[0]}), which "
            f"are not whole blocks of the {engine_blocks} that the engine counts"
        )
    shape = (engine_blocks, per_block * view.shape[1])
    return np.lib.stride_tricks.as_strided(view, shape, (shape[1], 1))


def _refused_sizes(parallel: Any) -> Sequence[tuple[str, int]]:
    return [
        (name, getattr(parallel, name, 1))
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "nnodes",
        )
    ]


def _specs(spec: Any) -> Iterator[Any]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _kind(spec: Any) -> str:
    return type(spec).__name__.removesuffix("Spec")

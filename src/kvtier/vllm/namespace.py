"""The namespace: everything but the tokens that changes the bytes of a block.

Equal text in every process and on every machine for equal bytes; two engines that differ in any of it never
share a block. What it cannot see is a weight update without a reset of the cache.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.memory.layout import PageLayout
from kvtier.vllm.digests import DigestCache, weight_files

FORMAT = "vllm/1"

# Of the model's configuration: where it was found and what wrote it, which changes no byte.
_VOLATILE = frozenset(("_name_or_path", "name_or_path", "transformers_version", "_commit_hash"))


def namespace_parts(
    vllm_config: Any, kv_cache_config: Any, config: Config, page_layouts: Sequence[PageLayout]
) -> dict[str, str]:
    """The named parts, as text. Raises ConfigError where the weights cannot be told apart from others."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    attention = vllm_config.attention_config
    return {
        "format": FORMAT,
        "vllm": vllm.__version__,
        "model": "" if config.weights_version is not None else _model_name(model),
        "revision": str(model.revision),
        "weights": weights_identity(vllm_config, config),
        "model config": plain(_hf_config(model.hf_config)),
        "max model len": str(model.max_model_len) if _length_changes_rope(model.hf_config) else "",
        "dtype": str(model.dtype),
        "quantization": plain([model.quantization, getattr(model, "quantization_config", None)]),
        "kv dtype": plain([cache.cache_dtype, cache.kv_cache_dtype_skip_layers]),
        "kv layout": str(kv_cache_config.kv_cache_layout),
        "device": str(vllm_config.device_config.device_type),
        "attention": plain([attention.backend, attention.backend_per_kind, model.disable_sliding_window]),
        "model code": plain([model.model_impl, model.code_revision, model.model_class_overrides]),
        "parallel": plain(
            [
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
            ]
        ),
        "groups": plain([_group(group) for group in kv_cache_config.kv_cache_groups]),
        "engine blocks per block": str(config.engine_blocks_per_block),
        "rows": " | ".join(layout.describe() for layout in page_layouts),
    }


def weights_identity(vllm_config: Any, config: Config, digests: DigestCache | None = None) -> str:
    """What the weights are called: the user's word, else the digest of their files, else how they are made up."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if config.weights_version is not None:
        return f"version {config.weights_version}"
    load_format = plain(load.load_format)
    if load_format == '"dummy"':
        return f"dummy, seed {model.seed}"
    directory = _checkpoint(model, load)
    files = [] if directory is None else weight_files(directory)
    if not files:
        raise ConfigError(
            f"kvtier cannot tell the weights of '{model.model}' (load_format {load_format}) from others, as it "
            'finds no files of them: set "weights_version" in "kvtier" to a word that changes with the weights'
        )
    return f"files {(digests or DigestCache()).of_files(files)}, as {load_format}"


def plain(value: Any) -> str:
    """Stable text of plain data; what is not plain goes by its name or its text."""
    return json.dumps(value, sort_keys=True, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"": type(value).__name__, **{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return getattr(value, "name", None) or getattr(value, "__qualname__", None) or str(value)


def _model_name(model: Any) -> str:
    """A name on a hub. A directory goes by its content alone: it may be moved."""
    return "" if Path(model.model).is_dir() else str(model.model)


def _hf_config(hf_config: Any) -> Any:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): clean(v) for k, v in value.items() if k not in _VOLATILE}
        if isinstance(value, list | tuple):
            return [clean(v) for v in value]
        return value

    return clean(hf_config.to_dict())


def _length_changes_rope(hf_config: Any) -> bool:
    """Some rotary embeddings choose their frequencies by the longest sequence that is served."""
    text = plain(_hf_config(hf_config))
    return any(f'"{kind}"' in text for kind in ("longrope", "dynamic", "su", "yarn"))


def _group(group: Any) -> dict[str, Any]:
    return {"layers": group.layer_names, "spec": group.kv_cache_spec}


def _checkpoint(model: Any, load: Any) -> Path | None:
    """The directory that the weights are read from, if it is on this machine."""
    path = Path(getattr(model, "model_weights", "") or model.model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(
            str(model.model), "config.json", cache_dir=load.download_dir, revision=model.revision
        )
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None

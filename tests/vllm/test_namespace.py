"""The namespace changes with everything that changes bytes, one thing at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import vllm
from vllm_fakes import fake_kv_cache_config, fake_vllm_config, full_attention

from kvtier.config import Config, load_config
from kvtier.core.prefix import namespace_digest
from kvtier.errors import ConfigError
from kvtier.memory.layout import PageLayout
from kvtier.vllm.digests import DigestCache
from kvtier.vllm.namespace import namespace_parts, weights_identity

ROWS = [PageLayout(engine_blocks=1, ranks=1, page_bytes=[64, 64])]


def digest(
    vllm_config: Any = None, kv: Any = None, config: Config | None = None, rows: list[PageLayout] | None = None
) -> bytes:
    return namespace_digest(
        namespace_parts(
            vllm_config or fake_vllm_config(), kv or fake_kv_cache_config(), config or Config(), rows or ROWS
        )
    )


def hf(**values: Any) -> Any:
    return SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0, **values})


CHANGES: dict[str, dict[str, Any]] = {
    "revision": {"model_config__revision": "r2"},
    "model": {"model_config__model": "other/model"},
    "an equal last part of the model's name": {"model_config__model": "other/some/model"},
    "dtype": {"model_config__dtype": torch.bfloat16},
    "kv dtype": {"cache_config__cache_dtype": "fp8"},
    "kv dtype of some layers": {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
    "quantization": {"model_config__quantization": "fp8"},
    "seed of dummy weights": {"model_config__seed": 1},
    "rope": {"model_config__hf_config": hf(rope_scaling={"type": "linear", "factor": 2.0})},
    "device": {"device_config__device_type": "cuda"},
    "attention backend": {"attention_config__backend": SimpleNamespace(name="FLASHINFER")},
    "parallel": {"parallel_config__tensor_parallel_size": 2},
    "model code": {"model_config__model_impl": "transformers"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_setting_is_another_namespace(what: str) -> None:
    assert digest(fake_vllm_config(**CHANGES[what])) != digest()


def test_equal_settings_are_one_namespace_wherever_the_model_was_found() -> None:
    moved = SimpleNamespace(to_dict=lambda: {"_name_or_path": "/there", "rope_theta": 10000.0})
    assert digest(fake_vllm_config(model_config__hf_config=moved)) == digest() == digest()


def test_the_longest_sequence_matters_where_rope_depends_on_it() -> None:
    longrope = {"rope_scaling": {"rope_type": "longrope"}}
    a, b = (
        digest(fake_vllm_config(model_config__max_model_len=n, model_config__hf_config=hf(**longrope)))
        for n in (1024, 2048)
    )
    assert a != b
    assert digest(fake_vllm_config(model_config__max_model_len=2048)) == digest()


def test_the_layout_is_part_of_the_namespace() -> None:
    other = fake_kv_cache_config()
    other.kv_cache_layout = "LBNHC"
    assert digest(kv=other) != digest()
    assert digest(kv=fake_kv_cache_config(specs=[full_attention(8)])) != digest()
    assert digest(rows=[PageLayout(engine_blocks=1, ranks=1, page_bytes=[128])]) != digest()
    assert digest(config=load_config({"engine_blocks_per_block": 2})) != digest()


def test_the_version_of_vllm_is_part_of_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    assert digest() != before


def test_a_weights_version_stands_for_the_weights() -> None:
    v1, v2 = load_config({"weights_version": "1"}), load_config({"weights_version": "2"})
    assert digest(config=v1) != digest(config=v2)
    elsewhere = fake_vllm_config(model_config__model="elsewhere/model", load_config__load_format="auto")
    assert weights_identity(elsewhere, v1) == "version 1"


def test_a_checkpoint_goes_by_its_content_not_by_its_place(tmp_path: Path) -> None:
    def identity(name: str, content: bytes) -> bytes:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(content)
        (directory / "README.md").write_text(name)
        return digest(fake_vllm_config(model_config__model=str(directory), load_config__load_format="auto"))

    assert identity("a", b"weights") == identity("b", b"weights")
    assert identity("c", b"edited!") != identity("d", b"weights")


def test_weights_that_cannot_be_found_need_a_word_from_the_user(tmp_path: Path) -> None:
    streamed = fake_vllm_config(model_config__model="s3://bucket/model", load_config__load_format="runai_streamer")
    with pytest.raises(ConfigError, match='set "weights_version"') as raised:
        weights_identity(streamed, Config(), DigestCache(tmp_path / "d"))
    assert "\n" not in str(raised.value)

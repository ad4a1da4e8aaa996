"""Keys: what must change them, what must not, and requests that have none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_fakes import FakeRequest, media

from kvtier.core.groups import Group
from kvtier.core.prefix import namespace_digest
from kvtier.vllm.digests import DigestCache, weight_files
from kvtier.vllm.keys import Keyring

TOKENS = list(range(100, 148))


def ring(namespace: bytes = b"n", unit: int = 16) -> Keyring:
    return Keyring(namespace, [Group(block_tokens=16)], unit)


def keys(request: FakeRequest, keyring: Keyring | None = None) -> list[bytes]:
    made = (keyring or ring()).keys_of(request)
    assert made is not None
    return list(made.upto(request.num_tokens)[0])


def plain(**changes: Any) -> FakeRequest:
    return FakeRequest("r", list(TOKENS), **changes)


@pytest.fixture
def adapter(tmp_path: Path) -> Any:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"a" * 100)
    return SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path))


def test_equal_prompts_have_equal_keys_and_share_their_prefix() -> None:
    longer = FakeRequest("s", TOKENS[:32] + [1] * 16)
    assert keys(plain()) == keys(plain())
    assert len(keys(plain())) == 3
    assert keys(longer)[:2] == keys(plain())[:2]
    assert keys(longer)[2] != keys(plain())[2]


def test_keys_extended_token_by_token_equal_keys_made_at_once() -> None:
    request = plain()
    made = ring().keys_of(request)
    assert made is not None
    for tokens in range(len(TOKENS) + 1):
        made.upto(tokens)
        assert len(made.upto(tokens)[0]) == tokens // 16
    assert made.upto(len(TOKENS))[0] == keys(plain())


def test_no_block_is_shared_across_salts() -> None:
    assert not set(keys(plain(cache_salt="x"))) & set(keys(plain(cache_salt="y")))
    assert not set(keys(plain(cache_salt="x"))) & set(keys(plain()))


def test_a_salt_cannot_look_like_a_salt_with_an_adapter(adapter: Any) -> None:
    with_adapter = keys(plain(cache_salt="s", lora_request=adapter))
    without = keys(plain(cache_salt="s"))
    assert not set(with_adapter) & set(without)


def test_the_namespace_is_part_of_every_key() -> None:
    assert not set(keys(plain(), ring(b"a"))) & set(keys(plain(), ring(b"b")))


def test_a_reset_makes_keys_that_never_come_back() -> None:
    keyring = ring()
    before = keys(plain(), keyring)
    keyring.reset()
    after = keys(plain(), keyring)
    keyring.reset()
    assert not set(before) & set(after)
    assert not set(after) & set(keys(plain(), keyring))
    assert keyring.epoch == 2


def test_adapters_of_one_name_and_number_are_told_apart_by_their_files(tmp_path: Path, adapter: Any) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_model.safetensors").write_bytes(b"b" * 100)
    twin = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(other))
    first = keys(plain(lora_request=adapter))
    assert not set(first) & set(keys(plain(lora_request=twin)))
    assert not set(first) & set(keys(plain()))


def test_a_reloaded_adapter_of_new_weights_has_new_keys(adapter: Any) -> None:
    keyring = ring()
    before = keys(plain(lora_request=adapter), keyring)
    Path(adapter.lora_path, "adapter_model.safetensors").write_bytes(b"changed" * 20)
    # Under its old number the engine may or may not have read the new files.
    assert keyring.keys_of(plain(lora_request=adapter)) is None
    reloaded = SimpleNamespace(lora_name="a", lora_int_id=2, lora_path=adapter.lora_path)
    assert not set(before) & set(keys(plain(lora_request=reloaded), keyring))


def test_an_adapter_number_is_no_identity(adapter: Any) -> None:
    renumbered = SimpleNamespace(lora_name="a", lora_int_id=9, lora_path=adapter.lora_path)
    assert keys(plain(lora_request=adapter)) == keys(plain(lora_request=renumbered))


def test_an_adapter_without_files_is_not_keyed(tmp_path: Path) -> None:
    nowhere = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path / "nowhere"))
    assert ring().keys_of(plain(lora_request=nowhere)) is None


def test_media_ids_of_equal_low_bits_are_told_apart() -> None:
    first = keys(plain(mm_features=[media(f"{0x1ABCD:x}", 20, 10)]))
    second = keys(plain(mm_features=[media(f"{0x2ABCD:x}", 20, 10)]))
    assert first[0] == second[0] == keys(plain())[0], "media behind a block does not change it"
    assert not set(first[1:]) & set(second[1:])


def test_the_position_and_length_of_media_matter() -> None:
    seen = {tuple(keys(plain(mm_features=[media("m", *at)]))[1:]) for at in ((20, 10), (21, 10), (20, 9), (16, 14))}
    assert len(seen) == 4


def test_media_that_spans_blocks_is_in_each_of_them() -> None:
    first = ring().keys_of(plain(mm_features=[media("m", 10, 30)]))
    second = ring().keys_of(plain(mm_features=[media("o", 10, 30)]))
    assert first is not None
    assert second is not None
    assert [first._extra(at, at + 16) == second._extra(at, at + 16) for at in (0, 16, 32, 48)] == [False] * 3 + [True]


def test_media_without_an_identifier_is_not_keyed() -> None:
    assert ring().keys_of(plain(mm_features=[media("", 0, 4)])) is None


def test_a_prompt_of_embeddings_without_ids_is_not_keyed() -> None:
    assert ring().keys_of(FakeRequest("r", None, prompt_embeds=torch.zeros(48, 4))) is None


def test_embeddings_between_tokens_are_bound_to_their_block() -> None:
    is_token = [True] * 20 + [False] * 10 + [True] * 18
    embeds = torch.arange(48 * 4, dtype=torch.float32).reshape(48, 4)
    other = embeds.clone()
    other[25, 3] += 0.001
    base = keys(plain(prompt_embeds=embeds, prompt_is_token_ids=is_token))
    same = keys(plain(prompt_embeds=embeds.clone(), prompt_is_token_ids=is_token))
    changed = keys(plain(prompt_embeds=other, prompt_is_token_ids=is_token))
    assert base == same
    assert other[25, 3] != embeds[25, 3]
    assert base[0] == changed[0]
    assert base[1] != changed[1]


def test_a_session_whose_prompt_changes_is_not_keyed() -> None:
    assert ring().keys_of(plain(resumable=True)) is None


def test_keys_are_equal_in_every_process() -> None:
    code = (
        "from kvtier.core.groups import Group; from kvtier.vllm.keys import Keyring\n"
        "from kvtier.core.prefix import namespace_digest\n"
        "from types import SimpleNamespace as N\n"
        "r = N(prompt_token_ids=[1], resumable=False, prompt_embeds=None, mm_features=[], lora_request=None,\n"
        "      cache_salt='s', all_token_ids=list(range(64)))\n"
        "k = Keyring(namespace_digest({'model': 'm'}), [Group(block_tokens=16)], 16).keys_of(r)\n"
        "print([key.hex() for key in k.upto(64)[0]])"
    )
    # The package's __init__ imports vLLM, which these three interpreters need not wait for.
    code = "import sys, types; p = types.ModuleType('kvtier.vllm'); import kvtier, os\n" + (
        "p.__path__ = [os.path.join(kvtier.__path__[0], 'vllm')]; sys.modules['kvtier.vllm'] = p\n" + code
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "random")
    }
    request = FakeRequest("r", list(range(64)), cache_salt="s")
    here = keys(request, ring(namespace_digest({"model": "m"})))
    assert outputs == {f"{[key.hex() for key in here]}\n"}
    assert here[0].hex() == GOLDEN_KEY, "keys of this release must stay what they are, or every stored block is lost"


GOLDEN_KEY = "10f69c2582a5dc18bd16c07e415c46c2c89d3fcc4395f610cae8fb80b0d87aac0000"


def test_a_changed_file_has_another_digest(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    cache = DigestCache(tmp_path / "digests.jsonl")
    weights.write_bytes(b"a" * 1000)
    first = cache.of_files([weights])
    weights.write_bytes(b"a" * 999 + b"b")
    assert cache.of_files([weights]) != first


def test_a_digest_is_read_from_its_cache_and_a_torn_line_is_skipped(tmp_path: Path) -> None:
    import os

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 1000)
    os.utime(weights, ns=(10**18, 10**18))
    path = tmp_path / "cache" / "digests.jsonl"
    first = DigestCache(path).of_file(weights)
    path.write_bytes(b'["torn"' + path.read_bytes().replace(first.encode(), b"remembered"))
    assert DigestCache(path).of_file(weights) == "remembered"
    weights.write_bytes(b"b" * 1000)
    assert DigestCache(path).of_file(weights) != "remembered"


def test_a_file_in_a_hub_cache_goes_by_its_blob(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"never read")
    link = tmp_path / "snapshots" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(blob)
    assert DigestCache(tmp_path / "d").of_file(link) == f"blob:{'ab' * 32}"
    assert weight_files(link.parent) == [link]

"""Keys: equal everywhere, different for everything that changes a block's bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.ids import KEY_BYTES, group_of
from kvtier.core.prefix import Chain, chain_start, joined, namespace_digest

VECTOR = """
from kvtier.core.prefix import Chain, chain_start, namespace_digest
namespace = namespace_digest({"model": "m", "revision": "r1", "dtype": "bfloat16"})
plain = Chain(chain_start(namespace), 4)
plain.extend(range(16))
other = Chain(chain_start(namespace, b"tenant"), 4)
other.extend(range(8), [b"", b"adapter"])
for key in [*plain.keys(0, 2), *plain.keys(3, 1), *other.keys(0, 1)]:
    print(key.hex())
"""
GOLDEN = """\
ce9ce4cf6f071ca12438e47fbd357483a31d6e02e091e4deafc9878c32216a0e0000
ae695f291f3318f279c498243b58a686f73d4dae2be14629a329c23177d54f500000
69271d1413fafe701e0aa2b83e547fd9c44e988a6c8a5bbe44e7bf80919a77060003
ce9ce4cf6f071ca12438e47fbd357483a31d6e02e091e4deafc9878c32216a0e0003
3e1d298a93162beaf47a85eed9a1dd5a004b01a14553c6cb6be6dbaf99ec2ad80003
ae695f291f3318f279c498243b58a686f73d4dae2be14629a329c23177d54f500003
8d725e942f4c9f7dca716077b70055583c10b694023d3402eee3a25b785c868b0000
6e0bdea4838d947aa8d03885108a414b2f703eb7626a5e0419b02d096633b6b20000
"""


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_are_equal_in_every_interpreter(seed: str) -> None:
    command = [sys.executable, "-c", VECTOR]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == GOLDEN


def keys_of(
    tokens: list[int], *, namespace: bytes = b"n", salt: bytes = b"", extras: list[bytes] | None = None
) -> list[bytes]:
    chain = Chain(chain_start(namespace, salt), 2)
    chain.extend(tokens, extras)
    return chain.keys(0, 1)


TOKENS = [1, 2, 3, 4, 5, 6]


def test_every_key_binds_all_tokens_before_it() -> None:
    base = keys_of(TOKENS)
    for at in range(len(TOKENS)):
        changed = keys_of([*TOKENS[:at], 99, *TOKENS[at + 1 :]])
        assert changed[: at // 2] == base[: at // 2]
        assert set(changed[at // 2 :]).isdisjoint(base)


@pytest.mark.parametrize(
    "other",
    [
        {"salt": b"y"},
        {"namespace": b"m"},
        {"namespace": b"", "salt": b"n"},
        {"extras": [b"a", b"", b""]},
        {"extras": [b"b", b"", b""]},
        {"extras": [b"\0", b"", b""]},
    ],
)
def test_salt_namespace_and_extras_of_the_first_unit_change_every_key(other: dict[str, object]) -> None:
    assert set(keys_of(TOKENS, **other)).isdisjoint(keys_of(TOKENS))


def test_extras_change_keys_from_their_unit_on_and_their_place_matters() -> None:
    base = keys_of(TOKENS)
    second = keys_of(TOKENS, extras=[b"", b"image", b""])
    third = keys_of(TOKENS, extras=[b"", b"", b"image"])
    assert second[0] == base[0]
    assert second[1] != base[1]
    assert third[:2] == base[:2]
    assert third[2] not in (base[2], second[2])


def test_long_extras_that_differ_only_at_their_end_differ() -> None:
    one, other = (b"image" * 100 + end for end in (b"\x01\xab\xcd", b"\x02\xab\xcd"))
    assert keys_of([1, 2], extras=[one]) != keys_of([1, 2], extras=[other])


def test_no_extras_and_empty_extras_are_the_same() -> None:
    assert keys_of(TOKENS) == keys_of(TOKENS, extras=[b"", b"", b""])


def test_groups_have_keys_of_their_own() -> None:
    chain = Chain(chain_start(b"n"), 2)
    chain.extend(TOKENS)
    assert set(chain.keys(0, 1)).isdisjoint(chain.keys(1, 1))
    assert [group_of(key) for key in chain.keys(513, 1)] == [513] * 3
    assert all(len(key) == KEY_BYTES for key in chain.keys(0, 1))


def test_a_key_is_the_digest_at_the_blocks_end() -> None:
    chain = Chain(chain_start(b"n"), 2)
    chain.extend([*TOKENS, 7, 8, 9, 10])
    assert chain.keys(0, 2) == chain.keys(0, 1)[1::2], "a block that is not full has no key"
    assert chain.keys(0, 2, first=1) == chain.keys(0, 2)[1:]
    assert chain.keys(0, 2, first=2) == []


def test_part_of_a_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="whole units of 2"):
        keys_of([1, 2, 3])


def test_namespaces_do_not_depend_on_the_order_of_their_parts() -> None:
    assert namespace_digest({"a": "1", "b": "2"}) == namespace_digest({"b": "2", "a": "1"})


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_different_fields_never_join_to_the_same_bytes(a: list[bytes], b: list[bytes]) -> None:
    assert (joined(*a) == joined(*b)) == (a == b)


@given(
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
)
def test_namespaces_are_equal_only_if_all_parts_are(a: dict[str, str], b: dict[str, str]) -> None:
    assert (namespace_digest(a) == namespace_digest(b)) == (a == b)


Prompt = tuple[list[int], bytes, bytes, list[bytes]]
prompts = st.tuples(
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
    st.sampled_from([b"", b"a", b"b"]),
    st.sampled_from([b"", b"a", b"b"]),
    st.lists(st.sampled_from([b"", b"x", b"xx"]), min_size=2, max_size=2),
)


@given(prompts, prompts)
def test_last_keys_are_equal_only_for_equal_prompts(a: Prompt, b: Prompt) -> None:
    def last(prompt: Prompt) -> bytes:
        tokens, namespace, salt, extras = prompt
        return keys_of(tokens, namespace=namespace, salt=salt, extras=extras)[-1]

    assert (last(a) == last(b)) == (a == b)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=12), st.integers(0, 6))
def test_a_chain_grown_in_steps_equals_one_made_at_once(tokens: list[int], units: int) -> None:
    grown = Chain(chain_start(b"n"), 2)
    grown.extend(np.array(tokens[: 2 * units], np.int64))
    grown.extend(tokens[2 * units :])
    assert grown.keys(0, 1) == keys_of(tokens)

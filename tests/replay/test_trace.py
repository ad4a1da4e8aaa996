"""Traces: what is read, what is refused and why, and that equal ids become equal tokens everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.replay.trace import BLOCK_TOKENS, TraceRequest, conversations, fill_in, read_trace, seen_before


def line(*, length: int = 700, ids: object = (0, 1), **more: object) -> str:
    ids = list(ids) if isinstance(ids, tuple) else ids
    return json.dumps({"timestamp": 5, "input_length": length, "output_length": 3, "hash_ids": ids, **more})


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def request(length: int, *ids: int) -> TraceRequest:
    return TraceRequest(timestamp=0, input_length=length, output_length=1, hash_ids=list(ids))


def test_a_trace_is_read_line_by_line_and_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "t", line(), "", line(length=512, ids=(9,), session="x"))
    assert read_trace(path) == [
        TraceRequest(timestamp=5, input_length=700, output_length=3, hash_ids=[0, 1]),
        TraceRequest(timestamp=5, input_length=512, output_length=3, hash_ids=[9]),
    ]


def test_what_lies_behind_the_requests_asked_for_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "t", line(), line(), "not a request")
    assert len(read_trace(path, requests_max=2)) == 2


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "truncated"),
        ("nonsense", "malformed"),
        ("[]", "Expected `object`"),
        (line(length=513, ids=(0,)), "takes 2 hash_ids of 512 tokens, not 1"),
        (line(length=512, ids=(0, 1)), "takes 1 hash_ids of 512 tokens, not 2"),
        (line(length=0, ids=()), "input_length must be at least 1"),
        (line(ids=(0, -1)), "hash_ids must be"),
        (line(ids=["a", "b"]), "hash_ids"),
        ('{"timestamp": 0}', "missing required field"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong_and_a_good_example(tmp_path: Path, bad: str, said: str) -> None:
    path = written(tmp_path / "t", line(), bad)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ")
    assert said in message
    assert '"hash_ids": [0, 1]' in message


def test_a_trace_without_a_request_or_without_a_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(written(tmp_path / "t", ""))
    with pytest.raises(ConfigError, match=r"cannot be read .*No such file"):
        read_trace(tmp_path / "none")


def test_equal_ids_become_equal_tokens_and_others_do_not() -> None:
    one = fill_in(request(1500, 1, 2, 3), vocab=2048, tokens_max=4096)
    two = fill_in(request(1300, 1, 2, 4), vocab=2048, tokens_max=4096)
    assert (len(one), len(two)) == (1500, 1300)
    assert one[:1024] == two[:1024]
    assert one[1024:1300] != two[1024:]
    assert one[:512] != one[512:1024]
    assert min(one) >= 2
    assert max(one) < 2048


def test_tokens_are_the_same_in_every_process() -> None:
    """Written down: a change of these makes old disk caches of a replayed trace useless."""
    assert fill_in(request(4, 7), vocab=2048, tokens_max=4) == [1935, 1280, 1401, 1837]


def test_a_long_prompt_is_cut_at_its_end() -> None:
    whole = fill_in(request(2000, 1, 2, 3, 4), vocab=100, tokens_max=2000)
    assert fill_in(request(2000, 1, 2, 3, 4), vocab=100, tokens_max=700) == whole[:700]


def naive_seen_before(prompts: list[list[int]], unit: int) -> list[int]:
    found = []
    for number, tokens in enumerate(prompts):
        hit = 0
        for end in range(unit, len(tokens), unit):
            if any(old[:end] == tokens[:end] for old in prompts[:number]):
                hit = end
        found.append(hit)
    return found


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=8), st.integers(1, 4))
def test_seen_before_finds_the_longest_prefix_of_whole_units_but_never_the_whole_prompt(
    prompts: list[list[int]], unit: int
) -> None:
    assert list(seen_before(prompts, unit=unit)) == naive_seen_before(prompts, unit)


def test_conversations_take_turns_and_grow_by_whole_blocks() -> None:
    made = conversations(count=2, turns=3, turn_blocks=2, output_tokens=8, seed=1)
    assert made == conversations(count=2, turns=3, turn_blocks=2, output_tokens=8, seed=1)
    assert len({r.hash_ids[0] for r in made}) == 1  # the system prompt
    for r in made:
        assert r.input_length % BLOCK_TOKENS
        assert len(r.hash_ids) == -(-r.input_length // BLOCK_TOKENS)
    for turn in range(2):
        for conversation in range(2):
            now, then = made[2 * turn + conversation], made[2 * (turn + 1) + conversation]
            assert then.hash_ids[: len(now.hash_ids) - 1] == now.hash_ids[:-1]
            assert len(then.hash_ids) == len(now.hash_ids) + 2
    assert not set(made[4].hash_ids[1:]) & set(made[5].hash_ids[1:])
    other = conversations(count=2, turns=3, turn_blocks=2, output_tokens=8, seed=2)
    assert not {i for r in made for i in r.hash_ids} & {i for r in other for i in r.hash_ids}

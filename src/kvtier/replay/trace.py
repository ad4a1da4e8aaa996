"""Request traces in Mooncake's format, and workloads made in it.

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`: one id for each
`BLOCK_TOKENS` tokens of the prompt, the last of which may be cut. Equal ids stand for equal prompts up to and
including that block, so a trace tells what is shared and nothing of what was said. `fill_in` does: equal ids
become equal tokens, in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvtier.errors import ConfigError

BLOCK_TOKENS = 512

_LINE = '{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}'


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace."""

    timestamp: float
    """ms since the trace began"""
    input_length: int
    """tokens"""
    output_length: int
    """tokens"""
    hash_ids: list[int]

    def __post_init__(self) -> None:
        if self.input_length < 1 or self.output_length < 0:
            raise ValueError("input_length must be at least 1, output_length at least 0")
        blocks = -(-self.input_length // BLOCK_TOKENS)
        if len(self.hash_ids) != blocks:
            raise ValueError(
                f"input_length = {self.input_length} takes {blocks} hash_ids of {BLOCK_TOKENS} tokens,"
                f" not {len(self.hash_ids)}"
            )
        if any(not 0 <= hash_id < 1 << 63 for hash_id in self.hash_ids):
            raise ValueError("hash_ids must be 0 to 2^63 - 1")


def read_trace(path: Path, *, requests_max: int | None = None) -> list[TraceRequest]:
    """The first `requests_max` requests of the file, or all. Raises ConfigError, which names the line."""
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if requests_max is not None and len(requests) >= requests_max:
                    break
                if line.strip():
                    requests.append(_parse(line, f"{path}:{number}"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    if not requests:
        raise ConfigError(f"{path}: holds no request; a line of a trace is {_LINE}")
    return requests


def fill_in(request: TraceRequest, *, vocab: int, tokens_max: int) -> list[int]:
    """Token ids of 2 to `vocab` - 1, `input_length` of them but at most `tokens_max`: longer prompts are cut at their
    end, so that what they share stays shared."""
    length = min(request.input_length, tokens_max)
    ids = request.hash_ids[: -(-length // BLOCK_TOKENS)]
    blocks = [np.random.default_rng(hash_id).integers(2, vocab, BLOCK_TOKENS) for hash_id in ids]
    tokens: list[int] = np.concatenate(blocks)[:length].tolist()
    return tokens


def seen_before(prompts: Iterable[list[int]], *, unit: int) -> Iterator[int]:
    """For each prompt, how many of its first tokens an endless cache holds by then: whole units of `unit` tokens, and
    never the whole prompt, of which an engine must compute the last token."""
    known: set[int] = set()
    for tokens in prompts:
        chain, found, hit = 0, 0, True
        for end in range(unit, len(tokens) + 1, unit):
            chain = hash((chain, *tokens[end - unit : end]))
            hit = hit and chain in known
            if hit and end < len(tokens):
                found = end
            known.add(chain)
        yield found


def conversations(*, count: int, turns: int, turn_blocks: int, output_tokens: int, seed: int) -> list[TraceRequest]:
    """`count` conversations of `turns` turns, one turn of each in its turn, all under one system prompt of a block.

    A turn's prompt is all of the conversation so far and `turn_blocks` more blocks, the last of them cut, as real
    prompts are: the turn after it shares the whole ones. Equal arguments give an equal workload.
    """
    random = np.random.default_rng(seed)
    # Far apart from other seeds' ids, which tell blocks apart across workloads.
    fresh = iter(range(seed << 32, (seed + 1) << 32))
    system = next(fresh)
    history = [[system] for _ in range(count)]
    requests = []
    for turn in range(turns):
        for conversation in range(count):
            history[conversation] += [next(fresh) for _ in range(turn_blocks - 1)]
            cut = int(random.integers(64, BLOCK_TOKENS - 64))
            requests.append(
                TraceRequest(
                    timestamp=float(1000 * (turn * count + conversation)),
                    input_length=len(history[conversation]) * BLOCK_TOKENS + cut,
                    output_length=output_tokens,
                    hash_ids=[*history[conversation], next(fresh)],
                )
            )
            history[conversation].append(next(fresh))
    return requests


def _parse(line: bytes, where: str) -> TraceRequest:
    try:
        return msgspec.json.decode(line, type=TraceRequest)
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise ConfigError(f"{where}: {error}; a line of a trace is {_LINE}") from error

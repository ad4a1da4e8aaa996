"""What a process that serves a workload is given, and what it says: shared with whoever starts it; needs no vllm.

job:       Job, a file of msgpack whose path is the process's one argument
to it:     GO
from it:   Started, Served for each request in turn, Finished
"""

from __future__ import annotations

from typing import Any

import msgspec

LOGPROBS = 20

GO = b"go"
"""start the engine: until it comes, a process does only what costs no other one's run anything"""


class Prompt(msgspec.Struct, frozen=True):
    tokens: list[int]
    output_tokens: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """folder of a checkpoint"""
    engine: dict[str, Any]
    """arguments of vLLM's `LLM`"""
    prompts: list[Prompt]
    """served one at a time, so that the runs that are compared compute equal batches"""
    warm_up: Prompt
    """served first and not measured: a first request also pays for what the engine sets up on first use"""
    kvtier: dict[str, Any] | None = None
    """kvtier's configuration; None: vLLM alone"""
    folder: str
    """for temporary files; whoever wrote the job removes it"""
    log: str
    """file for all that the process and its children print"""
    reports: str
    """file for the close reports of both sides"""


class Started(msgspec.Struct, frozen=True, tag=True):
    pass


class Served(msgspec.Struct, frozen=True, tag=True):
    """One request's result."""

    ttft_s: float
    """from its arrival to its first token"""
    prompt_tokens: int
    cached_tokens: int
    """of the prompt, those that were not computed"""
    tokens: list[int]
    """the answer"""
    logprobs: dict[int, float]
    """of the first token: the `LOGPROBS` likeliest ids"""


class SideClosed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The close report of one side of the connector."""

    side: str
    clean: bool
    text: str
    tree: dict[str, Any]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All were served, and the engine has ended."""

    counts: dict[str, int]
    """kvtier's counters over the measured requests, by name"""
    closed: list[SideClosed]


Message = Started | Served | Finished

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
decode_job = msgspec.msgpack.Decoder(Job).decode

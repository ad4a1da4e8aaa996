"""A connector that writes down what it stores and loads, and breaks on request. For tests, inside real vLLM.

`$KVT_PROBE` is a directory. Each side appends to a file of its own there: for every transfer its keys (scheduler
side) and the digests of its device blocks (worker side: at the store, and after the load). A file that a test
creates there asks for a fault: "corrupt-load", "fail-load", or "bug-<hook>".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.runtime.deadline import Deadline
from kvtier.transfer.base import RankEnd, RankTransfer, Way
from kvtier.vllm import KVTierConnector


class Boom(Exception):
    """An injected bug."""


class _Notes:
    def __init__(self, name: str) -> None:
        self.directory = Path(os.environ["KVT_PROBE"])
        self._file = (self.directory / name).open("a", buffering=1)

    def write(self, **note: Any) -> None:
        self._file.write(json.dumps(note) + "\n")

    def wanted(self, fault: str) -> bool:
        """Once for each time that the test asks for it."""
        try:
            (self.directory / fault).unlink()
        except FileNotFoundError:
            return False
        return True


class ProbeRank:
    """A rank that digests what it moves."""

    def __init__(self, rank: Any, layers: Sequence[Any]) -> None:
        self._rank, self._layers = rank, layers
        self._notes = _Notes("worker.jsonl")
        self._loads: dict[int, RankTransfer] = {}

    def submit(self, transfers: Sequence[RankTransfer]) -> None:
        for transfer in transfers:
            if transfer.direction is Way.STORE:
                self._note(transfer, ok=True)
            else:
                self._loads[transfer.id] = transfer
        self._rank.submit(transfers)

    def poll(self) -> list[RankEnd]:
        return [self._seen(end) for end in self._rank.poll()]

    def fence(self, ids: Collection[int], deadline: Deadline) -> list[int]:
        left: list[int] = self._rank.fence(ids, deadline)
        return left

    def _seen(self, end: RankEnd) -> RankEnd:
        transfer = self._loads.pop(end.id, None)
        if transfer is None:
            return end
        if self._notes.wanted("fail-load"):
            end = RankEnd(end.id, ok=False, cause="the test says so")
        if self._notes.wanted("corrupt-load"):
            self._layers[1][transfer.blocks[len(transfer.blocks) // 2]].zero_()
        self._note(transfer, ok=end.ok)
        return end

    def _note(self, transfer: RankTransfer, *, ok: bool) -> None:
        digests = [digest.hex() for digest in self._rank.digest(transfer.blocks)]
        self._notes.write(id=transfer.id, way=str(transfer.direction), ok=ok, digests=digests)


class ProbeStore:
    """A store that remembers which key each device block was offered or loaded for."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._notes = _Notes("scheduler.jsonl")
        self._key_of: dict[int, str] = {}
        self._asked: dict[str, Sequence[bytes]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def lookup(self, request: str, keys: tuple[Sequence[bytes], ...], device_tokens: int) -> int | None:
        self._asked[request] = keys[0]
        found: int | None = self._store.lookup(request, keys, device_tokens)
        return found

    def load(self, request: str, from_tokens: int, to_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        if to_tokens > from_tokens:
            self._key_of.update(zip(blocks[0], (key.hex() for key in self._asked[request]), strict=False))
        self._store.load(request, from_tokens, to_tokens, blocks)

    def offer(self, request: str, group: int, first: int, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        self._key_of.update(zip(blocks, (key.hex() for key in keys), strict=True))
        taken: int = self._store.offer(request, group, first, keys, blocks)
        return taken

    def take_work(self) -> Any:
        work = self._store.take_work()
        for transfer in [*work.stores, *(t for load in work.loads for t in load.transfers)]:
            keys = [self._key_of[block] for block in transfer.blocks]
            self._notes.write(id=transfer.id, way=str(transfer.direction), keys=keys)
        return work


class ProbeConnector(KVTierConnector):
    """As the real one, seen from outside."""

    def _open_rank(self, kv_caches: Mapping[str, Any]) -> Any:
        rank, close = super()._open_rank(kv_caches)
        layers = [kv_caches[name] for name in self._plan.layers[0]]
        return ProbeRank(rank, layers), close

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._trap(self._worker, ("results", "start_loads"))

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        assert self._scheduler is not None
        self._scheduler._store = ProbeStore(self._scheduler._store)  # type: ignore[assignment]
        super().bind_kv_cache_manager(kv_cache_manager)
        self._trap(self._scheduler, ("lookup", "step", "finished"))

    def _trap(self, side: Any, hooks: Sequence[str]) -> None:
        notes = _Notes("faults.jsonl")
        for hook in hooks:
            setattr(side, hook, partial(_trapped, notes, hook, getattr(side, hook)))


def _trapped(notes: _Notes, hook: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if notes.wanted(f"bug-{hook}"):
        raise Boom(hook)
    return real(*args, **kwargs)

"""The scheduler side: what the engine does with its requests, told to the store as it happens.

Rules:
1. A step costs what is new in it: a request is looked at again when its next block becomes full.
2. A block is offered once it is computed after this step and has a key. What was declined is offered again
   with the next full block, or when the request finishes.
3. A found prefix is held from the lookup until the load, or until the engine decides against it.
4. A request whose load is out is never kept by us: the engine keeps its blocks until the load was received.
5. After a reset a request stores and finds nothing until it begins again without a computed token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from kvtier.core.ids import RequestId
from kvtier.engine.store import Store
from kvtier.transfer.base import RankEnd
from kvtier.vllm.books import Books
from kvtier.vllm.keys import Keyring, RequestKeys
from kvtier.vllm.metadata import StepMeta

OFFER_BLOCKS_MAX = 512
"""keys of one offer: what is declined again and again costs no more than this"""

PUSH_S_MAX = 1.0
"""how long transfers without a request may keep an idle engine stepping: it also holds up a graceful stop"""

NEVER = sys.maxsize

BlocksOf = Callable[[int, int, int], Sequence[int]]
"""engine block ids of a request: (group, first, end)"""


@dataclass(slots=True)
class _Tracked:
    """One living request of the engine."""

    request: Any
    next_full: int
    """tokens that must be computed before there is something new to offer"""
    cursors: list[int]
    """for each group, how many blocks from the start the store has taken"""
    epoch: int
    preemptions: int
    keys: RequestKeys | None = None
    keyed: bool = False
    device_tokens: int = 0
    """what the last lookup was told"""
    asked: bool = False
    """the store may hold a lookup of it"""


class SchedulerSide:
    """Used by the engine's scheduler thread alone."""

    def __init__(
        self,
        store: Store,
        keyring: Keyring,
        books: Books,
        *,
        engine_blocks_per_block: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._keyring, self._books = store, keyring, books
        self._per_block = engine_blocks_per_block
        self._clock = clock
        self._requests: dict[RequestId, _Tracked] = {}
        self._first_full = min(group.block_tokens for group in keyring.groups)
        self._align = lcm(*(group.block_tokens for group in keyring.groups))
        self._manager: Any = None
        self._push_since: float | None = None

    def bind(self, kv_cache_manager: Any) -> None:
        """Where the block ids of running requests are found."""
        self._manager = kv_cache_manager

    def new_request(self, request: Any) -> None:
        self._track(request)

    def lookup(self, request: Any, device_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the first `device_tokens` can be loaded, asynchronously; None: ask again."""
        tracked = self._track(request)
        self._begin_again(tracked)
        if request.skip_reading_prefix_cache:
            return 0, False
        end = (request.num_tokens - 1) // self._align * self._align
        keys = self._keys(tracked)
        if keys is None or end <= device_tokens:
            return 0, False
        tracked.asked, tracked.device_tokens = True, device_tokens
        lists = keys.upto(end)
        wanted = tuple(
            list_[: end // group.block_tokens] for group, list_ in zip(self._keyring.groups, lists, strict=True)
        )
        tokens = self._store.lookup(request.request_id, wanted, device_tokens)
        if tokens is None:
            return None, False
        more = tokens - device_tokens
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """The engine decided: it has blocks to load `external_tokens` into, or wants nothing (0)."""
        tracked = self._requests.get(request.request_id)
        if external_tokens == 0:
            if tracked is not None and tracked.asked:
                tracked.asked = False
                self._store.load(request.request_id, 0, 0, ())
            return
        self._books.load_begins(request.request_id)
        if tracked is None:
            return
        tracked.asked = False
        begin = tracked.device_tokens
        self._store.load(request.request_id, begin, begin + external_tokens, blocks.get_block_ids())

    def step(self, scheduled: Any) -> StepMeta:
        """End of a scheduling step (a vLLM SchedulerOutput): offer what is new, and take what the ranks are to do."""
        requests = self._requests
        for request_id in scheduled.preempted_req_ids or ():
            if request_id in requests:
                self._see_preemption(requests[request_id])
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is not None and tracked.request.num_computed_tokens + tokens >= tracked.next_full:
                self._offer(tracked, tracked.request.num_computed_tokens + tokens, self._running_blocks(request_id))
        return self._books.meta(self._store.take_work())

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> bool:
        """Finished or aborted; True: the engine keeps its blocks until the worker side reports it as sent."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        if self._books.is_loading(request.request_id):
            self._store.gone(request.request_id)
            return False
        self._see_preemption(tracked)
        self._offer(tracked, request.num_computed_tokens, lambda group, first, end: block_ids[group][first:end])
        self._store.gone(request.request_id)
        out = self._store.stores_out(request.request_id)
        if out:
            self._books.keep_for(request.request_id, out)
        return bool(out)

    def reset(self) -> None:
        """A new namespace, in O(1). What is out ends without becoming visible; loads are reported as failed."""
        self._keyring.reset()
        self._store.reset()

    def ranks_ended(self, ends: Sequence[RankEnd]) -> None:
        self._store.ranks_ended(ends)

    def wants_steps(self) -> bool:
        """Transfers are out, and no request keeps the engine stepping; True for less than `PUSH_S_MAX` at a time."""
        if self._requests or not self._store.rank_transfers_out:
            self._push_since = None
            return False
        now = self._clock()
        if self._push_since is None:
            self._push_since = now
        return now - self._push_since < PUSH_S_MAX

    def __len__(self) -> int:
        return len(self._requests)

    # Inside.

    def _track(self, request: Any) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = _Tracked(
                request,
                next_full=self._first_full,
                cursors=[0] * len(self._keyring.groups),
                epoch=self._keyring.epoch,
                preemptions=request.num_preemptions,
            )
            self._requests[request.request_id] = tracked
        return tracked

    def _begin_again(self, tracked: _Tracked) -> None:
        """The request has no computed token: whatever was before, it begins anew."""
        self._see_preemption(tracked)
        if tracked.epoch != self._keyring.epoch:
            tracked.epoch = self._keyring.epoch
            tracked.keys, tracked.keyed = None, False
            self._rewind(tracked)

    def _see_preemption(self, tracked: _Tracked) -> None:
        """Its blocks are free: stores that read them must end before this step's first write."""
        if tracked.preemptions != tracked.request.num_preemptions:
            tracked.preemptions = tracked.request.num_preemptions
            self._store.preempted(tracked.request.request_id)
            tracked.asked = False
            self._rewind(tracked)

    def _rewind(self, tracked: _Tracked) -> None:
        tracked.cursors = [0] * len(tracked.cursors)
        tracked.next_full = self._first_full

    def _keys(self, tracked: _Tracked) -> RequestKeys | None:
        if not tracked.keyed:
            tracked.keys, tracked.keyed = self._keyring.keys_of(tracked.request), True
        return tracked.keys

    def _offer(self, tracked: _Tracked, computed: int, blocks_of: BlocksOf) -> None:
        """Offer the full blocks of the first `computed` tokens that the store has not taken."""
        request = tracked.request
        # Behind the known tokens lie drafts, which may be rejected.
        computed = min(computed, request.num_tokens)
        if tracked.epoch != self._keyring.epoch or (keys := self._keys(tracked)) is None:
            tracked.next_full = NEVER
            return
        lists = keys.upto(computed)
        tracked.next_full = NEVER
        for number, group in enumerate(self._keyring.groups):
            full = computed // group.block_tokens
            tracked.next_full = min(tracked.next_full, (full + 1) * group.block_tokens)
            first = tracked.cursors[number]
            while first < full:
                end = min(full, first + OFFER_BLOCKS_MAX)
                ids = blocks_of(number, first * self._per_block, end * self._per_block)
                taken = self._store.offer(request.request_id, number, first, lists[number][first:end], ids)
                first += taken
                if first < end:
                    break
            tracked.cursors[number] = first

    def _running_blocks(self, request_id: RequestId) -> BlocksOf:
        groups = self._manager.get_blocks(request_id).blocks
        return lambda group, first, end: [block.block_id for block in groups[group][first:end]]

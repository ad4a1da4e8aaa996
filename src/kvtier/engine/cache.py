"""kvtier without an engine: one object over arrays of your own.

    with kvtier.open(config, pages=layers, block_tokens=16, namespace={"model": "mine"}) as cache:
        cache.store(tokens, blocks=[0, 1, 2])
        loaded = cache.load(tokens, blocks=[5, 6, 7])

`pages` are your "device": one (blocks, page bytes) uint8 array a layer. Calls wait, with a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.config import load_config
from kvtier.core.groups import Group
from kvtier.core.ids import Key
from kvtier.core.prefix import Chain, chain_start, namespace_digest
from kvtier.engine.open import RankSide, SchedulerSide, open_both_sides
from kvtier.errors import Closed, ConfigError
from kvtier.memory.layout import PageLayout
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.tiers.registry import tier_options
from kvtier.transfer.pages import NumpyPages

WAIT_S = 10.0
"""How long `store` and `load` wait for copies in this process's memory."""

POLL_S = 0.0005
"""A copy of a few MiB in memory takes about as long; what a tier has to say ends the wait at once."""


class Cache:
    """KV blocks of one model, beyond the arrays that hold them now. One thread at a time."""

    def __init__(self, rank: RankSide, scheduler: SchedulerSide, namespace: bytes, block_tokens: int, per_block: int):
        """Use `kvtier.open`."""
        self._rank, self._scheduler = rank, scheduler
        self._namespace, self._block_tokens, self._per_block = namespace, block_tokens, per_block
        self._next = 0
        self._closed = False

    def store(self, tokens: ArrayLike, blocks: Sequence[int], *, salt: bytes = b"", wait_s: float = WAIT_S) -> int:
        """Copy the full blocks of this prompt to host memory, and on to the lower tiers by themselves.

        `blocks[i]` is the row of `pages` that holds block i. Returns how many tokens are stored now: fewer
        than given where there is no room. Tokens behind the last full block are not stored.
        """
        request, keys = self._begin(tokens, len(blocks), salt)
        store = self._scheduler.store
        try:
            taken = store.offer(request, 0, 0, keys, list(blocks[: len(keys) * self._per_block]))
            done = self._run(lambda: not store.stores_out(request), wait_s)
        finally:
            store.gone(request)
        return taken * self._block_tokens if done and store.off is None else 0

    def load(self, tokens: ArrayLike, blocks: Sequence[int], *, salt: bytes = b"", wait_s: float = WAIT_S) -> int:
        """Copy the longest stored prefix of this prompt into `pages`, block i into row `blocks[i]`.

        Returns its tokens; 0 is a miss. What the rows held before is only overwritten for a prefix that was
        found, and a prefix that failed half-way returns 0.
        """
        request, keys = self._begin(tokens, len(blocks), salt)
        store = self._scheduler.store
        try:
            found: list[int] = []

            def answered() -> bool:
                answer = store.lookup(request, (keys,), 0)
                found[:] = [answer] if answer is not None else []
                return answer is not None

            if not self._run(answered, wait_s) or not found[0]:
                return 0
            store.load(request, 0, found[0], [list(blocks)])
            failed_before = self.counts()["loads_failed_count"]
            if not self._run(lambda: not store.rank_transfers_out, wait_s):
                return 0
            return found[0] if self.counts()["loads_failed_count"] == failed_before else 0
        finally:
            store.gone(request)

    def reset(self) -> None:
        """Nothing that was stored before is found after, in any tier."""
        self._require_open()
        self._namespace = namespace_digest({"before": self._namespace.hex(), "reset": np.random.bytes(16).hex()})
        self._scheduler.store.reset()

    def settle(self, wait_s: float = WAIT_S) -> bool:
        """Wait until what was stored has reached the lower tiers; False if it has not in time."""
        self._require_open()
        return self._scheduler.store.settle(Deadline.after(wait_s))

    def counts(self) -> dict[str, int]:
        return self._scheduler.store.counts()

    def close(self, timeout_s: float | None = None) -> CloseReport:
        """Stop everything within `timeout_s` (default: `close_timeout_s`), and say how."""
        self._closed = True
        return self._scheduler.close(Deadline.after(timeout_s) if timeout_s is not None else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("the cache was closed before this call")

    def _begin(self, tokens: ArrayLike, blocks: int, salt: bytes) -> tuple[str, list[Key]]:
        """A request of our own, and the keys of the prompt's full blocks that `blocks` rows can hold."""
        self._require_open()
        self._next += 1
        full = min(np.size(tokens) // self._block_tokens, blocks // self._per_block)
        chain = Chain(chain_start(self._namespace, salt), self._block_tokens)
        chain.extend(np.asarray(tokens).ravel()[: full * self._block_tokens])
        return f"call-{self._next}", chain.keys(0, 1)

    def _run(self, done: Callable[[], bool], wait_s: float) -> bool:
        """Do the ranks' work until `done()`; False at the deadline."""
        store, rank = self._scheduler.store, self._rank.rank
        deadline = Deadline.after(wait_s)
        while not done():
            if deadline.expired:
                return False
            work = store.take_work()
            if work.off:
                return False
            rank.submit([*(t for load in work.loads for t in load.transfers), *work.stores])
            store.wait(min(deadline.left, POLL_S))
            store.pump()
        return True


def open_cache(
    config: Mapping[str, Any] | str | Path,
    *,
    pages: Sequence[NDArray[np.uint8]],
    block_tokens: int,
    namespace: Mapping[str, str],
) -> Cache:
    """Open a cache over `pages`, one (blocks, page bytes) uint8 array a layer.

    `config`: a mapping or the path of a TOML or JSON file. `block_tokens`: tokens of one block (of
    `engine_blocks_per_block` rows). `namespace`: everything that changes a block's bytes, by name, such as
    the model and its revision. Raises ConfigError.
    """
    if not namespace:
        raise ConfigError("namespace is empty: name at least the model and its revision, or bytes get mixed up")
    checked = load_config(config, tier_options=tier_options())
    per_block = checked.engine_blocks_per_block
    numpy_pages = NumpyPages(pages)
    layout = PageLayout(per_block, 1, numpy_pages.page_bytes)
    digest = namespace_digest({**namespace, "rows": layout.describe(), "block_tokens": str(block_tokens)})
    rank, scheduler = open_both_sides(
        checked,
        groups=[Group(block_tokens)],
        namespace=lambda _table: digest,
        pages=[numpy_pages],
        page_layouts=[layout],
    )
    return Cache(rank, scheduler, digest, block_tokens, per_block)

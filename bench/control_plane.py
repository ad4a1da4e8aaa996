"""What the control plane costs, beside vLLM's own managers on the same keys in the same run.

    python bench/control_plane.py [--json] [--rounds 5] [--blocks 1000000]

Ours does in one event what vLLM's managers do in one call a key. With a tier: it answers at once, takes every
demotion, and holds nothing that is asked for. Times are CPU time of the thread, the least of the interleaved
rounds; a budget is a part of what vLLM's manager takes in the same run, so that a slow or busy machine changes
both. Without vllm installed only ours is measured, against the budget's own figure where it has one.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import count
from typing import Any

import numpy as np

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.groups import CoreConfig, Group, TierSpec
from kvtier.core.ids import Key, make_key
from kvtier.core.prefix import Chain, chain_start
from kvtier.core.store import StoreCore

TOKENS = 16
CAPACITY = 32_768
FOUND = 8_192
RUN = 1_024

try:
    import vllm.v1.kv_offload.base as offload
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
except ImportError:
    offload = None


def fresh_keys(number: int, numbers: count[int]) -> list[Key]:
    return [make_key(sha256(next(numbers).to_bytes(8, "big")).digest(), 0) for _ in range(number)]


class Ours:
    """The core with a tier that answers every ask with nothing and every demotion with ok."""

    def __init__(self, capacity: int, *, tier: bool) -> None:
        self.name = "kvtier tiering" if tier else "kvtier cpu"
        tiers = (TierSpec("disk"),) if tier else ()
        self.core = StoreCore(CoreConfig((Group(TOKENS),), (capacity,), tiers=tiers))
        self.longest_s = 0.0
        self._requests = count()
        if tier:
            self.handle(ev.TierUp(0.0, "disk"))

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        effects = self.core.handle(event)
        for effect in effects:
            if isinstance(effect, fx.Ask):
                self.handle(ev.TierAnswered(0.0, "disk", effect.ask, [False] * len(effect.keys)))
            elif isinstance(effect, fx.StartTier):
                self.handle(ev.TierEnded(0.0, "disk", effect.transfer, ["ok"] * len(effect.keys)))
        return effects

    def request(self) -> str:
        return f"r{next(self._requests)}"

    def find(self, request: str, keys: Sequence[Key]) -> int:
        self.handle(ev.Lookup(0.0, request, (keys,), 0))
        answer = self.handle(ev.Lookup(0.0, request, (keys,), 0))[-1]
        assert isinstance(answer, fx.Answered)
        assert answer.tokens is not None
        return answer.tokens // TOKENS

    def store(self, request: str, keys: Sequence[Key]) -> None:
        for effect in self.handle(ev.Offer(0.0, request, 0, 0, keys)):
            if isinstance(effect, fx.StartStore):
                self.handle(ev.RankEnded(0.0, effect.transfer, ok=True))

    def load(self, request: str, blocks: int) -> None:
        for effect in self.handle(ev.Load(0.0, request, 0, blocks * TOKENS)):
            if isinstance(effect, fx.StartLoad):
                self.handle(ev.RankEnded(0.0, effect.transfer, ok=True))

    def gone(self, request: str) -> None:
        self.handle(ev.RequestGone(0.0, request))

    def serve(self, keys: Sequence[Key]) -> int:
        """All the work of a request: find, load what is found, store the rest, go."""
        request = self.request()
        found = self.find(request, keys)
        self.load(request, found)
        self.store(request, keys[found:])
        self.gone(request)
        return found


class Theirs:
    """vLLM's managers, called as its offloading connector's scheduler calls them."""

    def __init__(self, capacity: int, *, tier: bool) -> None:
        self.name = "vllm tiering" if tier else "vllm cpu"
        self._requests = count()
        self.tier: Any = None
        if tier:
            primary = CPUPrimaryTierOffloadingManager(capacity, _Region(capacity))
            self.tier = ExampleSecondaryTierManager(None, primary.get_kv_memoryview(), "example")
            self.manager: Any = TieringOffloadingManager(primary, [self.tier])
        else:
            self.manager = CPUOffloadingManager(capacity)

    def request(self) -> Any:
        context = offload.ReqContext(f"r{next(self._requests)}")
        self.manager.on_new_request(context)
        return context

    def find(self, request: Any, keys: Sequence[Key]) -> int:
        hit = offload.LookupResult.HIT
        lookup = self.manager.lookup
        for found, key in enumerate(keys):
            if lookup(key, request) is not hit:
                return found
        return len(keys)

    def store(self, request: Any, keys: Sequence[Key]) -> None:
        output = self.manager.prepare_store(keys, request)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, request)
        self.step()

    def load(self, request: Any, keys: Sequence[Key]) -> None:
        self.manager.prepare_load(keys, request)
        self.manager.complete_load(keys, request)

    def step(self) -> None:
        self.manager.on_schedule_end(offload.ScheduleEndContext((), ()))
        if self.tier is not None:
            self.manager._processed_jobs_this_step = False
            self.manager._maybe_process_finished_jobs()
            self.tier.chunks.clear()

    def gone(self, request: Any) -> None:
        self.manager.on_request_finished(request)
        self.manager.get_stats()

    def serve(self, keys: Sequence[Key]) -> int:
        request = self.request()
        found = self.find(request, keys)
        self.manager.touch(keys, request)
        self.load(request, keys[:found])
        self.store(request, keys[found:])
        self.gone(request)
        return found


class _Region:
    """As much of a region as the tiering manager asks for: one byte a block."""

    def __init__(self, capacity: int) -> None:
        self._view = memoryview(bytearray(capacity)).cast("B", (capacity, 1))

    def create_kv_memoryview(self) -> memoryview:
        return self._view


def seconds(act: Callable[[], object]) -> float:
    """CPU time of this thread: other processes on the machine do not count."""
    began = time.thread_time_ns()
    act()
    return (time.thread_time_ns() - began) / 1e9


class Bench:
    """One filled cache of each kind, and keys that only grow."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.numbers = count()
        kinds: list[Any] = [Ours] if offload is None else [Ours, Theirs]
        self.all: list[Any] = [kind(CAPACITY, tier=tier) for tier in (True, False) for kind in kinds]
        for _ in range(2 * CAPACITY // RUN):
            keys = fresh_keys(RUN, self.numbers)
            for one in self.all:
                request = one.request()
                one.store(request, keys)
                one.gone(request)

    def least(self, act: Callable[[Any, Sequence[Key]], float], make: Callable[[], list[Key]]) -> dict[str, float]:
        """The least seconds of each, all on the same keys in each round."""
        least: dict[str, float] = {}
        for _ in range(self.rounds):
            keys = make()
            for one in self.all:
                took = act(one, keys)
                least[one.name] = min(took, least.get(one.name, took))
        return least

    def stored(self, number: int) -> list[Key]:
        keys = fresh_keys(number, self.numbers)
        for one in self.all:
            request = one.request()
            one.store(request, keys)
            one.gone(request)
        return keys

    def find(self, *, hit: bool) -> dict[str, float]:
        def act(one: Any, keys: Sequence[Key]) -> float:
            request = one.request()
            found = 0

            def find() -> None:
                nonlocal found
                found = one.find(request, keys)
                if not hit and isinstance(one, Theirs):
                    # It stops at the first miss; a prompt's other keys are asked for as well in hybrid models.
                    for key in keys[1:]:
                        one.manager.lookup(key, request)

            took = seconds(find)
            assert found == (len(keys) if hit else 0)
            one.gone(request)
            return took

        return self.least(act, lambda: self.stored(FOUND) if hit else fresh_keys(FOUND, self.numbers))

    def store(self) -> dict[str, float]:
        def act(one: Any, keys: Sequence[Key]) -> float:
            request = one.request()
            took = seconds(lambda: one.store(request, keys))
            one.gone(request)
            return took / len(keys)

        return self.least(act, lambda: fresh_keys(RUN, self.numbers))

    def load(self) -> dict[str, float]:
        def act(one: Any, keys: Sequence[Key]) -> float:
            request = one.request()
            assert one.find(request, keys) == len(keys)
            took = seconds(lambda: one.load(request, len(keys) if isinstance(one, Ours) else keys))
            one.gone(request)
            return took / len(keys)

        return self.least(act, lambda: self.stored(RUN))

    def serve(self) -> dict[str, float]:
        def act(one: Any, keys: Sequence[Key]) -> float:
            found = 0

            def serve() -> None:
                nonlocal found
                found = one.serve(keys)

            took = seconds(serve)
            assert found == RUN // 2
            return took

        return self.least(act, lambda: self.stored(RUN // 2) + fresh_keys(RUN // 2, self.numbers))


def longest_call(blocks: int) -> float:
    """Seconds of the longest event: a cache of `blocks` is filled twice over, found in, loaded from, and reset.

    Prompts of 8,192 blocks, stored 1,024 at a time: what a step of 16k tokens fills.
    """
    ours = Ours(blocks, tier=False)
    numbers = count()
    longest = 0.0
    gc.collect()
    gc.freeze()  # what others made is not ours to walk through

    def timed(event: ev.Event) -> list[fx.Effect]:
        nonlocal longest
        began = time.thread_time_ns()
        effects = ours.core.handle(event)
        longest = max(longest, (time.thread_time_ns() - began) / 1e9)
        return effects

    ours.handle = timed  # type: ignore[method-assign]
    kept: list[list[Key]] = []
    for number in range(2 * blocks // FOUND):
        keys = fresh_keys(FOUND, numbers)
        kept = [*kept[-50:], keys]
        request = ours.request()
        for first in range(0, FOUND, RUN):
            ours.store(request, keys[first : first + RUN])
        ours.gone(request)
        if number % 4 == 3:
            ours.serve(kept[number * 7 % len(kept)])
    timed(ev.Reset(0.0))
    for _ in range(20):
        ours.serve(fresh_keys(RUN, numbers))
    gc.unfreeze()
    return longest


def bytes_per_block(blocks: int) -> float:
    """Memory of a core with a full cache, its keys not counted, after as many evictions as it has slots."""
    numbers = count()
    runs = [fresh_keys(RUN, numbers) for _ in range(2 * blocks // RUN)]
    gc.collect()
    tracemalloc.start()
    ours = Ours(blocks, tier=False)
    for keys in runs:
        request = ours.request()
        ours.store(request, keys)
        ours.gone(request)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / blocks


def key_seconds(rounds: int) -> float:
    """Seconds a unit for the keys of a prompt of 128k tokens in units of 16."""
    tokens = np.arange(131_072, dtype=np.uint32)

    def act() -> None:
        chain = Chain(chain_start(b"bench"), TOKENS)
        chain.extend(tokens)
        chain.keys(0, 1)

    return min(seconds(act) for _ in range(rounds)) / (len(tokens) // TOKENS)


def measure(rounds: int, blocks: int) -> list[dict[str, Any]]:
    """One line a budget of the design: `ours`, `budget`, and `theirs` where vllm is installed."""
    bench = Bench(rounds)
    lines: list[dict[str, Any]] = []

    def add(what: str, unit: str, scale: float, ours: float, theirs: float | None, budget: float | None) -> None:
        limit = None if budget is None else budget * scale
        line = {"what": what, "unit": unit, "ours": ours * scale, "budget": limit, "theirs": None, "ratio": None}
        if theirs is not None:
            line |= {"theirs": theirs * scale, "ratio": ours / theirs}
        lines.append(line | {"ok": budget is None or ours <= budget})

    def beside(what: str, unit: str, scale: float, took: dict[str, float], kind: str, part: float, own: float) -> None:
        """`part` of theirs is the budget; without theirs `own` is, unless it is 0."""
        theirs = took.get(f"vllm {kind}")
        budget = part * theirs if theirs is not None else own or None
        add(f"{what} ({kind})", unit, scale, took[f"kvtier {kind}"], theirs, budget)

    for hit in (True, False):
        found = bench.find(hit=hit)
        beside(f"find {FOUND} blocks, all {'hit' if hit else 'miss'}", "ms", 1e3, found, "tiering", 0.1, 0)
    stored = bench.store()
    beside("store + complete with eviction, a block", "us", 1e6, stored, "cpu", 1.5 / 6.5, 1.5e-6)
    beside("store + complete with eviction, a block", "us", 1e6, stored, "tiering", 1.5 / 6.5, 0)
    beside("load + complete, a block", "us", 1e6, bench.load(), "cpu", 0.7 / 2.5, 0.7e-6)
    beside(f"a request of {RUN} blocks, half hits", "ms", 1e3, bench.serve(), "tiering", 0.1, 0)
    add("keys of 128k tokens, a unit of 16", "us", 1e6, key_seconds(rounds), None, 1e-6)
    add(f"longest call, {blocks} blocks", "ms", 1e3, longest_call(blocks), None, 5e-3)
    add(f"memory a block, {blocks} blocks", "bytes", 1, bytes_per_block(blocks), None, 250)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of the two last lines")
    args = parser.parse_args()
    lines = measure(args.rounds, args.blocks)
    if args.json:
        print(json.dumps(lines, indent=2))
        return
    print(f"{'':58}{'ours':>9}{'budget':>9}{'vLLM':>9}{'ratio':>8}")
    for line in lines:
        cells = [line["ours"], line["budget"], line["theirs"], line["ratio"]]
        text = "".join(f"{cell:9.3g}" if cell is not None else f"{'-':>9}" for cell in cells)
        print(f"{line['what'] + ', ' + line['unit']:58}{text}{'' if line['ok'] else '  over'}")


if __name__ == "__main__":
    main()

"""A played engine: a scheduler with a paged device cache, chunked prefill, decoding, preemption and aborts.

It treats kvtier as vLLM does: looks up and loads within one step, offers blocks that its step is about to
fill, caches blocks when it schedules them, keeps the blocks of a finished request until its stores have ended,
and has up to three batches in flight. Tokens are counted in units; an engine block of a group is 1 or 2 units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvtier.core.groups import Group
from kvtier.core.ids import Key
from kvtier.core.prefix import Chain, chain_start
from kvtier.engine.driver import Driver
from kvtier.sim.memory import Memory
from kvtier.sim.ranks import Batch, PlayedRank, Write
from kvtier.sim.world import CheckFailed, World

UNIT = 16
"""tokens"""
NULL = 0
"""the device block that stands where a window no longer needs one"""
STEP_UNITS = 6
"""units that one step computes"""


class Life(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Request:
    name: str
    units: list[int]
    """token of each unit, those it will generate included"""
    prompt_units: int
    reads: bool
    """its engine asks what could be loaded"""
    chain: Chain
    weights: int = 0
    life: Life = Life.WAITING
    scheduled: int = 0
    """units given to a batch, or loaded"""
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    round: int = 0
    """grows with each preemption: results of batches of an earlier round are void"""
    load_from: int = 0
    load_to: int = 0
    load_failed: bool = False
    parts_left: int = 0
    """ranks that have not ended their part of its load"""
    loaded_units: int = 0
    aborted: bool = False


class Pool:
    """Device blocks, freed ones keep their bytes and may be found again until they are reused."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: deque[int] = deque(range(1, count))
        self._refs: dict[int, int] = {}
        self._cached: dict[tuple[int, bytes], int] = {}
        self._name: dict[int, tuple[int, bytes]] = {}

    @property
    def free_count(self) -> int:
        return len(self._free)

    def idle_count(self, blocks: Iterable[int]) -> int:
        """How many of these are free to be shared."""
        return sum(block != NULL and block not in self._refs for block in blocks)

    def find(self, group: int, identity: bytes) -> int | None:
        return self._cached.get((group, identity))

    def share(self, block: int) -> None:
        if block not in self._refs:
            self._free.remove(block)
        self._refs[block] = self._refs.get(block, 0) + 1

    def take(self) -> int:
        block = self._free.popleft()
        self._refs[block] = 1
        name = self._name.pop(block, None)
        if name is not None and self._cached.get(name) == block:
            del self._cached[name]
        return block

    def give_back(self, block: int) -> None:
        self._refs[block] -= 1
        if not self._refs[block]:
            del self._refs[block]
            self._free.append(block)

    def cache(self, group: int, identity: bytes, block: int) -> None:
        if block not in self._name:
            self._name[block] = (group, identity)
            self._cached.setdefault((group, identity), block)

    def forget_all(self) -> None:
        self._cached.clear()
        self._name.clear()


class PlayedEngine:
    def __init__(
        self,
        world: World,
        driver: Driver,
        ranks: Sequence[PlayedRank],
        device: Memory,
        *,
        groups: Sequence[Group],
        per_block: int,
        batches_max: int,
        salted: bool,
        load_verdict: Callable[[str], bool],
    ) -> None:
        self._w, self._driver, self._ranks, self._device = world, driver, ranks, device
        self._groups, self._per = groups, per_block
        self._units = [group.block_tokens // UNIT // per_block for group in groups]
        """units of an engine block of each group"""
        self._batches_max = batches_max
        self._salted = salted
        self._load_verdict = load_verdict
        """what the core said of a load that has ended"""
        self.pool = Pool(device.words.shape[1])
        self.weights = 0
        self.requests: dict[str, Request] = {}
        self._order: list[Request] = []
        """waiting and running, the oldest first"""
        self._leaving: list[Request] = []
        """done, their blocks still read by stores or written by a load"""
        self._batches_out = 0
        self._batch_count = 0
        self._stepping = False
        self.stopped = False
        self.loaded_units = 0

    # From outside.

    def blocks_of(self, units: list[int]) -> Iterator[tuple[Key, NDArray[np.uint64]]]:
        """Key and bytes of each block of a prompt, as all ranks would have stored it."""
        request = Request("", units, len(units), reads=False, chain=Chain(b"", 1))
        self._restart(request)
        for g in range(len(self._groups)):
            for i, key in enumerate(self._keys(request, g, len(units))):
                pages = [self._identity(request, g, i * self._per + page) for page in range(self._per)]
                patterns = [[self._w.pattern(p, request.weights, r) for p in pages] for r in range(len(self._ranks))]
                yield key, np.array(patterns, np.uint64)

    def add(self, name: str, units: list[int], prompt_units: int, *, reads: bool = True) -> Request:
        request = Request(name, units, prompt_units, reads, Chain(b"", 1))
        self._restart(request)
        self.requests[name] = request
        self._order.append(request)
        self._w.say(f"arrives {name} {len(units)}/{prompt_units}")
        self.wake()
        return request

    def abort(self, request: Request) -> None:
        if request.life is Life.DONE or request.aborted:
            return
        self._w.coverage[f"aborted while {request.life.value}"] += 1
        request.aborted = True
        self._w.say(f"abort {request.name}")
        self._finish(request)

    def reset(self) -> None:
        """New weights: everything that runs begins anew, nothing that is cached may be found."""
        self._w.say("reset")
        self.weights += 1
        out = self._driver.core.transfers_out
        self._w.coverage["reset with things in flight"] += bool(out)
        for request in [r for r in self._order if r.life is Life.RUNNING]:
            self._preempt(request)
        self.pool.forget_all()
        self._driver.reset(self._w.now)
        for request in self._order:
            if request.life is Life.WAITING:
                self._restart(request)
        self.wake()

    @property
    def idle(self) -> bool:
        return not (self._order or self._leaving or self._batches_out)

    # Steps.

    def wake(self) -> None:
        if not self._stepping and not self.stopped:
            self._stepping = True
            self._w.after(self._w.between(0.001, 0.02), self._step)

    def _step(self) -> None:
        self._stepping = False
        if self.stopped or (self.idle and not self._driver.rank_transfers_out):
            return
        if self._batches_out < self._batches_max:
            self._schedule()
            self.wake()

    def _schedule(self) -> None:
        self._driver.pump(self._w.now)
        writes: list[Write] = []
        computing: list[tuple[Request, int, int]] = []
        budget = STEP_UNITS
        for request in list(self._order):
            if request.life is Life.RUNNING and budget and self._make_room(request, budget):
                budget -= self._run(request, budget, writes, computing)
        for request in list(self._order):
            if request.life is Life.WAITING and budget and self._admit(request):
                budget -= self._run(request, budget, writes, computing)
        batch = Batch(
            self._batch_count,
            self._driver.take_work(),
            writes,
            self._verifier([(request, upto, list(map(list, request.blocks))) for request, _, upto in computing]),
            seconds=0.001 + 0.002 * len(writes),
            ranks_left=len(self._ranks),
        )
        self._batch_count += 1
        self._batches_out += 1
        for rank in self._ranks:
            rank.give(batch, lambda done: self._batch_done(done, computing))

    def _admit(self, request: Request) -> bool:
        """Move a waiting request on; True if it runs now."""
        device, shared = self._device_hit(request)
        tokens: int | None = 0
        if request.reads:
            keys = tuple(self._keys(request, g, request.prompt_units - 1) for g in range(len(self._groups)))
            tokens = self._driver.lookup(request.name, keys, device * UNIT, self._w.now)
            if tokens is None:
                self._w.coverage["lookup pending"] += 1
                return False
            self._w.require(
                not (request.load_failed and tokens > device * UNIT),
                "replies",
                f"{request.name} is offered {tokens} tokens again after its load failed",
            )
        upto = max(device, (tokens or 0) // UNIT)
        needed = sum(-(-upto // units) for units in self._units) + 2 * len(self._units)
        if tokens and self._w.chance(0.1):
            self._w.coverage["hit not admitted"] += 1
            return False
        if needed - len(shared) > self.pool.free_count - self.pool.idle_count(block for _, block in shared):
            self._w.coverage["no room for a hit"] += 1
            if tokens and self._w.chance(0.3):
                self._driver.load(request.name, 0, 0, [], self._w.now)
            return False
        for _, block in shared:
            if block != NULL:
                self.pool.share(block)
        request.blocks = [[] for _ in self._groups]
        for group, block in shared:
            request.blocks[group].append(block)
        if upto == device:
            if request.reads:
                self._driver.load(request.name, device * UNIT, device * UNIT, request.blocks, self._w.now)
            self._runs_from(request, device)
            return True
        for g, units in enumerate(self._units):
            window = self._groups[g].window_blocks
            first = 0 if window is None else max(0, upto // (units * self._per) - window) * self._per
            while len(request.blocks[g]) < -(-upto // units):
                behind = len(request.blocks[g]) < first
                request.blocks[g].append(NULL if behind else self.pool.take())
        request.life, request.load_from, request.load_to = Life.LOADING, device, upto
        request.parts_left, request.load_failed = len(self._ranks), False
        self._w.say(f"load {request.name} {device}..{upto}")
        self._driver.load(request.name, device * UNIT, upto * UNIT, request.blocks, self._w.now)
        return False

    def _device_hit(self, request: Request) -> tuple[int, list[tuple[int, int]]]:
        """Units that the device still has, and the blocks of them."""
        for upto in range(request.prompt_units - 1, 0, -1):
            shared: list[tuple[int, int]] = []
            for g, units in enumerate(self._units):
                if upto % units:
                    break
                window = self._groups[g].window_blocks
                first = 0 if window is None else max(0, upto // units - window * self._per)
                ends = [(i + 1) * units - 1 for i in range(first, upto // units)]
                found = [block for end in ends if (block := self.pool.find(g, request.chain.digests[end])) is not None]
                if len(found) < len(ends):
                    break
                shared += [(g, NULL)] * first + [(g, block) for block in found]
            else:
                return upto, shared
        return 0, []

    def _runs_from(self, request: Request, units: int) -> None:
        request.life = Life.RUNNING
        request.scheduled = request.computed = units
        request.offered = [units // (u * self._per) for u in self._units]

    def _next_part(self, request: Request, budget: int) -> tuple[int, int]:
        """Units that the request would compute next, and the blocks it needs for them."""
        left = max(0, request.prompt_units - request.scheduled)
        count = min(budget, left) if left else min(1, len(request.units) - request.scheduled)
        upto = request.scheduled + count
        return count, sum(-(-upto // units) - len(request.blocks[g]) for g, units in enumerate(self._units))

    def _make_room(self, request: Request, budget: int) -> bool:
        """Preempt younger ones, none of which this step has scheduled yet, until the next part fits."""
        while self._next_part(request, budget)[1] > self.pool.free_count:
            victim = next(r for r in reversed(self._order) if r.life is Life.RUNNING)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _run(
        self, request: Request, budget: int, writes: list[Write], computing: list[tuple[Request, int, int]]
    ) -> int:
        """Schedule the next part of a request; returns its units."""
        count, needed = self._next_part(request, budget)
        if not count or needed > self.pool.free_count:
            return 0
        upto = request.scheduled + count
        for g, units in enumerate(self._units):
            first = request.scheduled // units
            while len(request.blocks[g]) < -(-upto // units):
                request.blocks[g].append(self.pool.take())
            for i in range(first, -(-upto // units)):
                full = (i + 1) * units <= upto
                identity = self._identity(request, g, i) if full else None
                writes.append(Write(request.blocks[g][i], identity, request.weights))
                if identity is not None:
                    self.pool.cache(g, request.chain.digests[(i + 1) * units - 1], request.blocks[g][i])
        request.scheduled = upto
        computing.append((request, request.round, upto))
        self._offer(request)
        return count

    def _offer(self, request: Request) -> None:
        for g, units in enumerate(self._units):
            first, last = request.offered[g], request.scheduled // (units * self._per)
            if last <= first:
                continue
            keys = self._keys(request, g, request.scheduled)[first:last]
            blocks = request.blocks[g][first * self._per : last * self._per]
            if NULL in blocks:
                continue
            taken = self._driver.offer(request.name, g, first, keys, blocks, self._w.now)
            self._w.coverage["declined"] += taken < len(keys)
            request.offered[g] = first + taken

    def _batch_done(self, batch: Batch, computing: Sequence[tuple[Request, int, int]]) -> None:
        self._batches_out -= 1
        self._driver.ranks_ended(batch.ends, self._w.now)
        for name, ok in batch.loads:
            self._load_ended(self.requests[name], ok=ok)
        for request, of_round, upto in computing:
            if request.round == of_round and request.life is Life.RUNNING:
                request.computed = max(request.computed, upto)
                if request.computed == len(request.units):
                    self._finish(request)
        for request in list(self._leaving):
            self._leave(request)
        self.wake()

    # Loads.

    def _load_ended(self, request: Request, *, ok: bool) -> None:
        """One rank's part of a load."""
        request.load_failed = request.load_failed or not ok
        request.parts_left -= 1
        if request.parts_left:
            return
        verdict = self._load_verdict(request.name)
        request.load_failed = request.load_failed or not verdict
        if request.life is Life.DONE:
            self._leave(request)
            return
        if request.load_failed:
            self._w.coverage["load failed"] += 1
            self._free(request)
            request.life = Life.WAITING
            self._restart(request)
            return
        self._w.coverage["load ended well"] += 1
        self.loaded_units += request.load_to - request.load_from
        request.loaded_units += request.load_to - request.load_from
        for rank in range(len(self._ranks)):
            self._verify(request, request.load_to, request.blocks, rank)
        for g, units in enumerate(self._units):
            for i, block in enumerate(request.blocks[g][: request.load_to // units]):
                if block != NULL:
                    self.pool.cache(g, request.chain.digests[(i + 1) * units - 1], block)
        self._runs_from(request, request.load_to)

    # Ends.

    def _finish(self, request: Request) -> None:
        request.life = Life.DONE
        request.round += 1
        self._order.remove(request)
        self._w.say(f"done {request.name}")
        self._driver.gone(request.name, self._w.now)
        self._leaving.append(request)
        self._leave(request)
        self.wake()

    def _leave(self, request: Request) -> None:
        """Free the blocks of a request that is done, once nothing touches them."""
        if self._driver.stores_out(request.name) or request.parts_left:
            return
        self._leaving.remove(request)
        self._free(request)

    def _preempt(self, request: Request) -> None:
        self._w.coverage["preempted"] += 1
        self._w.say(f"preempt {request.name}")
        self._driver.preempted(request.name, self._w.now)
        self._free(request)
        request.life = Life.WAITING
        request.round += 1
        self._restart(request)

    def _free(self, request: Request) -> None:
        for blocks in request.blocks:
            for block in reversed(blocks):
                if block != NULL:
                    self.pool.give_back(block)
        request.blocks = []

    def _restart(self, request: Request) -> None:
        request.scheduled = request.computed = 0
        request.weights = self.weights
        salt = str(self.weights).encode() if self._salted else b""
        request.chain = Chain(chain_start(b"sim", salt), 1)
        request.chain.extend(request.units)

    # Identity and bytes.

    def _identity(self, request: Request, group: int, block: int) -> bytes:
        return request.chain.digests[(block + 1) * self._units[group] - 1] + bytes((group,))

    def _keys(self, request: Request, group: int, units: int) -> list[Key]:
        """Keys of the group's full blocks within the first `units`."""
        per = self._units[group] * self._per
        keys = request.chain.keys(group, per)[: units // per]
        for i, key in enumerate(keys):
            if key not in self._w.pages_of or not self._salted:
                pages = [self._identity(request, group, i * self._per + page) for page in range(self._per)]
                self._w.pages_of[key] = (request.weights, pages)
        return keys

    def _verifier(self, computing: list[tuple[Request, int, list[list[int]]]]) -> Callable[[int], None]:
        weights = [request.weights for request, _, _ in computing]

        def verify(rank: int) -> None:
            for (request, upto, blocks), made_by in zip(computing, weights, strict=True):
                if request.weights == made_by:
                    self._verify(request, upto, blocks, rank)

        return verify

    def _verify(self, request: Request, upto: int, blocks: Sequence[Sequence[int]], rank: int) -> None:
        """What attention reads: all full blocks of full groups, the last window of the others."""
        for g, units in enumerate(self._units):
            window = self._groups[g].window_blocks
            last = upto // units
            first = 0 if window is None else max(0, last - window * self._per)
            for i in range(first, last):
                block = blocks[g][i]
                if block == NULL:
                    continue
                words = self._device.words[rank, block, 0]
                expected = self._w.pattern(self._identity(request, g, i), request.weights, rank)
                if (int(words[0]), int(words[1])) != expected:
                    what = f"{request.name} reads wrong bytes: group {g}, block {i}, rank {rank}"
                    raise CheckFailed("bytes", what)

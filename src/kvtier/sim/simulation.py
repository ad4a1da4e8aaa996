"""One seed of the simulator: draw a world, let things go wrong, heal it, demand that all is well, close it.

Checkers, by the name that a failing seed shows:

* `memory`: nothing writes what another reads or writes, on the device and in the region
* `bytes`: attention, loads and demotions read the right bytes, never torn or another's
* `accounts`: `core.check()` after every event
* `replies`: what was started ends exactly once
* `liveness`: with the faults over, every request finishes and everything settles
* `convergence`: then nothing is leased, nothing is remembered, and a repeated prompt hits again
* `close`: the close report says what is true of the memory
* `bug`: the core or the driver raised
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.groups import CoreConfig, Group, TierSpec
from kvtier.core.ids import Key, group_of
from kvtier.core.slots import SlotTable
from kvtier.core.store import StoreCore
from kvtier.core.tables import FREE, QUARANTINED
from kvtier.engine.driver import Driver
from kvtier.engine.tier_port import PortState, TierPort
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.sim.engine import UNIT, PlayedEngine, Request
from kvtier.sim.memory import Memory
from kvtier.sim.ranks import PlayedRank
from kvtier.sim.tiers import PlayedTier, Shelf
from kvtier.sim.world import CheckFailed, World
from kvtier.tiers.base import Cause

KEEPER_S = 0.1
FAULTY_S = 1.5
HEAL_S_MAX = 300.0
CLOSE_S = 2.0
SILENT_S_MAX = 3.0


@dataclass(frozen=True)
class Outcome:
    seed: int
    digest: str
    coverage: Counter[str]
    failure: str = ""
    """the failing check and what it saw; empty if all is well"""
    story: tuple[str, ...] = ()
    """what happened last, then the core's last events; empty if all is well, unless it was asked for"""


@contextmanager
def _quiet() -> Iterator[None]:
    """The tiers' incidents are played: nobody wants to read of them."""
    log = logging.getLogger("kvtier")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class Simulation:
    def __init__(self, seed: int, core_type: type[StoreCore] = StoreCore, *, story: bool = False) -> None:
        """`story`: tell what happened also if all is well."""
        self.seed = seed
        self._tells = story
        self.world = w = World(seed)
        self._draw(core_type)
        self._verdicts: dict[str, bool] = {}
        self._loads_out: set[str] = set()
        self._stores_out: set[int] = set()
        self._requests = 0
        self._closed = False
        w.after(KEEPER_S, self._keep)

    def _draw(self, core_type: type[StoreCore]) -> None:
        w = self.world
        pick = w.random.choice
        self.per_block = pick((1, 1, 2))
        block = UNIT * self.per_block
        self.groups: tuple[Group, ...] = pick(
            (
                (Group(block),),
                (Group(block),),
                (Group(block), Group(2 * block)),
                (Group(block), Group(block, 1)),
                (Group(2 * block), Group(block, window_blocks=1)),
                (Group(block), Group(block, 1, window_blocks=2)),
            )
        )
        classes = 1 + max(group.size_class for group in self.groups)
        self.slots = tuple(pick((4, 8, 12, 16, 24)) for _ in range(classes))
        names = pick(((), ("disk",), ("disk",), ("disk",), ("disk", "mooncake")))
        self.ranks_count = pick((1, 1, 2))
        config = CoreConfig(
            self.groups,
            self.slots,
            self.ranks_count,
            tuple(TierSpec(name) for name in names),
            promote_share=pick((0.3, 0.5, 0.8)),
            lookup_timeout_s=pick((0.1, 0.4, 1.0)),
        )
        self.core = _watched(core_type)(config)
        self.core.simulation = self  # type: ignore[attr-defined]
        self.hosts = [
            Memory(f"row of class {c}", self.ranks_count, count, self.per_block) for c, count in enumerate(self.slots)
        ]
        device = Memory("device block", self.ranks_count, pick((28, 48, 64)) * len(self.groups), 1)
        self.shelves = {name: Shelf(pick((8, 60, 60))) for name in names}
        self.tiers: dict[str, PlayedTier] = {}
        ports = [
            TierPort(name, partial(self._open, name), silent_s_max=SILENT_S_MAX, opening_s_max=SILENT_S_MAX)
            for name in names
        ]
        self.driver = Driver(self.core, ports, engine_blocks_per_block=self.per_block)
        self.ranks = [PlayedRank(w, rank, device, self.hosts, self.per_block) for rank in range(self.ranks_count)]
        self.engine = PlayedEngine(
            w,
            self.driver,
            self.ranks,
            device,
            groups=self.groups,
            per_block=self.per_block,
            batches_max=pick((1, 2, 3)),
            salted=bool(names),
            load_verdict=lambda request: self._verdicts.pop(request),
        )
        self.forgetful = pick((0.2, 0.7))
        self._to_come = 0
        """requests that are on their way"""
        self.prompts = [[w.random.randrange(1000) for _ in range(20)] for _ in range(pick((1, 2, 3)))]
        for shelf in self.shelves.values():
            for prompt in self.prompts if w.chance(0.8) else ():
                for key, words in self.engine.blocks_of(prompt):
                    if not w.fault("warm shelf lost a block", 0.03):
                        damaged = w.fault("warm shelf damaged a block", 0.08)
                        shelf.put(key, Cause.CHECKSUM if damaged else words)

    # Running it.

    def run(self) -> Outcome:
        failure = ""
        try:
            with _quiet():
                self._run()
        except CheckFailed as error:
            failure = str(error)
        except Exception as error:  # noqa: BLE001 - whatever the core or the driver raises is what is looked for
            failure = f"bug: {type(error).__name__}: {error}"
        story: tuple[str, ...] = ()
        if failure or self._tells:
            story = (*self.world.trail, *self.core.story.lines()[-30:])
        self._count_coverage()
        return Outcome(self.seed, self.world.digest, self.world.coverage, failure, story)

    def _run(self) -> None:
        w = self.world
        w.run_until(lambda: False, w.random.choice((0.0, 0.4)))
        self._traffic(w.random.randrange(4, 12), FAULTY_S)
        self._plan_incidents(FAULTY_S)
        w.run_until(lambda: False, FAULTY_S * w.between(0.3, 1.3))
        if w.chance(0.6):
            self._heal()
            self._demand_convergence()
            w.faults = True
            self._traffic(w.random.randrange(1, 4), 0.2)
            self._plan_incidents(0.3)
            w.run_until(lambda: False, w.between(0.0, 0.4))
        self._close()

    def _traffic(self, count: int, seconds: float) -> None:
        """Requests that arrive within `seconds`, many of which share the beginning of their prompt."""
        w = self.world
        for _ in range(count):
            prompt = w.random.choice(self.prompts)[: w.random.randrange(3, 14)]
            if w.chance(0.25):
                prompt = [w.random.randrange(1000) for _ in prompt]  # pushes others out
            elif w.chance(0.5):
                prompt = prompt + [w.random.randrange(1000) for _ in range(w.random.randrange(0, 4))]
            units = prompt + [w.random.randrange(1000) for _ in range(w.random.randrange(0, 4))]
            self._to_come += 1
            w.after(w.between(0.0, seconds), partial(self._come, units, len(prompt)))

    def _come(self, units: list[int], prompt_units: int) -> None:
        self._to_come -= 1
        self._arrive(units, prompt_units)

    def _arrive(self, units: list[int], prompt_units: int) -> Request:
        w = self.world
        self._requests += 1
        if w.chance(self.forgetful):
            self.engine.pool.forget_all()  # other traffic has used the device's blocks meanwhile
        request = self.engine.add(f"r{self._requests}", units, prompt_units, reads=not w.chance(0.1))
        if w.faults and w.chance(0.25):
            w.after(w.between(0.0, 0.4), lambda: self.engine.abort(request))
        return request

    def _plan_incidents(self, seconds: float) -> None:
        w = self.world
        if w.chance(0.4):
            w.after(w.between(0.0, seconds), self._reset)
        for name in self.shelves:
            kind = w.random.choice(("none", "none", "hang", "crash", "break down"))
            if kind != "none":
                w.after(w.between(0.0, seconds), partial(self._incident, name, kind))

    def _reset(self) -> None:
        if self.world.faults and not self._closed:
            self.engine.reset()

    def _incident(self, name: str, kind: str) -> None:
        tier = self.tiers.get(name)
        if tier is None or tier.dead or self._closed or not self.world.faults:
            return
        self.world.coverage[f"tier: {kind}"] += 1
        self.world.say(f"{name}: {kind}")
        if kind == "hang":
            tier.hang()
            if self.world.chance(0.5):
                self.world.after(self.world.between(0.2, 6.0), tier.go_on)
        elif kind == "crash":
            tier.crash()
        else:
            tier.break_down()

    def _open(self, name: str) -> PlayedTier:
        if self.world.fault("tier did not open", 0.1):
            raise OSError(f"played: {name} does not open")
        tier = self.tiers[name] = PlayedTier(self.world, name, self.shelves[name], self.hosts)
        return tier

    def _keep(self) -> None:
        """The keeper: starts tiers, and pumps when no hook does."""
        if self._closed:
            return
        now = self.world.now
        for port in self.driver.ports.values():
            if port.wants_start(now):
                port.start(now)
        self.driver.pump(now)
        self.world.after(KEEPER_S, self._keep)

    # What must hold once the faults are over.

    def _heal(self) -> None:
        w = self.world
        w.faults = False
        w.say("heals")
        if not w.run_until(lambda: self.engine.idle and not self._to_come, HEAL_S_MAX):
            left = {r.name: r.life.value for r in self.engine.requests.values() if r.life.value != "done"}
            raise CheckFailed("liveness", f"not all requests finish: {left}")
        if not w.run_until(lambda: self._settled, HEAL_S_MAX):
            raise CheckFailed("liveness", f"{self.core.transfers_out} transfers never end")
        w.coverage["healed"] += 1

    @property
    def _settled(self) -> bool:
        up = all(port.state is PortState.UP for port in self.driver.ports.values())
        return up and self.core.settled

    def _demand_convergence(self) -> None:
        w = self.world
        w.require(not self.core.leases_out, "convergence", f"{self.core.leases_out} leases are out")
        w.require(not self.core.requests_known, "convergence", f"{self.core.requests_known} requests are remembered")
        w.require(not self._loads_out and not self._stores_out, "replies", "a load or a store never ended")
        w.require(not any(host.touched() for host in self.hosts), "convergence", "a row is still touched")
        engine = self.engine
        w.require(engine.pool.free_count == engine.pool.count - 1, "convergence", "device blocks leaked")
        count = 4 * self.per_block + 1
        units = self._fresh(count)
        self._serve(units)
        again = self._serve(units)
        if again.reads and min(self.slots) >= 4 * len(self.groups):
            w.require(again.loaded_units > 0, "convergence", f"{again.name} repeats a prompt and loads nothing")
            w.coverage["hit again"] += 1
        if self.shelves and all(group.window_blocks is None for group in self.groups):
            promoted = self.core.counts.promoted_blocks
            while any(table.index.get(key) is not None for table, key in self._places(units)):
                self._serve(self._fresh(count))
            shelved = all(
                any(isinstance(shelf.blocks.get(key), np.ndarray) for shelf in self.shelves.values())
                for _, key in self._places(units)
            )
            again = self._serve(units)
            room = int(self.core.config.promote_share * min(self.slots)) >= 4 * len(self.groups)
            if again.reads and shelved and room:
                w.require(again.loaded_units > 0, "convergence", f"{again.name} loads nothing from a tier that has it")
                w.require(self.core.counts.promoted_blocks > promoted, "convergence", "nothing was promoted")
                w.coverage["hit again in a tier"] += 1

    def _fresh(self, count: int) -> list[int]:
        return [self.world.random.randrange(1000, 1 << 20) for _ in range(count)]

    def _places(self, units: list[int]) -> Iterator[tuple[SlotTable, Key]]:
        for key, _ in self.engine.blocks_of(units):
            yield self.core.tables[self.groups[group_of(key)].size_class], key

    def _serve(self, units: list[int]) -> Request:
        """A request for which the device has nothing cached, until all that came of it has settled."""
        self.engine.pool.forget_all()
        request = self._arrive(units, len(units))
        done = self.world.run_until(lambda: self.engine.idle and self._settled, HEAL_S_MAX)
        self.world.require(done, "liveness", f"{request.name} does not finish")
        return request

    # Close, at any moment.

    def _close(self) -> None:
        w, driver = self.world, self.driver
        w.say("closes")
        w.coverage["closed with transfers out"] += bool(self.core.transfers_out)
        engine_first = w.chance(0.8)
        self.engine.stopped = engine_first
        stuck = w.fault("wedged device", 0.1)
        for rank in self.ranks:
            rank.stuck = stuck
            w.after(w.between(0.0, 0.6), rank.drop_queued)
        driver.close_begins(w.now)
        w.run_until(self._ended_or_idle, CLOSE_S / 2)
        self.engine.stopped = True
        driver.cancel_all(w.now)
        w.run_until(self._ended_or_idle, CLOSE_S / 4)
        self._closed = True
        reports: list[CloseReport] = []
        for port in driver.ports.values():
            port.ask_stop()
        for port in driver.ports.values():
            report, events = port.close(Deadline(0.0), w.now)
            driver.feed_all(events)
            reports.append(report)
        self._lose_ranks()
        ranks_kept = driver.rank_transfers_out
        driver.abandon(w.now)
        self._require_true_report(reports, ranks_kept=ranks_kept)

    def _ended_or_idle(self) -> bool:
        self._lose_ranks()
        return self.core.settled

    def _lose_ranks(self) -> None:
        """Every rank has said that it is closed: nothing of theirs is running."""
        if all(rank.stopped and not rank.copying for rank in self.ranks) and self.engine.stopped:
            self.driver.ranks_lost(self.world.now)

    def _require_true_report(self, reports: Sequence[CloseReport], *, ranks_kept: bool) -> None:
        w = self.world
        for report in reports:
            tier = self.tiers.get(report.name)
            touching = tier is not None and tier.touching
            w.require(report.memory_kept or not touching, "close", f"{report.name} says freed, but touches rows")
            w.coverage["closed with a tier's memory kept"] += report.memory_kept
        copying = any(rank.copying for rank in self.ranks)
        w.require(ranks_kept or not copying, "close", "the ranks' memory is freed while a copy runs")
        w.coverage["closed with the ranks' memory kept"] += ranks_kept
        for host, table in zip(self.hosts, self.core.tables, strict=True):
            for slot, who in host.touched().items():
                free = table.state[slot] == FREE
                idle = free or (not table.readers[slot] and table.key[slot] is None)
                w.require(not idle, "close", f"slot {slot} is free, but {who[0]} touches it")
        if not ranks_kept and not any(report.memory_kept for report in reports):
            w.require(not self.core.leases_out, "close", "all memory is freed, but leases are out")
            w.coverage["closed clean"] += 1

    # Watching the core.

    def seen(self, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        w = self.world
        try:
            self.core.check()
        except AssertionError as error:
            raise CheckFailed("accounts", f"{error} after {type(event).__name__}") from error
        if isinstance(event, ev.TierLost):
            w.coverage["slots quarantined"] += sum(int((t.state == QUARANTINED).sum()) for t in self.core.tables)
        line = [type(event).__name__]
        for effect in effects:
            match effect:
                case fx.StartStore():
                    self._stores_out.add(effect.transfer)
                    line.append(f"S{effect.transfer}:{effect.slots}")
                case fx.StartLoad():
                    self._loads_out.add(effect.request)
                    line.append(f"L{effect.transfer}:{effect.slots}")
                case fx.StoreEnded():
                    w.require(effect.transfer in self._stores_out, "replies", f"store {effect.transfer} ends twice")
                    self._stores_out.discard(effect.transfer)
                    line.append(f"s{effect.transfer}")
                case fx.LoadEnded():
                    if not self._closed:
                        w.require(effect.request in self._loads_out, "replies", f"load of {effect.request} ends twice")
                    self._loads_out.discard(effect.request)
                    self._verdicts[effect.request] = effect.ok
                    line.append(f"l{effect.request}{effect.ok}")
                case fx.StartTier():
                    w.coverage[effect.direction] += 1
                    line.append(f"{effect.direction}{effect.transfer}:{effect.slots}")
                case fx.CancelTier():
                    w.coverage["tier transfer cancelled"] += 1
                case fx.Answered():
                    line.append(f"={effect.tokens}")
        w.say(" ".join(line))

    def _count_coverage(self) -> None:
        counts, coverage = self.core.counts, self.world.coverage
        for name in counts.__struct_fields__:
            coverage[name] += getattr(counts, name)


class _Watched(StoreCore):
    simulation: Simulation

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        effects = super().handle(event)
        self.simulation.seen(event, effects)
        return effects


def _watched(core_type: type[StoreCore]) -> type[StoreCore]:
    """`core_type`, with the simulation looking at each of its steps."""
    return type(f"Watched{core_type.__name__}", (_Watched, core_type), {})

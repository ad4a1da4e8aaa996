"""The only wiring: what is built, in which order, and who owns it.

    rank side (in the worker):         region > pipe > both directions > hand-over
    scheduler side:                    region (as handed over) > link to the rank > store > its tiers

A failure half-way closes what was opened, in reverse, once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from kvtier.config import Config, TierConfig
from kvtier.core.groups import CoreConfig, Group, TierSpec
from kvtier.core.store import StoreCore
from kvtier.engine.driver import Driver
from kvtier.engine.process_tier import ProcessTier
from kvtier.engine.rank import Rank, open_rank
from kvtier.engine.store import Store
from kvtier.engine.tier_port import TierPort
from kvtier.memory.handover import HandoverServer, RankLink, RankPipe, handover_name, receive
from kvtier.memory.layout import Layout, PageLayout, Rows, plan_layout
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.runtime.scope import Scope
from kvtier.tiers.base import Tier
from kvtier.tiers.registry import open_tier
from kvtier.transfer.pages import NumpyPages

HANDOVER_TIMEOUT_S = 60.0
"""The scheduler side is built after the ranks have registered their caches: the region is there by then, or
its rank is still populating it (a few GiB a second)."""

TIERS_START_S = 20.0
"""How long a start waits at most to learn whether its tiers come up, so that a wrong value refuses it. A child needs
0.3 s of a core until it runs, which may be seconds where cores are short, and a warm index below 0.3 s."""


class RegionTable(msgspec.Struct, frozen=True):
    """What goes with the region from rank 0 to everyone else."""

    layout: Layout
    pages: list[PageLayout]


@dataclass(frozen=True, slots=True)
class RankSide:
    """A worker's part: the rank, and the scope that closes it."""

    rank: Rank
    layout: Layout
    scope: Scope

    def close(self, deadline: Deadline | None = None) -> CloseReport:
        return self.scope.close(deadline)


@dataclass(frozen=True, slots=True)
class SchedulerSide:
    """The scheduler's part: the store, and the scope that closes it."""

    store: Store
    table: RegionTable
    scope: Scope

    def close(self, deadline: Deadline | None = None) -> CloseReport:
        return self.scope.close(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_rank_side(
    config: Config, *, engine_id: str, pages: Sequence[NumpyPages], page_layouts: Sequence[PageLayout]
) -> RankSide:
    """Make the region, serve it to the scheduler side, and open both directions over it.

    `pages[c]` and `page_layouts[c]` belong to size class c. Raises ConfigError, above all for a `host.size`
    that the machine has not got.
    """
    table, region = _make_region(config, page_layouts)
    with Scope.building("rank side", close_timeout_s=config.close_timeout_s) as scope:
        pipe = scope.own("pipe", RankPipe(region))
        rank = scope.own("rank", open_rank(region, table.layout, pages, page_layouts))
        server = HandoverServer(
            handover_name(engine_id, config.name), region, msgspec.msgpack.encode(table), 1, pipe=pipe
        )
        server.start()
        scope.own("handover", server, touches_memory=False)
        return RankSide(rank, table.layout, scope)


def open_scheduler_side(
    config: Config,
    *,
    engine_id: str,
    groups: Sequence[Group],
    namespace: Callable[[RegionTable], bytes],
    deadline: Deadline | None = None,
) -> SchedulerSide:
    """Take the region over from the rank side, and open the store with its tiers.

    `namespace` is asked once the layout is known, which is a part of it. Raises ConfigError, or TierBroken
    when no region comes in time.
    """
    name = handover_name(engine_id, config.name)
    received = receive(name, deadline or Deadline.after(HANDOVER_TIMEOUT_S))
    with Scope.building("kvtier", close_timeout_s=config.close_timeout_s) as scope:
        # Kept, like the region, while the store waits for the rank: a second close must see the rank's end.
        link = scope.own("rank link", RankLink(received.connection, received.pid), shared_memory=True)
        try:
            attached = Region.attach(received.fd, received.size_bytes)
        except BaseException:  # the descriptor is not the region's then
            os.close(received.fd)
            raise
        region = scope.own("region", attached, shared_memory=True)
        table = msgspec.msgpack.decode(received.table, type=RegionTable)
        driver = _driver(config, groups, region, table, namespace(table))
        store = scope.own("store", Store(driver, [link]))
        store.start(Deadline.after(TIERS_START_S))
        return SchedulerSide(store, table, scope)


def open_both_sides(
    config: Config,
    *,
    groups: Sequence[Group],
    namespace: Callable[[RegionTable], bytes],
    pages: Sequence[NumpyPages],
    page_layouts: Sequence[PageLayout],
) -> tuple[RankSide, SchedulerSide]:
    """Both sides in one process, over one mapping; the scheduler side's scope closes both."""
    table, region = _make_region(config, page_layouts)
    with Scope.building("kvtier", close_timeout_s=config.close_timeout_s) as scope:
        rank = scope.own("rank", open_rank(region, table.layout, pages, page_layouts), shared_memory=True)
        store = scope.own("store", Store(_driver(config, groups, region, table, namespace(table))))
        store.serve_ranks(rank.poll)
        store.start(Deadline.after(TIERS_START_S))
        return RankSide(rank, table.layout, scope), SchedulerSide(store, table, scope)


def _make_region(config: Config, page_layouts: Sequence[PageLayout]) -> tuple[RegionTable, Region]:
    layout = plan_layout(config.host.size, [page.payload_bytes for page in page_layouts])
    return RegionTable(layout, list(page_layouts)), Region.create(layout.size_bytes)


def _driver(config: Config, groups: Sequence[Group], region: Region, table: RegionTable, namespace: bytes) -> Driver:
    core = StoreCore(
        CoreConfig(
            groups=tuple(groups),
            class_slots=tuple(c.rows for c in table.layout.classes),
            tiers=tuple(TierSpec(tier.name, write=tier.write == "through") for tier in config.tiers),
            promote_share=config.host.promote_share,
            lookup_timeout_s=config.lookup_timeout_s,
        )
    )
    ports = [_port(tier, region, table.layout, namespace) for tier in config.tiers]
    return Driver(core, ports, engine_blocks_per_block=config.engine_blocks_per_block)


def _port(tier: TierConfig, region: Region, layout: Layout, namespace: bytes) -> TierPort:
    if tier.process:
        return TierPort(tier.name, lambda: ProcessTier.start(tier, region, layout, namespace))
    rows: list[Rows] = []

    def open_here() -> Tier:
        rows[:] = [Rows(region.array, layout)]
        return open_tier(tier, rows[0], namespace)

    def let_go() -> None:
        """What still refers to the dead tier must not keep the region mapped."""
        while rows:
            rows.pop().close()

    return TierPort(tier.name, open_here, let_go=let_go)

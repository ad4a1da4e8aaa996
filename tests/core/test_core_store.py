"""Stores: what is taken, what is evicted for it, what is declined, and where it goes on to."""

from __future__ import annotations

import numpy as np
import pytest
from played import Played, key, keys

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.limits import DEMOTES_IN_FLIGHT_MAX
from kvtier.core.slots import SlotTable
from kvtier.core.tables import Slot
from kvtier.errors import CoreBug


def test_a_store_never_evicts_a_block_of_its_own_prompt() -> None:
    p = Played(slots=4)
    p.hold(2, 6, 7, 8)
    p.take(fx.Removed)
    assert p.offer("r", keys(2, 3, 4, 5)) == 4
    (store,) = p.take(fx.StartStore)
    assert store.blocks == [1, 2, 3]
    assert {k for removed in p.take(fx.Removed) for k in removed.keys} == set(keys(6, 7, 8))
    p.ended(store.transfer)
    assert p.held == set(keys(2, 3, 4, 5))


def test_the_longest_prefix_that_fits_is_stored_and_the_rest_declined() -> None:
    p = Played(slots=3)
    p.hold(2, 6, 7)
    assert p.stored("r", keys(2, 3, 4, 5)) == 3
    assert p.held == set(keys(2, 3, 4))
    assert p.core.counts.declined_blocks == 1


def test_later_offers_of_a_long_prompt_do_not_evict_its_beginning() -> None:
    p = Played(slots=4)
    assert p.stored("r", keys(1, 2)) == 2
    assert p.stored("r", keys(3, 4), first=2) == 2
    assert p.stored("r", keys(5, 6), first=4) == 0
    assert p.held == set(keys(1, 2, 3, 4))
    p.send(ev.RequestGone, "r")
    assert p.stored("s", keys(7)) == 1
    assert key(4) not in p.held, "a prompt is given up from its end"


def test_what_was_declined_is_taken_when_there_is_room() -> None:
    p = Played(slots=2)
    p.hold(1, 2)
    p.lookup("r", keys(1, 2))
    assert p.offer("w", keys(3)) == 0
    p.send(ev.RequestGone, "r")
    assert p.stored("w", keys(3)) == 1
    assert key(3) in p.held


def test_what_is_there_or_on_its_way_is_not_stored_again() -> None:
    p = Played()
    p.offer("r", keys(1, 2))
    assert p.offer("s", keys(1, 2, 3)) == 3
    first, second = p.take(fx.StartStore)
    assert (first.blocks, second.blocks) == ([0, 1], [2])
    p.ended(first.transfer)
    p.ended(second.transfer)
    assert p.offer("t", keys(1, 2, 3)) == 3
    assert p.take(fx.StartStore) == []


def test_a_hole_in_an_offer_is_filled() -> None:
    p = Played()
    p.stored("r", keys(1, 3))
    p.offer("s", keys(1, 2, 3), first=4)
    (store,) = p.take(fx.StartStore)
    assert store.blocks == [5]


def test_a_refusal_with_everything_leased_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Played(slots=64)
    everything = keys(*range(64))
    p.stored("w", everything)
    p.lookup("r", everything)
    asked = 0
    spared = SlotTable._spared

    def counted(self: SlotTable, slots: np.ndarray, owner: int) -> np.ndarray:
        nonlocal asked
        asked += 1
        return spared(self, slots, owner)

    monkeypatch.setattr(SlotTable, "_spared", counted)
    for n in range(1000):
        assert p.core.handle(ev.Offer(0.0, f"s{n}", 0, 0, keys(f"new {n}"))) == [fx.Offered(f"s{n}", 0, 0)]
    assert asked == 0
    assert p.core.counts.declined_blocks == 1000
    p.send(ev.RequestGone, "r")
    assert p.offer("s", keys("new")) == 1
    assert asked > 0, "the counter does count"


def test_a_lease_given_back_twice_is_a_bug() -> None:
    p = Played()
    p.stored("w", keys("a"))
    p.lookup("r", keys("a"))
    (lease,) = p.core._s.leases.out
    lease.release()
    with pytest.raises(CoreBug, match="not out"):
        lease.release()


def test_more_releases_than_leases_are_a_bug() -> None:
    p = Played()
    p.stored("w", keys("a"))
    (table,) = p.core.tables
    with pytest.raises(CoreBug, match="released more often"):
        table.release(np.array([table.index.get(key("a"))]))


def test_a_stored_block_goes_on_to_every_tier_that_is_up() -> None:
    p = Played(tiers=["disk", "mooncake"])
    p.stored("r", keys(1, 2))
    started = p.starts("demote")
    assert [(start.tier, start.keys) for start in started] == [("disk", keys(1, 2)), ("mooncake", keys(1, 2))]
    assert p.readers == 4, "its slots cannot be taken while a tier reads them"
    for start in started:
        p.moved(start)
    p.require_idle()
    assert p.core.counts.demoted_blocks == 4


def test_demotions_out_at_a_tier_are_bounded_and_the_next_follows_an_end() -> None:
    p = Played(slots=16, tiers=["disk"])
    for n in range(DEMOTES_IN_FLIGHT_MAX + 3):
        p.stored("r", keys(n), first=n)
    started = p.starts("demote")
    assert len(started) == DEMOTES_IN_FLIGHT_MAX
    assert not p.core.settled
    p.moved(started[0])
    (following,) = p.starts("demote")
    assert following.keys == keys(4, 5, 6), "what waits goes together"


def test_what_is_evicted_before_its_turn_is_not_demoted() -> None:
    p = Played(slots=6, tiers=["disk"])
    p.hold(1, 2, 3, 4)
    started = p.starts("demote")
    p.hold(5, 6)
    p.hold(7)  # takes the slot of 5: 1 to 4 are leased by their demotions
    for start in started:
        p.moved(start)
    assert [start.keys for start in p.starts("demote")] == [keys(6, 7)]
    assert p.core.counts.demotes_dropped_blocks == 1


def test_what_waits_for_a_tier_that_is_down_is_bounded() -> None:
    p = Played(slots=8, tiers=["disk"])
    p.send(ev.TierLost, "disk")
    for n in range(500):
        p.stored("r", keys(n))
        p.send(ev.RequestGone, "r")
    queued = sum(len(slots) for queue in p.core._demotes._queues.values() for _, slots, _ in queue)
    assert queued <= 2 * 8
    p.send(ev.TierUp, "disk")
    p.send(ev.Tick)
    started = p.starts("demote")
    assert {k for start in started for k in start.keys} == set(keys(*range(492, 500)))


def test_a_failed_demotion_costs_nothing_but_itself() -> None:
    p = Played(tiers=["disk"])
    p.stored("r", keys(1, 2))
    (start,) = p.starts("demote")
    p.moved(start, "ok", "full")
    p.require_idle()
    assert p.held == set(keys(1, 2))
    assert (p.core.counts.demoted_blocks, p.core.counts.demotes_failed_blocks) == (1, 1)


def test_an_end_notice_with_the_wrong_number_of_causes_proves_nothing() -> None:
    p = Played(tiers=["disk"])
    p.lookup("r", keys(1, 2))
    p.answer_asks(1, 2)
    (start,) = p.starts("promote")
    p.moved(start, "ok")
    assert p.held == set()
    assert p.lookup("r", keys(1, 2)) == 0


def test_a_block_is_ready_only_when_every_rank_ended_well() -> None:
    p = Played(ranks=2)
    p.offer("r", keys(1))
    (store,) = p.take(fx.StartStore)
    p.rank_ended(store.transfer)
    assert p.held == set()
    assert p.take(fx.StoreEnded) == [], "the other rank still reads the device blocks"
    p.rank_ended(store.transfer)
    assert p.held == set(keys(1))
    assert p.take(fx.StoreEnded) == [fx.StoreEnded("r", store.transfer, ok=True)]


@pytest.mark.parametrize("first_ok", [True, False])
def test_one_rank_that_failed_fails_the_block(first_ok: bool) -> None:
    p = Played(ranks=2)
    p.offer("r", keys(1))
    (store,) = p.take(fx.StartStore)
    p.rank_ended(store.transfer, ok=first_ok)
    p.rank_ended(store.transfer, ok=not first_ok)
    assert p.held == set()
    assert p.slots_in(Slot.FREE) == 16
    assert p.take(fx.StoreEnded) == [fx.StoreEnded("r", store.transfer, ok=False)]


@pytest.mark.parametrize("first_ok", [True, False])
def test_a_load_ends_when_every_rank_ended(first_ok: bool) -> None:
    p = Played(ranks=2)
    p.stored("w", keys(1))
    p.lookup("r", keys(1))
    (load,) = p.load("r", 16)
    p.rank_ended(load.transfer, ok=first_ok)
    assert p.take(fx.LoadEnded) == []
    assert p.readers == 1
    p.rank_ended(load.transfer)
    assert p.take(fx.LoadEnded) == [fx.LoadEnded("r", ok=first_ok)]
    p.require_idle()


def test_being_demoted_is_not_being_used() -> None:
    p = Played(slots=3, tiers=["disk"])
    p.hold(1, 2, 3)
    for start in reversed(p.starts("demote")):
        p.moved(start)
    p.stored("w", keys(4))
    assert p.held == set(keys(2, 3, 4)), "1 is the oldest, whenever its demotion ended"


def test_what_is_loaded_while_it_is_demoted_is_recent_after_both() -> None:
    p = Played(slots=3, tiers=["disk"])
    p.hold(1, 2, 3)
    started = p.starts("demote")
    p.lookup("r", keys(1))
    (load,) = p.load("r", 16)
    p.ended(load.transfer)
    p.send(ev.RequestGone, "r")
    for start in started:
        p.moved(start)
    p.stored("w", keys(4))
    assert p.held == set(keys(1, 3, 4))

"""Requests, tiers and ranks that end at any moment; reset; close."""

from __future__ import annotations

import pytest
from played import TOKENS, Played, key, keys

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.tables import Phase, Slot

# Aborts.


def test_abort_before_any_lookup_is_nothing() -> None:
    p = Played()
    p.send(ev.RequestGone, "r")
    p.require_idle()
    assert p.core.requests_known == 0


def test_abort_after_a_hit_gives_it_back() -> None:
    p = Played()
    p.hold(1, 2)
    assert p.lookup("r", keys(1, 2)) == 2 * TOKENS
    p.send(ev.RequestGone, "r")
    p.send(ev.RequestGone, "r")
    p.require_idle()
    assert p.core.requests_known == 0


def test_abort_while_an_ask_is_out() -> None:
    p = Played(tiers=["disk"])
    assert p.lookup("r", keys(1)) is None
    p.send(ev.RequestGone, "r")
    assert p.core.requests_known == 0
    p.answer_asks(1)
    assert p.starts("promote") == []
    p.require_idle()


def test_abort_while_a_promotion_runs_and_no_other_request_ever_comes() -> None:
    p = Played(tiers=["disk"])
    p.lookup("r", keys(1))
    p.answer_asks(1)
    (start,) = p.starts("promote")
    p.send(ev.RequestGone, "r")
    assert p.take(fx.CancelTier) == [fx.CancelTier("disk", start.transfer)]
    assert p.slots_in(Slot.WRITING) == 1, "cancelled is a state: the tier may still write"
    p.moved(start, "cancelled")
    p.require_idle()
    assert p.core.requests_known == 0


def test_a_promotion_that_another_request_waits_for_is_not_cancelled() -> None:
    p = Played(tiers=["disk"])
    p.lookup("r", keys(1))
    p.lookup("s", keys(1))
    p.answer_asks(1)
    (start,) = p.starts("promote")
    p.send(ev.RequestGone, "r")
    assert p.take(fx.CancelTier) == []
    p.moved(start)
    assert p.lookup("s", keys(1)) == TOKENS


@pytest.mark.parametrize("ok", [True, False])
def test_abort_while_loading_keeps_the_lease_until_the_end(ok: bool) -> None:
    p = Played()
    p.hold(1)
    p.lookup("r", keys(1))
    (load,) = p.load("r", TOKENS)
    p.send(ev.RequestGone, "r")
    assert p.readers == 1
    p.ended(load.transfer, ok=ok)
    assert p.take(fx.LoadEnded) == [fx.LoadEnded("r", ok=ok)], "its device blocks can be freed now"
    p.require_idle()
    assert p.core.requests_known == 0


def test_a_thousand_finished_requests_leave_no_entry() -> None:
    p = Played(slots=8, tiers=["disk"])
    for n in range(1000):
        request = f"r{n}"
        prompt = keys(n, n + 1)
        p.lookup(request, prompt)
        if n % 5:
            p.answer_asks(n)
        p.now += 1.0 if n % 7 == 0 else 0.001
        tokens = p.lookup(request, prompt)
        for start in p.starts("promote"):
            p.moved(start)
        tokens = tokens or p.lookup(request, prompt)
        loads = p.load(request, tokens) if tokens and n % 3 else []
        p.offer(request, prompt)
        stores = p.take(fx.StartStore)
        p.send(ev.RequestGone, request)
        for started in [*loads, *stores]:
            p.ended(started.transfer, ok=n % 11 != 0)
        for start in p.starts("demote"):
            p.moved(start)
        for start in p.starts("promote"):
            p.moved(start, *["cancelled"] * len(start.keys))
        p.effects.clear()
    p.require_idle()
    assert p.core.requests_known == 0
    assert not p.core._lookups._ask_of
    assert p.core.counts.loaded_from_tiers_blocks > 0
    assert p.core.counts.loads_failed_count > 0


# Preemption.


def test_preemption_asks_for_the_end_of_its_stores_and_keeps_them_until_then() -> None:
    p = Played()
    p.offer("r", keys(1))
    (store,) = p.take(fx.StartStore)
    p.send(ev.Preempted, "r")
    assert p.take(fx.CancelRank) == [fx.CancelRank([store.transfer])]
    assert p.take(fx.StoreEnded) == []
    assert p.slots_in(Slot.WRITING) == 1
    p.ended(store.transfer, ok=False)
    assert p.take(fx.StoreEnded) == [fx.StoreEnded("r", store.transfer, ok=False)]
    assert p.held == set()
    p.require_idle()


def test_preemption_gives_a_lookup_back() -> None:
    p = Played()
    p.hold(1)
    p.lookup("r", keys(1))
    p.send(ev.Preempted, "r")
    p.require_idle()


def test_a_request_that_comes_back_while_its_old_store_runs_waits_for_it() -> None:
    p = Played()
    p.stored("r", keys(1))
    p.offer("r", keys(2), first=1)
    (store,) = p.take(fx.StartStore)
    p.send(ev.Preempted, "r")
    assert p.lookup("r", keys(1, 2)) is None
    p.ended(store.transfer)
    assert p.lookup("r", keys(1, 2)) == 2 * TOKENS
    (load,) = p.load("r", 2 * TOKENS)
    p.ended(load.transfer)
    p.require_idle()


# Notices from outside.


def test_end_notices_of_what_is_not_out_are_counted_and_ignored() -> None:
    p = Played(tiers=["disk", "mooncake"])
    p.lookup("r", keys(1))
    p.answer_asks(1)
    (start,) = p.starts("promote")
    p.send(ev.TierEnded, "mooncake", start.transfer, ["ok"])
    p.rank_ended(start.transfer)
    p.send(ev.TierEnded, "disk", 999, ["ok"])
    p.rank_ended(999)
    assert p.core.counts.stray_ends_count == 4
    assert p.held == set()
    p.moved(start)
    p.moved(start)
    assert p.core.counts.stray_ends_count == 5
    assert p.lookup("r", keys(1)) == TOKENS


def test_a_notice_of_an_earlier_round_does_not_end_a_later_one() -> None:
    p = Played()
    p.hold(1)
    p.lookup("r", keys(1))
    (first,) = p.load("r", TOKENS)
    p.ended(first.transfer)
    p.send(ev.RequestGone, "r")
    p.lookup("r", keys(1))
    (second,) = p.load("r", TOKENS)
    p.take(fx.LoadEnded)
    p.ended(first.transfer)
    assert p.take(fx.LoadEnded) == []
    p.ended(second.transfer)
    assert p.take(fx.LoadEnded) == [fx.LoadEnded("r", ok=True)]


def test_an_answer_to_no_ask_is_ignored() -> None:
    p = Played(tiers=["disk"])
    p.send(ev.TierAnswered, "disk", 77, [True])
    p.require_idle()


# Reset.


def test_a_reset_hides_everything_at_once_and_what_is_in_flight_ends_unseen() -> None:
    p = Played(slots=16, tiers=["disk"])
    p.hold("ready", "loading")
    for start in p.starts("demote"):
        p.moved(start)
    p.take(fx.StoreEnded)
    p.offer("s1", keys("stored 1"))
    p.offer("s2", keys("stored 2"))
    stores = p.take(fx.StartStore)
    p.lookup("l", keys("loading"))
    (load,) = p.load("l", TOKENS)
    p.lookup("q", keys("promoted"))
    p.answer_asks("promoted")
    (promotion,) = p.starts("promote")
    everything = ["ready", "loading", "stored 1", "stored 2", "promoted"]

    p.send(ev.Reset)
    assert p.held == set()
    for store in stores:
        p.ended(store.transfer)
    p.ended(load.transfer)
    p.moved(promotion)
    assert p.held == set()
    assert p.starts("demote") == [], "bytes of the old epoch go nowhere"
    assert p.take(fx.LoadEnded) == [fx.LoadEnded("l", ok=False)], "it loaded bytes of the old epoch"
    assert [ended.ok for ended in p.take(fx.StoreEnded)] == [True, True], "the device blocks are free, that is all"
    p.require_idle()
    p.send(ev.TierLost, "disk")
    for name in everything:
        assert p.lookup(f"after {name}", keys(name)) == 0
    assert p.stored("new", keys(*range(16))) == 16, "old blocks are reclaimed"


def test_what_is_stored_after_a_reset_is_found() -> None:
    p = Played()
    p.offer("r", keys(1))
    (old,) = p.take(fx.StartStore)
    p.send(ev.Reset)
    assert p.stored("r", keys(1)) == 1, "the old write of this key does not count"
    p.ended(old.transfer)
    assert p.lookup("s", keys(1)) == TOKENS


def test_what_waited_to_be_demoted_is_dropped_by_a_reset() -> None:
    p = Played(slots=64, tiers=["disk"])
    for n in range(20):
        p.stored("r", keys(n), first=n)
    started = p.starts("demote")
    p.send(ev.Reset)
    for start in started:
        p.moved(start)
    assert p.starts("demote") == []
    assert p.core.settled


# Tiers that are lost, die, and come back.


def lost_with_work_in_it() -> tuple[Played, fx.StartTier, fx.StartTier]:
    p = Played(tiers=["disk"])
    p.stored("w", keys("down"))
    (demotion,) = p.starts("demote")
    p.lookup("r", keys("up"))
    p.answer_asks("up")
    (promotion,) = p.starts("promote")
    p.send(ev.TierLost, "disk")
    return p, promotion, demotion


def test_nobody_waits_for_a_lost_tier_but_its_slots_are_kept() -> None:
    p, _, _ = lost_with_work_in_it()
    assert p.lookup("r", keys("up")) == 0
    assert p.slots_in(Slot.QUARANTINED) == 1, "the tier may still write there"
    assert p.readers == 1, "and still read here"
    assert p.lookup("s", keys("up")) == 0
    assert p.take(fx.Ask) == [], "a lost tier is not asked"


def test_a_confirmed_death_frees_what_the_tier_could_touch() -> None:
    p, promotion, demotion = lost_with_work_in_it()
    p.send(ev.TierDead, "disk")
    assert p.slots_in(Slot.FREE) == 15
    assert p.held == set(keys("down")), "never ready: nobody knows what a killed tier wrote"
    p.send(ev.RequestGone, "r")
    p.require_idle()
    p.moved(promotion)
    p.moved(demotion)
    assert p.core.counts.stray_ends_count == 2


def test_an_end_notice_of_a_lost_tier_that_comes_after_all_frees_too() -> None:
    p, promotion, demotion = lost_with_work_in_it()
    p.moved(promotion)
    assert key("up") not in p.held
    assert p.slots_in(Slot.QUARANTINED) == 0
    p.moved(demotion)
    p.send(ev.RequestGone, "r")
    p.require_idle()


def test_a_tier_that_is_up_again_is_used_again() -> None:
    p, _, _ = lost_with_work_in_it()
    p.send(ev.TierDead, "disk")
    p.stored("w", keys("later"))
    assert p.starts("demote") == []
    p.send(ev.TierUp, "disk")
    assert [start.keys for start in p.starts("demote")] == [keys("later")]
    assert p.lookup("s", keys("up")) is None
    assert p.answer_asks("up") == [keys("up")]
    (start,) = p.starts("promote")
    p.moved(start)
    assert p.lookup("s", keys("up")) == TOKENS


def test_a_tier_may_die_without_having_been_lost_first() -> None:
    p = Played(tiers=["disk"])
    p.lookup("r", keys("up"))
    p.answer_asks("up")
    assert p.starts("promote")
    p.send(ev.TierDead, "disk")
    assert p.lookup("r", keys("up")) == 0
    assert p.slots_in(Slot.FREE) == 16


def test_a_lost_tier_does_not_hold_up_a_lookup_that_another_serves() -> None:
    p = Played(tiers=["disk", "mooncake"])
    p.lookup("r", keys(1))
    disk, mooncake = p.take(fx.Ask)
    p.send(ev.TierAnswered, mooncake.tier, mooncake.ask, [True])
    assert p.starts("promote") == []
    p.send(ev.TierLost, disk.tier)
    assert [start.tier for start in p.starts("promote")] == ["mooncake"]


# The end.


def test_closing_drains_then_cancels_then_abandons() -> None:
    p = Played(slots=32, tiers=["disk"])
    p.hold(1)
    p.lookup("loads", keys(1))
    (load,) = p.load("loads", TOKENS)
    (demotion,) = p.starts("demote")
    p.offer("stores", keys(2))
    (store,) = p.take(fx.StartStore)
    p.lookup("waits", keys(3))
    p.answer_asks(3)
    (promotion,) = p.starts("promote")

    p.send(ev.Close)
    assert p.core.phase is Phase.DRAINING
    assert p.take(fx.CancelTier) == [fx.CancelTier("disk", promotion.transfer)], "nobody waits for it any more"
    assert p.lookup("new", keys(1)) == 0
    assert p.offer("new", keys(9)) == 1
    assert p.take(fx.StartStore) == [], "nothing new is admitted"
    p.ended(store.transfer)
    assert [start.keys for start in p.starts("demote")] == [keys(2)], "what is stored may still go down"

    p.send(ev.CancelAll)
    assert p.core.phase is Phase.CANCELLING
    assert {cancel.transfer for cancel in p.take(fx.CancelTier)} >= {demotion.transfer}
    assert p.take(fx.CancelRank) == [fx.CancelRank([load.transfer])]
    p.moved(demotion, "cancelled")
    assert p.core.transfers_out == 3

    p.send(ev.Abandon)
    assert p.core.phase is Phase.CLOSED
    kept = p.core.leases_out
    p.ended(load.transfer)
    p.moved(promotion)
    assert p.core.leases_out == kept == 3, "what was abandoned is kept until exit"


def test_a_close_with_nothing_out_is_settled_at_once() -> None:
    p = Played(tiers=["disk"])
    p.send(ev.Close)
    assert p.core.settled


def test_what_is_queued_for_a_tier_that_is_down_does_not_hold_up_a_close() -> None:
    p = Played(tiers=["disk"])
    p.send(ev.TierLost, "disk")
    p.stored("r", keys(1))
    p.send(ev.Close)
    assert p.core.settled


def test_a_hit_that_closing_took_back_cannot_be_loaded_and_says_so() -> None:
    p = Played()
    p.hold(1)
    assert p.lookup("r", keys(1)) == TOKENS
    p.send(ev.Close)
    assert p.load("r", TOKENS) == []
    assert p.take(fx.LoadEnded) == [fx.LoadEnded("r", ok=False)]
    p.require_idle()


@pytest.mark.parametrize("steps", [[ev.CancelAll], [ev.Abandon], [ev.Abandon, ev.CancelAll, ev.Close]])
def test_the_steps_of_a_close_may_come_without_the_earlier_ones(steps: list[type[ev.Event]]) -> None:
    p = Played(tiers=["disk"])
    p.lookup("r", keys(1))
    for step in steps:
        p.send(step)
    assert p.core.phase is (Phase.CLOSED if ev.Abandon in steps else Phase.CANCELLING)
    p.require_idle()


def test_lost_ranks_end_every_load_and_store_as_failed() -> None:
    p = Played(ranks=2)
    p.hold(1)
    p.lookup("l", keys(1))
    p.load("l", TOKENS)
    p.offer("s", keys(2))
    (store,) = p.take(fx.StartStore)
    p.rank_ended(store.transfer)
    p.take(fx.StoreEnded)
    p.send(ev.RanksLost)
    assert p.take(fx.LoadEnded) == [fx.LoadEnded("l", ok=False)]
    assert p.take(fx.StoreEnded) == [fx.StoreEnded("s", store.transfer, ok=False)]
    assert p.held == set(keys(1))
    p.require_idle()

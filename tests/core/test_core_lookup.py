"""Lookups: what is leased, asked for, promoted, and answered by when."""

from __future__ import annotations

import pytest
from played import TOKENS, Played, key, keys

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.tables import Slot


def promoting(**config: object) -> tuple[Played, list[fx.StartTier]]:
    """A lookup of a, b, c, d, all of which the tier has: one promotion is out."""
    p = Played(tiers=["disk"], **config)
    assert p.lookup("r", keys(*"abcd")) is None
    assert p.answer_asks(*"abcd") == [keys(*"abcd")]
    started = p.starts("promote")
    assert [start.keys for start in started] == [keys(*"abcd")]
    return p, started


def test_nothing_known_is_a_miss_at_once() -> None:
    p = Played()
    assert p.lookup("r", keys(*"abc")) == 0
    assert p.readers == 0


def test_the_longest_ready_prefix_is_the_answer_and_is_leased() -> None:
    p = Played()
    p.stored("w", keys(*"abd"))
    assert p.lookup("r", keys(*"abcd")) == 2 * TOKENS
    assert p.readers == 2


def test_only_what_the_device_lacks_is_leased() -> None:
    p = Played()
    p.stored("w", keys(*"abc"))
    assert p.lookup("r", keys(*"abc"), device=TOKENS) == 3 * TOKENS
    assert p.readers == 2
    assert p.load("r", 3 * TOKENS, TOKENS)[0].first == 1


def test_a_hit_that_the_device_has_already_is_no_hit() -> None:
    p = Played()
    p.stored("w", keys(*"abc"))
    assert p.lookup("r", keys(*"abc"), device=3 * TOKENS) == 0
    assert p.readers == 0


def test_one_bad_key_of_a_promotion_costs_only_itself() -> None:
    p, (start,) = promoting()
    p.moved(start, "ok", "ok", "checksum", "ok")
    assert p.held == set(keys(*"abd"))
    assert p.lookup("r", keys(*"abcd")) == 2 * TOKENS
    assert p.core.counts.bad_blocks == 1
    assert p.core.counts.promotes_failed_blocks == 1


def test_a_bad_key_is_not_asked_for_again_for_a_minute() -> None:
    p, (start,) = promoting()
    p.moved(start, "ok", "ok", "checksum", "ok")
    p.now = 59.0
    assert p.lookup("s", keys(*"abcd")) == 2 * TOKENS
    assert p.answer_asks() == []
    p.now = 60.0
    assert p.lookup("t", keys(*"abcd")) is None
    assert key("c") in p.answer_asks(*"cd")[0]
    assert [start.keys for start in p.starts("promote")] == [keys("c")]


@pytest.mark.parametrize("cause", ["checksum", "foreign", "short"])
def test_wrong_bytes_are_remembered(cause: str) -> None:
    p, (start,) = promoting()
    p.moved(start, cause, "ok", "ok", "ok")
    p.now = 2.0
    assert p.lookup("s", keys(*"abcd")) == 0
    assert p.answer_asks() == []


@pytest.mark.parametrize("cause", ["absent", "io_error", "cancelled", "lost"])
def test_a_plain_miss_is_asked_for_again(cause: str) -> None:
    p, (start,) = promoting()
    p.moved(start, cause, "ok", "ok", "ok")
    p.now = 2.0
    assert p.lookup("s", keys(*"abcd")) is None
    assert p.answer_asks("a") == [keys(*"abcd")]


def test_a_lookup_is_answered_at_its_deadline_without_what_is_late() -> None:
    p, (start,) = promoting()
    p.now = 0.9
    assert p.lookup("r", keys(*"abcd")) is None
    p.now = 1.0
    assert p.lookup("r", keys(*"abcd")) == 0
    assert p.slots_in(Slot.WRITING) == 4, "the slots stay taken until the tier reports"
    assert p.core.counts.lookups_late_count == 1
    p.moved(start)
    assert p.lookup("r", keys(*"abcd")) == 4 * TOKENS, "a late success becomes a hit"


def test_a_late_failure_frees_the_slot() -> None:
    p, (start,) = promoting()
    p.now = 1.0
    p.send(ev.Tick)
    p.moved(start, *["io_error"] * 4)
    assert p.lookup("r", keys(*"abcd")) == 0
    assert p.slots_in(Slot.FREE) == 16


def test_a_tick_settles_a_lookup_that_nobody_asks_again() -> None:
    p, _ = promoting()
    p.now = 1.0
    p.send(ev.Tick)
    assert p.core.counts.lookups_late_count == 1
    assert p.lookup("r", keys(*"abcd")) == 0


def test_an_ask_without_an_answer_has_a_deadline() -> None:
    p = Played(tiers=["disk"])
    p.stored("w", keys("a"))
    assert p.lookup("r", keys(*"ab")) is None
    p.now = 1.0
    assert p.lookup("r", keys(*"ab")) == TOKENS
    p.answer_asks("b")
    assert p.starts("promote") == [], "an answer that comes too late starts nothing"


def test_an_answer_of_another_tier_is_ignored() -> None:
    p = Played(tiers=["disk", "mooncake"])
    assert p.lookup("r", keys("a")) is None
    first, second = p.take(fx.Ask)
    p.send(ev.TierAnswered, second.tier, first.ask, [True])
    assert p.lookup("r", keys("a")) is None
    p.send(ev.TierAnswered, first.tier, first.ask, [False])
    p.send(ev.TierAnswered, second.tier, second.ask, [False])
    assert p.lookup("r", keys("a")) == 0


def test_the_first_tier_that_has_a_block_gives_it() -> None:
    p = Played(tiers=["disk", "mooncake"])
    assert p.lookup("r", keys(*"abc")) is None
    disk, mooncake = p.take(fx.Ask)
    p.send(ev.TierAnswered, "disk", disk.ask, [True, False, False])
    assert p.starts("promote") == [], "the other tier may know more"
    p.send(ev.TierAnswered, "mooncake", mooncake.ask, [True, True, False])
    assert [(s.tier, s.keys) for s in p.starts("promote")] == [("disk", keys("a")), ("mooncake", keys("b"))]


def test_a_block_that_is_being_written_is_pending_and_then_a_hit() -> None:
    p = Played()
    p.offer("w", keys(*"ab"))
    (store,) = p.take(fx.StartStore)
    assert p.lookup("r", keys(*"ab")) is None
    assert p.readers == 0, "half-written bytes are read by nobody"
    p.ended(store.transfer)
    assert p.lookup("r", keys(*"ab")) == 2 * TOKENS


def test_a_block_whose_write_failed_was_never_a_hit() -> None:
    p = Played()
    p.offer("w", keys(*"ab"))
    (store,) = p.take(fx.StartStore)
    assert p.lookup("r", keys(*"ab")) is None
    p.ended(store.transfer, ok=False)
    assert p.lookup("r", keys(*"ab")) == 0
    assert p.slots_in(Slot.FREE) == 16


def test_two_lookups_share_one_promotion() -> None:
    p, (start,) = promoting()
    assert p.lookup("s", keys(*"abcd")) is None
    p.answer_asks(*"abcd")
    assert p.starts("promote") == []
    p.moved(start)
    assert p.lookup("r", keys(*"abcd")) == p.lookup("s", keys(*"abcd")) == 4 * TOKENS


def test_promotions_hold_at_most_their_share_and_leave_room_for_stores() -> None:
    p = Played(slots=10, tiers=["disk"], promote_share=0.8)
    prompts = {f"q{n}": keys(*(f"q{n}.{i}" for i in range(4))) for n in range(50)}
    in_tier = {k for prompt in prompts.values() for k in prompt}
    promoted: list[bytes] = []
    (table,) = p.core.tables

    def step() -> None:
        for ask in p.take(fx.Ask):
            p.send(ev.TierAnswered, ask.tier, ask.ask, [k in in_tier for k in ask.keys])
        for start in p.starts("promote"):
            promoted.extend(start.keys)
            assert table.promoted_held <= 8
            p.moved(start)
            assert table.promoted_held <= 8

    for request, prompt in prompts.items():
        p.lookup(request, prompt)
        step()
    assert len(promoted) == 8
    assert p.offer("running", keys("s")) == 1
    (store,) = p.take(fx.StartStore)
    p.ended(store.transfer)
    # The two that have theirs are admitted one after the other; then others get theirs.
    loaded: set[bytes] = set()
    for _ in range(60):
        for request, prompt in list(prompts.items()):
            tokens = p.lookup(request, prompt)
            step()
            if tokens:
                (load,) = p.load(request, tokens)
                p.ended(load.transfer)
                p.send(ev.RequestGone, request)
                loaded.update(prompts.pop(request))
    assert not prompts, "everyone was served in the end"
    assert len(promoted) == len(set(promoted)), "a block was promoted twice before it was used"
    assert loaded == in_tier


def test_a_promotion_does_not_evict_what_it_is_to_be_joined_with() -> None:
    p = Played(slots=4, tiers=["disk"], promote_share=1.0)
    p.hold("b", "d", "x", "y")
    for start in p.starts("demote"):
        p.moved(start)
    assert p.lookup("r", keys(*"abcd")) is None
    p.answer_asks("a", "c")
    (start,) = p.starts("promote")
    p.moved(start)
    assert p.lookup("r", keys(*"abcd")) == 4 * TOKENS


def test_a_hit_is_leased_until_its_load() -> None:
    p = Played(slots=4)
    p.hold(1, 2, 3, 4)
    assert p.lookup("r", keys(1, 2, 3)) == 3 * TOKENS
    assert p.offer("w", keys(5, 6)) == 1, "only the fourth could go"
    assert set(keys(1, 2, 3)) <= p.held
    (load,) = p.load("r", 3 * TOKENS)
    p.ended(load.transfer)
    assert p.readers == 0


def test_what_was_looked_up_but_is_not_loaded_is_given_back() -> None:
    p = Played(slots=4)
    p.hold(1, 2, 3, 4)
    assert p.lookup("r", keys(1, 2, 3)) == 3 * TOKENS
    assert p.load("r", 0) == []
    assert p.readers == 0
    assert p.core.leases_out == 0
    assert p.stored("w", keys(5, 6, 7, 8)) == 4


def test_a_part_of_the_answer_may_be_loaded() -> None:
    p = Played()
    p.stored("w", keys(*"abcd"))
    assert p.lookup("r", keys(*"abcd")) == 4 * TOKENS
    (load,) = p.load("r", 2 * TOKENS)
    assert len(load.slots) == p.readers == 2


def test_a_source_of_a_running_load_is_not_evicted() -> None:
    p = Played(slots=2)
    p.stored("w", keys("a"))
    p.lookup("r", keys("a"))
    (load,) = p.load("r", TOKENS)
    assert p.offer("w", keys("b", "c")) == 1
    (store,) = p.take(fx.StartStore)
    assert set(store.slots).isdisjoint(load.slots)
    p.ended(store.transfer)
    p.ended(load.transfer)
    p.send(ev.RequestGone, "w")
    p.require_idle()
    assert p.stored("v", keys("d", "e")) == 2


def test_a_failed_load_is_not_offered_again_to_that_request_but_to_others() -> None:
    p = Played()
    p.stored("w", keys("a"))
    p.lookup("r", keys("a"))
    (load,) = p.load("r", TOKENS)
    p.ended(load.transfer, ok=False)
    assert p.take(fx.LoadEnded) == [fx.LoadEnded("r", ok=False)]
    assert p.lookup("r", keys("a")) == 0
    assert p.lookup("s", keys("a")) == TOKENS
    p.send(ev.RequestGone, "r")
    assert p.lookup("r", keys("a")) == TOKENS, "another request of the same name"


def test_a_later_lookup_of_a_waiting_request_finds_what_came_since() -> None:
    p = Played()
    assert p.lookup("r", keys(*"ab")) == 0
    p.stored("w", keys(*"ab"))
    assert p.lookup("r", keys(*"ab")) == 2 * TOKENS


def test_a_request_that_lost_device_blocks_is_looked_up_afresh() -> None:
    p = Played()
    p.stored("w", keys(*"abc"))
    assert p.lookup("r", keys(*"abc"), device=2 * TOKENS) == 3 * TOKENS
    assert p.lookup("r", keys(*"abc"), device=0) == 3 * TOKENS
    (load,) = p.load("r", 3 * TOKENS)
    assert load.first == 0
    assert len(load.slots) == 3


def test_finding_a_prefix_on_the_device_keeps_it_recent_in_host_memory() -> None:
    p = Played(slots=3)
    p.hold(1, 2, 3)
    p.lookup("r", keys(1), device=TOKENS)
    p.stored("w", keys(4))
    assert p.held == set(keys(1, 3, 4))

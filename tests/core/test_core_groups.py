"""Models with more than one KV cache group: one boundary that all groups can serve."""

from __future__ import annotations

from played import Played, keys

from kvtier.core import effects as fx
from kvtier.core.groups import Group
from kvtier.core.tables import Slot


def names(prefix: str, count: int) -> list[bytes]:
    return keys(*(f"{prefix}{i}" for i in range(count)))


def test_two_full_groups_meet_at_a_multiple_of_both_block_sizes() -> None:
    p = Played(groups=(Group(16), Group(24)), class_slots=(32,))
    p.stored("w", names("a", 5), group=0)  # 80 tokens
    p.stored("w", names("b", 4), group=1)  # 96 tokens
    assert p.lookup("r", names("a", 6), names("b", 4)) == 48
    assert p.readers == 3 + 2
    loads = p.load("r", 48)
    assert [(load.group, load.first, len(load.slots)) for load in loads] == [(0, 0, 3), (1, 0, 2)]


def test_a_load_of_two_groups_ends_once_and_fails_if_one_fails() -> None:
    p = Played(groups=(Group(16), Group(16)), class_slots=(32,))
    p.stored("w", names("a", 2), group=0)
    p.stored("w", names("b", 2), group=1)
    assert p.lookup("r", names("a", 2), names("b", 2)) == 32
    first, second = p.load("r", 32)
    p.ended(first.transfer)
    assert p.take(fx.LoadEnded) == []
    p.ended(second.transfer, ok=False)
    assert p.take(fx.LoadEnded) == [fx.LoadEnded("r", ok=False)]
    p.require_idle()


def test_groups_of_other_row_sizes_have_slots_of_their_own() -> None:
    p = Played(groups=(Group(16, 0), Group(16, 1)), class_slots=(2, 1))
    assert p.stored("w", names("a", 2), group=0) == 2
    assert p.stored("w", names("b", 2), group=1) == 1
    assert p.lookup("r", names("a", 2), names("b", 2)) == 16
    assert [int((t.state == Slot.READY).sum()) for t in p.core.tables] == [2, 1]


def test_attention_and_state_meet_at_a_boundary_that_both_have() -> None:
    p = Played(groups=(Group(32), Group(16, window_blocks=1)), class_slots=(16,))
    attention, state = names("a", 2), names("s", 4)
    p.stored("w", attention, group=0)  # keys at 32 and 64
    p.stored("w", state[1:3], first=1, group=1)  # states at 32 and 48
    assert p.lookup("r", attention, state) == 32
    loads = p.load("r", 32)
    assert [(load.group, load.first, len(load.slots)) for load in loads] == [(0, 0, 1), (1, 1, 1)]


def test_a_window_needs_all_of_its_last_blocks_and_no_other() -> None:
    p = Played(groups=(Group(16), Group(16, window_blocks=2)), class_slots=(32,))
    full, window = names("f", 6), names("w", 6)
    p.stored("w", full, group=0)
    p.stored("w", [window[i] for i in (0, 2, 3, 5)], group=1)
    assert p.lookup("r", full, window) == 64
    loads = p.load("r", 64)
    assert [(load.group, load.first, len(load.slots)) for load in loads] == [(0, 0, 4), (1, 2, 2)]


def test_no_boundary_that_all_can_serve_is_a_miss() -> None:
    p = Played(groups=(Group(16), Group(16, window_blocks=2)), class_slots=(32,))
    full, window = names("f", 4), names("w", 4)
    p.stored("w", full, group=0)
    p.stored("w", [window[1], window[3]], group=1)
    assert p.lookup("r", full, window) == 0
    assert p.readers == 0


def test_a_window_at_the_start_of_the_prompt_is_shorter() -> None:
    p = Played(groups=(Group(16), Group(16, window_blocks=4)), class_slots=(32,))
    full, window = names("f", 2), names("w", 2)
    p.stored("w", full, group=0)
    p.stored("w", window, group=1)
    assert p.lookup("r", full, window) == 32


def test_window_groups_alone_take_the_last_boundary_they_all_have() -> None:
    p = Played(groups=(Group(16, window_blocks=1), Group(32, window_blocks=1)), class_slots=(32,))
    small, large = names("s", 8), names("l", 4)
    p.stored("w", [small[1], small[3], small[6]], group=0)  # at 32, 64, 112
    p.stored("w", [large[0], large[1], large[2]], group=1)  # at 32, 64, 96
    assert p.lookup("r", small, large) == 64


def test_a_window_that_is_being_written_is_not_read() -> None:
    p = Played(groups=(Group(16), Group(16, window_blocks=1)), class_slots=(32,))
    full, window = names("f", 2), names("w", 2)
    p.stored("w", full, group=0)
    p.stored("w", window[:1], group=1)
    p.offer("w", window[1:], first=1, group=1)
    (store,) = p.take(fx.StartStore)
    assert p.lookup("r", full, window) in (16, None)
    p.ended(store.transfer)
    assert p.lookup("r", full, window) == 32


def test_a_hit_on_a_window_far_from_the_end_of_a_long_prompt_is_found() -> None:
    p = Played(groups=(Group(16), Group(16, window_blocks=1)), class_slots=(2048,))
    full, window = names("f", 1000), names("w", 1000)
    p.stored("w", full, group=0)
    p.stored("w", window[:1], group=1)
    assert p.lookup("r", full, window) == 16


def test_device_tokens_between_two_boundaries_reload_the_block_they_end_in() -> None:
    p = Played(groups=(Group(32), Group(16)), class_slots=(32,))
    big, small = names("b", 3), names("s", 6)
    p.stored("w", big, group=0)
    p.stored("w", small, group=1)
    assert p.lookup("r", big, small, device=48) == 96
    loads = p.load("r", 96, 48)
    assert [(load.group, load.first, len(load.slots)) for load in loads] == [(0, 1, 2), (1, 3, 3)]

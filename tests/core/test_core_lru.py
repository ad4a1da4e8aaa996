"""The LRU policy against a list that is obviously right; and the index it stands beside."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from played import keys

from kvtier.core.index import Index
from kvtier.core.policy.lru import LRU

CAPACITY = 12


class NaiveLRU:
    """Slots in one list, the next victim first."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def touch(self, slots: list[int]) -> None:
        self.forget(slots)
        self.order += slots[::-1]

    def forget(self, slots: list[int]) -> None:
        self.order = [slot for slot in self.order if slot not in slots]

    def victims(self, count: int, kept: set[int]) -> list[int]:
        taken = [slot for slot in self.order if slot not in kept][:count]
        self.forget(taken)
        return taken


slots = st.lists(st.integers(0, CAPACITY - 1), unique=True, max_size=CAPACITY)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), slots, st.just(0)),
        st.tuples(st.just("forget"), slots, st.just(0)),
        st.tuples(st.just("victims"), slots, st.integers(0, CAPACITY)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_lru_behaves_like_a_list(script: list[tuple[str, list[int], int]]) -> None:
    lru, naive = LRU(CAPACITY), NaiveLRU()
    for step, chosen, count in script:
        array = np.array(chosen, np.int64)
        if step == "touch":
            lru.touch(array)
            naive.touch(chosen)
        elif step == "forget":
            lru.forget(array)
            naive.forget(chosen)
        else:
            victims = lru.victims(count, lambda asked, keep=array: np.isin(asked, keep))
            assert victims.tolist() == naive.victims(count, set(chosen))
        assert len(lru) == len(naive.order)
    assert lru.victims(CAPACITY, lambda asked: np.zeros(len(asked), bool)).tolist() == naive.order


def test_long_runs_are_given_up_in_order_over_many_chunks() -> None:
    capacity = 2000
    lru, naive = LRU(capacity), NaiveLRU()
    rng = np.random.default_rng(1)
    for _ in range(40):
        first = int(rng.integers(0, capacity - 700))
        run = np.arange(first, first + int(rng.integers(1, 700)))
        lru.touch(run)
        naive.touch(run.tolist())
        if rng.random() < 0.5:
            assert lru.victims(100, lambda asked: asked % 3 == 0).tolist() == naive.victims(
                100, set(range(0, capacity, 3))
            )
    assert len(lru) == len(naive.order)


def test_stale_entries_stay_bounded_however_often_the_same_slots_are_touched() -> None:
    lru = LRU(1000)
    everything = np.arange(1000)
    lru.touch(everything)
    most = 0
    rng = np.random.default_rng(2)
    for _ in range(3000):
        lru.touch(rng.choice(everything, int(rng.integers(1, 20)), replace=False))
        most = max(most, lru.entries())
    assert len(lru) == 1000
    assert most <= 4 * 1000, "entries grew with touches, not with slots"
    assert len(lru._chunks) <= 64, "chunks that hold little are joined"


def test_an_index_is_emptied_without_looking_at_what_is_in_it() -> None:
    index = Index()
    index.add(keys(*range(2000)), range(2000))
    tables = index._tables
    index.clear()
    assert len(index) == 0
    assert index.get_all(keys(*range(2000))) == [None] * 2000
    assert sum(map(len, tables)) == 2000, "the old tables were emptied one entry at a time"
    for n in range(len(tables)):
        index.add(keys(n), [n])
    assert index._dropped == [], "later calls drop what is left, a table a call"


def test_an_index_removes_a_key_only_for_the_slot_it_stands_for() -> None:
    index = Index()
    (key,) = keys("a")
    index.add([key], [1])
    index.add([key], [2])
    assert index.remove([key], [1]) == []
    assert index.get(key) == 2
    assert index.remove([key], [2]) == [key]
    assert index.remove([key], [2]) == []

"""The shipped conformance suite on the fake tier, and what its scripts do."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from kvtier.errors import CoreBug
from kvtier.memory.layout import Rows
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import Memory, Outcome
from kvtier.testing.fake_tier import Answer, FakeConfig, FakeTier, Shelf
from kvtier.testing.tier_suite import NAMESPACE, Damage, Driver, Region, TierSuite, key_of, keys_of
from kvtier.tiers.base import Cause, Direction, Tier


class TestFakeTier(TierSuite):
    @pytest.fixture(autouse=True)
    def _own_shelf(self) -> None:
        self.shelf: Shelf = OrderedDict()

    def open(self, rows: Rows, namespace: bytes, *, blocks_max: int | None = None) -> Tier:
        return FakeTier(rows, namespace, config=FakeConfig(blocks_max=blocks_max or 1000), shelf=self.shelf)

    def damage(self, key: bytes, how: Damage) -> None:
        stored = self.shelf[NAMESPACE, key]
        if how is Damage.GONE:
            del self.shelf[NAMESPACE, key]
        elif how is Damage.SHORT:
            stored.data = stored.data[:100]
        elif how is Damage.FOREIGN:
            stored.key = key_of(777)
        else:
            stored.data = bytes([stored.data[0] ^ 1]) + stored.data[1:]


@pytest.fixture
def driver():
    region = Region([4096], 8)
    driver = Driver(FakeTier(region.rows, NAMESPACE), region)
    yield driver
    driver.tier.release()
    assert driver.close().clean
    region.close()


def test_answers_come_in_the_order_told_and_the_last_one_stays(driver: Driver) -> None:
    driver.store(keys_of([1, 2]))
    driver.tier.tell(key_of(1), Answer.FAIL, Answer.MISS, Answer.PARTIAL, Answer.SLOW, Answer.HIT)
    for expected in (Cause.IO_ERROR, Cause.ABSENT, Cause.SHORT, Cause.OK, Cause.OK, Cause.OK):
        assert driver.load(keys_of([1, 2])) == [expected, Cause.OK]


def test_what_never_ends_keeps_the_memory_until_released(driver: Driver) -> None:
    driver.tier.tell(key_of(1), Answer.NEVER)
    transfer = driver.submit(Direction.DEMOTE, keys_of([1]))
    driver.tier.cancel(transfer)
    assert driver.poll() == []
    report = driver.tier.close(Deadline.after(0.05))
    assert (report.ended, report.memory) == (Outcome.RUNNING, Memory.KEPT)
    driver.tier.release()
    assert driver.tier.close(Deadline.after(1.0)).clean
    driver.poll()
    assert driver.ended[transfer] == [Cause.OK]


def test_a_scripted_bug_comes_out_of_poll(driver: Driver) -> None:
    driver.tier.tell(key_of(1), Answer.RAISE)
    driver.submit(Direction.DEMOTE, keys_of([1]))
    with pytest.raises(CoreBug, match="scripted"):
        driver.poll()

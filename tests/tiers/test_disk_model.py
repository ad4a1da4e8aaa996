"""The disk tier against a model: any order of stores, loads, damage, removals and reopens."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.config import Size
from kvtier.testing.disk_tools import locate, size_for, used_bytes
from kvtier.testing.tier_suite import Driver, Region, key_of
from kvtier.tiers import disk_format as fmt
from kvtier.tiers.base import Cause, Direction, Ended, Evicted
from kvtier.tiers.disk import DiskConfig, open_disk

PAYLOADS = (4096, 12288)
ROWS = 8
BLOCKS = 12
numbers = st.lists(st.integers(0, 30), max_size=ROWS)
classes = st.integers(0, len(PAYLOADS) - 1)
NAMES = {key_of(number, size_class): (size_class, number) for number in range(31) for size_class in range(2)}


class DiskMachine(RuleBasedStateMachine):
    """The model: which blocks are certainly known (`known`), and which of those were damaged past the tier.

    Keys of different size classes never meet, as in an engine: the group is a part of the key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvt-model-")
        self.path = Path(self.folder.name) / "tier"
        self.size = size_for(BLOCKS, PAYLOADS[1])
        self.known: set[tuple[int, int]] = set()
        self.damaged: set[tuple[int, int]] = set()
        self.region = Region(PAYLOADS, ROWS)
        self.ever_damaged: set[tuple[int, int]] = set()
        self.doubtful: set[tuple[int, int]] = set()
        """came back at a reopen, and was damaged once: whether that was this copy is not known"""
        self.driver: Driver | None = None

    @property
    def d(self) -> Driver:
        assert self.driver is not None
        return self.driver

    @initialize()
    def open(self) -> None:
        config = DiskConfig(path=str(self.path), size=Size(self.size), direct="off")
        self.driver = Driver(open_disk(config, self.region.rows, b"model"), self.region)

    def keys(self, size_class: int, of: list[int]) -> list[bytes]:
        return [key_of(number, size_class) for number in of]

    def follow(self) -> None:
        """Believe the notices, in their order."""
        for notice in self.d.log:
            if isinstance(notice, Ended):
                transfer = self.d.transfers[notice.transfer]
                for key, cause in zip(transfer.keys, notice.causes, strict=True):
                    if transfer.direction is Direction.DEMOTE and cause is Cause.OK:
                        self.known.add(NAMES[key])
            elif isinstance(notice, Evicted):
                for key in notice.keys:
                    assert NAMES[key] in self.known, "evicted what was not there"
                    self.known.discard(NAMES[key])
                    self.damaged.discard(NAMES[key])
                    self.doubtful.discard(NAMES[key])
        self.d.log.clear()

    @rule(of=numbers, size_class=classes)
    def store(self, of: list[int], size_class: int) -> None:
        causes = self.d.store(self.keys(size_class, of), size_class=size_class)
        assert set(causes) <= {Cause.OK, Cause.FULL}
        if len(of) <= 1:
            assert set(causes) <= {Cause.OK}, "one block always finds room"
        self.follow()

    @rule(of=numbers, size_class=classes)
    def load(self, of: list[int], size_class: int) -> None:
        causes = self.d.load(self.keys(size_class, of), size_class=size_class)
        for number, cause in zip(of, causes, strict=True):
            if (size_class, number) in self.damaged:
                assert cause in (Cause.CHECKSUM, Cause.ABSENT)
            elif (size_class, number) in self.doubtful:
                assert cause in (Cause.CHECKSUM, Cause.ABSENT, Cause.OK)
            else:
                assert cause is (Cause.OK if (size_class, number) in self.known else Cause.ABSENT)
        self.follow()

    @rule(first=numbers, second=numbers, size_class=classes, cancel=st.booleans())
    def both_at_once(self, first: list[int], second: list[int], size_class: int, cancel: bool) -> None:
        """A store and a load in flight together; a load reads other rows than are stored from."""
        half = ROWS // 2
        first, second = first[:half], second[:half]
        for slot, key in enumerate(self.keys(size_class, first)):
            self.d.region.fill(size_class, slot, key)
        write = self.d.submit(Direction.DEMOTE, self.keys(size_class, first), size_class=size_class)
        slots = range(half, half + len(second))
        read = self.d.submit(Direction.PROMOTE, self.keys(size_class, second), slots, size_class=size_class)
        if cancel:
            self.d.tier.cancel(write)
        self.d.wait(write, read)
        assert set(self.d.ended[write]) <= {Cause.OK, Cause.FULL, Cause.CANCELLED, Cause.ABSENT}
        for slot, number, cause in zip(slots, second, self.d.ended[read], strict=True):
            if cause is Cause.OK:
                assert (size_class, number) not in self.damaged
                assert self.d.region.holds(size_class, slot, key_of(number, size_class))
        self.follow()

    @rule(which=st.integers(0, 1 << 10), bit=st.integers(0, 1 << 20))
    def damage(self, which: int, bit: int) -> None:
        whole = sorted(self.known - self.damaged)
        if whole:
            size_class, number = whole[which % len(whole)]
            locate(self.path, key_of(number, size_class)).flip(bit % ((fmt.HEADER_BYTES + PAYLOADS[size_class]) * 8))
            self.damaged.add((size_class, number))
            self.ever_damaged.add((size_class, number))

    @rule()
    def reopen(self) -> None:
        """What was known is found again; so may be what was evicted, where nothing has taken its slot yet."""
        self.shut()
        self.open()
        names = list(NAMES)
        found = {NAMES[key] for key, held in zip(names, self.d.ask(names), strict=True) if held}
        assert found >= self.known
        self.doubtful |= (found - self.known) & self.ever_damaged
        self.known = found

    def shut(self) -> None:
        assert self.d.close().clean

    @invariant()
    def within_its_size_and_of_the_models_opinion(self) -> None:
        if self.driver is None:
            return
        assert used_bytes(self.path / "engine-0") <= self.size
        for size_class in range(len(PAYLOADS)):
            held = self.d.ask(self.keys(size_class, list(range(31))))
            assert held == [(size_class, number) in self.known for number in range(31)]
        assert self.d.tier.counts()["blocks_count"] == len(self.known)

    def teardown(self) -> None:
        if self.driver is not None:
            self.shut()
        self.region.close()
        self.folder.cleanup()


DiskMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDiskModel = DiskMachine.TestCase

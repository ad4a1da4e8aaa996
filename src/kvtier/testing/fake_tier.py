"""A tier in memory that answers as it is told to, on the same contract as a real one.

For tests of whatever sits above a tier. Without a script it is a plain, correct tier without threads: what was
submitted ends at the next poll. A script gives a key one `Answer`, or a list of them, one for each time it is moved;
the last one stays. As a tier of a process of its own its type is "kvtier.testing.fake_tier:TIER_TYPE".
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import xxhash

from kvtier.core.ids import AskId, Key, TierName, TransferId
from kvtier.errors import Closed, CoreBug, Refused
from kvtier.memory.layout import Rows
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.runtime.worker import Flag
from kvtier.tiers.base import Cause, Direction, Ended, Evicted, Held, Tier, TierNotice, TierTransfer
from kvtier.tiers.registry import TierType


class Answer(StrEnum):
    """What becomes of one key of one transfer."""

    HIT = "hit"
    """as a real tier would"""
    MISS = "miss"
    """absent, though it said that it has it"""
    SLOW = "slow"
    """as a real tier would, `slow_s` later"""
    FAIL = "fail"
    """an I/O error; what is stored stays"""
    PARTIAL = "partial"
    """half of the row is moved, then it fails"""
    NEVER = "never"
    """no end: the transfer runs until `release`, or until the tier is killed"""
    RAISE = "raise"
    """a bug: the next poll raises"""


class FakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a tier of type `fake`."""

    blocks_max: int = 1 << 30
    queue_blocks_max: int = 1 << 30
    slow_s: float = 0.05
    script: dict[str, Answer | list[Answer]] = {}
    """by key in hex; "*" is every key that is not named"""


@dataclass(slots=True)
class Stored:
    """One block as it lies in the fake tier; damage it as you like."""

    data: bytes
    key: bytes
    row_bytes: int
    checksum: bytes


Shelf = OrderedDict[tuple[bytes, bytes], Stored]
"""by namespace and key, the longest unused first"""


class _Running:
    """A transfer with the answers that are still to come."""

    __slots__ = ("answers", "causes", "due", "of")

    def __init__(self, of: TierTransfer, answers: list[Answer], due: float) -> None:
        self.of = of
        self.answers = answers
        self.due = due
        self.causes: list[Cause] = []


class FakeTier(Tier):
    """Give `shelf` to find again what an earlier one stored. Everything happens in `poll`."""

    def __init__(
        self,
        rows: Rows,
        namespace: bytes,
        *,
        name: TierName = "fake",
        config: FakeConfig | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.name = name
        self.shelf: Shelf = OrderedDict() if shelf is None else shelf
        self.script: dict[str, Answer | list[Answer]] = dict((config or FakeConfig()).script)
        self.running: dict[TransferId, _Running] = {}
        self._config = config or FakeConfig()
        self._rows = rows
        self._namespace = namespace
        self._notices: list[TierNotice] = []
        self._flag = Flag()
        self._counts: Counter[str] = Counter()
        self._stopping = self._closed = False
        self._report: CloseReport | None = None

    def tell(self, key: bytes, *answers: Answer) -> None:
        """From now on `key` gets these, in turn."""
        self.script[key.hex()] = list(answers)

    def release(self) -> None:
        """Let everything that would never end go on as a hit."""
        for running in self.running.values():
            running.answers = [Answer.HIT if a is Answer.NEVER else a for a in running.answers]
        self._flag.set()

    def ask(self, ask: AskId, keys: Sequence[Key]) -> None:
        self._usable()
        self._notice(Held(ask, [self._holds(key) for key in keys]))

    def submit(self, transfer: TierTransfer) -> None:
        self._usable()
        queued = sum(len(running.of.keys) for running in self.running.values())
        if queued + len(transfer.keys) > self._config.queue_blocks_max:
            raise Refused(f"{self.name}: queue_blocks_max is {self._config.queue_blocks_max}; try again later")
        if transfer.id in self.running or len(transfer.keys) != len(transfer.slots):
            raise CoreBug(f"{self.name}: transfer {transfer.id} is known already, or has more keys than slots")
        answers = [self._next_answer(key) for key in transfer.keys]
        slow = self._config.slow_s if Answer.SLOW in answers else 0.0
        self.running[transfer.id] = _Running(transfer, answers, time.monotonic() + slow)
        self._flag.set()

    def cancel(self, transfer: TransferId) -> None:
        running = self.running.get(transfer)
        if running is not None and Answer.NEVER not in running.answers:
            self._end(running, [Cause.CANCELLED] * len(running.of.keys))

    def poll(self) -> list[TierNotice]:
        for running in list(self.running.values()):
            if Answer.RAISE in running.answers:
                running.answers = [Answer.NEVER] * len(running.answers)
                raise CoreBug(f"{self.name}: scripted to raise in transfer {running.of.id}")
            if Answer.NEVER not in running.answers and time.monotonic() >= running.due:
                self._end(running, [self._move(running, i) for i in range(len(running.of.keys))])
        notices, self._notices = self._notices, []
        # What is slow has no thread to wake the caller: the descriptor stays readable, and polls find nothing.
        if any(Answer.NEVER not in running.answers for running in self.running.values()):
            self._flag.set()
        else:
            self._flag.clear()
        return notices

    def fileno(self) -> int:
        return self._flag.fileno()

    def counts(self) -> dict[str, int]:
        names = ("loaded_blocks_count", "stored_blocks_count", "evicted_blocks_count")
        return {name: self._counts[name] for name in names} | {"blocks_count": len(self.shelf)}

    def ask_stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            for transfer in list(self.running):
                self.cancel(transfer)

    def close(self, deadline: Deadline) -> CloseReport:
        if self._report is not None and self._report.clean:
            return self._report
        self.ask_stop()
        began = time.monotonic()
        while self.running and not deadline.expired:
            time.sleep(min(0.005, deadline.left))  # a test's thread may call `release` meanwhile
            for running in list(self.running.values()):
                if Answer.NEVER not in running.answers:
                    self._end(running, [self._move(running, i) for i in range(len(running.of.keys))])
        self._report = CloseReport(self.name, seconds=time.monotonic() - began)
        if self.running:
            self._report.ended, self._report.memory = Outcome.RUNNING, Memory.KEPT
            self._report.cause = f"{len(self.running)} transfers never ended"
        elif not self._closed:
            self._closed = True
            self._flag.close()
        return self._report

    def _usable(self) -> None:
        if self._closed:
            raise Closed(f"{self.name}: closed before this call")
        if self._stopping:
            raise Refused(f"{self.name}: closing, nothing new is accepted")

    def _notice(self, notice: TierNotice) -> None:
        self._notices.append(notice)
        self._flag.set()

    def _next_answer(self, key: bytes) -> Answer:
        told = self.script.get(key.hex(), self.script.get("*", Answer.HIT))
        if isinstance(told, list):
            return told.pop(0) if len(told) > 1 else told[0]
        return told

    def _end(self, running: _Running, causes: list[Cause]) -> None:
        del self.running[running.of.id]
        self._notice(Ended(running.of.id, causes))

    def _holds(self, key: bytes) -> bool:
        stored = self.shelf.get((self._namespace, key))
        return stored is not None and stored.row_bytes in [c.row_bytes for c in self._rows.layout.classes]

    def _move(self, running: _Running, i: int) -> Cause:
        of, answer = running.of, running.answers[i]
        if answer is Answer.FAIL:
            return Cause.IO_ERROR
        if answer is Answer.MISS:
            return Cause.ABSENT
        with self._rows.row(of.size_class, of.slots[i]) as row:
            if of.direction is Direction.DEMOTE:
                return Cause.IO_ERROR if answer is Answer.PARTIAL else self._store(of.keys[i], row)
            return self._load(of.keys[i], row, half=answer is Answer.PARTIAL)

    def _store(self, key: bytes, row: memoryview) -> Cause:
        full = (self._namespace, key)
        if full in self.shelf:
            self.shelf.move_to_end(full)
            return Cause.OK
        while len(self.shelf) >= self._config.blocks_max:
            (namespace, oldest), _ = self.shelf.popitem(last=False)
            self._counts["evicted_blocks_count"] += 1
            if namespace == self._namespace:
                self._notice(Evicted([oldest]))
        self.shelf[full] = Stored(bytes(row), key, len(row), xxhash.xxh3_128_digest(row))
        self._counts["stored_blocks_count"] += 1
        return Cause.OK

    def _load(self, key: bytes, row: memoryview, *, half: bool) -> Cause:
        full = (self._namespace, key)
        stored = self.shelf.get(full)
        if stored is None or stored.row_bytes != len(row):
            return Cause.ABSENT
        if half:
            row[: len(row) // 2] = stored.data[: len(row) // 2]
            return Cause.SHORT
        cause = Cause.OK
        if len(stored.data) != stored.row_bytes:
            cause = Cause.SHORT
        elif stored.key != key:
            cause = Cause.FOREIGN
        elif xxhash.xxh3_128_digest(stored.data) != stored.checksum:
            cause = Cause.CHECKSUM
        if cause is not Cause.OK:
            del self.shelf[full]
            self._notice(Evicted([key]))
            return cause
        row[:] = stored.data
        self.shelf.move_to_end(full)
        self._counts["loaded_blocks_count"] += 1
        return cause


def open_fake(config: FakeConfig, rows: Rows, namespace: bytes, name: TierName) -> FakeTier:
    return FakeTier(rows, namespace, name=name, config=config)


TIER_TYPE = TierType(FakeConfig, open_fake)

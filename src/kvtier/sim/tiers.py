"""A played lower tier: it is slow, fails, loses blocks, finds them damaged, hangs, dies, and comes back warm.

`Shelf` is what survives the death of the tier; `PlayedTier` is one life of it, under the real `TierPort`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvtier.core.ids import AskId, Key, TierName, TransferId
from kvtier.errors import Refused, TierBroken
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.sim.memory import Cell
from kvtier.sim.memory import Memory as Cells
from kvtier.sim.world import CheckFailed, World
from kvtier.tiers.base import Cause, Direction, Ended, Held, Tier, TierNotice, TierTransfer

QUEUE_MAX = 12
AT_ONCE = 3

_DAMAGE = (Cause.CHECKSUM, Cause.FOREIGN, Cause.SHORT)


class Shelf:
    """Blocks of a tier by key: their bytes, or how they are damaged."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[bytes, NDArray[np.uint64] | Cause] = {}

    def put(self, key: bytes, words: NDArray[np.uint64] | Cause) -> None:
        self.blocks.pop(key, None)
        if len(self.blocks) >= self.capacity:
            del self.blocks[next(iter(self.blocks))]
        self.blocks[key] = words


class _Running:
    """A transfer whose rows are being touched."""

    def __init__(self, transfer: TierTransfer, rows: dict[int, NDArray[np.uint64]]) -> None:
        self.transfer = transfer
        self.rows = rows
        """demotion: what was read so far of each row"""


class PlayedTier(Tier):
    def __init__(self, world: World, name: TierName, shelf: Shelf, hosts: Sequence[Cells]) -> None:
        self.name = name
        self._w = world
        self._shelf = shelf
        self._hosts = hosts
        self._queue: deque[TierTransfer] = deque()
        self._running: dict[TransferId, _Running] = {}
        self._out: list[TierNotice] = []
        self._ready = False
        self._hung = False
        self._dying = False
        self.dead = False
        self._broken = False
        self._stopping = False
        world.after(world.between(0.0, 0.3), self._come_up)

    # Faults.

    def hang(self) -> None:
        self._hung = True

    def go_on(self) -> None:
        self._hung = False
        self._start()

    def crash(self) -> None:
        """The process is gone, with all that it did."""
        self._broken = True
        self._stop_touching()

    def break_down(self) -> None:
        """It reports an error and is no use any more, but what it started goes on until it is ended."""
        self._broken = True

    @property
    def touching(self) -> bool:
        return bool(self._running)

    # The contract.

    @property
    def ready(self) -> bool:
        return self._ready

    def ask(self, ask: AskId, keys: Sequence[Key]) -> None:
        self._admit()
        slow = self._w.fault("slow ask", 0.1)
        wait = self._w.between(0.3, 2.0) if slow else self._w.between(0.001, 0.02)

        def answer() -> None:
            if self._hung or self.dead:
                return
            self._out.append(Held(ask, [key in self._shelf.blocks for key in keys]))

        self._w.after(wait, answer)

    def submit(self, transfer: TierTransfer) -> None:
        self._admit()
        if len(self._queue) >= QUEUE_MAX:
            raise Refused(f"{len(self._queue)} transfers are queued")
        self._queue.append(transfer)
        self._start()

    def cancel(self, transfer: TransferId) -> None:
        for queued in self._queue:
            if queued.id == transfer:
                self._queue.remove(queued)
                self._w.coverage["queued tier transfer cancelled"] += 1
                self._out.append(Ended(transfer, [Cause.CANCELLED] * len(queued.keys)))
                return

    def poll(self) -> list[TierNotice]:
        if self._broken:
            raise TierBroken(f"played tier {self.name} broke")
        if self._hung:
            return []
        out, self._out = self._out, []
        return out

    def fileno(self) -> int:
        return -1

    def counts(self) -> dict[str, int]:
        return {}

    def ask_stop(self) -> None:
        self._stopping = True

    def give_up(self) -> bool:
        if not self._dying:
            self._dying = True
            if self._w.chance(0.5):
                self._w.after(self._w.between(0.01, 1.5), self._die)
            else:
                self._die()
        return self.dead

    def close(self, deadline: Deadline) -> CloseReport:
        if self._w.fault("tier that cannot be ended", 0.15):
            return CloseReport(self.name, Outcome.RUNNING, Memory.KEPT, cause="it cannot be ended")
        self._die()
        return CloseReport(self.name)

    # Inside.

    def _admit(self) -> None:
        if self._stopping:
            raise Refused("it is being closed")
        if self._w.fault("tier queue full", 0.02):
            raise Refused("played: full")
        if self._w.fault("tier call raised", 0.01):
            self._broken = True
            raise TierBroken("played: the call raised")

    def _come_up(self) -> None:
        self._ready = not self._hung

    def _die(self) -> None:
        if not self.dead:
            self.dead = True
            self._stop_touching()

    def _stop_touching(self) -> None:
        for running in list(self._running.values()):
            self._let_go(running)
        self._queue.clear()

    def _cells(self, transfer: TierTransfer) -> list[Cell]:
        ranks = self._hosts[transfer.size_class].words.shape[0]
        return [(rank, slot) for slot in transfer.slots for rank in range(ranks)]

    def _who(self, transfer: TierTransfer) -> str:
        return f"{self.name} {transfer.direction} {transfer.id}"

    def _start(self) -> None:
        while self._queue and len(self._running) < AT_ONCE and not self._hung and not self.dead:
            transfer = self._queue.popleft()
            host, cells = self._hosts[transfer.size_class], self._cells(transfer)
            rows: dict[int, NDArray[np.uint64]] = {}
            if transfer.direction is Direction.PROMOTE:
                host.begin_write(self._who(transfer), cells)
                for key, slot in zip(transfer.keys, transfer.slots, strict=True):
                    words = self._shelf.blocks.get(key)
                    host.words[:, slot, :, 0] = words[..., 0] if isinstance(words, np.ndarray) else 7
            else:
                host.begin_read(self._who(transfer), cells)
                for slot in transfer.slots:
                    rows[slot] = np.zeros_like(host.words[:, slot])
                    rows[slot][..., 0] = host.words[:, slot, :, 0]
            running = _Running(transfer, rows)
            self._running[transfer.id] = running
            slow = self._w.fault(f"slow {transfer.direction}", 0.1)
            wait = self._w.between(0.3, 2.0) if slow else self._w.between(0.002, 0.05)
            self._w.after(wait, partial(self._finish, running))

    def _finish(self, running: _Running) -> None:
        transfer = running.transfer
        if self._running.get(transfer.id) is not running:
            return  # it died with it
        if self._hung:
            self._w.after(0.5, lambda: self._finish(running))
            return
        act = self._promoted if transfer.direction is Direction.PROMOTE else self._demoted
        causes = [act(running, key, slot) for key, slot in zip(transfer.keys, transfer.slots, strict=True)]
        self._let_go(running)
        self._out.append(Ended(transfer.id, causes))
        self._start()

    def _let_go(self, running: _Running) -> None:
        transfer = self._running.pop(running.transfer.id).transfer
        host, cells = self._hosts[transfer.size_class], self._cells(transfer)
        end = host.end_write if transfer.direction is Direction.PROMOTE else host.end_read
        end(self._who(transfer), cells)

    def _promoted(self, running: _Running, key: bytes, slot: int) -> Cause:
        found = self._shelf.blocks.get(key)
        if found is None:
            return Cause.ABSENT
        if isinstance(found, Cause):
            del self._shelf.blocks[key]
            return found
        if self._w.fault("promotion failed", 0.05):
            return Cause.IO_ERROR
        self._hosts[running.transfer.size_class].words[:, slot] = found
        return Cause.OK

    def _demoted(self, running: _Running, key: bytes, slot: int) -> Cause:
        host = self._hosts[running.transfer.size_class]
        words = running.rows[slot]
        words[..., 1] = host.words[:, slot, :, 1]
        weights, pages = self._w.pages_of[Key(key)]
        for rank in range(words.shape[0]):
            for page, identity in enumerate(pages):
                expected = self._w.pattern(identity, weights, rank)
                if (int(words[rank, page, 0]), int(words[rank, page, 1])) != expected:
                    raise CheckFailed("bytes", f"{self._who(running.transfer)} reads wrong bytes in row {slot}")
        if self._w.fault("demotion failed", 0.05):
            return Cause.FULL
        self._shelf.put(key, words)
        if self._w.fault("block damaged on the shelf", 0.05):
            self._shelf.blocks[key] = self._w.random.choice(_DAMAGE)
        elif self._w.fault("block lost on the shelf", 0.05):
            del self._shelf.blocks[key]
        return Cause.OK

"""The contract of a lower tier: where blocks live outside of host memory.

Rules for an implementation (`kvtier.testing.tier_suite` checks them):

1. `submit` and `ask` never block: they queue, or raise `Refused` when the queue is full.
2. Every accepted ask gets exactly one `Held`, every accepted transfer exactly one `Ended`, with one
   cause a key in the order of the keys; a cancelled one as well. Nothing else is ever reported.
3. An `Ended` is made only after the tier itself has seen the last byte move. Until then it may touch
   the rows of the transfer, and nobody else does.
4. A key whose bytes cannot be proven right (identity, length, checksum) is not `OK`, and the row's
   bytes then mean nothing. A miss is a cause, never an exception.
5. After `ask_stop` nothing new is accepted. `close` ends within its deadline and says in its report
   whether something may still touch the rows (`memory` kept).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvtier.core.ids import AskId, Key, TierName, TransferId
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport


class Direction(StrEnum):
    PROMOTE = "promote"
    """lower tier to host: the tier writes the rows"""
    DEMOTE = "demote"
    """host to lower tier: the tier reads the rows"""


class Cause(StrEnum):
    """How a transfer of one key ended. Only `OK` means that the bytes are where they should be."""

    OK = "ok"
    ABSENT = "absent"
    """a plain miss: the tier does not have it (any more)"""
    CHECKSUM = "checksum"
    """right length, wrong bytes"""
    FOREIGN = "foreign"
    """another key, namespace, layout or format version was found in its place"""
    SHORT = "short"
    """fewer bytes than a block"""
    IO_ERROR = "io_error"
    FULL = "full"
    """no space, and nothing that may be evicted"""
    CANCELLED = "cancelled"
    LOST = "lost"
    """the tier died, or was switched off, with the transfer in it"""


class TierTransfer(msgspec.Struct, frozen=True, gc=False):
    """One asynchronous move of blocks of one size class between host and a lower tier."""

    id: TransferId
    direction: Direction
    size_class: int
    keys: list[bytes]
    slots: list[int]


class Held(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answer to an ask: for each key, whether the tier believes that it has it (a candidate only)."""

    ask: AskId
    held: list[bool]


class Ended(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The one end notice of a transfer: a cause for each of its keys, in their order."""

    transfer: TransferId
    causes: list[Cause]


class Evicted(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Blocks that the tier no longer has: evicted for space, or removed after a failed check."""

    keys: list[bytes]


TierNotice = Held | Ended | Evicted


class Tier(ABC):
    """One lower tier, opened. Called by one thread; does its work in its own."""

    name: TierName

    @property
    def ready(self) -> bool:
        """False while the tier is still coming up: it gets no ask and no transfer until then."""
        return True

    @abstractmethod
    def ask(self, ask: AskId, keys: Sequence[Key]) -> None:
        """Ask which of `keys` the tier has; answered by one `Held`. Raises `Refused`."""

    @abstractmethod
    def submit(self, transfer: TierTransfer) -> None:
        """Queue a transfer; answered by one `Ended`. Raises `Refused`: nothing was queued."""

    @abstractmethod
    def cancel(self, transfer: TransferId) -> None:
        """Drop the transfer if it is still queued. It ends in its `Ended` all the same."""

    @abstractmethod
    def poll(self) -> list[TierNotice]:
        """What has happened since the last poll; never blocks."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable while `poll` would return something."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Counters and gauges since the tier was opened, by name with its unit last."""

    @abstractmethod
    def ask_stop(self) -> None:
        """Accept nothing new and begin to stop. Never blocks; may be called again."""

    @abstractmethod
    def close(self, deadline: Deadline) -> CloseReport:
        """Stop, wait until `deadline`, free what is safe to free, and report. Raises nothing."""

    def give_up(self) -> bool:
        """End a tier that failed, without waiting; called again until it says True.

        True: nothing of it can touch the rows any more.
        """
        self.ask_stop()
        return not self.close(Deadline.after(0)).memory_kept

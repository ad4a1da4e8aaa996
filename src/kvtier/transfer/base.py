"""The contract of moving blocks between the device and the region, whatever the device is.

Rules:
1. `submit` never blocks. A store is queued behind all that compute was given before it, a load as well:
   it must not overwrite what an earlier kernel still reads.
2. A transfer ends when its event has completed, never before; until then its blocks and rows are in use.
3. An event that raises says nothing about the copy: it may still run. Its transfer stays listed.
4. Only what is still queued can be cancelled. A started copy runs to its end.
5. Nobody waits without a deadline, and nobody blocks inside the device: events are asked, not joined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum

import msgspec

from kvtier.core.ids import TransferId
from kvtier.errors import TierBroken
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport

SKIP = -1
"""in place of an engine block's id: the device has this page already, the copy leaves it out"""

OK = "ok"
CANCELLED = "cancelled"


class Way(StrEnum):
    STORE = "store"
    """device to host"""
    LOAD = "load"
    """host to device"""


class RankTransfer(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of moving `len(slots)` blocks of one size class.

    `blocks`: engine block ids on the device, `engine_blocks_per_block` of them for each slot, in order; a load
    may have `SKIP` among them.
    """

    id: TransferId
    direction: Way
    size_class: int
    blocks: list[int]
    slots: list[int]


class RankEnd(msgspec.Struct, frozen=True, gc=False):
    """The one end notice of a transfer. `cause` is "ok" or says in words why its bytes mean nothing."""

    id: TransferId
    ok: bool
    cause: str


class StillRunning(TierBroken):
    """A native thread of the device could not be stopped: it may still touch the region."""


class CopyEvent(ABC):
    """The end of one copy."""

    @abstractmethod
    def query(self) -> str | None:
        """None while the copy runs; then "ok", or why it failed (it touches nothing any more).

        Never blocks. Raises what the device raises: the copy may then still run.
        """

    @abstractmethod
    def cancel(self) -> bool:
        """Whether the copy was still queued: then it never runs. Otherwise nothing has changed."""


class CopyQueue(ABC):
    """One direction's queue of copies on a device, with its own stream (or thread) and events."""

    @abstractmethod
    def submit(self, transfer: RankTransfer) -> CopyEvent:
        """Queue the copy. Raises Refused: the queue is full or closing; nothing was queued."""

    @abstractmethod
    def wait(self, deadline: Deadline) -> None:
        """Sleep until some event may have completed, or a little while; never past `deadline`."""

    @abstractmethod
    def ask_stop(self) -> None:
        """Accept nothing new. Never blocks; may be called again."""

    @abstractmethod
    def close(self, deadline: Deadline) -> CloseReport:
        """Release stream, thread and pools, whether or not all events completed. Raises nothing."""


class Device(ABC):
    """Where the engine's blocks are. Makes the queues; each belongs to who asked for it."""

    @abstractmethod
    def open_queue(self, way: Way) -> CopyQueue:
        """A queue for one direction. Raises what the device raises; nothing is left then."""

    @abstractmethod
    def synchronize(self, deadline: Deadline) -> None:
        """Return when no copy touches the region any more. Raises TierBroken at the deadline, or the device's error."""

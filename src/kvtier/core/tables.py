"""The state tables, as data: `docs/states.md` is generated from them, and `check` holds the core to them."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Slot(IntEnum):
    """State of one slot of host memory. `READY` has a count of readers beside it."""

    FREE = 0
    WRITING = 1
    READY = 2
    QUARANTINED = 3
    """its writer is lost but may still write; free once the writer's death is confirmed"""


FREE, WRITING, READY, QUARANTINED = map(int, Slot)
"""the same as plain numbers, for the paths where looking up a member of an enum costs more than the work"""


class Move(StrEnum):
    """State of a transfer. One that has ended is forgotten."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    ABANDONED = "abandoned"


class Phase(StrEnum):
    """State of the whole store."""

    ADMITTING = "admitting"
    DRAINING = "draining"
    CANCELLING = "cancelling"
    CLOSED = "closed"


SLOT_MOVES: tuple[tuple[str, str, str], ...] = (
    ("free", "writing", "a store or a promotion takes it"),
    ("writing", "ready(0)", "its transfer ended ok, in the current epoch"),
    ("writing", "free", "its transfer failed, was cancelled, or ended in an old epoch"),
    ("writing", "quarantined", "the tier that writes it is lost"),
    ("quarantined", "free", "the death of that tier is confirmed, or its end notice came after all"),
    ("ready(n)", "ready(n + 1)", "a lookup, a load or a demotion leases it"),
    ("ready(n)", "ready(n - 1)", "a lease on it is given back"),
    ("ready(0)", "free", "evicted"),
)

TRANSFER_MOVES: tuple[tuple[str, str, str], ...] = (
    ("queued", "running", "handed to a rank or a tier"),
    ("running", "ended(ok)", "every rank, or the tier, saw its last byte move"),
    ("running", "ended(failed)", "a rank or the tier said so, or its death is confirmed"),
    ("running", "cancelling", "its request was preempted, or the store is closing"),
    ("cancelling", "ended", "its end notice came: only then is its lease given back"),
    ("running", "abandoned", "the close deadline passed; its slots are kept until exit"),
    ("cancelling", "abandoned", "the close deadline passed; its slots are kept until exit"),
)

STORE_MOVES: tuple[tuple[str, str, str], ...] = (
    ("admitting", "draining", "a close was asked: lookups miss, stores are declined"),
    ("draining", "cancelling", "half of the close deadline has passed: queued demotions are dropped"),
    ("draining", "closed", "nothing is out any more"),
    ("cancelling", "closed", "nothing is out any more, or the deadline passed"),
)

"""What the core wants done: plain data, performed by the driver.

Every effect that starts something (`StartLoad`, `StartStore`, `Ask`, `StartTier`) ends in exactly one event
(one a rank for loads and stores).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtier.core.ids import AskId, Key, RequestId, TierName, TransferId


class Effect(msgspec.Struct, frozen=True, gc=False):
    pass


class Answered(Effect, frozen=True, gc=False):
    """`tokens` from the start of the prompt could be on the device after a load; None: ask again later."""

    request: RequestId
    tokens: int | None


class Offered(Effect, frozen=True, gc=False):
    """The first `taken` keys of the offer are in host memory or on their way; offer the others again."""

    request: RequestId
    group: int
    taken: int


class StartLoad(Effect, frozen=True, gc=False):
    """Host to device, on every rank: slot i holds block `first + i` of the request."""

    transfer: TransferId
    request: RequestId
    group: int
    first: int
    slots: list[int]


class StartStore(Effect, frozen=True, gc=False):
    """Device to host, on every rank, once the device has computed the blocks: block `blocks[i]` to `slots[i]`."""

    transfer: TransferId
    request: RequestId
    group: int
    blocks: list[int]
    slots: list[int]


class CancelRank(Effect, frozen=True, gc=False):
    """Drop these if queued, let them end if running; before the engine reuses their device blocks."""

    transfers: list[TransferId]


class LoadEnded(Effect, frozen=True, gc=False):
    """All transfers of the request's load ended on all ranks. Not ok: the engine must compute those tokens."""

    request: RequestId
    ok: bool


class StoreEnded(Effect, frozen=True, gc=False):
    """The device blocks of this store are no longer read by anyone."""

    request: RequestId
    transfer: TransferId
    ok: bool


class Ask(Effect, frozen=True, gc=False):
    tier: TierName
    ask: AskId
    keys: list[Key]


class StartTier(Effect, frozen=True, gc=False):
    """A promotion (`promote`) or a demotion (`demote`) of blocks of one size class."""

    tier: TierName
    transfer: TransferId
    direction: str
    size_class: int
    keys: list[Key]
    slots: list[int]


class CancelTier(Effect, frozen=True, gc=False):
    tier: TierName
    transfer: TransferId


class Removed(Effect, frozen=True, gc=False):
    """These keys left host memory."""

    keys: Sequence[Key]

"""What happens to the core: plain data, with the time in it. One event carries a run of keys."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtier.core.ids import AskId, Key, RequestId, TierName, TransferId


class Event(msgspec.Struct, frozen=True, gc=False):
    now: float
    """monotonic seconds"""


# From the engine.


class Lookup(Event, frozen=True, gc=False):
    """How much of this prompt could be loaded? May be asked again and again until `Answered` has tokens."""

    request: RequestId
    keys: tuple[Sequence[Key], ...]
    """for each group, the keys of its blocks from the start of the prompt"""
    device_tokens: int
    """tokens that the device has already, from the start of the prompt"""


class Load(Event, frozen=True, gc=False):
    """The engine has device blocks for what a lookup answered: load tokens [from, to), or nothing if equal."""

    request: RequestId
    from_tokens: int
    to_tokens: int


class Offer(Event, frozen=True, gc=False):
    """Full blocks [first, first + len(keys)) of a group now are, or will be after this step, on the device."""

    request: RequestId
    group: int
    first: int
    keys: Sequence[Key]


class RequestGone(Event, frozen=True, gc=False):
    """Finished or aborted. Its lookup is given back; its transfers end by themselves."""

    request: RequestId


class Preempted(Event, frozen=True, gc=False):
    """Its device blocks are about to be reused: its stores must end, its lookup is given back."""

    request: RequestId


class Reset(Event, frozen=True, gc=False):
    """A new epoch: nothing that was stored before is visible after."""


# From the ranks and the tiers.


class RankEnded(Event, frozen=True, gc=False):
    """One rank's part of a load or a store has ended."""

    transfer: TransferId
    ok: bool


class TierAnswered(Event, frozen=True, gc=False):
    tier: TierName
    ask: AskId
    held: Sequence[bool]


class TierEnded(Event, frozen=True, gc=False):
    """The end notice of a promotion or a demotion: one cause a key, `"ok"` or why not."""

    tier: TierName
    transfer: TransferId
    causes: Sequence[str]


class TierUp(Event, frozen=True, gc=False):
    tier: TierName


class TierLost(Event, frozen=True, gc=False):
    """Switched off: it may still touch the rows it was given, but nobody waits for it."""

    tier: TierName


class TierDead(Event, frozen=True, gc=False):
    """Its death is confirmed: it can touch nothing any more."""

    tier: TierName


class RanksLost(Event, frozen=True, gc=False):
    """A rank closed or died: no load or store will be reported, and none can touch the region."""


# Time and the end.


class Tick(Event, frozen=True, gc=False):
    """Time passed: deadlines of lookups."""


class Close(Event, frozen=True, gc=False):
    """Admit nothing new; what is out and what is queued for a tier may still end."""


class CancelAll(Event, frozen=True, gc=False):
    """Drop what is queued, ask for what is out to end."""


class Abandon(Event, frozen=True, gc=False):
    """The close deadline has passed: what is still out is kept as it is until the process exits."""

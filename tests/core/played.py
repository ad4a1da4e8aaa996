"""A core whose every event is followed by `check()`, and short words for what an engine, ranks and tiers say."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, TypeVar

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.groups import CoreConfig, Group, TierSpec
from kvtier.core.ids import Key, make_key
from kvtier.core.store import StoreCore
from kvtier.core.tables import Slot

TOKENS = 16
"""tokens of a block, where a test does not say otherwise"""

E = TypeVar("E", bound=fx.Effect)


def key(name: object, group: int = 0) -> Key:
    return make_key(sha256(str(name).encode()).digest(), group)


def keys(*names: object) -> list[Key]:
    return [key(name) for name in names]


class Played:
    def __init__(self, slots: int = 16, tiers: Sequence[str] = (), **config: Any) -> None:
        config.setdefault("groups", (Group(TOKENS),))
        config.setdefault("class_slots", (slots,))
        self.core = StoreCore(CoreConfig(tiers=tuple(TierSpec(name) for name in tiers), **config))
        self.now = 0.0
        self.effects: list[fx.Effect] = []
        for name in tiers:
            self.send(ev.TierUp, name)

    def send(self, kind: type[ev.Event], *fields: Any) -> list[fx.Effect]:
        effects = self.core.handle(kind(self.now, *fields))
        self.core.check()
        self.effects += effects
        return effects

    def take(self, kind: type[E]) -> list[E]:
        """Effects of this kind since they were last taken."""
        taken = [effect for effect in self.effects if type(effect) is kind]
        self.effects = [effect for effect in self.effects if type(effect) is not kind]
        return taken

    # The engine.

    def lookup(self, request: str, *groups: Sequence[Key], device: int = 0) -> int | None:
        answer = self.send(ev.Lookup, request, tuple(groups), device)[-1]
        assert isinstance(answer, fx.Answered)
        return answer.tokens

    def offer(self, request: str, offered: Sequence[Key], first: int = 0, group: int = 0) -> int:
        """How many were taken; what was started is in `effects`."""
        answer = self.send(ev.Offer, request, group, first, offered)[-1]
        assert isinstance(answer, fx.Offered)
        return answer.taken

    def stored(self, request: str, offered: Sequence[Key], first: int = 0, group: int = 0) -> int:
        """Offer, and let the stores of it end well."""
        self.take(fx.StartStore)
        taken = self.offer(request, offered, first, group)
        for store in self.take(fx.StartStore):
            self.ended(store.transfer)
        return taken

    def hold(self, *names: object) -> None:
        """Fill host memory with these, the least recently used first, each by a request that is gone."""
        for name in names:
            self.stored(f"holds {name}", keys(name))
            self.send(ev.RequestGone, f"holds {name}")

    def load(self, request: str, to_tokens: int, from_tokens: int = 0) -> list[fx.StartLoad]:
        self.send(ev.Load, request, from_tokens, to_tokens)
        return self.take(fx.StartLoad)

    # The ranks and the tiers.

    def rank_ended(self, transfer: int, *, ok: bool = True) -> None:
        self.send(ev.RankEnded, transfer, ok)

    def ended(self, transfer: int, *, ok: bool = True) -> None:
        """Every rank ended its part."""
        for _ in range(self.core.config.ranks):
            self.rank_ended(transfer, ok=ok)

    def answer_asks(self, *held: object) -> list[list[Key]]:
        """Answer every ask that is out: the tier has just `held`. Returns what was asked for."""
        have = set(keys(*held))
        asks = self.take(fx.Ask)
        for ask in asks:
            self.send(ev.TierAnswered, ask.tier, ask.ask, [asked in have for asked in ask.keys])
        return [ask.keys for ask in asks]

    def moved(self, start: fx.StartTier, *causes: str) -> None:
        """A promotion or a demotion ended; without causes all went well."""
        self.send(ev.TierEnded, start.tier, start.transfer, causes or ["ok"] * len(start.keys))

    def starts(self, direction: str) -> list[fx.StartTier]:
        """Promotions or demotions started since they were last taken."""
        started = [start for start in self.effects if isinstance(start, fx.StartTier) and start.direction == direction]
        self.effects = [effect for effect in self.effects if effect not in started]
        return started

    # What is true now.

    @property
    def held(self) -> set[Key]:
        """Keys that are visible and ready."""
        return {
            known
            for table in self.core.tables
            for known, slot in table.index.items()
            if table.state[slot] == Slot.READY
        }

    def slots_in(self, state: Slot) -> int:
        return sum(int((table.state == state).sum()) for table in self.core.tables)

    @property
    def readers(self) -> int:
        return sum(int(table.readers.sum()) for table in self.core.tables)

    def require_idle(self) -> None:
        """Nothing is leased, nothing is out."""
        assert self.core.leases_out == 0
        assert self.core.transfers_out == 0
        assert self.readers == 0
        assert self.slots_in(Slot.WRITING) == self.slots_in(Slot.QUARANTINED) == 0

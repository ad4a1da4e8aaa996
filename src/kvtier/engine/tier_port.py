"""One lower tier as the driver sees it: up, lost, dead, and tried again after a growing pause.

A tier that raises, ends, or says nothing for too long is lost: nobody waits for it. It is dead once nothing
of it can touch the rows any more; only then are they free, and only then is it started again. One log line
an incident.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.ids import AskId, TierName, TransferId
from kvtier.errors import ConfigError, Refused
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.process import Pause
from kvtier.runtime.report import CloseReport, Memory
from kvtier.tiers.base import Cause, Direction, Ended, Held, Tier, TierTransfer

SILENT_S_MAX = 30.0
"""A tier with something out that reports nothing for this long hangs. The slowest honest batch is 16 blocks
of a few MiB from a spinning disk behind 4 others: seconds."""

OPENING_S_MAX = 30.0
"""A tier that has not come up after this long hangs: a warm start reads an index, not payload."""

log = logging.getLogger("kvtier")


class PortState(Enum):
    OFF = "off"
    OPENING = "opening"
    UP = "up"
    LOST = "lost"
    CLOSED = "closed"


class TierPort:
    """Supervises one tier. `open_tier` starts it; it may raise whatever the tier raises."""

    def __init__(self, name: TierName, open_tier: Callable[[], Tier]) -> None:
        self.name = name
        self.state = PortState.OFF
        self.error: Exception | None = None
        """why it is off"""
        self.retry_at = 0.0
        self.losses_count = 0
        self._open_tier = open_tier
        self._pause = Pause()
        self._tier: Tier | None = None
        self._asks: dict[AskId, int] = {}
        """asks that are out, with their number of keys"""
        self._transfers: dict[TransferId, int] = {}
        self._heard = 0.0

    # Coming up.

    def wants_start(self, now: float) -> bool:
        return self.state is PortState.OFF and now >= self.retry_at

    def start(self, now: float) -> None:
        """Open the tier. May take a while for a tier in a thread: call it without the store's lock."""
        try:
            tier = self._open_tier()
        except Exception as error:  # noqa: BLE001 - whatever a tier raises is the tier's failure, not the engine's
            self._off(error, now)
            return
        self._tier, self.state, self._heard = tier, PortState.OPENING, now

    # The driver.

    def fileno(self) -> int | None:
        """A descriptor to wait on, or None while there is nothing to wait for."""
        return self._tier.fileno() if self._tier is not None and self.state is not PortState.LOST else None

    @property
    def is_open(self) -> bool:
        """Opening, up, or lost and not dead yet."""
        return self._tier is not None

    def counts(self) -> dict[str, int]:
        counts = dict(self._tier.counts()) if self._tier is not None else {}
        return counts | {"up_count": int(self.state is PortState.UP), "losses_count": self.losses_count}

    def ask(self, effect: fx.Ask, now: float) -> list[ev.Event]:
        refused = ev.TierAnswered(now, self.name, effect.ask, [False] * len(effect.keys))
        return self._try(lambda tier: tier.ask(effect.ask, effect.keys), self._asks, effect.ask, refused, now)

    def submit(self, effect: fx.StartTier, now: float) -> list[ev.Event]:
        transfer = TierTransfer(
            effect.transfer, Direction(effect.direction), effect.size_class, list(effect.keys), effect.slots
        )
        refused = ev.TierEnded(now, self.name, effect.transfer, [Cause.CANCELLED] * len(effect.keys))
        return self._try(lambda tier: tier.submit(transfer), self._transfers, effect.transfer, refused, now)

    def cancel(self, transfer: TransferId, now: float) -> list[ev.Event]:
        if self._tier is None or transfer not in self._transfers or self.state is not PortState.UP:
            return []
        try:
            self._tier.cancel(transfer)
        except Refused:
            return []  # it ends by itself
        except Exception as error:  # noqa: BLE001 - whatever a tier raises is the tier's failure
            return self._lose(error, now)
        return []

    def pump(self, now: float) -> list[ev.Event]:
        """What has happened since. Never blocks."""
        if self._tier is None:
            return []
        if self.state is PortState.LOST:
            return self._bury(now)
        try:
            events = self._heard_events(now)
        except Exception as error:  # noqa: BLE001 - whatever a tier raises is the tier's failure
            return self._lose(error, now)
        waiting = bool(self._asks or self._transfers)
        limit = OPENING_S_MAX if self.state is PortState.OPENING else SILENT_S_MAX
        if (waiting or self.state is PortState.OPENING) and now - self._heard > limit:
            return [*events, *self._lose(TimeoutError(f"nothing heard for {limit:g} s"), now)]
        return events

    def ask_stop(self) -> None:
        if self._tier is not None:
            self._tier.ask_stop()

    def close(self, deadline: Deadline, now: float) -> tuple[CloseReport, list[ev.Event]]:
        """End it by `deadline`; also what it still had to say, and its death if it is confirmed."""
        tier = self._tier
        if tier is None:
            self.state = PortState.CLOSED
            return CloseReport(self.name), []
        report = tier.close(deadline)
        report.name = self.name
        events: list[ev.Event] = []
        if self.state is not PortState.LOST:
            try:
                events = self._heard_events(now)
            except Exception:  # noqa: BLE001 - a tier that is closed may refuse to be polled: nothing is lost
                events = []
        if report.memory is Memory.FREED and not report.memory_kept:
            events.append(ev.TierDead(now, self.name))
            self._tier, self.state = None, PortState.CLOSED
        return report, events

    # Inside.

    def _try(
        self,
        act: Callable[[Tier], None],
        out: dict[int, int],
        number: int,
        refused: ev.TierAnswered | ev.TierEnded,
        now: float,
    ) -> list[ev.Event]:
        """Hand something to the tier; what it does not take is answered at once."""
        if self._tier is None or self.state is not PortState.UP:
            return [refused]
        if not (self._asks or self._transfers):
            self._heard = now
        try:
            act(self._tier)
        except Refused:
            return [refused]
        except Exception as error:  # noqa: BLE001 - whatever a tier raises is the tier's failure
            return [refused, *self._lose(error, now)]
        out[number] = 1
        return []

    def _heard_events(self, now: float) -> list[ev.Event]:
        assert self._tier is not None
        events: list[ev.Event] = []
        for notice in self._tier.poll():
            self._heard = now
            if isinstance(notice, Held):
                self._asks.pop(notice.ask, None)
                events.append(ev.TierAnswered(now, self.name, notice.ask, notice.held))
            elif isinstance(notice, Ended):
                self._transfers.pop(notice.transfer, None)
                events.append(ev.TierEnded(now, self.name, notice.transfer, notice.causes))
        if self.state is PortState.OPENING and self._tier.ready:
            self.state, self._heard = PortState.UP, now
            self._pause.up(now)
            if self.error is not None:
                log.info("tier %s is up again", self.name)
            self.error = None
            events.append(ev.TierUp(now, self.name))
        return events

    def _lose(self, error: Exception, now: float) -> list[ev.Event]:
        was_up = self.state is PortState.UP
        self.state, self.error = PortState.LOST, error
        self.losses_count += 1
        self._asks.clear()
        self._transfers.clear()
        log.warning("tier %s is switched off: %s", self.name, error)
        return [*([ev.TierLost(now, self.name)] if was_up else []), *self._bury(now)]

    def _bury(self, now: float) -> list[ev.Event]:
        """Confirm the death of a lost tier, if it has come."""
        assert self._tier is not None
        if not self._tier.give_up():
            return []
        self._tier = None
        self._off(self.error, now)
        return [ev.TierDead(now, self.name)]

    def _off(self, error: Exception | None, now: float) -> None:
        pause_s = self._pause.next(now)
        if self.error is None or str(self.error) != str(error):
            log.warning("tier %s is off: %s; tried again in %.1f s, then less often", self.name, error, pause_s)
        self.state, self.error, self.retry_at = PortState.OFF, error, now + pause_s

    @property
    def config_error(self) -> ConfigError | None:
        """What a human must change before this tier can come up."""
        return self.error if isinstance(self.error, ConfigError) else None

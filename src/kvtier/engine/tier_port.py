"""One lower tier as the driver sees it: up, lost, dead, and tried again after a growing pause.

A tier that raises, ends, or says nothing for too long is lost: nobody waits for it. It is dead once nothing
of it can touch the rows any more; only then are they free, and only then is it started again. One log line
an incident. Whatever a tier raises, in any call, is the tier's failure, never the engine's.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from enum import Enum

from kvtier.core import effects as fx
from kvtier.core import events as ev
from kvtier.core.ids import AskId, TierName, TransferId
from kvtier.errors import ConfigError, KVTierError, Refused
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.process import Pause
from kvtier.runtime.report import CloseReport, Memory, Outcome
from kvtier.tiers.base import Cause, Direction, Ended, Held, Tier, TierTransfer

SILENT_S_MAX = 30.0
"""A tier with something out that reports nothing for this long hangs. The slowest honest batch is 16 blocks
of a few MiB from a spinning disk behind 4 others: seconds."""

OPENING_S_MAX = 30.0
"""A tier that has not come up after this long hangs: a warm start reads an index, not payload."""

log = logging.getLogger("kvtier")


class PortState(Enum):
    OFF = "off"
    STARTING = "starting"
    """inside of `open`"""
    OPENING = "opening"
    """there, not ready"""
    UP = "up"
    LOST = "lost"
    CLOSING = "closing"
    CLOSED = "closed"


class TierPort:
    """Supervises one tier. `open_tier` starts it, and may raise whatever the tier raises; `let_go` is called once
    nothing of it is left."""

    def __init__(
        self,
        name: TierName,
        open_tier: Callable[[], Tier],
        *,
        let_go: Callable[[], None] | None = None,
        silent_s_max: float = SILENT_S_MAX,
        opening_s_max: float = OPENING_S_MAX,
    ) -> None:
        self.name = name
        self.silent_s_max = silent_s_max
        self.opening_s_max = opening_s_max
        self.state = PortState.OFF
        self.error: Exception | None = None
        """why it is off"""
        self.retry_at = 0.0
        self.losses_count = 0
        self._open_tier = open_tier
        self._let_go = let_go
        self._pause = Pause()
        self._tier: Tier | None = None
        self._asks: set[AskId] = set()
        self._transfers: set[TransferId] = set()
        self._heard = 0.0
        self._ask_error: Exception | None = None

    # Coming up.

    def wants_start(self, now: float) -> bool:
        return self.state is PortState.OFF and now >= self.retry_at

    def start(self, now: float) -> None:
        """`begin`, `open` and `attach` at once."""
        self.begin()
        self.attach(self.open(), now)

    def begin(self) -> None:
        """From now on until `attach` it is being opened."""
        self.state = PortState.STARTING

    def open(self) -> Tier | Exception:
        """Open the tier, or say why not. May take a while for a tier in a thread: call it without a lock."""
        try:
            return self._open_tier()
        except Exception as error:  # noqa: BLE001 - whatever a tier raises is the tier's failure
            return error

    def attach(self, opened: Tier | Exception, now: float) -> None:
        """Take over what `open` gave; a port that is being closed takes it over for its close."""
        if isinstance(opened, Exception):
            self._gone(PortState.OFF)
            self._off(_without_frames(opened), now)
        else:
            self._tier, self.state, self._heard = opened, PortState.OPENING, now

    # The driver.

    def fileno(self) -> int | None:
        """A descriptor to wait on, or None while there is nothing to wait for."""
        if self._tier is None or self.state not in (PortState.OPENING, PortState.UP):
            return None
        try:
            return self._tier.fileno()
        except Exception:  # noqa: BLE001 - nothing to wait on; its poll says what is wrong with it
            return None

    @property
    def is_open(self) -> bool:
        """Something of it is there: it is being opened, up, closing, or lost and not dead yet."""
        return self._tier is not None or self.state is PortState.STARTING

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        if self._tier is not None and self.state is PortState.UP:
            try:
                counts = dict(self._tier.counts())
            except Exception:  # a tier that cannot count may still do its work
                log.debug("tier %s: its counters cannot be read", self.name, exc_info=True)
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
        if self.state is PortState.LOST:
            return self._bury(now)
        if self.state not in (PortState.OPENING, PortState.UP):
            return []
        events: list[ev.Event] = []
        try:
            self._hear(now, events)
        except Exception as error:  # noqa: BLE001 - whatever a tier raises is the tier's failure
            return [*events, *self._lose(error, now)]
        waiting = bool(self._asks or self._transfers)
        limit = self.opening_s_max if self.state is PortState.OPENING else self.silent_s_max
        if (waiting or self.state is PortState.OPENING) and now - self._heard > limit:
            return [*events, *self._lose(TimeoutError(f"nothing heard for {limit:g} s"), now)]
        return events

    def ask_stop(self) -> None:
        """Begin to stop; from now on only `close` deals with the tier."""
        if self.state is not PortState.STARTING:
            self.state = PortState.CLOSING
        if self._tier is None:
            return
        try:
            self._tier.ask_stop()
        except Exception as error:  # noqa: BLE001 - its siblings are asked all the same; told by `close`
            self._ask_error = _without_frames(error)

    def close(self, deadline: Deadline, now: float) -> tuple[CloseReport, list[ev.Event]]:
        """End it by `deadline`; also what it still had to say, and its death if it is confirmed.

        A tier that is not there is closed. Called again: tries what is left.
        """
        began = time.monotonic()
        if self.state is PortState.STARTING:
            report = CloseReport(self.name, Outcome.RUNNING, Memory.KEPT, cause="it is still being opened")
            return report, []
        if self._tier is None:
            self.state = PortState.CLOSED
            return CloseReport(self.name), []
        self.state = PortState.CLOSING
        try:
            report = self._tier.close(deadline)
        except Exception as error:  # one tier's failure never costs a sibling its close
            log.exception("tier %s failed to close (%s)", self.name, type(error).__name__)
            report = CloseReport(self.name, Outcome.FAILED, Memory.KEPT, cause=f"its close raised {error!r}")
            report.error, report.seconds = _without_frames(error), time.monotonic() - began
            return report, []
        report.name = self.name
        if self._ask_error is not None:
            report.error, self._ask_error = report.error or self._ask_error, None
            report.cause = report.cause or f"its ask_stop raised {report.error!r}"
            report.ended = Outcome.FAILED if report.ended is Outcome.CLEAN else report.ended
        events: list[ev.Event] = []
        try:
            self._hear(now, events)
        except Exception:  # a tier that is closed may refuse to be polled: nothing is lost
            log.debug("tier %s: nothing to hear after its close", self.name, exc_info=True)
        if not report.memory_kept:
            events.append(ev.TierDead(now, self.name))
            self._gone(PortState.CLOSED)
        return report, events

    # Inside.

    def _try(
        self,
        act: Callable[[Tier], None],
        out: set[int],
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
            return self._lose(error, now)  # it may have begun: the rows are its own until its death
        out.add(number)
        return []

    def _hear(self, now: float, events: list[ev.Event]) -> None:
        """Add what the tier has to say to `events`."""
        assert self._tier is not None
        for notice in self._tier.poll():
            self._heard = now
            if isinstance(notice, Held):
                self._asks.discard(notice.ask)
                events.append(ev.TierAnswered(now, self.name, notice.ask, notice.held))
            elif isinstance(notice, Ended):
                self._transfers.discard(notice.transfer)
                events.append(ev.TierEnded(now, self.name, notice.transfer, notice.causes))
        if self.state is PortState.OPENING and self._tier.ready:
            self.state, self._heard = PortState.UP, now
            self._pause.up(now)
            if self.error is not None:
                log.info("tier %s is up again", self.name)
            self.error = None
            events.append(ev.TierUp(now, self.name))

    def _lose(self, error: Exception, now: float) -> list[ev.Event]:
        was_up = self.state is PortState.UP
        told = self.error is not None and str(self.error) == str(error)
        log.debug("tier %s raised", self.name, exc_info=error)
        if not told:
            log.warning("tier %s is switched off: %s", self.name, _words(error))
        self.state, self.error = PortState.LOST, _without_frames(error)
        self.losses_count += 1
        self._asks.clear()
        self._transfers.clear()
        return [*([ev.TierLost(now, self.name)] if was_up else []), *self._bury(now)]

    def _bury(self, now: float) -> list[ev.Event]:
        """Confirm the death of a lost tier, if it has come."""
        assert self._tier is not None
        try:
            if not self._tier.give_up():
                return []
        except Exception:  # nobody knows what still runs: its rows stay out of use, and it is tried again
            log.debug("tier %s: it cannot be ended", self.name, exc_info=True)
            return []
        self._gone(PortState.OFF)
        self._off(self.error, now)
        return [ev.TierDead(now, self.name)]

    def _gone(self, state: PortState) -> None:
        self._tier, self.state = None, state
        if self._let_go is not None:
            self._let_go()

    def _off(self, error: Exception | None, now: float) -> None:
        pause_s = self._pause.next(now)
        if self.error is None or str(self.error) != str(error):
            words = _words(error)
            log.warning("tier %s is off: %s; tried again in %.1f s, then less often", self.name, words, pause_s)
        self.error = error
        self.state, self.retry_at = PortState.OFF, now + pause_s

    @property
    def config_error(self) -> ConfigError | None:
        """What a human must change before this tier can come up."""
        return self.error if isinstance(self.error, ConfigError) else None


def _words(error: Exception | None) -> str:
    """An error that is not written for humans is told with its type."""
    return str(error) if isinstance(error, (KVTierError, OSError)) and str(error) else repr(error)


def _without_frames(error: Exception) -> Exception:
    """Let go of what the frames of its tracebacks look at: rows of the region above all."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    return error

"""The main of a tier process: one tier between a channel and the rows of the region.

    python -m kvtier.engine.tier_host BIRTH

It ends at end of file on its channel, or when its parent dies. What the tier raises is its end: the parent
sees the death, and starts another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections import deque

from kvtier.engine.messages import (
    AskFor,
    Cancel,
    Counted,
    FromTier,
    Opened,
    OpenFailed,
    Setup,
    Submit,
    decode_to_tier,
    encode,
)
from kvtier.errors import ConfigError, Refused, TierBroken
from kvtier.memory.layout import Rows
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.process import Channel, born
from kvtier.tiers.base import Cause, Ended, Evicted, Held, Tier
from kvtier.tiers.registry import open_tier

SETUP_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 30.0
"""The parent's own deadline is shorter and ends with SIGKILL; this one is for a parent that was stopped."""
FLUSH_TIMEOUT_S = 1.0
"""For the last notices, when the parent does not read them at once."""
COUNTS_EVERY_S = 1.0
EVICTED_KEYS_MAX = 2048
"""Keys of one notice: below the message limit of the channel."""

log = logging.getLogger("kvtier")


class _Outgoing:
    """Messages for the parent; those that the socket has no room for wait here."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: deque[bytes] = deque()

    def say(self, message: FromTier) -> None:
        self._waiting.append(encode(message))

    def flush(self) -> bool:
        """True if nothing is left."""
        while self._waiting:
            try:
                self._channel.send(self._waiting[0])
            except Refused:
                return False
            self._waiting.popleft()
        return True


def main() -> int:
    birth = born()
    logging.basicConfig(stream=sys.stderr, format="kvtier tier process %(process)d: %(levelname)s %(message)s")
    channel, outgoing = birth.channel, _Outgoing(birth.channel)
    setup = _first_message(channel)
    if setup is None:
        return 0
    region = Region.attach(birth.fds["region"], setup.region_bytes)
    rows = Rows(region.array, setup.layout)
    try:
        tier = open_tier(setup.config, rows, setup.namespace)
    except (ConfigError, TierBroken, OSError) as error:
        outgoing.say(OpenFailed(isinstance(error, ConfigError), str(error)))
        outgoing.flush()
        _wait(channel, Deadline.after(SETUP_TIMEOUT_S))  # until the parent has read it and hangs up
        return 0
    outgoing.say(Opened())
    with contextlib.suppress(TierBroken):  # only the channel raises it here: the parent is gone
        _serve(channel, outgoing, tier)
    return _close(channel, outgoing, tier)


def _first_message(channel: Channel) -> Setup | None:
    deadline = Deadline.after(SETUP_TIMEOUT_S)
    while not deadline.expired and not channel.closed_by_peer:
        _wait(channel, deadline)
        for data in channel.receive():
            message = decode_to_tier(data)
            if not isinstance(message, Setup):
                raise TierBroken(f"the first message is a {type(message).__name__}, not a Setup")
            return message
    return None


def _serve(channel: Channel, outgoing: _Outgoing, tier: Tier) -> None:
    """Until end of file."""
    counted = Deadline.after(0)
    said: dict[str, int] = {}
    poll = select.poll()  # one for all rounds: a round is a good part of what a batch costs
    poll.register(channel.fileno(), select.POLLIN)
    poll.register(tier.fileno(), select.POLLIN)
    while not channel.closed_by_peer:
        poll.poll(COUNTS_EVERY_S * 1000)
        for data in channel.receive():
            _handle(decode_to_tier(data), outgoing, tier)
        _tell(outgoing, tier)
        if counted.expired:
            counts = tier.counts()
            if counts != said:
                outgoing.say(Counted(counts))
                said = counts
            counted = Deadline.after(COUNTS_EVERY_S)
        flushed = outgoing.flush()
        poll.modify(channel.fileno(), select.POLLIN | (0 if flushed else select.POLLOUT))


def _handle(message: Setup | AskFor | Submit | Cancel, outgoing: _Outgoing, tier: Tier) -> None:
    match message:
        case AskFor(ask, keys):
            try:
                tier.ask(ask, keys)  # type: ignore[arg-type]  # keys are bytes on the wire
            except Refused:
                outgoing.say(Held(ask, [False] * len(keys)))
        case Submit(transfer):
            try:
                tier.submit(transfer)
            except Refused:
                outgoing.say(Ended(transfer.id, [Cause.CANCELLED] * len(transfer.keys)))
        case Cancel(transfer_id):
            tier.cancel(transfer_id)
        case Setup():
            raise TierBroken("a second Setup")


def _tell(outgoing: _Outgoing, tier: Tier) -> None:
    for notice in tier.poll():
        if isinstance(notice, Evicted):
            for at in range(0, len(notice.keys), EVICTED_KEYS_MAX):
                outgoing.say(Evicted(notice.keys[at : at + EVICTED_KEYS_MAX]))
        else:
            outgoing.say(notice)


def _close(channel: Channel, outgoing: _Outgoing, tier: Tier) -> int:
    report = tier.close(Deadline.after(CLOSE_TIMEOUT_S))
    try:
        _tell(outgoing, tier)
        outgoing.say(Counted(tier.counts()))
        deadline = Deadline.after(FLUSH_TIMEOUT_S)
        while not outgoing.flush() and not deadline.expired:
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLOUT)
            poll.poll(deadline.left * 1000)
    except (TierBroken, OSError, ValueError):
        pass  # the parent is gone, or a closed tier has nothing to tell
    if not report.clean:
        log.warning("closed, but not clean:\n%s", report)
    return 0 if report.clean else 1


def _wait(channel: Channel, deadline: Deadline) -> None:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.poll(deadline.left * 1000)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not the interpreter's own end: it takes tens of milliseconds of a close, would wait for a native thread that is
    # stuck in I/O, and runs the exit handlers of native clients that are closed already.
    os._exit(code)

"""A tier in memory that fails as it is told to, in a thread or in a process of its own.

Its type is "kvtier.testing.fault_tiers:TIER_TYPE". Every call of the contract is a `Point`; a fault is a `Deed` at a
point. With `switch`, the faults are on while that file exists, which a test can change from outside of the process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from kvtier.core.ids import AskId, Key, TierName, TransferId
from kvtier.errors import ConfigError, TierBroken
from kvtier.memory.layout import Rows
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.testing.fake_tier import Answer, FakeConfig, FakeTier
from kvtier.tiers.base import TierNotice, TierTransfer
from kvtier.tiers.registry import TierType

HANG_S = 3600.0


class Point(StrEnum):
    OPEN = "open"
    READY = "ready"
    ASK = "ask"
    SUBMIT = "submit"
    RUN = "run"
    """in `poll`, while a transfer runs"""
    POLL = "poll"
    CANCEL = "cancel"
    COUNTS = "counts"
    FILENO = "fileno"
    ASK_STOP = "ask_stop"
    CLOSE = "close"


class Deed(StrEnum):
    RAISE = "raise"
    CONFIG_ERROR = "config_error"
    BROKEN = "broken"
    EXIT = "exit"
    SEGV = "segv"
    HANG = "hang"
    """sleeps: a thread that calls it sleeps along"""
    STOP = "stop"
    """stops the process, as with SIGSTOP"""
    INTERRUPT = "interrupt"
    NOT_READY = "not_ready"
    """at `ready`: it never comes up"""
    SILENT = "silent"
    """at `run`: the transfer never ends and nothing is said"""


class FaultConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    faults: dict[Point, Deed] = {}
    switch: str = ""
    """a file: the faults are on while it exists; always on where it is not given"""
    say: str = "as it was told to"


class FaultTier(FakeTier):
    def __init__(self, config: FaultConfig, rows: Rows, namespace: bytes, name: TierName) -> None:
        super().__init__(rows, namespace, name=name, config=FakeConfig())
        self._faults = config
        self._in_close = False

    @property
    def ready(self) -> bool:
        return fault(self._faults, Point.READY) is not Deed.NOT_READY

    def ask(self, ask: AskId, keys: Sequence[Key]) -> None:
        fault(self._faults, Point.ASK)
        super().ask(ask, keys)

    def submit(self, transfer: TierTransfer) -> None:
        silent = _told(self._faults, Point.RUN) is Deed.SILENT
        if silent:
            for key in transfer.keys:
                self.tell(key, Answer.NEVER)
        super().submit(transfer)
        if silent:
            for key in transfer.keys:
                del self.script[key.hex()]
        fault(self._faults, Point.SUBMIT)

    def cancel(self, transfer: TransferId) -> None:
        fault(self._faults, Point.CANCEL)
        super().cancel(transfer)

    def poll(self) -> list[TierNotice]:
        fault(self._faults, Point.POLL)
        if self.running:
            fault(self._faults, Point.RUN)
        return super().poll()

    def fileno(self) -> int:
        fault(self._faults, Point.FILENO)
        return super().fileno()

    def counts(self) -> dict[str, int]:
        fault(self._faults, Point.COUNTS)
        return super().counts()

    def ask_stop(self) -> None:
        if not self._in_close:  # only as a call from outside
            fault(self._faults, Point.ASK_STOP)
        super().ask_stop()

    def close(self, deadline: Deadline) -> CloseReport:
        fault(self._faults, Point.CLOSE)
        self._in_close = True
        return super().close(deadline)


def _told(config: FaultConfig, point: Point) -> Deed | None:
    on = not config.switch or Path(config.switch).exists()
    return config.faults.get(point) if on else None


def fault(config: FaultConfig, point: Point) -> Deed | None:
    """Do what is to be done at this point; returns what only the caller can do."""
    deed = _told(config, point)
    words = f"{point}: {config.say}"
    match deed:
        case Deed.RAISE:
            raise RuntimeError(words)
        case Deed.CONFIG_ERROR:
            raise ConfigError(words)
        case Deed.BROKEN:
            raise TierBroken(words)
        case Deed.INTERRUPT:
            raise KeyboardInterrupt(words)
        case Deed.EXIT:
            os._exit(7)
        case Deed.SEGV:
            os.kill(os.getpid(), signal.SIGSEGV)
        case Deed.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Deed.HANG:
            time.sleep(HANG_S)
    return deed


def open_fault(config: FaultConfig, rows: Rows, namespace: bytes, name: TierName) -> FaultTier:
    fault(config, Point.OPEN)
    return FaultTier(config, rows, namespace, name)


TIER_TYPE = TierType(FaultConfig, open_fault)

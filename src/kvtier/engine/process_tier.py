"""A tier in a process of its own, on the same contract as the tier itself.

It can crash, hang or be killed without taking the engine along. Its rows are free of it once its death is
confirmed, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.config import TierConfig
from kvtier.core.ids import AskId, Key, TransferId
from kvtier.engine.messages import (
    AskFor,
    Cancel,
    Counted,
    Opened,
    OpenFailed,
    Setup,
    Submit,
    ToTier,
    decode_from_tier,
    encode,
)
from kvtier.errors import ConfigError, TierBroken
from kvtier.memory.layout import Layout
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.process import Process
from kvtier.runtime.report import CloseReport
from kvtier.tiers.base import Tier, TierNotice, TierTransfer


class ProcessTier(Tier):
    def __init__(self, name: str, process: Process) -> None:
        """Use `start`."""
        self.name = name
        self._process = process
        self._ready = False
        self._refused = False
        self._counts: dict[str, int] = {}

    @classmethod
    def start(cls, config: TierConfig, region: Region, layout: Layout, namespace: bytes) -> ProcessTier:
        """Start the process and tell it what to open; `ready` once it has. Never waits.

        Call it from a thread that lives as long as the engine. Raises TierBroken.
        """
        process = Process.start(f"tier {config.name}", "kvtier.engine.tier_host", fds={"region": region.fd})
        tier = cls(config.name, process)
        try:
            tier._send(Setup(config, layout, region.size_bytes, namespace))
        except BaseException:  # nobody else knows of the child yet
            process.kill()
            process.close(Deadline.after(1.0))
            raise
        return tier

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ready(self) -> bool:
        return self._ready

    def ask(self, ask: AskId, keys: Sequence[Key]) -> None:
        self._send(AskFor(ask, list(keys)))

    def submit(self, transfer: TierTransfer) -> None:
        self._send(Submit(transfer))

    def cancel(self, transfer: TransferId) -> None:
        self._send(Cancel(transfer))

    def poll(self) -> list[TierNotice]:
        """Raises ConfigError or TierBroken if it could not be opened, TierBroken once the process is gone."""
        notices: list[TierNotice] = []
        for data in self._process.channel.receive():
            match decode_from_tier(data):
                case Opened():
                    self._ready = True
                case OpenFailed(yours, text):
                    self._refused = True
                    raise (ConfigError if yours else TierBroken)(text)
                case Counted(counts):
                    self._counts = counts
                case notice:
                    notices.append(notice)
        if not notices and self._process.channel.closed_by_peer:
            code = self._process.exit_code
            raise TierBroken(f"its process has ended ({'it hung up' if code is None else f'exit code {code}'})")
        return notices

    def fileno(self) -> int:
        return self._process.channel.fileno()

    def counts(self) -> dict[str, int]:
        return self._counts

    def ask_stop(self) -> None:
        self._process.ask_stop()

    def close(self, deadline: Deadline) -> CloseReport:
        return self._process.close(deadline)

    def give_up(self) -> bool:
        if self._refused:
            self._process.ask_stop()  # it has opened nothing, and waits for just that
        else:
            self._process.kill()
        if self._process.alive:
            return False
        self._process.close(Deadline.after(0))
        return True

    def _send(self, message: ToTier) -> None:
        self._process.channel.send(encode(message))

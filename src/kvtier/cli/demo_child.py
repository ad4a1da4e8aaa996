"""The process that serves one workload, seen from `kvtier demo`: every wait has a deadline, and it always ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from kvtier.errors import TierBroken
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.process import Process
from kvtier.vllm.workload import GO, Finished, Job, Message, Served, Started, decode

MODULE = "kvtier.vllm.run_workload"

START_S = 600.0
"""until the engine is up; 30 s are usual on two cores"""
REQUEST_S = 180.0
FINISH_S = 90.0
"""from the last answer: what is still being written, and the close of the engine"""
STOP_S = 10.0
"""for a run that has said its last word"""
STOP_EARLY_S = 4.0
"""for one that is to end before; it leaves nothing that its folder does not hold"""

_LOG_LINES = 12

_M = TypeVar("_M", Started, Served, Finished)


class WorkloadProcess:
    """Started at construction; the processes of vLLM below it are in its process group."""

    def __init__(self, job: Job) -> None:
        self._log = Path(job.log)
        path = self._log.with_suffix(".job")
        path.write_bytes(msgspec.msgpack.encode(job))
        self._messages: deque[Message] = deque()
        self._process = Process.start(path.stem, MODULE, args=[str(path)])

    def go(self) -> None:
        """Start the engine; until then the process only imports it."""
        self._process.channel.send(GO)

    def wait_until_up(self) -> None:
        self._next(Started, Deadline.after(START_S))

    def next_served(self) -> Served:
        return self._next(Served, Deadline.after(REQUEST_S))

    def wait_until_finished(self) -> Finished:
        return self._next(Finished, Deadline.after(FINISH_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(in_order=error is None)

    def close(self, *, in_order: bool = True) -> None:
        """Idempotent. What has not said its last word is ended within `STOP_EARLY_S`."""
        # A second Ctrl-C would leave processes behind; what follows is bounded.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.ask_stop()
            if not in_order:
                self._signal_group(signal.SIGTERM)
            if not self._process.wait(Deadline.after(STOP_S if in_order else STOP_EARLY_S)):
                self._signal_group(signal.SIGKILL)
            self._process.close(Deadline.after(STOP_S))
        finally:
            signal.signal(signal.SIGINT, before)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process.alive:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _next(self, kind: type[_M], deadline: Deadline) -> _M:
        """Raises TierBroken, with the end of the log, when the process ended or says nothing."""
        channel = self._process.channel
        while not self._messages:
            alive = self._process.alive
            self._messages.extend(decode(data) for data in channel.receive())
            if self._messages:
                break
            if not alive or channel.closed_by_peer:
                raise TierBroken(f"{self._words()} ended{self._log_end()}")
            if deadline.expired:
                raise TierBroken(f"{self._words()} says nothing{self._log_end()}")
            poller = select.poll()
            poller.register(channel.fileno(), select.POLLIN)
            poller.register(self._process.pidfd, select.POLLIN)
            poller.poll(deadline.left * 1000)
        message = self._messages.popleft()
        if not isinstance(message, kind):
            raise TierBroken(f"{self._words()} said {type(message).__name__}, not {kind.__name__}{self._log_end()}")
        return message

    def _words(self) -> str:
        return f"the process of run {self._process.name}"

    def _log_end(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "; the end of its log:\n" + "\n".join(lines[-_LOG_LINES:]) if lines else " and left no log"

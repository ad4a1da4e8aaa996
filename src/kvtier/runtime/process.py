"""Child processes: the only module that starts one, and both ends of what is said to it.

`Process` is the parent's side, `born` the child's first call, `Channel` either end of the socket between them.

1. A child is started afresh (never forked), from a thread that lives as long as its owner: the child's
   parent-death signal fires when the *thread* that started it ends.
2. A child ends at end of file on its channel, or with SIGKILL: from `close`, or from the kernel when the
   parent is gone.
3. Memory that a child maps is free only once its death is confirmed: waitpid has returned, which it does
   after the last thread of the child is gone.
4. Nothing here blocks but `wait` and `close`, which have a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import site
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from kvtier.core.ids import KEY_BYTES
from kvtier.errors import Closed, ConfigError, CoreBug, Refused, TierBroken
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory, Outcome

MESSAGE_BLOCKS_MAX = 4096
"""Blocks that one message may speak of; a longer run is cut by its sender."""

# key with its length (2) + slot as a 64-bit number with its type byte; + ids, names, and room for counters
MESSAGE_BYTES_MAX = MESSAGE_BLOCKS_MAX * (KEY_BYTES + 2 + 9) + 16 * 1024

SEND_BUFFER_BYTES = 4 * MESSAGE_BYTES_MAX
"""Asked of the kernel for each direction; it grants at most net.core.wmem_max, doubled."""

# What the kernel takes of the send buffer for itself (it refuses messages above SO_SNDBUF - 32).
_KERNEL_BYTES = 32
_MSG_TRUNC = int(socket.MSG_TRUNC)  # as an enum it costs more than the call
# One `receive` returns at most this much, so that a pump stays short; what is left keeps the descriptor readable.
RECEIVE_MESSAGES_MAX = 64
# A close keeps at most this many unread messages of a child; more is a child that does not end but talk.
_UNREAD_MESSAGES_MAX = 1024

VOLUNTARY_FRACTION = 0.6
"""The part of the time from its ask to the deadline that a child has to end by itself, before it is killed."""

# SIGKILL is confirmed within milliseconds; a close whose deadline has passed still waits this long for it.
_DEATH_GRACE_S = 0.1

_PR_SET_PDEATHSIG = 1


class Channel:
    """One end of a SOCK_SEQPACKET pair: whole messages, in order, of at most `MESSAGE_BYTES_MAX` bytes.

    Any thread may send; one thread receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes over `sock`."""
        self._sock = sock
        self._buffer = bytearray(MESSAGE_BYTES_MAX)
        self._unread: deque[bytes] = deque()
        self.closed_by_peer = False
        """The other end is gone, or will send nothing more."""
        sock.settimeout(0)
        os.set_inheritable(sock.fileno(), False)  # noqa: FBT003 - takes no keyword

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends. Raises `ConfigError` if the kernel grants too small a buffer."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo:
            undo.callback(one.close)
            undo.callback(other.close)
            for sock in (one, other):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            granted = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            if granted < MESSAGE_BYTES_MAX + _KERNEL_BYTES:
                raise ConfigError(
                    f"the kernel grants {granted} bytes of socket buffer, {MESSAGE_BYTES_MAX + _KERNEL_BYTES} are"
                    f" needed; raise it: sysctl -w net.core.wmem_max={MESSAGE_BYTES_MAX}"
                )
            undo.pop_all()
        return cls(one), cls(other)

    @classmethod
    def inherited(cls, fd: int) -> Channel:
        """The end that a parent handed over as descriptor `fd`."""
        return cls(socket.socket(fileno=fd))

    def send(self, data: bytes) -> None:
        """Queue one message for the other end. Never blocks.

        Raises `Refused` when the socket is full, `TierBroken` when the other end is gone, `Closed` after
        `close` or `end`, and `CoreBug` for a message that is empty or above `MESSAGE_BYTES_MAX`.
        """
        if not 0 < len(data) <= MESSAGE_BYTES_MAX:
            raise CoreBug(f"a message of {len(data)} bytes; it must have 1 to {MESSAGE_BYTES_MAX}: cut the run")
        if self._sock.fileno() < 0:
            raise Closed("send on a closed channel")
        try:
            self._sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise Refused("the channel is full: the other end does not read; try again later") from None
        except OSError as error:
            if error.errno in (errno.ENOBUFS, errno.ENOMEM):
                raise Refused("the kernel has no memory for a message now; try again later") from None
            raise TierBroken(f"the other end of the channel is gone: {error.strerror}") from None

    def receive(self) -> list[bytes]:
        """Messages that have arrived, in order, at most `RECEIVE_MESSAGES_MAX`; never blocks.

        Works after `close`, for what was taken in before. A message above the limit ends the channel.
        """
        self.take_in(RECEIVE_MESSAGES_MAX)
        return [self._unread.popleft() for _ in range(min(len(self._unread), RECEIVE_MESSAGES_MAX))]

    def fileno(self) -> int:
        """A descriptor that is readable while `receive` would return something, or once the other end is gone."""
        fd = self._sock.fileno()
        if fd < 0:
            raise Closed("the channel is closed")
        return fd

    def end(self) -> None:
        """End of file for the other end: nothing more is sent. Receiving goes on."""
        # ENOTCONN: the other end is gone already
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()
        self._buffer = bytearray()

    def take_in(self, unread_max: int) -> bool:
        """Move what has arrived from the socket to this end, up to `unread_max` messages; False if no more can come
        or be taken."""
        while not self.closed_by_peer and self._sock.fileno() >= 0 and len(self._unread) < unread_max:
            try:
                size, _, flags, _ = self._sock.recvmsg_into([self._buffer])
            except BlockingIOError:
                return True
            except ConnectionResetError:
                # The other end went without having read all of ours. Reported once, ahead of what it had sent.
                continue
            # An empty message is the end of file; a cut one is from an end that breaks the rules.
            if size == 0 or flags & _MSG_TRUNC:
                self.closed_by_peer = True
            else:
                self._unread.append(bytes(memoryview(self._buffer)[:size]))
        return False


class Process:
    """A child that runs `python -m module`, from its start to its confirmed death."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], pidfd: int, channel: Channel) -> None:
        """Use `start`."""
        self.name = name
        self.channel = channel
        self._popen = popen
        self._pidfd = pidfd
        self._owner_pid = os.getpid()
        self._killed = False
        self._asked_at: float | None = None
        self._report: CloseReport | None = None

    @classmethod
    def start(cls, name: str, module: str, *, args: Sequence[str] = (), fds: Mapping[str, int] | None = None) -> Self:
        """Start `module` with `args`; its first call is `born()`, which hands it a copy of the descriptors `fds`.

        Returns at once, before the child has come up. Raises `TierBroken` when the system cannot start it.
        """
        if not sys.executable:
            raise ConfigError("sys.executable is empty: an embedded interpreter cannot start tier processes")
        fds = dict(fds or {})
        ours, theirs = Channel.pair()
        handed = {"channel": theirs.fileno(), **fds}
        birth = ",".join(f"{key}={number}" for key, number in {"parent": os.getpid(), **handed}.items())
        try:
            # A group of its own: Ctrl-C in a terminal is for the parent, which then ends the child.
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", module, birth, *args],
                stdin=subprocess.DEVNULL,
                stdout=_stderr(),
                pass_fds=tuple(handed.values()),
                env=_environment(),
                process_group=0,
            )
        except OSError as error:
            ours.close()
            raise TierBroken(f"{name}: cannot start a process: {error}") from error
        finally:
            theirs.close()
        try:
            pidfd = os.pidfd_open(popen.pid)
        except OSError as error:
            popen.kill()
            popen.wait()
            ours.close()
            raise TierBroken(f"{name}: no descriptor for its process: {error}") from error
        return cls(name, popen, pidfd, ours)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def pidfd(self) -> int:
        """Readable once the process is dead. Raises `Closed`."""
        if self._pidfd < 0:
            raise Closed(f"{self.name}: closed, its death is confirmed")
        return self._pidfd

    @property
    def alive(self) -> bool:
        """False once its death is confirmed."""
        return self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """As of `subprocess`: negative for a signal, None while it lives."""
        return self._popen.poll()

    def ask_stop(self) -> None:
        """End of file for the child."""
        if os.getpid() == self._owner_pid and self._asked_at is None:
            self._asked_at = time.monotonic()
            self.channel.end()

    def kill(self) -> None:
        """SIGKILL. Its death is confirmed by `wait` or `close`."""
        if os.getpid() == self._owner_pid and self._pidfd >= 0:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, deadline: Deadline) -> bool:
        """Wait for its death until `deadline`; True once it is confirmed. Its messages are taken in meanwhile, so
        that it can end, and are there for `channel.receive` afterwards."""
        while self.alive and not deadline.expired:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if self.channel.take_in(_UNREAD_MESSAGES_MAX):
                poller.register(self.channel.fileno(), select.POLLIN)
            poller.poll(deadline.left * 1000)
        dead = not self.alive
        if dead:
            self.channel.take_in(_UNREAD_MESSAGES_MAX)
        return dead

    def close(self, deadline: Deadline) -> CloseReport:
        """End of file, a voluntary end until `VOLUNTARY_FRACTION`, then SIGKILL and its confirmation.

        The fraction counts from `ask_stop`, so that siblings asked together are killed together, not in turn.
        `failed` when it had ended by itself with an exit code or by a signal, `killed` when it had to be ended:
        its memory is freed either way. `running`, `kept` only if not even its death could be confirmed; a second
        close tries that again. One thread at a time. Messages that had arrived stay in the channel.
        """
        if os.getpid() != self._owner_pid:
            return CloseReport(self.name, cause="a forked child closes nothing of its parent's")
        if self._report is not None and self._report.ended is not Outcome.RUNNING:
            return self._report
        began = time.monotonic()
        self.ask_stop()
        asked_at = self._asked_at or began
        if not self.wait(Deadline(asked_at + VOLUNTARY_FRACTION * (deadline.at - asked_at))):
            self.kill()
            self.wait(Deadline.after(max(deadline.left, _DEATH_GRACE_S)))
        self._report = self._verdict()
        self._report.seconds = time.monotonic() - began
        if self._report.ended is not Outcome.RUNNING:
            self.channel.close()
            os.close(self._pidfd)
            self._pidfd = -1
        return self._report

    def _verdict(self) -> CloseReport:
        report, code = CloseReport(self.name), self.exit_code
        if code is None:
            report.ended, report.memory = Outcome.RUNNING, Memory.KEPT
            report.cause = f"pid {self.pid}: SIGKILL was sent, its death is not confirmed"
        elif code == -signal.SIGKILL and self._killed:
            report.ended, report.cause = Outcome.KILLED, "it did not end at the end of its channel"
        elif code != 0:
            how = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
            report.ended, report.cause = Outcome.FAILED, f"it had ended with {how}"
            report.error = TierBroken(f"{self.name}: its process ended with {how}")
        return report


@dataclass(frozen=True, slots=True)
class Birth:
    """What a child starts with."""

    channel: Channel
    fds: dict[str, int]
    args: list[str]


def born() -> Birth:
    """A child's first call: bind its life to its parent's, and take over what `Process.start` handed to it."""
    given = {key: int(number) for key, _, number in (part.partition("=") for part in sys.argv[1].split(","))}
    die_with_parent(given.pop("parent"))
    channel = Channel.inherited(given.pop("channel"))
    for fd in given.values():
        os.set_inheritable(fd, False)  # noqa: FBT003 - takes no keyword
    return Birth(channel, given, sys.argv[2:])


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when the thread that started it ends; at once if `parent_pid` is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise TierBroken(f"no parent-death signal: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it ended before the signal was set
        os._exit(1)


@dataclass(slots=True)
class Pause:
    """The growing pause before a child is started again. Pure: times come from the caller."""

    first_s: float = 0.5
    longest_s: float = 60.0
    steady_s: float = 60.0
    """A child that was up for this long starts again from `first_s`."""
    _pause_s: float = 0.0
    _up_at: float | None = None

    def up(self, now: float) -> None:
        """The child has come up."""
        self._up_at = now

    def next(self, now: float) -> float:
        """The child has ended: seconds to wait before it is started again."""
        steady = self._up_at is not None and now - self._up_at >= self.steady_s
        self._up_at = None
        grown = self.first_s if steady else max(self.first_s, 2 * self._pause_s)
        self._pause_s = min(grown, self.longest_s)
        return self._pause_s


def _stderr() -> int:
    """Where the child's standard output goes: native clients print, and our own output may be read by a program."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _environment() -> dict[str, str]:
    """Ours, and the folder of this kvtier if the child would not find it by itself."""
    env = dict(os.environ)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    found = (*site.getsitepackages(), site.getusersitepackages())
    if os.path.realpath(root) not in map(os.path.realpath, found):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return env

"""The region's hand-over: its descriptor and layout table, over an abstract socket.

Rules:
1. Local rank 0 serves, the scheduler side and the other ranks receive, in any order of start. Every other
   rank serves the scheduler side in turn, so that the scheduler side has a pipe to each of them.
2. The socket has no file, and its name binds user, engine, kvtier name and rank: nobody else is met.
   Both ends check the other's user. The listener closes when all expected have the region; a late
   joiner gets the same memfd or an error, never a new one.
3. The connection stays open as the rank's pipe. `closed` is sent on it only after the rank's region was
   unmapped. End of file alone does not free anything while the rank's process is known to live.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time

import msgspec

from kvtier.errors import Closed, ConfigError, TierBroken
from kvtier.memory.region import Region
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport, Memory
from kvtier.runtime.worker import Loop, Stop

log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 64 << 10
"""one packet; the layout table of a few thousand layers fits"""
RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
CONTROL_BYTES = socket.CMSG_SPACE(4 * 4)
"""room for four descriptors: more than the one that is right, so that a wrong number is seen"""
RETRY_SECONDS = 0.02
ANSWER_SECONDS = 2.0
"""a receiver that takes longer to acknowledge is dropped; it may come again"""


class Hand(msgspec.Struct, frozen=True, tag=True):
    """Server to receiver, with the descriptor. `table` is the caller's own, opaque here."""

    size_bytes: int
    pid: int
    nonce: bytes
    table: bytes


class Have(msgspec.Struct, frozen=True, tag=True):
    """Receiver to server: the descriptor has arrived."""

    nonce: bytes


class RankClosed(msgspec.Struct, frozen=True, tag=True):
    """Rank to scheduler side: nothing of this rank touches the region any more."""


_encode = msgspec.msgpack.Encoder().encode
_hand = msgspec.msgpack.Decoder(Hand)
_have = msgspec.msgpack.Decoder(Have)
_rank_closed = msgspec.msgpack.Decoder(RankClosed)


def handover_name(engine_id: str, name: str, *, rank: int = 0, uid: int | None = None) -> str:
    """Address of the abstract socket of one rank of one engine; two that differ in anything never meet."""
    fields = (str(os.getuid() if uid is None else uid), engine_id, name, str(rank))
    digest = hashlib.sha256()
    for text in (part.encode() for part in fields):
        digest.update(len(text).to_bytes(4, "big") + text)
    return f"\0kvtier-{fields[0]}-{digest.hexdigest()[:40]}"


def check_peer(connection: socket.socket, uid: int) -> int:
    """The other end's process id. Raises TierBroken where it belongs to another user than `uid`."""
    pid, peer_uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if peer_uid != uid:
        raise TierBroken(
            f"process {pid} of user {peer_uid} is at the other end, only user {uid} may hand over or receive"
        )
    return int(pid)


class RankPipe:
    """A rank's ends of its pipes. Owned by the rank's scope, above the region: closed after it.

    While the region stays mapped nothing is said and the pipes stay open until the process exits.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._pid = os.getpid()
        self._lock = threading.Lock()  # connections are added by the server's thread
        self._connections: list[socket.socket] = []

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.append(connection)

    def ask_stop(self) -> None:
        """Nothing to do before the region is closed."""

    def close(self, deadline: Deadline) -> CloseReport:
        """Say `closed` and hang up, if the region is unmapped. Never blocks."""
        if os.getpid() != self._pid:
            return CloseReport("pipe", cause="a forked child says nothing for its parent")
        if not self._region.closed:
            # Kept, so that a second close, which may free the region, comes here again.
            return CloseReport("pipe", memory=Memory.KEPT, cause="nothing said: the region is still mapped")
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(OSError):  # the receiver is gone: nobody to tell
                connection.settimeout(0)
                connection.send(_encode(RankClosed()))
            connection.close()
        return CloseReport("pipe")


class HandoverServer:
    """Serves a region to `expected` receivers from a thread of its own. Borrows region and pipe."""

    def __init__(
        self,
        name: str,
        region: Region,
        table: bytes,
        expected: int,
        *,
        pipe: RankPipe,
        deadline: Deadline | None = None,
    ) -> None:
        """`deadline`: when to stop waiting for receivers; None: at close."""
        self._hand = _encode(Hand(region.size_bytes, os.getpid(), secrets.token_bytes(16), table))
        if len(self._hand) > MESSAGE_BYTES_MAX:
            raise ConfigError(f"the layout table has {len(table)} bytes, {MESSAGE_BYTES_MAX} are the limit")
        self._nonce = _hand.decode(self._hand).nonce
        self._name, self._region, self._pipe = name, region, pipe
        self._expected, self._deadline = expected, deadline
        self.handed = 0
        """receivers that have the region"""
        self._listener: socket.socket | None = None
        self._loop: Loop | None = None

    def start(self) -> None:
        """Listen. Raises ConfigError where the same engine, name and rank already serve on this host."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(self._name)
            listener.listen(self._expected + 8)
            listener.settimeout(0)
            self._listener = listener
            self._loop = Loop("handover", self._serve).start()
        except OSError as e:
            listener.close()
            if e.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(
                f"{self._name[1:]} is served already: two connectors of one engine need different names, "
                f"and two engines different ids"
            ) from e
        except BaseException:
            listener.close()
            raise

    @property
    def done(self) -> bool:
        """All expected receivers have the region; the socket is closed, or about to be."""
        return self.handed >= self._expected

    def ask_stop(self) -> None:
        if self._loop is not None:
            self._loop.ask_stop()

    def close(self, deadline: Deadline) -> CloseReport:
        """Stop listening. The pipes live on in the RankPipe."""
        return CloseReport("handover") if self._loop is None else self._loop.close(deadline)

    def _serve(self, stop: Stop) -> None:
        waiting: dict[int, tuple[socket.socket, Deadline]] = {}
        assert self._listener is not None
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(stop, select.POLLIN)
        try:
            while not self.done:
                ready = {fd for fd, _ in poll.poll(self._pause_ms(waiting))}
                if stop.asked:
                    return
                if self._deadline is not None and self._deadline.expired:
                    log.error("%d of %d have taken the region in time", self.handed, self._expected)
                    return
                if self._listener.fileno() in ready:
                    connection = self._give()
                    if connection is not None:
                        waiting[connection.fileno()] = (connection, Deadline.after(ANSWER_SECONDS))
                        poll.register(connection, select.POLLIN)
                for fd, (connection, until) in list(waiting.items()):
                    if fd in ready or until.expired:
                        poll.unregister(fd)
                        del waiting[fd]
                        self._settle(connection)
        finally:
            self._listener.close()
            for connection, _ in waiting.values():
                connection.close()

    def _pause_ms(self, waiting: dict[int, tuple[socket.socket, Deadline]]) -> float | None:
        ends = [until for _, until in waiting.values()] + ([self._deadline] if self._deadline else [])
        return min(end.left for end in ends) * 1000 + 1 if ends else None

    def _give(self) -> socket.socket | None:
        """Accept one receiver and send it the region."""
        assert self._listener is not None
        connection = None
        try:
            connection, _ = self._listener.accept()
            connection.settimeout(0)
            check_peer(connection, os.getuid())
            socket.send_fds(connection, [self._hand], [self._region.fd])
        except (OSError, TierBroken, Closed) as e:
            log.warning("a receiver of the region was turned away: %s", e)
            if connection is not None:
                connection.close()
            return None
        return connection

    def _settle(self, connection: socket.socket) -> None:
        """Read the acknowledgement; without a right one the receiver does not count."""
        try:
            if _have.decode(connection.recv(MESSAGE_BYTES_MAX)).nonce == self._nonce:
                self._pipe.add(connection)
                self.handed += 1
                return
        except (OSError, msgspec.DecodeError) as e:
            log.warning("a receiver of the region did not acknowledge it: %s", e)
        connection.close()


class Received(msgspec.Struct, frozen=True):
    """What a receiver got. Owns `fd` (until it is attached) and `connection` (until it is linked)."""

    fd: int
    size_bytes: int
    table: bytes
    pid: int
    connection: socket.socket


def receive(name: str, deadline: Deadline) -> Received:
    """Take the region from `name`, waiting for its server until `deadline`.

    Raises TierBroken: nobody served in time (not started, or all expected had it already), another user
    holds the name, or the other end spoke nonsense.
    """
    why: OSError | None = None
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(max(deadline.left, 0.001))
        try:
            connection.connect(name)
            pid = check_peer(connection, os.getuid())
            return _take(connection, pid)
        except OSError as e:
            connection.close()
            why = e
        except BaseException:
            connection.close()
            raise
        if deadline.expired:
            raise TierBroken(
                f"no region from {name[1:]} in time ({why}): its rank is not up, or all it expected have it already"
            ) from why
        time.sleep(min(RETRY_SECONDS, deadline.left))


def _take(connection: socket.socket, pid: int) -> Received:
    # Not socket.recv_fds: it drops its flags, and the descriptor would be inherited by every child.
    message, control, flags, _ = connection.recvmsg(MESSAGE_BYTES_MAX, CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = [fd for level, kind, data in control if (level, kind) == RIGHTS for fd in array.array("i", data)]
    try:
        if not message:
            raise ConnectionResetError(errno.ECONNRESET, "hung up before handing over")
        if len(fds) != 1 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise TierBroken(f"a hand-over with {len(fds)} descriptors and flags {flags:#x} instead of one and none")
        hand = _hand.decode(message)
        connection.send(_encode(Have(hand.nonce)))
    except msgspec.DecodeError as e:
        _close_all(fds)
        raise TierBroken(f"process {pid} handed over something unreadable: {e}") from e
    except BaseException:
        _close_all(fds)
        raise
    return Received(fds[0], hand.size_bytes, hand.table, pid or hand.pid, connection)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class RankLink:
    """The scheduler side's end of a rank's pipe, with a pidfd of the rank. Takes the connection over."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection: socket.socket | None = connection
        self._closed = False
        self._said = False
        self._dead = False
        connection.settimeout(0)
        self._epoll = select.epoll()
        self._epoll.register(connection, select.EPOLLIN)
        self._pidfd = -1
        with contextlib.suppress(ProcessLookupError):  # dead already: end of file says so
            self._pidfd = os.pidfd_open(pid)
            self._epoll.register(self._pidfd, select.EPOLLIN)
        self._read()
        if self._connection is None and not self._said and self._pidfd >= 0:
            # Hung up before the pidfd was opened: the number may belong to another process by now.
            self._epoll.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def fileno(self) -> int:
        """Readable when `closed` may have changed."""
        return self._epoll.fileno()

    @property
    def dead(self) -> bool:
        """The rank's process is known to have ended, all its threads included."""
        if self._pidfd >= 0 and not self._dead:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            self._dead = bool(poll.poll(0))
        return self._dead

    @property
    def closed(self) -> bool:
        """Nothing of this rank touches the region any more: it said so, or its process is dead."""
        if not self._closed and not self._epoll.closed:
            self._read()
            gone = self._connection is None and self._pidfd < 0
            self._closed = self._said or gone or self.dead
        return self._closed

    def _read(self) -> None:
        if self._connection is None:
            return
        try:
            message = self._connection.recv(MESSAGE_BYTES_MAX)
            if message:
                _rank_closed.decode(message)
                self._said = True
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError) as e:
            log.warning("the pipe of rank process %d broke: %s", self.pid, e)
        self._epoll.unregister(self._connection)
        self._connection.close()
        self._connection = None

    def ask_stop(self) -> None:
        """Nothing to wait for."""

    def close(self, deadline: Deadline) -> CloseReport:
        """Hang up; says in `cause` whether the rank had closed."""
        report = CloseReport("link")
        if not self._epoll.closed:
            if not self.closed:
                report.cause = f"the rank in process {self.pid} has not closed yet"
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
            self._epoll.close()
        return report

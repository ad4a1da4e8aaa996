"""What the children of the process tests do; run with `-m` by `Process.start`."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from kvtier.runtime.process import Birth, Process, born


def echo(birth: Birth) -> None:
    """Send back what comes, then `bye` at the end of file."""
    while not birth.channel.closed_by_peer:
        select.select([birth.channel], [], [])
        for message in birth.channel.receive():
            birth.channel.send(message)
    birth.channel.send(b"bye")


def wedge(birth: Birth) -> None:
    """Never end by itself."""
    birth.channel.send(b"up")
    while True:
        time.sleep(60)


def flood(birth: Birth) -> None:
    """At the end of file, owe more messages than a socket holds."""
    birth.channel.send(b"up")
    while not birth.channel.closed_by_peer:
        select.select([birth.channel], [], [])
        birth.channel.receive()
    os.set_blocking(birth.channel.fileno(), True)
    for number in range(300):
        os.write(birth.channel.fileno(), number.to_bytes(4, "big") * 20_000)


def exits(birth: Birth) -> None:
    sys.exit(int(birth.args[1]))


def segfault(birth: Birth) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def parent(birth: Birth) -> None:
    """Have a child of its own, and say its pid."""
    process = Process.start("grandchild", "runtime_child", args=["wedge"])
    select.select([process.channel], [], [])
    birth.channel.send(str(process.pid).encode())
    while True:
        time.sleep(60)


def tells(birth: Birth) -> None:
    """Read the file that was handed over; say what else there is."""
    text = os.read(birth.fds["file"], 100)
    os.write(1, b"to standard output\n")
    # As many as a parent may have handed over; the listing's own descriptor is gone by the time it is looked at.
    numbers = [int(fd) for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in numbers if fd > 2 and os.path.lexists(f"/proc/self/fd/{fd}")]
    path = sys.path[0]
    birth.channel.send(repr((text.decode(), names, sys.stdin.read(), path, os.getpgrp() == os.getpid())).encode())


if __name__ == "__main__":
    birth = born()
    globals()[birth.args[0]](birth)

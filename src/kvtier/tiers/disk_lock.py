"""The directory of one engine below a disk tier's path, and the kernel lock that makes it ours.

Rules: `path` holds `engine-<k>/`, k below `engines_max`; the first one whose lock is free is taken. The lock is the
kernel's, so it says nothing when its owner is dead; the text in the file is for humans. Whatever a human must
put right is a ConfigError that names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.runtime.deadline import Deadline

LOCK_NAME = "lock"
LOCK_WAIT_S = 1.0
"""how long a start waits for a predecessor that is still dying"""
_RETRY_S = 0.02
_ENGINE = re.compile(r"engine-(\d+)")


@dataclass(slots=True)
class EngineDirectory:
    """A locked directory. `fd` is the directory, `lock_fd` holds the lock until it is closed."""

    path: Path
    fd: int
    lock_fd: int

    def close(self) -> None:
        """Give the directory to the next one. The lock goes last."""
        for fd in (self.fd, self.lock_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.lock_fd = -1


def take_directory(path: Path, engines_max: int) -> EngineDirectory:
    """Create what is missing and lock the first free engine directory; waits up to LOCK_WAIT_S. Raises ConfigError."""
    deadline = Deadline.after(LOCK_WAIT_S)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            for k in range(engines_max):
                taken = _try_lock(path / f"engine-{k}")
                if taken is not None:
                    return taken
            if deadline.expired:
                break
            time.sleep(_RETRY_S)
    except FileExistsError as error:
        raise ConfigError(f"path = {str(path)!r}: {error.filename} is not a directory; give another path") from error
    except OSError as error:
        raise ConfigError(
            f"path = {str(path)!r}: {error.filename or path} cannot be used ({error.strerror}); "
            "make it a directory that this user may write to, or give another path"
        ) from error
    holders = "; ".join(f"engine-{k}: {holder_text(path / f'engine-{k}')}" for k in range(engines_max))
    raise ConfigError(
        f"path = {str(path)!r}: all {engines_max} engine directories are in use ({holders}); "
        f"give this engine another path, or raise engines_max above {engines_max}"
    )


def _try_lock(path: Path) -> EngineDirectory | None:
    path.mkdir(mode=0o700, exist_ok=True)
    lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        text = f"pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode()
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, text, 0)
        return EngineDirectory(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), lock_fd)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    except BaseException:
        os.close(lock_fd)
        raise


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock of an engine directory. Takes it for no longer than it looks."""
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: two inspections do not see each other as holders, and a start that meets one waits it out.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def holder_text(path: Path) -> str:
    """Who wrote the lock file, in words; whether it still holds the lock is `is_locked`'s to say."""
    text = ""
    with contextlib.suppress(OSError):
        text = (path / LOCK_NAME).read_text(encoding="utf-8", errors="replace").strip()
    return text or "holder unknown"


def engine_directories(path: Path) -> list[Path]:
    """The engine directories below `path`, by number."""
    found = [(int(match[1]), entry) for entry in path.iterdir() if (match := _ENGINE.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found) if entry.is_dir()]

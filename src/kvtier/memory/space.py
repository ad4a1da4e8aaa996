"""How much memory this process may still take: the machine's, and that of its control groups (v2 and v1).

A group's file cache that is not in use counts as available: the kernel gives it back before it kills.
"""

from __future__ import annotations

from pathlib import Path

UNLIMITED = 1 << 60
"""limits at or above this many bytes mean "no limit" (v1 writes a huge number for that)"""


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken now without swapping or running into a limit; never negative."""
    free = [_machine_bytes(proc)]
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            mounts = (cgroup, cgroup / "unified")
            free += [_group_bytes(group, *names) for mount in mounts for group in _upwards(mount, path)]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free += [_group_bytes(group, *names) for group in _upwards(cgroup / "memory", path)]
    return max(0, min(free))


def _machine_bytes(proc: Path) -> int:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return UNLIMITED


def _upwards(mount: Path, path: str) -> list[Path]:
    """The group's folder and its parents up to the mount; in a container only some of them exist."""
    inside = Path(path.lstrip("/"))
    return [mount / part for part in (inside, *inside.parents)]


def _group_bytes(group: Path, limit_file: str, usage_file: str, reclaimable: str) -> int:
    limit, usage = _text(group / limit_file).strip(), _text(group / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= UNLIMITED:
        return UNLIMITED
    cached = 0
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == reclaimable:
            cached = int(value)
    return int(limit) - int(usage) + cached


def _text(path: Path) -> str:
    """Content of a kernel file; empty where this kernel or container does not have it."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""

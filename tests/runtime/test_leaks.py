"""The leak plugin finds each kind of leak, names it, and lets pass what goes by itself."""

from __future__ import annotations

import pytest

# One leak a test, each undone by the next module's end or by the process's; `kept` holds what must stay.
LEAKING = """
import gc, mmap, os, socket, subprocess, sys, tempfile, threading, time
import pytest
from kvtier.runtime.scope import Scope
from kvtier.testing import leaks

leaks.GRACE_S = 0.1
leaks.SHM_FOLDER = os.getcwd() + "/shm"  # not the machine's: other runs would see it as their leak
os.mkdir(leaks.SHM_FOLDER)
kept = []
go = threading.Event()

def test_descriptor(): os.open("/dev/null", os.O_RDONLY)
def test_thread():
    threading.Thread(target=go.wait, name="straggler", daemon=True).start()
def test_child(): kept.append(subprocess.Popen(["sleep", "60"]))
def test_zombie():
    kept.append(subprocess.Popen(["true"]))
    os.waitid(os.P_PID, kept[-1].pid, os.WEXITED | os.WNOWAIT)
def test_grandchild():
    kept.append(subprocess.Popen(["sh", "-c", "sleep 61; true"], stdout=subprocess.DEVNULL))
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if any(words.endswith("(sleep 61)") for words in leaks.take()["child process"].values()):
            break
def test_mapping():
    fd = os.memfd_create("kvtier-region")
    os.truncate(fd, 8192)
    kept.append(mmap.mmap(fd, 8192))
    os.close(fd)
def test_native_thread():
    import _thread
    kept.append(_thread.start_new_thread(go.wait, ()))
def test_shm_name():
    kept.append(tempfile.NamedTemporaryFile(dir=leaks.SHM_FOLDER, prefix="leak_", delete=False).name)
def test_temp_file():
    fd, name = tempfile.mkstemp(prefix="kvtier-")
    os.close(fd)
    kept.append(name)
def test_abstract_socket():
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(f"\\0kvtier-test-{os.getpid()}")
    kept.append(sock)
def test_dropped_scope(): Scope("forgotten")

def test_clean(): pass
def test_slow_end():
    threading.Thread(target=threading.Event().wait, args=(0.03,)).start()
def test_cycle():
    class Holder: pass
    holder = Holder()
    holder.self, holder.file = holder, open("/dev/null")
@pytest.mark.leaks_ok("on purpose")
def test_excused(): os.open("/dev/null", os.O_RDONLY)
@pytest.mark.leaks_ok
def test_excused_without_a_reason(): pass
def test_fails():
    os.open("/dev/null", os.O_RDONLY)
    assert False
def test_ignored():
    kept.append(open("/dev/urandom"))
    kept.append(tempfile.NamedTemporaryFile(dir=leaks.SHM_FOLDER, prefix="psm_", delete=False).name)

def teardown_module():
    go.set()
    for thing in kept:
        if isinstance(thing, subprocess.Popen):
            thing.kill()
            thing.wait()
        elif isinstance(thing, str) and os.path.exists(thing):
            os.unlink(thing)
"""

FOUND = {
    "test_descriptor": "descriptor: * -> /dev/null",
    "test_thread": "thread: *straggler*",
    "test_child": "child process: *sleep 60*",
    "test_zombie": "child process: *never waited for*",
    "test_grandchild": "child process: *(sleep 61)",
    "test_mapping": "mapping: /memfd:kvtier-region *8192 bytes",
    "test_native_thread": "native thread: tid *",
    "test_shm_name": "name in /dev/shm: */shm/leak_*",
    "test_temp_file": "temp file: */kvtier-*",
    "test_abstract_socket": "abstract socket: @kvtier-test-*",
    "test_dropped_scope": "scope dropped, not closed: forgotten",
    "test_excused_without_a_reason": "leaks_ok needs its reason*",
}
QUIET = {"test_clean", "test_slow_end", "test_cycle", "test_excused", "test_ignored", "test_fails"}


@pytest.mark.processes
def test_each_kind_of_leak_fails_its_test_and_is_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(LEAKING)
    result = pytester.runpytest_subprocess("-p", "kvtier.testing.leaks", "-p", "no:cacheprovider", timeout=60)
    for test, words in FOUND.items():
        result.stdout.fnmatch_lines([f"*ERROR at * of {test} *", f"*{words}"])
    for test in QUIET:
        result.stdout.no_fnmatch_line(f"*ERROR at * of {test} *")
    result.assert_outcomes(passed=len(FOUND) - 1 + len(QUIET) - 1, failed=1, errors=len(FOUND))

"""The floors: who may import whom, what stays unimported, and the only places that start threads and processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src/kvtier").rglob("*.py"))
HEAVY = ("torch", "vllm", "transformers")


def imported_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after it ran `code`."""
    printed = "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", code + printed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_no_import_goes_upwards() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["kvtier", "kvtier.cli.main"])
def test_importing_kvtier_needs_neither_torch_nor_an_engine(module: str) -> None:
    loaded = imported_by(f"import {module}")
    assert module.partition(".")[0] in loaded
    assert loaded.isdisjoint(HEAVY)


def test_importing_kvtier_does_not_bring_the_command_line_along() -> None:
    assert imported_by("import kvtier").isdisjoint({"typer", "rich"})


def test_every_module_outside_of_the_engines_own_loads_without_torch() -> None:
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__") for path in SOURCES
    ]
    free = [name for name in modules if name.split(".")[1:2] not in (["vllm"], ["transformers"])]
    assert "kvtier.config" in free
    assert imported_by("import " + ", ".join(free)).isdisjoint(HEAVY)


STARTERS = {
    "runtime/worker.py": ("threading.Thread", "threading.Timer", "concurrent.futures", "_thread"),
    "runtime/process.py": (
        "subprocess", "multiprocessing", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.popen",
    ),
}


def names_used(tree: ast.AST) -> set[str]:
    """Dotted names as written, with what `from x import y` stands for."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def starts(source: str, allowed_in: str) -> set[str]:
    return {name for name in names_used(ast.parse(source)) if name.startswith(STARTERS[allowed_in])}


@pytest.mark.parametrize("allowed_in", STARTERS)
def test_threads_and_processes_start_in_one_place_only(allowed_in: str) -> None:
    found = {
        str(path.relative_to(ROOT)): used
        for path in SOURCES
        if not path.match(f"kvtier/{allowed_in}")
        and "testing" not in path.relative_to(ROOT / "src/kvtier").parts
        and (used := starts(path.read_text(), allowed_in))
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "allowed_in"),
    [
        ("import threading\nthreading.Thread(target=print)", "runtime/worker.py"),
        ("from threading import Lock, Thread", "runtime/worker.py"),
        ("from concurrent.futures import ThreadPoolExecutor", "runtime/worker.py"),
        ("import subprocess", "runtime/process.py"),
        ("from subprocess import Popen", "runtime/process.py"),
        ("import os\nif os.fork(): pass", "runtime/process.py"),
    ],
)
def test_the_search_for_starts_sees_each_way_to_write_one(source: str, allowed_in: str) -> None:
    assert starts(source, allowed_in)
    assert not starts("import os, threading\nlock = threading.Lock()\nos.close(1)", allowed_in)

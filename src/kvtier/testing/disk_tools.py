"""Raw access to a disk tier's directory, past the tier."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiers import disk_format as fmt
from kvtier.tiers.disk_extent import charge, read_index_file
from kvtier.tiers.disk_index import BASE_BYTES


def size_for(blocks: int, row_bytes: int) -> int:
    """A `size` with room for `blocks` blocks of one size class."""
    return BASE_BYTES + charge(blocks, fmt.slot_bytes_of(row_bytes))


def used_bytes(path: Path) -> int:
    """What the directory and everything below it takes of its file system."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in [".", *files]:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@dataclass
class Place:
    file: Path
    offset: int
    slot: int
    slot_bytes: int
    layout: bytes

    def flip(self, bit: int) -> None:
        with self.file.open("r+b") as file:
            file.seek(self.offset + bit // 8)
            byte = file.read(1)[0]
            file.seek(self.offset + bit // 8)
            file.write(bytes([byte ^ (1 << bit % 8)]))

    def write(self, data: bytes) -> None:
        with self.file.open("r+b") as file:
            file.seek(self.offset)
            file.write(data)


def locate(path: Path, key: bytes) -> Place:
    """Where the index says that the block of `key` lies: its newest record, older ones may be left of former stores."""
    found: list[tuple[int, Place]] = []
    for index in sorted(path.glob("engine-*/*.index")):
        head, table = read_index_file(index)
        assert head is not None
        for slot in fmt.live_slots(table, head.slot_bytes).tolist():
            record = table[slot]
            if record["key"].tobytes()[: int(record["key_bytes"])] == key:
                rows, layout = index.with_suffix(".rows"), record["layout"].tobytes()
                place = Place(rows, slot * head.slot_bytes, slot, head.slot_bytes, layout)
                found.append((int(record["stamp"]), place))
    assert found, f"{key.hex()} is nowhere in {path}"
    return max(found, key=lambda pair: pair[0])[1]

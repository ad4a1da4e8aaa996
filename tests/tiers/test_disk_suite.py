"""The shipped conformance suite on the disk tier, past the page cache and through it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import pytest

from kvtier.config import Size
from kvtier.memory.layout import Rows
from kvtier.testing.disk_tools import locate, size_for
from kvtier.testing.tier_suite import NAMESPACE, Damage, TierSuite, key_of
from kvtier.tiers import disk_format as fmt
from kvtier.tiers.base import Tier
from kvtier.tiers.disk import DiskConfig, open_disk


class TestDiskTier(TierSuite):
    direct: ClassVar[Literal["auto", "off"]] = "auto"

    @pytest.fixture(autouse=True)
    def _own_directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "tier"

    def open(self, rows: Rows, namespace: bytes, *, blocks_max: int | None = None) -> Tier:
        size = size_for(blocks_max or 1000, rows.layout.classes[0].row_bytes)
        return open_disk(DiskConfig(path=str(self.path), size=Size(size), direct=self.direct), rows, namespace)

    def damage(self, key: bytes, how: Damage) -> None:
        at = locate(self.path, key)
        if how is Damage.GONE:
            at.file.unlink()
        elif how is Damage.SHORT:
            with at.file.open("r+b") as file:
                file.truncate(at.offset + fmt.HEADER_BYTES + 100)
        elif how is Damage.BIT:
            at.flip(fmt.HEADER_BYTES * 8 + 12345)
        else:
            row = b"x" * (at.slot_bytes - fmt.HEADER_BYTES)
            header = bytearray(fmt.HEADER_BYTES)
            ours = fmt.Identity(fmt.digest16(NAMESPACE), at.layout, len(row))
            fmt.write_header(memoryview(header), ours, key_of(777), fmt.checksum(memoryview(row)))
            at.write(bytes(header) + row)


class TestDiskTierThroughThePageCache(TestDiskTier):
    direct = "off"

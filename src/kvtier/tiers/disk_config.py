"""The options of a disk tier, as a user writes them."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtier.config import BadValue, Size


class DiskConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a tier of type `disk`."""

    type: Literal["disk"] = "disk"
    path: str
    """a directory of a local file system; kept between runs"""
    size: Size
    """bytes an engine may take there, everything included; never exceeded"""
    engines_max: int = 1
    """engines that may share `path`, each with `size` of its own"""
    direct: Literal["auto", "off"] = "auto"
    """`auto`: past the page cache where the file system can; `off`: always through it"""
    fsync: Literal["none", "interval"] = "none"
    """`none`: a power loss may cost any block; `interval`: only those of the last `fsync_interval_s`"""
    fsync_interval_s: float = 5.0
    threads: int = 2
    """threads that read, and as many that write"""
    write_queue_blocks_max: int = 1024
    write_queue_size_max: Size = Size("4GiB")
    read_queue_blocks_max: int = 8192
    """beyond these, transfers are refused"""

    def __post_init__(self) -> None:
        if not self.path:
            raise BadValue("path", self.path, "must name a directory")
        limits = ("engines_max", "threads", "write_queue_blocks_max", "write_queue_size_max", "read_queue_blocks_max")
        for field in limits:
            if getattr(self, field) < 1:
                raise BadValue(field, getattr(self, field), "must be at least 1")
        if not self.fsync_interval_s > 0:
            raise BadValue("fsync_interval_s", self.fsync_interval_s, "must be more than 0 seconds")

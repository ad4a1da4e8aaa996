"""What the disk tier writes: the header before each row, and the index table beside each extent.

Everything is little endian and of fixed size. A directory holds extents; an extent is two files:

* `<n>.rows`: equal slots, each a 4096-byte header and then the row, padded to whole pages;
* `<n>.index`: a 4096-byte head, then one 128-byte record a slot, written in place.

Rules: the header in the slot decides what a slot holds; a record only says where to look, so a stale or
torn record is a miss. Every byte of a header, a record and a row is under a checksum.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.tiers.base import Cause

VERSION = 1
HEADER_BYTES = 4096
RECORD_BYTES = 128
KEY_BYTES_MAX = 64
PAGE_BYTES = 4096

_HEADER_MAGIC = b"KVTIERBK"
_HEAD_MAGIC = b"KVTIERIX"
# magic, version, key bytes, row bytes, namespace, layout, checksum of the row, key
_HEADER = struct.Struct("<8sIIQ16s16s16s64s")
_CRC = struct.Struct("<I")
# magic, version, slots, slot bytes
_HEAD = struct.Struct("<8sIIQ")

# check, stamp, row bytes, state, key bytes, spare, namespace, layout, key
_RECORD = struct.Struct("<QQQHHI16s16s64s")
RECORD = np.dtype(
    [
        ("check", "<u8"),
        ("stamp", "<u8"),
        ("row_bytes", "<u8"),
        ("state", "<u2"),
        ("key_bytes", "<u2"),
        ("spare", "<u4"),
        ("namespace", "<u8", 2),
        ("layout", "<u8", 2),
        ("key", "V64"),
    ]
)
_WORDS = RECORD_BYTES // 8
_LIVE = 1
EMPTY_RECORD = bytes(RECORD_BYTES)

_HEAD_TEXT = f"""
kvtier disk tier: index table of the extent whose rows lie in the file of the same number.
After this page follows one record of {RECORD_BYTES} bytes a slot: check, stamp of the last use, row bytes, state, key
bytes, spare, namespace, layout, key. Records are written in place, after the slot they speak of. Why a table and not
a journal that is appended to: the table is bounded without ever being compacted, one record is one small write,
and a start reads {RECORD_BYTES} bytes a block and no payload. It need not be right: what a slot holds is said by the
header in the slot, which is checked at every read, so a record that is old or torn costs a miss and nothing else.
"""


class Identity(msgspec.Struct, frozen=True, gc=False):
    """Everything that must agree, beside the key, before a stored row may be used."""

    namespace: bytes
    """16 bytes"""
    layout: bytes
    """16 bytes"""
    row_bytes: int


class Head(msgspec.Struct, frozen=True, gc=False):
    """The head of an index table."""

    version: int
    slots: int
    slot_bytes: int


Records = npt.NDArray[Any]
"""a run of records, dtype RECORD"""


def digest16(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages, in bytes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def slot_bytes_of(row_bytes: int) -> int:
    return HEADER_BYTES + pages(row_bytes)


def index_bytes(slots: int) -> int:
    return pages(HEADER_BYTES + slots * RECORD_BYTES)


def checksum(row: memoryview) -> bytes:
    """16 bytes over the whole row. One call: for big buffers it releases the interpreter lock."""
    digest: bytes = xxhash.xxh3_128_digest(row)
    return digest


# The header of a slot


def write_header(into: memoryview, identity: Identity, key: bytes, row_checksum: bytes) -> None:
    """Fill the 4096 bytes of `into`."""
    into[:] = bytes(HEADER_BYTES)
    _HEADER.pack_into(
        into,
        0,
        _HEADER_MAGIC,
        VERSION,
        len(key),
        identity.row_bytes,
        identity.namespace,
        identity.layout,
        row_checksum,
        key,
    )
    _CRC.pack_into(into, HEADER_BYTES - 4, zlib.crc32(into[: HEADER_BYTES - 4]))


def check_header(header: memoryview, identity: Identity, key: bytes) -> tuple[Cause, bytes]:
    """Whether the slot holds `key` for `identity`, and the checksum that its row must have."""
    (crc,) = _CRC.unpack_from(header, HEADER_BYTES - 4)
    magic, version, key_bytes, row_bytes, namespace, layout, row_checksum, found = _HEADER.unpack_from(header)
    if zlib.crc32(header[: HEADER_BYTES - 4]) != crc:
        # Nothing in it can be believed, not even that it is a header; a slot never written is all zeros.
        return (Cause.CHECKSUM if any(header) else Cause.FOREIGN), b""
    ours = (_HEADER_MAGIC, VERSION, identity.row_bytes, identity.namespace, identity.layout, key)
    if (magic, version, row_bytes, namespace, layout, found[:key_bytes]) != ours:
        return Cause.FOREIGN, b""
    return Cause.OK, row_checksum


# The index table


def head_page(slots: int, slot_bytes: int) -> bytes:
    """The first page of an index table: a binary head, then text that says why it is one."""
    page = bytearray(HEADER_BYTES)
    _HEAD.pack_into(page, 0, _HEAD_MAGIC, VERSION, slots, slot_bytes)
    text = _HEAD_TEXT.encode()
    page[256 : 256 + len(text)] = text
    _CRC.pack_into(page, HEADER_BYTES - 4, zlib.crc32(page[: HEADER_BYTES - 4]))
    return bytes(page)


def read_head(page: bytes) -> Head | None:
    """The head of an index table; None where it is torn, or none of ours.

    Magic, version and the checksum at the page's end keep their places in every version.
    """
    if len(page) < HEADER_BYTES:
        return None
    magic, version, slots, slot_bytes = _HEAD.unpack_from(page)
    (crc,) = _CRC.unpack_from(page, HEADER_BYTES - 4)
    if magic != _HEAD_MAGIC or zlib.crc32(page[: HEADER_BYTES - 4]) != crc:
        return None
    return Head(version, slots, slot_bytes)


# The check of a record must be cheap for 100,000 of them at once: a multilinear sum modulo 2**64 over its
# 64-bit words with odd factors, which no change of a single word survives.
_FACTORS = np.frombuffer(hashlib.shake_256(b"kvtier record").digest(8 * (_WORDS - 1)), "<u8") | np.uint64(1)
_FACTOR_INTS = [int(factor) for factor in _FACTORS]
_REST = struct.Struct(f"<{_WORDS - 1}Q")
_MASK = (1 << 64) - 1


def pack_record(identity: Identity, key: bytes, stamp: int) -> bytes:
    """The record of a slot that now holds `key`, last used at `stamp`."""
    rest = _RECORD.pack(0, stamp, identity.row_bytes, _LIVE, len(key), 0, identity.namespace, identity.layout, key)[8:]
    check: int = sum(word * factor for word, factor in zip(_REST.unpack(rest), _FACTOR_INTS, strict=True)) & _MASK
    return check.to_bytes(8, "little") + rest


def record_checks(table: Records) -> npt.NDArray[np.uint64]:
    """What the check of each record must be."""
    words = table.view("<u8").reshape(len(table), _WORDS)[:, 1:]
    sums: npt.NDArray[np.uint64] = (words * _FACTORS).sum(axis=1, dtype=np.uint64)
    return sums


def live_slots(table: Records, slot_bytes: int) -> npt.NDArray[np.intp]:
    """The slots whose records are whole and fit the extent."""
    good = (
        (table["state"] == _LIVE)
        & (table["key_bytes"] > 0)
        & (table["key_bytes"] <= KEY_BYTES_MAX)
        & (table["row_bytes"] <= slot_bytes - HEADER_BYTES)
        & (table["check"] == record_checks(table))
    )
    return np.flatnonzero(good)


def take(table: Records, slots: npt.NDArray[np.intp] | list[int]) -> Records:
    """`table[slots]`; plain words are copied several times faster than records."""
    return table.view("<u8").reshape(len(table), _WORDS)[slots].reshape(-1).view(RECORD)


def keys_of(table: Records) -> list[bytes]:
    """The key of each record, which must be live."""
    whole = np.ascontiguousarray(table["key"]).view(np.uint8).reshape(len(table), KEY_BYTES_MAX)
    found = np.empty(len(table), object)
    for length in np.unique(table["key_bytes"]).tolist():
        chosen = np.flatnonzero(table["key_bytes"] == length)
        found[chosen] = np.ascontiguousarray(whole[chosen, :length]).view(f"V{length}").ravel().tolist()
    keys: list[bytes] = found.tolist()
    return keys


def restamp(table: Records, slots: list[int], stamps: list[int]) -> None:
    """Give the records of `slots` new stamps, in place."""
    touched = table[slots]
    touched["stamp"] = stamps
    touched["check"] = record_checks(touched)
    table[slots] = touched

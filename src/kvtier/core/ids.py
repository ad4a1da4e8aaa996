"""Names of things: keys, requests, transfers, tiers. Plain values, equal in every process."""

from __future__ import annotations

from typing import NewType

Key = NewType("Key", bytes)
"""Identity of a block: 32 bytes of chained digest, then its group id (2 bytes, big endian)."""

DIGEST_BYTES = 32
KEY_BYTES = DIGEST_BYTES + 2

RequestId = str
TransferId = int
AskId = int
TierName = str


def make_key(digest: bytes, group: int) -> Key:
    """Key of the block of `group` that ends where `digest` ends."""
    return Key(digest + group.to_bytes(2, "big"))


def group_of(key: Key) -> int:
    return int.from_bytes(key[DIGEST_BYTES:], "big")

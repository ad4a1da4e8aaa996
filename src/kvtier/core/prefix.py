"""Keys of a prompt's blocks: a chain of digests, each binding all tokens before it.

    h(-1) = SHA-256("kvtier", format, namespace, salt)      h(i) = SHA-256(h(i-1), tokens(i), extras(i))

A unit is what the engine hashes at: its smallest block. Every field is length-prefixed, so that no two
different inputs run into each other. Equal in every process and on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import ArrayLike

from kvtier.core.ids import Key, make_key

FORMAT = b"1"


def joined(*fields: bytes) -> bytes:
    """The fields one after the other, each behind its length."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def namespace_digest(parts: dict[str, str]) -> bytes:
    """Digest of everything that changes a block's bytes, by name; the order of the names does not matter."""
    return sha256(joined(*(f.encode() for name in sorted(parts) for f in (name, parts[name])))).digest()


def chain_start(namespace: bytes, salt: bytes = b"") -> bytes:
    """h(-1): the digest that a prompt's chain begins with."""
    return sha256(joined(b"kvtier", FORMAT, namespace, salt)).digest()


class Chain:
    """The chain of one request, extended as its tokens come. `digests[i]` ends unit i."""

    __slots__ = ("digests", "start", "unit_tokens")

    def __init__(self, start: bytes, unit_tokens: int) -> None:
        self.start = start
        self.unit_tokens = unit_tokens
        self.digests: list[bytes] = []

    def extend(self, tokens: ArrayLike, extras: Sequence[bytes] | None = None) -> None:
        """Add whole units. `tokens`: int token ids, a multiple of the unit; `extras`: one a unit, or None."""
        data = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
        size = 4 * self.unit_tokens
        if len(data) % size:
            raise ValueError(f"{len(data) // 4} tokens are not whole units of {self.unit_tokens}")
        digest = self.digests[-1] if self.digests else self.start
        add = self.digests.append
        if extras is None:
            for at in range(0, len(data), size):
                # A digest and a unit have fixed lengths, and what follows is either nothing or a tagged extra.
                digest = sha256(digest + data[at : at + size]).digest()
                add(digest)
            return
        for at, extra in zip(range(0, len(data), size), extras, strict=True):
            tail = joined(extra) if extra else b""
            digest = sha256(digest + data[at : at + size] + tail).digest()
            add(digest)

    def keys(self, group: int, units_per_block: int, first: int = 0) -> list[Key]:
        """Keys of the group's full blocks from block `first` on."""
        ends = self.digests[(first + 1) * units_per_block - 1 :: units_per_block]
        return [make_key(digest, group) for digest in ends]
